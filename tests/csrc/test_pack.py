"""agentgrpo._C at its boundary: errors, references, arrays that change, hostile arguments."""

from __future__ import annotations

import contextlib
import sys
import threading
import tracemalloc
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgrpo import _C
from agentgrpo.types import Int32

IDS, LOGP = np.array([1, 2, 3], np.int32), np.array([-0.5, -1.0, -2.0], np.float32)
TWICE = np.repeat(IDS, 2)


def arguments(**changed: object) -> list[Any]:
    """A good call of TreePlan with some arguments replaced: one rollout, prompt and answer.

    Its arrays are Python's own, which refuse to grow while a C function holds their memory.
    """
    call: dict[str, object] = {
        "token_ids": [array("i", [1, 2, 3]), IDS],
        "logprobs": [None, array("f", [-0.5, -1.0, -2.0])],
        "advantages": array("f", [0.0, 1.0]),
        "num_segments": array("i", [2]),
        "samples": array("i", [0]),
        "weights": array("f", [0.5]),
        "max_tokens": 5,
        "drop_zero_advantage": True,
        "share_prefixes": True,
        "whole_rollouts": False,
    }
    return list({**call, **changed}.values())


def grow_all(call: list[Any]) -> None:
    """Append to every array of the call: a BufferError if one is still held."""
    for argument in call:
        for x in argument if isinstance(argument, list) else [argument]:
            if isinstance(x, array):
                x.append(x[0])


BAD_CALLS: list[tuple[dict[str, object], type[Exception], str]] = [
    ({"token_ids": (IDS, IDS)}, TypeError, "token_ids and logprobs must be lists"),
    ({"token_ids": [IDS]}, ValueError, "num_segments sums to 2, but there are 1 token_ids, 2"),
    ({"logprobs": [None]}, ValueError, "2 token_ids, 1 logprobs and 2 advantages"),
    ({"num_segments": np.array([-2, 4], np.int32), "samples": np.zeros(2, np.int32),
      "weights": np.ones(2, np.float32)}, ValueError, "rollout 0: num_segments is -2"),
    ({"num_segments": [2]}, TypeError, "num_segments: expected a 1-d int32 array"),
    ({"advantages": np.ones(1, np.float32)}, ValueError, "2 logprobs and 1 advantages"),
    ({"advantages": np.ones(2)}, ValueError, "advantages: .* of another type"),
    ({"advantages": np.array([0, np.inf], np.float32)}, ValueError,
     "rollout 0: segment 1: advantage is not finite"),
    ({"samples": np.zeros(2, np.int32)}, ValueError, "1 rows, but 2 samples and 1 weights"),
    ({"samples": np.array([7], np.int32), "weights": np.array([np.inf], np.float32)}, ValueError,
     "rollout 7: weight is not finite"),
    ({"weights": np.array([np.nan], np.float32)}, ValueError, "rollout 0: weight is not finite"),
    ({"token_ids": [IDS, IDS.astype(np.int64)]}, ValueError, "rollout 0: segment 1: token_ids: "),
    ({"token_ids": [IDS, [1, 2, 3]]}, TypeError, "rollout 0: segment 1: token_ids: "),
    ({"token_ids": [TWICE[::2], IDS]}, ValueError, "segment 0: token_ids: .* not contiguous"),
    ({"token_ids": [IDS, IDS.reshape(3, 1)]}, ValueError, "segment 1: token_ids: .* not 1-d"),
    ({"logprobs": [None, LOGP.astype(np.float64)]}, ValueError, "segment 1: logprobs: "),
    ({"logprobs": [None, LOGP[:2]]}, ValueError, "segment 1: 2 logprobs for 3 token_ids"),
    ({"logprobs": [None, LOGP * np.inf]}, ValueError, r"segment 1: logprobs\[0\] is not finite"),
    ({"logprobs": [LOGP, LOGP]}, ValueError, "segment 0: sampled from the first token on"),
    ({"max_tokens": 4}, ValueError, "rollout 0: 5 tokens to lay out, more than max_tokens=4"),
    ({"max_tokens": 2**31}, ValueError, r"max_tokens must be in \[1, 2\*\*31\)"),
    ({"max_tokens": "5"}, TypeError, "integer"),
    ({"share_prefixes": np.ones(2)}, ValueError, "ambiguous"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "message"), BAD_CALLS)
def test_a_refused_call_keeps_nothing(
    changed: dict[str, object], error: type[Exception], message: str
) -> None:
    before = [sys.getrefcount(x) for x in (IDS, LOGP)]
    call = arguments(**changed)
    with pytest.raises(error, match=message):
        _C.TreePlan(*call)
    grow_all(call)
    del call
    assert [sys.getrefcount(x) for x in (IDS, LOGP)] == before


def test_calls_free_their_memory() -> None:
    calls = [arguments(), *(arguments(**changed) for changed, *_ in BAD_CALLS)]
    tracemalloc.start()
    try:
        for repeat in range(40):
            if repeat == 20:  # caches are warm
                before = tracemalloc.get_traced_memory()[0]
            for call in calls:
                with contextlib.suppress(TypeError, ValueError):
                    plan = _C.TreePlan(*call)
                    plan.lay_out(0, np.empty(36, np.int32))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20 * 8, f"{grown} bytes more after 20 rounds"


def laid_out(plan: _C.TreePlan) -> list[Int32]:
    trees = [np.empty(3 * tokens + 7 * terms, np.int32) for tokens, terms in plan.sizes()]
    for number, tree in enumerate(trees):
        plan.lay_out(number, tree)
    return trees


def test_a_plan_holds_its_arrays_and_nothing_after_it() -> None:
    before = sys.getrefcount(IDS)
    for _ in range(100):
        call = arguments()
        plan = _C.TreePlan(*call)
        with pytest.raises(BufferError):
            grow_all(call)
        (memory,) = laid_out(plan)
        assert plan.sizes() == [(5, 3)]
        del plan
        grow_all(call)
    del call
    assert sys.getrefcount(IDS) == before
    assert sys.getrefcount(memory) == 2  # `memory` and the call
    whole = [1, 2, 3, 1, 2, 0, 1, 2, 3, 4, 5, 5, 5, 5, 5, 2, 3, 4, 1, 2, 3, 0, 0, 0, 0, 0, 0]
    assert memory.tolist()[:27] == whole
    assert memory[27:].view(np.float32).tolist() == [-0.5, -1, -2, 1, 1, 1, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("tree", "memory", "error", "message"),
    [
        (1, np.empty(36, np.int32), IndexError, "tree 1 of 1"),
        (-1, np.empty(36, np.int32), IndexError, "tree -1 of 1"),
        ("0", np.empty(36, np.int32), TypeError, "integer"),
        (0, np.empty(35, np.int32), ValueError, "memory: expected 36 elements, got 35"),
        (0, np.empty(36, np.float32), ValueError, "memory: .* of another type"),
        (0, np.empty(72, np.int32)[::2], ValueError, "memory: .* not contiguous"),
        (0, memoryview(bytes(144)).cast("i"), ValueError, "memory: .* read-only"),
        (0, None, TypeError, "memory: expected a 1-d int32 array"),
    ],
)
def test_a_tree_is_only_laid_out_where_it_fits(
    tree: Any, memory: Any, error: type[Exception], message: str
) -> None:
    plan = _C.TreePlan(*arguments())
    with pytest.raises(error, match=message):
        plan.lay_out(tree, memory)


def test_arrays_that_change_meanwhile_give_nonsense_but_no_crash() -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 2, size).astype(np.int32) for size in range(1, 65)]
    logp = [-np.ones(size, np.float32) for size in range(1, 65)]
    stop = threading.Event()

    def scribble() -> None:
        while not stop.is_set():
            for x in ids:
                x[:] = 1 - x

    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        for _ in range(300):
            call = arguments(
                token_ids=[x for own in ids for x in (IDS, own)],
                logprobs=[x for own in logp for x in (None, own)],
                advantages=np.ones(128, np.float32),
                num_segments=np.full(64, 2, np.int32),
                samples=np.arange(64, dtype=np.int32),
                weights=np.ones(64, np.float32),
                max_tokens=200,
            )
            plan = _C.TreePlan(*call)
            sizes = plan.sizes()
            assert sum(terms for _, terms in sizes) == sum(range(1, 65))
            for (tokens, terms), tree in zip(sizes, laid_out(plan), strict=True):
                tout, row = tree[2 * tokens : 3 * tokens], tree[3 * tokens : 3 * tokens + terms]
                assert ((tout > np.arange(tokens)) & (tout <= tokens)).all()
                assert ((row >= 0) & (row < tokens)).all()
    finally:
        stop.set()
        writer.join()


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=2),
    st.binary(max_size=9), st.just([]), st.just([IDS]), st.just([None]), st.just(IDS),
    st.just(LOGP), st.just(np.int32(3)), st.just(np.zeros((2, 2), np.int32)), st.just([IDS, IDS]),
    st.just([None, LOGP]), st.just(np.array([2], np.int32)), st.just(np.ones(1, np.float32)),
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.lists(ANYTHING, max_size=10), st.dictionaries(st.integers(0, 8), ANYTHING, max_size=2))
def test_no_argument_crashes(anything: list[object], swaps: dict[int, object]) -> None:
    call = arguments()
    for place, value in swaps.items():
        call[place] = value
    for function, args in (
        (_C.TreePlan, anything),
        (_C.TreePlan, call),
        (_C.ids_from_list, anything[:1]),
        (_C.TagScanner, anything[:2]),
    ):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            function(*args)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ((1, 2), TypeError, "expected a list, got <class 'tuple'>"),
        ([1, -1], ValueError, r"ids\[1\] is not in \[0, 2\*\*31\)"),
        ([2**31], ValueError, r"ids\[0\] is not in \[0, 2\*\*31\)"),
        ([2**200], ValueError, r"ids\[0\] is not in \[0, 2\*\*31\)"),
        ([1, 2.0], TypeError, "an integer is required"),
        ([None], TypeError, "an integer is required"),
    ],
)
def test_bad_ids_are_named(ids: list[int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _C.ids_from_list(ids)

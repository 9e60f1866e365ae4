"""agentgrpo._C at its boundary: errors, references, arrays that change, hostile arguments."""

from __future__ import annotations

import contextlib
import sys
import tracemalloc
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgrpo import _C
from agentgrpo.types import Int32

IDS = np.array([1, 2, 3, 1, 2, 3], np.int32)
LOGP = np.array([-0.5, -1.0, -2.0], np.float32)


def ints(*values: int) -> Int32:
    return np.array(values, np.int32)


def arguments(**changed: object) -> list[Any]:
    """A good call of TreePlan with some arguments replaced: one rollout, prompt and answer.

    Most arrays are Python's own, which refuse to grow while a C function holds their memory.
    """
    call: dict[str, object] = {
        "token_ids": IDS,
        "logprobs": LOGP,
        "starts": array("i", [0, 3]),
        "sizes": array("i", [3, 3]),
        "logprob_starts": array("i", [-1, 0]),
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
    for x in call:
        if isinstance(x, array):
            x.append(x[0])


BAD_CALLS: list[tuple[dict[str, object], type[Exception], str]] = [
    ({"token_ids": [IDS]}, TypeError, "a bytes-like object is required, not 'list'"),
    ({"token_ids": IDS.astype(np.int64)}, ValueError, "token_ids: expected .* int32 .* of 'l'"),
    ({"token_ids": IDS[::2]}, ValueError, "token_ids: expected a contiguous"),
    ({"token_ids": IDS.reshape(6, 1)}, ValueError, "token_ids: .* got a 2-d one"),
    ({"logprobs": LOGP.astype(np.float64)}, ValueError, "logprobs: expected .* float32 .* of 'd'"),
    ({"starts": ints(0)}, ValueError, "starts: expected 2, one per segment, got 1"),
    ({"sizes": ints(3, 3, 3)}, ValueError, "sizes: expected 2, one per segment, got 3"),
    ({"advantages": np.ones(1, np.float32)}, ValueError, "advantages: expected 2, .* got 1"),
    ({"starts": ints(0, -1)}, ValueError, "segment 1: 3 tokens from -1 on, sampled from 0 on"),
    ({"starts": ints(0, 4)}, ValueError, "segment 1: 3 tokens from 4 on, .* of 6 and 3"),
    ({"sizes": ints(3, -1)}, ValueError, "segment 1: -1 tokens from 3 on"),
    ({"sizes": ints(3, 2**31 - 1)}, ValueError, "segment 1: 2147483647 tokens from 3 on"),
    ({"logprob_starts": ints(-1, 1)}, ValueError, "segment 1: 3 tokens from 3 on, sampled from 1"),
    ({"logprob_starts": ints(-1, -2)}, ValueError, "sampled from -2 on"),
    ({"logprob_starts": ints(0, 0)}, ValueError, "segment 0: sampled from the first token on"),
    ({"num_segments": [2]}, TypeError, "a bytes-like object is required"),
    ({"num_segments": ints(-2, 4), "samples": ints(0, 0), "weights": np.ones(2, np.float32)},
     ValueError, "num_segments: expected no negative number"),
    ({"advantages": np.ones(2)}, ValueError, "advantages: expected .* of 'd'"),
    ({"advantages": np.array([0, np.inf], np.float32)}, ValueError,
     "rollout 0: segment 1: advantage is not finite"),
    ({"samples": ints(0, 0)}, ValueError, "samples: expected 1, one per row, got 2"),
    ({"weights": np.ones(2, np.float32)}, ValueError, "weights: expected 1, one per row, got 2"),
    ({"samples": ints(7), "weights": np.array([np.inf], np.float32)}, ValueError,
     "rollout 7: weight is not finite"),
    ({"weights": np.array([np.nan], np.float32)}, ValueError, "rollout 0: weight is not finite"),
    ({"max_tokens": 4}, ValueError, "rollout 0: 5 tokens to lay out, more than max_tokens=4"),
    ({"max_tokens": 2**31}, ValueError, r"max_tokens must be in \[1, 2\*\*31\)"),
    ({"max_tokens": "5"}, TypeError, "integer"),
    ({"share_prefixes": np.ones(2)}, ValueError, "ambiguous"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "message"), BAD_CALLS)
def test_a_failed_call_releases_its_buffers(
    changed: dict[str, object], error: type[Exception], message: str
) -> None:
    before = [sys.getrefcount(x) for x in (IDS, LOGP)]
    call = arguments(**changed)
    with pytest.raises(error, match=message):
        _C.TreePlan(*call)
    grow_all(call)
    del call
    assert [sys.getrefcount(x) for x in (IDS, LOGP)] == before


def held_by_this_file() -> int:
    """Bytes that its lines have asked for: other tests' threads may ask for some meanwhile."""
    traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, __file__)])
    return sum(trace.size for trace in traces.traces)


def test_calls_free_their_memory() -> None:
    calls = [arguments(), *(arguments(**changed) for changed, *_ in BAD_CALLS)]
    tracemalloc.start()
    try:
        for repeat in range(40):
            if repeat == 20:  # caches are warm
                before = held_by_this_file()
            for call in calls:
                with contextlib.suppress(TypeError, ValueError):
                    plan = _C.TreePlan(*call)
                    plan.lay_out(0)
        grown = held_by_this_file() - before
    finally:
        tracemalloc.stop()
    assert grown < 20 * 8, f"{grown} bytes more after 20 rounds"


def columns(runs: bytearray, count: int) -> Int32:
    return np.frombuffer(runs, np.int32).reshape(count, -1)


def test_a_plan_holds_its_arrays_until_it_is_freed() -> None:
    before = sys.getrefcount(IDS)
    for _ in range(100):
        call = arguments()
        plan = _C.TreePlan(*call)
        with pytest.raises(BufferError):
            grow_all(call)
        tokens, terms = plan.lay_out(0)
        assert plan.sizes() == [(5, 3)]
        del plan
        grow_all(call)
    del call
    assert sys.getrefcount(IDS) == before
    assert sys.getrefcount(tokens) == sys.getrefcount(terms) == 2  # the name and the call
    assert columns(tokens, 4).T.tolist() == [[0, 0, 0, 5], [3, 3, 3, 5]]
    (term,) = columns(terms, 8).T
    assert term[:6].tolist() == [0, 3, 0, 2, 0, 0]
    assert term[6:].view(np.float32).tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [(1, IndexError, "tree 1 of 1"), (-1, IndexError, "tree -1 of 1"), ("0", TypeError, "integer")],
)
def test_an_index_out_of_range_raises(tree: Any, error: type[Exception], message: str) -> None:
    plan = _C.TreePlan(*arguments())
    with pytest.raises(error, match=message):
        plan.lay_out(tree)


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=2),
    st.binary(max_size=9), st.just([]), st.just([IDS]), st.just([None]), st.just(IDS),
    st.just(LOGP), st.just(np.int32(3)), st.just(np.zeros((2, 2), np.int32)), st.just([IDS, IDS]),
    st.just([None, LOGP]), st.just(np.array([2], np.int32)), st.just(np.ones(1, np.float32)),
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.lists(ANYTHING, max_size=13), st.dictionaries(st.integers(0, 12), ANYTHING, max_size=2))
def test_random_arguments_do_not_crash(anything: list[object], swaps: dict[int, object]) -> None:
    call = arguments()
    for place, value in swaps.items():
        call[place] = value
    for args in (anything, call):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            _C.TreePlan(*args)

"""pack_tree against a plain-Python unrolling of its batches: nothing lost, changed or repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgrpo.kernels.delta_pack import pack_terms, pack_tokens
from agentgrpo.learn.batch import PADDING, PackedBatch
from agentgrpo.learn.packing import pack_tree
from agentgrpo.models.encoding import ids_from_list
from agentgrpo.types import Group, Rollout, Segment
from tests.learn.given import group_of, observed, rollout_of, sampled

CPU = torch.device("cpu")
Prefix = tuple[int, ...]
Term = tuple[int, Prefix, int, float, float, float]


def unrolled_prefixes(batch: PackedBatch) -> list[Prefix]:
    """For each packed token, the ids it may see, itself last: what attention computes."""
    return [
        tuple(int(batch.input_ids_T[k]) for k in range(q + 1) if q < batch.tout_T[k])
        for q in range(len(batch.input_ids_T))
    ]


def unrolled_terms(batch: PackedBatch) -> list[Term]:
    prefixes = unrolled_prefixes(batch)
    return [
        (int(sample), prefixes[row], int(target), float(old), float(advantage), float(weight))
        for row, target, sample, old, advantage, weight in zip(
            batch.row_N, batch.target_N, batch.sample_N,
            batch.old_logp_N, batch.advantage_N, batch.weight_N,
            strict=True,
        )
    ]  # fmt: skip


def expected_terms(
    groups: Sequence[Group], weights: Sequence[float], drop_zero: bool
) -> list[Term]:
    terms = []
    for index, r in enumerate(r for g in groups for r in g.rollouts):
        if not (drop_zero and r.advantage == 0):
            for row in r.rows:
                terms += terms_of(row, [r.advantage] * len(row), index, weights[index])
    return terms


def terms_of(
    row: Sequence[Segment], advantages: Sequence[float], index: int, weight: float
) -> list[Term]:
    terms = []
    ids: Prefix = ()
    for segment, advantage in zip(row, advantages, strict=True):
        for i, token in enumerate(segment.token_ids.tolist()):
            if segment.logprobs is not None:
                logp = float(segment.logprobs[i])
                terms.append((index, ids, token, logp, float(np.float32(advantage)), weight))
            ids = (*ids, token)
    return terms


def check(
    groups: Sequence[Group], max_tokens: int, weights: Sequence[float], drop_zero: bool = True
) -> Sequence[PackedBatch]:
    """Check every property of a packing; returns it."""
    batches = pack_tree(
        groups, max_tokens=max_tokens, weights=weights, drop_zero_advantage=drop_zero
    )
    home: dict[int, int] = {}
    for index, batch in enumerate(batches):
        prefixes = unrolled_prefixes(batch)
        assert 0 < len(prefixes) <= max_tokens
        assert [len(p) - 1 for p in prefixes] == batch.positions_T.tolist()
        # each distinct prefix once, and only those that a term of this batch depends on
        needed = {p[:n] for _, p, *_ in unrolled_terms(batch) for n in range(1, len(p) + 1)}
        assert len(prefixes) == len(needed)
        assert set(prefixes) == needed
        for sample in batch.sample_N.tolist():
            assert home.setdefault(sample, index) == index
    got = Counter(term for batch in batches for term in unrolled_terms(batch))
    assert got == Counter(expected_terms(groups, weights, drop_zero))
    return batches


def segment_lists(draw: st.DrawFn) -> list[Segment]:
    """Segments over two ids, so that unrelated rollouts share, nest and repeat each other."""
    ids = st.lists(st.integers(0, 1), max_size=5)
    segments = [observed(*draw(st.lists(st.integers(0, 1), min_size=1, max_size=3)))]
    for is_sampled in draw(st.lists(st.booleans(), max_size=4)):
        make = sampled if is_sampled else observed
        segments.append(make(*draw(ids)))
    return segments


@st.composite
def steps(draw: st.DrawFn) -> list[Group]:
    """Groups whose rollouts start anew or fork from one another, sharing Segment objects."""
    groups = []
    earlier: list[list[Segment]] = []
    for size in draw(st.lists(st.integers(0, 4), max_size=3)):
        rollouts = []
        for _ in range(size):
            segments = segment_lists(draw)
            if draw(st.booleans()) and earlier:
                parent = draw(st.sampled_from(earlier))
                segments = parent[: draw(st.integers(1, len(parent)))] + segments
            earlier.append(segments)
            rollouts.append(
                rollout_of(*segments, advantage=draw(st.sampled_from([-1.5, 0.0, 2.0])))
            )
        groups.append(group_of(*rollouts))
    return groups


@settings(max_examples=400, deadline=None)
@given(steps(), st.integers(0, 8), st.booleans())
def test_every_term_occurs_once_with_its_prefix(
    groups: list[Group], slack: int, drop_zero: bool
) -> None:
    rollouts = [r for g in groups for r in g.rollouts]
    longest = max((len(r.token_ids) for r in rollouts), default=0)
    weights = [0.25 * (i + 1) for i in range(len(rollouts))]
    check(groups, max(longest + slack, 1), weights, drop_zero)


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(0, 8), st.booleans())
def test_triton_expands_the_same_batches(groups: list[Group], slack: int, share: bool) -> None:
    """Trees and rows, expanded by Triton in its interpreter as on a GPU."""
    rollouts = [r for g in groups for r in g.rollouts]
    longest = max((len(r.token_ids) for r in rollouts), default=0)
    batches = pack_tree(groups, max_tokens=max(longest + slack, 1), share_prefixes=share)
    for batch in batches:
        ids, logp = batch.deltas.on(CPU)
        distinct = {id(s): len(s.token_ids) for r in rollouts for s in r.segments}
        assert len(ids) == sum(distinct.values()) + PADDING
        runs = [torch.from_numpy(x) for x in (batch.runs_4R, batch.runs_8Q)]
        tokens = pack_tokens(ids, runs[0], batch.num_tokens, backend="triton")
        terms = pack_terms(ids, logp, runs[1], batch.num_terms, backend="triton")
        for result, expected in ((tokens, batch.tokens(CPU)), (terms, batch.terms(CPU))):
            assert all(map(torch.equal, result, expected))
        assert batch.tout_T.tolist() == tokens.tout_T.tolist()
        assert batch.positions_T.tolist() == tokens.positions_T.tolist()
        uses = np.bincount(batch.row_N)
        assert batch.uses_U.tolist() == uses[uses > 0].tolist()
        assert batch.labels[0].tolist() == batch.sample_N.tolist()


@st.composite
def forked(draw: st.DrawFn) -> tuple[list[Rollout], list[list[list[Term]]]]:
    """Rollouts of one to four rows with advantages of their own, and the terms of each row."""
    rollouts, terms = [], []
    for index in range(draw(st.integers(0, 5))):
        rows = [segment_lists(draw) for _ in range(draw(st.integers(1, 4)))]
        count = sum(map(len, rows))
        values = draw(st.lists(st.sampled_from([0.0, 0.0, 1.5]), min_size=count, max_size=count))
        r = rollout_of(*rows[-1], closed_rows=rows[:-1], segment_advantages=values)
        each = iter(values)
        rollouts.append(r)
        terms.append([terms_of(row, [next(each) for _ in row], index, 1.0) for row in rows])
    return rollouts, terms


def kept(rows: list[list[Term]], *, whole: bool) -> list[list[Term]]:
    """Those rows of a rollout that move the loss; where they are read together, all if any does."""
    moving = [row for row in rows if any(advantage for *_, advantage, _ in row)]
    return rows if whole and moving else moving


def num_tokens(rows: list[list[Term]], *, share: bool) -> int:
    """Distinct prefixes that the terms of some rows need, of all rows together or of each."""
    every = rows if not share else [[term for row in rows for term in row]]
    return sum(len({p[:n] for _, p, *_ in own for n in range(1, len(p) + 1)}) for own in every)


@settings(max_examples=400, deadline=None)
@given(forked(), st.booleans(), st.booleans(), st.integers(0, 8))
def test_whole_rollouts_keeps_rows_in_one_batch(
    drawn: tuple[list[Rollout], list[list[list[Term]]]], whole: bool, share: bool, slack: int
) -> None:
    rollouts, rows = drawn
    expected = [kept(own, whole=whole) for own in rows]
    units = expected if whole else [[row] for own in expected for row in own]
    largest = max((num_tokens(unit, share=share) for unit in units), default=0)
    options: dict[str, Any] = {"share_prefixes": share, "whole_rollouts": whole}
    batches = pack_tree([group_of(*rollouts)], max_tokens=max(1, largest) + slack, **options)
    assert Counter(term for batch in batches for term in unrolled_terms(batch)) == Counter(
        term for own in expected for row in own for term in row
    )
    assert all(len(batch.input_ids_T) <= largest + slack for batch in batches)
    if whole:
        homes = [sample for batch in batches for sample in set(batch.sample_N.tolist())]
        assert len(homes) == len(set(homes))
    if largest > 1:
        with pytest.raises(ValueError, match=rf"rollout \d: {largest} tokens to lay out"):
            pack_tree([group_of(*rollouts)], max_tokens=largest - 1, **options)


def test_two_row_rollouts_share_their_prompt() -> None:
    """A prompt of 10 and two rows of 5 each: four rollouts in a batch of 50, two in one of 30."""
    rollouts = [
        rollout_of(
            *(observed(*[9] * 10), observed(30 + i), sampled(*[2] * 4, 0)),
            closed_rows=[[observed(*[9] * 10), sampled(20 + i, *[1] * 4, 0)]],
        )
        for i in range(4)
    ]
    for budget, homes in ((50, [[0, 1, 2, 3]]), (30, [[0, 1], [2, 3]]), (29, [[0], [1], [2], [3]])):
        batches = pack_tree([group_of(*rollouts)], max_tokens=budget, whole_rollouts=True)
        assert [sorted(set(b.sample_N.tolist())) for b in batches] == homes
    with pytest.raises(
        ValueError, match=r"rollout \d: 20 tokens to lay out in one batch, as its rows' terms"
    ):
        pack_tree([group_of(*rollouts)], max_tokens=19, whole_rollouts=True)
    assert len(pack_tree([group_of(*rollouts)], max_tokens=19)) == 8


def test_subtree_that_fits_is_not_cut() -> None:
    """Groups of 10 + 4 * 5 tokens and a budget for two of them: whole groups, two a batch."""
    groups = [
        group_of(*(rollout_of(observed(*[g] * 10), sampled(20 + i, *[i] * 5)) for i in range(4)))
        for g in range(6)
    ]
    batches = check(groups, 65, [1.0] * 24)
    assert [len(b.input_ids_T) for b in batches] == [60, 60, 60]
    assert all(set(b.sample_N.tolist()) >= {4 * (b.sample_N[0] // 4)} for b in batches)


def test_subtree_over_budget_is_cut_at_branch_points() -> None:
    """A root of 10, two branches of 5, each with three leaves of 6: a branch fits, both do not."""
    leaves = [
        rollout_of(observed(*[9] * 10), observed(*[b] * 5), sampled(20 + i, *[i] * 5, 0))
        for b in range(2)
        for i in range(3)
    ]
    batches = check([group_of(*leaves)], 40, [1.0] * 6)
    assert [len(b.input_ids_T) for b in batches] == [33, 33]
    assert [sorted(set(b.sample_N.tolist())) for b in batches] == [[0, 1, 2], [3, 4, 5]]
    # a budget for two leaves at most: five branches' worth of path would be 6 batches
    batches = check([group_of(*leaves)], 27, [1.0] * 6)
    assert [len(b.input_ids_T) for b in batches] == [27, 27, 21, 21]


@pytest.mark.parametrize("small_first", [False, True])
def test_rest_of_a_cut_subtree_is_filled_with_siblings(small_first: bool) -> None:
    """Whichever comes first: the leaf before one in its batch need not be the one it left."""
    big = [rollout_of(observed(1), sampled(i, *[i] * 9, 0)) for i in range(10, 13)]
    small = [rollout_of(observed(2 - 2 * small_first), sampled(i, i, i, 0)) for i in range(10, 13)]
    batches = check([group_of(*big), group_of(*small)], 21, [1.0] * 6)
    assert [len(b.input_ids_T) for b in batches] == [21, 21]


def test_largest_subtrees_are_packed_first() -> None:
    """Rests of 3, 6, 4, 7 tokens after a shared one fill two batches of 11, in no other pairs."""
    rests = [sampled(10 + i, *[5] * (n - 1), 0) for i, n in enumerate((3, 6, 4, 7))]
    batches = check([group_of(*(rollout_of(observed(1), rest) for rest in rests))], 11, [1.0] * 4)
    assert sorted(sorted(set(b.sample_N.tolist())) for b in batches) == [[0, 3], [1, 2]]


def test_batches_are_a_sequence() -> None:
    groups = [group_of(*(rollout_of(observed(1), sampled(9 + i, 2, 3)) for i in range(3)))]
    batches = pack_tree(groups, max_tokens=4)
    assert [b.sample_N.tolist() for b in batches] == [[i] * 3 for i in range(3)]
    assert batches[-1].sample_N.tolist() == batches[2].sample_N.tolist()
    assert [b.sample_N[0] for b in batches[1:]] == [1, 2]
    with pytest.raises(IndexError):
        batches[3]
    first = batches[0]
    first.target_N[:] = 0  # a batch is its reader's own
    assert batches[0].target_N.tolist() == [9, 2, 3]


def alone(*segments: Segment, **fields: Any) -> list[Group]:
    return [group_of(rollout_of(*segments, **fields))]


def one_bad(segment: Segment) -> list[Group]:
    return [group_of(rollout_of(observed(1), last)) for last in (sampled(2), segment)]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (one_bad(observed(3, -4)), r"rollout 1: segment 1: token_ids\[1\] is -4, not an id"),
        (one_bad(sampled(3, 4, logp=np.nan)), r"rollout 1: segment 1: logprobs\[0\] is not finite"),
        (one_bad(sampled(3, logp=-np.inf)), r"rollout 1: segment 1: logprobs\[0\] is not finite"),
        (alone(sampled(3)), "rollout 0: segment 0: sampled from the first token on"),
        (alone(observed(1), sampled(2), advantage=np.nan), "segment 1: advantage is not"),
        (alone(observed(*range(9)), sampled(2, 3)), "rollout 0: 10 tokens to lay out"),
    ],
)
def test_invalid_rollouts_are_named(groups: list[Group], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_tree(groups, max_tokens=9)


def test_invalid_weights_are_refused() -> None:
    groups = [group_of(rollout_of(observed(1), sampled(2)))]
    with pytest.raises(ValueError, match="weights: expected 1, one per rollout, got 2"):
        pack_tree(groups, max_tokens=9, weights=[1.0, 1.0])
    with pytest.raises(ValueError, match="rollout 0: weight is not finite"):
        pack_tree(groups, max_tokens=9, weights=[np.inf])
    with pytest.raises(ValueError, match=r"max_tokens must be in \[1, 2\*\*31\), got 0"):
        pack_tree(groups, max_tokens=0)


def test_engine_id_lists_become_arrays() -> None:
    ids = [0, 5, 2**31 - 1]
    assert ids_from_list(ids).tolist() == ids
    assert ids_from_list(ids).dtype == np.int32
    assert ids_from_list([]).shape == (0,)
    for wrong, error in (
        ([1, -1], OverflowError),
        ([1, 2**31], OverflowError),
        ([1.0], TypeError),
        ([None], TypeError),
    ):
        with pytest.raises(error):
            ids_from_list(wrong)  # type: ignore[arg-type]

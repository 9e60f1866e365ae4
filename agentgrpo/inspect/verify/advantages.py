"""Advantages and loss weights, from what docs/losses.md, docs/rollouts.md and the config say.

Nothing here is shared with learn/, which it is there to check. Rollouts are taken as recorded, and
the segments that branches share are one object (verify.rejoin).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agentgrpo.config import LossConfig, TrainConfig
from agentgrpo.types import Float32, Group, Int32, Rollout, Segment, Status, Treatment

Floats = NDArray[np.float64]

CONTRAST = 1e-6
"""Rewards no further apart than this are equal, and teach nothing."""
EPSILON = 1e-4
"""Added to a standard deviation."""
NORMALISERS: Mapping[str, str] = {
    "grpo": "sequence_mean", "bnpo": "token_mean", "dr_grpo": "budget", "dapo": "step_token_mean",
    "luspo": "sequence_sum", "cispo": "step_token_mean", "sapo": "sequence_mean",
    "vespo": "step_token_mean", "gmpo": "sequence_mean", "dppo": "token_mean",
    "topr": "sequence_sum",
}  # fmt: skip
"""Of the shipped losses. loss.normaliser overrides it."""
OWN_NORMALISER = "token_mean"
"""Of a loss of the user's own."""
TAUGHT = (
    "token_advantages", "teacher_logprobs", "topk_ids", "teacher_topk_logprobs",
    "learner_topk_logprobs",
)  # fmt: skip
"""Of a rollout, what only a teacher gives it."""


def is_sample(rollout: Rollout) -> bool:
    """Whether it has a part in its group's baseline and in the normaliser's B."""
    kept = rollout.treatment in (Treatment.TRAIN, Treatment.MASK)
    return kept and rollout.status is not Status.INFRA_ERROR


def is_trained(rollout: Rollout) -> bool:
    """Whether its tokens may enter the loss."""
    return is_sample(rollout) and rollout.treatment is Treatment.TRAIN


def reward_of(rollout: Rollout) -> float:
    """All parts, and the rewards of spans."""
    return sum(rollout.rewards.values()) + sum(span.value for span in rollout.span_rewards)


def advantage_faults(groups: Sequence[Group], loss: LossConfig) -> Iterator[tuple[int, int, str]]:
    """Where a step's recorded advantages are not those of its recorded rewards.

    Yields group, rollout, and what is wrong with it.
    """
    samples = [[r for r in group.rollouts if is_sample(r)] for group in groups]
    wanted = _wanted(samples, loss)
    for g, group in enumerate(groups):
        for index, rollout in enumerate(group.rollouts):
            whole, each = wanted.get(id(rollout), (0.0, None))
            if not is_trained(rollout):
                whole, each = 0.0, None
            if not _close(rollout.advantage, whole):
                yield g, index, f"advantage {rollout.advantage:.6g}, its rewards give {whole:.6g}"
            recorded = rollout.segment_advantages
            if (recorded is None) != (each is None):
                said = "has none" if recorded is None else "has some"
                yield g, index, f"segment_advantages: {said}, other than its rewards give"
            elif recorded is not None and each is not None and not _close(recorded, each):
                yield g, index, "segment_advantages are not those that its rewards give"


def taught_faults(groups: Sequence[Group], config: TrainConfig) -> Iterator[tuple[int, int, str]]:
    """Where a token's recorded advantage is not that of its group and of its teacher together, or
    what a teacher found likeliest cannot be.

    Yields group, rollout, and what is wrong with it.
    """
    for g, group in enumerate(groups):
        for index, rollout in enumerate(group.rollouts):
            yield from ((g, index, fault) for fault in _taught_faults(rollout, config))


def _taught_faults(rollout: Rollout, config: TrainConfig) -> Iterator[str]:
    c, segments, seen_by = config.teacher, rollout.all_segments, rollout.learner_logprobs
    fields = [getattr(rollout, name) for name in TAUGHT]
    if not c.teaches or seen_by is None:
        # what a teacher said is there before a step that the learner then refuses
        if any(fields if not c.teaches else (rollout.token_advantages, fields[-1])):
            yield "has numbers of a teacher, and did not learn from one"
        return
    each = rollout.segment_advantages or [rollout.advantage] * len(segments)
    columns = segments, each, seen_by, *(field or [None] * len(segments) for field in fields)
    if len({*map(len, columns)}) > 1:
        yield f"{', '.join(TAUGHT)}: not one for each segment"
        return
    turn = -1
    for number, (segment, own, seen, trained, said, *likely) in enumerate(
        zip(*columns, strict=True)
    ):
        size, turn = len(segment.token_ids), turn + segment.sampled
        if said is None and c.model and seen is not None:
            yield f"segment {number}: its teacher said nothing"
        if said is not None and c.feedback == "errors" and not any(rollout.feedback[turn:]):
            yield f"segment {number}: its teacher had nothing to read"
        if said is not None and len(said) != size:
            yield f"segment {number}: {len(said)} numbers of a teacher, for {size} tokens"
            continue
        old = segment.logprobs if config.loss.old_logps == "sampler" else seen
        fits = seen is None and trained is None
        if seen is not None and old is not None and trained is not None:
            gap = 0.0 if said is None or c.topk else said.astype(float) - old
            wanted = c.weight * np.clip(gap, -c.clip, c.clip) + (1 - c.weight) * own
            fits = np.shape(trained) == np.shape(old) and _near(trained, wanted)
        if not fits:
            yield f"segment {number}: token_advantages are not its teacher's"
        shape = (size * c.topk,) if c.topk and said is not None else ()
        if {*map(np.shape, likely)} != {shape}:
            yield f"segment {number}: not {c.topk} tokens of a teacher in each place"
        elif shape and not _can_be(segment, said, *(x.reshape(size, -1) for x in likely)):
            yield f"segment {number}: the probabilities of {c.topk} tokens cannot be these"


def _can_be(segment: Segment, said: Float32, ids: Int32, theirs: Float32, ours: Float32) -> bool:
    """Whether these may be the likeliest tokens in each place, and their log-probabilities."""
    its = np.where(ids == segment.token_ids[:, None], theirs - said[:, None], 0.0)
    distinct = all(len({*row}) == len(row) for row in ids.tolist())
    mass = np.exp(np.stack([theirs, ours]).astype(float)).sum(-1).max()
    return distinct and mass < 1 + 1e-4 and _near(its, np.zeros(its.shape))


def divergences_of(rollout: Rollout, topk: int) -> Floats:
    """The reverse KL to the teacher over its likeliest tokens and the rest as one, of each token
    that the learner saw; 0 where the teacher was told nothing.
    """
    names = "learner_logprobs", "teacher_topk_logprobs", "learner_topk_logprobs"
    none: list[Float32 | None] = [None] * len(rollout.all_segments)
    found = [np.zeros(0)]
    for seen, *both in zip(*(getattr(rollout, name) or none for name in names), strict=False):
        if seen is not None:
            fits = {*map(np.shape, both)} == {(len(seen) * topk,)}
            q, p = (_with_rest(x.reshape(-1, topk)) for x in both) if fits else (np.ones(1),) * 2
            found.append((p * np.log(p / q)).sum(-1) + np.zeros(len(seen)))
    return np.concatenate(found)


def _with_rest(logp_NK: Float32) -> Floats:
    p: Floats = np.exp(logp_NK.astype(float))
    return np.column_stack([p, np.maximum(1 - p.sum(1), 1e-7)])


Wanted = dict[int, tuple[float, list[float] | None]]
"""By id() of a rollout: its advantage, and those of its segments where they have their own."""


def _wanted(samples: Sequence[Sequence[Rollout]], loss: LossConfig) -> Wanted:
    if loss.multi_objective_aggregation == "normalize_then_sum":
        tables = _parts_normalised(samples, loss)
    else:
        returns = [_returns(rollouts, loss) for rollouts in samples]
        everything = np.concatenate([table.ravel() for table in returns] or [np.zeros(0)])
        tables = [
            _centred(table, loss)
            * {"group": _scale(table), "batch": _scale(everything), "none": 1.0}[loss.scale_rewards]
            for table in returns
        ]
    wanted: Wanted = {}
    for rollouts, table in zip(samples, tables, strict=True):
        for rollout, row in zip(rollouts, table, strict=True):
            each = _by_segment(rollout, row) if len(row) > 1 else None
            wanted[id(rollout)] = float(row[0]), each
        if loss.branch_credit == "hard":
            _share_alike(rollouts, wanted)
    return wanted


def _returns(rollouts: Sequence[Rollout], loss: LossConfig) -> Floats:
    """[rollouts, turns]: what counts for each turn; behind the last, what would for one more."""
    spans = any(r.span_rewards for r in rollouts)
    credit = {"return_to_go": _to_go, "turn": _own}.get(loss.span_credit) if spans else None
    rows = [credit(r) if credit else [reward_of(r)] for r in rollouts]
    longest = max(map(len, rows), default=1)
    table = [
        row + (longest - len(row)) * ([sum(r.rewards.values())] if credit is _own else row[-1:])
        for r, row in zip(rollouts, rows, strict=True)
    ]
    return np.array(table, np.float64).reshape(len(rows), longest)


def _to_go(rollout: Rollout) -> list[float]:
    whole = sum(rollout.rewards.values())
    starts = np.cumsum([0, *(len(s.token_ids) for s in rollout.all_segments)]).tolist()
    turns = [start for s, start in zip(rollout.all_segments, starts, strict=False) if s.sampled]
    later = [sum(x.value for x in rollout.span_rewards if x.end > start) for start in turns]
    return [whole + value for value in later] or [reward_of(rollout)]


def _own(rollout: Rollout) -> list[float]:
    """Its rewards as a whole, and each span's for the last turn begun before its end."""
    starts = np.cumsum([0, *(len(s.token_ids) for s in rollout.all_segments)]).tolist()
    turns = [start for s, start in zip(rollout.all_segments, starts, strict=False) if s.sampled]
    found = [sum(rollout.rewards.values())] * len(turns)
    for span in rollout.span_rewards:
        if begun := [turn for turn, start in enumerate(turns) if start < span.end]:
            found[begun[-1]] += span.value
    return found or [reward_of(rollout)]


def _centred(table: Floats, loss: LossConfig) -> Floats:
    """Less the mean of each column, or that of the others in it; 0 in a column without contrast."""
    count = len(table)
    if count < 2:
        return np.zeros_like(table)
    mean = table.mean(0)
    if loss.baseline == "leave_one_out":
        mean = (table.sum(0) - table) / (count - 1)
    flat = table.max(0) - table.min(0) <= CONTRAST
    return np.where(flat, 0.0, table - mean)


def _scale(values: Floats) -> float:
    return 1.0 / (float(values.std(ddof=1)) + EPSILON) if values.size > 1 else 1.0


def _parts_normalised(samples: Sequence[Sequence[Rollout]], loss: LossConfig) -> list[Floats]:
    """GDPO: z-scores of each part in its group, weighted, summed, whitened over the step."""
    sums = []
    for rollouts in samples:
        earned = [_parts(rollout) for rollout in rollouts]
        total = np.zeros((len(rollouts), 1))
        for name in sorted(set().union(*earned)):
            applies = [name not in rollout.not_applicable for rollout in rollouts]
            values = np.array([[part.get(name, 0.0)] for part in earned])[applies]
            weight = ([r.weights[name] for r in rollouts if name in r.weights] or [1.0])[-1]
            if weight:
                values = values / weight  # as its maker gave it
                total[applies] += weight * _centred(values, loss) * _scale(values)
        sums.append(total)
    every = np.concatenate([total.ravel() for total in sums] or [np.zeros(0)])
    if every.size < 2 or every.max() - every.min() <= CONTRAST:
        return sums
    white = [(total - every.mean()) * _scale(every) for total in sums]
    return [new if total.any() else total for new, total in zip(white, sums, strict=True)]


def _parts(rollout: Rollout) -> dict[str, float]:
    """By name, spans with the rest; shares belong to what they are shares of."""
    earned: dict[str, float] = {}
    solved = "solved" if "solved" in rollout.rewards else "answer"
    solved = "solved" if any(span.name == "solved" for span in rollout.span_rewards) else solved
    for name, value in [
        *rollout.rewards.items(),
        *((span.name, span.value) for span in rollout.span_rewards),
    ]:
        name = {"partial": solved, "answer_efficiency": "answer"}.get(name, name)
        earned[name] = earned.get(name, 0.0) + value
    return earned


def _by_segment(rollout: Rollout, row: Floats) -> list[float]:
    turn = iter(row.tolist())
    return [next(turn) if segment.sampled else 0.0 for segment in rollout.all_segments]


def _share_alike(rollouts: Sequence[Rollout], wanted: Wanted) -> None:
    """Hard credit: a turn of several branches has the mean of their advantages."""
    values: dict[int, list[float]] = {}

    def each(rollout: Rollout) -> Iterator[tuple[Segment, float]]:
        whole, by_segment = wanted[id(rollout)]
        segments = rollout.all_segments
        return zip(segments, by_segment or [whole] * len(segments), strict=True)

    for rollout in rollouts:
        for segment, value in each(rollout):
            if segment.sampled:
                values.setdefault(id(segment), []).append(value)
    if any(len(found) > 1 for found in values.values()):
        for rollout in rollouts:
            means = [
                float(np.mean(values[id(s)])) if s.sampled else 0.0 for s in rollout.all_segments
            ]
            wanted[id(rollout)] = wanted[id(rollout)][0], means


def _near(a: Floats | Float32, b: Floats) -> bool:
    """To the rounding of float32."""
    return bool(np.allclose(a, b, rtol=1e-5, atol=1e-5))


def _close(a: float | Sequence[float], b: float | Sequence[float]) -> bool:
    ours, theirs = np.atleast_1d(a), np.atleast_1d(b)
    same = ours.shape == theirs.shape
    return same and bool(np.allclose(ours, theirs, rtol=1e-7, atol=1e-9))


# --- weights ---


def samples_of(groups: Sequence[Group], config: TrainConfig, step: int) -> list[list[Group]]:
    """The groups of each update, of their rollouts those that are samples.

    With several updates the groups are shuffled by NumPy's default generator of (seed, step), cut
    into as equal parts as can be, and taken in their old order within each part.
    """
    order = np.arange(len(groups))
    if config.loss.num_mini_batches > 1:
        np.random.default_rng((config.seed, step)).shuffle(order)
    return [
        [
            Group(task=groups[i].task, rollouts=[r for r in groups[i].rollouts if is_sample(r)])
            for i in sorted(part.tolist())
        ]
        for part in np.array_split(order, config.loss.num_mini_batches)
    ]


def packed_of(samples: Sequence[Group], config: TrainConfig) -> list[Rollout]:
    """What is trained on of an update's samples; with hard credit, each shared turn once."""
    trained = [
        r for group in samples for r in group.rollouts if is_trained(r) and num_sampled(r.rows)
    ]
    if config.loss.branch_credit != "hard":
        return trained
    seen: set[int] = set()
    packed = []
    for rollout in trained:
        segments = [Segment(s.token_ids) if id(s) in seen else s for s in rollout.segments]
        seen |= {id(s) for s in rollout.segments if s.sampled}
        own = {name: getattr(rollout, name) for name in rollout.__slots__}
        packed.append(Rollout(**{**own, "segments": segments}))
    return packed


def num_sampled(rows: Sequence[Sequence[Segment]]) -> int:
    """Sampled tokens of rows."""
    return sum(len(segment.token_ids) for row in rows for segment in row if segment.sampled)


def weights_of(
    rollouts: Sequence[Rollout], samples: int, share: float, config: TrainConfig
) -> Floats:
    """What a token of each packed rollout weighs, where an update has so many samples (B).

    `share` is how many tokens the step trains on, divided by its updates.
    """
    lengths = np.array([num_sampled(rollout.rows) for rollout in rollouts], np.float64)
    budget, name = config.rollout.max_turns * config.rollout.max_turn_tokens, config.loss.loss_type
    parts = {  # how many such tokens make up the whole
        "sequence_mean": samples * lengths,
        "token_mean": np.full(len(lengths), lengths.sum()),
        "step_token_mean": np.full(len(lengths), share),
        "budget": np.full(len(lengths), samples * budget),
        "sequence_sum": np.full(len(lengths), samples),
    }[config.loss.normaliser or (OWN_NORMALISER if ":" in name else NORMALISERS[name])]
    weights: Floats = 1 / np.maximum(parts, 1)
    return weights

"""Advantages and loss weights, computed from docs/losses.md, docs/rollouts.md and the config.

Shares no code with learn/, which it checks. Branches of a rollout must share their segments as one
object (verify.rejoin).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agentgrpo.config import LossConfig, TrainConfig
from agentgrpo.types import Float32, Group, Int32, Rollout, Segment, Status, Treatment

Floats = NDArray[np.float64]

CONTRAST = 1e-6
"""Rewards that differ by at most this count as equal and give no advantage."""
EPSILON = 1e-4
"""Added to a standard deviation."""
NORMALISERS: Mapping[str, str] = {
    "grpo": "sequence_mean", "bnpo": "token_mean", "dr_grpo": "budget", "dapo": "step_token_mean",
    "luspo": "sequence_sum", "cispo": "step_token_mean", "sapo": "sequence_mean",
    "vespo": "step_token_mean", "gmpo": "sequence_mean", "dppo": "token_mean",
    "topr": "sequence_sum",
}  # fmt: skip
"""Default per shipped loss; loss.normaliser overrides it."""
CUSTOM_NORMALISER = "token_mean"
"""Default of a user's own loss."""
TEACHER_COLUMNS = (
    "token_advantages", "teacher_logprobs", "topk_ids", "teacher_topk_logprobs",
    "learner_topk_logprobs",
)  # fmt: skip
"""Columns of a rollout that only a teacher fills."""


def is_sample(rollout: Rollout) -> bool:
    """Whether it counts in its group's baseline and in B, the number of samples."""
    counted = rollout.treatment in (Treatment.TRAIN, Treatment.MASK)
    return counted and rollout.status is not Status.INFRA_ERROR


def is_trained(rollout: Rollout) -> bool:
    """Whether its tokens may enter the loss."""
    return is_sample(rollout) and rollout.treatment is Treatment.TRAIN


def reward_of(rollout: Rollout) -> float:
    """The sum of all parts and span rewards."""
    return sum(rollout.rewards.values()) + sum(span.value for span in rollout.span_rewards)


def advantage_faults(groups: Sequence[Group], loss: LossConfig) -> Iterator[tuple[int, int, str]]:
    """Recorded advantages of a step that do not follow from the recorded rewards.

    Yields group, rollout and the fault.
    """
    samples = [[r for r in group.rollouts if is_sample(r)] for group in groups]
    expected = _expected_advantages(samples, loss)
    for g, group in enumerate(groups):
        for index, rollout in enumerate(group.rollouts):
            advantage, by_segment = expected.get(id(rollout), (0.0, None))
            if not is_trained(rollout):
                advantage, by_segment = 0.0, None
            recorded = rollout.advantage
            if not _close(recorded, advantage):
                yield g, index, f"advantage: expected {advantage:.6g}, got {recorded:.6g}"
            segments = rollout.segment_advantages
            if (segments is None) != (by_segment is None):
                problem = "missing" if segments is None else "expected none"
                yield g, index, f"segment_advantages: {problem}"
            elif (
                segments is not None and by_segment is not None and not _close(segments, by_segment)
            ):
                yield g, index, "segment_advantages do not follow from its rewards"


def teacher_faults(groups: Sequence[Group], config: TrainConfig) -> Iterator[tuple[int, int, str]]:
    """Token advantages that do not follow from group and teacher, and impossible top-k columns.

    Yields group, rollout and the fault.
    """
    for g, group in enumerate(groups):
        for index, rollout in enumerate(group.rollouts):
            yield from ((g, index, fault) for fault in _teacher_faults(rollout, config))


def _teacher_faults(rollout: Rollout, config: TrainConfig) -> Iterator[str]:
    c, segments, learner = config.teacher, rollout.all_segments, rollout.learner_logprobs
    fields = [getattr(rollout, name) for name in TEACHER_COLUMNS]
    if not c.teaches or learner is None:
        # the teacher's own columns are recorded before a step that the learner then refuses
        if any(fields if not c.teaches else (rollout.token_advantages, fields[-1])):
            yield "has columns of a teacher, but did not learn from one"
        return
    advantages = rollout.segment_advantages or [rollout.advantage] * len(segments)
    columns = segments, advantages, learner, *(field or [None] * len(segments) for field in fields)
    if len({*map(len, columns)}) > 1:
        yield f"{', '.join(TEACHER_COLUMNS)}: expected one entry for each segment"
        return
    turn = -1
    for number, (segment, group_advantage, learner_logp, recorded, teacher, *topk) in enumerate(
        zip(*columns, strict=True)
    ):
        size, turn = len(segment.token_ids), turn + segment.sampled
        if teacher is None and c.model and learner_logp is not None:
            yield f"segment {number}: no teacher_logprobs"
        if teacher is not None and c.feedback == "errors" and not any(rollout.feedback[turn:]):
            yield f"segment {number}: teacher_logprobs without feedback"
        if teacher is not None and len(teacher) != size:
            yield f"segment {number}: {len(teacher)} teacher_logprobs for {size} tokens"
            continue
        old = segment.logprobs if config.loss.old_logps == "sampler" else learner_logp
        matches = learner_logp is None and recorded is None
        if learner_logp is not None and old is not None and recorded is not None:
            gap = 0.0 if teacher is None or c.topk else teacher.astype(float) - old
            expected = c.weight * np.clip(gap, -c.clip, c.clip) + (1 - c.weight) * group_advantage
            matches = np.shape(recorded) == np.shape(old) and _near(recorded, expected)
        if not matches:
            yield f"segment {number}: token_advantages do not follow from its teacher"
        shape = (size * c.topk,) if c.topk and teacher is not None else ()
        if {*map(np.shape, topk)} != {shape}:
            yield f"segment {number}: expected {c.topk} tokens of the teacher at each position"
        elif shape and not _is_possible(segment, teacher, *(x.reshape(size, -1) for x in topk)):
            yield f"segment {number}: impossible top-{c.topk} log-probabilities"


def _is_possible(
    segment: Segment, sampled_S: Float32, ids_SK: Int32, teacher_SK: Float32, learner_SK: Float32
) -> bool:
    """Whether top-k ids are distinct, their mass at most 1, and the sampled token's value equal."""
    is_sampled = ids_SK == segment.token_ids[:, None]
    gaps = np.where(is_sampled, teacher_SK - sampled_S[:, None], 0.0)
    distinct = all(len({*row}) == len(row) for row in ids_SK.tolist())
    mass = np.exp(np.stack([teacher_SK, learner_SK]).astype(float)).sum(-1).max()
    return distinct and mass < 1 + 1e-4 and _near(gaps, np.zeros(gaps.shape))


def divergences_of(rollout: Rollout, topk: int) -> Floats:
    """Reverse KL to the teacher of each trained token, over the top k and the rest as one bucket.

    0 where the teacher has no columns.
    """
    names = "learner_logprobs", "teacher_topk_logprobs", "learner_topk_logprobs"
    none: list[Float32 | None] = [None] * len(rollout.all_segments)
    divergences = [np.zeros(0)]
    for logp, *both in zip(*(getattr(rollout, name) or none for name in names), strict=False):
        if logp is not None:
            has_both = {*map(np.shape, both)} == {(len(logp) * topk,)}
            columns = (_with_rest(x.reshape(-1, topk)) for x in both)
            q, p = columns if has_both else (np.ones(1),) * 2
            divergences.append((p * np.log(p / q)).sum(-1) + np.zeros(len(logp)))
    return np.concatenate(divergences)


def _with_rest(logp_NK: Float32) -> Floats:
    p: Floats = np.exp(logp_NK.astype(float))
    return np.column_stack([p, np.maximum(1 - p.sum(1), 1e-7)])


Expected = dict[int, tuple[float, list[float] | None]]
"""By id() of a rollout: its advantage, and its segments' if they have their own."""


def _expected_advantages(samples: Sequence[Sequence[Rollout]], loss: LossConfig) -> Expected:
    if loss.multi_objective_aggregation == "normalize_then_sum":
        tables = _parts_normalised(samples, loss)
    else:
        returns = [_returns(rollouts, loss) for rollouts in samples]
        batch = np.concatenate([table.ravel() for table in returns] or [np.zeros(0)])
        tables = [
            _centred(table, loss)
            * {"group": _scale(table), "batch": _scale(batch), "none": 1.0}[loss.scale_rewards]
            for table in returns
        ]
    expected: Expected = {}
    for rollouts, table in zip(samples, tables, strict=True):
        for rollout, row in zip(rollouts, table, strict=True):
            by_segment = _by_segment(rollout, row) if len(row) > 1 else None
            expected[id(rollout)] = float(row[0]), by_segment
        if loss.branch_credit == "hard":
            _average_shared_turns(rollouts, expected)
    return expected


def _returns(rollouts: Sequence[Rollout], loss: LossConfig) -> Floats:
    """[rollouts, turns]: the return of each turn; shorter rollouts are padded to compare turns."""
    spans = any(r.span_rewards for r in rollouts)
    credit = {"return_to_go": _to_go, "turn": _per_turn}.get(loss.span_credit) if spans else None
    rows = [credit(r) if credit else [reward_of(r)] for r in rollouts]
    longest = max(map(len, rows), default=1)
    table = [
        row
        + (longest - len(row)) * ([sum(r.rewards.values())] if credit is _per_turn else row[-1:])
        for r, row in zip(rollouts, rows, strict=True)
    ]
    return np.array(table, np.float64).reshape(len(rows), longest)


def _turn_starts(rollout: Rollout) -> list[int]:
    """Index of the first token of each sampled segment."""
    starts = np.cumsum([0, *(len(s.token_ids) for s in rollout.all_segments)]).tolist()
    return [start for s, start in zip(rollout.all_segments, starts, strict=False) if s.sampled]


def _to_go(rollout: Rollout) -> list[float]:
    total = sum(rollout.rewards.values())
    later = [
        sum(x.value for x in rollout.span_rewards if x.end > start)
        for start in _turn_starts(rollout)
    ]
    return [total + value for value in later] or [reward_of(rollout)]


def _per_turn(rollout: Rollout) -> list[float]:
    """The rollout's rewards, plus a span's for the last turn that starts before the span's end."""
    turns = _turn_starts(rollout)
    returns = [sum(rollout.rewards.values())] * len(turns)
    for span in rollout.span_rewards:
        if earlier := [turn for turn, start in enumerate(turns) if start < span.end]:
            returns[earlier[-1]] += span.value
    return returns or [reward_of(rollout)]


def _centred(table: Floats, loss: LossConfig) -> Floats:
    """Subtract each column's mean, or that of the other rows; 0 in a column of equal values."""
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
        parts = [_parts(rollout) for rollout in rollouts]
        total = np.zeros((len(rollouts), 1))
        for name in sorted(set().union(*parts)):
            applies = [name not in rollout.not_applicable for rollout in rollouts]
            values = np.array([[part.get(name, 0.0)] for part in parts])[applies]
            weight = ([r.weights[name] for r in rollouts if name in r.weights] or [1.0])[-1]
            if weight:
                values = values / weight  # recorded values are weighted already
                total[applies] += weight * _centred(values, loss) * _scale(values)
        sums.append(total)
    flat = np.concatenate([total.ravel() for total in sums] or [np.zeros(0)])
    if flat.size < 2 or flat.max() - flat.min() <= CONTRAST:
        return sums
    white = [(total - flat.mean()) * _scale(flat) for total in sums]
    return [new if total.any() else total for new, total in zip(white, sums, strict=True)]


def _parts(rollout: Rollout) -> dict[str, float]:
    """Rewards by name, spans included; "partial" and "answer_efficiency" count for their part."""
    parts: dict[str, float] = {}
    solved = "solved" if "solved" in rollout.rewards else "answer"
    solved = "solved" if any(span.name == "solved" for span in rollout.span_rewards) else solved
    for name, value in [
        *rollout.rewards.items(),
        *((span.name, span.value) for span in rollout.span_rewards),
    ]:
        name = {"partial": solved, "answer_efficiency": "answer"}.get(name, name)
        parts[name] = parts.get(name, 0.0) + value
    return parts


def _by_segment(rollout: Rollout, row: Floats) -> list[float]:
    turn = iter(row.tolist())
    return [next(turn) if segment.sampled else 0.0 for segment in rollout.all_segments]


def _average_shared_turns(rollouts: Sequence[Rollout], expected: Expected) -> None:
    """Hard credit: a turn that several branches share gets the mean of their advantages."""
    values: dict[int, list[float]] = {}
    for rollout in rollouts:
        advantage, by_segment = expected[id(rollout)]
        segments = rollout.all_segments
        for segment, value in zip(segments, by_segment or [advantage] * len(segments), strict=True):
            if segment.sampled:
                values.setdefault(id(segment), []).append(value)
    if any(len(shared) > 1 for shared in values.values()):
        for rollout in rollouts:
            means = [
                float(np.mean(values[id(s)])) if s.sampled else 0.0 for s in rollout.all_segments
            ]
            expected[id(rollout)] = expected[id(rollout)][0], means


def _near(a: Floats | Float32, b: Floats) -> bool:
    """Equal up to float32 rounding."""
    return bool(np.allclose(a, b, rtol=1e-5, atol=1e-5))


def _close(a: float | Sequence[float], b: float | Sequence[float]) -> bool:
    x, y = np.atleast_1d(a), np.atleast_1d(b)
    return x.shape == y.shape and bool(np.allclose(x, y, rtol=1e-7, atol=1e-9))


# --- weights ---


def samples_of(groups: Sequence[Group], config: TrainConfig, step: int) -> list[list[Group]]:
    """The groups of each update, with only those rollouts that count as samples.

    With several updates, NumPy's default generator of (seed, step) shuffles the groups, they are
    split into parts of nearly equal size, and each part keeps their original order.
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
    """The rollouts of an update that are trained on; with hard credit, each shared turn once."""
    trained = [
        r for group in samples for r in group.rollouts if is_trained(r) and num_sampled(r.rows)
    ]
    if config.loss.branch_credit != "hard":
        return trained
    counted: set[int] = set()
    packed = []
    for rollout in trained:
        segments = [Segment(s.token_ids) if id(s) in counted else s for s in rollout.segments]
        counted |= {id(s) for s in rollout.segments if s.sampled}
        fields = {name: getattr(rollout, name) for name in rollout.__slots__}
        packed.append(Rollout(**{**fields, "segments": segments}))
    return packed


def num_sampled(rows: Sequence[Sequence[Segment]]) -> int:
    """Number of sampled tokens."""
    return sum(len(segment.token_ids) for row in rows for segment in row if segment.sampled)


def weights_of(
    rollouts: Sequence[Rollout], samples: int, share: float, config: TrainConfig
) -> Floats:
    """The loss weight of each token, per packed rollout.

    `samples` is B, the update's number of samples; `share` the step's number of trained tokens
    divided by its number of updates.
    """
    lengths = np.array([num_sampled(rollout.rows) for rollout in rollouts], np.float64)
    budget, name = config.rollout.max_turns * config.rollout.max_turn_tokens, config.loss.loss_type
    inverse = {  # 1 / weight
        "sequence_mean": samples * lengths,
        "token_mean": np.full(len(lengths), lengths.sum()),
        "step_token_mean": np.full(len(lengths), share),
        "budget": np.full(len(lengths), samples * budget),
        "sequence_sum": np.full(len(lengths), samples),
    }[config.loss.normaliser or (CUSTOM_NORMALISER if ":" in name else NORMALISERS[name])]
    weights: Floats = 1 / np.maximum(inverse, 1)
    return weights

"""Proves from a run's records that it trained on what its engine saw, and on nothing else.

The records hold, besides the tokens, what the engine itself said of every request: hashes of the
prompt it used and of the ids it sampled. From these and the tokens alone it is shown that

* a rollout's masked-in tokens are the ids the engine sampled, turn by turn and no others
* every prompt the engine saw is the beginning of the row that is trained on, or of a later row that
  a recorded fork began; so what a tool said is there once, where the engine read it, unsampled
* a branch begins with what its parent was played with, token for token
* spans tile the rows; spans of rewards lie inside; log-probabilities are finite and not positive
* the packed batches of each step show every sampled token its own history, with the weights that
  the objective asks for
* what the learner made of the tokens is there for every rollout that was packed and for no other,
  or for none of a step that was refused, and agrees with the sampler as the run promised

The proof repeats no step of the code that it checks: packed batches are read back by their
definition (types.PackedBatch), weights are computed from the record's lengths.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, starmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgrpo.config import TrainConfig
from agentgrpo.config.arguments import parser_of
from agentgrpo.engine.agreement import outliers_of, widest_gap
from agentgrpo.learn.losses import reads_whole_rollouts
from agentgrpo.learn.updates import as_packed, mini_batches, plan_updates
from agentgrpo.run.records import read_rollouts
from agentgrpo.types import (
    Float32,
    Group,
    Int32,
    PackedBatch,
    Rollout,
    Segment,
    Status,
    Treatment,
    Turn,
    token_hash,
)

WEIGHT_TOLERANCE = 1e-5
"""Relative; weights are float32."""


@dataclass(slots=True)
class Report:
    """What was looked at, and what is wrong."""

    rollouts: int = 0
    unaccounted: int = 0
    """Those of a user's own sampler that say nothing of the engine's requests."""
    turns: int = 0
    forks: int = 0
    sampled_tokens: int = 0
    steps: int = 0
    terms: int = 0
    learned: int = 0
    """Loss terms of which the learner's view is recorded."""
    faults: list[str] = field(default_factory=list)


def verify_run(run: Path) -> Report:
    """Check all records of a run directory.

    Raises:
        FileNotFoundError: it has no run.json or rollouts.jsonl.
        ValueError: run.json is not a training run's, or a line of rollouts.jsonl is no record;
            names it.
    """
    if not (run / "run.json").is_file():
        raise FileNotFoundError(f"{run}: no run.json, so this is not a run's folder (out_dir)")
    described = json.loads((run / "run.json").read_text())
    try:
        config = TrainConfig.model_validate(described["config"])
        device = described["learner"]["device"]
        limit, outliers = (
            config.engine.agreement_on(device),
            outliers_of(config.engine.dtype_on(device)),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{run / 'run.json'}: not that of a training run: {error!r}") from error
    report = Report()
    records = read_rollouts(run / "rollouts.jsonl")
    for (step, split), played in groupby(records, key=lambda pair: _when(pair[0])):
        rollouts = list(played)
        groups = _groups(rollouts)
        for number, group in enumerate(groups):
            report.faults += [
                f"step {step} {split} group {number} rollout {index}: {fault}"
                for index, fault in rejoin(group)
            ]
        for place, rollout in rollouts:
            where = f"step {step} {split} group {place['group']} rollout {place['index']}"
            accounted = bool(rollout.turns) or not config.rollout.sampler
            found = rollout_faults(rollout, accounted=accounted)
            report.faults += [f"{where}: {fault}" for fault in found]
            report.unaccounted += not accounted
            if split != "train" and rollout.learner_logprobs is not None:
                report.faults.append(f"{where}: seen by the learner, but not played for training")
            _count(report, rollout)
        if split == "train":
            report.steps += 1
            faults, terms = step_faults(groups, config, step, limit, outliers)
            report.faults += [f"step {step}: {fault}" for fault in faults]
            report.terms += terms
            report.learned += sum(_num_learned(rollout) for _, rollout in rollouts)
    return report


def rollout_faults(rollout: Rollout, *, accounted: bool = True) -> Iterator[str]:
    """What is wrong with a rollout's tokens; nothing, if it is what the engine saw.

    Args:
        rollout: as recorded.
        accounted: it says what the engine saw; else that is not looked at.
    """
    turns: dict[int, list[tuple[int, Turn]]] = {i: [] for i in range(len(rollout.rows))}
    for number, turn in enumerate(rollout.turns):
        if turn.row not in turns:
            yield f"turn {number}: row {turn.row} of {len(turns)}"
            return
        turns[turn.row].append((number, turn))
    for index, row in enumerate(rollout.rows):
        name = f"row {index}: " if len(rollout.rows) > 1 else ""
        yield from (name + fault for fault in _segment_faults(row))
        if accounted:
            yield from (name + fault for fault in _turn_faults(row, turns[index]))
    yield from _view_faults(rollout)
    total = sum(len(segment.token_ids) for row in rollout.rows for segment in row)
    for span in rollout.span_rewards:
        if not 0 <= span.start < span.end <= total:
            yield f"reward {span.name!r}: tokens [{span.start}, {span.end}) of {total}"


def _segment_faults(row: Sequence[Segment]) -> Iterator[str]:
    if not row or row[0].sampled:
        yield "does not begin with a prompt"
    for number, segment in enumerate(row):
        if len(segment.token_ids) and segment.token_ids.min() < 0:
            yield f"segment {number}: token_ids has {segment.token_ids.min()}, not an id"
        if segment.logprobs is not None and not (segment.logprobs <= WEIGHT_TOLERANCE).all():
            yield f"segment {number}: logprobs has {segment.logprobs.max()}, not a log-probability"
        if number and not segment.sampled and not row[number - 1].sampled:
            yield f"segment {number}: given right after segment {number - 1}, with no turn between"


def _view_faults(rollout: Rollout) -> Iterator[str]:
    """What is wrong with the form of what the learner made of a rollout."""
    views = {"learner_logprobs": rollout.learner_logprobs, "entropies": rollout.entropies}
    if (views["learner_logprobs"] is None) != (views["entropies"] is None):
        yield "learner_logprobs and entropies: one is recorded without the other"
    sizes = [len(s.token_ids) if s.sampled else None for s in rollout.all_segments]
    for name, view in views.items():
        if view is None:
            continue
        found = [None if values is None else len(values) for values in view]
        if len(found) != len(sizes) or any(
            number not in (None, size) for number, size in zip(found, sizes, strict=True)
        ):
            yield f"{name}: not one number for each sampled token"
            continue
        flat = np.concatenate(
            [values for values in view if values is not None] or [np.empty(0, np.float32)]
        )
        least, most = (-np.inf, WEIGHT_TOLERANCE) if name == "learner_logprobs" else (-1e-3, np.inf)
        if not (np.isfinite(flat) & (flat >= least) & (flat <= most)).all():
            yield f"{name}: a number that can be none: {flat.min()} to {flat.max()}"


def _num_learned(rollout: Rollout) -> int:
    return sum(len(values) for values in rollout.learner_logprobs or () if values is not None)


def _turn_faults(row: Sequence[Segment], turns: Sequence[tuple[int, Turn]]) -> Iterator[str]:
    """Compare a row's sampled segments with the engine's account of its turns."""
    ids = np.concatenate([segment.token_ids for segment in row] or [np.empty(0, np.int32)])
    starts = np.cumsum([0, *(len(segment.token_ids) for segment in row)]).tolist()
    sampled = [number for number, segment in enumerate(row) if segment.sampled]
    if len(sampled) != len(turns):
        yield f"{len(sampled)} sampled segments, but the engine played {len(turns)} turns"
        return
    for at, (number, turn) in zip(sampled, turns, strict=True):
        if starts[at] != turn.prompt_tokens:
            yield (
                f"turn {number}: sampled from token {starts[at]} on, but the engine's prompt had "
                f"{turn.prompt_tokens} tokens"
            )
        elif token_hash(ids[: starts[at]]) != turn.prompt_hash:
            yield f"turn {number}: the engine's prompt is not the {starts[at]} tokens before it"
        whole = np.append(row[at].token_ids, np.array(turn.replaced, np.int32))
        if len(whole) != turn.sampled_tokens:
            yield (
                f"turn {number}: {len(whole)} tokens, but the engine sampled {turn.sampled_tokens}"
            )
        elif token_hash(whole) != turn.sampled_hash:
            yield f"turn {number}: its tokens are not those that the engine sampled"


def step_faults(
    groups: Sequence[Group], config: TrainConfig, step: int, limit: float, outliers: float = 0.0
) -> tuple[list[str], int]:
    """What is wrong with a step's packed batches, and how many loss terms they have.

    Args:
        groups: of the step, as recorded.
        config: of the run.
        step: counted from 0.
        limit: largest difference in nats between the sampler and the learner before an update.
        outliers: share of the tokens that may be further apart.
    """
    faults: list[str] = []
    terms = 0
    parts = mini_batches(groups, config, step=step)
    counted = Counter(id(r) for part in parts for group in part for r in group.rollouts)
    samples = Counter(id(r) for group in groups for r in group.rollouts if _is_sample(r))
    if counted != samples:
        faults.append(
            f"{counted.total()} rollouts are counted by the updates, {samples.total()} should be"
        )
    updates = plan_updates(groups, config, step=step)
    for number, (part, update) in enumerate(zip(parts, updates, strict=True)):
        rollouts = [rollout for group in as_packed(part, config) for rollout in group.rollouts]
        weights = _weights(rollouts, sum(len(group.rollouts) for group in part), config)
        for batch in update.batches:
            faults += [f"update {number}: {f}" for f in _batch_faults(batch, rollouts, weights)]
            terms += len(batch.row_N)
        packed = Counter(sample for batch in update.batches for sample in batch.sample_N.tolist())
        wanted = _wanted(rollouts, config)
        wrong = [i for i in sorted(packed | wanted) if packed[i] != wanted[i]]
        if wrong:
            faults.append(f"update {number}: packed or left out wrongly: rollouts {wrong}")
        learned = Counter({i: n for i, r in enumerate(rollouts) if (n := _num_learned(r))})
        wrong = [i for i in sorted(packed | learned) if packed[i] != learned[i]]
        if learned and wrong:
            faults.append(
                f"update {number}: packed, or seen by the learner, but not both: rollouts {wrong}"
            )
        gap = widest_gap([gaps for rollout in rollouts for gaps in _gaps(rollout)], outliers)
        if number == 0 and not gap <= limit:  # later ones are of another policy
            faults.append(f"the learner and the sampler are {gap:.3g} nats apart, over {limit:.3g}")
    return faults, terms


def _is_sample(rollout: Rollout) -> bool:
    """Whether it is one of the normaliser's B: what is masked is, what the machine broke not."""
    kept = rollout.treatment not in (Treatment.DROP, Treatment.RETRY)
    return kept and rollout.status is not Status.INFRA_ERROR


def _gaps(rollout: Rollout) -> list[Float32]:
    """Differences between the learner's and the sampler's log-probabilities, by segment."""
    pairs = zip(rollout.all_segments, rollout.learner_logprobs or (), strict=False)
    return [
        values - segment.logprobs
        for segment, values in pairs
        if segment.logprobs is not None and values is not None
        if len(values) == len(segment.logprobs)
    ]


def _wanted(rollouts: Sequence[Rollout], config: TrainConfig) -> Counter[int]:
    """How many loss terms each rollout has: the sampled tokens of those rows that move the loss.

    Where the loss reads a rollout's tokens together, any row of it moves the others'.
    """
    all_move = config.loss.beta != 0 or config.loss.entropy_coef != 0
    together = reads_whole_rollouts(config.loss)
    counts: Counter[int] = Counter()
    for index, rollout in enumerate(rollouts):
        rows = _advantages(rollout)
        moves = all_move or (together and any(a.any() for a in rows))
        if count := sum(len(a) for a in rows if moves or a.any()):
            counts[index] = count
    return counts


def _advantages(rollout: Rollout) -> list[Float32]:
    """Of the sampled tokens of each row."""
    segments = rollout.all_segments
    every = iter(rollout.segment_advantages or [rollout.advantage] * len(segments))
    return [
        np.concatenate(
            [
                np.full(len(segment.token_ids) if segment.sampled else 0, next(every), np.float32)
                for segment in row
            ]
        )
        for row in rollout.rows
    ]


def _flat(row: Sequence[Segment]) -> tuple[Int32, NDArray[np.bool_], Float32]:
    """A row's ids, its mask, and its log-probabilities, 0 where the mask is."""
    logprobs = [
        np.zeros(len(segment.token_ids), np.float32)
        if segment.logprobs is None
        else segment.logprobs
        for segment in row
    ]
    mask = [np.full(len(segment.token_ids), segment.sampled) for segment in row]
    ids = np.concatenate([segment.token_ids for segment in row])
    return ids, np.concatenate(mask), np.concatenate(logprobs)


def _batch_faults(
    batch: PackedBatch, rollouts: Sequence[Rollout], weights: NDArray[np.float64]
) -> Iterator[str]:
    """Read a batch back: each term's history is the ids that see it, by types.PackedBatch."""
    size = len(batch.input_ids_T)
    if (np.arange(size) >= batch.tout_T).any() or (batch.tout_T > size).any():
        yield "a subtree ends before it begins, or behind the batch"
        return
    opened = np.ones(size, np.int64) - np.bincount(batch.tout_T, minlength=size + 1)[:size]
    if not np.array_equal(np.cumsum(opened), batch.positions_T + 1):
        yield "a token does not see as many tokens as its position says"
    for sample in np.unique(batch.sample_N).tolist():
        if not 0 <= sample < len(rollouts):
            yield f"sample {sample} of {len(rollouts)}"
            continue
        mine = np.flatnonzero(batch.sample_N == sample)
        turn = 0
        for row, advantages in zip(
            rollouts[sample].rows, _advantages(rollouts[sample]), strict=True
        ):
            first, turn = turn, turn + sum(segment.sampled for segment in row)
            terms = mine[(batch.turn_N[mine] >= first) & (batch.turn_N[mine] < turn)]
            if len(terms) not in (0, len(advantages)):  # a row lies in one batch
                yield f"sample {sample}: {len(terms)} terms for {len(advantages)} sampled tokens"
            elif len(terms):
                faults = _row_faults(batch, terms, *_flat(row))
                yield from (f"sample {sample}: {fault}" for fault in faults)
                if not np.array_equal(batch.advantage_N[terms], advantages):
                    yield f"sample {sample}: its terms have other advantages"
        if not np.allclose(batch.weight_N[mine], weights[sample], rtol=WEIGHT_TOLERANCE, atol=0):
            yield f"sample {sample}: its terms do not weigh {weights[sample]:.6g} each"


def _row_faults(
    batch: PackedBatch,
    terms: NDArray[np.int64],
    ids: Int32,
    mask: NDArray[np.bool_],
    logprobs: Float32,
) -> Iterator[str]:
    """Compare a row's terms with its sampled tokens, and what they see with its beginning."""
    positions = np.flatnonzero(mask)
    if not np.array_equal(batch.target_N[terms], ids[positions]):
        yield "targets are not the sampled ids"
    if not np.array_equal(batch.old_logp_N[terms], logprobs[positions]):
        yield "log-probabilities are not the sampled ones"
    last = batch.row_N[terms[-1]]  # earlier terms see its beginning: all see as many as they should
    seen = np.flatnonzero((np.arange(last + 1) <= last) & (batch.tout_T[: last + 1] > last))
    if not np.array_equal(batch.input_ids_T[seen], ids[: positions[-1]]):
        yield "the last term sees another history than its row"
    elif not np.array_equal(seen[positions - 1], batch.row_N[terms]):
        yield "a term is predicted at another token than the one before it"


def _weights(rollouts: Sequence[Rollout], samples: int, config: TrainConfig) -> NDArray[np.float64]:
    """What a token of each rollout weighs, from the definition of the objective's normaliser.

    Which one a loss has is read from the table of losses; what it means is written here again.
    """
    lengths = np.array([rollout.num_sampled for rollout in rollouts], np.float64)
    parts = {  # how many such tokens make up the whole
        "sequence_mean": samples * lengths,
        "token_mean": np.full(len(lengths), lengths.sum()),
        "budget": np.full(len(lengths), samples * config.rollout.max_sampled_tokens),
        "sequence_sum": np.full(len(lengths), samples),
    }[config.loss.row.normaliser]
    weights: NDArray[np.float64] = 1 / np.maximum(parts, 1)
    return weights


def _when(place: dict[str, Any]) -> tuple[int, str]:
    return place["step"], place["split"]


def _groups(rollouts: Iterable[tuple[dict[str, Any], Rollout]]) -> list[Group]:
    grouped = groupby(rollouts, key=lambda pair: pair[0]["group"])
    lists = [[rollout for _, rollout in group] for _, group in grouped]
    return [Group(task=group[0].task, rollouts=group) for group in lists]


def rejoin(group: Group) -> Iterator[tuple[int, str]]:
    """Give branches the very segments they share with their parents, which a record repeats.

    Yields:
        An index in the group and what is wrong with that branch's beginning.
    """
    for index, rollout in enumerate(group.rollouts):
        if rollout.parent is None:
            continue
        parent = group.rollouts[rollout.parent] if 0 <= rollout.parent < index else rollout
        pairs = list(zip(rollout.segments, parent.segments, strict=False))
        ends = np.cumsum([len(ours.token_ids) for ours, _ in pairs]).tolist()
        count = 1 + ends.index(rollout.forked_at) if rollout.forked_at in ends else 0
        if parent is rollout or not count or not all(starmap(_is_same, pairs[:count])):
            yield index, f"does not begin as rollout {rollout.parent} does, which it branched off"
        else:
            rollout.segments[:count] = parent.segments[:count]


def _is_same(a: Segment, b: Segment) -> bool:
    if a.logprobs is None or b.logprobs is None:
        return a.logprobs is b.logprobs and np.array_equal(a.token_ids, b.token_ids)
    return np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)


def _count(report: Report, rollout: Rollout) -> None:
    report.rollouts += 1
    report.turns += len(rollout.turns)
    report.forks += len(rollout.closed_rows)
    report.sampled_tokens += rollout.num_sampled


def main(arguments: Sequence[str]) -> int:
    """Verify the run that the arguments name; returns the exit status."""
    parser = parser_of("verify", __doc__)
    parser.add_argument("run", type=Path, help="a run's folder: the config's out_dir")
    folder = parser.parse_args(arguments).run
    try:
        report = verify_run(folder)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    for fault in report.faults:
        print(fault)  # noqa: T201
    print(  # noqa: T201
        f"{len(report.faults)} faults in {report.rollouts} rollouts: {report.turns} turns, "
        f"{report.forks} forks, {report.sampled_tokens} sampled tokens; {report.steps} steps "
        f"packed into {report.terms} loss terms, {report.learned} of them with the learner's view"
    )
    if report.unaccounted:
        print(  # noqa: T201
            f"of {report.unaccounted} rollouts of rollout.sampler it is not recorded what the "
            "engine saw: that their tokens are what it sampled is not proven"
        )
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Proves from a run's records that it trained on what its engine saw, and on nothing else.

The records hold, besides the tokens, what the engine itself said of every request: hashes of the
prompt it used and of the ids it sampled. What is shown from these, and how, docs/rollouts.md says;
also what is not.

The proof repeats no step of the code that it checks: packed batches are read back by their
definition (learn.batch.PackedBatch), all else is computed from definitions of its own (this
folder).
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, starmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgrpo.support.runtime import prepare_environment

if "torch" not in sys.modules:  # the modules below import it
    prepare_environment()
from agentgrpo.config import TrainConfig
from agentgrpo.config.arguments import parser_of
from agentgrpo.config.read import validate
from agentgrpo.engine.agreement import outliers_of, widest_gap
from agentgrpo.inspect.verify.advantages import (
    advantage_faults,
    num_sampled,
    packed_of,
    reward_of,
    samples_of,
    taught_faults,
    weights_of,
)
from agentgrpo.inspect.verify.chain import Chain, Line
from agentgrpo.inspect.verify.metrics import learner_faults, line_faults, played, step_sums
from agentgrpo.inspect.verify.replay import call_again, play_again
from agentgrpo.inspect.verify.schema import schema_faults
from agentgrpo.inspect.verify.status import status_faults, treatment_faults
from agentgrpo.inspect.verify.tokens import gaps_of, rollout_faults
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.minibatches import plan_updates
from agentgrpo.learn.token_weights import reads_whole_rollouts
from agentgrpo.records.checkpoint import SAVED
from agentgrpo.records.rollouts import read_rollout
from agentgrpo.rewards.shipped import Reward
from agentgrpo.support.files import CHECKSUMS, read_table, verify_checksums
from agentgrpo.train.command_line import report_errors
from agentgrpo.train.interrupt import interruptible
from agentgrpo.train.plugins import make_reward
from agentgrpo.train.resolve import judges_by_class
from agentgrpo.types import (
    Float32,
    Group,
    Int32,
    Rollout,
    Segment,
    Status,
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
    notes: list[str] = field(default_factory=list)
    """What the records do not prove, of this run."""


@dataclass(frozen=True, slots=True)
class Run:
    """What run.json says of a run."""

    config: TrainConfig
    vocab_size: int
    limit: float
    """Largest difference in nats between the sampler and the learner before an update."""
    outliers: float
    """Share of the tokens that may be further apart."""
    reward: Reward | None
    """The shipped reward, run again on what is recorded; None: it is the user's own."""


def verify_run(run: Path) -> Report:
    """Check all records of a run directory; FileNotFoundError, ValueError: it is none, by name."""
    if not (run / "run.json").is_file():
        raise FileNotFoundError(f"{run}: no run.json, which a run's folder (out_dir) has")
    about, seals = _described(run / "run.json")
    report = Report()
    metrics = Chain(run / "metrics.jsonl", seals["metrics.jsonl"])
    chain = Chain(run / "rollouts.jsonl", seals["rollouts.jsonl"])
    due = _blocks(list(metrics), about.config, report)
    heldout: list[Any] = []
    for (step, split), block in groupby(chain, key=lambda line: _when(line, chain)):
        lines = list(block)
        where = f"step {step} {split}"
        row = _row_of(due, where, lines[-1], report)
        badly = [
            f"{chain.path.name}:{line.number}: {fault}"
            for line in lines
            for fault in schema_faults(line.row)
        ]
        if badly:
            report.faults += badly
            continue
        groups = _groups(lines, chain)
        misplaced = [f"{where} {fault}" for fault in _place_faults(lines, groups, about)]
        if misplaced and row is None and not lines[-1].sealed:  # as far as it was written
            _verify_rollouts(report, groups, about, where, compared=split == "train")
            continue
        report.faults += misplaced
        if split == "train":
            _verify_step(report, groups, about, step, row)
            continue
        _verify_evaluation(report, groups, about, step, row)
        tasks = [(g.task.id, g.task.messages, g.task.spec) for g in groups]
        if heldout and tasks != heldout:
            report.faults.append("the evaluations did not play the same tasks")
        heldout = tasks
    report.faults += [f"step {step} {split}: its rollouts are missing" for step, split, _ in due]
    if chain.cut or metrics.cut:
        report.notes.append("the last line has no end: the run was ended while it wrote it")
    report.faults += [*metrics.faults, *chain.faults, *_checkpoint_faults(run)]
    return report


def _checkpoint_faults(run: Path) -> Iterator[str]:
    """That the checkpoints are there as they were saved."""
    for folder in sorted(run.glob(SAVED)):
        try:
            verify_checksums(folder)
        except (ValueError, OSError) as error:
            yield f"{folder.name}: {error}"
        if not (folder / CHECKSUMS).is_file():
            yield f"{folder.name}: no {CHECKSUMS}, so that its files are as saved is not proven"


def _described(path: Path) -> tuple[Run, Mapping[str, Mapping[str, Any]]]:
    """What run.json says, and its seals of both files."""
    described = read_table(path)
    try:
        config = validate(TrainConfig, described["config"], str(path))
        device, seals = described["learner"]["device"], described["records"]
        seals = {
            name: {key: seals[name][key] for key in ("bytes", "hash")}
            for name in ("metrics.jsonl", "rollouts.jsonl")
        }
        limit = config.engine.agreement_on(device)
        outliers = outliers_of(config.engine.dtype_on(device))
        reward = _shipped_reward(config, described.get("reward"))
        run = Run(config, int(described["vocab_size"]), limit, outliers, reward)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not that of a training run: {error!r}") from error
    return run, seals


def _shipped_reward(config: TrainConfig, chosen: Mapping[str, Any] | None) -> Reward | None:
    """The reward chosen for the run; one that recorded no choice is decided by its classes."""
    reward = config.reward
    if chosen is not None:
        reward = reward.model_copy(update={name: chosen[name] for name in ("kind", "format")})
    judges = judges_by_class(config) if reward.kind == "auto" else False
    if ":" in reward.kind or judges is None:
        return None
    return make_reward(reward, judges=judges)


def _blocks(
    lines: Sequence[Line], config: TrainConfig, report: Report
) -> deque[tuple[int, str, Mapping[str, Any]]]:
    """The blocks of rollouts.jsonl that metrics.jsonl tells of, in order, each with its line."""
    due: deque[tuple[int, str, Mapping[str, Any]]] = deque()
    evaluated: set[int] = set()
    following = 0
    for line in lines:
        row, name = line.row, f"metrics.jsonl:{line.number}"
        areas = {name.partition("/")[0] for name in row if "/" in name}
        if row.get("step") != following:
            report.faults.append(f"{name}: step {row.get('step')}, but {following} follows")
        if areas == {"rollout", "learner", "engine", "time"}:
            due.append((following, "train", row))
            if not evaluated:
                report.faults.append(f"{name}: no evaluation before the first step")
            following += 1
        elif areas == {"eval", "time"}:
            due.append((following, "heldout", row))
            if following in evaluated:
                report.faults.append(f"{name}: step {following} is evaluated twice")
            evaluated.add(following)
        elif areas != {"preflight"}:
            report.faults.append(f"{name}: of no step and no evaluation: {sorted(areas)}")
    if not {0, config.steps} <= evaluated:
        report.notes.append(
            f"the run has not come to its end: {following} of {config.steps} steps are "
            "recorded; that there were no more of them is not proven"
        )
    return due


def _row_of(
    due: deque[tuple[int, str, Mapping[str, Any]]], where: str, last: Line, report: Report
) -> Mapping[str, Any] | None:
    """The line of metrics.jsonl of a block that ends with this line of rollouts.jsonl."""
    if not due and not last.sealed:
        report.notes.append(
            f"{where}: no line of metrics.jsonl, so the learner refused the step or the run was "
            "ended in it"
        )
        return None
    follows = "{} {}".format(*due[0]) if due else "nothing"
    if f"step {follows}" != where:
        report.faults.append(f"{where}: out of place: by metrics.jsonl, {follows} follows")
        return None
    row = due.popleft()[2]
    if row.get("rollouts_hash") != last.hash:
        report.faults.append(f"{where}: metrics.jsonl names another last rollout")
    return row


def _when(line: Line, chain: Chain) -> tuple[int, str]:
    try:
        return line.row["step"], line.row["split"]
    except KeyError as error:
        raise ValueError(f"{chain.path}:{line.number}: lacks {error}") from None


def _groups(lines: Sequence[Line], chain: Chain) -> list[Group]:
    """The groups of a block, branches sharing segments with their parents (see rejoin())."""
    rollouts = []
    for line in lines:
        try:
            rollouts.append((line.row["group"], read_rollout(dict(line.row))))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{chain.path}:{line.number}: {error}") from error
    lists = [[r for _, r in part] for _, part in groupby(rollouts, key=lambda pair: pair[0])]
    return [Group(task=group[0].task, rollouts=group) for group in lists]


def _place_faults(lines: Sequence[Line], groups: Sequence[Group], run: Run) -> Iterator[str]:
    """Whether a block's groups and rollouts are all there, in order, each of one task."""
    c, split = run.config.rollout, lines[0].row["split"]
    size = c.group_size if split == "train" else 1
    places = [(line.row["group"], line.row["index"]) for line in lines]
    if places != [(g, i) for g in range(len(groups)) for i in range(size)]:
        yield f": groups and indices are not 0, 1, ... of {size} rollouts each"
    if split not in ("train", "heldout"):
        yield ": no split of a run"
    most = (1 + c.max_refills) * c.tasks_per_step
    if split == "train" and not (len(groups) % c.tasks_per_step == 0 < len(groups) <= most):
        yield f": {len(groups)} groups, of {c.tasks_per_step} tasks a round and {most} at most"
    if split == "heldout" and len(groups) > run.config.data.num_heldout:
        yield f": {len(groups)} groups, of data.num_heldout {run.config.data.num_heldout}"
    for number, group in enumerate(groups):
        first = group.task
        for index, rollout in enumerate(group.rollouts):
            if rollout.task != first:
                yield f"group {number} rollout {index}: of another task than its group"
        for index, fault in rejoin(group):
            yield f"group {number} rollout {index}: {fault}"


def _verify_step(
    report: Report, groups: Sequence[Group], run: Run, step: int, row: Mapping[str, Any] | None
) -> None:
    where = f"step {step} train"
    _verify_rollouts(report, groups, run, where, compared=True)
    report.steps += 1
    report.faults += [
        f"{where} group {group} rollout {index}: {fault}"
        for group, index, fault in (
            *advantage_faults(groups, run.config.credited),
            *taught_faults(groups, run.config),
        )
    ]
    faults, terms = step_faults(groups, run.config, step, run.limit, run.outliers)
    report.terms += terms
    report.learned += sum(_num_learned(r) for group in groups for r in group.rollouts)
    if row is not None:
        faults += line_faults(row, step_sums(row, groups, run.config))
        faults += learner_faults(
            row, groups, step=step, terms=terms, config=run.config, limit=run.limit
        )
        if terms and not any(_num_learned(r) for group in groups for r in group.rollouts):
            faults.append("it was learned from, and what the learner saw is not recorded")
    report.faults += [f"step {step}: {fault}" for fault in faults]


def _verify_evaluation(
    report: Report, groups: Sequence[Group], run: Run, step: int, row: Mapping[str, Any] | None
) -> None:
    where = f"step {step} heldout"
    _verify_rollouts(report, groups, run, where, compared=False)
    for number, group in enumerate(groups):
        for index, rollout in enumerate(group.rollouts):
            name = f"{where} group {number} rollout {index}"
            if rollout.learner_logprobs is not None:
                report.faults.append(f"{name}: seen by the learner, but not played for training")
            if rollout.advantage or rollout.segment_advantages or rollout.parent is not None:
                report.faults.append(f"{name}: compared with others, but played alone")
    if row is not None:
        faults = line_faults(row, played(groups, "eval"))
        report.faults += [f"{where}: {fault}" for fault in faults]


def _verify_rollouts(
    report: Report, groups: Sequence[Group], run: Run, where: str, *, compared: bool
) -> None:
    """What is wrong with each by itself; compared: with others of its group, for training."""
    config = run.config
    for number, group in enumerate(groups):
        for index, rollout in enumerate(group.rollouts):
            accounted = bool(rollout.turns) or not config.rollout.sampler
            faults = list(rollout_faults(rollout, accounted=accounted, vocab_size=run.vocab_size))
            faults += treatment_faults(rollout, config)
            if not config.rollout.sampler and rollout.rows[0]:
                faults += status_faults(rollout, config)
            faults += _reward_faults(rollout, run, compared=compared)
            name = f"{where} group {number} rollout {index}"
            report.faults += [f"{name}: {fault}" for fault in faults]
            report.unaccounted += not accounted
            _count(report, rollout)


def _reward_faults(rollout: Rollout, run: Run, *, compared: bool) -> Iterator[str]:
    """Run the shipped reward again on what is recorded; not what environments or functions gave."""
    c = run.config.reward
    if rollout.status is Status.INFRA_ERROR:
        return
    replaced = {"format"} if compared and (c.sigma_tool or c.sigma_length) else set()
    again = replace(rollout, weights={})  # which the reward writes down
    try:
        parts = run.reward(again) if run.reward else {}
    except (ValueError, KeyError, TypeError) as error:
        yield f"its reward cannot be computed again: {error}"
        return
    for name in parts.keys() - replaced:
        said = rollout.rewards.get(name)
        if said is None or not math.isclose(said, parts[name], abs_tol=1e-12):
            yield f"reward {name!r} is {said}, its answer and counts give {parts[name]:.6g}"
    for name in again.weights.keys() - replaced:
        if rollout.weights.get(name) != again.weights[name]:
            yield f"reward {name!r} is not said to be weighted by {again.weights[name]:g}"
    if c.solved_at is None or replaced:
        return
    if rollout.stats.get("solved") != float(reward_of(rollout) >= c.solved_at):
        yield f"stats: solved is not a reward of {c.solved_at:g} or more"


def _num_learned(rollout: Rollout) -> int:
    return sum(len(values) for values in rollout.learner_logprobs or () if values is not None)


def step_faults(
    groups: Sequence[Group], config: TrainConfig, step: int, limit: float, outliers: float = 0.0
) -> tuple[list[str], int]:
    """What is wrong with a step's packed batches, and how many loss terms they have.

    `limit` and `outliers` are those of Run.
    """
    faults: list[str] = []
    terms = 0
    parts = samples_of(groups, config, step)
    try:
        updates = plan_updates(groups, config, step=step)
    except ValueError as error:
        return [f"it cannot be packed: {error}"], 0
    if len(parts) != len(updates):
        return [f"{len(updates)} updates, of {len(parts)}"], 0
    packed_parts = [packed_of(part, config) for part in parts]
    share = sum(num_sampled(r.rows) for part in packed_parts for r in part) / len(parts)
    for number, (part, rollouts, update) in enumerate(
        zip(parts, packed_parts, updates, strict=True)
    ):
        weights = weights_of(rollouts, sum(len(group.rollouts) for group in part), share, config)
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
        gap = widest_gap([gaps for rollout in rollouts for gaps in gaps_of(rollout)], outliers)
        if number == 0 and not gap <= limit:  # later ones are of another policy
            faults.append(f"the learner and the sampler are {gap:.3g} nats apart, over {limit:.3g}")
    return faults, terms


def _wanted(rollouts: Sequence[Rollout], config: TrainConfig) -> Counter[int]:
    """How many loss terms each rollout has: the sampled tokens of those rows that move the loss.

    Where the loss reads a rollout's tokens together, any row of it moves the others'.
    """
    loss, all_move = config.loss, config.teacher.teaches
    all_move |= loss.beta != 0 or loss.entropy_coef != 0 or loss.top_entropy_quantile < 1
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
    """Read a batch back: each term's history is the ids that see it, by PackedBatch."""
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


def rejoin(group: Group) -> Iterator[tuple[int, str]]:
    """Give branches the very segments they share with their parents, which a record repeats.

    Yields an index in the group and what is wrong with that branch's beginning.
    """
    for index, rollout in enumerate(group.rollouts):
        if rollout.parent is None:
            if rollout.forked_at is not None:
                yield index, "has a place where it branched off, but no parent"
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
    parser.add_argument("run", type=Path, help="a run's folder (out_dir)")
    parser.add_argument(
        "--again", nargs="?", const="", metavar="STEPS",
        help="then play and learn steps again (7, or 7-9; else all since the newest checkpoint)",
    )  # fmt: skip
    parser.add_argument(
        "--tools", action="store_true", help="then make all tool calls again, without a model"
    )
    args = parser.parse_args(arguments)
    with interruptible(), report_errors() as outcome:
        outcome.status = _print_report(verify_run(args.run))
        if args.tools and not outcome.status:
            outcome.status = int(call_again(args.run) > 0)
        if args.again is not None and not outcome.status:
            outcome.status = int(play_again(args.run, args.again) is not None)
    return outcome.status


def _print_report(report: Report) -> int:
    for line in (*report.faults, *report.notes):
        print(line)  # noqa: T201
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

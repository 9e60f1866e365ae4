"""Prove from a run's records that it trained on exactly the tokens that its engine saw.

Besides the tokens, the records hold the engine's hashes of each request: of the prompt it used and
of the ids it sampled. docs/rollouts.md explains what they prove, how, and what stays unproven.

verify shares no code with what it checks: it reads packed batches back by their definition
(learn.batch.PackedBatch) and computes everything else from the definitions in this folder.
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
    teacher_faults,
    weights_of,
)
from agentgrpo.inspect.verify.chain import Chain, Line
from agentgrpo.inspect.verify.metrics import learner_faults, line_faults, rollout_means, step_sums
from agentgrpo.inspect.verify.replay import replay_steps, replay_tools
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
    """Counts of checked records, and the faults."""

    rollouts: int = 0
    unaccounted: int = 0
    """Rollouts of a user's own sampler without the engine's hashes."""
    turns: int = 0
    forks: int = 0
    sampled_tokens: int = 0
    steps: int = 0
    terms: int = 0
    learned: int = 0
    """Loss terms with recorded log-probabilities of the learner."""
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the records of this run do not prove."""


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of run.json that verify needs."""

    config: TrainConfig
    vocab_size: int
    limit: float
    """Largest difference in nats between the sampler and the learner before an update."""
    outliers: float
    """Share of the tokens that may exceed it."""
    reward: Reward | None
    """The shipped reward, to compute rewards again; None: the reward is the user's own."""


def verify_run(run: Path) -> Report:
    """Check all records of a run's folder.

    Raises:
        FileNotFoundError, ValueError: it is not a run's folder; names the file.
    """
    if not (run / "run.json").is_file():
        raise FileNotFoundError(f"{run}: no run.json, which a run's folder (out_dir) has")
    described, seals = _read_run_json(run / "run.json")
    report = Report()
    metrics = Chain(run / "metrics.jsonl", seals["metrics.jsonl"])
    chain = Chain(run / "rollouts.jsonl", seals["rollouts.jsonl"])
    due = _blocks(list(metrics), described.config, report)
    heldout: list[Any] = []
    for (step, split), block in groupby(chain, key=lambda line: _step_and_split(line, chain)):
        lines = list(block)
        where = f"step {step} {split}"
        row = _row_of(due, where, lines[-1], report)
        schema_errors = [
            f"{chain.path.name}:{line.number}: {fault}"
            for line in lines
            for fault in schema_faults(line.row)
        ]
        if schema_errors:
            report.faults += schema_errors
            continue
        groups = _groups(lines, chain)
        misplaced = [f"{where} {fault}" for fault in _place_faults(lines, groups, described)]
        if misplaced and row is None and not lines[-1].sealed:  # cut short when the run was killed
            _verify_rollouts(report, groups, described, where, compared=split == "train")
            continue
        report.faults += misplaced
        if split == "train":
            _verify_step(report, groups, described, step, row)
            continue
        _verify_evaluation(report, groups, described, step, row)
        tasks = [(g.task.id, g.task.messages, g.task.spec) for g in groups]
        if heldout and tasks != heldout:
            report.faults.append(f"step {step} heldout: other tasks than the evaluation before")
        heldout = tasks
    report.faults += [f"step {step} {split}: its rollouts are missing" for step, split, _ in due]
    if chain.cut or metrics.cut:
        report.notes.append("the last line has no end: the run was ended while it wrote it")
    report.faults += [*metrics.faults, *chain.faults, *_checkpoint_faults(run)]
    return report


def _checkpoint_faults(run: Path) -> Iterator[str]:
    for folder in sorted(run.glob(SAVED)):
        try:
            verify_checksums(folder)
        except (ValueError, OSError) as error:
            yield f"{folder.name}: {error}"
        if not (folder / CHECKSUMS).is_file():
            yield f"{folder.name}: no {CHECKSUMS}, so nothing proves that its files are as saved"


def _read_run_json(path: Path) -> tuple[Run, Mapping[str, Mapping[str, Any]]]:
    """Read run.json; returns it with its seals of both files."""
    table = read_table(path)
    try:
        config = validate(TrainConfig, table["config"], str(path))
        device, seals = table["learner"]["device"], table["records"]
        seals = {
            name: {key: seals[name][key] for key in ("bytes", "hash")}
            for name in ("metrics.jsonl", "rollouts.jsonl")
        }
        limit = config.engine.agreement_on(device)
        outliers = outliers_of(config.engine.dtype_on(device))
        reward = _shipped_reward(config, table.get("reward"))
        run = Run(config, int(table["vocab_size"]), limit, outliers, reward)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the run.json of a training run: {error!r}") from error
    return run, seals


def _shipped_reward(config: TrainConfig, resolved: Mapping[str, Any] | None) -> Reward | None:
    """The run's shipped reward; None: the user's own, or unknown.

    The config may have kind "auto"; run.json has the resolved kind. Older runs lack it: for them it
    is resolved from the classes again.
    """
    reward = config.reward
    if resolved is not None:
        reward = reward.model_copy(update={name: resolved[name] for name in ("kind", "format")})
    judges = judges_by_class(config) if reward.kind == "auto" else False
    if ":" in reward.kind or judges is None:
        return None
    return make_reward(reward, judges=judges)


def _blocks(
    lines: Sequence[Line], config: TrainConfig, report: Report
) -> deque[tuple[int, str, Mapping[str, Any]]]:
    """The blocks of rollouts.jsonl that metrics.jsonl lists, in order: step, split and its line."""
    due: deque[tuple[int, str, Mapping[str, Any]]] = deque()
    evaluated: set[int] = set()
    next_step = 0
    for line in lines:
        row, name = line.row, f"metrics.jsonl:{line.number}"
        areas = {name.partition("/")[0] for name in row if "/" in name}
        if row.get("step") != next_step:
            report.faults.append(f"{name}: expected step {next_step}, got {row.get('step')}")
        if areas == {"rollout", "learner", "engine", "time"}:
            due.append((next_step, "train", row))
            if not evaluated:
                report.faults.append(f"{name}: no evaluation before the first step")
            next_step += 1
        elif areas == {"eval", "time"}:
            due.append((next_step, "heldout", row))
            if next_step in evaluated:
                report.faults.append(f"{name}: step {next_step} is evaluated twice")
            evaluated.add(next_step)
        elif areas != {"preflight"}:
            report.faults.append(f"{name}: neither a step nor an evaluation: {sorted(areas)}")
    if not {0, config.steps} <= evaluated:
        report.notes.append(
            f"the run has not come to its end: {next_step} of {config.steps} steps are "
            "recorded; that there were no more of them is not proven"
        )
    return due


def _row_of(
    due: deque[tuple[int, str, Mapping[str, Any]]], where: str, last: Line, report: Report
) -> Mapping[str, Any] | None:
    """The line of metrics.jsonl for a block that ends with `last`; None: there is none."""
    if not due and not last.sealed:
        report.notes.append(
            f"{where}: no line of metrics.jsonl, so the learner refused the step or the run was "
            "ended in it"
        )
        return None
    expected = "step {} {}".format(*due[0]) if due else "no more rollouts"
    if expected != where:
        report.faults.append(f"{where}: expected {expected} by metrics.jsonl")
        return None
    row = due.popleft()[2]
    if row.get("rollouts_hash") != last.hash:
        report.faults.append(f"{where}: rollouts_hash in metrics.jsonl is of another rollout")
    return row


def _step_and_split(line: Line, chain: Chain) -> tuple[int, str]:
    try:
        return line.row["step"], line.row["split"]
    except KeyError as error:
        raise ValueError(f"{chain.path}:{line.number}: no key {error}") from None


def _groups(lines: Sequence[Line], chain: Chain) -> list[Group]:
    rollouts = []
    for line in lines:
        try:
            rollouts.append((line.row["group"], read_rollout(dict(line.row))))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{chain.path}:{line.number}: {error}") from error
    lists = [[r for _, r in part] for _, part in groupby(rollouts, key=lambda pair: pair[0])]
    return [Group(task=group[0].task, rollouts=group) for group in lists]


def _place_faults(lines: Sequence[Line], groups: Sequence[Group], run: Run) -> Iterator[str]:
    """Missing or misordered groups and rollouts of a block, and groups of several tasks."""
    c, split = run.config.rollout, lines[0].row["split"]
    size = c.group_size if split == "train" else 1
    places = [(line.row["group"], line.row["index"]) for line in lines]
    if places != [(g, i) for g in range(len(groups)) for i in range(size)]:
        yield f": expected groups 0, 1, ... of {size} rollouts each, in order"
    if split not in ("train", "heldout"):
        yield ": split: expected train or heldout"
    most = (1 + c.max_refills) * c.tasks_per_step
    if split == "train" and not (len(groups) % c.tasks_per_step == 0 < len(groups) <= most):
        yield f": expected a multiple of {c.tasks_per_step} up to {most} groups, got {len(groups)}"
    if split == "heldout" and len(groups) > run.config.data.num_heldout:
        yield f": {len(groups)} groups, more than data.num_heldout {run.config.data.num_heldout}"
    for number, group in enumerate(groups):
        first = group.task
        for index, rollout in enumerate(group.rollouts):
            if rollout.task != first:
                yield f"group {number} rollout {index}: another task than rollout 0 of its group"
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
            *teacher_faults(groups, run.config),
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
            faults.append("has loss terms, but no learner_logprobs")
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
                report.faults.append(f"{name}: held out, but has learner_logprobs")
            if rollout.advantage or rollout.segment_advantages or rollout.parent is not None:
                report.faults.append(f"{name}: held out, but has an advantage or a parent")
    if row is not None:
        faults = line_faults(row, rollout_means(groups, "eval"))
        report.faults += [f"{where}: {fault}" for fault in faults]


def _verify_rollouts(
    report: Report, groups: Sequence[Group], run: Run, where: str, *, compared: bool
) -> None:
    """Check each rollout by itself; `compared`: it is in a training group."""
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
    """Compute the shipped reward again; parts from environments and functions are not checked."""
    c = run.config.reward
    if rollout.status is Status.INFRA_ERROR:
        return
    replaced = {"format"} if compared and (c.sigma_tool or c.sigma_length) else set()
    copied = replace(rollout, weights={})  # the reward fills in the weights
    try:
        parts = run.reward(copied) if run.reward else {}
    except (ValueError, KeyError, TypeError) as error:
        yield f"its reward cannot be computed again: {error}"
        return
    for name in parts.keys() - replaced:
        recorded = rollout.rewards.get(name)
        if recorded is None or not math.isclose(recorded, parts[name], abs_tol=1e-12):
            yield f"reward {name!r}: expected {parts[name]:.6g} from its answer, got {recorded}"
    for name in copied.weights.keys() - replaced:
        if (recorded := rollout.weights.get(name)) != copied.weights[name]:
            yield f"weight of reward {name!r}: expected {copied.weights[name]:g}, got {recorded}"
    if c.solved_at is None or replaced:
        return
    if rollout.stats.get("solved") != (solved := float(reward_of(rollout) >= c.solved_at)):
        yield f"stats: solved: expected {solved:g} by reward.solved_at {c.solved_at:g}"


def _num_learned(rollout: Rollout) -> int:
    return sum(len(values) for values in rollout.learner_logprobs or () if values is not None)


def step_faults(
    groups: Sequence[Group], config: TrainConfig, step: int, limit: float, outliers: float = 0.0
) -> tuple[list[str], int]:
    """The faults of a step's packed batches, and their number of loss terms.

    `limit` and `outliers` as in Run.
    """
    faults: list[str] = []
    terms = 0
    parts = samples_of(groups, config, step)
    try:
        updates = plan_updates(groups, config, step=step)
    except ValueError as error:
        return [f"cannot be packed: {error}"], 0
    if len(parts) != len(updates):
        return [f"expected {len(parts)} updates, got {len(updates)}"], 0
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
        expected = _num_terms(rollouts, config)
        wrong = [i for i in sorted(packed | expected) if packed[i] != expected[i]]
        if wrong:
            faults.append(f"update {number}: wrong number of loss terms: rollouts {wrong}")
        learned = Counter({i: n for i, r in enumerate(rollouts) if (n := _num_learned(r))})
        wrong = [i for i in sorted(packed | learned) if packed[i] != learned[i]]
        if learned and wrong:
            faults.append(
                f"update {number}: number of learner_logprobs is not that of the loss terms: "
                f"rollouts {wrong}"
            )
        gap = widest_gap([gaps for rollout in rollouts for gaps in gaps_of(rollout)], outliers)
        if number == 0 and not gap <= limit:  # later updates are of another policy
            faults.append(f"learner and sampler differ by {gap:.3g} nats, more than {limit:.3g}")
    return faults, terms


def _num_terms(rollouts: Sequence[Rollout], config: TrainConfig) -> Counter[int]:
    """Loss terms per rollout: the sampled tokens of those rows that change the loss.

    If the loss reads a rollout's tokens together, one such row adds all rows.
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
    """The advantages of the sampled tokens, per row."""
    segments = rollout.all_segments
    values = iter(rollout.segment_advantages or [rollout.advantage] * len(segments))
    return [
        np.concatenate(
            [
                np.full(len(segment.token_ids) if segment.sampled else 0, next(values), np.float32)
                for segment in row
            ]
        )
        for row in rollout.rows
    ]


def _flat(row: Sequence[Segment]) -> tuple[Int32, NDArray[np.bool_], Float32]:
    """A row's ids, mask and log-probabilities; 0 where not sampled."""
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
    """Rebuild rows from a packed batch by its definition and compare them with the rollouts."""
    size = len(batch.input_ids_T)
    if (np.arange(size) >= batch.tout_T).any() or (batch.tout_T > size).any():
        yield "a subtree ends before it begins, or after the batch"
        return
    opened = np.ones(size, np.int64) - np.bincount(batch.tout_T, minlength=size + 1)[:size]
    if not np.array_equal(np.cumsum(opened), batch.positions_T + 1):
        yield "a token's position is not the number of tokens that it sees"
    for sample in np.unique(batch.sample_N).tolist():
        if not 0 <= sample < len(rollouts):
            yield f"sample {sample}, but there are {len(rollouts)}"
            continue
        sample_terms = np.flatnonzero(batch.sample_N == sample)
        turn = 0
        for row, advantages in zip(
            rollouts[sample].rows, _advantages(rollouts[sample]), strict=True
        ):
            first, turn = turn, turn + sum(segment.sampled for segment in row)
            turns = batch.turn_N[sample_terms]
            terms = sample_terms[(turns >= first) & (turns < turn)]
            if len(terms) not in (0, len(advantages)):  # a batch holds a whole row or none of it
                yield f"sample {sample}: {len(terms)} terms for {len(advantages)} sampled tokens"
            elif len(terms):
                faults = _row_faults(batch, terms, *_flat(row))
                yield from (f"sample {sample}: {fault}" for fault in faults)
                if not np.array_equal(batch.advantage_N[terms], advantages):
                    yield f"sample {sample}: its terms have other advantages"
        recorded = batch.weight_N[sample_terms]
        if not np.allclose(recorded, weights[sample], rtol=WEIGHT_TOLERANCE, atol=0):
            yield f"sample {sample}: the weight of its terms is not {weights[sample]:.6g}"


def _row_faults(
    batch: PackedBatch,
    terms: NDArray[np.int64],
    ids: Int32,
    mask: NDArray[np.bool_],
    logprobs: Float32,
) -> Iterator[str]:
    """Compare a row's terms with its sampled tokens, and their history with the row."""
    positions = np.flatnonzero(mask)
    if not np.array_equal(batch.target_N[terms], ids[positions]):
        yield "targets are not the sampled ids"
    if not np.array_equal(batch.old_logp_N[terms], logprobs[positions]):
        yield "log-probabilities are not the sampled ones"
    # the last term is enough: earlier terms see a prefix of its history, of the right length
    last = batch.row_N[terms[-1]]
    history = np.flatnonzero((np.arange(last + 1) <= last) & (batch.tout_T[: last + 1] > last))
    if not np.array_equal(batch.input_ids_T[history], ids[: positions[-1]]):
        yield "the last term sees another history than its row"
    elif not np.array_equal(history[positions - 1], batch.row_N[terms]):
        yield "a term is not predicted at the token before it"


def rejoin(group: Group) -> Iterator[tuple[int, str]]:
    """Replace a branch's copies of shared segments by its parent's segment objects.

    Records repeat shared segments; packing recognises them by identity. Yields an index in the
    group and the fault of that branch's prefix.
    """
    for index, rollout in enumerate(group.rollouts):
        if rollout.parent is None:
            if rollout.forked_at is not None:
                yield index, "has forked_at, but no parent"
            continue
        parent = group.rollouts[rollout.parent] if 0 <= rollout.parent < index else rollout
        pairs = list(zip(rollout.segments, parent.segments, strict=False))
        ends = np.cumsum([len(ours.token_ids) for ours, _ in pairs]).tolist()
        count = 1 + ends.index(rollout.forked_at) if rollout.forked_at in ends else 0
        if parent is rollout or not count or not all(starmap(_is_same, pairs[:count])):
            yield index, f"does not begin like its parent, rollout {rollout.parent}"
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
    """Verify a run; returns the exit status."""
    parser = parser_of("verify", __doc__)
    parser.add_argument("run", type=Path, help="a run's folder (out_dir)")
    parser.add_argument(
        "--again", nargs="?", const="", metavar="STEPS",
        help="then repeat steps (7 or 7-9; default: all since the newest checkpoint) and compare",
    )  # fmt: skip
    parser.add_argument(
        "--tools", action="store_true", help="then repeat all tool calls, without a model"
    )
    args = parser.parse_args(arguments)
    with interruptible(), report_errors() as outcome:
        outcome.status = _print_report(verify_run(args.run))
        if args.tools and not outcome.status:
            outcome.status = int(replay_tools(args.run) > 0)
        if args.again is not None and not outcome.status:
            outcome.status = int(replay_steps(args.run, args.again) is not None)
    return outcome.status


def _print_report(report: Report) -> int:
    for line in (*report.faults, *report.notes):
        print(line)
    print(
        f"{len(report.faults)} faults in {report.rollouts} rollouts: {report.turns} turns, "
        f"{report.forks} forks, {report.sampled_tokens} sampled tokens; {report.steps} steps "
        f"packed into {report.terms} loss terms, {report.learned} of them with the learner's view"
    )
    if report.unaccounted:
        print(
            f"of {report.unaccounted} rollouts of rollout.sampler it is not recorded what the "
            "engine saw: that their tokens are what it sampled is not proven"
        )
    return 1 if report.faults else 0

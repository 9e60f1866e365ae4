"""`agentgrpo verify RUN --again` and `--tools`: repeat recorded steps or tool calls.

--again repeats rollouts and training from a checkpoint of the run, or from its start, in a
temporary folder, and compares every recorded line and the saved weights with the run's. This also
detects edited records whose hashes were recomputed. --tools repeats only the tool calls, in fresh
sandboxes and without a model: a script replays the recorded turns.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.config.read import validate
from agentgrpo.records import checkpoint
from agentgrpo.records.diff import first_difference, setting_differences, weight_checksums
from agentgrpo.records.metrics import FILES
from agentgrpo.records.rollouts import name_of, read_rollouts
from agentgrpo.support.atomic_files import numbered_rows
from agentgrpo.support.files import read_table
from agentgrpo.train.build import build, sampler_of
from agentgrpo.train.callbacks import Callback
from agentgrpo.train.parts import Parts
from agentgrpo.train.prepare import prepare_run
from agentgrpo.train.progress import Progress
from agentgrpo.types import Int32, Rollout, Status, token_hash

MAX_SHOWN = 20
"""Differing answers that are printed."""


class _StopAfter(Callback):
    """Stops a run after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        if step >= self._step:
            trainer.stop()


def replay_steps(
    run: Path, steps: str = "", make: Callable[[TrainConfig], Parts] | None = None
) -> str | None:
    """Repeat steps, print a summary, and return the first difference; None: bit-equal.

    Args:
        run: a run's folder.
        steps: "7-9" or "7", counted from 1 as a run prints them; starts at the newest checkpoint
            before. "": all steps recorded after the newest checkpoint, or all without one.
        make: as for Trainer.
    """
    from agentgrpo.train.trainer import Trainer

    config, device = _read_config(run)
    start, end, saved = _span_of(run, steps)
    if not config.on(device).rollout.deterministic:
        print("rollout.deterministic was not set: what differs may be rounding")
    with tempfile.TemporaryDirectory(prefix=".again-", dir=run) as folder:
        other = Path(folder)
        if saved is not None:
            (other / "checkpoints").mkdir()
            for name in (*FILES, "run.json"):  # resuming cuts them back to the checkpoint
                shutil.copy(run / name, other)
            (other / "checkpoints" / saved.name).symlink_to(saved.resolve())
        progress = Progress(config.steps, names_folder=False)
        make_parts = functools.partial(build, progress=progress)
        # keep all checkpoints to compare: those due, the first and the last
        num_checkpoints = end // config.save_every - start // config.save_every + 2
        changed = {"out_dir": other, "keep_checkpoints": num_checkpoints, "trackers": ()}
        copied = config.model_copy(update=changed)
        with Trainer(copied, callbacks=_StopAfter(end), make=make or make_parts) as trainer:
            trainer.train()
        for line in setting_differences(run, other):
            print(f"differs: {line}")
        difference = first_difference(run, other, since=start, until=end + (end == config.steps))
        common = weight_checksums(run).keys() & weight_checksums(other)
        checkpoints = sum(step > start for step in common)
    rows = numbered_rows(run / "rollouts.jsonl", growing=True)
    rollouts = sum(start <= row["step"] < end for _, row in rows)
    print(
        f"steps {start + 1} to {end} again: {rollouts} rollouts, {checkpoints} checkpoints, "
        f"{f'NOT the same: {difference}' if difference else 'bit-equal'}"
    )
    return difference


def _read_config(run: Path) -> tuple[TrainConfig, str]:
    """A run's config, and its engine's device."""
    table = read_table(run / "run.json")
    return validate(TrainConfig, table["config"], str(run / "run.json")), table["engine"]["device"]


def _span_of(run: Path, steps: str) -> tuple[int, int, Path | None]:
    """The steps to repeat, [start, end) from 0, and the checkpoint to start from."""
    rows = numbered_rows(run / "metrics.jsonl", growing=True)
    recorded = sum("learner/loss" in row for _, row in rows)
    low, _, high = steps.partition("-")
    digits = low.isdigit() and (high or low).isdigit()
    requested = (int(low) - 1, int(high or low)) if digits else (-1, -1)
    first, end = requested if steps else (recorded - 1, recorded)
    if not 0 <= first < end <= recorded:
        raise ValueError(f"--again {steps}: expected steps from 1 to {recorded}, as 7 or 7-9")
    saved = {checkpoint.step_of(path): path for path in run.glob(checkpoint.SAVED)}
    start = max((step for step in saved if step <= first), default=0)
    return start, end, saved.get(start)


def replay_tools(run: Path) -> int:
    """Repeat the tool calls of recorded rollouts; print and count different answers.

    The agent reads the recorded turns and the environment executes their calls. Rollouts that ended
    with infra_error or timed_out are left out.
    """
    config, _ = _read_config(run)
    rollout_config = config.rollout.model_copy(update={"max_retries": 0})
    config = config.model_copy(update={"rollout": rollout_config})
    excluded = (Status.INFRA_ERROR, Status.TIMED_OUT)
    records = [r for r in read_rollouts(run / "rollouts.jsonl") if r[1].status not in excluded]
    scripts = [_turns(rollout) for _, rollout in records]

    def complete(index: int, turn: int, prompt: Int32) -> tuple[list[int], str]:
        if turn < 0 or records[index][1].stats.get("frozen_turns"):
            raise ValueError("--tools: turns of a model in another role are not recorded")
        # by hash, not in order: a program may have several requests at once
        turns, requested = scripts[index], token_hash(prompt)
        place = next(
            (i for i, (prompt_hash, *_) in enumerate(turns) if prompt_hash == requested), 0
        )
        return turns.pop(place)[1:] if turns else ([], "length")  # the recorded rollout ended here

    differences, failed = [], 0
    with contextlib.closing(prepare_run(config, trained=False)) as parts:
        if parts.user_sampler is not None:
            raise ValueError(
                "--tools: not available with rollout.sampler, which makes its own calls"
            )
        limit = config.engine.max_model_len
        with contextlib.closing(sampler_of(complete, config, parts, limit)) as sampler:
            groups, _ = sampler.play([rollout.task for _, rollout in records], 1, seed=config.seed)
        for (place, before), group in zip(records, groups, strict=True):
            after = group.rollouts[0]
            if after.status in excluded:
                differences.append(f"{name_of(place)}: {after.status} {after.error or ''}")
                failed += 1
                continue
            answers = [_answers(rollout, parts) for rollout in (before, after)]
            for turn, (a, b) in enumerate(zip_longest(*answers, fillvalue="")):
                if a != b:
                    differing = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), 0)  # noqa: B905
                    start = max(0, differing - 20)
                    excerpts = f"{a[start : start + 60]!r} and {b[start : start + 60]!r}"
                    differences.append(f"{name_of(place)} turn {turn}: {excerpts}")
    calls = sum(rollout.num_calls for _, rollout in records)
    print(*differences[:MAX_SHOWN], sep="\n", end="\n" if differences else "")
    num = len(differences) - failed
    result = f"{num} answers are not the same twice" if differences else "the same"
    result += f", {failed} rollouts could not be played again" if failed else ""
    print(f"tools again: {calls:.0f} calls of {len(records)} rollouts, {result}")
    return len(differences)


def _turns(rollout: Rollout) -> list[tuple[str, list[int], str]]:
    """Per turn: the prompt's hash, the sampled ids, the finish reason."""
    rows = [iter([s.token_ids.tolist() for s in row if s.sampled]) for row in rollout.rows]
    return [
        (t.prompt_hash, [*next(rows[t.row]), *t.replaced], t.finish_reason) for t in rollout.turns
    ]


def _answers(rollout: Rollout, parts: Parts) -> list[str]:
    """The observation after each turn, and the rollout's answer."""
    rows = rollout.rows
    if parts.program:  # its conversations end in any order
        rows = sorted(rows, key=lambda row: row[0].token_ids.tolist())
    observations = [s.token_ids for row in rows for s in row if not s.sampled]
    return [*map(parts.chat.tokenizer.decode, observations[1:]), str(rollout.answer)]

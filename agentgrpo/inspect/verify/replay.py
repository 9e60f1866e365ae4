"""`agentgrpo verify RUN --again` and `--tools`: what a run has recorded, done once more.

Steps are played and learned from the run's own checkpoint on, or from the beginning, in a folder
that goes when it is done, and every recorded line and the saved weights are held against the run's:
a record that was changed fails also where all hashes were made anew. Tool calls alone are made in
fresh sandboxes, without a model: the recorded turns are said again.
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
from agentgrpo.records.diff import described, parting, weights
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

SHOWN = 20
"""Answers that are shown."""


class _Until(Callback):
    """Ends a run after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        if step >= self._step:
            trainer.stop()


def play_again(
    run: Path, steps: str = "", make: Callable[[TrainConfig], Parts] | None = None
) -> str | None:
    """Play and learn steps again, and print what was done; where it is not the same.

    `steps`: "7-9" or "7", counted from 1 as a run prints them, begun at the newest checkpoint
    before; "": all that is recorded behind the newest checkpoint, or from the beginning. `make`:
    as Trainer's.
    """
    from agentgrpo.train.trainer import Trainer

    config, device = _recorded(run)
    start, end, saved = _span_of(run, steps)
    if not config.on(device).rollout.deterministic:
        print("rollout.deterministic was not set: what differs may be rounding")  # noqa: T201
    with tempfile.TemporaryDirectory(prefix=".again-", dir=run) as folder:
        other = Path(folder)
        if saved is not None:
            (other / "checkpoints").mkdir()
            for name in (*FILES, "run.json"):  # cut back to where the checkpoint was saved
                shutil.copy(run / name, other)
            (other / "checkpoints" / saved.name).symlink_to(saved.resolve())
        progress = Progress(config.steps, names_folder=False)
        make_parts = functools.partial(build, progress=progress)
        due = end // config.save_every - start // config.save_every  # and the first and the last
        changed = {"out_dir": other, "keep_checkpoints": due + 2, "trackers": ()}
        again = config.model_copy(update=changed)
        with Trainer(again, callbacks=_Until(end), make=make or make_parts) as trainer:
            trainer.train()
        for line in described(run, other):
            print(f"differs: {line}")  # noqa: T201
        parted = parting(run, other, since=start, until=end + (end == config.steps))
        held = [step for step in weights(run).keys() & weights(other) if step > start]
    rows = numbered_rows(run / "rollouts.jsonl", growing=True)
    played = sum(start <= row["step"] < end for _, row in rows)
    print(  # noqa: T201
        f"steps {start + 1} to {end} again: {played} rollouts, {len(held)} checkpoints, "
        f"{f'NOT the same: {parted}' if parted else 'bit-equal'}"
    )
    return parted


def _recorded(run: Path) -> tuple[TrainConfig, str]:
    """A run's settings, and its engine's device."""
    about = read_table(run / "run.json")
    return validate(TrainConfig, about["config"], str(run / "run.json")), about["engine"]["device"]


def _span_of(run: Path, steps: str) -> tuple[int, int, Path | None]:
    """Which steps are played again, [start, end) from 0, and the checkpoint that they begin at."""
    rows = numbered_rows(run / "metrics.jsonl", growing=True)
    recorded = sum("learner/loss" in row for _, row in rows)
    low, _, high = steps.partition("-")
    digits = low.isdigit() and (high or low).isdigit()
    asked = (int(low) - 1, int(high or low)) if digits else (-1, -1)
    first, end = asked if steps else (recorded - 1, recorded)
    if not 0 <= first < end <= recorded:
        raise ValueError(f"--again {steps}: expected steps of 1 to {recorded}, as 7 or 7-9")
    saved = {checkpoint.step_of(path): path for path in run.glob(checkpoint.SAVED)}
    start = max((step for step in saved if step <= first), default=0)
    return start, end, saved.get(start)


def call_again(run: Path) -> int:
    """Make the tool calls of recorded rollouts again; print and count what is not the same.

    The agent reads the recorded turns, and the environment carries out what they ask for. Rollouts
    that the machine or the clock ended are left out.
    """
    config, _ = _recorded(run)
    once = config.rollout.model_copy(update={"max_retries": 0})
    config = config.model_copy(update={"rollout": once})
    ended = (Status.INFRA_ERROR, Status.TIMED_OUT)
    every = [item for item in read_rollouts(run / "rollouts.jsonl") if item[1].status not in ended]
    script = [_turns(rollout) for _, rollout in every]

    def says(index: int, turn: int, prompt: Int32) -> tuple[list[int], str]:
        if turn < 0 or every[index][1].stats.get("frozen_turns"):
            raise ValueError("--tools: what a model said in another role is not recorded")
        left, asked = script[index], token_hash(prompt)  # a program may ask for several at once
        place = next((i for i, (prompt_hash, *_) in enumerate(left) if prompt_hash == asked), 0)
        return left.pop(place)[1:] if left else ([], "length")  # it was over

    differ, broken = [], 0
    with contextlib.closing(prepare_run(config, trained=False)) as parts:
        if parts.user_sampler is not None:
            raise ValueError("--tools: a sampler of yours makes its calls itself")
        limit = config.engine.max_model_len
        with contextlib.closing(sampler_of(says, config, parts, limit)) as sampler:
            groups, _ = sampler.play([rollout.task for _, rollout in every], 1, seed=config.seed)
        for (place, before), group in zip(every, groups, strict=True):
            after = group.rollouts[0]
            if after.status in ended:
                differ.append(f"{name_of(place)}: {after.status} {after.error or ''}")
                broken += 1
                continue
            told = [_told(rollout, parts) for rollout in (before, after)]
            for turn, (a, b) in enumerate(zip_longest(*told, fillvalue="")):
                if a != b:
                    alike = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), 0)  # noqa: B905
                    at = max(0, alike - 20)
                    shown = f"{a[at : at + 60]!r} and {b[at : at + 60]!r}"
                    differ.append(f"{name_of(place)} turn {turn}: {shown}")
    calls = sum(rollout.num_calls for _, rollout in every)
    print(*differ[:SHOWN], sep="\n", end="\n" if differ else "")  # noqa: T201
    said = f"{len(differ) - broken} answers are not the same twice" if differ else "the same"
    said += f", {broken} rollouts could not be played again" if broken else ""
    print(f"tools again: {calls:.0f} calls of {len(every)} rollouts, {said}")  # noqa: T201
    return len(differ)


def _turns(rollout: Rollout) -> list[tuple[str, list[int], str]]:
    """Of each the prompt's hash, what was sampled, and how it ended."""
    rows = [iter([s.token_ids.tolist() for s in row if s.sampled]) for row in rollout.rows]
    return [
        (t.prompt_hash, [*next(rows[t.row]), *t.replaced], t.finish_reason) for t in rollout.turns
    ]


def _told(rollout: Rollout, parts: Parts) -> list[str]:
    """What each turn was answered, and what the rollout's answer is."""
    rows = rollout.rows
    if parts.program:  # its conversations end in any order
        rows = sorted(rows, key=lambda row: row[0].token_ids.tolist())
    given = [s.token_ids for row in rows for s in row if not s.sampled]
    return [*map(parts.chat.tokenizer.decode, given[1:]), str(rollout.answer)]

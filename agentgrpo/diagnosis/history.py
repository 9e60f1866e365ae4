"""A run's records as the checks look at them: steps, groups, evaluations, and their texts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from agentgrpo.files import read_table
from agentgrpo.measures.measures import wilson
from agentgrpo.run.atomic import numbered_rows
from agentgrpo.run.folder import flatten
from agentgrpo.run.records import read_rollouts
from agentgrpo.types import Rollout
from agentgrpo.view.collect import tokenizer_places
from agentgrpo.view.vocabulary import find_tokenizer


@dataclass(frozen=True, slots=True)
class Seen:
    """A recorded rollout and its place."""

    step: int
    split: str
    group: int
    index: int
    rollout: Rollout

    @property
    def place(self) -> str:
        split = "" if self.split == "train" else f"{self.split} "
        return f"step {self.step} {split}group {self.group} rollout {self.index}"

    @property
    def question(self) -> str:
        return "\n".join(str(message.get("content")) for message in self.rollout.task.messages)

    @property
    def task(self) -> tuple[str, str]:
        """What was asked, and what else its row has."""
        return self.question, str(self.rollout.task.spec)

    @property
    def expected(self) -> Any:
        """The one right answer, where the task has one."""
        gold = self.rollout.task.spec.get("answer")
        return gold if isinstance(gold, str | int | float) else None

    @property
    def after_prompt(self) -> bytes:
        """The ids that were sampled and shown."""
        return b"|".join(s.token_ids.tobytes() for s in self.rollout.all_segments[1:])

    @property
    def judged(self) -> float:
        """What says whether it is right; else its reward."""
        r = self.rollout
        said = (r.stats.get("solved"), r.rewards.get("solved"), r.rewards.get("answer"))
        return next((value for value in said if value is not None), r.reward)

    @property
    def moves(self) -> bool:
        """Whether it has an advantage."""
        r = self.rollout
        return any(r.segment_advantages) if r.segment_advantages else r.advantage != 0

    @property
    def answers(self) -> bool | None:
        """Whether it answers what is expected: that alone, or not at all; None: cannot be told."""
        if self.expected is None or self.rollout.answer is None:
            return None
        said, gold = (str(x).strip().casefold() for x in (self.rollout.answer, self.expected))
        numbers = [re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in (said, gold)]
        if said == gold or (numbers == [[said], [gold]] and float(said) == float(gold)):
            return True
        ends_alike = all(numbers) and float(numbers[0][-1]) == float(numbers[1][-1])
        return None if gold in said or ends_alike else False


class History:
    """What a run has recorded so far."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "run.json").is_file():
            raise FileNotFoundError(
                f"{folder}: no run.json, which a run's folder (out_dir) has once its engine and "
                "learner are made; what stopped it before, it has printed"
            )
        self.folder, self._described = folder, read_table(folder / "run.json")
        self.config: dict[str, Any] = flatten(self._described.get("config", {}))
        metrics, rollouts = folder / "metrics.jsonl", folder / "rollouts.jsonl"
        rows = numbered_rows(metrics, growing=True) if metrics.is_file() else ()
        numbers = [row for _, row in rows]
        self.steps = [row for row in numbers if "learner/loss" in row]
        self.evals = [row for row in numbers if "eval/rollouts" in row]
        self.solved = [row["eval/solved"] for row in self.evals if "eval/solved" in row]
        self.tasks = int(self.evals[-1]["eval/rollouts"]) if self.evals else 1
        """Held-out ones."""
        every = [
            Seen(p["step"], p["split"], p["group"], p["index"], rollout)
            for p, rollout in (read_rollouts(rollouts) if rollouts.is_file() else ())
        ]
        self.train = [seen for seen in every if seen.split == "train"]
        self.heldout = [seen for seen in every if seen.split == "heldout"]
        steps = sorted({seen.step for seen in self.train}) or [0]
        third = max(1, len(steps) // 3)
        self.first, self.early, self.late = (
            [seen for seen in self.train if seen.step in chosen]
            for chosen in (steps[:1], steps[:third], steps[-third:])
        )
        self.early_until, self.late_from = steps[:third][-1], steps[-third]
        sound = (seen for seen in self.train if seen.rollout.in_baseline)
        self.groups = [list(group) for _, group in groupby(sound, lambda s: (s.step, s.group))]
        self.asked = Counter(group[0].task for group in self.groups)
        self.judges = any(seen.rollout.solved is not None for seen in self.train)
        """Whether reward or environment say what is solved."""
        self.top = max((seen.judged for seen in self.train), default=0.0)

    def paid(self, seen: Seen) -> bool:
        """Whether it was found right, as far as anything says so."""
        return seen.judged > 0 and seen.judged >= 0.99 * self.top

    @cached_property
    def unsolved(self) -> float:
        """From 1 to 1/4, the less the more of the last rollouts solve and if the run learns."""
        solved = mean(map(self.paid, self.late)) if self.judges else 0.0
        return (1 - 0.5 * solved) * (0.5 if self.learns else 1.0)

    @property
    def learns(self) -> bool:
        """Whether the held-out share solved is now beyond what chance makes of the first."""
        share, *_, last = self.solved if len(self.solved) > 1 else (1.0, 0.0)
        return last > share and wilson(round(last * self.tasks), self.tasks)[0] > share

    def metric(self, name: str) -> list[float]:
        """A number of every step that has it."""
        return [row[name] for row in self.steps if name in row]

    def number(self, key: str, default: float) -> float:
        """A setting."""
        return default if (value := self.config.get(key)) is None else float(value)

    @property
    def rate(self) -> float:
        """The highest learning rate so far."""
        return max(self.metric("learner/learning_rate"), default=0.0)

    @cached_property
    def _decode(self) -> Callable[[list[int]], str]:
        tokenizer = find_tokenizer(tokenizer_places(self.folder, self._described))
        return (lambda ids: "") if tokenizer is None else tokenizer.decode

    def text(self, seen: Seen, *, sampled: bool = True) -> str:
        """The last that was sampled, or shown after the prompt; "" where no tokenizer is found."""
        parts = [s for s in seen.rollout.all_segments[1:] if s.sampled == sampled]
        return self._decode(parts[-1].token_ids.tolist()) if parts else ""

    def errors(self, seen: Seen) -> list[str]:
        """The name of the last error that it was shown."""
        failed = seen.rollout.stats.get("tool_errors")
        shown = self.text(seen, sampled=False) if failed else ""
        return re.findall(r"\b\w+(?:Error|Exception|Timeout)\b", shown)[-1:]


def mean(values: Iterable[float]) -> float:
    """Their mean; 0 of none."""
    return fmean(known) if (known := list(values)) else 0.0


def gain(before: Iterable[float], after: Iterable[float]) -> tuple[float, float]:
    """How much more `after` is than `before` on average, and that in standard errors."""
    a, b = np.fromiter(before, float), np.fromiter(after, float)
    if not len(a) or not len(b):
        return 0.0, 0.0
    more = float(b.mean() - a.mean())
    return more, more / max(1e-9, float(a.var() / len(a) + b.var() / len(b)) ** 0.5)

"""A run's records as the checks look at them: steps, groups, evaluations, and their texts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from agentgrpo.files import read_table
from agentgrpo.measures.measures import wilson
from agentgrpo.rewards.answers import exact_match, last_number, only_number
from agentgrpo.run.atomic import numbered_rows
from agentgrpo.run.folder import flatten
from agentgrpo.run.records import read_rollouts
from agentgrpo.types import Rollout
from agentgrpo.view.collect import tokenizer_places
from agentgrpo.view.vocabulary import find_tokenizer


@dataclass(frozen=True, slots=True)
class Seen:
    """A recorded rollout with all that it has, and its place: step, split, group and index."""

    place: Mapping[str, Any]
    rollout: Rollout

    def __getattr__(self, name: str) -> Any:
        return self.place[name] if name in self.place else getattr(self.rollout, name)

    @property
    def question(self) -> str:
        return "\n".join(str(message.get("content")) for message in self.task.messages)

    @property
    def row(self) -> tuple[str, str]:
        """What was asked, and what else its row has."""
        return self.question, str(self.task.spec)

    @property
    def expected(self) -> Any:
        """The one right answer, where the task has one."""
        gold = self.task.spec.get("answer")
        return gold if isinstance(gold, str | int | float) else None

    @property
    def after_prompt(self) -> bytes:
        """The ids that were sampled and shown."""
        return b"|".join(s.token_ids.tobytes() for s in self.all_segments[1:])

    @property
    def judged(self) -> float:
        """What says whether it is right; else its reward."""
        said = (self.stats.get("solved"), self.rewards.get("solved"), self.rewards.get("answer"))
        return next((float(value) for value in said if value is not None), self.reward)

    @property
    def moves(self) -> bool:
        """Whether it has an advantage."""
        return any(self.segment_advantages or [self.advantage])

    @property
    def answers(self) -> bool | None:
        """Whether its answer is just the expected one, or plainly another; None: who knows."""
        if self.answer is None or self.expected is None:
            return None
        said, gold = (text.strip().casefold() for text in (self.answer, str(self.expected)))
        if said == gold or only_number(said) == only_number(gold) is not None:
            return True
        alike = exact_match(said, [gold]) or last_number(said) == last_number(gold) is not None
        return None if alike or gold in said else False


class History:
    """What a run has recorded so far."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "run.json").is_file():
            raise FileNotFoundError(
                f"{folder}: no run.json, which a run's folder (out_dir) has once its engine and "
                "learner are made; what stopped it before, it has printed"
            )
        described = read_table(folder / "run.json")
        self.config: dict[str, Any] = flatten(described.get("config", {}))
        self._tokenizer = find_tokenizer(tokenizer_places(folder, described))
        metrics, rollouts = folder / "metrics.jsonl", folder / "rollouts.jsonl"
        rows = [row for _, row in numbered_rows(metrics, growing=True)] if metrics.exists() else []
        self.steps = [row for row in rows if "learner/loss" in row]
        evals = [row for row in rows if "eval/rollouts" in row]
        self.solved = [row["eval/solved"] for row in evals if "eval/solved" in row]
        """Shares of the held-out tasks."""
        self.tasks = int(evals[-1]["eval/rollouts"]) if evals else 1
        """Held-out ones."""
        every = [Seen(*of) for of in (read_rollouts(rollouts) if rollouts.exists() else ())]
        self.train = [seen for seen in every if seen.split == "train"]
        self.heldout = [seen for seen in every if seen.split == "heldout"]
        steps = sorted({seen.step for seen in self.train}) or [0]
        third = max(1, len(steps) // 3)
        self.first, self.early, self.late = (
            [seen for seen in self.train if seen.step in chosen]
            for chosen in (steps[:1], steps[:third], steps[-third:])
        )
        self.late_from = steps[-third]
        sound = (seen for seen in self.train if seen.in_baseline)
        self.groups = [list(group) for _, group in groupby(sound, lambda s: (s.step, s.group))]
        self.early_groups = [group for group in self.groups if group[0].step <= steps[third - 1]]
        self.asked = Counter(group[0].row for group in self.groups)
        self.judges = any(seen.solved is not None for seen in self.train)
        """Whether reward or environment say what is solved."""
        self.top = max((seen.judged for seen in self.train), default=0.0)
        self.rate = max(self.metric("learner/learning_rate"), default=0.0)
        """The highest learning rate so far."""

    def paid(self, seen: Seen) -> bool:
        """Whether it was found right, as far as anything says so."""
        return seen.judged > 0 and seen.judged >= 0.99 * self.top

    @cached_property
    def acting(self) -> list[Seen]:
        """The last rollouts; all, where these solve nothing: what failed first may be avoided."""
        return self.late if mean(map(self.paid, self.late)) > 0.05 else self.train

    @cached_property
    def unsolved(self) -> float:
        """From 1 to 1/4, the less the more of the last rollouts solve and if the run learns."""
        solved = mean(map(self.paid, self.late)) if self.judges else 0.0
        return (1 - 0.5 * solved) * (0.5 if self.learned > 0 else 1.0)

    @property
    def learned(self) -> float:
        """By how much the held-out share solved rose; 0: within what chance makes of the first."""
        if len(self.solved) < 2:
            return 0.0
        first, last = (round(share * self.tasks) for share in (self.solved[0], self.solved[-1]))
        low, high = wilson(last, self.tasks)
        sure = not low <= (first + 1) / (self.tasks + 2) <= high
        return (last - first) / self.tasks if sure else 0.0

    def metric(self, name: str) -> list[float]:
        """A number of every step that has it."""
        return [row[name] for row in self.steps if name in row]

    def number(self, key: str, default: float = 0.0) -> float:
        """A setting."""
        return default if (value := self.config.get(key)) is None else float(value)

    def text(self, seen: Seen, *, sampled: bool = True) -> str:
        """The last that was sampled, or shown after the prompt; "" where no tokenizer is found."""
        parts = [s for s in seen.all_segments[1:] if s.sampled == sampled]
        known = self._tokenizer if parts else None
        return "" if known is None else known.decode(parts[-1].token_ids.tolist())

    def errors(self, seen: Seen) -> list[str]:
        """The name of the last error that it was shown."""
        shown = self.text(seen, sampled=False) if seen.stats.get("tool_errors") else ""
        return re.findall(r"\b\w+(?:Error|Exception|Timeout)\b", shown)[-1:]


def mean(values: Iterable[float]) -> float:
    """Their mean; 0 of none."""
    return fmean(known) if (known := list(values)) else 0.0


def gain(
    of: Callable[[Seen], float], before: Sequence[Seen], after: Sequence[Seen]
) -> tuple[float, float]:
    """How much more of it there is after on average, and that in standard errors."""
    a, b = (np.array([of(seen) for seen in part], float) for part in (before, after))
    if not len(a) or not len(b):
        return 0.0, 0.0
    more = float(b.mean() - a.mean())
    return more, more / max(1e-9, float(a.var() / len(a) + b.var() / len(b)) ** 0.5)

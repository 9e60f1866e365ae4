"""The records of a run in the form that the checks of `run_doctor` read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf, nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from agentgrpo.inspect.view.collect import tokenizer_places
from agentgrpo.inspect.view.vocabulary import find_tokenizer
from agentgrpo.records.rollouts import read_rollouts
from agentgrpo.records.run_folder import flatten
from agentgrpo.rewards.answers import exact_match, last_number, only_number
from agentgrpo.support.atomic_files import numbered_rows
from agentgrpo.support.files import read_table
from agentgrpo.support.statistics import wilson
from agentgrpo.types import Rollout, Status


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded rollout; the keys of its place (step, split, group, index) are attributes too."""

    place: Mapping[str, Any]
    rollout: Rollout

    def __getattr__(self, name: str) -> Any:
        return self.place[name] if name in self.place else getattr(self.rollout, name)

    @property
    def prompt(self) -> bytes:
        """Token ids of the prompt."""
        return self.all_segments[0].token_ids.tobytes() if self.all_segments else b""

    @property
    def row(self) -> tuple[bytes, str]:
        """The prompt and the columns that the policy does not see."""
        return self.prompt, str(self.task.spec)

    @property
    def expected(self) -> Any:
        """The expected answer, if the task has exactly one."""
        gold = self.task.spec.get("answer")
        return gold if isinstance(gold, str | int | float) else None

    @property
    def after_prompt(self) -> bytes:
        """Token ids of all turns and observations."""
        return b"|".join(s.token_ids.tobytes() for s in self.all_segments[1:])

    @property
    def score(self) -> float:
        """Whether the task is solved, as far as the record shows; else the reward."""
        values = (self.stats.get("solved"), self.rewards.get("solved"), self.rewards.get("answer"))
        return next((float(value) for value in values if value is not None), self.reward)

    @property
    def has_advantage(self) -> bool:
        """Whether any of its advantages is not zero."""
        return any(self.segment_advantages or [self.advantage]) or bool(self.token_advantages)

    @property
    def is_expected(self) -> bool | None:
        """Whether the answer equals the expected one (True), differs (False), or neither (None)."""
        if self.answer is None or self.expected is None:
            return None
        answer, gold = (text.strip().casefold() for text in (self.answer, str(self.expected)))
        if answer == gold or only_number(answer) == only_number(gold) is not None:
            return True
        alike = exact_match(answer, [gold]) or last_number(answer) == last_number(gold) is not None
        return None if alike or gold in answer else False

    @property
    def repetition(self) -> float:
        """Share of the trigrams of sampled tokens that repeat an earlier one."""
        ids = [t for s in self.all_segments if s.sampled for t in s.token_ids.tolist()]
        grams = [*zip(ids, ids[1:], ids[2:], strict=False)]
        return 1 - len({*grams}) / len(grams) if len(grams) > 16 else 0.0


class History:
    """The records of a run so far, with an attribute for each number that a check reads."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "run.json").is_file():
            raise FileNotFoundError(
                f"{folder}: no run.json: not the folder of a run, or the run never started"
            )
        described = read_table(folder / "run.json")
        self.config: dict[str, Any] = flatten(described.get("config", {}))
        self._tokenizer = find_tokenizer(tokenizer_places(folder, described))
        metrics, rollouts = folder / "metrics.jsonl", folder / "rollouts.jsonl"
        rows = [row for _, row in numbered_rows(metrics, growing=True)] if metrics.exists() else []
        recorded = [
            Recorded(*pair) for pair in (read_rollouts(rollouts) if rollouts.exists() else ())
        ]
        self.train = [r for r in recorded if r.split == "train"]
        self.heldout = [r for r in recorded if r.split == "heldout"]
        steps = sorted({r.step for r in self.train}) or [0]
        third = max(1, len(steps) // 3)
        first, early, self.late = (
            [r for r in self.train if r.step in chosen]
            for chosen in (steps[:1], steps[:third], steps[-third:])
        )
        self.late_from = steps[-third]
        valid = (r for r in self.train if r.in_baseline)
        self.groups = [list(group) for _, group in groupby(valid, lambda s: (s.step, s.group))]
        self.early_groups = [group for group in self.groups if group[0].step <= steps[third - 1]]
        prompts, tasks = ({getattr(s, name) for s in self.heldout} for name in ("prompt", "row"))
        self._prompts_differ = 8 * len(prompts) >= len(tasks)
        self.times_played = Counter(self.question(group[0]) for group in self.groups)

        # training tasks: solved in the first step and in the last third of the steps
        self.has_solved = any(r.solved is not None for r in self.train)
        """Whether the reward or the environment decides what counts as solved."""
        self.top_score = max((r.score for r in self.train), default=0.0)
        self.base, self.end = (mean(map(self.is_right, part)) for part in (first, self.late))
        groups = len({(r.step, r.group) for r in self.late}) or 1
        self.at_least, _ = wilson(round(self.end * groups), groups)
        self.gained, self.gained_by = gain(self.is_right, early, self.late)
        self.rose, self.rose_by = gain(lambda r: r.reward, early, self.late)
        self.acting = self.late if self.end > 0.05 else self.train
        """The last rollouts; all of them if the last ones solve nothing, since a policy may have
        learned to avoid what failed at first."""

        # held-out tasks: solved in each evaluation
        evals = [row for row in rows if "eval/rollouts" in row]
        self.tasks = int(evals[-1]["eval/rollouts"]) if evals else 0
        self.solved = [row["eval/solved"] for row in evals if "eval/solved" in row]
        before, after = [*self.solved[:1], *self.solved[-1:]] or (self.base, self.base)
        change = " -> ".join(f"{share:.2f}" for share in dict.fromkeys((before, after)))
        self.change = change if self.solved else "unknown"
        self.greedier = before - self.base
        """Solved share of the first evaluation minus that of the first step's samples."""
        count = round(after * self.tasks)
        low, self.at_most = wilson(count, self.tasks) if self.solved else (0.0, 1.0)
        likely = low <= (round(before * self.tasks) + 1) / (self.tasks + 2) <= self.at_most
        self.learned = 0.0 if likely else after - before
        """By how much the held-out share rose; 0 if chance explains the difference."""
        sure = len(self.solved) > 1 or self.gained_by < -3
        self.sank = sure and (self.learned if len(self.solved) > 1 else self.gained) < -0.15
        self.unsolved = (1 - 0.5 * self.end * self.has_solved) * (0.5 if self.learned > 0 else 1.0)
        """From 1 down to 1/4: less if more of the last rollouts solve, and if the run learns."""

        # the policy: from the first third of the steps to the last third
        self.calls, self.repeats = (
            [mean(getattr(r, name) for r in part) for part in (early, self.late)]
            for name in ("num_calls", "repetition")
        )
        self._learned = [row for row in rows if "learner/loss" in row]
        self.steps = len(self._learned)
        self.has_gradient = self.number("loss.beta") > 0 or any(r.has_advantage for r in self.train)
        """Whether there was a gradient; if not, other findings explain why."""
        nats = self.metric("entropy_mean")
        self.nats = mean(nats[:third]), mean(nats[-third:])
        self.rate = max(self.metric("learning_rate"), default=0.0)
        self.quantile = self.number("loss.top_entropy_quantile", 1.0)
        self.tokens = sum(self.metric("num_tokens")) / (len(self.train) or 1) or inf  # per rollout
        self.norm = median(self.metric("grad_norm") or [nan])
        self.kl, self.gap = mean(self.metric("approx_kl")), mean(self.metric("mismatch_kl"))
        self.noise = mean(self.metric("sampler_gap_mean"))
        self.clipped = sum(mean(self.metric(f"clip_{side}_fraction")) for side in ("low", "high"))
        self.penalty = self.number("loss.beta") * mean(self.metric("ref_kl"))
        self.temperature = self.number("rollout.temperature", 1.0)

    def question(self, rollout: Recorded) -> Any:
        """Identity of a task: the prompt, or the row if many rows have the same prompt."""
        return rollout.prompt if self._prompts_differ else rollout.row

    def is_right(self, rollout: Recorded) -> bool:
        """Whether the rollout got the run's highest score."""
        return rollout.score > 0 and rollout.score >= 0.99 * self.top_score

    @property
    def moved(self) -> float:
        """Relative change of the log-probabilities of held-out turns; nan after one evaluation."""
        turns: dict[int, dict[Any, float]] = {}
        for rollout in self.heldout:
            for first in [s.logprobs for s in rollout.all_segments if s.sampled][:1]:
                turns.setdefault(rollout.step, {})[rollout.row] = float(first.mean())
        before, after = (turns[min(turns)], turns[max(turns)]) if len(turns) > 1 else ({}, {})
        noise = 500 * self.noise + 1e-9  # changes as small as the sampler's own error do not count
        changes = [abs(x - after[row]) / (noise - x) for row, x in before.items() if row in after]
        return median(changes) if changes else nan

    def metric(self, name: str) -> list[float]:
        """A metric of the learner, for every step that has it."""
        return [row[key] for row in self._learned if (key := f"learner/{name}") in row]

    def number(self, key: str, default: float = 0.0) -> float:
        return default if (value := self.config.get(key)) is None else float(value)

    @property
    def unwritten(self) -> str:
        """Configured tags and prefixes that no rollout contains."""
        tokenizer, options = self._tokenizer, ("open_tag", "close_tag", "answer_prefix")
        keys = [key for name in options if self.config.get(key := f"agent.options.{name}")]
        parts = [s for r in self.train for s in r.all_segments if keys and s.sampled]
        text = (
            "\n".join(tokenizer.decode_batch([s.token_ids.tolist() for s in parts]))
            if tokenizer
            else ""
        )
        missing = [key for key in keys if text and self.config[key] not in text]
        return ", ".join(f"{key} = {self.config[key]!r}" for key in missing)

    def text(self, rollout: Recorded, *, sampled: bool = True) -> str:
        """The last turn, or the last observation; "" without a tokenizer."""
        parts = [s for s in rollout.all_segments[1:] if s.sampled == sampled]
        tokenizer = self._tokenizer if parts else None
        return "" if tokenizer is None else tokenizer.decode(parts[-1].token_ids.tolist())

    def summary(self, rollout: Recorded) -> str:
        """How a rollout ended, in one line."""
        text = " ".join(self.text(rollout).split())
        line = f"{rollout.status}, reward {rollout.reward:.3g}{f': {text[:60]!r}' if text else ''}"
        if rollout.expected is not None:
            line += f", answer {rollout.answer!r:.50}, expected {rollout.expected!r:.50}"
        return f"{line}, {rollout.error}" if rollout.error else line

    def problems(self, rollout: Recorded) -> list[str]:
        """Names of its status, unless completed, and of the error in the last observation."""
        observation = self.text(rollout, sampled=False) if rollout.stats.get("tool_errors") else ""
        status = [] if rollout.status is Status.COMPLETED else [str(rollout.status)]
        return status + re.findall(r"\b\w+(?:Error|Exception|Timeout)\b", observation)[-1:]


def mean(values: Iterable[float]) -> float:
    """The mean; 0 without values."""
    return fmean(items) if (items := list(values)) else 0.0


def gain(
    score: Callable[[Recorded], float], before: Sequence[Recorded], after: Sequence[Recorded]
) -> tuple[float, float]:
    """The difference of the mean scores of groups, and the same in standard errors."""
    a, b = (
        np.array(
            [mean(map(score, group)) for _, group in groupby(part, lambda s: (s.step, s.group))]
        )
        for part in (before, after)
    )
    if not len(a) or not len(b):
        return 0.0, 0.0
    difference = float(b.mean() - a.mean())
    return difference, difference / max(1e-9, float(a.var() / len(a) + b.var() / len(b)) ** 0.5)

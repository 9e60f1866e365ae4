"""A run's records as the checks look at them: steps, groups, evaluations, numbers and texts."""

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
class Seen:
    """A recorded rollout with all that it has, and its place: step, split, group and index."""

    place: Mapping[str, Any]
    rollout: Rollout

    def __getattr__(self, name: str) -> Any:
        return self.place[name] if name in self.place else getattr(self.rollout, name)

    @property
    def prompt(self) -> bytes:
        """The ids that the policy is given first."""
        return self.all_segments[0].token_ids.tobytes() if self.all_segments else b""

    @property
    def row(self) -> tuple[bytes, str]:
        """The prompt, and the columns that the policy is not shown."""
        return self.prompt, str(self.task.spec)

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
        return any(self.segment_advantages or [self.advantage]) or bool(self.token_advantages)

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

    @property
    def repetition(self) -> float:
        """The share of its trigrams that repeat an earlier one."""
        ids = [t for s in self.all_segments if s.sampled for t in s.token_ids.tolist()]
        grams = [*zip(ids, ids[1:], ids[2:], strict=False)]
        return 1 - len({*grams}) / len(grams) if len(grams) > 16 else 0.0


class History:
    """What a run has recorded so far, with a name for each number that a check looks at."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "run.json").is_file():
            raise FileNotFoundError(f"{folder}: no run.json: it is no run's folder, or never began")
        described = read_table(folder / "run.json")
        self.config: dict[str, Any] = flatten(described.get("config", {}))
        self._tokenizer = find_tokenizer(tokenizer_places(folder, described))
        metrics, rollouts = folder / "metrics.jsonl", folder / "rollouts.jsonl"
        rows = [row for _, row in numbered_rows(metrics, growing=True)] if metrics.exists() else []
        every = [Seen(*of) for of in (read_rollouts(rollouts) if rollouts.exists() else ())]
        self.train = [seen for seen in every if seen.split == "train"]
        self.heldout = [seen for seen in every if seen.split == "heldout"]
        steps = sorted({seen.step for seen in self.train}) or [0]
        third = max(1, len(steps) // 3)
        first, early, self.late = (
            [seen for seen in self.train if seen.step in chosen]
            for chosen in (steps[:1], steps[:third], steps[-third:])
        )
        self.late_from = steps[-third]
        sound = (seen for seen in self.train if seen.in_baseline)
        self.groups = [list(group) for _, group in groupby(sound, lambda s: (s.step, s.group))]
        self.early_groups = [group for group in self.groups if group[0].step <= steps[third - 1]]
        prompts, tasks = ({getattr(s, of) for s in self.heldout} for of in ("prompt", "row"))
        self._apart = 8 * len(prompts) >= len(tasks)
        self.asked = Counter(self.question(group[0]) for group in self.groups)

        # of the training tasks: solved in the first step, in the last ones
        self.judges = any(seen.solved is not None for seen in self.train)
        """Whether reward or environment say what is solved."""
        self.top = max((seen.judged for seen in self.train), default=0.0)
        self.base, self.end = (mean(map(self.paid, part)) for part in (first, self.late))
        groups = len({(seen.step, seen.group) for seen in self.late}) or 1
        self.at_least, _ = wilson(round(self.end * groups), groups)
        self.gained, self.gained_by = gain(self.paid, early, self.late)
        self.rose, self.rose_by = gain(lambda seen: seen.reward, early, self.late)
        self.acting = self.late if self.end > 0.05 else self.train
        """The last rollouts; all, where these solve nothing: what failed first may be avoided."""

        # of the held-out ones: solved in each evaluation
        evals = [row for row in rows if "eval/rollouts" in row]
        self.tasks = int(evals[-1]["eval/rollouts"]) if evals else 0
        self.solved = [row["eval/solved"] for row in evals if "eval/solved" in row]
        before, after = [*self.solved[:1], *self.solved[-1:]] or (self.base, self.base)
        change = " -> ".join(f"{share:.2f}" for share in dict.fromkeys((before, after)))
        self.change = change if self.solved else "not said"
        self.greedier = before - self.base
        """How much more the first policy solves as it is evaluated than as it is sampled."""
        count = round(after * self.tasks)
        low, self.at_most = wilson(count, self.tasks) if self.solved else (0.0, 1.0)
        likely = low <= (round(before * self.tasks) + 1) / (self.tasks + 2) <= self.at_most
        self.learned = 0.0 if likely else after - before
        """By how much the share rose; 0: within what chance makes of the first."""
        sure = len(self.solved) > 1 or self.gained_by < -3
        self.sank = sure and (self.learned if len(self.solved) > 1 else self.gained) < -0.15
        self.unsolved = (1 - 0.5 * self.end * self.judges) * (0.5 if self.learned > 0 else 1.0)
        """From 1 to 1/4, the less the more of the last rollouts solve and if the run learns."""

        # of the policy: from the early steps to the last ones
        self.calls, self.repeats = (
            [mean(getattr(seen, name) for seen in part) for part in (early, self.late)]
            for name in ("num_calls", "repetition")
        )
        self._learned = [row for row in rows if "learner/loss" in row]
        self.steps = len(self._learned)
        self.pushed = self.number("loss.beta") > 0 or any(seen.moves for seen in self.train)
        """Whether there was a gradient: if not, other findings say why."""
        nats = self.metric("entropy_mean")
        self.nats = mean(nats[:third]), mean(nats[-third:])
        self.rate = max(self.metric("learning_rate"), default=0.0)
        self.quantile = self.number("loss.top_entropy_quantile", 1.0)
        self.tokens = sum(self.metric("num_tokens")) / (len(self.train) or 1) or inf  # of a rollout
        self.norm = median(self.metric("grad_norm") or [nan])
        self.kl, self.gap = mean(self.metric("approx_kl")), mean(self.metric("mismatch_kl"))
        self.noise = mean(self.metric("sampler_gap_mean"))
        self.clipped = sum(mean(self.metric(f"clip_{side}_fraction")) for side in ("low", "high"))
        self.penalty = self.number("loss.beta") * mean(self.metric("ref_kl"))
        self.temperature = self.number("rollout.temperature", 1.0)

    def question(self, seen: Seen) -> Any:
        """What makes two tasks one: the prompt; the row, where many rows have the same prompt."""
        return seen.prompt if self._apart else seen.row

    def paid(self, seen: Seen) -> bool:
        """Whether it was found right, as far as anything says so."""
        return seen.judged > 0 and seen.judged >= 0.99 * self.top

    @property
    def moved(self) -> float:
        """The relative change of held-out turns' log-probabilities; nan: evaluated once."""
        turns: dict[int, dict[Any, float]] = {}
        for seen in self.heldout:
            for first in [s.logprobs for s in seen.all_segments if s.sampled][:1]:
                turns.setdefault(seen.step, {})[seen.row] = float(first.mean())
        then, now = (turns[min(turns)], turns[max(turns)]) if len(turns) > 1 else ({}, {})
        noise = 500 * self.noise + 1e-9  # a change as large as the sampler's gap is no change
        apart = [abs(was - now[row]) / (noise - was) for row, was in then.items() if row in now]
        return median(apart) if apart else nan

    def metric(self, name: str) -> list[float]:
        """A number of the learner's, of every step that has it."""
        return [row[key] for row in self._learned if (key := f"learner/{name}") in row]

    def number(self, key: str, default: float = 0.0) -> float:
        """A setting."""
        return default if (value := self.config.get(key)) is None else float(value)

    @property
    def unwritten(self) -> str:
        """Tags and prefixes that are set for the agent and that no rollout has."""
        known, options = self._tokenizer, ("open_tag", "close_tag", "answer_prefix")
        keys = [key for name in options if self.config.get(key := f"agent.options.{name}")]
        parts = [s for r in self.train for s in r.all_segments if keys and s.sampled]
        text = "\n".join(known.decode_batch([s.token_ids.tolist() for s in parts])) if known else ""
        lacks = [key for key in keys if text and self.config[key] not in text]
        return ", ".join(f"{key} = {self.config[key]!r}" for key in lacks)

    def text(self, seen: Seen, *, sampled: bool = True) -> str:
        """The last that was sampled, or shown after the prompt; "" where no tokenizer is found."""
        parts = [s for s in seen.all_segments[1:] if s.sampled == sampled]
        known = self._tokenizer if parts else None
        return "" if known is None else known.decode(parts[-1].token_ids.tolist())

    def told(self, seen: Seen) -> str:
        """How a rollout ended, in a line."""
        text = " ".join(self.text(seen).split())
        told = f"{seen.status}, reward {seen.reward:.3g}{f': {text[:60]!r}' if text else ''}"
        if seen.expected is not None:
            told += f", answer {seen.answer!r:.50}, expected {seen.expected!r:.50}"
        return f"{told}, {seen.error}" if seen.error else told

    def kinds(self, seen: Seen) -> list[str]:
        """How it ended, if not well, and the last error that it was shown, by their names."""
        shown = self.text(seen, sampled=False) if seen.stats.get("tool_errors") else ""
        ended = [] if seen.status is Status.COMPLETED else [str(seen.status)]
        return ended + re.findall(r"\b\w+(?:Error|Exception|Timeout)\b", shown)[-1:]


def mean(values: Iterable[float]) -> float:
    """Their mean; 0 of none."""
    return fmean(known) if (known := list(values)) else 0.0


def gain(
    of: Callable[[Seen], float], before: Sequence[Seen], after: Sequence[Seen]
) -> tuple[float, float]:
    """How much more of it there is after on average, and that in standard errors of tasks."""
    a, b = (
        np.array([mean(map(of, group)) for _, group in groupby(part, lambda s: (s.step, s.group))])
        for part in (before, after)
    )
    if not len(a) or not len(b):
        return 0.0, 0.0
    more = float(b.mean() - a.mean())
    return more, more / max(1e-9, float(a.var() / len(a) + b.var() / len(b)) ** 0.5)

"""Say what keeps a run from learning, most likely first: from its records, also while it runs.

CHECKS has a row for each fault, causes before symptoms. A finding's weight is how likely the fault
keeps the run from learning. Bounds were chosen on real runs with one fault each
(bench/diagnoses.py).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from agentgrpo.config.arguments import parser_of
from agentgrpo.inspect.run_history import History, Seen, mean
from agentgrpo.records.rollouts import name_of
from agentgrpo.rewards.answers import holds_answer
from agentgrpo.types import Status

MOST = 6
"""Findings that are printed; with their rollouts these are thirty lines."""
NOTE = 0.2
"""What weighs less is no fault."""
SURE = 0.85
"""What weighs as much explains the symptoms."""
CUT = (Status.TRUNCATED_LENGTH, Status.TRUNCATED_TURNS, Status.TRUNCATED_CALLS)
CALLERS = ("code", "repl", "tools", "inline", "tags")
"""Agents that have tools."""
ACTS = (0.55, 0.9)


@dataclass(frozen=True)
class Finding:
    """A fault that the records show."""

    weight: float
    """0 to 1: how likely it is what keeps the run from learning."""
    says: str
    remedy: str
    seen: Sequence[Seen]
    """Rollouts to read; the first two are shown."""


@dataclass(frozen=True)
class Share:
    """Of some rollouts, or of some groups or pairs of them, so many are so."""

    of: Callable[[History], Iterable[tuple[Any, Any]]]
    """Each, and whether it is so."""
    least: float
    """The share from which on it is a fault."""
    weight: tuple[float, float]
    """Of a share of 0 and of 1."""
    says: str
    remedy: str
    few: int = 8
    """Fewer of them say nothing."""

    def __call__(self, h: History) -> Finding | None:
        every = [(item if isinstance(item, list) else [item], so) for item, so in self.of(h)]
        found = [items for items, so in every if so]
        share = len(found) / max(1, len(every))
        if len(every) < self.few or len(found) < 2 or share < self.least:
            return None
        weight = self.weight[0] + (self.weight[1] - self.weight[0]) * share
        if every[0][0][0].step >= h.late_from > 0:  # in what is solved nothing is the fault
            weight *= h.unsolved
        kinds = Counter(kind for first, *_ in found for kind in h.kinds(first)).most_common(3)
        one, other = found[0][0].rewards, found[0][-1].rewards
        part = max(one, key=lambda name: one[name] - other.get(name, 0.0), default="spans")
        told = "".join(f", {kind}: {n}" for kind, n in kinds)
        says = self.says.format(share=share, kinds=told, part=part)
        says += f" ({len(found)} of {len(every)})"
        return Finding(weight, says, self.remedy, [seen for items in found for seen in items])


@dataclass(frozen=True)
class Whole:
    """What the numbers of the whole run say."""

    weight: Callable[[History], float]
    """0: it is not so."""
    says: str
    remedy: str

    def __call__(self, h: History) -> Finding | None:
        paid = sorted(h.late, key=lambda seen: seen.reward)
        says = self.says.format(h=h) if (weight := self.weight(h)) else ""
        return Finding(weight, says, self.remedy, [*paid[-1:], *paid[:1]]) if weight else None


def _twice(items: Iterable[tuple[Any, Any, Seen]]) -> Iterator[tuple[list[Seen], bool]]:
    """Of what came before, what came out and whose it is: whether it was otherwise at first."""
    first: dict[Any, tuple[Any, Seen]] = {}
    for before, out, seen in items:
        then, one = first.setdefault(before, (out, seen))
        if one is not seen:
            yield [one, seen], then != out


def _answered(h: History) -> Iterator[tuple[Any, Any, Seen]]:
    for seen in [*h.train, *h.heldout]:
        before = str(seen.row).encode()
        for number, segment in enumerate(seen.segments):
            ids = segment.token_ids.tobytes()
            if number and not segment.sampled:
                yield hash(before), ids, seen
            before += b"|" + ids


def _refused(h: History) -> Finding | None:
    """Whether an expected answer is wrong: groups that agree on another, none of them paid.

    A policy that errs agrees less than one that is right, a wrong expected answer changes nothing
    of how many agree. So a group counts as its agreement to the power of four. In a run that has
    learned much the errors were its own. Where no group is paid, there is nothing to compare with:
    the tasks are rather too hard.
    """
    agreed = [
        ((count / len(group)) ** 4, [seen for seen in group if seen.answer == answer], group)
        for group in h.groups
        for answer, count in Counter(s.answer for s in group if s.answer is not None).most_common(1)
        if count >= max(3, 0.5 * len(group))
    ]
    refused = [item for item in agreed if not any(map(h.paid, item[2]))]
    share = sum(item[0] for item in refused) / max(1e-9, sum(item[0] for item in agreed))
    surely, paid = mean(r[0] for r in refused), mean(a[0] for a in agreed if any(map(h.paid, a[2])))
    few = len(agreed) < 6 or len({h.question(ones[0]) for _, ones, _ in refused}) < 2
    if few or share < 0.2 or surely < 0.5 * paid or h.learned > 0.3:
        return None
    says = f"{len(refused)} of {len(agreed)} groups that agree on an answer are refused it"
    remedy = "the expected answers of these tasks, or what the reward takes as equal"
    surest = max(refused, key=lambda item: item[0])[1]
    if not paid:
        return Finding(0.55, says, remedy, surest)
    return Finding(0.6 + 0.15 * share, f"{says}, as surely as others are paid", remedy, surest)


def _extreme(h: History) -> float:
    """How likely it is that entropy, calls or repetition going to an extreme is the fault."""
    (first, last), (calls, more), (same, again) = h.nats, h.calls, h.repeats
    if h.number("loss.entropy_coef") and last > 1.5 * first:
        return 0.88
    narrow = last < min(0.05, 0.1 * first) and h.end < 0.6
    idle = calls >= 0.5 and more < 0.4 * calls
    wide = last > max(1.0, 2.5 * first)
    return 0.65 * (wide or narrow or idle or again > max(0.5, same + 0.15))


CHECKS: dict[str, Callable[[History], Finding | None]] = {
    "does not move": Whole(
        lambda h: 0.96 * h.pushed * (h.learned <= 0) * (
            h.moved <= 0.002 or 0 < h.rate <= 1e-8 or h.quantile < min(1.0, max(0.05, 1 / h.tokens))
            or h.number("learner.warmup_steps") >= h.number("steps", inf)
        ),
        "learning rate {h.rate:.1e}, gradient norm {h.norm:.1e}, {h.quantile:.2%} of the tokens "
        "trained; log-probabilities of held-out turns changed by {h.moved:.2%}",
        "learner.learning_rate (1e-6 for all weights, 1e-4 for LoRA), max_grad_norm, a "
        "warmup_steps shorter than the run; loss.top_entropy_quantile = 0.2",
    ),
    "moves too much": Whole(
        lambda h: 0.965 * (h.rate >= (2e-2 if h.number("learner.lora.rank") else 2e-3)
                           and (h.learned <= 0 or h.rate >= 1e-2)) or 0.75 * h.sank,
        "solved went from {h.base:.2f} to {h.end:.2f}, held-out {h.change}; the learning rate, "
        "about what a weight moves by in a step: {h.rate:.1e}",
        "learner.learning_rate a tenth of that; learner.max_grad_norm, loss.beta",
    ),
    "off-policy": Whole(
        lambda h: 0.9 if h.clipped > 0.3 or h.kl > 0.5
        else 0.7 * (h.clipped >= 0.2 or h.kl >= 0.1 or h.gap >= 0.02),
        "{h.clipped:.0%} of the tokens are clipped, KL {h.kl:.2g} in a step, {h.gap:.2g} to the "
        "sampler", "loss.num_iterations, num_mini_batches, learner.learning_rate; docs/losses.md",
    ),
    "held back": Whole(
        lambda h: 0.86 * (h.penalty >= 0.1 and h.learned <= 0),
        "loss.beta costs {h.penalty:.2g} a token; advantages are about 1", "loss.beta = 0 to 0.1",
    ),
    "sampled too hot": Whole(
        lambda h: 0.93 * (h.temperature > 1.2 and (h.greedier >= 0.2 or h.nats[0] > 2.5)),
        "greedy the first policy solves {h.greedier:+.0%} more than at rollout.temperature "
        "{h.temperature:g} (entropy {h.nats[0]:.1f} nats)", "rollout.temperature = 1.0",
    ),
    "machine or code fails": Share(
        lambda h: ((s, s.status is Status.INFRA_ERROR) for s in [*h.train, *h.heldout]),
        0.05, (0.8, 1.0), "{share:.0%} of all rollouts were lost", "docs/troubleshooting.md",
    ),
    "not trained on": Share(
        lambda h: ((s, not s.trained and s.status is not Status.INFRA_ERROR) for s in h.train),
        0.15, (0.6, 0.95), "{share:.0%} of the rollouts are not trained on{kinds}",
        "rollout.treatment; rollout.max_seconds (what took long: `timings` in rollouts.jsonl)",
    ),
    "reward not the same twice": Share(
        lambda h: _twice(
            ((s.row, s.after_prompt), round(s.reward, 6), s) for s in h.train
            if s.in_baseline and not h.number("reward.sigma_tool") + h.number("reward.sigma_length")
        ),
        0.02, (0.97, 0.97), "a rollout got another reward than one with the same tokens",
        "the reward function: chance, time or state in it", 2,
    ),
    "refuses what is right": Share(
        lambda h: ((s, not h.paid(s)) for s in h.train if s.answers), 0.2, (0.92, 0.97),
        "{share:.0%} of the answers that are just the expected one are not paid",
        "reward.kind, reward.strict; docs/agents.md, Rewards",
    ),
    "pays what is wrong": Share(
        lambda h: ((s, h.paid(s)) for s in h.train if s.answers is False), 0.2, (0.9, 0.95),
        "{share:.0%} of the answers that are not the expected one are paid",
        "reward.kind: what it compares with spec['answer']; docs/agents.md, Rewards",
    ),
    "pays something else": Share(
        lambda h: (
            ([bad, good], bad.reward >= good.reward - 1e-9)
            for group in h.groups if h.judges
            for good in group if h.paid(good) for bad in group if not h.paid(bad)
        ),
        0.15, (0.86, 0.88), "in {share:.0%} of the pairs of one group what did not solve the task "
        "got as much as what did, by {part!r}", "the weight of that part: reward, reward.functions",
    ),
    "environment not the same twice": Share(
        lambda h: _twice(_answered(h)), 0.02, (0.89, 0.89),
        "the environment answered the same tokens with something else",
        "chance, time or state in the tool or environment; `agentgrpo verify RUN --tools`", 2,
    ),
    "one question, two answers": Share(
        lambda h: _twice((h.question(s), s.expected, s) for s in h.train if s.expected is not None),
        0.02, (0.88, 0.88), "a question has two expected answers", "the rows of data.train", 2,
    ),
    "questions hold the answers": Share(
        lambda h: ((s, holds_answer(s.task)) for s in h.train
                   if h.base >= 0.8 and h.config.get("reward.kind") != "choice"),
        0.5, (0.5, 0.91), "{share:.0%} of the questions hold their expected answer word for word",
        "another data.question, unless the answer is to be found in it",
    ),
    "held-out tasks are trained on": Share(
        lambda h: ((s, h.question(s) in h.asked) for s in h.heldout), 0.1, (0.68, 0.72),
        "{share:.0%} of the held-out tasks are trained on", "data.heldout = split, or another file",
    ),
    "the same tasks again": Share(
        lambda h: ((g, h.asked[h.question(g[0])] > 3) for g in h.groups), 0.75, (0.5, 0.6),
        "{share:.0%} of the groups play a task more than three times", "more tasks in data.train",
    ),
    "rollouts are alike": Share(
        lambda h: (
            (g, len({s.after_prompt for s in g}) <= max(1, len(g) // 4)) for g in h.early_groups
            if h.temperature < 0.7 or not all(s.solved for s in g)
        ),
        0.5, (0.6, 0.95), "in {share:.0%} of the first steps' groups the rollouts hardly differ",
        "rollout.temperature = 1.0; or harder tasks", 2,
    ),
    "never writes what the agent reads": Whole(
        lambda h: 0.91 * bool(h.end < 0.6 and h.unwritten), "no rollout has {h.unwritten}",
        "what the policy writes (`agentgrpo view`); a worked example (agent.options.shots)",
    ),
    "does not call": Share(
        lambda h: ((s, not s.num_calls) for s in h.late
                   if h.config.get("agent.kind", "code") in CALLERS
                   and max([h.end, *h.solved]) < 0.6 and s.in_baseline and "said" not in s.stats),
        0.9, (0.0, 0.88), "{share:.0%} of the last rollouts call nothing: is the policy shown its "
        "tools?", "a prompt (`agentgrpo view`); agent.kind, agent.options.shots and system_prompt",
    ),
    "cut short": Share(
        lambda h: ((s, s.status in CUT or any(t.finish_reason == "length" for t in s.turns))
                   for s in h.acting),
        0.35, ACTS, "{share:.0%} of the rollouts end where tokens, turns or calls are used up"
        "{kinds}", "a prompt that asks for less, or: rollout.max_turn_tokens, engine.max_model_len "
        "(length), rollout.max_turns, max_tool_calls, a program's own max_tokens",
    ),
    "wrong form": Share(
        lambda h: ((s, s.stats.get("malformed") or s.status is Status.MALFORMED) for s in h.acting),
        0.35, (0.5, 0.9), "{share:.0%} of the rollouts act in a form that is not understood",
        "a worked example (agent.options.shots), agent.options, `agentgrpo sft`",
    ),
    "no answer": Share(
        lambda h: ((s, s.status is Status.COMPLETED and s.answer is None)
                   for s in h.acting if s.expected is not None),
        0.35, ACTS, "{share:.0%} of the rollouts end without an answer in the asked form",
        "agent.options.answer_prefix, system_prompt, shots",
    ),
    "tool calls fail": Share(
        lambda h: ((s, 2 * s.stats["tool_errors"] >= s.stats["tool_calls"])
                   for s in h.acting if s.stats.get("tool_calls")),
        0.4, ACTS, "in {share:.0%} of the rollouts with tool calls these fail{kinds}",
        "what the tool answers; show one right call (agent.options.shots)",
    ),
    "tool answers are cut": Share(
        lambda h: ((s, s.stats.get("cut_answers")) for s in h.acting if s.num_calls),
        0.35, ACTS, "in {share:.0%} of the rollouts with tool calls answers are cut",
        "rollout.max_observation_tokens, keep_observation; a tool that says less",
    ),
    "held-out tasks are others": Whole(
        lambda h: 0.7 * (h.at_least > h.at_most and any(s.step > h.late_from for s in h.heldout)
                         and h.temperature >= h.number("evaluation.temperature")),
        "of the last training tasks {h.end:.2f} are solved, of the held-out ones {h.change}",
        "data.heldout: of the same kind and form as data.train",
    ),
    "refuses what is agreed on": _refused,
    "exploits the reward": Whole(
        lambda h: 0.7 * (
            h.steps >= 6 and h.rose >= 0.1 and h.rose_by >= 3 and len(h.solved) > 1
            and h.solved[0] <= 0.9 and h.solved[-1] <= h.solved[0] - 0.1 * (h.gained > 0.05)
        ),
        "reward rose by {h.rose:.2f}, held-out solved {h.change}", "read what is paid most",
    ),
    "forgets": Whole(
        lambda h: _extreme(h) * (h.rose_by <= 2),
        "the reward did not rise; entropy {h.nats[0]:.2f} to {h.nats[1]:.2f}, calls "
        "{h.calls[0]:.1f} to {h.calls[1]:.1f}, repeats {h.repeats[0]:.0%} to {h.repeats[1]:.0%}",
        "loss.entropy_coef, loss.epsilon_high, learner.learning_rate, reward.tool_cost",
    ),
    "too easy": Whole(
        lambda h: (h.base >= 0.9) * h.judges * (h.learned <= 0) * (4 * h.base - 3.1),
        "{h.base:.0%} of the first step's rollouts solve their task",
        "harder tasks (data), `agentgrpo curriculum`, rollout.refill_below",
    ),
    "too hard": Share(
        lambda h: ((s, not h.paid(s)) for s in h.train if h.judges), 0.99, (0.0, 0.6),
        "{share:.1%} of the rollouts do not solve their task",
        "easier tasks first, a worked example (agent.options.shots), a smaller step in the reward",
    ),
    "no signal": Share(
        lambda h: ((g, not (any(s.moves for s in g) or all(s.solved for s in g)))
                   for g in h.groups),
        0.6, (-0.4, 0.84), "in {share:.0%} of the groups all rewards are equal",
        "reward.kind; rollout.group_size, rollout.refill_below, tasks that are sometimes solved", 4,
    ),
}  # fmt: skip
"""In this order: settings, gradients, lost rollouts, rewards, tasks, texts, symptoms."""
SYMPTOMS = [*CHECKS][[*CHECKS].index("held-out tasks are others") :]


def diagnose(h: History) -> dict[str, Finding]:
    """The findings, most likely first; a symptom that a surer finding explains is left out."""
    found = {name: finding for name, check in CHECKS.items() if (finding := check(h)) is not None}
    bar = max((v.weight for v in found.values() if v.weight >= SURE), default=NOTE)
    kept = {k: v for k, v in found.items() if v.weight >= (bar if k in SYMPTOMS else NOTE)}
    return dict(sorted(kept.items(), key=lambda item: -item[1].weight))


def report(folder: Path) -> str:
    """What `agentgrpo doctor RUN` prints; at most thirty lines."""
    h = History(folder)
    found, steps = diagnose(h), h.config.get("steps", "?")
    lines = [f"{folder}: {h.steps} of {steps} steps, {len(h.train):,} rollouts"]
    lines[0] += f", held-out solved {h.change}" if h.solved else ""
    if not h.train:
        lines.append("No step is recorded: what stopped it, if something did, it has printed.")
    elif not found:
        few = "" if h.learned or h.base >= 0.9 else f": {h.tasks} held-out tasks show no change yet"
        lines.append(f"Nothing wrong was found{few}.")
    for number, (name, finding) in enumerate([*found.items()][:MOST], start=1):
        lines += [f"{number}. {name}: {finding.says}", f"   try: {finding.remedy}"]
        lines += [f"   {name_of(s.place)}: {h.told(s)}" for s in finding.seen[:2]]
    return "\n".join(line[:200] for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Print the report. Returns the exit status."""
    parser = parser_of("doctor", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder (out_dir)")
    args = parser.parse_args(arguments)
    try:
        text = report(args.run)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print(text)  # noqa: T201
    return 0

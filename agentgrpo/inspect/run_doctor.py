"""Find out from its records why a run does not learn, also while it runs.

CHECKS has an entry per fault, causes before symptoms. The weight of a finding is how likely the
fault is the reason. Thresholds were chosen on real runs with one fault each (bench/diagnoses.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from agentgrpo.config.arguments import parser_of
from agentgrpo.inspect.run_history import History, Recorded, mean
from agentgrpo.records.rollouts import name_of
from agentgrpo.rewards.answers import holds_answer
from agentgrpo.train.command_line import report_errors
from agentgrpo.types import Status

MAX_FINDINGS = 6
"""Findings that are printed: at most thirty lines with their rollouts."""
MIN_WEIGHT = 0.2
"""Findings below are dropped."""
CERTAIN = 0.85
"""A finding of at least this weight explains the symptoms."""
CUT = (Status.TRUNCATED_LENGTH, Status.TRUNCATED_TURNS, Status.TRUNCATED_CALLS)
CALLERS = ("code", "repl", "tools", "inline", "tags")
"""Agents that have tools."""
FORM_WEIGHTS = (0.55, 0.9)
"""Weights of findings about the form of what the policy writes."""


@dataclass(frozen=True)
class Finding:
    """A fault that the records show."""

    weight: float
    """0 to 1: how likely this is why the run does not learn."""
    message: str
    remedy: str
    examples: Sequence[Recorded]
    """Rollouts to read; the first two are printed."""


@dataclass(frozen=True)
class ShareCheck:
    """A fault if a large share of rollouts (or of groups or pairs of them) has a property."""

    items: Callable[[History], Iterable[tuple[Any, Any]]]
    """Yields each rollout, group or pair, and whether it has the property."""
    threshold: float
    """The smallest share that is a fault."""
    weight: tuple[float, float]
    """Weight at a share of 0 and of 1; linear between them."""
    message: str
    remedy: str
    min_items: int = 8
    """No finding from fewer items."""

    def __call__(self, h: History) -> Finding | None:
        pairs = [(item if isinstance(item, list) else [item], hit) for item, hit in self.items(h)]
        hits = [rollouts for rollouts, hit in pairs if hit]
        share = len(hits) / max(1, len(pairs))
        if len(pairs) < self.min_items or len(hits) < 2 or share < self.threshold:
            return None
        weight = self.weight[0] + (self.weight[1] - self.weight[0]) * share
        if pairs[0][0][0].step >= h.late_from > 0:  # of late rollouts that solve nothing is wrong
            weight *= h.unsolved
        counts = Counter(p for first, *_ in hits for p in h.problems(first)).most_common(3)
        first, last = hits[0][0].rewards, hits[0][-1].rewards
        part = max(first, key=lambda name: first[name] - last.get(name, 0.0), default="spans")
        problems = "".join(f", {problem}: {n}" for problem, n in counts)
        message = self.message.format(share=share, kinds=problems, part=part)
        message += f" ({len(hits)} of {len(pairs)})"
        return Finding(weight, message, self.remedy, [r for rollouts in hits for r in rollouts])


@dataclass(frozen=True)
class RunCheck:
    """A fault that the numbers of the whole run show."""

    weight: Callable[[History], float]
    """0: no finding."""
    message: str
    remedy: str

    def __call__(self, h: History) -> Finding | None:
        if not (weight := self.weight(h)):
            return None
        by_reward = sorted(h.late, key=lambda r: r.reward)
        examples = [*by_reward[-1:], *by_reward[:1]]
        return Finding(weight, self.message.format(h=h), self.remedy, examples)


def _repeated(items: Iterable[tuple[Any, Any, Recorded]]) -> Iterator[tuple[list[Recorded], bool]]:
    """Take (input, output, rollout); for a repeated input yield whether the outputs differ."""
    first: dict[Any, tuple[Any, Recorded]] = {}
    for source, output, rollout in items:
        first_output, first_rollout = first.setdefault(source, (output, rollout))
        if first_rollout is not rollout:
            yield [first_rollout, rollout], first_output != output


def _observations(h: History) -> Iterator[tuple[Any, Any, Recorded]]:
    for rollout in [*h.train, *h.heldout]:
        prefix = str(rollout.row).encode()
        for number, segment in enumerate(rollout.segments):
            ids = segment.token_ids.tobytes()
            if number and not segment.sampled:
                yield hash(prefix), ids, rollout
            prefix += b"|" + ids


def _wrong_gold(h: History) -> Finding | None:
    """Find expected answers that are wrong: groups agree on another answer that gets no reward.

    A policy that is wrong agrees less with itself than one that is right, and a wrong expected
    answer does not change the agreement: a group counts with its agreement to the power of four.
    If the run has learned much, the errors were the policy's own. If no group is rewarded, there is
    nothing to compare with, and the tasks are more likely too hard.
    """
    agreed = [
        ((count / len(group)) ** 4, [r for r in group if r.answer == answer], group)
        for group in h.groups
        for answer, count in Counter(s.answer for s in group if s.answer is not None).most_common(1)
        if count >= max(3, 0.5 * len(group))
    ]
    refused = [item for item in agreed if not any(map(h.is_right, item[2]))]
    share = sum(item[0] for item in refused) / max(1e-9, sum(item[0] for item in agreed))
    agreement = mean(item[0] for item in refused)
    rewarded = mean(item[0] for item in agreed if any(map(h.is_right, item[2])))
    few = len(agreed) < 6 or len({h.question(rollouts[0]) for _, rollouts, _ in refused}) < 2
    if few or share < 0.2 or agreement < 0.5 * rewarded or h.learned > 0.3:
        return None
    message = f"{len(refused)} of {len(agreed)} groups that agree on an answer get no reward for it"
    remedy = "the expected answers of these tasks, or which answers the reward accepts as equal"
    examples = max(refused, key=lambda item: item[0])[1]
    if not rewarded:
        return Finding(0.55, message, remedy, examples)
    message += "; they agree as often as groups that get one"
    return Finding(0.6 + 0.15 * share, message, remedy, examples)


def _extreme(h: History) -> float:
    """Weight of entropy, number of calls or repetition going to an extreme."""
    (first, last), (calls, late_calls), (repeats, late_repeats) = h.nats, h.calls, h.repeats
    if h.number("loss.entropy_coef") and last > 1.5 * first:
        return 0.88
    narrow = last < min(0.05, 0.1 * first) and h.end < 0.6
    idle = calls >= 0.5 and late_calls < 0.4 * calls
    wide = last > max(1.0, 2.5 * first)
    return 0.65 * (wide or narrow or idle or late_repeats > max(0.5, repeats + 0.15))


CHECKS: dict[str, Callable[[History], Finding | None]] = {
    "policy does not change": RunCheck(
        lambda h: 0.96 * h.has_gradient * (h.learned <= 0) * (
            h.moved <= 0.002 or 0 < h.rate <= 1e-8 or h.quantile < min(1.0, max(0.05, 1 / h.tokens))
            or h.number("learner.warmup_steps") >= h.number("steps", inf)
        ),
        "learning rate {h.rate:.1e}, gradient norm {h.norm:.1e}, {h.quantile:.2%} of the tokens "
        "trained; log-probabilities of held-out turns changed by {h.moved:.2%}",
        "learner.learning_rate (1e-6 for all weights, 1e-4 for LoRA), max_grad_norm, a "
        "warmup_steps shorter than the run; loss.top_entropy_quantile = 0.2",
    ),
    "policy changes too fast": RunCheck(
        lambda h: 0.965 * (h.rate >= (2e-2 if h.number("learner.lora.rank") else 2e-3)
                           and (h.learned <= 0 or h.rate >= 1e-2)) or 0.75 * h.sank,
        "solved went from {h.base:.2f} to {h.end:.2f}, held-out {h.change}; learning rate "
        "(about the change of a weight in a step) {h.rate:.1e}",
        "learner.learning_rate a tenth of that; learner.max_grad_norm, loss.beta",
    ),
    "off-policy": RunCheck(
        lambda h: 0.9 if h.clipped > 0.3 or h.kl > 0.5
        else 0.7 * (h.clipped >= 0.2 or h.kl >= 0.1 or h.gap >= 0.02),
        "{h.clipped:.0%} of the tokens are clipped, KL {h.kl:.2g} within a step, {h.gap:.2g} to "
        "the sampler",
        "loss.num_iterations, num_mini_batches, learner.learning_rate; docs/losses.md",
    ),
    "KL penalty too large": RunCheck(
        lambda h: 0.86 * (h.penalty >= 0.1 and h.learned <= 0),
        "loss.beta costs {h.penalty:.2g} per token; advantages are about 1", "loss.beta = 0 to 0.1",
    ),
    "temperature too high": RunCheck(
        lambda h: 0.93 * (h.temperature > 1.2 and (h.greedier >= 0.2 or h.nats[0] > 2.5)),
        "the first policy solves {h.greedier:+.0%} more in evaluation than at "
        "rollout.temperature {h.temperature:g} (entropy {h.nats[0]:.1f} nats)",
        "rollout.temperature = 1.0",
    ),
    "rollouts fail for technical reasons": ShareCheck(
        lambda h: ((s, s.status is Status.INFRA_ERROR) for s in [*h.train, *h.heldout]),
        0.05, (0.8, 1.0), "{share:.0%} of all rollouts ended with an infrastructure error",
        "docs/debug.md",
    ),
    "rollouts are not trained on": ShareCheck(
        lambda h: ((s, not s.trained and s.status is not Status.INFRA_ERROR) for s in h.train),
        0.15, (0.6, 0.95), "{share:.0%} of the rollouts are not trained on{kinds}",
        "rollout.treatment; rollout.max_seconds (`timings` in rollouts.jsonl shows what is slow)",
    ),
    "reward is not deterministic": ShareCheck(
        lambda h: _repeated(
            ((s.row, s.after_prompt), round(s.reward, 6), s) for s in h.train
            if s.in_baseline and not h.number("reward.sigma_tool") + h.number("reward.sigma_length")
        ),
        0.02, (0.97, 0.97), "two rollouts with the same tokens got different rewards",
        "random numbers, time or state in the reward function", 2,
    ),
    "right answers get no reward": ShareCheck(
        lambda h: ((s, not h.is_right(s)) for s in h.train if s.is_expected), 0.2, (0.92, 0.97),
        "{share:.0%} of the answers that equal the expected one get no reward",
        "reward.kind, reward.strict; docs/agents.md, Rewards",
    ),
    "wrong answers get a reward": ShareCheck(
        lambda h: ((s, h.is_right(s)) for s in h.train if s.is_expected is False), 0.2, (0.9, 0.95),
        "{share:.0%} of the answers that differ from the expected one get a reward",
        "reward.kind: what it compares with spec['answer']; docs/agents.md, Rewards",
    ),
    "reward does not follow the task": ShareCheck(
        lambda h: (
            ([bad, good], bad.reward >= good.reward - 1e-9)
            for group in h.groups if h.has_solved
            for good in group if h.is_right(good) for bad in group if not h.is_right(bad)
        ),
        0.15, (0.86, 0.88), "in {share:.0%} of the pairs of a group the rollout that failed got at "
        "least the reward of the one that solved the task, by {part!r}",
        "the weight of that part: reward, reward.functions",
    ),
    "environment is not deterministic": ShareCheck(
        lambda h: _repeated(_observations(h)), 0.02, (0.89, 0.89),
        "the environment answered the same tokens differently",
        "random numbers, time or state in the tool or environment; "
        "`agentgrpo verify RUN --tools`", 2,
    ),
    "one question has two expected answers": ShareCheck(
        lambda h: _repeated(
            (h.question(s), s.expected, s) for s in h.train if s.expected is not None
        ),
        0.02, (0.88, 0.88), "rows with the same question have different expected answers",
        "the rows of data.train", 2,
    ),
    "questions contain the answers": ShareCheck(
        lambda h: ((s, holds_answer(s.task)) for s in h.train
                   if h.base >= 0.8 and h.config.get("reward.kind") != "choice"),
        0.5, (0.5, 0.91), "{share:.0%} of the questions contain their expected answer literally",
        "another data.question, unless finding the answer in it is the task",
    ),
    "held-out tasks are trained on": ShareCheck(
        lambda h: ((s, h.question(s) in h.times_played) for s in h.heldout), 0.1, (0.68, 0.72),
        "{share:.0%} of the held-out tasks are also training tasks",
        "data.heldout = split, or another file",
    ),
    "too few tasks": ShareCheck(
        lambda h: ((g, h.times_played[h.question(g[0])] > 3) for g in h.groups), 0.75, (0.5, 0.6),
        "{share:.0%} of the groups play a task that the run plays more than three times",
        "more tasks in data.train",
    ),
    "rollouts of a group are alike": ShareCheck(
        lambda h: (
            (g, len({s.after_prompt for s in g}) <= max(1, len(g) // 4)) for g in h.early_groups
            if h.temperature < 0.7 or not all(s.solved for s in g)
        ),
        0.5, (0.6, 0.95),
        "in {share:.0%} of the groups of the first steps the rollouts hardly differ",
        "rollout.temperature = 1.0; or harder tasks", 2,
    ),
    "required tag or prefix is never written": RunCheck(
        lambda h: 0.91 * bool(h.end < 0.6 and h.unwritten), "no rollout contains {h.unwritten}",
        "read some turns (`agentgrpo view`); a worked example (agent.options.shots)",
    ),
    "no tool calls": ShareCheck(
        lambda h: ((s, not s.num_calls) for s in h.late
                   if h.config.get("agent.kind", "code") in CALLERS
                   and max([h.end, *h.solved]) < 0.6 and s.in_baseline and "said" not in s.stats),
        0.9, (0.0, 0.88), "{share:.0%} of the last rollouts call no tool: does the prompt show the "
        "tools?", "a prompt (`agentgrpo view`); agent.kind, agent.options.shots and system_prompt",
    ),
    "cut short": ShareCheck(
        lambda h: ((s, s.status in CUT or any(t.finish_reason == "length" for t in s.turns))
                   for s in h.acting),
        0.35, FORM_WEIGHTS, "{share:.0%} of the rollouts end at a limit of tokens, turns or calls"
        "{kinds}", "a prompt that asks for shorter turns, or rollout.max_turn_tokens, "
        "engine.max_model_len (length), rollout.max_turns, max_tool_calls, max_tokens of a program",
    ),
    "malformed actions": ShareCheck(
        lambda h: ((s, s.stats.get("malformed") or s.status is Status.MALFORMED) for s in h.acting),
        0.35, (0.5, 0.9), "{share:.0%} of the rollouts have actions that cannot be parsed",
        "a worked example (agent.options.shots), agent.options, `agentgrpo sft`",
    ),
    "no answer": ShareCheck(
        lambda h: ((s, s.status is Status.COMPLETED and s.answer is None)
                   for s in h.acting if s.expected is not None),
        0.35, FORM_WEIGHTS,
        "{share:.0%} of the rollouts end without an answer in the required form",
        "agent.options.answer_prefix, system_prompt, shots",
    ),
    "tool calls fail": ShareCheck(
        lambda h: ((s, 2 * s.stats["tool_errors"] >= s.stats["tool_calls"])
                   for s in h.acting if s.stats.get("tool_calls")),
        0.4, FORM_WEIGHTS,
        "in {share:.0%} of the rollouts with tool calls at least half of them fail{kinds}",
        "the tool's error messages; show a right call (agent.options.shots)",
    ),
    "tool results are cut": ShareCheck(
        lambda h: ((s, s.stats.get("cut_answers")) for s in h.acting if s.num_calls),
        0.35, FORM_WEIGHTS, "in {share:.0%} of the rollouts with tool calls results are cut",
        "rollout.max_observation_tokens, keep_observation; shorter tool results",
    ),
    "held-out tasks are of another kind": RunCheck(
        lambda h: 0.7 * (h.at_least > h.at_most and any(s.step > h.late_from for s in h.heldout)
                         and h.temperature >= h.number("evaluation.temperature")),
        "solved in the last steps {h.end:.2f}, held-out {h.change}",
        "data.heldout: of the same kind and form as data.train",
    ),
    "expected answers may be wrong": _wrong_gold,
    "exploits the reward": RunCheck(
        lambda h: 0.7 * (
            h.steps >= 6 and h.rose >= 0.1 and h.rose_by >= 3 and len(h.solved) > 1
            and h.solved[0] <= 0.9 and h.solved[-1] <= h.solved[0] - 0.1 * (h.gained > 0.05)
        ),
        "reward rose by {h.rose:.2f}, held-out solved {h.change}",
        "read the rollouts with the highest rewards",
    ),
    "forgets": RunCheck(
        lambda h: _extreme(h) * (h.rose_by <= 2),
        "the reward did not rise; entropy {h.nats[0]:.2f} to {h.nats[1]:.2f}, calls "
        "{h.calls[0]:.1f} to {h.calls[1]:.1f}, repeats {h.repeats[0]:.0%} to {h.repeats[1]:.0%}",
        "loss.entropy_coef, loss.epsilon_high, learner.learning_rate, reward.tool_cost",
    ),
    "too easy": RunCheck(
        lambda h: (h.base >= 0.9) * h.has_solved * (h.learned <= 0) * (4 * h.base - 3.1),
        "{h.base:.0%} of the first step's rollouts solve their task",
        "harder tasks (data), `agentgrpo curriculum`, rollout.refill_below",
    ),
    "too hard": ShareCheck(
        lambda h: ((s, not h.is_right(s)) for s in h.train if h.has_solved), 0.99, (0.0, 0.6),
        "{share:.1%} of the rollouts fail",
        "easier tasks first, a worked example (agent.options.shots), a smaller step in the reward",
    ),
    "all rewards of a group are equal": ShareCheck(
        lambda h: ((g, not (any(s.has_advantage for s in g) or all(s.solved for s in g)))
                   for g in h.groups),
        0.6, (-0.4, 0.84), "in {share:.0%} of the groups all rewards are equal",
        "reward.kind; rollout.group_size, rollout.refill_below, tasks that are sometimes solved", 4,
    ),
}  # fmt: skip
"""In this order: settings, gradients, lost rollouts, rewards, tasks, texts, symptoms."""
SYMPTOMS = [*CHECKS][[*CHECKS].index("held-out tasks are of another kind") :]


def diagnose(h: History) -> dict[str, Finding]:
    """The findings by name, most likely first, without symptoms that a cause explains."""
    findings = {name: finding for name, check in CHECKS.items() if (finding := check(h))}
    weights = [finding.weight for finding in findings.values()]
    cause = max((weight for weight in weights if weight >= CERTAIN), default=MIN_WEIGHT)
    minimum = {name: cause if name in SYMPTOMS else MIN_WEIGHT for name in findings}
    likely = {name: f for name, f in findings.items() if f.weight >= minimum[name]}
    return dict(sorted(likely.items(), key=lambda item: -item[1].weight))


def report(folder: Path) -> str:
    """The output of `agentgrpo doctor RUN`: at most thirty lines."""
    h = History(folder)
    findings, steps = diagnose(h), h.config.get("steps", "?")
    lines = [f"{folder}: {h.steps} of {steps} steps, {len(h.train):,} rollouts"]
    lines[0] += f", held-out solved {h.change}" if h.solved else ""
    if not h.train:
        lines.append("No step is recorded. If the run stopped, its own output has the reason.")
    elif not findings:
        few = "" if h.learned or h.base >= 0.9 else f" yet: {h.tasks} held-out tasks show no change"
        lines.append(f"No fault found{few}.")
    for number, (name, finding) in enumerate([*findings.items()][:MAX_FINDINGS], start=1):
        lines += [f"{number}. {name}: {finding.message}", f"   try: {finding.remedy}"]
        lines += [f"   {name_of(r.place)}: {h.summary(r)}" for r in finding.examples[:2]]
    return "\n".join(line[:200] for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Print the report. Returns the exit status."""
    parser = parser_of("doctor", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run (out_dir)")
    args = parser.parse_args(arguments)
    with report_errors() as outcome:
        text = report(args.run)
    if not outcome.status:
        print(text)  # outside, as a closed pipe is no error
    return outcome.status

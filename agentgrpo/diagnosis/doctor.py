"""Say what keeps a run from learning, most likely first: from its records, also while it runs.

A row or a function for each fault. `weight` says how likely it is what keeps the run from learning:
what makes all else useless (a reward that says nothing, weights that do not move) is above what it
causes (groups without contrast), what can only be said of a short run is below all. Bounds were
chosen on real runs with one fault each (bench/diagnoses.py).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from agentgrpo.config.arguments import parser_of
from agentgrpo.diagnosis.history import History, Seen, gain, mean
from agentgrpo.run.records import name_of
from agentgrpo.types import Status

MOST = 6
"""Findings that are printed; with their rollouts these are thirty lines."""
CUT = (Status.TRUNCATED_LENGTH, Status.TRUNCATED_TURNS, Status.TRUNCATED_CALLS)
REWARD = attrgetter("reward")
NOTE = 0.2
"""What weighs less is no fault."""


@dataclass(frozen=True)
class Finding:
    """A fault that the records show."""

    weight: float
    """0 to 1: how likely it is what keeps the run from learning."""
    says: str
    remedy: str
    seen: Sequence[Seen] = ()
    """Rollouts to read; the first two are shown."""


@dataclass(frozen=True)
class Share:
    """What part of some rollouts, or of some groups or pairs of them, is so."""

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
    least_found: int = 1

    def __call__(self, h: History) -> Finding | None:
        every = [(item if isinstance(item, list) else [item], so) for item, so in self.of(h)]
        found = [items for items, so in every if so]
        share = len(found) / max(1, len(every))
        if len(every) < self.few or len(found) < self.least_found or share < self.least:
            return None
        low, high = self.weight
        # what does not keep the policy from solving is not the fault
        late = every[0][0][0].step >= h.late_from > 0
        one, other = found[0][0], found[0][-1].rewards
        errors = "{errors}" in self.says
        kinds = Counter(k for s, *_ in found for k in (h.errors(s) if errors else [s.status]))
        told = "".join(f", {kind}: {n}" for kind, n in kinds.most_common(3))
        says = self.says.format(
            share=share, said=f"{one.error or one.answer or '':.70}", want=one.expected,
            errors=told, ends=told,
            part=max(one.rewards, key=lambda k: one.rewards[k] - other.get(k, 0), default="spans"),
        )  # fmt: skip
        weight = (low + (high - low) * share) * (h.unsolved if late else 1.0)
        says += f" ({len(found)} of {len(every)})"
        return Finding(weight, says, self.remedy, [seen for items in found for seen in items])


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


def _callers(h: History) -> Sequence[Seen]:
    """The last rollouts of an agent that has tools, of no dialogue and where little is solved."""
    acts = h.config.get("agent.kind", "code") in ("code", "repl", "tools", "inline", "tags")
    little = max([mean(map(h.paid, h.late)), *h.solved]) < 0.6
    late = [seen for seen in h.late if seen.in_baseline and "said" not in seen.stats]
    return late if acts and little else ()


def _refused(h: History) -> Finding | None:
    """Whether an expected answer is wrong: groups that agree on another, none of them paid.

    A policy that errs agrees less than one that is right, a wrong expected answer changes nothing
    of how many agree. So a group counts as its agreement to the power of four.
    """
    agreed: list[tuple[float, bool, list[Seen]]] = []
    for group in h.groups:
        said = Counter(s.answer for s in group if s.answer is not None)
        answer, count = said.most_common(1)[0] if said else ("", 0)
        if count >= max(3, 0.5 * len(group)):
            ones = [seen for seen in group if seen.answer == answer]
            agreed.append(((count / len(group)) ** 4, not any(map(h.paid, group)), ones))
    refused = sorted((item for item in agreed if item[1]), key=lambda item: -item[0])
    share = sum(item[0] for item in refused) / max(1e-9, sum(item[0] for item in agreed))
    if len(agreed) < 12 or len({ones[0].question for *_, ones in refused}) < 3 or share < 0.2:
        return None
    seen = [seen for *_, ones in refused for seen in ones]
    says = f"{len(refused)} of {len(agreed)} groups that agree on an answer are refused it, as "
    says += f"surely as others are paid: {seen[0].answer!r:.70} for {seen[0].expected!r}"
    remedy = "the expected answers of these tasks, or what the reward takes as equal"
    return Finding(0.6 + 0.15 * share, says, remedy, seen)


def _still(h: History) -> Finding | None:
    """By how much log-probabilities of held-out turns changed, beside the records' own noise."""
    if not h.steps or not (any(seen.moves for seen in h.train) or h.number("loss.beta")):
        return None  # no gradient: others say why
    turns: dict[int, dict[Any, Any]] = {}
    for seen in h.heldout:
        for first in [s for s in seen.all_segments if s.sampled][:1]:
            turns.setdefault(seen.step, {})[seen.row] = first
    then, now = (turns[min(turns)], turns[max(turns)]) if len(turns) > 1 else ({}, {})
    changes: list[float] = []
    for a, b in ((then[task], now[task]) for task in then.keys() & now.keys()):
        length = min(len(a.token_ids), len(b.token_ids))
        apart = np.flatnonzero(a.token_ids[:length] != b.token_ids[:length])
        end = apart[0] + 1 if len(apart) else length
        changes += np.abs(a.logprobs[:end] - b.logprobs[:end]).tolist()
    noise = mean(h.metric("learner/sampler_gap_mean"))
    if mean(changes) > max(1e-4, 3 * noise) if changes else h.rate > 1e-8:
        return None
    says = f"{len(changes)} log-probabilities of held-out turns moved by {mean(changes):.1e} nats; "
    remedy = "learner.learning_rate (1e-6 for all weights, 1e-4 for LoRA), warmup_steps"
    return Finding(0.95, f"{says}the learning rate is {h.rate:.1e}", remedy, h.heldout)


def _worse(h: History) -> Finding | None:
    after = [seen for seen in h.late if seen.step > h.first[0].step]
    (fell, errors), (more, _) = gain(h.paid, h.first, after), gain(REWARD, h.first, after)
    told = h.learned < -0.15 or (fell < -0.15 and errors < -3 and more < 0)
    if not told and h.rate < 1e-2:
        return None
    base = mean(map(h.paid, h.first))
    says = f"solved went from {base:.2f} in the first step to {base + fell:.2f}"
    says += f", held-out {h.solved[0]:.2f} to {h.solved[-1]:.2f}" if h.solved else ""
    says += f"; the learning rate, about what a weight moves by in a step: {h.rate:.1e}"
    remedy = "learner.learning_rate a tenth of that; learner.max_grad_norm, loss.beta"
    weight = 0.75 if h.rate < 1e-2 else 0.96 if told else 0.9
    return Finding(weight, says, remedy, after or h.first)


def _hot(h: History) -> Finding | None:
    temperature = h.number("rollout.temperature", 1.0)
    entropy = (h.metric("learner/entropy_mean") or [0.0])[0]
    less = h.solved[0] - mean(map(h.paid, h.first)) if h.solved else 0.0
    if temperature <= 1.2 or (less < 0.2 and entropy < 2.5):
        return None
    says = f"greedy the first policy solves {less:+.0%} more than at rollout.temperature "
    says += f"{temperature:g} (entropy {entropy:.1f} nats)"
    return Finding(0.93, says, "rollout.temperature = 1.0", h.first)


def _exploits(h: History) -> Finding | None:
    (more, errors), (paid, _) = gain(REWARD, h.early, h.late), gain(h.paid, h.early, h.late)
    first, last = (h.solved[0], h.solved[-1]) if len(h.solved) > 1 else (1.0, 1.0)
    if more < 0.1 or errors < 3 or first > 0.9 or last > first - 0.1 * (paid > 0.05):
        return None
    says = f"the training reward rose by {more:.2f}, held-out solved {first:.2f} to {last:.2f}"
    best = sorted(h.late, key=REWARD, reverse=True)
    return Finding(0.7, says, "read what is paid most; docs/your-task.md, Look", best)


def _off_policy(h: History) -> Finding | None:
    names = ("clip_low_fraction", "clip_high_fraction", "approx_kl", "mismatch_kl")
    low, high, kl, gap = (mean(h.metric(f"learner/{name}")) for name in names)
    if low + high < 0.2 and kl < 0.1 and gap < 0.02:
        return None
    says = f"{low + high:.0%} of the tokens are clipped, KL {kl:.2g} in a step, {gap:.2g} to the "
    remedy = "loss.num_iterations, loss.num_mini_batches, learner.learning_rate; docs/losses.md"
    weight = 0.9 if low + high > 0.3 or kl > 0.5 else 0.7
    return Finding(weight, f"{says}sampler", remedy, h.late)


def _held(h: History) -> Finding | None:
    beta = h.number("loss.beta")
    penalty = beta * mean(h.metric("learner/ref_kl"))
    if penalty < 0.1 or h.learned > 0:
        return None
    says = f"loss.beta = {beta:g} costs {penalty:.2g} a token, where advantages are about 1"
    return Finding(0.86, says, "loss.beta = 0, or 0.001 to 0.1", h.late)


def _repetition(seen: Seen) -> float:
    """The share of its trigrams that repeat an earlier one."""
    ids = [t for s in seen.all_segments if s.sampled for t in s.token_ids.tolist()]
    grams = [*zip(ids, ids[1:], ids[2:], strict=False)]
    return 1 - len({*grams}) / len(grams) if len(grams) > 16 else 0.0


def _forgets(h: History) -> Finding | None:
    """What went to an extreme while the reward did not rise."""
    nats = h.metric("learner/entropy_mean")
    if gain(REWARD, h.early, h.late)[1] > 2 or len(nats) < 2:
        return None
    third = max(1, len(nats) // 3)
    first, last = mean(nats[:third]), mean(nats[-third:])
    parts = (h.early, h.late)
    calls, more = (mean(s.num_calls for s in part) for part in parts)
    same, again = (mean(map(_repetition, part)) for part in parts)
    bonus = h.number("loss.entropy_coef")
    wide = last > (1.5 * first if bonus else max(1.0, 2.5 * first))
    narrow = last < min(0.05, 0.1 * first) and mean(map(h.paid, h.late)) < 0.6
    idle = calls >= 0.5 and more < 0.4 * calls
    if not (wide or narrow or idle or again > max(0.5, same + 0.15)):
        return None
    says = f"the reward did not rise; entropy {first:.2f} to {last:.2f} nats, calls {calls:.1f} "
    says += f"to {more:.1f}, trigrams that repeat {same:.0%} to {again:.0%}"
    remedy = "loss.entropy_coef, loss.epsilon_high, learner.learning_rate, reward.tool_cost"
    return Finding(0.88 if wide and bonus else 0.65, says, remedy, h.late)


def _evidence(h: History) -> Finding | None:
    if len(h.solved) < 2:
        says = f"{len(h.steps)} steps, and no two evaluations that say what is solved"
        return Finding(0.1, says, "more steps; eval_every, reward.solved_at")
    if h.learned or (h.solved[0] >= 0.95 and h.tasks >= 16):
        return None
    says = f"held-out solved {h.solved[0]:.2f} to {h.solved[-1]:.2f} on {h.tasks} tasks in "
    says += f"{len(h.steps)} steps is within what chance makes of them"
    return Finding(0.1, says, "data.num_heldout, more steps, several seeds")


CHECKS: dict[str, Callable[[History], Finding | None]] = {
    "machine or code fails": Share(
        lambda h: ((s, s.status is Status.INFRA_ERROR) for s in [*h.train, *h.heldout]),
        0.05, (0.8, 1.0), "{share:.0%} of all rollouts were lost: {said}",
        "docs/troubleshooting.md, `rollouts lost`",
    ),
    "not trained on": Share(
        lambda h: ((s, not s.trained and s.status is not Status.INFRA_ERROR) for s in h.train),
        0.15, (0.6, 0.95), "{share:.0%} of the rollouts are not trained on{ends}",
        "rollout.treatment; rollout.max_seconds (what took long: `timings` in rollouts.jsonl)",
    ),
    "does not move": _still,
    "reward not the same twice": Share(
        lambda h: _twice(
            ((s.row, s.after_prompt), round(s.reward, 6), s) for s in h.train
            if s.in_baseline and not h.number("reward.sigma_tool") + h.number("reward.sigma_length")
        ),
        0.02, (0.97, 0.97), "a rollout got another reward than one with the same tokens",
        "the reward function: chance, time or state in it", 2, 2,
    ),
    "refuses what is right": Share(
        lambda h: ((s, not h.paid(s)) for s in h.train if s.answers), 0.2, (0.92, 0.97),
        "{share:.0%} of the answers that are just the expected one are not paid: {said!r}",
        "reward.kind, reward.strict; docs/agents.md, Rewards",
    ),
    "pays what is wrong": Share(
        lambda h: ((s, h.paid(s)) for s in h.train if s.answers is False), 0.2, (0.9, 0.95),
        "{share:.0%} of the answers that are not the expected one are paid: {said!r} for {want!r}",
        "reward.kind: what it compares with spec['answer']; docs/agents.md, Rewards",
    ),
    "pays nothing": Share(
        lambda h: ((s, s.reward == h.train[0].reward)
                   for s in (() if all(map(h.paid, h.train)) else h.train)),
        1.0, (0.84, 0.84), "all rollouts got the same reward: there is nothing to learn",
        "reward.kind, docs/your-task.md; a part that pays a smaller step towards the goal",
    ),
    "moves too much": _worse,
    "sampled too hot": _hot,
    "environment not the same twice": Share(
        lambda h: _twice(_answered(h)), 0.02, (0.89, 0.89),
        "the environment answered the same tokens with something else",
        "chance, time or state in the tool or environment; `agentgrpo verify RUN --tools`", 2, 2,
    ),
    "one question, two answers": Share(
        lambda h: _twice((s.question, s.expected, s) for s in h.train if s.expected is not None),
        0.02, (0.88, 0.88), "a question was asked with another expected answer",
        "data.train: rows that contradict", 2, 2,
    ),
    "rollouts are alike": Share(
        lambda h: (
            (g, len({s.after_prompt for s in g}) <= max(1, len(g) // 4)
             and (h.number("rollout.temperature", 1) < 0.7 or not all(s.solved for s in g)))
            for g in h.early_groups
        ),
        0.5, (0.6, 0.95), "in {share:.0%} of the first steps' groups the rollouts are the same",
        "rollout.temperature = 1.0; or harder tasks", 2,
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
    "too easy": Share(
        lambda h: ((g, all(s.solved and not s.moves for s in g)) for g in h.early_groups),
        0.6, (0.5, 0.9), "{share:.0%} of the first steps' groups are solved by every rollout",
        "harder tasks (data), `agentgrpo curriculum`, rollout.refill_below", 4,
    ),
    "does not call": Share(
        lambda h: ((s, not s.num_calls) for s in _callers(h)), 0.9, (0.0, 0.88),
        "{share:.0%} of the last rollouts call nothing: is the policy shown its tools?",
        "read a prompt (`agentgrpo view`); agent.kind, agent.options.shots and system_prompt",
    ),
    "cut short": Share(
        lambda h: ((s, s.status in CUT) for s in h.acting), 0.35, (0.55, 0.9),
        "{share:.0%} of the rollouts end where tokens, turns or calls are used up{ends}",
        "a prompt that asks for less, or: rollout.max_turn_tokens, engine.max_model_len (length); "
        "rollout.max_turns (turns); rollout.max_tool_calls (calls)",
    ),
    "wrong form": Share(
        lambda h: ((s, s.stats.get("malformed") or s.status is Status.MALFORMED) for s in h.acting),
        0.35, (0.5, 0.9), "{share:.0%} of the rollouts act in a form that is not understood",
        "a worked example (agent.options.shots), agent.options, `agentgrpo sft`",
    ),
    "no answer": Share(
        lambda h: ((s, s.status is Status.COMPLETED and s.answer is None)
                   for s in h.acting if s.expected is not None),
        0.35, (0.55, 0.9), "{share:.0%} of the rollouts end without an answer in the asked form",
        "agent.options.answer_prefix, system_prompt, shots",
    ),
    "tool calls fail": Share(
        lambda h: (
            (s, 2 * s.stats["tool_errors"] >= s.stats["tool_calls"])
            for s in h.acting if s.stats.get("tool_calls")
        ),
        0.4, (0.55, 0.9), "in {share:.0%} of the rollouts with tool calls these fail{errors}",
        "what the tool answers; show one right call (agent.options.shots)",
    ),
    "tool answers are cut": Share(
        lambda h: ((s, s.stats.get("cut_answers")) for s in h.acting if s.num_calls),
        0.35, (0.55, 0.9), "in {share:.0%} of the rollouts with tool calls answers are cut",
        "rollout.max_observation_tokens, keep_observation; a tool that says less",
    ),
    "refuses what is agreed on": _refused,
    "exploits the reward": _exploits,
    "held-out tasks are trained on": Share(
        lambda h: ((s, s.row in h.asked) for s in h.heldout), 0.1, (0.68, 0.72),
        "{share:.0%} of the held-out tasks are trained on: what they show is memory",
        "data.heldout = split, or another file",
    ),
    "off-policy": _off_policy,
    "held back": _held,
    "forgets": _forgets,
    "the same tasks again": Share(
        lambda h: ((group, h.asked[group[0].row] > 3) for group in h.groups), 0.75, (0.5, 0.6),
        "{share:.0%} of the groups are of a task that is played more than three times",
        "more tasks in data.train",
    ),
    "too hard": Share(
        lambda h: ((s, not h.paid(s)) for s in h.train if h.judges), 0.99, (0.0, 0.6),
        "{share:.1%} of the rollouts do not solve their task",
        "easier tasks first, a worked example (agent.options.shots), a smaller step in the reward",
    ),
    "no signal": Share(
        lambda h: ((g, not (any(s.moves for s in g) or all(s.solved for s in g)))
                   for g in h.groups),
        0.6, (0.45, 0.6), "in {share:.0%} of the groups all rewards are equal",
        "rollout.group_size, rollout.refill_below, tasks that are sometimes solved", 4,
    ),
    "too little evidence": _evidence,
}  # fmt: skip
"""What is looked for, by name."""


def diagnose(h: History) -> dict[str, Finding]:
    """What the records of a run show, most likely first; empty: nothing."""
    found = {name: finding for name, check in CHECKS.items() if (finding := check(h)) is not None}
    return dict(sorted(found.items(), key=lambda item: -item[1].weight))


def report(folder: Path) -> str:
    """What `agentgrpo doctor RUN` prints; at most thirty lines."""
    h = History(folder)
    found, steps = diagnose(h), h.config.get("steps", "?")
    solved = [f"{share:.2f}" for share in dict.fromkeys((*h.solved[:1], *h.solved[-1:]))]
    lines = [f"{folder}: {len(h.steps)} of {steps} steps, {len(h.train):,} rollouts"]
    lines[0] += f", held-out solved {' -> '.join(solved)}" if solved else ""
    if not h.train:
        lines.append("No step is recorded: what stopped it, if something did, it has printed.")
    elif all(finding.weight < NOTE for finding in found.values()):
        lines.append("Nothing wrong was found.")
    for number, (name, finding) in enumerate([*found.items()][:MOST], start=1):
        lines += [f"{number}. {name}: {finding.says}", f"   try: {finding.remedy}"]
        for seen in finding.seen[:2]:
            text = " ".join(h.text(seen).split())
            said = f": {text[:60]!r}" if text else ""
            lines.append(f"   {name_of(seen.place)}: {seen.status}, reward {seen.reward:.3g}{said}")
    return "\n".join(line[:200] for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Print the report. Returns the exit status."""
    parser = parser_of("doctor", __doc__)
    parser.add_argument("run", type=Path, help="a run's folder (out_dir)")
    args = parser.parse_args(arguments)
    try:
        print(report(args.run))  # noqa: T201
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0

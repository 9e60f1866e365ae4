"""What keeps a run from learning: a row or a function for each fault, from the records alone.

`weight` says how likely it is what keeps the run from learning: what makes all else useless (a
reward that says nothing, weights that do not move) is above what it causes (groups without
contrast), what can only be said of a short run is below all. Bounds were chosen on real runs with
one fault each (bench/diagnoses.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentgrpo.diagnosis.history import History, Seen, gain, mean
from agentgrpo.types import Status


@dataclass(frozen=True)
class Finding:
    """A fault that the records show."""

    weight: float
    """0 to 1: how likely it is what keeps the run from learning."""
    says: str
    """What was seen, with the number."""
    remedy: str
    """The setting or page that helps."""
    seen: Sequence[Seen] = ()
    """Rollouts to read; the first two are shown."""
    name: str = ""
    """Its key in CHECKS."""


Check = Callable[[History], Finding | None]
FEW = 8
"""Fewer rollouts than this say nothing."""


@dataclass(frozen=True)
class Share:
    """What part of some rollouts, or of some groups or pairs of them, is so."""

    of: Callable[[History], Sequence[Any]]
    which: Callable[[History, Any], Any]
    least: float
    """The share from which on it is a fault."""
    weight: tuple[float, float]
    """Of a share of 0 and of 1."""
    says: str
    remedy: str
    few: int = FEW

    def __call__(self, h: History) -> Finding | None:
        every = self.of(h)
        found = [item for item in every if self.which(h, item)]
        share = len(found) / max(1, len(every))
        if len(every) < self.few or share < self.least:
            return None
        low, high = self.weight
        # what does not keep the policy from solving is not the fault
        late = isinstance(every[0], Seen) and every[0].step >= h.late_from > 0
        weight = (low + (high - low) * share) * (h.unsolved if late else 1.0)
        seen = [item[0] if isinstance(item, list) else item for item in found]
        pair = found[0] if isinstance(found[0], list) else found[:1]
        one, other = seen[0].rollout, pair[-1].rollout.rewards
        kinds = Counter(kind for s in seen if "{kinds}" in self.says for kind in h.errors(s))
        says = self.says.format(
            share=share, said=f"{one.error or one.answer or '':.70}", want=seen[0].expected,
            part=max(one.rewards, key=lambda k: one.rewards[k] - other.get(k, 0), default="spans"),
            kinds="".join(f", {kind}: {n}" for kind, n in kinds.most_common(3)),
        )  # fmt: skip
        shown = pair if len(pair) > 1 else seen
        return Finding(weight, f"{says} ({len(found)} of {len(every)})", self.remedy, shown)


@dataclass(frozen=True)
class Twice:
    """What should come out alike, and did not."""

    items: Callable[[History], Iterable[tuple[Any, Any, Seen]]]
    """What came before, what came out, and whose it is."""
    weight: float
    says: str
    remedy: str

    def __call__(self, h: History) -> Finding | None:
        first: dict[Any, tuple[Any, Seen]] = {}
        pairs, differ = 0, []
        for before, out, seen in self.items(h):
            then = first.setdefault(before, (out, seen))
            pairs += then[1] is not seen
            if then[0] != out:
                differ.append((then[1], seen))
        if len(differ) < max(2, 0.02 * pairs):
            return None
        says = f"{self.says}: {len(differ)} of {pairs} times"
        return Finding(self.weight, says, self.remedy, differ[0])


def _same_actions(h: History) -> Iterable[tuple[Any, Any, Seen]]:
    for seen in [*h.train, *h.heldout]:
        before = str(seen.task).encode()
        for number, segment in enumerate(seen.rollout.segments):
            ids = segment.token_ids.tobytes()
            if number and not segment.sampled:
                yield hash(before), ids, seen
            before += b"|" + ids


def _ended(status: Status, says: str, remedy: str) -> Share:
    return Share(
        lambda h: h.late, lambda h, s: s.rollout.status is status, 0.35, (0.55, 0.9),
        f"{{share:.0%}} of the rollouts end where their {says} are used up", remedy,
    )  # fmt: skip


def _callers(h: History) -> Sequence[Seen]:
    """The last rollouts of an agent that has tools, of no dialogue and with little solved."""
    kind = h.config.get("agent.kind", "code")
    acts = kind in ("code", "repl", "tools", "inline", "tags") and h.unsolved > 0.7
    return h.late if acts and not any("said" in s.rollout.stats for s in h.late[:1]) else ()


def _agreeing(h: History) -> list[list[Seen]]:
    """Of groups that mostly give one answer, those that give it; of many tasks, some paid."""
    found = []
    for group in h.groups:
        said = Counter(s.rollout.answer for s in group if s.rollout.answer is not None)
        answer, count = said.most_common(1)[0] if said else ("", 0)
        if count >= max(3, 0.5 * len(group)):
            found.append([seen for seen in group if seen.rollout.answer == answer])
    refused = [ones for ones in found if not any(map(h.paid, ones))]
    few = len({ones[0].question for ones in refused}) < 3 or len(refused) > 0.8 * len(found)
    return [] if few else found


def _still(h: History) -> Finding | None:
    """By how much log-probabilities of held-out answers changed, beside the records' own noise."""
    if not any(seen.moves for seen in h.train) and not h.number("loss.beta", 0):
        return None  # no gradient: others say why
    steps = [seen.step for seen in h.heldout] or [0]
    then, now = (
        {s.task: s.rollout for s in h.heldout if s.step == n} for n in (steps[0], steps[-1])
    )
    changes: list[float] = []
    for task in then.keys() & now.keys() if steps[0] != steps[-1] else ():
        for a, b in zip(then[task].all_segments, now[task].all_segments, strict=False):
            length = min(len(a.token_ids), len(b.token_ids))
            apart = np.flatnonzero(a.token_ids[:length] != b.token_ids[:length])
            if a.logprobs is not None and b.logprobs is not None:
                end = int(apart[0]) + 1 if len(apart) else length
                changes += np.abs(a.logprobs[:end] - b.logprobs[:end]).tolist()
            if len(apart) or len(a.token_ids) != len(b.token_ids):
                break
    noise = mean(h.metric("learner/sampler_gap_mean"))
    if not h.steps or (mean(changes) > max(1e-4, 3 * noise) if changes else h.rate > 1e-8):
        return None
    says = (
        f"log-probabilities of held-out answers moved by {mean(changes):.1e} nats"
        if changes
        else ""
    )
    remedy = "learner.learning_rate (1e-6 suits all weights, 1e-4 some layers or LoRA), learner."
    remedy += "warmup_steps, learner.max_grad_norm"
    return Finding(0.95, f"{says}; the learning rate is {h.rate:.1e}", remedy, h.heldout)


def _worse(h: History) -> Finding | None:
    after = [seen for seen in h.late if seen.step > h.first[0].step]
    fell, errors = gain(map(h.paid, h.first), map(h.paid, after))
    paid, _ = gain((s.rollout.reward for s in h.first), (s.rollout.reward for s in after))
    lost = h.solved[0] - h.solved[-1] if h.solved else 0.0
    told = lost > max(0.15, 2 * h.tasks**-0.5) or (fell < -0.15 and errors < -3 and paid < 0)
    if not told and h.rate < 1e-2:
        return None
    base = mean(map(h.paid, h.first))
    says = f"solved went from {base:.2f} in the first step to {base + fell:.2f}, held-out "
    says += (
        f"{' to '.join(f'{x:.2f}' for x in h.solved[:: max(1, len(h.solved) - 1)])}; the learning "
    )
    says += f"rate is {h.rate:.1e}, about what each weight moves by in a step"
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
    more, errors = gain(*((s.rollout.reward for s in part) for part in (h.early, h.late)))
    solved, _ = gain(*(map(h.paid, part) for part in (h.early, h.late)))
    first, last = (h.solved[0], h.solved[-1]) if len(h.solved) > 1 else (1.0, 1.0)
    if more < 0.1 or errors < 3 or first > 0.9 or last > first - 0.1 * (solved > 0.05):
        return None
    says = f"the training reward rose by {more:.2f}, held-out solved {first:.2f} to {last:.2f}"
    best = sorted(h.late, key=lambda s: -s.rollout.reward)
    return Finding(0.7, says, "read what is paid most; docs/your-task.md, Look", best)


def _off_policy(h: History) -> Finding | None:
    clipped = sum(mean(h.metric(f"learner/clip_{side}_fraction")) for side in ("low", "high"))
    kl, gap = (mean(h.metric(f"learner/{name}_kl")) for name in ("approx", "mismatch"))
    if clipped < 0.2 and kl < 0.1 and gap < 0.02:
        return None
    says = (
        f"{clipped:.0%} of the tokens are clipped, KL {kl:.2g} in a step, {gap:.2g} to the sampler"
    )
    remedy = "loss.num_iterations, loss.num_mini_batches, learner.learning_rate; docs/losses.md"
    return Finding(0.9 if clipped > 0.3 or kl > 0.5 else 0.7, says, remedy, h.late)


def _repetition(seen: Seen) -> float:
    """The share of its trigrams that repeat an earlier one."""
    ids = [t for s in seen.rollout.all_segments if s.sampled for t in s.token_ids.tolist()]
    grams = [*zip(ids, ids[1:], ids[2:], strict=False)]
    return 1 - len({*grams}) / len(grams) if len(grams) > 16 else 0.0


def _forgets(h: History) -> Finding | None:
    """What went to an extreme while the reward did not rise."""
    _, errors = gain(*((s.rollout.reward for s in part) for part in (h.early, h.late)))
    nats = h.metric("learner/entropy_mean")
    third = max(1, len(nats) // 3)
    if errors > 2 or len(nats) < 2:
        return None
    first, last = mean(nats[:third]), mean(nats[-third:])
    calls, same = (
        (mean(map(of, h.early)), mean(map(of, h.late)))
        for of in (lambda s: s.rollout.num_calls, _repetition)
    )
    wide = last > max(1.0, 2.5 * first)
    narrow = last < min(0.05, 0.1 * first) and mean(map(h.paid, h.late)) < 0.6
    idle = calls[0] >= 0.5 and calls[1] < 0.4 * calls[0]
    if not (wide or narrow or idle or same[1] > max(0.5, same[0] + 0.15)):
        return None
    says = f"the reward did not rise; entropy {first:.2f} to {last:.2f} nats, calls {calls[0]:.1f} "
    says += f"to {calls[1]:.1f}, trigrams that repeat {same[0]:.0%} to {same[1]:.0%}"
    remedy = "loss.entropy_coef, loss.epsilon_high, learner.learning_rate, reward.tool_cost"
    weight = 0.88 if wide and h.number("loss.entropy_coef", 0) else 0.65
    return Finding(weight, says, remedy, h.late)


def _evidence(h: History) -> Finding | None:
    if len(h.solved) < 2:
        says = f"{len(h.steps)} steps and {len(h.evals)} evaluations: no change can be told yet"
        return Finding(0.1, says, "more steps; eval_every, reward.solved_at")
    if h.learns or (h.solved[0] >= 0.95 and h.tasks >= 16):
        return None
    says = f"held-out solved {h.solved[0]:.2f} to {h.solved[-1]:.2f} on {h.tasks} tasks in "
    says += f"{len(h.steps)} steps is within what chance makes of them"
    return Finding(0.1, says, "data.num_heldout, more steps, several seeds")


CHECKS: dict[str, Check] = {
    "machine or code fails": Share(
        lambda h: [*h.train, *h.heldout], lambda h, s: s.rollout.status is Status.INFRA_ERROR,
        0.05, (0.8, 1.0), "{share:.0%} of all rollouts were lost: {said}",
        "docs/troubleshooting.md, `rollouts lost`",
    ),
    "out of time": Share(
        lambda h: h.train, lambda h, s: s.rollout.status is Status.TIMED_OUT, 0.1, (0.6, 0.95),
        "{share:.0%} of the rollouts ran out of time, and count nowhere",
        "rollout.max_seconds; what they wait for: their `timings` in rollouts.jsonl",
    ),
    "does not move": _still,
    "reward not the same twice": Twice(
        lambda h: (
            ((s.task, s.after_prompt), round(s.rollout.reward, 6), s)
            for s in h.train if s.rollout.in_baseline and not h.number("reward.sigma_tool", 0)
            and not h.number("reward.sigma_length", 0)
        ),
        0.97, "a rollout got another reward than one with the same tokens",
        "the reward function: chance, time or state in it",
    ),
    "refuses what is right": Share(
        lambda h: [s for s in h.train if s.answers], lambda h, s: not h.paid(s), 0.2, (0.92, 0.97),
        "{share:.0%} of the answers that are just the expected one are not paid: {said!r}",
        "reward.kind, reward.strict; docs/agents.md, Rewards",
    ),
    "pays what is wrong": Share(
        lambda h: [s for s in h.train if s.answers is False], History.paid, 0.2, (0.9, 0.95),
        "{share:.0%} of the answers that are not the expected one are paid: {said!r} for {want!r}",
        "reward.kind: what it compares with spec['answer']; docs/agents.md, Rewards",
    ),
    "pays nothing": Share(
        lambda h: () if all(map(h.paid, h.train)) else h.train,
        lambda h, s: abs(s.rollout.reward - h.train[0].rollout.reward) < 1e-6, 1.0, (0.84, 0.84),
        "all rollouts got the same reward: there is nothing to learn",
        "reward.kind, docs/your-task.md; a part that pays a smaller step towards the goal",
    ),
    "moves too much": _worse,
    "sampled too hot": _hot,
    "environment not the same twice": Twice(
        _same_actions, 0.89, "the environment answered the same tokens with something else",
        "chance, time or state in the tool or environment",
    ),
    "one question, two answers": Twice(
        lambda h: ((s.question, s.expected, s) for s in h.train if s.expected is not None), 0.88,
        "a question was asked with another expected answer", "data.train: rows that contradict",
    ),
    "rollouts are alike": Share(
        lambda h: [g for g in h.groups if g[0].step <= h.early_until],
        lambda h, group: len({s.after_prompt for s in group}) <= max(1, len(group) // 4)
        and (h.number("rollout.temperature", 1) < 0.7 or not all(s.rollout.solved for s in group)),
        0.5, (0.6, 0.95), "in {share:.0%} of the first steps' groups the rollouts are the same",
        "rollout.temperature = 1.0; or harder tasks", 2,
    ),
    "pays something else": Share(
        lambda h: [
            [bad, good] for group in h.groups if h.judges
            for good in group if h.paid(good) for bad in group if not h.paid(bad)
        ],
        lambda h, pair: pair[0].rollout.reward >= pair[1].rollout.reward - 1e-9, 0.15, (0.86, 0.88),
        "in {share:.0%} of the pairs of one group what did not solve the task got as much as what "
        "did, by {part!r}", "the weight of that part: reward, reward.functions",
    ),
    "too easy": Share(
        lambda h: [g for g in h.groups if g[0].step <= h.early_until],
        lambda h, group: all(s.rollout.solved and not s.moves for s in group), 0.6, (0.5, 0.9),
        "{share:.0%} of the first steps' groups are solved by every rollout",
        "harder tasks (data), `agentgrpo curriculum`, rollout.refill_below", 4,
    ),
    "does not call": Share(
        _callers, lambda h, s: not s.rollout.num_calls, 0.9, (0.0, 0.88),
        "{share:.0%} of the last rollouts call nothing: is the policy shown its tools?",
        "read a prompt (`agentgrpo view`); agent.kind, agent.options.shots and system_prompt",
    ),
    "turns are cut": _ended(
        Status.TRUNCATED_LENGTH, "tokens",
        "rollout.max_turn_tokens, engine.max_model_len, or a prompt that asks for less",
    ),
    "out of turns": _ended(Status.TRUNCATED_TURNS, "turns", "rollout.max_turns"),
    "out of calls": _ended(Status.TRUNCATED_CALLS, "calls", "rollout.max_tool_calls"),
    "wrong form": Share(
        lambda h: h.late,
        lambda h, s: s.rollout.stats.get("malformed") or s.rollout.status is Status.MALFORMED,
        0.35, (0.5, 0.9), "{share:.0%} of the rollouts act in a form that is not understood",
        "a worked example (agent.options.shots), agent.options, `agentgrpo sft`",
    ),
    "no answer": Share(
        lambda h: h.late if any(s.expected is not None for s in h.train) else (),
        lambda h, s: s.rollout.status is Status.COMPLETED and s.rollout.answer is None,
        0.35, (0.55, 0.9), "{share:.0%} of the rollouts end without an answer in the asked form",
        "agent.options.answer_prefix, system_prompt, shots",
    ),
    "tool calls fail": Share(
        lambda h: [s for s in h.late if s.rollout.stats.get("tool_calls")],
        lambda h, s: 2 * s.rollout.stats["tool_errors"] >= s.rollout.stats["tool_calls"],
        0.4, (0.55, 0.9), "in {share:.0%} of the rollouts with tool calls these fail{kinds}",
        "what the tool answers; show one right call (agent.options.shots)",
    ),
    "refuses what is agreed on": Share(
        _agreeing, lambda h, ones: not any(map(h.paid, ones)), 0.25, (0.5, 0.95),
        "{share:.0%} of the groups that agree on an answer are refused it: {said!r} for {want!r}",
        "the expected answers of these tasks, or what the reward takes as equal",
    ),
    "exploits the reward": _exploits,
    "held-out tasks are trained on": Share(
        lambda h: h.heldout, lambda h, s: s.task in h.asked, 0.1, (0.68, 0.72),
        "{share:.0%} of the held-out tasks are trained on: what they show is memory",
        "data.heldout = split, or another file",
    ),
    "off-policy": _off_policy,
    "forgets": _forgets,
    "the same tasks again": Share(
        lambda h: h.groups, lambda h, group: h.asked[group[0].task] > 3, 0.75, (0.5, 0.6),
        "{share:.0%} of the groups are of a task that is played more than three times",
        "more tasks in data.train",
    ),
    "too hard": Share(
        lambda h: h.train if h.judges else (), lambda h, s: not h.paid(s), 0.99, (0.0, 0.6),
        "{share:.1%} of the rollouts do not solve their task",
        "easier tasks first, a worked example (agent.options.shots), a smaller step in the reward",
    ),
    "no signal": Share(
        lambda h: h.groups,
        lambda h, group: not (any(s.moves for s in group) or all(s.rollout.solved for s in group)),
        0.6, (0.45, 0.6), "in {share:.0%} of the groups all rewards are equal",
        "rollout.group_size, rollout.refill_below, tasks that are sometimes solved", 4,
    ),
    "too little evidence": _evidence,
}  # fmt: skip
"""What is looked for, by name."""

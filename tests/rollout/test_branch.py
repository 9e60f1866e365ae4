"""Branching: where, how often, how many, and what a branch has in common with what it left."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from agentgrpo.actions import InfrastructureError, Observation
from agentgrpo.agents.code import CodeAgent
from agentgrpo.config import BranchConfig, RolloutConfig
from agentgrpo.engine.requests import token_entropies
from agentgrpo.rollout.branch import (
    GroupPlan,
    aepo_initial,
    branch_probability,
    turn_entropy,
)
from agentgrpo.rollout.engine_protocol import SamplerStats
from agentgrpo.rollout.sampler import Sampler
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.types import Group, Rollout, Status
from tests.playing import CHAT, EOT, TOKENIZER, sampled, tasks
from tests.rollout.stubs import StubEngine, StubEnv, StubEpisode, Turn

AGENT = CodeAgent(system_prompt="S")
BUDGETS: tuple[dict[str, Any], ...] = ({}, {"budget": "aepo", "aepo_beta": 4.0})


def play(
    engine: StubEngine,
    env: StubEnv | None = None,
    *,
    num_tasks: int = 1,
    group_size: int = 8,
    branching: dict[str, Any],
    **config: Any,
) -> tuple[list[Group], SamplerStats]:
    config = {"group_size": group_size, "branching": BranchConfig(**branching), **config}
    config = {"max_turns": 4, **config}
    return sampled(engine, AGENT, env or StubEnv(), num_tasks, group_size, **config)


def conversation(calls: int, *, entropy: Sequence[float] = (0.0,), ends: bool = True) -> StubEngine:
    """Every rollout calls a tool `calls` times and answers; turn k has entropy[k] (last: rest)."""

    def policy(number: int, prompt: str) -> Turn:
        turn = prompt.count("<|im_start|>assistant") - 1
        text = f"<code>{number}</code>" if turn < calls else f"Answer: {number}{EOT}"
        return Turn(text, steps=1 + number % 3, entropy=entropy[min(turn, len(entropy) - 1)])

    return StubEngine(TOKENIZER, policy)


def random_engine(rng: random.Random, rare: str) -> StubEngine:
    """Calls, answers, and in 7 % of its turns something rare."""

    def policy(number: int, prompt: str) -> Turn:
        texts = ("<code>{}</code>", f"Answer: {{}}{EOT}", rare)
        (text,) = rng.choices(texts, (0.65, 0.28, 0.07))
        return Turn(text.format(number), steps=rng.randint(1, 4), entropy=rng.random() * 5)

    return StubEngine(TOKENIZER, policy, rng=rng)


ALWAYS = {"probability": 1.0, "entropy_weight": 0.0}


# --- the numbers


def test_S3_5_entropy_of_all_tokens_is_the_entropy() -> None:
    rng = np.random.default_rng(0)
    vocab, positions = 50, 7
    logits = rng.normal(size=(positions, vocab)) * 3
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    sampled = rng.integers(vocab, size=positions)
    picked = np.arange(positions), sampled
    found = token_entropies(
        np.column_stack([sampled, np.tile(np.arange(vocab), (positions, 1))]),
        np.column_stack([logp[picked], logp]),
    )
    np.testing.assert_allclose(found, -(np.exp(logp) * logp).sum(-1), rtol=1e-5)
    assert found.dtype == np.float32


def test_tokens_outside_the_top_count_as_one() -> None:
    logprobs = [math.log(p) for p in (0.1, 0.5, 0.2)]  # sampled token 9; 0.2 of mass unseen
    (found,) = token_entropies(np.array([[9, 1, 2]], np.int32), np.array([logprobs]))
    expected = -sum(p * math.log(p) for p in (0.1, 0.5, 0.2, 0.2))
    assert found == pytest.approx(expected, rel=1e-6)


def test_S3_5_a_turns_entropy_is_a_mean_of_its_first_tokens_whatever_its_length() -> None:
    config = BranchConfig(initial=1, entropy_tokens=3)
    short = np.array([1.0, 2.0, 3.0], np.float32)
    long = np.array([1.0, 2.0, 3.0] + [9.0] * 50, np.float32)
    assert turn_entropy(short, config, 100) == turn_entropy(long, config, 100)
    assert turn_entropy(short, config, 100) == pytest.approx(2 / math.log(100))
    assert turn_entropy(short[:0], config, 100) is None


@pytest.mark.parametrize(
    ("delta", "consecutive", "expected"),
    [
        (0.0, 0, 0.5),
        (1.0, 0, 0.7),
        (-1.0, 0, 0.3),
        (9.0, 0, 1.0),
        (-9.0, 0, 0.0),
        (1.0, 1, 0.35),
        (1.0, 2, 0.175),
    ],
)
def test_S3_8_the_probability_of_branching(delta: float, consecutive: int, expected: float) -> None:
    config = BranchConfig(initial=1, probability=0.5, entropy_weight=0.2, consecutive_penalty=0.5)
    assert branch_probability(delta, config, consecutive) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("root", "after", "beta", "expected"),
    [
        (0.5, 0.5, 1.0, 8),
        (0.9, 0.1, 1.0, 11),  # 16 * sigmoid(0.8) = 11.04
        (0.1, 0.9, 1.0, 5),  # 16 * sigmoid(-0.8) = 4.96
        (0.9, 0.1, 10.0, 16),
        (0.1, 0.9, 10.0, 0),
        (0.9, 0.1, 0.0, 8),
    ],
)
def test_S3_8_the_aepo_budget(root: float, after: float, beta: float, expected: int) -> None:
    assert aepo_initial(16, root, after, beta) == expected


# --- the plan


def test_places_are_shared_out_evenly_and_halved_at_a_branch() -> None:
    plan = GroupPlan(16, BranchConfig(initial=4))
    assert plan.begin() == [0, 1, 2, 3]
    assert [plan.may_branch(i) for i in range(4)] == [True] * 4
    assert plan.fork(0) == [4]  # three each: one is given away, one stays, one goes along
    assert (plan._shares[0], plan._shares[4]) == (1, 1)
    assert plan.fork(4) == [5]
    assert not plan.may_branch(4)
    assert not plan.may_branch(5)
    assert plan.fork(0) == [6]
    assert not plan.may_branch(0)
    assert [plan._shares[i] for i in (1, 2, 3)] == [3, 3, 3]


# --- the play


def checked(groups: list[Group], group_size: int) -> list[Rollout]:
    """Sizes, lineage and sharing are right; returns the rollouts."""
    for group in groups:
        assert len(group.rollouts) == group_size
        for rollout in group.rollouts:
            assert rollout.task is group.task
            own = sum(s.sampled for s in rollout.segments)
            assert len(rollout.turns) == rollout.stats["turns"] == own
            if rollout.parent is None:
                assert rollout.forked_at is None
                continue
            parent = group.rollouts[rollout.parent]
            shared = 0
            for mine, theirs in zip(rollout.segments, parent.segments, strict=False):
                if mine is not theirs:
                    break
                shared += len(mine.token_ids)
            assert shared == rollout.forked_at
            assert len(rollout.token_ids) > shared
        texts = [r.token_ids.tobytes() for r in group.rollouts]
        assert len(set(texts)) == len(texts), "two rollouts are the same"
    return [rollout for group in groups for rollout in group.rollouts]


def test_an_evaluation_does_not_branch() -> None:
    engine = conversation(1)
    config = RolloutConfig(branching=BranchConfig(initial=1, probability=1.0), max_turn_tokens=99)
    sampler = Sampler(cast(Any, engine), AGENT, StubEnv(), CHAT, config)
    groups, stats = sampler.play(tasks(1), 8, seed=0, temperature=0.0)
    assert len(groups[0].rollouts) == 8
    assert stats.branches == 0


def test_S3_6_a_branch_begins_right_behind_the_tools_answer() -> None:
    engine, env = conversation(1), StubEnv()
    groups, stats = play(engine, env, group_size=2, branching={**ALWAYS, "initial": 1})
    first, branch = checked(groups, 2)
    assert stats.branches == 1
    assert (branch.parent, branch.forked_at) == (
        0,
        sum(len(s.token_ids) for s in first.segments[:3]),
    )
    assert [s.sampled for s in branch.segments] == [False, True, False, True]
    assert all(a is b for a, b in zip(branch.segments[:3], first.segments[:3], strict=True))
    assert branch.segments[3] is not first.segments[3]
    # the same prompt, token for token: the engine's prefix cache serves it
    assert engine.requests[1].prompt.tolist() == engine.requests[2].prompt.tolist()
    assert engine.requests[1].options["seed"] != engine.requests[2].options["seed"]
    by = {"branched_by_snapshot": 0.0, "branched_by_replay": 1.0}
    assert branch.stats == first.stats | by
    assert branch.stats["tool_calls"] == 1
    # its world was brought to the same state by the same action
    assert env.executed == ["0", "0"]
    env.assert_all_closed_once()


@pytest.mark.parametrize(
    ("first", "later", "probability"),
    [(1.0, 1.0, 0.4), (0.0, math.log(len(TOKENIZER)), 0.7), (math.log(len(TOKENIZER)), 0.0, 0.1)],
)
def test_S3_4_branches_are_as_frequent_as_the_entropies_say(
    first: float, later: float, probability: float
) -> None:
    """With probability p + w * dH, p 0.4 and w 0.3: one chance in each of many groups."""
    engine = conversation(1, entropy=(first, later))
    count = 400
    groups, stats = play(
        engine,
        num_tasks=count,
        group_size=2,
        branching={"initial": 1, "probability": 0.4, "entropy_weight": 0.3},
    )
    checked(groups, 2)
    sigma = math.sqrt(count * probability * (1 - probability))
    assert abs(stats.branches - count * probability) < 3 * sigma


def test_S3_5_the_base_entropy_is_each_rollouts_own_and_forgotten_after_the_call() -> None:
    """Played twice with other first turns: a base kept from the first call would branch."""
    high = math.log(len(TOKENIZER))
    config = {"initial": 1, "probability": 0.0, "entropy_weight": 1.0}
    _, rising = play(conversation(1, entropy=(0.0, high)), group_size=2, branching=config)
    _, flat = play(conversation(1, entropy=(high, high)), group_size=2, branching=config)
    assert (rising.branches, flat.branches) == (1, 0)


@pytest.mark.parametrize("unsure", [0, 1, 2, 3])
def test_the_base_entropy_is_no_other_rollouts_of_the_call(unsure: int) -> None:
    """Four begin, of two tasks, one of them sure in its first turn; all are unsure after a tool."""
    high = math.log(len(TOKENIZER))

    def policy(number: int, prompt: str) -> Turn:
        if prompt.count("<|im_start|>assistant") == 1 and number < 4:
            return Turn(f"<code>{number}</code>", entropy=0.0 if number == unsure else high)
        return Turn(f"Answer: {number}{EOT}", entropy=high)

    groups, stats = play(
        StubEngine(TOKENIZER, policy), num_tasks=2, group_size=4, deterministic=True,
        branching={"initial": 2, "probability": 0.0, "entropy_weight": 1.0},
    )  # fmt: skip
    parents = [[r.parent for r in group.rollouts if r.parent is not None] for group in groups]
    task, member = divmod(unsure, 2)
    assert parents[task] == [member]
    assert parents[1 - task] == []
    assert stats.branches == 1


@pytest.mark.parametrize(("beam_size", "at_first"), [(2, 1), (3, 2), (4, 3), (9, 3)])
def test_a_beams_width_is_how_many_go_on_from_one_point(beam_size: int, at_first: int) -> None:
    """While the group has places: three of its four are left when the first tool has answered."""
    engine = conversation(1)
    groups, stats = play(
        engine, group_size=4, branching={**ALWAYS, "initial": 1, "beam_size": beam_size}
    )
    rollouts = checked(groups, 4)
    behind_tool = sum(len(s.token_ids) for s in rollouts[0].segments[:3])
    first = [r for r in rollouts if (r.parent, r.forked_at) == (0, behind_tool)]
    assert len(first) == at_first
    assert stats.branches == 3 if at_first == 3 else stats.branches >= at_first
    assert len({tuple(r.segments[-1].token_ids) for r in rollouts}) == 4, "each has its own seed"


@pytest.mark.parametrize("seed", range(15))
def test_S3_4_random_plays_have_exactly_their_size_and_true_lineage(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(2, 9)

    engine, env = random_engine(rng, "<code>{}" + EOT), StubEnv()
    groups, stats = play(
        engine,
        env,
        num_tasks=3,
        group_size=size,
        max_live=rng.randint(1, 40),
        branching={
            "initial": rng.randint(1, size - 1),
            "entropy_weight": rng.random() * 2,
            **rng.choice(BUDGETS),
            "consecutive_penalty": rng.choice([0.0, 0.5]),
            "beam_size": rng.randint(2, 4),
        },
        deterministic=rng.random() < 0.5,
    )
    rollouts = checked(groups, size)
    assert stats.branches == sum(r.parent is not None for r in rollouts)
    assert stats.engine_steps == engine.steps
    unique = {id(s): len(s.token_ids) for r in rollouts for s in r.segments if s.sampled}
    assert stats.total_sampled_tokens == sum(unique.values()), "a shared token was sampled once"
    for rollout in rollouts:
        sampled = [s for s in rollout.segments if s.sampled]
        assert rollout.stats["turns"] == len(sampled) <= 4
    env.assert_all_closed_once()


def test_a_repeated_play_branches_where_it_did() -> None:
    def lineage() -> list[tuple[int | None, int | None]]:
        engine = conversation(3, entropy=(1.0, 2.0, 0.5))
        groups, _ = play(
            engine, num_tasks=4, branching={"initial": 3, "probability": 0.3}, deterministic=True
        )
        return [(r.parent, r.forked_at) for r in checked(groups, 8)]

    first = lineage()
    assert 3 < sum(parent is not None for parent, _ in first) < 20
    assert lineage() == first


class Forgetful(StubEnv):
    """A world that is no function of its actions: every call is answered otherwise."""

    answered = 0

    def observe(self) -> Observation:
        self.answered += 1
        return Observation(f"answer {self.answered}")


def test_diverged_branch_is_restarted_from_the_prompt() -> None:
    env = Forgetful()
    env.answer = lambda code: env.observe()
    groups, stats = play(conversation(1), env, group_size=4, branching={**ALWAYS, "initial": 2})
    assert all(r.parent is None for r in checked(groups, 4))
    assert (stats.branches, stats.diverged_forks) == (2, 2)
    assert all(r.status is Status.COMPLETED for r in groups[0].rollouts)
    env.assert_all_closed_once()


@pytest.mark.parametrize("max_live", [1, 256])
def test_branches_of_a_retried_rollout_lose_their_parent(max_live: int) -> None:
    """Rollout 0 calls, is told, branches, and then its machine breaks; a branch may yet wait."""
    turns = ["<code>0</code>", "<code>broken machine</code>"]
    engine = StubEngine(TOKENIZER, lambda n, _: Turn(turns[n] if n < 2 else f"Answer: {n}{EOT}"))
    env = StubEnv()
    groups, stats = play(
        engine, env, group_size=2, branching={**ALWAYS, "initial": 1}, max_retries=1,
        max_live=max_live,
    )  # fmt: skip
    again, branch = groups[0].rollouts
    assert (stats.branches, stats.retries) == (1, 1)
    assert len(again.segments) == 2
    assert len(branch.segments) == 4
    assert (branch.parent, branch.forked_at) == (None, None)
    env.assert_all_closed_once()


def test_aepo_decides_after_the_first_tool_result() -> None:
    high = math.log(len(TOKENIZER))
    config = {**ALWAYS, "initial": 1, "budget": "aepo", "aepo_beta": 2.0}
    # 8 * sigmoid(2 * (1 - 0)) = 7.05: the policy is unsure at once, so 7 begin alone and 1 branches
    groups, _ = play(conversation(1, entropy=(high, 0.0)), branching=config)
    assert sum(r.parent is None for r in checked(groups, 8)) == 7
    # 8 * sigmoid(-2) = 0.95: it is unsure after tools; one began and seven branch
    groups, _ = play(conversation(7, entropy=(0.0, high)), branching=config, max_turns=9)
    assert sum(r.parent is None for r in checked(groups, 8)) == 1


def test_turn_after_a_malformed_action_is_not_after_a_tool() -> None:
    """Call, malformed turn, answer: only the turn right behind the tool's answer may branch."""

    def policy(number: int, prompt: str) -> Turn:
        said = prompt.count("<|im_start|>assistant") - 1
        return Turn(
            [f"<code>{number}</code>", f"<code>{number}{EOT}", f"Answer: {number}{EOT}"][said]
        )

    groups, stats = play(
        StubEngine(TOKENIZER, policy), group_size=4, branching={**ALWAYS, "initial": 1}
    )
    first = checked(groups, 4)[0]
    behind_tool = sum(len(s.token_ids) for s in first.segments[:3])
    assert {r.forked_at for r in groups[0].rollouts} == {None, behind_tool}
    assert stats.branches == 2


def test_a_row_of_branchings_ends_where_one_is_left_out() -> None:
    """With a penalty of 1 every second chance is taken."""
    groups, _ = play(
        conversation(3), branching={**ALWAYS, "initial": 1, "consecutive_penalty": 1.0}
    )
    rollouts = checked(groups, 8)
    ends = np.cumsum([len(s.token_ids) for s in rollouts[0].segments]).tolist()
    behind_tools = [ends[2], ends[4], ends[6]]
    taken = [any(r.parent == 0 and r.forked_at == at for r in rollouts) for at in behind_tools]
    assert taken == [True, False, True]
    branched_again = [r for r in rollouts if r.parent]
    assert branched_again
    for rollout in branched_again:  # a branch goes on with the row that led to it
        assert rollout.parent is not None
        assert rollout.forked_at != rollouts[rollout.parent].forked_at


def test_a_branch_spends_its_own_calls() -> None:
    groups, stats = play(
        conversation(2), group_size=4, branching={**ALWAYS, "initial": 1}, max_tool_calls=2
    )
    assert stats.branches == 3
    assert [r.stats["tool_calls"] for r in checked(groups, 4)] == [2.0] * 4
    assert [r.stats["refused_calls"] for r in groups[0].rollouts] == [0.0] * 4


def test_a_branch_keeps_the_base_of_the_rollout_that_it_left() -> None:
    """Sure at first, unsure after every answer: the branch too is measured against the first."""
    engine = conversation(2, entropy=(0.0, math.log(len(TOKENIZER))))
    config = {"initial": 1, "probability": 0.0, "entropy_weight": 1.0}
    groups, stats = play(engine, group_size=4, branching=config)
    assert stats.branches == 3
    assert 1 in {r.parent for r in checked(groups, 4)}


def test_a_branch_has_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("agentgrpo.rollout.limits.time.monotonic", lambda: now)

    def on_call(code: str) -> None:
        nonlocal now
        now += 2.5

    env = StubEnv(on_call=on_call)
    groups, stats = play(
        conversation(1), env, group_size=2, branching={**ALWAYS, "initial": 1}, max_seconds=3.0
    )
    assert stats.branches == 1
    assert [r.status for r in checked(groups, 2)] == [Status.COMPLETED] * 2


def test_branch_has_its_own_rewards() -> None:
    env = StubEnv(answer=lambda code: Observation("ok", rewards={"step": 1.0}))
    groups, stats = play(conversation(2), env, group_size=2, branching={**ALWAYS, "initial": 1})
    assert stats.branches == 1
    for rollout in checked(groups, 2):
        turns = [(s.start, s.end) for s in rollout.span_rewards]
        ends = np.cumsum([len(s.token_ids) for s in rollout.segments]).tolist()
        assert turns == [(ends[0], ends[1]), (ends[2], ends[3])], "one per call, on its turn"


# --- copies of episodes


@dataclass(eq=False)
class Copy:
    """A copy of a CopiedEpisode; closed once, when nobody plays its group any more."""

    env: CopyingEnv
    state: list[str]
    closed: int = 0

    def close(self) -> None:
        own = [e for e in self.env.episodes if getattr(e, "begun_with", None) is self]
        assert all(episode.closed for episode in own), "closed while an episode uses it"
        self.closed += 1


class CopiedEpisode(StubEpisode):
    """Its state is what it executed. Its environment decides what becomes of copies."""

    env: CopyingEnv
    begun_with: Copy | None = None

    def __init__(self, env: CopyingEnv) -> None:
        super().__init__(env)
        self.state: list[str] = []

    def step(self, action: Any) -> Observation:
        self.state.append(action.code)
        return super().step(action)

    def snapshot(self) -> Copy | None:
        assert not self.closed
        kind = self.env.next_kind()
        if kind == "broken":
            raise InfrastructureError("no room for a copy")
        if kind == "none":
            return None
        self.env.copies.append(Copy(self.env, list(self.state)))
        return self.env.copies[-1]

    def resume(self, copy: Copy) -> bool:
        assert not copy.closed
        assert not self.state
        if self.env.next_kind("resume") == "inexact":
            return False
        self.state, self.begun_with = list(copy.state), copy
        return True


class AsyncCopiedEpisode(CopiedEpisode):
    async def step(self, action: Any) -> Observation:  # type: ignore[override]
        return super().step(action)

    async def snapshot(self) -> Copy | None:  # type: ignore[override]
        return super().snapshot()

    async def resume(self, copy: Copy) -> bool:  # type: ignore[override]
        return super().resume(copy)


class CopyingEnv(StubEnv):
    def __init__(
        self, kinds: Sequence[str] = ("copy",), episode: type[CopiedEpisode] = CopiedEpisode,
        seed: int = 0, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(**settings)
        self.kinds, self.episode, self.rng = kinds, episode, random.Random(seed)
        self.copies: list[Copy] = []

    def reset(self, task: Any) -> StubEpisode:
        self.episodes.append(self.episode(self))
        return self.episodes[-1]

    def next_kind(self, method: str = "snapshot") -> str:
        fitting = [k for k in self.kinds if (k == "inexact") == (method == "resume")]
        return self.rng.choice(fitting or ["copy"])

    def assert_nothing_is_left(self) -> None:
        self.assert_all_closed_once()
        assert [copy.closed for copy in self.copies] == [1] * len(self.copies)


@pytest.mark.parametrize("episode", [CopiedEpisode, AsyncCopiedEpisode])
@pytest.mark.parametrize(
    ("kind", "executed", "by"),
    [
        ("copy", ["0"], "snapshot"),
        ("none", ["0", "0"], "replay"),
        ("inexact", ["0", "0"], "replay"),
    ],
)
def test_a_branch_resumes_from_a_copy_or_repeats_the_actions(
    kind: str, executed: list[str], by: str, episode: type[CopiedEpisode]
) -> None:
    env = CopyingEnv([kind], episode)
    groups, stats = play(conversation(1), env, group_size=2, branching={**ALWAYS, "initial": 1})
    _, branch = checked(groups, 2)
    assert (stats.branches, stats.diverged_forks) == (1, 0)
    assert env.executed == executed
    assert [e.state for e in env.episodes if isinstance(e, CopiedEpisode)] == [["0"], ["0"]]
    ways = {way: branch.stats[f"branched_by_{way}"] for way in ("snapshot", "replay")}
    assert ways == {"snapshot": float(by == "snapshot"), "replay": float(by == "replay")}
    env.assert_nothing_is_left()


def test_a_copy_is_made_before_the_parents_next_step() -> None:
    env = CopyingEnv()
    groups, stats = play(conversation(3), env, group_size=6, branching={**ALWAYS, "initial": 1})
    rollouts = checked(groups, 6)
    assert stats.branches == 5
    for episode, rollout in zip(env.episodes, rollouts, strict=True):
        assert isinstance(episode, CopiedEpisode)
        assert len(episode.state) == 3, rollout
    assert len(env.executed) < 3 * 6, "what was copied was not executed again"
    env.assert_nothing_is_left()


def test_failed_copy_breaks_only_the_parent() -> None:
    env = CopyingEnv(["broken"])
    groups, stats = play(
        conversation(1), env, group_size=2, branching={**ALWAYS, "initial": 1}, max_retries=0
    )
    first, branch = groups[0].rollouts
    assert (first.status, branch.status) == (Status.INFRA_ERROR, Status.COMPLETED)
    assert branch.stats["branched_by_replay"] == 1.0
    assert stats.infra_failures == 1
    env.assert_nothing_is_left()


@pytest.mark.parametrize("seed", range(15))
def test_random_plays_leave_no_copy(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(2, 9)

    kinds = [k for k in ("copy", "none", "broken", "inexact") if k == "copy" or rng.random() < 0.5]
    env = CopyingEnv(kinds, rng.choice([CopiedEpisode, AsyncCopiedEpisode]), seed)
    groups, stats = play(
        random_engine(rng, "<code>broken machine</code>"), env, num_tasks=3, group_size=size,
        max_live=rng.randint(1, 40), max_retries=2, deterministic=rng.random() < 0.5,
        branching={**ALWAYS, "initial": rng.randint(1, size - 1), "beam_size": rng.randint(2, 4)},
    )  # fmt: skip
    assert [len(group.rollouts) for group in groups] == [size] * 3
    if kinds == ["copy"] and stats.branches:
        assert env.copies
    env.assert_nothing_is_left()


def test_an_error_that_ends_the_play_leaves_no_copy() -> None:
    def fail(code: str) -> None:
        if len(env.executed) > 3:
            raise RuntimeError("a bug")

    env = CopyingEnv(on_call=fail)
    with pytest.raises(UserCodeError, match="a bug"):
        play(conversation(3), env, group_size=6, branching={**ALWAYS, "initial": 1})
    assert env.copies
    env.assert_nothing_is_left()


def test_copies_of_a_group_are_closed_before_the_next_group_ends() -> None:
    """With one place, groups are played one after another."""
    env = CopyingEnv()
    open_copies: list[int] = []
    env.on_finish = lambda: open_copies.append(sum(not copy.closed for copy in env.copies))
    play(
        conversation(1), env, num_tasks=6, group_size=2, max_live=1, deterministic=True,
        branching={**ALWAYS, "initial": 1},
    )  # fmt: skip
    assert len(env.copies) == 6
    assert max(open_copies) <= 2
    env.assert_nothing_is_left()

"""A world that has the engine speak in a second role before it answers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentgrpo.actions import (
    Action,
    InfrastructureError,
    ModelReply,
    ModelRequest,
    Observation,
    Reading,
    Say,
)
from agentgrpo.agents.tools import ToolAgent
from agentgrpo.config import BranchConfig
from agentgrpo.envs.customers import ModelUser, UserDialogue
from agentgrpo.rollout.limits import TREATMENTS
from agentgrpo.types import Status, Task, Treatment
from tests.playing import EOT, given_and_sampled, play, play_all, scripted, task
from tests.rollout.stubs import Turn


class Shop:
    """Whatever is said is put to a customer whom the engine plays; rewards and counts follow it."""

    judges = has_user = True

    def __init__(
        self, *, temperature: float = 1.0, max_tokens: int = 40, model: Any = "policy"
    ) -> None:
        self.words = {"temperature": temperature, "max_tokens": max_tokens, "model": model}
        self.steps: list[Action] = []

    def tools(self, task: Task) -> tuple[Any, ...]:
        return ()

    def reset(self, task: Task) -> ShopEpisode:
        return ShopEpisode(self)


class ShopEpisode:
    def __init__(self, shop: Shop) -> None:
        words: Any = shop.words
        self.shop, self.talk = shop, UserDialogue(ModelUser("CUSTOMER", "Hello.", **words))

    def step(self, action: Action) -> Observation:
        self.shop.steps.append(action)
        if isinstance(action, Say):
            return self.talk.say(action.text, satisfied=False)
        assert isinstance(action, ModelReply)
        told = self.talk.on_reply(action.text)
        return Observation(
            told.text, done=told.done, rewards={"polite": 0.5}, counts={"heard": 1.0}
        )

    def finish(self, answer: str | None) -> Mapping[str, float]:
        return {"solved": float(self.talk.over)}

    def close(self) -> None: ...


AGENT = ToolAgent(
    env=SimpleNamespace(tools=lambda task: (), has_user=True),
    call_reader=lambda parser: lambda text, tools: Reading(text, (), attempted=False),
)


def speak(number: int, prompt: str) -> Turn:
    """Both roles: a customer who hangs up at the third word, an agent who counts."""
    turns = prompt.count("<|im_start|>assistant") - 1
    if "CUSTOMER" not in prompt:
        return Turn(f"agent {turns}{EOT}")
    return Turn(f"###STOP###{EOT}" if turns > 2 else f"customer {turns}{EOT}", steps=3)


@pytest.mark.parametrize("deterministic", [False, True])
def test_second_roles_text_is_not_trained_on(deterministic: bool) -> None:
    engine, shop = scripted(speak), Shop()
    (rollouts,) = play_all(AGENT, shop, engine, [task("Hello.")], 3, deterministic=deterministic)
    for rollout in rollouts:
        assert [text for mine, text in given_and_sampled(rollout) if mine] == [
            f"agent {n}{EOT}" for n in (0, 1, 2)
        ]
        given = [text for mine, text in given_and_sampled(rollout)[1:] if not mine]
        assert [f"customer {n}" in text for n, text in zip((1, 2), given, strict=True)] == [
            True
        ] * 2
        assert rollout.status is Status.COMPLETED
        assert rollout.rewards == {"solved": 1.0}
        assert len(rollout.turns) == 3, "turns are the policy's alone"
        counts = {"turns": 3.0, "asked": 3.0, "heard": 3.0, "tool_calls": 0.0}
        assert counts.items() <= rollout.stats.items()


def test_a_steps_reward_is_credited_to_the_policys_turn() -> None:
    rollout = play(AGENT, Shop(), engine=scripted(speak))
    sampled = [s.token_ids for s in rollout.segments if s.sampled]
    ids = np.concatenate([s.token_ids for s in rollout.segments])
    assert [ids[s.start : s.end].tolist() for s in rollout.span_rewards] == [
        turn.tolist() for turn in sampled
    ]
    assert [s.value for s in rollout.span_rewards] == [0.5] * 3


@pytest.mark.parametrize(("temperature", "seeded"), [(0.0, False), (0.7, True)])
def test_second_role_request_uses_the_episodes_settings(temperature: float, seeded: bool) -> None:
    engine = scripted(speak)
    play(AGENT, Shop(temperature=temperature, max_tokens=11), engine=engine, temperature=0.9)
    mine, theirs = engine.requests[0::2], engine.requests[1::2]
    assert {r.options["temperature"] for r in mine} == {0.9}
    assert {r.options["temperature"] for r in theirs} == {temperature}
    assert [r.options["seed"] is not None for r in theirs] == [seeded] * 3
    assert {r.max_tokens for r in theirs} == {11}
    assert all(r.options["stop"] == () for r in theirs)
    seeds = [r.options["seed"] for r in engine.requests if r.options["seed"] is not None]
    assert len(set(seeds)) == len(seeds)


def test_without_room_for_the_second_role_the_rollout_is_cut() -> None:
    def long_winded(number: int, prompt: str) -> Turn:
        return Turn("x" * 30 + EOT)

    shop = Shop()
    shop.words["max_tokens"] = 1000
    engine = scripted(long_winded, max_model_len=170)
    rollout = play(AGENT, shop, engine=engine, max_turn_tokens=40)
    assert rollout.status is Status.TRUNCATED_LENGTH
    assert TREATMENTS[rollout.status] is Treatment.TRAIN
    assert rollout.rewards == {"solved": 0.0}


def test_an_engine_that_gives_the_second_role_up_breaks_the_rollout() -> None:
    def failing(number: int, prompt: str) -> Turn:
        said = speak(number, prompt)
        return Turn(said.text, finish_reason="error" if "CUSTOMER" in prompt else None)

    rollout = play(AGENT, Shop(), engine=scripted(failing), max_retries=0)
    assert rollout.status is Status.INFRA_ERROR
    assert rollout.rewards == {}


def test_branches_replay_replies_of_the_second_role() -> None:
    """Whatever the second role would say now: a branch goes on from what it did say."""

    def policy(number: int, prompt: str) -> Turn:
        said = speak(number, prompt)
        unsure = "CUSTOMER" not in prompt and "customer" in prompt
        return Turn(said.text, steps=said.steps, entropy=3.0 if unsure else 0.0)

    shop, engine = Shop(), scripted(policy)
    branching = BranchConfig(initial=1, probability=1.0)
    (rollouts,) = play_all(
        AGENT, shop, engine, [task("Hello.")], 2, branching=branching, temperature=1.0
    )
    parent, child = rollouts
    assert child.parent == 0
    at = child.forked_at or 0
    assert parent.token_ids[:at].tolist() == child.token_ids[:at].tolist() != []
    asked = sum("CUSTOMER" in str(engine.tokenizer.decode(r.prompt)) for r in engine.requests)
    heard = [action for action in shop.steps if isinstance(action, ModelReply)]
    assert len(heard) == asked + sum(h.text == "customer 1" for h in heard) - 1
    assert child.status is Status.COMPLETED


class Spoken:
    """A model besides the engine's."""

    def __init__(self, replies: Any) -> None:
        self.replies, self.asked = iter(replies), []  # type: ignore[var-annotated]

    def __call__(self, ask: ModelRequest) -> str:
        said = next(self.replies)
        if isinstance(said, Exception):
            raise said
        self.asked.append((len(ask.messages), ask.temperature, ask.max_tokens))
        return str(said)


@pytest.mark.parametrize("deterministic", [False, True])
def test_another_model_speaks_in_the_second_role(deterministic: bool) -> None:
    """What it says is shown as the engine's is; the engine plays the policy alone."""
    model, engine = Spoken(["customer 1", "###STOP###"]), scripted(speak)
    shop = Shop(model=model, temperature=0.25, max_tokens=11)
    rollout = play(AGENT, shop, engine=engine, deterministic=deterministic)
    assert [text for mine, text in given_and_sampled(rollout) if mine] == [
        f"agent {n}{EOT}" for n in (0, 1)
    ]
    assert "customer 1" in given_and_sampled(rollout)[2][1]
    assert model.asked == [(4, 0.25, 11), (6, 0.25, 11)]
    assert (rollout.status, rollout.rewards) == (Status.COMPLETED, {"solved": 1.0})
    assert (rollout.stats["asked"], len(engine.requests)) == (2.0, 2)


@pytest.mark.parametrize(("retries", "status"), [(1, Status.COMPLETED), (0, Status.INFRA_ERROR)])
def test_a_model_that_does_not_answer_breaks_the_rollout(retries: int, status: Status) -> None:
    model = Spoken([InfrastructureError("HTTP 500"), "###STOP###"])
    rollout = play(AGENT, Shop(model=model), engine=scripted(speak), max_retries=retries)
    assert rollout.status is status


@pytest.mark.parametrize("model", ["policy", "reference"])
def test_the_engine_is_asked_for_the_weights_that_are_meant(model: Any) -> None:
    engine = scripted(speak)
    play(AGENT, Shop(model=model), engine=engine)
    assert [r.options.get("reference", False) for r in engine.requests] == [
        False, model == "reference",
    ] * 3  # fmt: skip


def test_thoughts_of_the_user_are_removed() -> None:
    user = ModelUser("S", "Hi.", max_tokens=5)
    asked = user.reply("Your name?", satisfied=False)
    assert isinstance(asked, ModelRequest)
    assert user.on_reply("<think>\nshould I?\n</think>\n\nAl.") == "Al."
    assert user.on_reply("Bye ###TRANSFER###") is None

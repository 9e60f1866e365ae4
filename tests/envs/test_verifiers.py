"""verifiers' environments against the real package: their own loops, tools and rubrics."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentgrpo.actions import CallTools, Finish, InfrastructureError, Reading, Say, ToolCall
from agentgrpo.agents.tools import ToolAgent
from agentgrpo.config import RewardConfig, TrainConfig
from agentgrpo.data.sources import heldout_tasks, training_tasks
from agentgrpo.envs.runner import EpisodeRunner
from agentgrpo.envs.verifiers import VerifiersEnv
from agentgrpo.registry import make_env, make_reward
from agentgrpo.rewards.rewards import score
from agentgrpo.types import Group
from tests.playing import EOT, play, shown

vf = pytest.importorskip("verifiers", reason="verifiers is in requirements-dev.txt")

ROWS = [{"question": f"Add {i} and 4", "answer": str(i + 4)} for i in range(6)]


def dataset(rows: Any = ROWS) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def exact(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].strip() == answer)


def asked_for(completion: Any) -> float:
    """A second reward, so that weights are seen to count."""
    return float(any("tool_calls" in m for m in completion))


def single(**options: Any) -> Any:
    """A question, an answer, a rubric."""
    return vf.SingleTurnEnv(
        dataset=dataset(), eval_dataset=dataset(ROWS[:2]), system_prompt="Only the number.",
        rubric=vf.Rubric(funcs=[exact]), **options,
    )  # fmt: skip


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def tools() -> Any:
    rubric = vf.Rubric(funcs=[exact, asked_for], weights=[1.0, 0.25])
    return vf.ToolEnv(dataset=dataset(), tools=[add], rubric=rubric, max_turns=4)


class Guessing(vf.MultiTurnEnv):  # type: ignore[misc,name-defined]
    """Says higher or lower; ends itself when the number is found; keeps its state per rollout."""

    async def setup_state(self, state: Any) -> Any:
        state["tries"] = 0
        return state

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        state["tries"] += 1
        said, secret = int(messages[-1]["content"]), int(state["answer"])
        if said == secret:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "higher" if said < secret else "lower"}]


def few_tries(state: Any) -> float:
    return 1.0 / state["tries"] if state["final_env_response"] else 0.0


def guessing() -> Any:
    rows = [{"question": "Guess.", "answer": "7"}]
    return Guessing(dataset=dataset(rows), rubric=vf.Rubric(funcs=[few_tries]), max_turns=5)


def together() -> Any:
    def best(states: Any) -> list[float]:
        return [1.0 for _ in states]

    return vf.SingleTurnEnv(dataset=dataset(), rubric=vf.Rubric(funcs=[best]))


class Broken(Guessing):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        raise vf.InfraError("no machine")


def broken() -> Any:
    return Broken(dataset=dataset(), rubric=vf.Rubric(funcs=[few_tries]))


class Forgetful(Guessing):
    async def get_prompt_messages(self, state: Any) -> Any:
        return state["prompt"][: 1 if state["trajectory"] else None]


def forgetful() -> Any:
    rows = [{"prompt": [{"role": "user", "content": c} for c in "ab"], "answer": "7"}]
    return Forgetful(dataset=dataset(rows), rubric=vf.Rubric(funcs=[few_tries]))


class Changing(Guessing):
    async def setup_state(self, state: Any) -> Any:
        state["prompt"] = [{"role": "user", "content": "Something else."}]
        return await super().setup_state(state)


def changing() -> Any:
    rows = [{"question": "Guess.", "answer": "7"}]
    return Changing(dataset=dataset(rows), rubric=vf.Rubric(funcs=[few_tries]))


def env(name: str, **options: Any) -> VerifiersEnv:
    return VerifiersEnv(f"{__name__}:{name}", **options)


def call(**arguments: int) -> CallTools:
    return CallTools((ToolCall("add", arguments, id="call_0"),))


def run(env: VerifiersEnv, *actions: Any, answer: str | None = None) -> tuple[list[Any], Any]:
    """What each action got, and the rewards."""
    with EpisodeRunner(1) as runner:
        episode = env.reset(env.tasks("train")[0])
        try:
            told = [runner.step(episode, action).result(20) for action in actions]
        except BaseException:
            runner.close(episode).result(20)
            raise
        last = told[-1].answer if told and told[-1].done else answer
        return told, runner.finish(episode, last).result(20)


def test_a_question_with_a_rubric() -> None:
    world = env("single")
    task, *_ = world.tasks("train")
    assert [dict(m) for m in task.messages] == [
        {"role": "system", "content": "Only the number."},
        {"role": "user", "content": "Add 0 and 4"},
    ]
    told, reward = run(world, Say("4"))
    assert (told[0].done, told[0].answer, reward) == (True, "4", {"environment": 1.0})
    assert run(world, Say("5"))[1] == {"environment": 0.0}
    assert run(world)[1] == {"environment": 0.0}, "a rollout that was cut before it said anything"
    assert run(world, answer="4")[1] == {"environment": 1.0}, "an agent that finishes by itself"


def test_tools_are_called_by_the_environment_and_its_weights_count() -> None:
    world = env("tools")
    (schema,) = world.tools(world.tasks("train")[0])
    assert schema["function"]["name"] == "add"
    assert set(schema["function"]["parameters"]["properties"]) == {"a", "b"}
    told, reward = run(world, call(a=0, b=4), Say("4"))
    assert told[0].outputs == ("4",)
    assert told[1].done
    assert reward == {"environment": 1.25}
    two = CallTools((ToolCall("add", {"a": 1, "b": 1}), ToolCall("nowhere", {})))
    told, reward = run(world, two, Say("no"))
    assert told[0].outputs[0] == "2"
    assert "nowhere" in told[0].outputs[1]
    assert reward == {"environment": 0.25}


def test_its_own_limit_of_turns_ends_the_episode() -> None:
    told, reward = run(env("tools"), *[call(a=1, b=1)] * 4)
    assert [t.done for t in told] == [False, False, False, True]
    assert reward == {"environment": 0.25}


def test_turns_with_a_state_per_rollout() -> None:
    world = env("guessing")
    told, reward = run(world, Say("3"), Say("9"), Say("7"))
    assert [t.text for t in told[:2]] == ["higher", "lower"]
    assert told[2].done
    assert reward == {"environment": pytest.approx(1 / 3)}
    assert run(world, Say("7"))[1] == {"environment": 1.0}
    assert run(world, Say("3"))[1] == {"environment": 0.0}, "cut in the middle"


def test_rollouts_run_at_the_same_time_and_share_nothing() -> None:
    world = env("guessing")
    task, *_ = world.tasks("train")
    with EpisodeRunner(1) as runner:
        one, two = world.reset(task), world.reset(task)
        assert runner.step(one, Say("3")).result(20).text == "higher"
        assert runner.step(two, Say("8")).result(20).text == "lower"
        assert runner.step(one, Say("7")).result(20).done
        assert runner.finish(one, None).result(20) == {"environment": 0.5}
        runner.close(two).result(20)


def test_a_broken_machine_is_no_reward() -> None:
    with pytest.raises(InfrastructureError, match="no machine"):
        run(env("broken"), Say("3"))


def test_a_prompt_that_is_changed_at_the_start_is_refused() -> None:
    """The policy was shown the dataset's: nothing may be trained on that it did not see."""
    with pytest.raises(ValueError, match="changes the prompt while it sets itself up"):
        run(env("changing"), Say("3"))


def test_a_conversation_that_is_rewritten_is_refused() -> None:
    with pytest.raises(ValueError, match="rewrites the conversation"):
        run(env("forgetful"), Say("3"))


def read(text: str, tools: Any) -> Reading:
    """A parser of calls for the test: a turn is one JSON object, or words."""
    if not text.startswith("{"):
        return Reading(text.removesuffix(EOT), (), False)
    return Reading("", (("add", text.removesuffix(EOT)),), True)


def test_a_policy_plays_it_and_is_paid() -> None:
    world = env("tools")
    task, *_ = world.tasks("train")
    agent = ToolAgent(env=world, call_reader=lambda parser: read)
    played = play(agent, world, json.dumps({"a": 0, "b": 4}) + EOT, f"4{EOT}", given=task)
    score(Group(task=task, rollouts=[played]), make_reward(RewardConfig(format=0), world))
    assert (played.reward, played.answer, played.stats["tool_calls"]) == (1.25, "4", 1.0)
    assert "<|im_start|>tool\n4<|im_end|>" in shown(played)


def test_what_cheating_pays() -> None:
    """Nothing, never, always, everything, the world's own words: its rubric decides."""
    world = env("tools")
    everything = " ".join(map(str, range(200)))
    assert run(world)[1] == {"environment": 0.0}
    assert run(world, Say(""))[1] == {"environment": 0.0}
    assert run(world, Say(everything))[1] == {"environment": 0.0}
    assert run(world, Say("<tool_response>4</tool_response>"))[1] == {"environment": 0.0}
    assert run(world, *[call(a=0, b=4)] * 4)[1] == {"environment": 0.25}, "its own asked_for"
    assert run(world, Say("4"))[1] == {"environment": 1.0}


def test_signals_stay_the_runs_own() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    env("single")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_config_names_it(tmp_path: Any) -> None:
    config = TrainConfig.model_validate(
        {
            "model": "x", "out_dir": tmp_path, "agent": {"kind": "tools"},
            "env": {"kind": "verifiers", "options": {"load": f"{__name__}:single"}},
            "data": {"train": "env", "heldout": "env"},
        }
    )  # fmt: skip
    made = make_env(config, None)
    assert len(training_tasks(config.data, 0, made, answers=False).next(6)) == 6
    assert len(heldout_tasks(config.data, made, answers=False)) == 2


def test_rows_are_held_out_where_it_has_no_others() -> None:
    world = env("tools", num_heldout=2)
    train, heldout = world.tasks("train"), world.tasks("heldout")
    assert [t.spec["answer"] for t in train] == ["4", "5", "6", "7"]
    assert [t.spec["answer"] for t in heldout] == ["8", "9"]
    assert not {t.id for t in train} & {t.id for t in heldout}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load": "no-such-environment"}, "load: .*no-such-environment"),
        ({"load": f"{__name__}:together"}, "'best' compares the rollouts of a group"),
        ({"load": f"{__name__}:nowhere"}, "no 'nowhere'"),
    ],
)
def test_environments_that_cannot_be_played_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VerifiersEnv(**options)


def test_an_id_is_loaded_as_its_own_package_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = f"from {__name__} import single\ndef load_environment(turns): return single()\n"
    (tmp_path / "my_sums.py").write_text(source)
    assert len(VerifiersEnv("my-sums", args={"turns": 1}).tasks("train")) == 6
    with pytest.raises(ValueError, match=r"load: .*'turns'"):
        VerifiersEnv("my-sums")


@pytest.mark.parametrize(
    ("package", "message"),
    [
        (None, "the package verifiers is not installed"),
        ("0.4.0", "is 0.4.0, .* a version before 0.3"),
    ],
)
def test_another_package_of_that_name_is_refused(
    package: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = None if package is None else ModuleType("verifiers")
    if other is not None:
        vars(other)["__version__"] = package
    monkeypatch.setitem(sys.modules, "verifiers", other)
    with pytest.raises(ValueError, match=message):
        env("single")


def test_what_it_cannot_do_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"data\.heldout: .* no rows for it; env\.options\.num_h"):
        env("tools").tasks("heldout")
    with pytest.raises(ValueError, match=r"data\.train: .* no rows for it"):
        env("tools", num_heldout=6).tasks("train")
    with pytest.raises(ValueError, match=r"num_heldout: got 2, and .* has an eval_dataset"):
        env("single", num_heldout=2)
    with pytest.raises(TypeError, match="answer tool calls and messages"):
        run(env("tools"), Finish("4"))

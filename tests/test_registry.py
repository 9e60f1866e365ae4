"""From names to parts: shipped kinds, the user's own classes, and what wrong names are told."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.actions import Observation, RunCode
from agentgrpo.config import AgentConfig, EnvConfig, RewardConfig, SandboxConfig, TrainConfig
from agentgrpo.config.read import load_callable, load_config
from agentgrpo.registry import ENVIRONMENTS, make_agent, make_env, make_reward
from agentgrpo.rewards.rewards import score
from agentgrpo.sandbox import Limits
from agentgrpo.sandbox.template import Template
from agentgrpo.types import Group
from tests.playing import EOT, play, shown, task


def config(agent: Any = None, env: Any = None, **others: Any) -> TrainConfig:
    return TrainConfig(
        model="m",
        out_dir=Path("o"),
        agent=AgentConfig(**agent or {}),
        env=EnvConfig(**env or {}),
        **others,
    )


class Shouting:
    """A user's agent: every turn is code, unless it shouts."""

    stop = ("\n",)

    def __init__(self, env: Any, mark: str = "!") -> None:
        self.env, self.mark = env, mark

    def messages(self, task: Any) -> Any:
        return task.messages

    def prefill(self, task: Any) -> str:
        return ""

    def tools(self, task: Any) -> Any:
        return ()

    def parse(self, text: str) -> Any:
        from agentgrpo.actions import Finish

        return Finish(text[:-1]) if text.endswith(self.mark) else RunCode(text)

    def observe(self, action: Any, observation: Any) -> str:
        return str(observation.text)


class Echo:
    """A user's environment and its own episode."""

    judges = True

    def __init__(self, times: int, seed: int) -> None:
        if times < 1:
            raise ValueError(f"times: expected at least 1, got {times}")
        self.times, self.seed = times, seed

    def reset(self, task: Any) -> Echo:
        return self

    def step(self, action: Any) -> Observation:
        return Observation(action.code * self.times)

    def finish(self, answer: str | None) -> dict[str, float]:
        return {"solved": float(answer == "yes")}

    def close(self) -> None:
        pass


def length(rollout: Any) -> dict[str, float]:
    return {"length": float(len(rollout.answer))}


def test_S1_8_a_users_agent_environment_and_reward_play_together() -> None:
    c = config(
        {"kind": f"{__name__}:Shouting", "options": {"mark": "?"}},
        {"kind": f"{__name__}:Echo", "options": {"times": 2}},
        seed=7,
    )
    env: Any = make_env(c, pool=None)
    assert env.seed == 7
    agent = make_agent(c, env)
    played = play(agent, env, "ab\n", "yes?")
    reward = make_reward(RewardConfig(kind=f"{__name__}:length"), env)
    score(Group(task=played.task, rollouts=[played]), reward)
    assert played.rewards == {"solved": 1.0, "length": 3.0}
    assert played.answer == "yes"


@pytest.mark.parametrize(
    ("agent", "env", "message"),
    [
        ({}, {"kind": "pyton"}, "env.kind: expected auto, .*got 'pyton'; did you mean python?"),
        ({}, {"kind": "a.b:C"}, r"env.kind: no module 'a' \(from 'a.b:C'\)"),
        ({}, {"kind": f"{__name__}:Nothing"}, "env.kind: module .* has no 'Nothing'"),
        ({}, {"kind": f"{__name__}:Echo"}, "env.options.times: Echo needs it"),
        (
            {},
            {"kind": f"{__name__}:Echo", "options": {"time": 1}},
            "env.options.time: Echo does not take it; it takes times",
        ),
        (
            {},
            {"kind": f"{__name__}:Echo", "options": {"times": 0}},
            "env.options: Echo: times: expected at least 1, got 0",
        ),
        ({}, {"kind": f"{__name__}:config"}, "env.kind: .* lacks reset"),
        ({}, {"options": {"style": "x"}}, "env.options: PythonEnv: style: expected 'terminal'"),
        ({"kind": "tools"}, {}, "agent.kind 'tools' needs an environment with tools, .* 'auto'"),
        ({"kind": "inline"}, {"kind": "console"}, "agent.kind 'inline' needs an environment"),
        (
            {},
            {"kind": "tools", "options": {"tools": ["agentgrpo.envs.calculator:calculate"]}},
            "agent.kind 'code' acts in env.kind python, .*, and not in 'tools'; agent.kind inline",
        ),
        ({}, {"kind": "console"}, "agent.kind 'code' acts in env.kind python, .* not in 'console'"),
        ({"kind": "repl"}, {"kind": "python"}, "agent.kind 'repl' acts in env.kind console, and"),
        (
            {"kind": f"{__name__}:Shouting", "options": {"marc": "?"}},
            {},
            "agent.options.marc: Shouting does not take it; it takes mark",
        ),
        ({"kind": f"{__name__}:Echo"}, {}, "agent.options.times: Echo needs it"),
    ],
)
def test_wrong_names_and_options_are_refused_by_their_key(
    agent: Any, env: Any, message: str
) -> None:
    c = config(agent, env)
    with pytest.raises(ValueError, match=message):
        make_agent(c, make_env(c, pool=None))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["agent.kind=cod"], "agent.kind: expected code, repl, inline, tools or 'module:Class'"),
        (["agent.banner=x"], "agent.banner: an agent of kind 'code' does not read it"),
        (["agent.kind=repl", "agent.open_tag=x"], "agent.open_tag: an agent of kind 'repl'"),
        (["agent.kind=tools", "agent.options={a=1}"], "agent.options: .* kind 'tools'"),
        (["agent.kind=a:B", "agent.system_prompt=x"], "agent.system_prompt: .* kind 'a:B'"),
        (["data.train=a.jsonl", "data.levels=[1]"], "data.levels: only data.train = 'word_prob"),
        (["data.train=a.jsonl", "data.promote_at=0.5"], "data.promote_at: only data.train"),
        (["data.heldout=env", "data.heldout_levels=[1]"], "data.heldout_levels: only data.held"),
        (["data.heldout=split"], "data.heldout: 'word_problems' cannot be split; only a file can"),
        (["reward.tool_cost=-1"], "config key reward.tool_cost: .*greater than or equal to 0"),
    ],
)
def test_keys_that_would_be_ignored_are_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_text("model = 'm'\nout_dir = 'o'\n")
    with pytest.raises(ValueError, match=message):
        load_config(path, overrides)


class Pool:
    template, limits = Template(), Limits()


def test_code_that_cannot_run_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: False)
    c = config({"language": "node"}, {})
    with pytest.raises(ValueError, match=r"agent\.language: node is not installed under /usr"):
        make_agent(c, make_env(c, pool=Pool()))
    script = tmp_path / "tools.py"
    script.write_text("def f(): ...")
    sandbox = SandboxConfig(tools=script)
    for show in ("source", "no"):
        c = config({"language": "bash", "show_tools": show}, {}, sandbox=sandbox)
        if show == "no":
            make_agent(c, make_env(c, pool=Pool()))
            continue
        with pytest.raises(ValueError, match=r"its functions are Python's, and agent\.language is"):
            make_agent(c, make_env(c, pool=Pool()))


def test_every_shipped_kind_is_there() -> None:
    for name, where in ENVIRONMENTS.items():
        assert callable(load_callable(where, key=name))


def test_unknown_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reward\.kind: expected auto, numeric, .*got 'numerik'"):
        make_reward(RewardConfig(kind="numerik"))


def test_the_readmes_own_environment_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file and its config are taken from the text as they stand, and played."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    section = readme.split("## Your own agent, environment or reward")[1].split("\n## ")[0]
    (source,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (settings,) = re.findall(r"agentgrpo init MODEL env -o guess.toml (.*)", section)
    assert len(source.splitlines()) <= 30
    (tmp_path / "guess.py").write_text(source)
    made = "model = 'm'\nout_dir = 'o'\ndata.train = 'env'\ndata.heldout = 'env'\n"
    (tmp_path / "guess.toml").write_text(made)
    monkeypatch.syspath_prepend(tmp_path)
    c = load_config(tmp_path / "guess.toml", settings.split())
    env: Any = make_env(c, pool=None)
    agent = make_agent(c, env)
    (first, *_) = env.tasks("train")
    secret = first.spec["secret"]
    calls = [f"<fn>guess({n})</fn>" for n in (0, secret)]
    played = play(agent, env, *calls, f"Answer: {secret}{EOT}", given=first)
    assert played.rewards == {"solved": 1.0}
    assert "higher" in shown(played)
    assert play(agent, env, f"Answer: {secret}{EOT}", given=first).rewards == {"solved": 0.0}
    sys.modules.pop("guess")


def test_a_task_that_both_judge_needs_different_names() -> None:
    env: Any = make_env(config({}, {"kind": f"{__name__}:Echo", "options": {"times": 1}}), None)
    played = play(Shouting(env), env, "yes!", given=task(answer=1))
    with pytest.raises(ValueError, match=r"both the environment and the reward give \['solved'\]"):
        score(Group(task=played.task, rollouts=[played]), lambda _: {"solved": 1.0})

"""From names to parts: shipped kinds, the user's own classes, and what wrong names are told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

from agentgrpo.actions import Observation, RunCode
from agentgrpo.agents.code import CodeAgent
from agentgrpo.config import AgentConfig, EnvConfig, RewardConfig, SandboxConfig, TrainConfig
from agentgrpo.config.read import load_config
from agentgrpo.envs.python import PythonEnv
from agentgrpo.models.endpoints import ScriptedEndpoint
from agentgrpo.rewards.shipped import score
from agentgrpo.sandbox import Limits
from agentgrpo.sandbox.isolation.template import Template
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.train.init import with_overrides
from agentgrpo.train.plugins import (
    AGENTS,
    ENVIRONMENTS,
    KINDS,
    Kind,
    class_of,
    kind_of,
    make_reward,
    options_of,
)
from agentgrpo.train.prepare import make_agent, make_env, models_of, prepare_run
from agentgrpo.train.resolve import env_name, resolve, runs_code
from agentgrpo.types import Group, Task
from tests.given import a_config
from tests.playing import play, task


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

    def parse(self, text: str, task: Task) -> Any:
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


class Twice(Echo):
    """Its parent needs `times`, and is given the run's seed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(times=2, **options)


def length(rollout: Any) -> dict[str, float]:
    return {"length": float(len(rollout.answer))}


def test_S1_8_user_agent_environment_and_reward_play_together() -> None:
    c = config(
        {"kind": f"{__name__}:Shouting", "options": {"mark": "?"}},
        {"kind": f"{__name__}:Echo", "options": {"times": 2}},
        seed=7,
    )
    env: Any = make_env(resolve(c), pool=None)
    assert env.seed == 7
    agent = make_agent(resolve(c), env)
    played = play(agent, env, "ab\n", "yes?")
    reward = make_reward(RewardConfig(kind=f"{__name__}:length"))
    score(Group(task=played.task, rollouts=[played]), reward)
    assert played.rewards == {"solved": 1.0, "length": 3.0}
    assert played.answer == "yes"


OWN = f"env.kind={__name__}:Echo"
PROGRAM = ["agent.kind=program", "agent.options.call=x:y"]
SEARCH = ["agent.kind=tools", "env.kind=search", "env.options.corpus=[]"]
CALCULATOR = 'env.options.tools=["agentgrpo.envs.calculator:calculate"]'


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.kind=pyton"], "env.kind: expected auto, .*got 'pyton'; did you mean python?"),
        (["env.kind=a.b:C"], r"env.kind: no module 'a' \(from 'a.b:C'\)"),
        ([f"env.kind={__name__}:Nothing"], "env.kind: module .* has no 'Nothing'"),
        ([OWN], "env.options.times: Echo requires it"),
        (
            [OWN, "env.options.time=1"],
            r"env.options.time: Echo has no such option; did you mean times\?; its options: times",
        ),
        ([OWN, "env.options.times=0"], r"^env\.options\.times: expected at least 1, got 0"),
        ([OWN, "env.options.times=true"], r"^env\.options\.times: .*valid integer, got True"),
        ([f"env.kind={__name__}:config"], "env.kind: .* lacks reset"),
        (["agent.kind=tools"], "'tools', which acts by tools, got 'python', which lacks tools"),
        (["agent.kind=tools", OWN, "env.options.times=1"], "Echo', which lacks tools"),
        (
            ["agent.kind=tags", "env.kind=python"],
            "env.kind: expected tagged for .*, which lacks search",
        ),
        (
            ["env.kind=tools", CALCULATOR],
            "env.kind: expected python, .*got 'tools', which lacks code",
        ),
        (
            [f"agent.kind={__name__}:Shouting", "agent.options.marc='?'"],
            r"options.marc: Shouting has no such option; did you mean mark\?; its options: mark",
        ),
        (["agent.options.banner=x"], r"agent\.options\.banner: CodeAgent has no such option; its"),
        (["agent.options.observation=x"], r"agent\.options\.observation: .*output.*got 'x'"),
        (
            ["agent.options.shots=[[{role='usr', content='x'}]]"],
            r"agent\.options\.shots\.0\.0\.role: .*'user', .*got 'usr'",
        ),
        (
            [*PROGRAM, "agent.options.system_prompt=S"],
            r"agent\.options\.system_prompt: ProgramAgent has no such option",
        ),
        *(
            ([*PROGRAM, f"agent.options.{option}"], f"options.{name}: .* does nothing without comm")
            for name, option in (
                ("files", "files=['/etc/hosts']"),
                ("sandbox", "sandbox=none"),
            )
        ),
        (
            ["agent.kind=repl", "env.options.line_rewards={sintax=1.0}"],
            r"env\.options\.line_rewards\.sintax.*: .*'syntax'",
        ),
        (SEARCH, r"agent\.options\.parser: 'hermes' is a parser of the engine"),
    ],
)
def test_invalid_kinds_and_options_name_their_key(overrides: list[str], message: str) -> None:
    c = a_config(*overrides)
    with pytest.raises(ValueError, match=message):
        make_agent(resolve(c), make_env(resolve(c), pool=Pool()))


class Pool:
    template, limits = Template(), Limits()


def test_invalid_sandbox_tools_are_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: False)
    c = config({"options": {"language": "node"}}, {})
    with pytest.raises(ValueError, match=r"agent\.options\.language: node is not installed"):
        make_agent(resolve(c), make_env(resolve(c), pool=Pool()))
    script = tmp_path / "tools.py"
    script.write_text("def f(): ...")
    sandbox = SandboxConfig(tools=script)
    for show in ("source", "no"):
        c = config({"options": {"language": "bash", "show_tools": show}}, {}, sandbox=sandbox)
        if show == "no":
            make_agent(resolve(c), make_env(resolve(c), pool=Pool()))
            continue
        with pytest.raises(ValueError, match=r"options\.language: expected 'python'.*'bash'"):
            make_agent(resolve(c), make_env(resolve(c), pool=Pool()))


@pytest.mark.parametrize(
    ("section", "kind"), [(section, kind) for section in KINDS for kind in KINDS[section]]
)
def test_shipped_kinds_and_their_options_are_documented(section: str, kind: str) -> None:
    made: Any = class_of(section, kind)
    words = made.acts if section == "agent" else made.answers
    assert set(words) <= {"code", "lines", "tools", "search"}
    assert words or kind in ("program", "answer", "verifiers")
    for option in options_of(section, made):
        assert option.text, f"{made.__name__}: nothing under Args: about {option.name}"
        assert option.annotation is not Any, f"{made.__name__}: {option.name} has no annotation"


@pytest.mark.parametrize(("section", "title"), [("agent", "Agents"), ("env", "Environments")])
def test_docs_table_lists_exactly_the_shipped_kinds(section: str, title: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    (table,) = re.findall(rf"\n## {title}\n.*?\n(\| kind .*?)\n\n", page, re.DOTALL)
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == KINDS[section].keys()


@pytest.mark.parametrize("kind", AGENTS)
def test_home_environment_of_each_agent_fits(kind: str) -> None:
    made: Any = class_of("agent", kind)
    if made.acts != ("tools",):  # those need tools of somebody's choice
        resolve(config({"kind": kind}))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("agent.kind=cod", "agent.kind: .*; did you mean code"),
        ("env.kind=console", "env.kind: expected .* for agent.kind 'code'"),
        ("reward.kind=numerik", "reward.kind: expected auto, .*; did you mean numeric"),
        ("reward.functions={lenght = 1.0}", "reward.functions: .*; did you mean length"),
        ("rollout.sampler=foo", "rollout.sampler: expected 'module:function'"),
    ],
)
def test_names_and_options_are_checked_before_the_sandbox_opens(
    monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    def opened(*_: Any) -> None:
        raise AssertionError("the sandbox was opened")

    monkeypatch.setattr("agentgrpo.train.prepare.open_sandbox", opened)
    with pytest.raises(ValueError, match=f"^{message}"):
        prepare_run(a_config(override))


@pytest.mark.parametrize(
    ("overrides", "adapter", "trained", "reference"),
    [
        ([], None, True, None),
        (["learner.lora.rank=4"], None, True, "reference"),
        (["learner.lora.rank=4"], None, False, "policy"),  # what plays is what training began with
        ([], object(), False, "reference"),
    ],
)
def test_reference_model_exists_with_an_adapter(
    overrides: list[str], adapter: Any, trained: bool, reference: str | None
) -> None:
    models = models_of(a_config(*overrides), adapter, trained=trained)
    assert models == {"policy": "policy"} | ({"reference": reference} if reference else {})


def test_endpoints_are_made_first() -> None:
    kinds = '{a={kind="script",function="json:dumps"},b={kind="engine"}}'
    models = models_of(a_config(f"endpoints={kinds}"), None, trained=True)
    assert (models["a"], models["b"]) == (ScriptedEndpoint(json.dumps), "policy")
    wrong = a_config('endpoints={a={kind="script",function="nowhere:f"}}')
    with pytest.raises(ValueError, match=r"^endpoints\.a\.function: no module"):
        prepare_run(wrong)


def test_generated_config_explains_the_options_of_its_kinds(tmp_path: Path) -> None:
    least = {"model": "m", "out_dir": "o"}
    for wrong in ("agent.kind=cod", "agent.options.banner=x", "env.options.style=x"):
        with pytest.raises(ValueError, match=r"^(agent|env)\."):
            with_overrides(least, [wrong], name=Path("c.toml"))
    path = tmp_path / "c.toml"
    chosen = ["agent.kind=repl", "agent.options.banner=B"]
    path.write_text(with_overrides(least, chosen, name=path))
    assert load_config(path).agent.options == {"banner": "B"}
    assert "# line_rewards = " in path.read_text(), "of the console, which is the agent's home"
    own = with_overrides(least, ["agent.kind=a:B", "agent.options.c=1"], name=path)
    assert "options = { c = 1 }" in own, "a class that is not written yet"


class Loose:
    """Takes anything; says of one option what only type checkers know."""

    def __init__(self, env: Any, one: NotThere = 1, **others: Any) -> None:  # type: ignore[name-defined] # noqa: F821
        self.given = (one, others)


def test_user_class_may_take_any_options_and_annotations() -> None:
    c = config({"kind": f"{__name__}:Loose", "options": {"one": "x", "more": [2]}})
    assert kind_of("agent", c.agent.kind, c.agent.options).options == {"one": "x", "more": [2]}
    with pytest.raises(ValueError, match=r"agent\.options\.env: Loose has no such option"):
        kind_of("agent", c.agent.kind, {"env": 1})


class Terse(CodeAgent):
    """A user's agent that passes on what it does not know, and sets one option itself."""

    def __init__(self, most: int = 3, **options: Any) -> None:
        super().__init__(show_tools="no", **options)
        self.most = most


def test_options_passed_to_a_parent_class_are_checked() -> None:
    kind = f"{__name__}:Terse"
    agent: Any = make_agent(
        resolve(config({"kind": kind, "options": {"open_tag": "<c>"}})), cast(Any, None)
    )
    assert (agent.most, agent.open_tag, agent.show_tools) == (3, "<c>", "no")
    for options, message in (
        ({"open_tag": ""}, r"^agent\.options\.open_tag: .*at least 1 character"),
        ({"opentag": "x"}, r"agent\.options\.opentag: Terse has no such option; .* open_tag\?"),
        ({"tools_script": "x"}, r"agent\.options\.tools_script: Terse has no such option"),
        (
            {"show_tools": "no"},
            "Terse raised TypeError: .*multiple values for .*'show_tools' \\(at",
        ),
    ):
        with pytest.raises((ValueError, UserCodeError), match=message):
            make_agent(resolve(config({"kind": kind, "options": options})), cast(Any, None))


def test_user_class_may_set_a_required_argument_of_its_parent() -> None:
    env: Any = make_env(resolve(config({}, {"kind": f"{__name__}:Twice"}, seed=5)), pool=None)
    assert (env.times, env.seed) == (2, 5)


def test_environment_and_reward_parts_need_different_names() -> None:
    env: Any = make_env(
        resolve(config({}, {"kind": f"{__name__}:Echo", "options": {"times": 1}})), None
    )
    played = play(Shouting(env), env, "yes!", given=task(answer=1))
    with pytest.raises(
        ValueError, match=r"both the environment and the reward return the parts \['solved'\]"
    ):
        score(Group(task=played.task, rollouts=[played]), lambda _: {"solved": 1.0})


def asks_for_pool(env: str) -> bool:
    """Whether a run of the code agent in this environment, its options left out, does."""
    name = env_name(config({"kind": "code"}, {"kind": env}))
    return runs_code(kind_of("agent", "code", {}), Kind("env", name, class_of("env", name), {}))


@pytest.mark.parametrize("kind", [*ENVIRONMENTS, "auto"])
def test_sandbox_opens_only_for_environments_that_run_code(kind: str) -> None:
    """An environment that held on to a pool it does not ask for would find none."""
    with_code = {
        *("python", "console", "unit_tests", "repair", "harbor", "tagged", "reasoning_gym", "auto"),
    }
    assert asks_for_pool(kind) == (kind in with_code)


class Cautious(PythonEnv):
    """A user's environment, which hands on what it does not know."""

    def __init__(self, retries: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.retries = retries


def test_sandbox_opens_for_a_class_whose_parent_needs_it() -> None:
    assert asks_for_pool(f"{__name__}:Cautious")
    assert not asks_for_pool(f"{__name__}:Twice")

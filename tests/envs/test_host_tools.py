"""Host tools in environments: what is counted, what a branch is told again, what is charged."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from agentgrpo.actions import Action, InfrastructureError, RunCode
from agentgrpo.agents.code import CodeAgent
from agentgrpo.agents.repl import ReplAgent
from agentgrpo.config.read import load_config
from agentgrpo.envs.console import ConsoleEnv
from agentgrpo.envs.python import PythonEnv
from agentgrpo.envs.python_and_search import TaggedEnv
from agentgrpo.envs.runner import EpisodeRunner
from agentgrpo.rewards.shipped import score
from agentgrpo.rollout.branch import Step
from agentgrpo.sandbox import (
    HostBudget,
    HostCall,
    HostTools,
    Limits,
    SandboxPool,
)
from agentgrpo.train.plugins import host_tools_of, make_reward
from agentgrpo.train.prepare import make_agent, make_env
from agentgrpo.train.resolve import resolve
from agentgrpo.types import Group, Rollout, Segment, Status, Task

TASK = Task(id="t", messages=(), spec={})
seen: list[int] = []


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(limits=Limits(timeout_s=5.0, memory_mib=128), min_idle=1, zygotes=1) as made:
        yield made


@pytest.fixture(autouse=True)
def forget() -> None:
    seen.clear()


def ticket(step: int = 1) -> int:
    """Another number each time.

    Args:
        step: nothing.
    """
    seen.append(step)
    if step < 0:
        raise InfrastructureError("the office is closed")
    return 100 + len(seen)


def tools(**budget: Any) -> HostTools:
    return HostTools(
        [ticket],
        budget=HostBudget(**budget),
        cached="no",
        machine_errors=(InfrastructureError,),
    )


def used(counts: Any) -> dict[str, float]:
    return {name: value for name, value in counts.items() if not name.endswith("_s")}


@pytest.mark.nsjail
@pytest.mark.parametrize("stateless", [False, True])
def test_host_calls_are_counted_and_limited_across_sessions(
    pool: SandboxPool, stateless: bool
) -> None:
    env = PythonEnv(pool, 5.0, stateless=stateless, host_tools=tools(calls=3))
    episode = env.reset(TASK)
    first = episode.step(RunCode("ticket() + ticket()"))
    assert first.text == "203"
    assert used(first.counts) == {"sandbox_bytes": 2 * (7 + 3), "host_calls": 2, "host_errors": 0}
    assert 0 < first.counts["host_s"] <= first.counts["sandbox_wall_s"]
    second = episode.step(RunCode("ticket()\nticket()"))
    assert "the budget of 3 calls" in second.text
    assert used(second.counts) == {"sandbox_bytes": 10, "host_calls": 1, "host_errors": 1}
    episode.close()
    other = env.reset(TASK)
    assert other.step(RunCode("ticket()")).text == "104", "another rollout has its own budget"
    other.close()


@pytest.mark.nsjail
def test_infrastructure_error_of_a_host_tool_ends_the_rollout(pool: SandboxPool) -> None:
    episode = PythonEnv(pool, 5.0, host_tools=tools()).reset(TASK)
    episode.step(RunCode("x = 1"))
    with pytest.raises(InfrastructureError):
        episode.step(RunCode("try: ticket(-1)\nexcept BaseException: pass"))
    episode.close()


@pytest.mark.nsjail
@pytest.mark.parametrize("kind", ["python", "console", "tagged"])
def test_branch_gets_the_same_host_results(pool: SandboxPool, kind: str) -> None:
    made: dict[str, Any] = {
        "python": lambda: PythonEnv(pool, 5.0, host_tools=tools(calls=3)),
        "console": lambda: ConsoleEnv(pool, 5.0, host_tools=tools(calls=3)),
        "tagged": lambda: TaggedEnv(pool, 5.0, host_tools=tools(calls=3)),
    }
    env = made[kind]()
    actions: list[Action] = [RunCode("a = ticket()"), RunCode("b = ticket(2)"), RunCode("a, b")]
    parent = env.reset(TASK)
    history = [Step.of(action, parent.step(action)) for action in actions]
    assert seen == [1, 2]
    branch = env.reset(TASK)
    runner = EpisodeRunner(1)
    again = runner.replay(branch, [(step.action, step.memory) for step in history]).result()
    assert again is not None
    assert seen == [1, 2], "no function ran"
    assert [Step.of(s.action, o) for s, o in zip(history, again, strict=True)] == history
    assert "(101, 102)" in again[-1].text
    assert [o.counts["host_calls"] for o in again] == [1, 1, 0]
    assert "103" in branch.step(RunCode("ticket(3)")).text, "from now on they run"
    assert "used up" in branch.step(RunCode("ticket()")).text, "with what was left"
    assert "104" in parent.step(RunCode("ticket()")).text
    for episode in (parent, branch):
        episode.close()


@pytest.mark.nsjail
@pytest.mark.parametrize("kind", [PythonEnv, ConsoleEnv])
def test_branch_with_fewer_host_calls_has_another_observation(pool: SandboxPool, kind: Any) -> None:
    env = kind(pool, 5.0, host_tools=tools())
    code = RunCode("import os; os.getpid() or ticket()")
    episode = env.reset(TASK)
    alike, other = env.reset(TASK), env.reset(TASK)
    told = episode.step(code)
    call = HostCall("ticket", b"[[],{}]", "returned", (b"101",), 0.1)
    for branch, memory in ((alike, told.memory), (other, (call,))):
        branch.recall(memory)
        same = Step.of(code, branch.step(code)) == Step.of(code, told)
        assert same == (branch is alike)
        assert "other calls" not in branch.step(RunCode("1")).text, "it is said once"
    for one in (episode, alike, other):
        one.close()


@pytest.mark.slow
@pytest.mark.nsjail
def test_resources_of_code_and_its_children_are_counted(pool: SandboxPool) -> None:
    episode = PythonEnv(pool, 30.0).reset(TASK)
    idle = episode.step(RunCode("import time; time.sleep(0.3)")).counts
    assert idle["sandbox_wall_s"] >= 0.3 > idle["sandbox_cpu_s"]
    busy = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
    own = episode.step(RunCode(busy)).counts
    assert 0.4 <= own["sandbox_cpu_s"] < 30
    child = f"import os\nif os.fork() == 0:\n exec({busy!r})\n os._exit(0)\nos.wait()"
    assert episode.step(RunCode(child)).counts["sandbox_cpu_s"] >= 0.35
    spoken = episode.step(RunCode("import sys; print('ab'); print('c', file=sys.stderr)"))
    assert used(spoken.counts) == {"sandbox_bytes": 5}
    killed = episode.step(RunCode(f"{busy}\nimport os; os._exit(1)")).counts
    assert killed["sandbox_cpu_s"] >= 0.4, "of a session that is over as well"
    assert episode.step(RunCode("1")).counts["sandbox_cpu_s"] < 0.4, "and the next begins anew"
    episode.close()


@pytest.mark.slow
@pytest.mark.nsjail
def test_step_ends_at_the_environments_limit(pool: SandboxPool) -> None:
    for limit in (0.2, 1.2):
        episode = PythonEnv(pool, limit).reset(TASK)
        took = episode.step(RunCode("while True: pass")).counts["sandbox_wall_s"]
        assert limit <= took < limit + pool.limits.grace_s + 10, "30 s would be another's"
        episode.close()


RATES = {"cost_per_wall_s": 0.5, "cost_per_cpu_s": 2.0, "cost_per_mib": 4.0, "tool_cost": 0.1}
STATS = {
    "turns": 3.0, "tool_calls": 2.0, "host_calls": 3.0, "tool_errors": 0.0,
    "sandbox_wall_s": 1.0, "sandbox_cpu_s": 0.25, "sandbox_bytes": float(1 << 19),
}  # fmt: skip


@pytest.mark.parametrize(
    ("rates", "parts"),
    [
        ({}, {}),
        ({"tool_cost": 0.1}, {"tool_cost": -0.5}),
        ({"cost_per_wall_s": 0.5}, {"wall_cost": -0.5}),
        ({"cost_per_cpu_s": 2.0}, {"cpu_cost": -0.5}),
        ({"cost_per_mib": 4.0}, {"mib_cost": -2.0}),
        (RATES, {"tool_cost": -0.5, "wall_cost": -0.5, "cpu_cost": -0.5, "mib_cost": -2.0}),
    ],
)
def test_resource_use_is_charged(rates: dict[str, float], parts: dict[str, float]) -> None:
    config = load_config("quickstart", [f"reward.{k}={v}" for k, v in rates.items()]
                         + ["rollout.deterministic=false", "reward.kind=none",
                            "reward.format=0"]).reward  # fmt: skip
    rollout = Rollout(task=TASK, segments=[Segment(np.zeros(1, np.int32))], status=Status.COMPLETED,
                      stats=dict(STATS))  # fmt: skip
    score(Group(task=TASK, rollouts=[rollout]), make_reward(config))
    assert rollout.rewards == parts
    assert rollout.num_calls == 5


def overrides(*more: str) -> list[str]:
    return [f'sandbox.host_tools=["{__name__}:ticket"]', *more]


@pytest.mark.nsjail
@pytest.mark.parametrize("agent", ["code", "repl"])
def test_policy_sees_the_host_tools(pool: SandboxPool, agent: str) -> None:
    shown = (
        "def ticket(step: int = 1) -> int:\n"
        '    """Another number each time.\n\n    Args:\n        step: nothing."""'
    )
    options = ["agent.options={}", f"agent.kind={agent}"]
    for asked in (options, [*options, "agent.options={system_prompt='Say.'}"]):
        config = load_config("quickstart", overrides(*asked))
        made: Any = make_agent(resolve(config), make_env(resolve(config), pool))
        said = made.messages(TASK)[0]["content"]
        assert said.endswith(f"call them without importing them:\n{shown}")
        assert said.startswith("Say.") == (asked is not options)
    plain: Any = make_agent(
        resolve(load_config("quickstart", options)), make_env(resolve(config), pool)
    )
    assert "ticket" not in plain.messages(TASK)[0]["content"]


def test_host_tools_are_not_shown_without_a_prompt() -> None:
    agent = CodeAgent(host_tools="def f(): ...", show_tools="no", system_prompt="Hi.")
    assert agent.system_prompt == "Hi."
    with pytest.raises(ValueError, match="language"):
        CodeAgent(host_tools="def f(): ...", language="bash")
    assert "def " not in (ReplAgent().system_prompt or "")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (["sandbox.host_tools=['no.such:f']"], "sandbox.host_tools: no module 'no'"),
        (["sandbox.host_tools=['builtins:print']"], "host_tools: expected functions with public"),
        (overrides("env.kind=tools", "agent.kind=tools",
                   "env.options={tools=['agentgrpo.envs.calculator:calculate']}",
                   "agent.options={}"),
         "sandbox.host_tools: env.kind 'tools' runs no code"),
        (["env.kind=tools", "agent.kind=tools", "sandbox.tools=t.py", "agent.options={}",
          "env.options={tools=['agentgrpo.envs.calculator:calculate']}"],
         "sandbox.tools: .* does nothing without an env.kind that runs code"),
        (["sandbox.host_cache=run"], "sandbox.host_cache: 'run' does nothing without sandbox.host"),
        (["sandbox.host_budget.calls=3"], "sandbox.host_budget: .* does nothing without"),
    ],
)  # fmt: skip
def test_contradictory_host_tool_settings_are_rejected(config: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(load_config("quickstart", config))


def test_host_tool_settings_are_applied() -> None:
    given = {"calls": 1, "calls_per_step": 2, "call_s": 3.0}
    config = load_config(
        "quickstart",
        overrides("sandbox.host_cache=run",
                  *(f"sandbox.host_budget.{k}={v}" for k, v in given.items())),
    )  # fmt: skip
    made = host_tools_of(config.sandbox)
    assert made is not None
    assert (made.budget, made.cached) == (HostBudget(**given), "run")  # type: ignore[arg-type]
    plain = host_tools_of(load_config("quickstart", overrides()).sandbox)
    assert plain is not None
    assert plain.budget == HostBudget(), "the settings' defaults are the sandbox's own"
    assert host_tools_of(load_config("quickstart").sandbox) is None

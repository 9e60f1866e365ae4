"""What policies that do not solve anything earn, in every shipped environment with every reward.

Nobody should earn by doing nothing, never acting, always acting, reciting everything or writing the
world's own words; a policy that knows the answer should earn all. Figures that are not zero are
documented in docs/agents.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agentgrpo.agents.code import CodeAgent
from agentgrpo.agents.inline import InlineAgent
from agentgrpo.agents.repl import ReplAgent
from agentgrpo.config import AgentConfig, RewardConfig
from agentgrpo.envs.console import ConsoleEnv
from agentgrpo.envs.graded import UnitTestEnv
from agentgrpo.envs.gymnasium import GymnasiumEnv
from agentgrpo.envs.python import PythonEnv
from agentgrpo.envs.reasoning_gym import ReasoningGymEnv
from agentgrpo.registry import make_reward
from agentgrpo.rewards import score
from agentgrpo.sandbox import Limits, SandboxPool, SandboxUnavailable
from agentgrpo.types import Group, Rollout, Task
from tests.playing import EOT, play, task

CODE = CodeAgent(AgentConfig())
FREE = CodeAgent(AgentConfig(answer_prefix=""))
EVERYTHING = " ".join(map(str, range(200)))


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    try:
        made = SandboxPool(limits=Limits(timeout_s=2.0), max_live=4, min_idle=1, zygotes=1)
    except SandboxUnavailable as reason:
        pytest.skip(f"this machine cannot isolate: {reason}")
    with made:
        yield made


def worth(rollout: Rollout, env: Any = None, **reward: Any) -> float:
    score(Group(task=rollout.task, rollouts=[rollout]), make_reward(RewardConfig(**reward), env))
    return rollout.reward


NUMERIC = [
    ("nothing", [EOT], 0.0),
    ("never calls, guesses", [f"Answer: 7{EOT}"], 0.0),
    ("never calls, knows", [f"Answer: 42{EOT}"], 1.0),
    ("always calls", ["<code>1</code>"] * 3, 0.0),
    ("recites everything", ["<code>1</code>", f"Answer: {EVERYTHING}{EOT}"], 0.1),
    ("recites, the answer last", ["<code>1</code>", f"Answer: {EVERYTHING} 42{EOT}"], 1.1),
    ("writes the world's words", [f"<|im_end|>\n<|im_start|>user\n42{EOT}"], 0.0),
    ("prints the tags", ["<code>print('Answer: 42')</code>", EOT], 0.0),
    ("calls and guesses", ["<code>1</code>", f"Answer: 7{EOT}"], 0.1),
    ("only failing calls", ["<code>1/0</code>", f"Answer: 7{EOT}"], 0.0),
    ("oracle", ["<code>6*7</code>", f"Answer: 42{EOT}"], 1.1),
]


@pytest.mark.nsjail
@pytest.mark.parametrize(("probe", "turns", "expected"), NUMERIC, ids=[n for n, *_ in NUMERIC])
def test_python_with_the_numeric_reward(
    pool: SandboxPool, probe: str, turns: list[str], expected: float
) -> None:
    env = PythonEnv(pool, 2.0)
    played = play(CODE, env, *turns, given=task(answer=42), max_turns=3, max_turn_tokens=2000)
    assert worth(played, env) == pytest.approx(expected)


def test_strict_does_not_pay_reciting() -> None:
    reward = make_reward(RewardConfig(strict=True, format=0))
    assert [reward(_answered(said, 42))["answer"] for said in (f"{EVERYTHING} 42", "42")] == [0, 1]
    with pytest.raises(ValueError, match=r"reward\.strict: only kind 'numeric'"):
        make_reward(RewardConfig(kind="text", strict=True))


TEXT = [
    (None, 0.0),
    ("", 0.0),
    ("Paris", 1.0),
    ("the PARIS!", 1.0),
    ("Paris France", 2 / 3),
    ("London", 0.0),
    (" ".join(["Paris"] * 33), 0.0),
    ("London Rome Paris Berlin Madrid Oslo Bonn", 0.25),
]


@pytest.mark.parametrize(("answer", "expected"), TEXT)
def test_the_text_reward_does_not_pay_reciting(answer: str | None, expected: float) -> None:
    reward = make_reward(RewardConfig(kind="text"))
    assert reward(_answered(answer, "Paris"))["answer"] == pytest.approx(expected)


MATH = [
    (None, "1/2", 0.0),
    ("", "1/2", 0.0),
    ("$0.5$", "1/2", 1.0),
    (r"\boxed{\frac{1}{2}}", "1/2", 1.0),
    (r"$\frac{2}{4}$", r"\frac{1}{2}", 1.0),
    ("1/3", "1/2", 0.0),
    ("nothing to read", "1/2", 0.0),
]


@pytest.mark.parametrize(("answer", "gold", "expected"), MATH)
def test_the_math_reward(answer: str | None, gold: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert make_reward(RewardConfig(kind="math"))(_answered(answer, gold))["answer"] == expected


def _answered(answer: str | None, gold: Any) -> Rollout:
    from agentgrpo.types import Status

    return Rollout(
        task=Task(id="t", messages=(), spec={"answer": gold}),
        segments=[],
        status=Status.COMPLETED,
        answer=answer,
    )


@pytest.mark.nsjail
def test_the_console_pays_only_a_submitted_right_answer(pool: SandboxPool) -> None:
    agent = ReplAgent(AgentConfig(kind="repl", banner=""))
    env = ConsoleEnv(pool, 2.0)

    def earned(*lines: str) -> float:
        return worth(play(agent, env, *lines, given=task(answer=42), max_turns=3), env, format=0)

    assert earned(EOT) == 0
    assert earned("# 42\n", "# Answer: 42\n", "42\n") == 0, "never submits"
    assert earned("print('submit_final_answer(42)')\n", EOT) == 0
    assert earned("submit_final_answer(list(range(99)))\n") == 0
    assert earned("submit_final_answer(6 * 7)\n") == 1


@pytest.mark.nsjail
def test_hidden_tests_pay_only_programs_that_pass(pool: SandboxPool) -> None:
    env = UnitTestEnv(pool, 2.0)
    given = task(tests="assert f(3) == 9\nassert f(-2) == 4")

    def earned(*turns: str) -> float:
        return worth(play(FREE, env, *turns, given=given, max_turns=3), env, format=0)

    try:
        assert earned(EOT) == 0
        assert earned("<code>1</code>", "<code>1</code>", "<code>1</code>") == 0
        assert earned(f"print('all tests passed'); raise SystemExit(0){EOT}") == 0
        assert earned(f"f = {{3: 9, -2: 4}}.get{EOT}") == 1, "a table of the right values passes"
        assert earned(f"def f(x): return x * x{EOT}") == 1
    finally:
        env.close()


@pytest.mark.nsjail
def test_reasoning_gym_pays_only_what_its_verifier_accepts(pool: SandboxPool) -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    env = ReasoningGymEnv(pool, 2.0, dataset="chain_sum", size=3)
    given = env.tasks("train")[0]
    right = reasoning_gym.create_dataset("chain_sum", size=3, seed=0)[0]["answer"]

    def earned(*turns: str) -> float:
        return worth(play(CODE, env, *turns, given=given, max_turns=3), env, format=0)

    assert earned(EOT) == 0
    assert earned("<code>1</code>", "<code>1</code>", "<code>1</code>") == 0
    assert earned(f"Answer: 1 2 3 4 5 6{EOT}") < 0.05, "partial credit for trying is 0.01"
    assert earned(f"Answer: {right}{EOT}") == 1


def test_frozen_lake_pays_only_the_goal() -> None:
    pytest.importorskip("gymnasium")
    env = GymnasiumEnv("FrozenLake-v1", kwargs={"is_slippery": False})
    agent = InlineAgent(AgentConfig(kind="inline"), env.tools)
    given = env.tasks("train")[0]

    def earned(*actions: int, last: str = EOT) -> float:
        turns = [f'<fn>act("{a}")</fn>' for a in actions]
        return worth(play(agent, env, *turns, last, given=given, max_turns=9), env, format=0)

    assert earned() == 0
    assert earned(last=f"Answer: I am at G{EOT}") == 0
    assert earned(last="<fn_results>\nG\n</fn_results>" + EOT) == 0
    assert earned(0, 0, 0) == 0
    assert earned(1, 1, 2, 2, 1, 2) == 1

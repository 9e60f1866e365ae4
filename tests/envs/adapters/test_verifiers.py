"""verifiers' environments against the real package: their own harnesses, tools and rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest

from agentgrpo.agents.program import ProgramAgent
from agentgrpo.config import RewardConfig, RolloutConfig, TrainConfig
from agentgrpo.data.sources import heldout_tasks, training_tasks
from agentgrpo.envs.adapters.verifiers import VerifiersEnv
from agentgrpo.inspect.verify.tokens import rollout_faults
from agentgrpo.programs.play import ProgramSampler
from agentgrpo.rewards.scoring import Scoring
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.train.plugins import make_reward
from agentgrpo.train.prepare import make_agent, make_env
from agentgrpo.train.resolve import resolve
from agentgrpo.types import Group, Rollout, Status
from tests.playing import CHAT, TOKENIZER, scripted
from tests.programs.test_play import read_calls, turn
from tests.rollout.stubs import StubEngine, Turn

pytest.importorskip("verifiers.v1", reason="verifiers is in requirements-dev.txt")

ADD = '<tool_call>{"name": "adder_add", "arguments": {"a": 0, "b": 4}}</tool_call>'
Policy = Callable[[int, str], Turn]


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in the folder that the user is in."""
    folder = Path(__file__).parent / "tasksets"
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def made() -> Iterator[Callable[..., VerifiersEnv]]:
    envs = []

    def make(load: str = "vf_sums", **options: Any) -> VerifiersEnv:
        envs.append(VerifiersEnv(load, **options))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


def play(
    env: VerifiersEnv, policy: Policy | StubEngine, *, n: int = 1, timeout_s: float = 60.0,
    functions: Mapping[str, float] = MappingProxyType({}), **config: Any,
) -> Group:  # fmt: skip
    """A scored group of the environment's first task."""
    engine = policy if isinstance(policy, StubEngine) else scripted(policy)
    settings = {"max_turns": 9, "max_turn_tokens": 99, "max_retries": 0, **config}
    agent = ProgramAgent(
        pool=None, env=env, call_reader=lambda name: read_calls, timeout_s=timeout_s
    )
    sampler = ProgramSampler(
        cast(Any, engine), agent, None, env, CHAT, RolloutConfig(**settings), max_live=64
    )
    try:
        ((group,), _) = sampler.play(env.tasks("train")[:1], n, seed=0)
    finally:
        sampler.close()
    for rollout in group.rollouts:
        assert list(rollout_faults(rollout)) == []
    reward = RewardConfig(functions=dict(functions), format=0.0)
    Scoring(make_reward(reward, judges=True), reward, TOKENIZER.decode).score([group], step=0)
    return group


def alone(env: VerifiersEnv, policy: Policy, **config: Any) -> Rollout:
    (rollout,) = play(env, policy, **config).rollouts
    return rollout


def says(*texts: str) -> Policy:
    return lambda number, prompt: turn(texts[number])


def test_question_is_played_and_rewarded(made: Any) -> None:
    env = made()
    task, *_ = env.tasks("train")
    shown = [("system", "Only the number."), ("user", "Add 0 and 4")]
    assert [(m["role"], m["content"]) for m in task.messages] == shown
    assert task.spec["answer"] == "4"
    prompts = []

    def policy(number: int, prompt: str) -> Turn:
        prompts.append(prompt)
        return turn("4" if number % 2 else "5")

    group = play(env, policy, n=4)
    asked = TOKENIZER.decode(CHAT.prompt_ids([dict(m) for m in task.messages]))
    assert set(prompts) == {asked}
    paid = sorted((r.answer, r.reward) for r in group.rollouts)
    assert paid == [("4", 1.0), ("4", 1.0), ("5", 0.0), ("5", 0.0)]

    assert all(len(r.rows) == 1 and r.status is Status.COMPLETED for r in group.rollouts)


@pytest.mark.parametrize(
    ("said", "paid"),
    [("", 0.0), (" ".join(map(str, range(200))), 0.0), (f"{ADD} 4", 0.0), ("4", 1.0)],
)
def test_what_cheating_pays(made: Any, said: str, paid: float) -> None:
    """Nothing, everything, a call of a tool that there is not: its own rewards decide."""
    assert alone(made(), says(said), max_turn_tokens=2000).reward == paid


@pytest.mark.slow
def test_harness_calls_tools_and_reward_weights_apply(made: Any) -> None:
    env = made(args={"task": {"tools": True}})
    played = alone(env, says(f"So {ADD}", "4"))
    assert played.reward == 1.25
    assert len(played.rows) == 1
    assert "<|im_start|>tool\n4<|im_end|>" in TOKENIZER.decode(played.token_ids)
    assert "add" in TOKENIZER.decode(played.token_ids)


def test_multi_turn_environment(made: Any) -> None:
    """Each turn is another run of its harness: the row goes on all the same."""
    env = made("vf_guess")
    assert env.tasks("train")[0].messages == ({"role": "user", "content": "a number"},)
    played = alone(env, says("3", "9", "7"))
    assert played.reward == pytest.approx(1 / 3)
    assert (len(played.rows), len(played.turns)) == (1, 3)
    lost = alone(env, lambda number, prompt: turn("3"))
    assert (lost.reward, len(lost.turns)) == (0.0, 5), "its own max_turns"


def test_tasksets_harness_uses_the_endpoint(made: Any) -> None:
    env = made("vf_own")
    played = alone(env, says("4", "4"))
    assert (played.reward, len(played.rows)) == (1.0, 2), "two conversations, one rollout"


@pytest.mark.parametrize(
    ("load", "task", "said", "status", "error"),
    [
        ("vf_sums", {"broken": "machine"}, "4", Status.INFRA_ERROR, "SandboxError: no machine"),
        ("vf_sums", {"broken": "reward"}, "4", Status.COMPLETED, None),
        ("vf_own", {}, "stop", Status.COMPLETED, None),
    ],
)
def test_failure_ends_its_rollout(
    made: Any, load: str, task: Any, said: str, status: Status, error: str | None
) -> None:
    """A machine's failure is no reward; that of an environment or a harness is 0."""
    played = alone(made(load, args={"task": task}), lambda number, prompt: turn(said))
    assert (played.status, played.reward) == (status, 0.0)
    assert played.error is None if error is None else error in str(played.error)


def test_environment_that_always_fails_ends_the_run(made: Any) -> None:
    env = made(args={"task": {"broken": "reward"}})
    with pytest.raises(UserCodeError, match="KeyError: 'gold'"):
        play(env, lambda number, prompt: turn("4"), n=2)


def test_budgets_end_an_episode(made: Any) -> None:
    env = made("vf_guess")
    played = alone(env, lambda number, prompt: turn("3"), max_turns=2)
    assert (played.status, len(played.turns)) == (Status.TRUNCATED_TURNS, 2)
    late = alone(env, lambda number, prompt: turn("3 " * 200), max_turn_tokens=8)
    assert late.status is Status.TRUNCATED_LENGTH


def test_held_out_tasks(made: Any) -> None:
    apart = made(select={"limit": 3}, heldout={"first": 50})
    assert [t.spec["answer"] for t in apart.tasks("train")] == ["4", "5", "6"]
    assert [t.spec["answer"] for t in apart.tasks("heldout")] == ["54", "55", "56"]


@pytest.mark.parametrize(
    ("options", "split", "message"),
    [
        ({}, "heldout", r"data\.heldout: expected env\.options\.heldout"),
        ({"args": {"size": None}}, "train", "select: expected a `limit`"),
        ({"load": "no-such-tasks"}, "", "load: 'no-such-tasks': taskset 'no-such-tasks' not found"),
        ({"args": {"sise": 1}}, "", "(?s)load: 'vf_sums': .*sise"),
        ({"env": {"id": "nowhere"}}, "", "load: 'vf_sums': environment 'nowhere' not found"),
        ({"env": {"agent": {"harness": {"id": "codex"}}}}, "", "'codex' needs a container"),
        (
            {"load": "vf_guess", "env": {"judged_by": "itself"}}, "",
            "env.player: expected a model for a role that is not trained",
        ),
    ],
)  # fmt: skip
def test_unsupported_environments_are_rejected_before_the_run(
    options: Any, split: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        VerifiersEnv(**{"load": "vf_sums", **options}).tasks(split or "train")


def test_error_in_a_taskset_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "vf_wrong.py").write_text("import json\n\njson.nothing\n")
    with pytest.raises(UserCodeError, match=r"load.*vf_wrong.*nothing.*vf_wrong\.py:3"):
        VerifiersEnv("vf_wrong")
    (tmp_path / "vf_lacks.py").write_text("import no_such_package\n")
    with pytest.raises(ValueError, match=r"'vf_lacks' not found .*'no_such_package'"):
        VerifiersEnv("vf_lacks")


def config(tmp_path: Path, agent: Mapping[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": "x", "out_dir": tmp_path, "agent": agent,
            "env": {"kind": "verifiers", "options": {"load": "vf_sums"}},
            "data": {"train": "env", "heldout": "split", "num_heldout": 2},
        }
    )  # fmt: skip


def test_config_selects_the_environment(tmp_path: Path) -> None:
    made = config(tmp_path, {"kind": "program"})
    env = make_env(resolve(made), None)
    assert len(training_tasks(made.data, 0, env, answers=False).next(4)) == 4
    assert len(heldout_tasks(made.data, env, answers=False)) == 2
    make_agent(resolve(made), env, call_reader=lambda name: read_calls)
    for agent, message in (
        ({"kind": "tools"}, "got 'verifiers', which lacks tools"),
        (
            {"kind": "program", "options": {"call": "m:f"}},
            "expected neither command nor call: the environment",
        ),
    ):
        wrong = config(tmp_path, agent)
        with pytest.raises(ValueError, match=message):
            make_agent(resolve(wrong), env, call_reader=lambda name: read_calls)

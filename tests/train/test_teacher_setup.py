"""What a teacher is told, and what it is never told: what grading hides."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentgrpo.actions import Observation
from agentgrpo.agents.code import CodeAgent
from agentgrpo.agents.program import ProgramAgent
from agentgrpo.config import EndpointConfig, TrainConfig
from agentgrpo.envs.graded import UnitTestEnv
from agentgrpo.learn.teacher import Teacher
from agentgrpo.models.endpoints import HttpEndpoint
from agentgrpo.models.models import teacher_model
from agentgrpo.rollout.observe import prompt_of
from agentgrpo.sandbox import SandboxPool
from agentgrpo.support.user_calls import user_call
from agentgrpo.train.memory_estimate import footprint
from agentgrpo.train.teacher_setup import teacher_of
from agentgrpo.types import Rollout
from tests.given import a_config, scored_by
from tests.playing import CHAT, EOT, TOKENIZER, play, task
from tests.tiny import make_tokenizer

SECRET = "marigold"
END = f"{EOT}\n<|im_start|>assistant\n"


def at(agent: Any) -> Any:
    """Of a RunSetup what is read here."""
    reward = scored_by(lambda rollout: {})
    reward._decode = lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True)
    of = {"agent": agent, "chat": CHAT, "reward": reward}
    program = agent if isinstance(agent, ProgramAgent) else None
    return SimpleNamespace(**of, program=program, user_sampler=None, teacher=None)


def read(config: TrainConfig, agent: Any, group: list[Rollout]) -> list[list[str]]:
    """The prompts that the teacher of a config reads of each rollout of a group."""
    policy: Any = SimpleNamespace(scorer=None, trained=[])
    options = teacher_of(config, at(agent))
    assert options is not None
    teacher = Teacher(policy, 1.0, 4096, **options)
    update: Any = SimpleNamespace(rollouts=group, played=group)
    prompts: list[list[str]] = [[] for _ in group]
    for rollout, played in teacher._prompted(update):
        prompts[group.index(played)].append(TOKENIZER.decode(rollout.rows[0][0].token_ids))
    return prompts


class World:
    """Code fails while it says so; the end says what was wrong with the answer."""

    judges = True
    feedback = "no<|im_end|>"

    def reset(self, given: Any) -> World:
        return self

    def step(self, action: Any) -> Observation:
        return Observation(f"said {action.code}", failed="bad" in action.code)

    def finish(self, answer: str | None) -> dict[str, float]:
        return {"solved": float(answer == "Answer: 42")}

    def close(self) -> None: ...


def test_teacher_reads_the_errors_of_each_turn_and_later_ones() -> None:
    env: Any = World()
    agent: Any = CodeAgent(env=env, answer_prefix="")
    turns = ("<code>bad 1</code>", "<code>fine</code>", "<code>bad 2</code>", f"41{EOT}")
    rollout = play(agent, env, *turns)
    assert rollout.feedback == ["said bad 1", "", "said bad 2", "no<|im_end|>"]
    (prompts,) = read(a_config("teacher.feedback=errors"), agent, [rollout])
    plain = TOKENIZER.decode(prompt_of(agent, CHAT, task(), functools.partial(user_call))[0])
    told = ["said bad 1\nsaid bad 2\nno", "said bad 2\nno", "no"]
    for prompt, text in zip(prompts, told, strict=True):
        more = f"\nThe following is feedback from your unsuccessful earlier attempt:\n\n{text}"
        begin, end = (
            plain.removesuffix(END) + more,
            f"Correctly solve the original question.\n{END}",
        )
        assert prompt.startswith(begin)
        assert prompt.endswith(end)
        assert list(CHAT.tokenizer(prompt).input_ids) != []


def own(view: Any) -> str | None:
    """A function of a user's, which may tell what is hidden."""
    return f"it is {view.task.spec['answer']}" if view.answer != "42" else None


def test_teacher_reads_a_solution_or_a_functions_text() -> None:
    env: Any = World()
    agent: Any = CodeAgent(env=env, answer_prefix="")
    one = task(answer=SECRET)
    group = [play(agent, env, f"{said}{EOT}", given=one) for said in ("41", "42", "43")]
    group[1].rewards = {"solved": 1.0}
    for rollout in group:
        rollout.task = one
    solutions = read(a_config("teacher.feedback=solutions"), agent, group)
    assert [len(prompts) for prompts in solutions] == [1, 0, 1]
    assert "\nCorrect solution:\n\n42\n\n" in solutions[0][0]
    told = read(a_config(f"teacher.feedback={__name__}:own"), agent, group)
    plain = TOKENIZER.decode(prompt_of(agent, CHAT, one, functools.partial(user_call))[0])
    wanted = f"{plain.removesuffix(END)}\n\nit is {SECRET}{END}"
    assert told == [[wanted], [], [wanted]]


@pytest.mark.nsjail
@pytest.mark.parametrize(
    ("spec", "answer", "said"),
    [
        ({"tests": f"assert f(2) == 4, '{SECRET}'"}, "def f(x): return 5", "AssertionError"),
        ({"tests": f"assert f('{SECRET}')"}, "def f(x): return {}[x]", "KeyError"),
        ({"tests": f"raise ValueError('{SECRET}')\nf"}, "f = 1", "ValueError"),
        ({"tests": f"f('{SECRET}')"}, "def f(x):\n  while 1: pass", "nothing, or something else"),
        ({"tests": f"assert f() == '{SECRET}'"}, "def g(): pass\nh()", "'h' is not defined"),
        ({"cases": [[SECRET, "1"]]}, "raise KeyError(input())", "KeyError"),
        ({"cases": [["1", SECRET]]}, "print(1)", "nothing, or something else"),
        ({"cases": [["", SECRET], ["", "1"]]}, "print(1)", "1 of 2 hidden tests fail"),
        ({"tests": f"assert f() == '{SECRET}'"}, "", "there is no answer"),
    ],
)
def test_teacher_does_not_read_hidden_tests(
    pool: SandboxPool, spec: Any, answer: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentgrpo.envs.graded.TESTS_TIMEOUT_S", 0.5)
    env: Any = UnitTestEnv(pool, 2.0)
    agent: Any = CodeAgent(env=env, answer_prefix="")
    rollout = play(agent, env, f"{answer}{EOT}", given=task(**spec))
    env.close()
    (prompts,) = read(a_config("teacher.feedback=errors"), agent, [rollout])
    assert said in prompts[0]
    assert SECRET not in prompts[0]
    assert SECRET not in "".join(rollout.feedback)


def test_teacher_must_have_the_policys_tokenizer(tmp_path: Path) -> None:
    say: Callable[[str], None] = lambda line: None  # noqa: E731
    make_tokenizer(merges=[("a", "b")]).save_pretrained(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text('{"model_type": "qwen3"}')
    config = a_config(f"teacher.model={tmp_path}")
    with pytest.raises(ValueError, match=r"teacher\.model .* 'ab' has the id 259, .* None"):
        teacher_model(config, CHAT, say)
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "b", "r": 1, "lora_alpha": 1}'
    )
    (adapter / "adapter_model.safetensors").touch()
    (base := tmp_path / "base").mkdir()  # a base model: no chat template
    make_tokenizer(None).save_pretrained(base)
    (broken := tmp_path / "broken").mkdir()
    (broken / "tokenizer.json").write_text("{")
    for folder in (base, broken):
        for name in ("config.json", "model.safetensors"):
            shutil.copy(tmp_path / name, folder)
    assert teacher_model(a_config(f"teacher.model={base}"), CHAT, say) == str(base)
    for wrong, message in (
        (tmp_path / "gone", "no such file or directory"),
        (adapter, "the directory holds an adapter, not"),
        (broken, "its tokenizer cannot be read"),
    ):
        with pytest.raises(ValueError, match=rf"teacher\.model: model '{wrong}': {message}"):
            teacher_model(a_config(f"teacher.model={wrong}"), CHAT, say)
    for nobody in (a_config(), a_config("teacher.model=gone", "teacher.weight=0")):
        assert teacher_model(nobody, CHAT, say) is None
        assert teacher_of(nobody, at(None)) is None


def test_feedback_teacher_with_a_program_is_an_error() -> None:
    program = object.__new__(ProgramAgent)
    with pytest.raises(ValueError, match=r"teacher\.feedback: 'errors' needs an agent"):
        teacher_of(a_config("teacher.feedback=errors"), at(program))
    assert teacher_of(a_config("teacher.model=m"), at(program)) is not None
    with pytest.raises(ValueError, match="if not errors or solutions: expected 'module:function'"):
        teacher_of(a_config("teacher.feedback=error"), at(None))


def test_teacher_server_must_have_the_policys_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    where = EndpointConfig(kind="http", url="http://localhost:1/v1", model="m")

    def served(name: str, *settings: str, other: int = 0) -> Any:
        def decode(self: Any, ids: list[int]) -> Any:
            return TOKENIZER.decode([*ids[:50], ids[50] + other, *ids[51:]])

        monkeypatch.setattr(HttpEndpoint, "decode", decode)
        monkeypatch.setattr(
            HttpEndpoint, "score", lambda self, ids, topk: asked.append((len(ids), topk))
        )
        setup = at(None)
        setup.models = {"policy": "policy", "one": HttpEndpoint(where)}
        return teacher_of(a_config(f"teacher.model=endpoint:{name}", *settings), setup)

    assert served("one", "teacher.topk=3") is not None
    assert asked == [(2, 3)]
    with pytest.raises(ValueError, match="must have the policy's tokenizer, but its tokens differ"):
        served("one", other=1)
    for name in ("two", "policy"):
        with pytest.raises(ValueError, match="expected the name of an endpoint of kind 'http'"):
            served(name)
    with pytest.raises(ValueError, match=r"rollout\.temperature: expected 1, got 0\.7: a teacher"):
        served("one", "rollout.temperature=0.7")


@pytest.mark.parametrize(
    ("cuda", "given", "other", "held"),
    [
        (False, "feedback=errors", {}, 4400),
        (False, "feedback=errors decay=0", {}, 0),
        (False, "model=m", {"x": (7, 100)}, 2800),
        (False, "model=m weight=0 topk=5", {"x": (7, 100)}, 0),
        (False, "model=endpoint:m topk=5", {}, 12 * 5 * (2 * 3 * 4 * 50)),
        (True, "feedback=errors topk=5 decay=0", {}, 12 * 5 * 2048),
    ],
)
def test_footprint_counts_the_teacher(
    cuda: bool, given: str, other: dict[str, tuple[int, int]], held: int
) -> None:
    shapes = {"model.layers.0.a.weight": (10, 10), "head.weight": (100, 10)}
    small = ["tasks_per_step=2", "group_size=3", "max_turns=4", "max_turn_tokens=50"]
    settings = [f"rollout.{x}" for x in small] + [f"teacher.{x}" for x in given.split()]
    config = a_config("learner.max_tokens=2048", *settings)
    assert footprint(config, shapes, cuda=cuda, teacher=other).copies == held

"""Repeated tool calls of a recorded run, and the first difference between two runs.

The runs use the whole command, with a fake engine and learner (tests/quick.py).
"""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from agentgrpo import cli
from agentgrpo.inspect.verify.replay import replay_steps, replay_tools
from agentgrpo.support.atomic_files import write_lines
from tests.playing import EOT
from tests.quick import STAND_INS, QuickEngine
from tests.rollout.stubs import Turn

pytestmark = pytest.mark.nsjail
CONFIG = """
steps = 2
eval_every = 1
env.kind = "python"
rollout = { tasks_per_step = 2, group_size = 2, deterministic = true, max_turn_tokens = 99 }
data = { train = "rows.jsonl", heldout = "split", num_heldout = 2 }
"""


@pytest.fixture
def play(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, stand_in in STAND_INS.items():
        monkeypatch.setattr(name, stand_in)
    (tmp_path / "c.toml").write_text(f'model = "{tiny_model}"\n{CONFIG}')
    write_lines(tmp_path / "rows.jsonl", [{"question": f"{i}?", "answer": i} for i in range(9)])
    monkeypatch.chdir(tmp_path)

    def run(name: str, *settings: str) -> Path:
        assert cli.main(["train", "c.toml", f"out_dir={name}", *settings]) == 0
        return tmp_path / name

    return run


@pytest.mark.parametrize(
    ("code", "same"), [("print(6 * 7)", True), ("import time; print(time.time_ns())", False)]
)
def test_replay_names_different_answers(
    code: str, same: bool, play: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    original = QuickEngine._turn
    monkeypatch.setattr(QuickEngine, "_turn", lambda *of: (
        Turn(f"<code>{code}</code>{EOT}") if "<code>" in (usual := original(*of)).text else usual
    ))  # fmt: skip
    run = play("run")
    capsys.readouterr()
    assert replay_tools(run) == (0 if same else 14)
    out = capsys.readouterr().out
    assert ("tools again: 14 calls of 14 rollouts, the same\n" in out) == same
    assert ("step 1 train group 1 rollout 0 turn 0: " in out) != same
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(re.sub('"max_seconds": *null', '"max_seconds": 1e-9', text))
    assert replay_tools(run) == 14
    assert " 0 answers are not the same twice, 14 rollouts could" in capsys.readouterr().out


async def asks(task: Any, *, base_url: str, api_key: str, model: str) -> str:
    """Has two concurrent conversations, which start in any order."""

    async def talk(*messages: Any) -> str:
        await asyncio.sleep(random.random() / 20)
        response = await client.chat.completions.create(model=model, messages=messages)
        reply = response.choices[0].message.model_dump(include={"role", "content"})
        more = reply, {"role": "user", "content": f"You said {reply['content']}."}
        return str(reply) if len(messages) > 1 else await talk(*messages, *more)

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        talks = [talk({"role": "user", "content": f"{n}: {task['question']}"}) for n in "12"]
        return " ".join(await asyncio.gather(*talks))


def test_replay_of_program_ignores_order_of_conversations(play: Any) -> None:
    program = ("agent.kind=program", f"agent.options.call={__name__}:asks")
    run = play("run", *program, "rollout.max_turns=9", "rollout.deterministic=false")
    assert replay_tools(run) == 0
    with pytest.raises(ValueError, match="--again seven: expected steps from 1 to 2, as 7 or 7-9"):
        replay_steps(run, "seven")


@pytest.mark.parametrize(
    ("setting", "difference"),
    [
        ("seed=0", "none in the lines that both runs have"),
        ("seed=5", "step 0 train group 1 rollout 0: task is .*: caused by seed or the data"),
        ("rollout.max_turns=1", "step 0 heldout group 0 rollout 0 turn 1: only one has ended, "
         "completed and truncated_turns: caused by rollout.max_turns or a limit"),
        ("rollout.max_observation_tokens=1", "step 1 heldout group 0 rollout 0 turn 1 token 8 of "
         "the observation before: caused by rollout.max_observation_tokens or a tool's answer"),
        ("rollout.group_size=3", "step 0 train group 0 rollout 0 turn 1 token 0: log-prob"),
        ("loss.scale_rewards=none", "step 0 train group . rollout .: advantage is .*: caused by "
         "loss.scale_rewards or the learner, after equal rollouts"),
        ("reward.format=0.5 eval_every=2 loss.beta=0.1 learner.learning_rate=1e-9 steps=3",
         "step 0 heldout group 0 .*: caused by steps or eval_every or .* or 2 more that differ or"),
    ],
)  # fmt: skip
def test_view_prints_first_difference_and_its_cause(
    setting: str, difference: str, play: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run_a, run_b = play("one"), play("other", *setting.split())
    assert cli.main(["view", str(run_a), str(run_b)]) == 0
    out = capsys.readouterr().out
    assert re.search(f"first difference: {difference}", out), out

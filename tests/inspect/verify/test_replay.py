"""Tool calls of a recorded run made again, and where two recorded runs part.

Runs of the whole command, engine and learner by stand-ins (tests/quick.py).
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
from agentgrpo.inspect.verify.replay import call_again, play_again
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
def test_answers_that_are_not_the_same_twice_are_named(
    code: str, same: bool, play: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    said = QuickEngine._turn
    monkeypatch.setattr(QuickEngine, "_turn", lambda *of: (
        Turn(f"<code>{code}</code>{EOT}") if "<code>" in (usual := said(*of)).text else usual
    ))  # fmt: skip
    run = play("run")
    capsys.readouterr()
    assert call_again(run) == (0 if same else 14)
    out = capsys.readouterr().out
    assert ("tools again: 14 calls of 14 rollouts, the same\n" in out) == same
    assert ("step 1 train group 1 rollout 0 turn 0: " in out) != same
    about = (run / "run.json").read_text()
    (run / "run.json").write_text(re.sub('"max_seconds": *null', '"max_seconds": 1e-9', about))
    assert call_again(run) == 14
    assert " 0 answers are not the same twice, 14 rollouts could" in capsys.readouterr().out


async def asks(task: Any, *, base_url: str, api_key: str, model: str) -> str:
    """Has two conversations at once, which begin in any order."""

    async def one(*messages: Any) -> str:
        await asyncio.sleep(random.random() / 20)
        said = await client.chat.completions.create(model=model, messages=messages)
        told = said.choices[0].message.model_dump(include={"role", "content"})
        more = told, {"role": "user", "content": f"You said {told['content']}."}
        return str(told) if len(messages) > 1 else await one(*messages, *more)

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        asked = [one({"role": "user", "content": f"{n}: {task['question']}"}) for n in "12"]
        return " ".join(await asyncio.gather(*asked))


def test_conversations_of_a_program_are_the_same_in_any_order(play: Any) -> None:
    own = ("agent.kind=program", f"agent.options.call={__name__}:asks")
    run = play("run", *own, "rollout.max_turns=9", "rollout.deterministic=false")
    assert call_again(run) == 0
    with pytest.raises(ValueError, match="--again seven: expected steps of 1 to 2, as 7 or 7-9"):
        play_again(run, "seven")


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("seed=0", "no line that both have"),
        ("seed=5", "step 0 train group 1 rollout 0: task is .*: by seed or the data"),
        ("rollout.max_turns=1", "step 0 heldout group 0 rollout 0 turn 1: one has ended, completed "
         "and truncated_turns: by rollout.max_turns or a limit"),
        ("rollout.max_observation_tokens=1", "step 1 heldout group 0 rollout 0 turn 1 token 8 of "
         "what it was shown before: by rollout.max_observation_tokens or a tool's answer"),
        ("rollout.group_size=3", "step 0 train group 0 rollout 0 turn 1 token 0: its log-prob"),
        ("loss.scale_rewards=none", "step 0 train group . rollout .: advantage is .*: by "
         "loss.scale_rewards or the learner, after the same rollouts"),
        ("reward.format=0.5 eval_every=2 loss.beta=0.1 learner.learning_rate=1e-9 steps=3",
         "step 0 heldout group 0 .*: by steps or eval_every or .* or 2 more that differ or the"),
    ],
)  # fmt: skip
def test_two_runs_part_where_a_setting_makes_them(
    setting: str, parts: str, play: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = play("one"), play("other", *setting.split())
    assert cli.main(["view", str(one), str(other)]) == 0
    said = capsys.readouterr().out
    assert re.search(f"they part at {parts}", said), said

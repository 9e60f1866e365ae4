"""Agents as people have them, unmodified, at the endpoint: what each becomes in rows.

Their versions are pinned in requirements-dev.txt. The quick tests of OpenAI's and Anthropic's own
clients are in test_play.py and test_apis.py.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentgrpo.inspect.verify import verify
from agentgrpo.records.rollouts import read_rollout
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.types import Status
from tests import tiny
from tests.playing import EOT
from tests.programs.clients import ENVIRONMENT, PROGRAMS
from tests.programs.test_play import CALL, alone, rows_of, turn
from tests.warm import Command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the clients' own packages
]


def called(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


THOUGHT = "<think>\nhm\n</think>\n\n"
TURNS = (f"{THOUGHT}first {CALL}", f" \n{CALL}{CALL}", " The answer is 3. ")
DONE = called("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 3"}')
SAYS: dict[str, Sequence[str]] = {
    "smolagents tools": (TURNS[0], TURNS[1], called("final_answer", '{"answer": "3"}')),
    "smolagents code": ("I add.\n<code>\nprint(add(1, 2))\n", "So.\n<code>\nfinal_answer(3)\n"),
    "mini-swe-agent": (THOUGHT + called("bash", '{"command":  "echo \\u00e9"}'), DONE),
    **dict.fromkeys(("agents", "agents streamed", "agents chat"), (*TURNS, "Again 3")),
}
ROWS = {"smolagents tools": [1, 1, 1], "smolagents code": [1, 1]}
"""How many turns each row has; smolagents writes calls and code in its own words: all fork."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def need(name: str) -> None:
    module = PROGRAMS[name][0]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: requirements-dev.txt")


@pytest.mark.parametrize("name", PROGRAMS)
def test_client_library_works_unchanged(name: str) -> None:
    """Every turn of a conversation that the client keeps is in one row, as it was sampled."""
    need(name)
    says = SAYS.get(name, TURNS)
    rollout = alone(PROGRAMS[name][1], lambda number, _: turn(says[number]), max_turn_tokens=400)
    assert (rollout.status, rollout.stats.get("program_failed")) == (Status.COMPLETED, None)
    assert "3" in str(rollout.answer)
    rows = [[text for is_sampled, text in row if is_sampled] for row in rows_of(rollout)]
    assert [len(row) for row in rows] == ROWS.get(name, [len(says)])
    assert [text for row in rows for text in row] == [f"{text}{EOT}" for text in says]


CONFIG = """
model = "{model}"
out_dir = "run"
steps = 1
eval_every = 0
[agent]
kind = "program"
options = {{ call = "tests.programs.clients:any_of_them", timeout_s = 240.0 }}
[rollout]
tasks_per_step = {count}
group_size = 2
max_turns = 9
max_turn_tokens = 12
[engine]
max_model_len = 4096
kv_cache_gib = 0.25
[learner]
learning_rate = 1e-3
max_tokens = 8192
[reward]
functions = ["length"]
[data]
train = "rows.jsonl"
heldout = "heldout.jsonl"
num_heldout = 1
"""


@pytest.mark.timeout(900)
def test_every_client_library_trains_a_real_model(tmp_path: Path) -> None:
    """Whatever a model of random weights makes of them, what it sampled is proven and learned."""
    names = [n for n in PROGRAMS if importlib.util.find_spec(PROGRAMS[n][0]) is not None]
    model = tiny.make_agent_dir(tmp_path / "model")
    (tmp_path / "c.toml").write_text(CONFIG.format(model=model, count=len(names)))
    told = model / "config.json"  # what the frameworks themselves say is long
    told.write_text(json.dumps({**json.loads(told.read_text()), "max_position_embeddings": 4096}))
    for file, ask in (("rows", names), ("heldout", names[:1])):
        lines = [f'{{"question": "{name}: 1 + 2?", "answer": "3"}}\n' for name in ask]
        (tmp_path / f"{file}.jsonl").write_text("".join(lines))
    root = str(Path(__file__).parents[2])
    environment = {**ENVIRONMENT, "PYTHONPATH": root}
    command = Command("-m", "agentgrpo.train", "c.toml", cwd=tmp_path, **environment)
    out, err = command.communicate(800)
    assert command.returncode == 0, out + err
    report = verify.verify_run(tmp_path / "run")
    assert report.faults == []
    assert report.learned == report.terms > 0
    turns: dict[str, int] = {}
    for line in read_lines(tmp_path / "run" / "rollouts.jsonl"):
        rollout = read_rollout(dict(line))
        name = rollout.task.messages[-1]["content"].partition(":")[0]
        sampled = sum(len(s.token_ids) for row in rollout.rows for s in row if s.sampled)
        assert sampled == sum(turn.sampled_tokens for turn in rollout.turns)
        turns[name] = turns.get(name, 0) + len(rollout.turns)
        probes = rollout.extra["probes"]  # the closed stream is one where it was not closed in time
        assert rollout.stats["probe_turns"] == len(probes) <= 2
        assert any("hello, world" in probe for probe in probes)
    assert set(turns) == set(names)
    assert all(turns.values())

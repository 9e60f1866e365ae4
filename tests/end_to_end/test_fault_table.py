"""Faults of user code, the resulting error message and the exit status.

A row is a place in the user's code, the fault, and the message. Each row runs the whole command
with a fake engine and learner (tests/quick.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentgrpo import cli
from agentgrpo.support.atomic_files import read_lines
from tests.quick import STAND_INS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MINE = """
import asyncio, os, sys, time
from agentgrpo.actions import Finish, Observation, RunCode
from agentgrpo.types import Task

def raises(): raise ValueError("by hand")  # here
def leaves(): sys.exit(0)  # here
def stops(): raise StopIteration  # here
def ends(): raise GeneratorExit  # here
def runs_out(): raise MemoryError  # here
def fails_to_compute(): raise FloatingPointError("0/0")  # here
def misses(): raise FileNotFoundError(2, "No such file or directory", "labels.csv")  # here
def speaks_long(): raise RuntimeError("line\\n" * 9999)  # here
def hangs(): open("hangs", "w"); time.sleep(10**6)  # here
def hangs_on():
    open("hangs", "w")
    while True:
        try: time.sleep(10**6)
        except BaseException: pass  # whatever is raised
def none(): return None
def text(): return "high"
def infinite(): return float("inf")
def unfinished(): return (x for x in ())
class Mute(Exception):
    def __str__(self): raise TypeError("no")
def mumbles(): raise Mute  # here

PLACE, FAULT = os.environ["FAULT"].split()

def at(place, value=None):
    return globals()[FAULT]() if place == PLACE else value

at("import")

class Env:
    def __init__(self): at("env.init")
    def tasks(self, split):
        asked = {"role": "user", "content": "Q"}
        return at("tasks", [Task(id=f"{split}/{i}", messages=(asked,), spec={}) for i in range(4)])
    def reset(self, task): return at("reset", Slow() if PLACE.startswith("async") else World())
    def close(self): at("env.close")

class World:
    def step(self, action): return at("step", Observation("seen"))
    def finish(self, answer): return at("finish", {"part": 1.0})
    def close(self): at("close")

class Slow:
    async def step(self, action): return await sleeps("async.step", Observation("seen"))
    async def finish(self, answer): return await sleeps("async.finish", {"part": 1.0})
    async def close(self): await sleeps("async.close")

async def sleeps(place, value=None):
    await asyncio.sleep(0)
    if place != "async.step" or PLACE != "async.task":
        return at(place, value)
    return (await asyncio.gather(sleeps_not()))[0]
async def sleeps_not(): return at("async.task", Observation("seen"))

class Agent:
    def __init__(self): at("agent.init")
    @property
    def stop(self): return at("stop", ())
    def messages(self, task): return at("messages", task.messages)
    def prefill(self, task): return at("prefill", "")
    def tools(self, task): return at("tools", ())
    def parse(self, text, task):
        return at("parse", RunCode(text) if "<code>" in text else Finish(text))
    def observe(self, action, observation):
        return at("observe", [{"role": "user", "content": observation.text}])

def reward(rollout): return at("reward", {"mine": 1.0})
async def later(rollout): return at("later", {"mine": 1.0})
def bonus(view): return at("bonus", 1.0)
async def judge(view): return await sleeps("judge", 1.0)

class Sampler:
    def __init__(self, chat, config): at("sampler.init")
    def rollout(self, engine, tasks, n, params): return at("rollout", [])

class Narrow:
    def __init__(self): pass
    def reset(self): pass
"""

BEFORE = {
    "import": "agent.kind: the module 'mine'",
    "env.init": "env.kind: Env",
    "tasks": "Env.tasks",
    "agent.init": "agent.kind: Agent",
    "messages": "Agent.messages",
    "prefill": "Agent.prefill",
    "tools": "Agent.tools",
    "stop": "agent.kind: Agent",
    "observe": "Agent.observe",
    "sampler.init": "rollout.sampler",
}
"""Places checked before the run starts, and their names in messages."""
DURING = {
    "reset": "Env.reset",
    "step": "World.step",
    "finish": "World.finish",
    "close": "World.finish",
    "async.step": "Slow.step",
    "async.task": "Slow.step",
    "async.finish": "Slow.finish",
    "async.close": "Slow.finish",
    "parse": "Agent.parse",
    "reward": "the reward reward",
    "later": "the reward later",
    "bonus": "the reward function bonus",
    "judge": "the reward function judge",
}
"""Places checked in a rollout."""
RAISED = {
    "raises": "raised ValueError: by hand",
    "leaves": r"called sys\.exit\(0\)",
}
MORE = {
    "stops": "raised StopIteration",
    "ends": "raised GeneratorExit",
    "runs_out": "raised MemoryError",
    "fails_to_compute": "raised FloatingPointError: 0/0",
    "misses": r"raised FileNotFoundError: \[Errno 2\] No such file or directory: 'labels.csv'",
    "speaks_long": r"raised RuntimeError: (line ){100}\.\.\.",
    "mumbles": "raised Mute: <its text is not available: TypeError>",
}
WRONG = {
    "tasks": {"none", "unfinished"}, "reset": {"none", "text"}, "step": {"none", "unfinished"},
    "finish": {"none", "text", "infinite"}, "async.step": {"text"}, "parse": {"none", "text"},
    "observe": {"none", "infinite"}, "reward": {"text", "infinite"},
}  # fmt: skip
"""Further faults per place: wrong return values, with their messages."""


def rows() -> Iterator[tuple[str, str, str]]:
    """Every place raises; each other fault occurs once in a sync and once in an async place."""
    yield from ((place, "raises", RAISED["raises"]) for place in (*BEFORE, *DURING))
    for place in ("import", "env.init", "step", "async.step", "bonus", "judge", "rollout"):
        yield place, "leaves", RAISED["leaves"]
    for place in ("step", "async.step"):
        more = {f: s for f, s in MORE.items() if (place, f) != ("async.step", "stops")}
        yield from ((place, fault, output) for fault, output in more.items())
    for place, faults in WRONG.items():
        for fault in sorted(faults):
            yield place, fault, "gave a wrong result: expected .*, got .*"
    yield "messages", "text", "gave a wrong result: expected messages, got 'high'"
    for place in ("messages", "later", "bonus", "judge", "rollout"):
        yield place, "infinite", "(gave a wrong result: expected|raised TypeError).*"
    yield "rollout", "raises", RAISED["raises"]
    yield "env.close", "raises", RAISED["raises"]


def write_user_module(folder: Path, model: Path) -> Path:
    """Write MINE and a config that uses all of it; returns the config's path."""
    (folder / "mine.py").write_text(MINE)
    config = folder / "c.toml"
    config.write_text(
        f'model = "{model}"\nout_dir = "{folder / "run"}"\nsteps = 2\neval_every = 0\n'
        '[env]\nkind = "mine:Env"\n[agent]\nkind = "mine:Agent"\n'
        '[data]\ntrain = "env"\nnum_heldout = 2\n[rollout]\ntasks_per_step = 2\ngroup_size = 2\n'
        '[reward]\nkind = "mine:reward"\non_error = "raise"\n'
        'functions = {"mine:bonus" = 1.0, "mine:judge" = 1.0}\n'
    )
    return config


@pytest.fixture
def run(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Any:  # fmt: skip
    config = write_user_module(tmp_path, tiny_model)
    monkeypatch.syspath_prepend(tmp_path)
    for name, stand_in in STAND_INS.items():
        monkeypatch.setattr(name, stand_in)

    def run(place: str, fault: str, *overrides: str) -> tuple[int, str, str]:
        monkeypatch.setenv("FAULT", f"{place} {fault}")
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        own = {"later": ["reward.kind=mine:later"]}.get(place, [])
        if place in ("rollout", "sampler.init"):
            own = ["rollout.sampler=mine:Sampler"]
        status = cli.main(["train", str(config), *own, *overrides])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def line_of(fault: str) -> str:
    """The line of a fault: of its raise, or of the function that returned a wrong value."""
    lines = MINE.splitlines()
    numbers = [
        n for n, line in enumerate(lines, 1) if f"def {fault}()" in line and "# here" in line
    ]
    return str(numbers[0]) if numbers else r"\d+"


@pytest.mark.parametrize("kind", ["reward", "later"])
def test_run_without_fault_succeeds(run: Any, kind: str) -> None:
    """Also calls its reward functions, one of which is a coroutine."""
    status, out, err = run("nowhere", "none", f"reward.kind=mine:{kind}")
    assert (status, err) == (0, "")
    assert "step 2/2  reward 4.00" in out


@pytest.mark.parametrize(("place", "fault", "output"), [*rows()])
def test_fault_of_user_code_names_function_line_and_task(
    run: Any, tmp_path: Path, place: str, fault: str, output: str
) -> None:
    status, _, err = run(place, fault)
    named = {**BEFORE, **DURING, "rollout": "Sampler.rollout", "env.close": "Env.close"}[place]
    where = rf"at {re.escape(str(tmp_path))}/mine\.py:{line_of(fault)}"
    task = r"task '(heldout|train)/\d', rollout [01], " if place in DURING else "(task '.*', )?"
    ended = "" if place in BEFORE else r"\. Nothing was saved: the same command starts from the.*"
    if place == "env.close":
        ended = r"\. The same command continues from .*step_000002\."
    assert re.fullmatch(rf"error: {named} {output} \({task}{where}\){ended}\n", err), err
    assert status == (2 if place in BEFORE else 3)
    if place == "env.close":
        assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 4

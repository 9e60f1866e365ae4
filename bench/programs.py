"""Measure the cost of agent programs against the native sampler: `python -m bench.programs`.

COUNT concurrent rollouts with TURNS turns of TOKENS tokens each, with the tiny model. The native
sampler and programs play the same; the programs' clients are another process that only speaks HTTP.
`--no-rows`: print only. Rows, in milliseconds of CPU per turn:

engine, direct      the sampler's and Engine.add_request()'s, on the engine's thread
engine, programs    the same with programs; Engine.step() is in neither
http, programs      the endpoint's thread: reading, rendering, encoding, decoding, writing

and in milliseconds of wall time:

wall                of each turn in total
start               a program with one request, from its start to its end, in a session that
                    preloads like config `program`
start: begin        a single program's session, listener and files
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentgrpo.config import EngineConfig, RolloutConfig
from agentgrpo.support.runtime import prepare_environment
from bench.engine_loop import Clock
from bench.harness import append_row

COUNT, TURNS, TOKENS = 256, 4, 64
STARTS = 128
PROGRAM = """import json, os, sys
from openai import OpenAI
task = json.load(sys.stdin)
messages = [{"role": "user", "content": task["question"]}]
OpenAI().chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
print("done")
"""


# --- clients, in a process of their own


async def talk(port: int, key: str) -> None:
    """One program: asks, appends the answer and a word, asks again; over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages: list[Any] = [{"role": "user", "content": "Count. " * 30}]
    for _ in range(TURNS):
        body = json.dumps(
            {"model": "policy", "messages": messages, "max_tokens": TOKENS, "stream": False}
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split()[0])
        said = json.loads(await reader.readexactly(length))
        messages += [said["choices"][0]["message"], {"role": "user", "content": "ok"}]
    writer.close()


async def clients() -> None:
    """Plays what is read from standard input, a line each, and says which has ended."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    running: set[asyncio.Task[None]] = set()

    async def run(number: int, port: int, key: str) -> None:
        try:
            await talk(port, key)
        finally:
            print(number, flush=True)

    while line := await lines.readline():
        task = asyncio.create_task(run(*json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)


class Elsewhere:
    """launch.Launcher whose programs are coroutines of that process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.programs", "--clients"], text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._running: dict[int, Future[Any]] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, task: Any, session: Any, endpoint: Any) -> Any:
        """Have it play one."""
        outcome: Future[Any] = Future()
        number = len(self._running)
        self._running[number] = outcome
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([number, endpoint.port, session.key]) + "\n")
        return SimpleNamespace(outcome=outcome, stop=lambda: outcome.cancel())

    def _listen(self) -> None:
        from agentgrpo.programs.launch import Outcome

        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._running[int(line)].set_result(Outcome("done"))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# --- what is measured


def thread_seconds(name: str) -> float:
    """CPU time of a thread of this process."""
    (thread,) = [t for t in threading.enumerate() if t.name == name]
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@contextmanager
def counted(engine: Any, clock: Clock) -> Iterator[None]:
    clock.spent.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", clock.timed(engine.step, "step"))
        patch.setattr(engine, "add_request", clock.timed(engine.add_request, "requests"))
        yield


def direct(engine: Any, chat: Any, clock: Clock) -> dict[str, float]:
    """Milliseconds of each turn of native play."""
    from agentgrpo.rollout.sampler import Sampler
    from bench.rollout import EveryTurnCalls, FixedLengths, Slowly, tasks

    sampler = Sampler(
        FixedLengths(engine, np.full((COUNT, TURNS), TOKENS)), EveryTurnCalls(),
        Slowly(np.zeros((COUNT, TURNS))), chat,
        RolloutConfig(max_turns=TURNS, max_turn_tokens=TOKENS),
        max_live=COUNT, max_tool_threads=8,
    )  # fmt: skip
    with counted(engine, clock):
        _, stats = clock.timed(sampler.play, "sampler")(tasks(COUNT), 1, seed=0)
    spent = clock.spent["sampler"] + clock.spent["requests"]
    return {"engine": spent, "wall": stats.total_s}


def by_programs(engine: Any, chat: Any, clock: Clock) -> dict[str, float]:
    """The same by programs."""
    from agentgrpo.programs.play import ProgramSampler
    from bench.rollout import tasks

    launcher: Any = Elsewhere()
    agent: Any = SimpleNamespace(read_calls=None, timeout_s=600.0)
    env: Any = SimpleNamespace(reset=lambda task: play_episode())
    config = RolloutConfig(max_turns=TURNS, max_turn_tokens=TOKENS + 1)
    sampler = ProgramSampler(engine, agent, launcher, env, chat, config, max_live=COUNT)
    sampler.play(tasks(8), 1, seed=1)  # warm: the endpoint is there
    engine.reset_prefix_cache()
    before = thread_seconds("endpoint")
    with counted(engine, clock):
        groups, stats = clock.timed(sampler.play, "sampler")(tasks(COUNT), 1, seed=0)
    http = thread_seconds("endpoint") - before
    assert sum(len(g.rollouts[0].turns) for g in groups) == COUNT * TURNS
    sampler.close()
    launcher.close()
    spent = clock.spent["sampler"] + clock.spent["requests"]
    return {"engine": spent, "http": http, "wall": stats.total_s}


def play_episode() -> Any:
    from agentgrpo.envs.answer import AnswerEnv
    from agentgrpo.types import Task

    return AnswerEnv().reset(Task(id="", messages=(), spec={}))


def starts() -> dict[str, list[float]]:
    """Milliseconds of each program that begins in a session and asks once."""
    from agentgrpo.agents.program import ProgramAgent
    from agentgrpo.config import SandboxConfig
    from agentgrpo.envs.answer import AnswerEnv
    from agentgrpo.programs.launch import Sandboxed
    from agentgrpo.programs.play import ProgramSampler
    from agentgrpo.train.prepare import open_sandbox
    from tests.playing import CHAT, EOT, scripted, tasks
    from tests.rollout.stubs import Turn

    preload = ("openai", "openai.resources.chat.chat")
    config = SandboxConfig(site_dirs=("own",), preload=preload, memory_mib=512, max_live=16)
    with tempfile.TemporaryDirectory() as folder, open_sandbox(config) as pool:
        file, command = Path(folder) / "agent.py", ["python", "agent.py"]
        file.write_text(PROGRAM)
        nothing: Any = lambda parser: None  # noqa: E731
        agent = ProgramAgent(pool=pool, call_reader=nothing, command=command, files=[file])
        engine: Any = scripted(lambda *_: Turn(f"x{EOT}"))
        sandboxed = Sandboxed(pool, command, [file], 60.0)
        sampler = ProgramSampler(
            engine, agent, sandboxed, AnswerEnv(), CHAT, RolloutConfig(), max_live=16
        )
        sampler.play(tasks(4), 1, seed=0)
        _, stats = sampler.play(tasks(STARTS), 1, seed=0)
        sampler.close()
    return {"start": [1e3 * stats.total_s / STARTS]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", action="store_true", help="be the clients' process")
    parser.add_argument("--no-rows", action="store_true", help="print and write nothing")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-starts", action="store_true", help="no programs in sessions")
    arguments = parser.parse_args()
    if arguments.clients:
        asyncio.run(clients())
        return
    prepare_environment()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def row(variant: str, values: list[float], unit: str) -> None:
        if arguments.no_rows:
            print(f"{variant:28s} {np.median(values):8.3f} {unit}")
        else:
            append_row("programs", variant, values, unit=unit, shape={"programs": COUNT})

    for how, per_turn in played(arguments.repeats).items():
        for what, seconds in per_turn.items():
            unit = "ms" if what == "wall" else "ms CPU"
            row(f"tiny: {what}, {how}", [1e3 * s / COUNT / TURNS for s in seconds], unit)
    if not arguments.no_starts:
        for name, milliseconds in starts().items():
            row(name, milliseconds, "ms")


def played(repeats: int) -> dict[str, dict[str, list[float]]]:
    """By way of playing: seconds of all turns, of each repetition."""
    from agentgrpo.engine.engine import Engine
    from bench.rollout import make_chat
    from tests import tiny

    with tempfile.TemporaryDirectory() as folder:
        model = tiny.make_model_dir(Path(folder))
        chat = make_chat(str(model))
        config = EngineConfig(max_model_len=1024, kv_cache_gib=1.0, max_num_seqs=COUNT)
        engine, clock = Engine(model, config), Clock()
        ways = {"direct": direct, "programs": by_programs}
        found: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():  # in turns: both have the same neighbours
                for what, seconds in way(engine, chat, clock).items():
                    found[name].setdefault(what, []).append(seconds)
                engine.reset_prefix_cache()
        engine.shutdown()
    return found


if __name__ == "__main__":
    main()

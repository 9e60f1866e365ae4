"""Do environments wait for one another, and what do a reset and a reward cost?

    python -m bench.worlds [--no-rows]

waiting: 64 rollouts of 3 turns whose world takes 200 ms each time, with an engine that answers at
once: the wall seconds of all, where one after another they would take 38.4 s. episode: reset and
reward of tau-bench and tau2, over all tasks of a split, the ground truth's calls made in between
and not counted; CPU time of this thread.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agentgrpo.actions import Action, CallTools, Observation, ToolCall
from agentgrpo.agents.code import CodeAgent
from agentgrpo.config import RolloutConfig
from agentgrpo.envs.tau2 import Tau2Env
from agentgrpo.envs.tau_bench import TRANSFER, TauBenchEnv
from agentgrpo.rollout import generate
from agentgrpo.types import Task
from bench import real_tau_bench
from bench.harness import append_row
from tests.rollout.stubs import StubEngine, Turn
from tests.tiny import make_tokenizer

WAIT_S, ROLLOUTS, TURNS, REPEATS = 0.2, 64, 3, 5


class Waiting:
    """A world that takes its time on a thread."""

    def reset(self, task: Task) -> Waiting:
        return self

    def step(self, action: Action) -> Observation:
        time.sleep(WAIT_S)
        return Observation("there")

    def finish(self, answer: str | None) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...


class AsyncWaiting:
    """A world that takes its time on the event loop."""

    def reset(self, task: Task) -> AsyncWaiting:
        return self

    async def step(self, action: Action) -> Observation:
        await asyncio.sleep(WAIT_S)
        return Observation("there")

    async def finish(self, answer: str | None) -> Mapping[str, float]:
        return {}

    async def close(self) -> None: ...


def wait_together(env: Any) -> float:
    """Wall seconds of all rollouts."""
    tokenizer = make_tokenizer()

    def policy(number: int, prompt: str) -> Turn:
        done = prompt.count("there") == TURNS
        return Turn("Answer: 1<|im_end|>" if done else "<code>1</code>")

    engine = cast(Any, StubEngine(tokenizer, policy))
    task = Task(id="t", messages=({"role": "user", "content": "Q"},), spec={})
    config = RolloutConfig(max_turns=9, max_turn_tokens=64)
    agent = CodeAgent(system_prompt="")
    started = time.perf_counter()
    (group,) = generate(
        [task], engine, agent, ROLLOUTS, env=env, tokenizer=tokenizer, config=config
    )
    seconds = time.perf_counter() - started
    assert [r.stats["tool_calls"] for r in group.rollouts] == [TURNS] * ROLLOUTS
    return seconds


def cost(env: Any, tasks: Sequence[Task], actions: Callable[[Any], Sequence[Any]]) -> list[float]:
    """CPU milliseconds of reset and reward of each task, the second time it is played."""
    found = []
    for again in (False, True):
        for task in tasks:
            start = time.thread_time()
            episode = env.reset(task)
            spent = time.thread_time() - start
            for action in actions(episode):
                episode.step(CallTools((ToolCall(*action),)))
            start = time.thread_time()
            episode._done = True
            solved = episode.finish(None)["solved"]
            spent += time.thread_time() - start
            if again:
                found.append(1e3 * spent)
            assert solved in (0.0, 1.0)
    return found


def of_tau_bench(episode: Any) -> list[Any]:
    return [(a.name, a.kwargs) for a in episode._upstream.actions if a.name != TRANSFER]


def of_tau2(episode: Any) -> list[Any]:
    actions = episode._task.evaluation_criteria.actions or []
    return [(action.name, action.arguments) for action in actions]


def main(arguments: Sequence[str]) -> None:
    """Measure, print and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-rows", action="store_true", help="print only")
    args = parser.parse_args(arguments)
    rows: list[tuple[str, list[float], str, dict[str, int]]] = []
    shape = {"rollouts": ROLLOUTS, "turns": TURNS, "wait_ms": int(1e3 * WAIT_S)}
    for name, env in (("async", AsyncWaiting()), ("threads", Waiting())):
        seconds = [wait_together(env) for _ in range(REPEATS)]
        rows.append((f"waiting_{name}", seconds, "s", shape))
    sys.path.insert(0, str(real_tau_bench.folder()))
    for domain, split in (("retail", "train"), ("retail", "test"), ("airline", "test")):
        world = TauBenchEnv(domain)
        tasks = world.tasks(split)
        values = cost(world, tasks, of_tau_bench)
        rows.append((f"episode_tau_bench_{domain}_{split}", values, "ms", {"tasks": len(tasks)}))
    for domain in ("retail", "airline", "telecom"):
        env2 = Tau2Env(domain)
        tasks = env2.tasks("train")
        values = cost(env2, tasks, of_tau2)
        rows.append((f"episode_tau2_{domain}", values, "ms", {"tasks": len(tasks)}))
    for name, values, unit, where in rows:
        if args.no_rows:
            middle = sorted(values)[len(values) // 2]
            print(f"{name:36s} {middle:8.3g} {unit}  mean {sum(values) / len(values):.3g}  {where}")
        else:
            note = f"mean {sum(values) / len(values):.4g}, largest {max(values):.4g}"
            append_row("worlds", name, values, unit=unit, shape=where, note=note)


if __name__ == "__main__":
    main(sys.argv[1:])

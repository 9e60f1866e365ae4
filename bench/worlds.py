"""What do a reset and a reward of tau-bench and tau2 cost?

    python -m bench.worlds [--no-rows]

Over all tasks of a split; the ground truth's calls are made in between and not counted. CPU time of
this thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from agentgrpo.actions import CallTools, ToolCall
from agentgrpo.envs.tau2 import Tau2Env
from agentgrpo.envs.tau_bench import TRANSFER, TauBenchEnv
from agentgrpo.types import Task
from bench import real_tau_bench
from bench.harness import append_row


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
    rows: list[tuple[str, list[float], dict[str, int]]] = []
    sys.path.insert(0, str(real_tau_bench.folder()))
    for domain, split in (("retail", "train"), ("retail", "test"), ("airline", "test")):
        world = TauBenchEnv(domain)
        tasks = world.tasks(split)
        values = cost(world, tasks, of_tau_bench)
        rows.append((f"episode_tau_bench_{domain}_{split}", values, {"tasks": len(tasks)}))
    for domain in ("retail", "airline", "telecom"):
        env2 = Tau2Env(domain)
        tasks = env2.tasks("train")
        values = cost(env2, tasks, of_tau2)
        rows.append((f"episode_tau2_{domain}", values, {"tasks": len(tasks)}))
    for name, values, where in rows:
        if args.no_rows:
            middle = sorted(values)[len(values) // 2]
            print(f"{name:36s} {middle:8.3g} ms  mean {sum(values) / len(values):.3g}  {where}")
        else:
            note = f"mean {sum(values) / len(values):.4g}, largest {max(values):.4g}"
            append_row("worlds", name, values, unit="ms", shape=where, note=note)


if __name__ == "__main__":
    main(sys.argv[1:])

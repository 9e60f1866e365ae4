"""Check task folders: the solution must score 1, and doing nothing 0."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from agentgrpo.actions import InfrastructureError
from agentgrpo.envs.harbor import HarborEnv
from agentgrpo.envs.harbor_tasks import INSTALLS, files_of, folders_of, make_row
from agentgrpo.sandbox import SandboxException, SandboxPool
from agentgrpo.sandbox.session.dockerfile import Builder
from agentgrpo.types import Task

NOT_AVAILABLE = {
    "nested containers": (b"docker ", b"podman "), "systemd": (b"systemctl",),
    "ptrace": (b"strace", b"gdb "), "mount": (b"mount ",),
    "a network": INSTALLS,
}  # fmt: skip
"""What sessions do not offer, with words of scripts that need it: hints for a failed check."""


def check(folder: Path, env: HarborEnv, builder: Builder) -> str:
    """Return a task's problem, or "" if its solution (if any) scores 1 and doing nothing 0."""
    try:
        row = make_row(folder, builder, env.grant)
        task = Task(id=folder.name, messages=(), spec=row)
        with closing(env.reset(task)) as idle:
            idle_reward = _score(idle)
        if not _has_solution(folder):
            return (
                f"nothing {idle_reward:g}, expected 0\n{idle.output[-600:]}" if idle_reward else ""
            )
        with closing(env.reset(task)) as solved:
            finished = solved.solve()
            problem = (
                "" if finished else f"; solve.sh did not end by itself: {solved.output[-600:]}"
            )
            score = _score(solved)
    except (ValueError, SandboxException, InfrastructureError) as error:
        return str(error)
    if idle_reward == 0 and score == 1:
        return ""
    scripts = b"".join(
        data for part in ("tests", "solution") for data, _ in files_of(folder / part).values()
    )
    used = [name for name, words in NOT_AVAILABLE.items() if any(word in scripts for word in words)]
    hint = f"; its scripts use {' and '.join(used)}, which sessions do not have" if used else ""
    tail = (solved if score != 1 else idle).output[-600:]
    rewards = f"solution {score:g}, expected 1; nothing {idle_reward:g}, expected 0"
    return f"{rewards}{hint}{problem}\n{tail}"


def _has_solution(folder: Path) -> bool:
    return (folder / "solution/solve.sh").is_file()


def _score(episode: Any) -> float:
    return float(sum(episode.finish(None).values()))


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns 0 if all folders pass."""
    parser = argparse.ArgumentParser(prog="agentgrpo harbor", description=__doc__)
    parser.add_argument("action", choices=["check"])
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--network", action="store_true", help="build images with network access")
    parser.add_argument("--verifier", choices=["fresh", "same"], default="fresh")
    parser.add_argument("--keep", action="append", default=[], metavar="PATH")
    parser.add_argument("--grant", action="append", default=[], metavar="VARIABLE")
    args = parser.parse_args(arguments)
    failed = 0
    try:
        folders = [folder for source in args.folder for folder in folders_of(source)]
        with (
            SandboxPool(max_live=4, min_idle=0, zygotes=1) as pool,
            Builder(network=args.network) as builder,
            closing(
                HarborEnv(pool, 60.0, verifier=args.verifier, keep=args.keep, grant=args.grant)
            ) as env,
        ):
            for folder in folders:
                problem = check(folder, env, builder)
                failed += bool(problem)
                solution = "solution 1" if _has_solution(folder) else "no solution/solve.sh"
                print(f"{folder.name}: {problem or f'ok: {solution}, nothing 0'}", flush=True)  # noqa: T201
    except (ValueError, SandboxException) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print(f"{len(folders)} tasks, {failed} cannot be played")  # noqa: T201
    return int(failed > 0)

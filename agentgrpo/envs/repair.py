"""A broken package in a sandbox, to be repaired; its own tests decide (repair_judge.py)."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from agentgrpo.actions import InfrastructureError, Schema
from agentgrpo.envs.console import ConsoleEpisode
from agentgrpo.envs.graded import partial_credit
from agentgrpo.envs.python import PythonEnv, SandboxEpisode, as_infra_error
from agentgrpo.envs.repair_judge import REPO, Answer, Tree, answer_in, judge, patch, prepare, put
from agentgrpo.envs.shell_tools import ShellEpisode
from agentgrpo.sandbox import HostTools, SandboxPool, Session
from agentgrpo.types import Task

VERDICT_S = 30.0  # of a processor, for the tests of an answer


class RepairEnv(PythonEnv):
    """Episodes in ~/repo, by code, tools (read, search, replace, run_tests) or a console's lines.

    Args:
        pool: what the packages' pools are made like.
        timeout_s: of one step.
        partial: less than all is worth its share of the tests that were broken.
        answer: what counts: the files of the tree; or the answer's text, which is the one line that
            the question asks for, or of a program what RepairEpisode.changed() gave it.
        console: the agent types lines (agent.kind = "repl").
        host_tools: as for PythonEnv.
    """

    answers: tuple[str, ...] = ("code", "tools", "lines")
    judges = True

    def __init__(
        self, pool: SandboxPool, timeout_s: float, *, partial: bool = False, console: bool = False,
        answer: Literal["tree", "line", "changed"] = "tree", host_tools: HostTools | None = None,
    ) -> None:  # fmt: skip
        super().__init__(pool, timeout_s, host_tools=host_tools)
        if pool.degraded:
            raise ValueError("env.kind: 'repair' needs namespaces, and this machine makes none")
        self.partial, self.answer, self.console = partial, answer, console
        self.line_rewards: dict[str, float] = {}
        self._rooms: dict[str, tuple[Tree, SandboxPool]] = {}
        self._lock = threading.Lock()

    def tools(self, task: Task) -> Sequence[Schema]:
        return RepairEpisode(self, task).toolset().schemas

    def reset(self, task: Task) -> Any:
        needed = {"source", "tree", "diff", "tests", "others", "copies", "file", "line"}
        missing = needed - task.spec.keys()
        if missing:
            raise ValueError(f"task {task.id}: no row of a repair task, it has no {missing}")
        episode: Any = RepairConsole(cast(Any, self)) if self.console else RepairEpisode(self, task)
        episode._task = task
        return episode

    def room(self, task: Task) -> tuple[Tree, SandboxPool]:
        """A task's package and its sessions, made at their first use."""
        source, like = task.spec["source"], self.pool
        with self._lock:
            if source not in self._rooms:
                tree, live = prepare(source), {"max_live": like.max_live, "min_idle": 2}
                pool = tree.pool(like.template, like.limits, **live, all_cpus=like.all_cpus)
                self._rooms[source] = tree, pool
            if self._rooms[source][0].digest != task.spec["tree"]:
                raise ValueError(f"task {task.id}: {source} has changed since it was made of it")
            return self._rooms[source]

    def close(self) -> None:
        for _, pool in self._rooms.values():
            pool.close()


class Repairing(SandboxEpisode):
    """One rollout's repository, however it acts there."""

    _env: Any
    _session: Any
    _task: Task
    feedback = ""
    measures: dict[str, float] = {}
    """tests_alone: 1 if the tests passed, but copies of them did not end as expected."""

    def _broken(self) -> Answer:
        diff, (tree, self._pool) = self._task.spec["diff"], self._env.room(self._task)
        files = re.findall(r"^--- a/(.*)$", diff, re.MULTILINE)
        return {path: patch(tree.read(path), path, diff) for path in files}

    def _begin(self) -> Session:
        broken, session = self._broken(), super()._begin()
        with contextlib.closing(session.files()) as files:
            put(files, broken)
        return session

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """`solved`: all broken tests pass, and no other fails; `partial`: the share of those."""
        given, (tree, pool) = self._broken(), self._env.room(self._task)
        with as_infra_error():
            changed = self._answer(given, answer)
            self.close()  # nothing of it runs beside the verdict, which has its place in the pool
            if changed == given:
                self.feedback = "nothing was changed"
                return partial_credit(0.0)
            spec, partial = self._task.spec, self._env.partial
            share, verdict = judge(pool, tree, spec, changed, VERDICT_S, partial=partial)
        self.feedback = verdict.reason
        self.measures = {"tests_alone": float(verdict.word == "tests alone")}
        if verdict.reason and self._env.answer != "tree":  # it is not shown the tests
            self.feedback = "not all of the tests that have to pass do"
        if verdict.infra_error:
            raise InfrastructureError(verdict.reason)
        return partial_credit(share)

    def _answer(self, given: Answer, answer: str | None) -> Answer:
        if self._env.answer == "tree":
            alive = self._session is not None and self._session.alive
            return answer_in(self._session, given) if alive else given
        if self._env.answer == "changed":
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                told = dict(json.loads(answer or "{}"))
                given = {path: str(told.get(path, text)) for path, text in given.items()}
            return given
        path, number = self._task.spec["file"], self._task.spec["line"]
        lines = given[path].splitlines(True)
        old, new = lines[number - 1].strip(), (answer or "").strip("\r\n` \t")
        if new and "\n" not in new:
            lines[number - 1] = lines[number - 1].replace(old, new)
        return {**given, path: "".join(lines)}


class RepairConsole(Repairing, ConsoleEpisode):
    """At a console."""


class RepairEpisode(Repairing, ShellEpisode):
    """By code or tools, in any order."""

    directory = REPO
    searched = "--include='*.py'"

    def changed(self) -> str:
        """What it has made of the broken files, as the answer of a program that plays in it."""
        return json.dumps(answer_in(self._session, self._broken()))

    def functions(self) -> list[Callable[..., str]]:
        return [*super().functions(), self.run_tests]

    def run_tests(self, tests: str = "") -> str:
        """Run tests by pytest: files or names as it takes them; all if none is named."""
        return self._shell(f"python -m pytest -q -x --tb=short {tests} 2>&1 | tail -n 60")

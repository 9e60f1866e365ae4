"""Repair a broken package in a sandbox. The package's tests decide (repair_judge.py)."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from agentgrpo.actions import Schema
from agentgrpo.envs.console import ConsoleEpisode
from agentgrpo.envs.graded import partial_credit
from agentgrpo.envs.python import PythonEnv, SandboxEpisode, as_infra_error
from agentgrpo.envs.repair_judge import REPO, Answer, Tree, answer_in, judge, patch, prepare, write
from agentgrpo.envs.shell_tools import ShellEpisode
from agentgrpo.sandbox import HostTools, SandboxPool, Session
from agentgrpo.types import Task

VERDICT_S = 30.0  # CPU seconds for the tests of an answer


class RepairEnv(PythonEnv):
    """Episodes in ~/repo, with code, tools (read, search, replace, run_tests) or a console.

    Args:
        pool: template of the packages' pools.
        timeout_s: limit of one step, in seconds.
        partial: reward a partial repair with the share of broken tests that pass.
        answer: what is scored: "tree", the files of the tree; "line", the answer's text as the line
            that the question asks for; "changed", the answer of a program with the value of
            RepairEpisode.changed().
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
            raise ValueError(
                "env.kind: 'repair' needs namespaces, which this machine does not have"
            )
        self.partial, self.answer, self.console = partial, answer, console
        self.line_rewards: dict[str, float] = {}
        self._pools: dict[str, tuple[Tree, SandboxPool]] = {}
        self._lock = threading.Lock()

    def tools(self, task: Task) -> Sequence[Schema]:
        return RepairEpisode(self, task).toolset().schemas

    def reset(self, task: Task) -> Any:
        needed = {"source", "tree", "diff", "tests", "others", "copies", "file", "line"}
        missing = needed - task.spec.keys()
        if missing:
            raise ValueError(
                f"task {task.id}: expected a row of a repair task, got none of {missing}"
            )
        episode: Any = RepairConsole(cast(Any, self)) if self.console else RepairEpisode(self, task)
        episode._task = task
        return episode

    def tree_and_pool(self, task: Task) -> tuple[Tree, SandboxPool]:
        """A task's package and its pool of sessions, made at their first use."""
        source, base = task.spec["source"], self.pool
        with self._lock:
            if source not in self._pools:
                tree, options = prepare(source), {"max_live": base.max_live, "min_idle": 2}
                pool = tree.pool(base.template, base.limits, **options, all_cpus=base.all_cpus)
                self._pools[source] = tree, pool
            if self._pools[source][0].digest != task.spec["tree"]:
                raise ValueError(f"task {task.id}: {source} has changed since the task was made")
            return self._pools[source]

    def close(self) -> None:
        for _, pool in self._pools.values():
            pool.close()


class Repairing(SandboxEpisode):
    """The repository of one rollout, for all ways to act."""

    _env: Any
    _session: Any
    _task: Task
    feedback = ""
    measures: dict[str, float] = {}
    """tests_alone: 1 if the tests passed, but copies of them did not end as expected."""

    def _broken_files(self) -> Answer:
        diff, (tree, self._pool) = self._task.spec["diff"], self._env.tree_and_pool(self._task)
        files = re.findall(r"^--- a/(.*)$", diff, re.MULTILINE)
        return {path: patch(tree.read(path), path, diff) for path in files}

    def _begin(self) -> Session:
        broken, session = self._broken_files(), super()._begin()
        with contextlib.closing(session.files()) as files:
            write(files, broken)
        return session

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """`solved`: all broken tests pass, and no other fails; `partial`: the share that passes."""
        broken, (tree, pool) = self._broken_files(), self._env.tree_and_pool(self._task)
        with as_infra_error():
            changed = self._repaired_files(broken, answer)
            self.close()  # frees a place in the pool, and no process runs during the verdict
            if changed == broken:
                self.feedback = "nothing was changed"
                return partial_credit(0.0)
            spec, partial = self._task.spec, self._env.partial
            share, verdict = judge(pool, tree, spec, changed, VERDICT_S, partial=partial)
        self.feedback = verdict.reason
        self.measures = {"tests_alone": float(verdict.word == "tests alone")}
        if verdict.reason and self._env.answer != "tree":  # the policy does not see the tests
            self.feedback = "not all of the tests that have to pass do"
        return partial_credit(share)

    def _repaired_files(self, broken: Answer, answer: str | None) -> Answer:
        if self._env.answer == "tree":
            alive = self._session is not None and self._session.alive
            return answer_in(self._session, broken) if alive else broken
        if self._env.answer == "changed":
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                texts = dict(json.loads(answer or "{}"))
                broken = {path: str(texts.get(path, text)) for path, text in broken.items()}
            return broken
        path, number = self._task.spec["file"], self._task.spec["line"]
        lines = broken[path].splitlines(True)
        old, new = lines[number - 1].strip(), (answer or "").strip("\r\n` \t")
        if new and "\n" not in new:
            lines[number - 1] = lines[number - 1].replace(old, new)
        return {**broken, path: "".join(lines)}


class RepairConsole(Repairing, ConsoleEpisode):
    """A repair with console lines."""


class RepairEpisode(Repairing, ShellEpisode):
    """A repair with code steps and tools in any order."""

    directory = REPO
    grep_options = "--include='*.py'"

    def changed(self) -> str:
        """The current text of the broken files, as the answer of a program."""
        return json.dumps(answer_in(self._session, self._broken_files()))

    def functions(self) -> list[Callable[..., str]]:
        return [*super().functions(), self.run_tests]

    def run_tests(self, tests: str = "") -> str:
        """Run tests by pytest: files or names as it takes them; all if none is named."""
        return self._shell(f"python -m pytest -q -x --tb=short {tests} 2>&1 | tail -n 60")

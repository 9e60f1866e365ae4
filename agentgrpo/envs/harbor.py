"""Task folders in Harbor's format: sessions of the task's image, scored by its hidden tests."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, cast

from agentgrpo.actions import Action, Observation, Schema
from agentgrpo.envs.console import ConsoleEpisode
from agentgrpo.envs.graded import partial_credit
from agentgrpo.envs.harbor_tasks import HarborTask, files_of, read_task
from agentgrpo.envs.python import PythonEnv, SandboxEpisode, as_infra_error
from agentgrpo.envs.shell_tools import ShellEpisode
from agentgrpo.sandbox import (
    Limits,
    NotSupportedException,
    SandboxException,
    SandboxInfraError,
    SandboxPool,
    Session,
    Template,
)
from agentgrpo.sandbox.isolation.images import PATH, Image, get_image
from agentgrpo.sandbox.isolation.snapshots import Keep, Kept
from agentgrpo.sandbox.session.interpreters import start_context
from agentgrpo.sandbox.session.program import Program
from agentgrpo.types import Task

SYSTEM_PATHS = (
    *("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "run", "boot", "dev", "proc"),
    *("sys", "var/lib/dpkg", "var/lib/apt", "var/cache", "root/.*", "home/*/.*"),
)
"""Paths that affect how tests run. A fresh verdict ignores the agent's changes of them."""
HARBOR_PATHS = ("tests", "logs", "solution", "installed-agent")
"""Harbor's paths, always ignored. The last one has the files of an agent program."""
OFFLINE = {"PIP_RETRIES": "0", "UV_OFFLINE": "1"}
"""Variables for scripts, so that installers without network access fail at once."""
VERDICT_WAIT_S = 7200.0
"""How long a verdict may wait for a session: verdicts before it may take that long."""


def changes_to_keep(image: Image, keep: Sequence[str]) -> Keep:
    """Select the agent's changes for a fresh verdict: those below `keep`. Without `keep`, all
    except SYSTEM_PATHS, the directories of PATH and files directly in the root directory.
    """
    kept_paths = [os.path.normpath(path).strip("/") for path in keep]
    below = f"/{image.workdir.strip('/')}/"
    prefixes = [
        os.path.normpath(path).removesuffix("/bin").removesuffix("/sbin").strip("/")
        for path in image.env.get("PATH", PATH).split(":")
    ]
    programs = [prefix for prefix in prefixes if prefix and not below.startswith(f"/{prefix}/")]
    ignored_patterns = [*HARBOR_PATHS, *([] if kept_paths else [*SYSTEM_PATHS, *programs])]

    def decide(path: str, is_directory: bool) -> Kept:
        parts = path.split("/")
        for pattern in ignored_patterns:
            if fnmatchcase("/".join(parts[: pattern.count("/") + 1]), pattern):
                return Kept.NO
        for pattern in (*ignored_patterns, *kept_paths):
            above = pattern.split("/")[:-1][: len(parts)]
            if not path or (len(above) == len(parts) and fnmatchcase(path, "/".join(above))):
                return Kept.PARTLY if is_directory else Kept.NO
        if kept_paths:
            is_kept = any(f"{path}/".startswith(f"{kept_path}/") for kept_path in kept_paths)
        else:
            is_kept = is_directory or len(parts) > 1
        return Kept.ALL if is_kept else Kept.NO

    return decide


class HarborEnv(PythonEnv):
    """Episodes in a session of an image: bash, tools (read, search, replace, run) or a console.

    Args:
        pool: template of the images' pools.
        timeout_s: limit of one step, in seconds.
        verifier: "fresh": the tests run in a new session with the agent's changes except those of
            system paths. "same": they run in the agent's session, as in Harbor;
            docs/environments.md lists the cheats that then succeed.
        keep: a fresh verdict uses only the agent's changes below these paths.
        console: the agent types lines at the image's python3 (agent.kind = "repl").
        grant: environment variables of this process that ${NAME} in a task.toml may read.
    """

    answers: tuple[str, ...] = ("code", "tools", "lines")
    unread = tuple(
        f"sandbox.{name}" for name in ("memory_mib", "template", "site_dirs", "env", "stateless")
    )
    needs_actions = True
    hosts_programs = True
    judges = True

    def __init__(
        self, pool: SandboxPool, timeout_s: float, *, verifier: Literal["fresh", "same"] = "fresh",
        keep: Sequence[str] = (), console: bool = False, grant: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(pool, timeout_s)
        if pool.degraded:
            raise ValueError(
                "env.kind: 'harbor' needs namespaces, which this machine does not have"
            )
        if invalid_paths := [
            path for path in keep if not path.startswith("/") or not path.strip("/")
        ]:
            raise ValueError(f"keep: expected absolute paths below /, got {invalid_paths[0]!r}")
        self.verifier, self.keep, self.grant = verifier, tuple(keep), tuple(grant)
        self._needs_python = console
        self.console, self.answers = console, ("lines",) if console else ("code", "tools")
        self.line_rewards: dict[str, float] = {}
        self._tasks: dict[str, tuple[HarborTask, Image, Image]] = {}
        self._pools: dict[Limits, SandboxPool] = {}
        self._lock = threading.Lock()

    def require_language(self, language: str) -> None:
        if language != "bash":
            raise ValueError(f"language: expected 'bash' with env.kind 'harbor', got {language!r}")

    def tools(self, task: Task) -> Sequence[Schema]:
        return HarborEpisode(self, task).toolset().schemas

    def begin(self, task: Task) -> Task:
        """Check a row before a model is loaded: its folder, its image, and a session's start."""
        harbor, image, _ = self.folder(task)
        self._check_session(harbor, image)
        return task

    def require_python(self) -> None:
        """Check that all images have a python3, also those of tasks already checked."""
        self._needs_python = True
        for harbor, image, _ in self._tasks.values():
            self._check_session(harbor, image)

    def _check_session(self, harbor: HarborTask, image: Image) -> None:
        pool = self.sessions(harbor.limits, image)
        if self._needs_python:
            try:
                with pool.acquire(image) as session:
                    start_context(session, "python", Template()).close()
            except NotSupportedException as error:
                raise ValueError(f"{harbor.folder}: {error}") from error

    def reset(self, task: Task) -> Any:
        return HarborConsole(self, task) if self.console else HarborEpisode(self, task)

    def folder(self, task: Task) -> tuple[HarborTask, Image, Image]:
        """A row's task, its image and the image of its verdicts.

        Raises ValueError if they have changed since the row was made.
        """
        missing = {"folder", "image", "judge", "digest"} - task.spec.keys()
        if missing:
            raise ValueError(
                f"task {task.id}: expected a row of a harbor task, got none of {min(missing)!r}"
            )
        key = task.spec["folder"]
        with self._lock:
            if key not in self._tasks:
                harbor = read_task(Path(key), self.grant)
                image, judge = (get_image(task.spec[name]) for name in ("image", "judge"))
                if harbor.digest(judge) != task.spec["digest"]:
                    raise ValueError(f"task {task.id}: {key} has changed. Make the rows again")
                workdir = harbor.environment.workdir or image.workdir
                env = image.env | harbor.environment.env
                image = image._replace(workdir=workdir, env=env)
                self._tasks[key] = harbor, image, judge._replace(workdir=workdir, env=env)
            return self._tasks[key]

    def sessions(self, limits: Limits, image: Image) -> SandboxPool:
        with self._lock:
            if limits not in self._pools:
                self._pools[limits] = SandboxPool(
                    limits=limits, template=Template(image=image.name), min_idle=0, zygotes=1,
                    max_live=self.pool.max_live, all_cpus=self.pool.all_cpus,
                )  # fmt: skip
            return self._pools[limits]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class HarborSandboxEpisode(SandboxEpisode):
    """The common part of episodes with code, tools and a console."""

    _env: Any
    directory: Any
    restarted = "(the session was restarted: its files and variables are as at the start)"
    feedback = ""
    output = ""
    """Output of the tests' script, hidden from the policy and from teachers."""

    def _load_task(self, task: Task) -> None:
        self.measures: dict[str, float] = {}
        self.task, self.image, self.judge = self._env.folder(task)
        self.directory = self.image.workdir or "/"
        self._ends_at = math.inf

    @property
    def timeout_s(self) -> float:
        return float(self.task.agent.timeout_sec)

    def begin(self) -> Session:
        with as_infra_error():
            return self._begin()

    def step(self, action: Action) -> Observation:
        if time.monotonic() > self._ends_at:
            return Observation("the time of the task is over", failed=True, done=True)
        observation: Observation = super().step(action)  # type: ignore[safe-super]
        return observation

    def _begin(self) -> Session:
        self._pool = self._env.sessions(self.task.limits, self.image)
        self._session = session = self._pool.acquire(self._image or self.image)
        if self._ends_at == math.inf:
            self._ends_at = time.monotonic() + self.task.agent.timeout_sec
        self._cpu = session.cpu_seconds()
        return session

    def finish(self, answer: str | None) -> Mapping[str, float]:
        del answer
        with as_infra_error():
            reward = self._verdict()
        self.feedback = self.feedback or f"the hidden tests gave {reward:g}"
        self.measures["verifier_same"] = float(self._env.verifier == "same")
        return partial_credit(reward)

    def _verdict(self) -> float:
        """Score in the agent's or a fresh session. 0 if the agent has made that impossible."""
        if self._env.verifier == "same":
            return self._run_tests(self._session or self._begin())
        pool = self._env.sessions(self.task.limits, self.image)
        if self._session is None:
            with pool.acquire(self.judge, VERDICT_WAIT_S) as judge:
                return self._run_tests(judge)
        keep = changes_to_keep(self.image, self._env.keep)
        try:
            changes = self._session.snapshot(keep=keep, since=self.image)
        except SandboxInfraError:
            raise
        except SandboxException as error:
            self.feedback = str(error)
            return 0.0
        self.close()  # frees a place in the pool for the verdict
        image = self.judge._replace(layers=(*self.judge.layers, changes.layers[-1]))
        try:
            try:
                judge = pool.acquire(image, VERDICT_WAIT_S)
            except SandboxInfraError:
                # raises if the machine is the cause
                pool.acquire(self.judge, VERDICT_WAIT_S).close()
                self.feedback = "no session starts with the changed files"
                return 0.0
            with judge:
                return self._run_tests(judge)
        finally:
            pool.discard(changes)

    def _run_tests(self, session: Session) -> float:
        """Copy the tests into a session, run them, end the session, read the reward."""
        try:
            ended_by_itself = self._run_script(
                session, "tests", "test.sh", self.task.verifier.env, self.task.verifier.timeout_sec
            )
        except SandboxInfraError:
            raise
        except SandboxException as error:
            self.output, ended_by_itself = str(error), False
        if session.channels is None:
            return 0.0
        with session.channels.borrowed() as channels:
            channels.signal()
            poll = select.poll()
            poll.register(channels.init, select.POLLIN)
            poll.poll()  # PID 1 ends last: then no process can change the reward file
            reward, self.measures = read_reward(channels.upper) if ended_by_itself else (0.0, {})
            return reward

    def _run_script(
        self, session: Session, folder: str, script: str, env: Mapping[str, str], timeout_s: float
    ) -> bool:
        """Copy a folder of the task to /FOLDER and run its script. True: it ended by itself."""
        executable = []
        with contextlib.closing(session.files()) as files:
            for name in ("reward.json", "reward.txt"):
                if files.exists(f"/logs/verifier/{name}"):
                    files.remove(f"/logs/verifier/{name}")
            files.make_dir("/logs/verifier")
            for name, (data, is_executable) in files_of(self.task.folder / folder).items():
                files.write(f"/{folder}/{name}", data)
                executable += [f"/{folder}/{name}"] if is_executable or name == script else []
        assert session.channels is not None
        command = f'chmod +x "$@"; exec /{folder}/{script}'
        program = Program(
            session.channels, ["/bin/bash", "-c", command, "bash", *executable],
            env={**session.places.environment(Template()), **OFFLINE, **env},
            directory=self.directory, output_max=16 << 20,
        )  # fmt: skip
        with contextlib.closing(program):
            program.close_stdin()
            ended_by_itself = program.wait(timeout_s)
        self.output = (program.stdout + program.stderr)[-4000:].decode("utf-8", "replace")
        if program.machine_failed:
            raise SandboxInfraError(program.machine_failed)
        return ended_by_itself and program.signal is None and not program.error

    def solve(self) -> bool:
        """Run the task's solution. Returns whether it ended by itself."""
        session, agent = self._begin(), self.task.agent
        env = self.task.solution.env
        return self._run_script(session, "solution", "solve.sh", env, agent.timeout_sec)


class HarborEpisode(HarborSandboxEpisode, ShellEpisode):
    """A rollout with code steps or tools."""

    def __init__(self, env: HarborEnv, task: Task) -> None:
        super().__init__(env, task)
        self._load_task(task)

    def functions(self) -> list[Callable[..., str]]:
        return [*super().functions(), self.run]

    def run(self, command: str) -> str:
        """Run a bash command in the working directory."""
        return self._shell(f"({command}\n) 2>&1")

    def _interpreter(self, session: Session, language: str) -> Session:
        if language != "bash":
            raise SandboxException(f"expected bash, got {language}")
        return session


class HarborConsole(HarborSandboxEpisode, ConsoleEpisode):
    """A rollout with console lines."""

    def __init__(self, env: HarborEnv, task: Task) -> None:
        super().__init__(cast(Any, env))
        self._load_task(task)

    def _interpreter(self, session: Session) -> Session:
        return start_context(session, "python", Template(), directory=self.directory)


def read_reward(upper: int) -> tuple[float, dict[str, float]]:
    """Read Harbor's reward (0 without one) and the other numbers of reward.json as measures.

    `upper`: descriptor of the directory of a session's changes. The files are untrusted.
    """
    names, flags = ("logs", "verifier"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                upper = os.open(name, flags | os.O_DIRECTORY, dir_fd=upper)
                stack.callback(os.close, upper)
        except OSError:
            return 0.0, {}
        for name in ("reward.json", "reward.txt"):
            try:
                with open(os.open(name, flags, dir_fd=upper), "rb") as file:
                    text = file.read(1 << 16).decode()
                value: Any = json.loads(text) if name.endswith("json") else float(text)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, RecursionError):
                return 0.0, {}
            entries = value if isinstance(value, dict) else {"reward": value}
            numbers = {
                key: float(number)
                for key, number in entries.items()
                if type(number) in (int, float) and abs(number) < 1e6
            }
            reward = numbers.pop("reward" if "reward" in entries else next(iter(entries), ""), 0.0)
            plain = [key for key in numbers if re.fullmatch(r"\w{1,40}", key)][:20]
            return reward, {f"verifier_{key}": numbers[key] for key in plain}
    return 0.0, {}

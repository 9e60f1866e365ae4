"""Runs commands in processes that have already imported torch and vLLM.

`python -m agentgrpo.train` spends ten of its first twelve seconds on imports. Python's fork server
does them once, and each command is a fork of it with its own environment, streams, signals and exit
status. The real start is tested elsewhere: end_to_end/test_run.py and a run under torchrun start
commands as users do, and test_imports.py checks that no command imports torch before it has set its
environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

from agentgrpo.support.runtime import ENVIRONMENT
from agentgrpo.train import interrupt

ROOT = Path(__file__).parent.parent
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.warm_imports"])
allowed = True  # conftest.py sets it: only in tests marked slow


def environment(**env: str) -> dict[str, str]:
    """The environment of a command: a few inherited variables and `env`."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**inherited, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env}


class Command:
    """A running command.

    Args:
        arguments: as for Python: `-m MODULE ...`, or a script and its arguments.
        cwd: its working directory.
        env: see environment().
    """

    def __init__(self, *arguments: str, cwd: str | Path = ROOT, **env: str) -> None:
        assert allowed, (
            "a test that starts a command is slow: mark it, or let its fixture use slow_setup"
        )
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name, name) for name in ("out", "err")]
        work = (arguments, environment(**env), self._streams, cwd)
        self._process = SERVER.Process(target=_work, args=work, daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    @property
    def ended(self) -> int:
        """A handle for multiprocessing.connection.wait()."""
        return self._process.sentinel

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it may have ended
            os.kill(self._process.pid, number)

    def interrupt(self) -> None:
        """Ctrl-C as in a terminal: SIGINT to the command and its child processes."""
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)

    def stdout(self) -> str:
        """Its stdout so far."""
        return self._streams[0].read_text() if self._streams[0].exists() else ""

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end, kill it on timeout, and return stdout and stderr."""
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            self._process.join()
        with self._folder:
            out, err = (stream.read_text() if stream.exists() else "" for stream in self._streams)
        return out, err


def run(*arguments: str, timeout: float = 600, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = Command(*arguments, cwd=ROOT, **env)
    out, err = command.communicate(timeout)
    return subprocess.CompletedProcess(arguments, command.returncode or 0, out, err)


def run_ranks(count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command on `count` ranks, like torchrun; if one fails, the others are killed.

    A lock serialises calls from all test processes: on a CPU, vLLM's ranks share memory that is
    named only after their rank numbers.
    """
    with open(__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return _run_ranks(count, arguments)


def _run_ranks(count: int, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for number in random.sample(range(first // 2, first), 99):  # outside the ephemeral ports
        with contextlib.suppress(OSError), socket.create_server(("localhost", number)):
            port = str(number)
            break
    ranks = [
        Command(
            *arguments, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count),
            LOCAL_WORLD_SIZE=str(count), MASTER_ADDR="localhost", MASTER_PORT=port,
        )
        for rank in range(count)
    ]  # fmt: skip
    deadline = time.monotonic() + 240
    while None in (codes := [rank.returncode for rank in ranks]) and not any(codes):
        remaining = deadline - time.monotonic()
        running = [rank.ended for rank in ranks if rank.returncode is None]
        if remaining <= 0 or not connection.wait(running, remaining):
            break
    out, err = map("".join, zip(*[rank.communicate(timeout=1) for rank in ranks], strict=True))
    status = next((code for code in [*codes, *(r.returncode for r in ranks)] if code), 0)
    return subprocess.CompletedProcess(arguments, status, out, err)


def _work(
    arguments: tuple[str, ...], env: dict[str, str], streams: list[Path], cwd: str | Path
) -> None:
    for number, stream in enumerate(streams, 1):
        with stream.open("w") as file:
            os.dup2(file.fileno(), number)
    os.setsid()
    os.environ.clear()
    os.environ.update(ENVIRONMENT | env)  # the state before the imports
    os.chdir(cwd)
    # multiprocessing hides a failed preload, which makes every command ten seconds slower
    assert "tests.warm_imports" in sys.modules, "tests/warm_imports.py cannot be imported"
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(":") if path]
    vars(interrupt)["subprocess"] = SimpleNamespace(Popen=_Fork, DEVNULL=subprocess.DEVNULL)
    sys.exit(_main(arguments))


def _main(arguments: tuple[str, ...]) -> int:
    if arguments[0] == "-m":
        packages = {"agentgrpo": "agentgrpo.cli", "agentgrpo.train": "agentgrpo.train.__main__"}
        name = packages.get(arguments[1], arguments[1])
        status: int = importlib.import_module(name).main(list(arguments[2:]))
        return status
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


class _Fork:
    """Replaces subprocess.Popen in run_child(): a child command is a fork of its parent."""

    def __init__(self, command: list[str], stdin: int, stdout: int | None) -> None:
        assert command[:3] == [sys.executable, "-m", "agentgrpo"], command
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid:
            return
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            for stream, to in enumerate((stdin, stdout)):
                if to == subprocess.DEVNULL:
                    os.dup2(os.open(os.devnull, os.O_RDWR), stream)
            status = _main(tuple(command[1:]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def terminate(self) -> None:
        os.kill(self._pid, signal.SIGTERM)

"""Commands of this package in processes that have torch and vLLM imported already.

`python -m agentgrpo.train` spends ten of its first twelve seconds on imports. Here Python's fork
server makes them once, and a command is a fork of it, with an environment, streams, signals and an
exit status of its own. A command's first seconds are tested elsewhere: the whole run of
end_to_end/test_run.py and a run under torchrun are started as users do, and test_imports.py holds
that no command imports torch before it has set its environment.
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
allowed = True  # conftest.py: in tests that are marked slow


def environment(**env: str) -> dict[str, str]:
    """The environment of a command: little of the tests' own, and what is given."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**inherited, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env}


class Command:
    """A command that runs: `-m MODULE ...`, or a script and its arguments.

    Args:
        arguments: as Python's own.
        cwd: the directory that it runs in.
        env: see environment().
    """

    def __init__(self, *arguments: str, cwd: str | Path = ROOT, **env: str) -> None:
        assert allowed, (
            "a test that starts a command is slow: mark it, or let its fixture take slow_setup"
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
        """What multiprocessing.connection.wait() can wait for."""
        return self._process.sentinel

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(self._process.pid, number)

    def interrupt(self) -> None:
        """Ctrl-C as a terminal's: SIGINT to the command and to what it has started."""
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)

    def said(self) -> str:
        """What it has written to stdout so far."""
        return self._streams[0].read_text() if self._streams[0].exists() else ""

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it has written to stdout and stderr, once it has ended; killed if it does not."""
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            self._process.join()
        with self._folder:
            out, err = (stream.read_text() if stream.exists() else "" for stream in self._streams)
        return out, err


def run(*arguments: str, timeout: float = 600, **env: str) -> subprocess.CompletedProcess[str]:
    """A command, once it has ended."""
    command = Command(*arguments, cwd=ROOT, **env)
    out, err = command.communicate(timeout)
    return subprocess.CompletedProcess(arguments, command.returncode or 0, out, err)


def run_ranks(count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command on so many ranks, as torchrun would; once one fails, the others are killed.

    One after another, whichever process of the tests asks: ranks of one engine on a CPU meet in
    shared memory that vLLM names after their numbers alone.
    """
    with open(__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return _run_ranks(count, arguments)


def _run_ranks(count: int, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for number in random.sample(range(first // 2, first), 99):  # given to nobody who asks for any
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
        left = deadline - time.monotonic()
        if left <= 0 or not connection.wait([r.ended for r in ranks if r.returncode is None], left):
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
    os.environ.update(ENVIRONMENT | env)  # as it was before the imports
    os.chdir(cwd)
    # multiprocessing says nothing of a preload that failed: every command was ten seconds slower
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
    """run_child()'s subprocess.Popen: what a command starts of this package is a fork of it."""

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

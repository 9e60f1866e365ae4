"""A persistent bash: a context of a session, or the session itself in an image.

Implements the protocol of repl.py. Each cell goes to the same bash, which evaluates it and writes
its status to a second pipe; variables, functions and the directory stay. Nothing is imported after
the start, because an image may have no Python.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from types import FrameType
from typing import Any, Never

sys.path.insert(0, os.path.dirname(__file__))
from load import isolated  # type: ignore[import-not-found]

protocol = isolated("repl")

LOOP = (
    'while IFS= read -r -d "" -u 10 _agentgrpo_cell; do eval "$_agentgrpo_cell"; echo "$?" >&11; '
    "done 10<&{} 11>&{}"
)
BEFORE = b"{ _agentgrpo_before=$(declare -p %s) || :; %s } 2>/dev/null || :"
AFTER = b"""{
    command unset -v %s; command eval "$_agentgrpo_before"; command unset -v _agentgrpo_before
} 2>/dev/null || :"""
"""Run before and after a cell with environment variables. Whatever options the shell has set, they
do not end bash and print nothing (`command`: in posix mode a failing builtin would end bash)."""


def main() -> None:
    for fd in (3, 4):
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    serve()


class Bash:
    def __init__(self) -> None:
        self.process: Any = None

    def interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGINT)

    def start(self) -> None:
        """Start bash, once. Raises FileNotFoundError in an image without bash."""
        if self.process is not None:
            return
        cells, cells_in = os.pipe()
        status_out, statuses = os.pipe()
        self.process = subprocess.Popen(
            ["/bin/bash", "--noprofile", "--norc", "-c", LOOP.format(cells, statuses)],
            pass_fds=(cells, statuses),
            start_new_session=True,
        )
        os.close(cells)
        os.close(statuses)
        self.results = open(status_out)  # noqa: SIM115 (until the process ends)
        self.feed = open(cells_in, "wb", buffering=0)  # noqa: SIM115

    def evaluate(self, cell: bytes) -> str:
        self.start()
        self.feed.write(cell.replace(b"\0", b"") + b"\0")
        status = self.results.readline().strip()
        if not status:  # the cell ended bash itself
            os._exit(self.process.wait() & 0xFF)
        return status

    def answer(self, fields: list[bytes]) -> list[bytes]:
        if fields[0] == b"env" and not fields[1:]:  # Session.warm_up()
            with contextlib.suppress(FileNotFoundError):
                self.start()
            return [b"ok"]
        if fields[0] == b"env":
            return self.answer([b"run", exported(fields[1:])])
        if fields[0] not in (b"run", b"cell"):
            return [b"error", b"NotSupported", b"bash has no " + fields[0], b""]
        names = b" ".join(fields[2::2])
        if names:
            self.evaluate(BEFORE % (names, exported(fields[2:])))
        status = self.evaluate(fields[1])
        if names:
            self.evaluate(AFTER % names)
        return [b"ok"] if status == "0" else [b"error", b"ExitStatus", status.encode(), b""]


def serve(_interpreter: object = None) -> Never:
    bash = Bash()
    signal.signal(signal.SIGINT, bash.interrupt)
    while True:
        number, fields = protocol["receive"]()
        try:
            answer = bash.answer(fields)
        except FileNotFoundError:
            missing = b"this image has no /bin/bash; run commands by sh (Sandbox.commands)"
            answer = [b"error", b"FileNotFoundError", missing, b""]
        protocol["send"](number, answer)


def exported(pairs: list[bytes]) -> bytes:
    """Shell code that exports variables, from a list NAME, VALUE, NAME, VALUE, ..."""
    return b"".join(
        b"command export %s='%s';" % (name, value.replace(b"'", b"'\\''"))
        for name, value in zip(pairs[::2], pairs[1::2], strict=True)
    )


if __name__ == "__main__":
    main()

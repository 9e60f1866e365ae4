"""A persistent bash as a context of a session: variables, functions and directory stay.

Speaks the protocol of repl.py to the host and hands each cell to one bash, which evaluates it and
reports its status on a pipe of its own.
"""

import fcntl
import os
import signal
import subprocess
import sys
from types import FrameType

sys.path.insert(0, os.path.dirname(__file__))
from load import isolated  # type: ignore[import-not-found]

LOOP = (
    'while IFS= read -r -d "" -u 10 _agentgrpo_cell; do eval "$_agentgrpo_cell"; echo "$?" >&11; '
    "done 10<&{} 11>&{}"
)
BEFORE = b"{ _agentgrpo_before=$(declare -p %s) || :; %s } 2>/dev/null || :"
AFTER = b"""{
    command unset -v %s; command eval "$_agentgrpo_before"; command unset -v _agentgrpo_before
} 2>/dev/null || :"""
"""Around a cell with variables of its own: whatever the shell is set to, they end no bash and write
nothing (`command`: in posix mode a builtin that fails would end it).
"""


def main() -> None:
    """Serve the host until it closes the request pipe or bash ends."""
    protocol = isolated("repl")
    for fd in (3, 4):
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    cells, cells_in = os.pipe()
    status_out, statuses = os.pipe()
    bash = subprocess.Popen(
        ["/bin/bash", "--noprofile", "--norc", "-c", LOOP.format(cells, statuses)],
        pass_fds=(cells, statuses),
        start_new_session=True,
    )
    os.close(cells)
    os.close(statuses)

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        os.killpg(bash.pid, signal.SIGINT)

    signal.signal(signal.SIGINT, interrupt)
    with open(status_out) as results, open(cells_in, "wb", buffering=0) as feed:

        def evaluate(cell: bytes) -> str:
            feed.write(cell.replace(b"\0", b"") + b"\0")
            status = results.readline().strip()
            if not status:  # the cell ended bash itself
                os._exit(bash.wait() & 0xFF)
            return status

        while True:
            number, fields = protocol["receive"]()
            if fields[0] not in (b"run", b"cell"):
                protocol["send"](number, [b"ok"])
                continue
            names = b" ".join(fields[2::2])
            if names:
                evaluate(BEFORE % (names, exported(fields[2:])))
            status = evaluate(fields[1])
            if names:
                evaluate(AFTER % names)
            failed = [b"error", b"ExitStatus", status.encode(), b""]
            protocol["send"](number, [b"ok"] if status == "0" else failed)


def exported(pairs: list[bytes]) -> bytes:
    """What sets environment variables, given as NAME VALUE NAME VALUE and so on."""
    return b"".join(
        b"command export %s='%s';" % (name, value.replace(b"'", b"'\\''"))
        for name, value in zip(pairs[::2], pairs[1::2], strict=True)
    )


main()

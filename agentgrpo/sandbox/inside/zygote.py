"""The zygote: a preloaded interpreter inside the outer jail that becomes a session on request.

Runs as ``python -s -P -S zygote.py`` with file descriptor 8 as its socket to the host. Trusted, and
deliberately tiny: no code, no environment variable and no secret of a session ever passes through
it, because everything in its memory is inherited by every later session.

Protocol (SOCK_SEQPACKET): the host sends one JSON settings message; the zygote preloads and answers
``ready ...`` or ``failed ...``; from then on each message carries the descriptors of one new
session, the user id it runs under and its number, and of one in an image the layers, the working
directory and the variables that the image itself sets; or ``answer`` and a pipe, to show that it
lives.
"""

import array
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))
import load  # type: ignore[import-not-found]
import wire  # type: ignore[import-not-found]

HOST_FD = 8
UNLIMITED = 2**64 - 1
OTHERS = 512  # processes that a session's user may start later: watchdog.py tells whose they are


def preload(settings: dict[str, Any]) -> None:
    """Import what all sessions share, in their environment. RuntimeError if a thread is left."""
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
    sys.path += settings["site_dirs"]
    os.environ.update(settings["python_env"])  # beside the zygote's own, which keep threads away
    for name in settings["preload"]:
        importlib.import_module(name)
        if len(os.listdir("/proc/self/task")) != 1:  # a fork has only the calling thread: what the
            others = sys.modules["threading"].enumerate()[1:]  # others hold stays locked
            of = {(getattr(t, "_target", None) or type(t)).__module__ for t in others}
            raise RuntimeError(
                f"preload: {name!r} left threads running (of {sorted(of)}); leave it out, or set "
                "the variable that keeps it from starting them in env"
            )
    os.environ.clear()
    os.environ.update(settings["python_env"])


def address_space_in_use() -> int:
    """Bytes of virtual memory of this process, which every session starts with."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")


def private_files(
    settings: dict[str, Any], uid: int, number: int, layers: str, directory: str
) -> tuple[str, ...]:
    """Mount options of a session's private directories and its image; without namespaces, paths
    instead.
    """
    if settings["mode"] == wire.MODE_BARE:
        return f"{settings['homes']}/{number}", ":".join(settings["readable"]), "", "", ""
    owner = f",uid={uid},gid={uid}" if settings["mode"] == wire.MODE_ROOT else ""
    return *(options + owner for options in settings["tmpfs"]), layers, directory


def tasks_of_user() -> int:
    """Processes and threads of this user, by whom the kernel counts them."""
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            found = os.stat(f"/proc/{pid}/task")  # one link for each thread, . and ..
            total += found.st_nlink - 2 if found.st_uid == os.geteuid() else 0
    return total


def spawn(
    extension: Any,
    settings: dict[str, Any],
    uid: int,
    number: int,
    image: tuple[str, str],
    fds: list[int],
) -> bool:
    """Make one session. Returns True in the session's interpreter, False in the zygote."""
    memory, processes, *others = settings["limits"]
    if settings["mode"] == wire.MODE_BARE and os.geteuid() != 0:
        processes += OTHERS + tasks_of_user()
    try:
        return bool(
            extension.sandbox_spawn_session(
                tuple(fds[:5]),
                tuple([*fds[5:], -1, -1, -1][:3]),
                private_files(settings, uid, number, *image),
                (memory, processes, *others),
                settings["mode"],
                uid,
                settings["own_proc"],
                settings["own_network"],
                settings["filter"],
            )
        )
    except OSError as error:
        step = list(wire.SETUP_STEPS).index("CLONE")
        failed = wire.REPORT.pack(wire.REPORT_FAILED, step, error.errno or 0, 0, 0, 0)
        with contextlib.suppress(BrokenPipeError):  # whoever asked has gone
            os.write(fds[0], failed)
        return False


def receive(host: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """What is asked for, in at most that many bytes, and the descriptors that came with it."""
    message, ancillary, _, _ = host.recvmsg(size, socket.CMSG_SPACE(8 * 4))
    if not message:  # the host is gone, and with this process goes every session
        os._exit(0)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data)
    return message, list(fds)


def end_groups(_signal: int, _frame: object) -> None:
    """Without namespaces: what is left of sessions whose init has ended."""
    # another end must not be handled between the look at one and its reaping
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        while (ended := next_ended()) is not None:
            with contextlib.suppress(ProcessLookupError):  # it never made its group
                os.killpg(ended, signal.SIGKILL)  # not reaped yet: the number is its own
            os.waitpid(ended, 0)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def next_ended() -> int | None:
    """A child that has ended and is not reaped."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


def prepare(settings: dict[str, Any]) -> None:
    """Turn the host's settings into the arguments of every spawn."""
    settings["filter"] = bytes.fromhex(settings["filter"])
    if settings["limits"][0]:
        settings["limits"][0] += address_space_in_use()
    else:
        settings["limits"][0] = UNLIMITED
    bare = settings["mode"] == wire.MODE_BARE
    # else the kernel reaps ended sessions
    signal.signal(signal.SIGCHLD, end_groups if bare else signal.SIG_IGN)


def collapse(extension: Any) -> None:
    """Back private memory by huge pages, where the kernel can: every session's two forks copy one
    entry instead of 512.
    """
    with open("/proc/self/maps") as maps:
        for span, access, _, _, inode, *name in map(str.split, maps.readlines()):
            if (access, inode) == ("rw-p", "0") and name in ([], ["[heap]"]):
                extension.sandbox_collapse(*(int(bound, 16) for bound in span.split("-")))


def serve(host: socket.socket, extension: Any, settings: dict[str, Any]) -> dict[str, str]:
    """Answer spawn requests; returns only in a new session's interpreter, the variables that its
    image sets.
    """
    host.send(b"ready " + ".".join(map(str, sys.version_info[:3])).encode())
    size = 1 << 17 if settings["image"] else 64  # a large buffer would be mapped anew each time
    while True:
        asked, fds = receive(host, size)
        if asked == b"answer":
            with contextlib.suppress(BrokenPipeError):  # whoever asked has gone
                os.write(fds[0], b"!")
            os.close(fds[0])
            continue
        ids, layers, directory, *variables = asked.decode("utf-8", "surrogateescape").split("\0")
        uid, number = map(int, ids.split())
        if spawn(extension, settings, uid, number, (layers, directory), fds):
            return dict(zip(variables[::2], variables[1::2], strict=True))
        for fd in fds:
            os.close(fd)


def main() -> None:
    """Preload, serve; in a session's interpreter, forget the zygote and run the session."""
    host = socket.socket(fileno=HOST_FD)
    os.umask(0o022)  # of every session, whatever the trainer's is
    try:
        settings = json.loads(host.recv(1 << 20))
        loop = load.isolated("shell" if settings["image"] else "repl")
        interpreter = None
        for name in ("load", "console", "wire"):  # the names are the user's
            sys.modules.pop(name, None)
        extension = load.extension(settings["extension"])
        preload(settings)
        if not settings["image"]:
            sizes = settings["value_bytes"], settings["traceback_bytes"]
            interpreter = loop["prepare"](settings["python_env"], *sizes)
            loop["warm_up"](interpreter)
        gc.collect()
        gc.freeze()
        collapse(extension)
        prepare(settings)
    except BaseException:
        host.send(b"failed " + traceback.format_exc()[-8000:].encode(errors="replace"))
        os._exit(1)
    variables = serve(host, extension, settings)
    host.detach()  # closed by the clone; its number may already mean something else
    if settings["mode"] == wire.MODE_BARE:
        os.environ |= {"HOME": os.getcwd(), "TMPDIR": os.getcwd()}
    if settings["image"]:
        os.environ.clear()
        os.environ.update(variables)
    loop["serve"](interpreter)


main()

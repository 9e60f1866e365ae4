"""The zygote: a preloaded interpreter inside the outer jail, from which sessions are forked.

Runs as ``python -s -P -S zygote.py`` with file descriptor 8 as its socket to the host. It is
trusted and small: no code, no environment variable and no secret of a session passes through it,
because every later session inherits everything in its memory.

Protocol (SOCK_SEQPACKET): the host sends one message with JSON settings. The zygote preloads and
answers ``ready ...`` or ``failed ...``. Then each message has the descriptors of a new session, its
user id and its number, and for an image the layers, the working directory and the image's
variables. Or it is ``answer`` with a pipe, to check that the zygote works.
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
OTHERS = 512  # processes of other sessions of the same user; watchdog.py limits each session


def preload(settings: dict[str, Any]) -> None:
    """Import the shared modules, in the sessions' environment. RuntimeError if one has threads."""
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
    sys.path += settings["site_dirs"]
    os.environ.update(settings["python_env"])  # keeps the zygote's variables that prevent threads
    for name in settings["preload"]:
        importlib.import_module(name)
        # A fork has only the calling thread, so locks of other threads would stay locked in it.
        if len(os.listdir("/proc/self/task")) != 1:
            threads = sys.modules["threading"].enumerate()[1:]
            modules = {(getattr(t, "_target", None) or type(t)).__module__ for t in threads}
            raise RuntimeError(
                f"preload: {name!r} left threads running (of {sorted(modules)}); remove it, or set "
                "the environment variable that prevents the threads in the template's env"
            )
    os.environ.clear()
    os.environ.update(settings["python_env"])


def address_space_in_use() -> int:
    """Bytes of virtual memory of this process, with which every session starts."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")


def private_files(
    settings: dict[str, Any], uid: int, number: int, layers: str, directory: str
) -> tuple[str, ...]:
    """Mount options of the session's private directories and image; without namespaces, paths."""
    if settings["mode"] == wire.MODE_BARE:
        return f"{settings['homes']}/{number}", ":".join(settings["readable"]), "", "", ""
    owner = f",uid={uid},gid={uid}" if settings["mode"] == wire.MODE_ROOT else ""
    return *(options + owner for options in settings["tmpfs"]), layers, directory


def tasks_of_user() -> int:
    """Processes and threads of this user: RLIMIT_NPROC counts all of them."""
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has ended
            info = os.stat(f"/proc/{pid}/task")  # one link for each thread, . and ..
            total += info.st_nlink - 2 if info.st_uid == os.geteuid() else 0
    return total


def spawn(
    extension: Any,
    settings: dict[str, Any],
    uid: int,
    number: int,
    image: tuple[str, str],
    fds: list[int],
) -> bool:
    """Fork a session. Returns True in the session's interpreter, False in the zygote."""
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
        report = wire.REPORT.pack(wire.REPORT_FAILED, step, error.errno or 0, 0, 0)
        with contextlib.suppress(BrokenPipeError):  # the host has stopped waiting
            os.write(fds[0], report)
        return False


def receive(host: socket.socket, size: int) -> tuple[bytes, list[int]]:
    message, ancillary, _, _ = host.recvmsg(size, socket.CMSG_SPACE(8 * 4))
    if not message:  # the host has ended; all sessions end with this process
        os._exit(0)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data)
    return message, list(fds)


def end_groups(_signal: int, _frame: object) -> None:
    """SIGCHLD handler without namespaces: kill the process groups of sessions whose init ended."""
    # block the signal: a nested call could reap a child between next_ended() and killpg()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        while (ended := next_ended()) is not None:
            with contextlib.suppress(ProcessLookupError):  # the session never made its group
                os.killpg(ended, signal.SIGKILL)  # not reaped yet, so the pid is not reused
            os.waitpid(ended, 0)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def next_ended() -> int | None:
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


def prepare(settings: dict[str, Any]) -> None:
    """Convert the host's settings to the arguments of spawn()."""
    settings["filter"] = bytes.fromhex(settings["filter"])
    if settings["limits"][0]:
        settings["limits"][0] += address_space_in_use()
    else:
        settings["limits"][0] = UNLIMITED
    bare = settings["mode"] == wire.MODE_BARE
    # with SIG_IGN the kernel reaps ended sessions
    signal.signal(signal.SIGCHLD, end_groups if bare else signal.SIG_IGN)


def collapse(extension: Any) -> None:
    """Back private memory by huge pages if the kernel can: a fork then copies one page table entry
    instead of 512, and each session needs two forks.
    """
    with open("/proc/self/maps") as maps:
        for span, access, _, _, inode, *name in map(str.split, maps.readlines()):
            if (access, inode) == ("rw-p", "0") and name in ([], ["[heap]"]):
                extension.sandbox_collapse(*(int(bound, 16) for bound in span.split("-")))


def serve(host: socket.socket, extension: Any, settings: dict[str, Any]) -> dict[str, str]:
    """Serve spawn requests. In a new session's interpreter, return the image's variables."""
    host.send(b"ready " + ".".join(map(str, sys.version_info[:3])).encode())
    size = 1 << 17 if settings["image"] else 64  # malloc would mmap a large buffer each time
    while True:
        message, fds = receive(host, size)
        if message == b"answer":
            with contextlib.suppress(BrokenPipeError):  # the host has stopped waiting
                os.write(fds[0], b"!")
            os.close(fds[0])
            continue
        ids, layers, directory, *variables = message.decode("utf-8", "surrogateescape").split("\0")
        uid, number = map(int, ids.split())
        if spawn(extension, settings, uid, number, (layers, directory), fds):
            return dict(zip(variables[::2], variables[1::2], strict=True))
        for fd in fds:
            os.close(fd)


def main() -> None:
    """Preload and serve. In a session's interpreter: run the session."""
    host = socket.socket(fileno=HOST_FD)
    os.umask(0o022)  # the same in every session, whatever the trainer's is
    try:
        settings = json.loads(host.recv(1 << 20))
        loop = load.isolated("shell" if settings["image"] else "repl")
        interpreter = None
        for name in ("load", "console", "wire"):  # free these module names for the user's code
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
    host.detach()  # C closed it in the fork; its descriptor number may be reused already
    if settings["mode"] == wire.MODE_BARE:
        os.environ |= {"HOME": os.getcwd(), "TMPDIR": os.getcwd()}
    if settings["image"]:
        os.environ.clear()
        os.environ.update(variables)
    loop["serve"](interpreter)


main()

"""Starts nsjail for root, whose files the jail's user may not be able to reach.

The jail's unprivileged user cannot bind a path in a directory that only root can enter, such as an
interpreter under /root. So root first binds each source to a directory that all users can enter, in
a mount namespace that only nsjail sees. Nothing is left on the machine afterwards.

Usage: launch.py PLAN, a JSON file
{"stage": DIR, "binds": [[source, name], ...], "argv": [...], "env": {...}}.
"""

import ctypes
import json
import os
import sys

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
CLONE_NEWNS = 0x20000
libc = ctypes.CDLL(None, use_errno=True)


def succeed(failed: int, target: str = "") -> None:
    if failed:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), target or None)


def mount(source: str | None, target: str, flags: int) -> None:
    """Bind source to target, change target's propagation, or mount a small tmpfs on it."""
    kind, options = ("tmpfs", "mode=0755,size=1m") if flags & MS_NODEV else (None, None)
    texts = [text and os.fsencode(text) for text in (source, target, kind)]
    succeed(libc.mount(*texts, ctypes.c_ulong(flags), options and options.encode()), target)


def main() -> None:
    """Bind the plan's sources where the jail's user can reach them, then become nsjail."""
    os.umask(0o022)  # the jail's user must be able to enter nsjail's mount points
    with open(sys.argv[1]) as file:
        plan = json.load(file)
    succeed(libc.unshare(CLONE_NEWNS))
    mount(None, "/", MS_REC | MS_PRIVATE)
    # open them first: the stage hides everything below its mount point
    sources = [os.open(source, os.O_PATH) for source, _ in plan["binds"]]
    mount("tmpfs", plan["stage"], MS_NOSUID | MS_NODEV)
    for fd, (source, name) in zip(sources, plan["binds"], strict=True):
        target = os.path.join(plan["stage"], name)
        if os.path.isdir(source):
            os.mkdir(target, 0o755)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        mount(f"/proc/self/fd/{fd}", target, MS_BIND | MS_REC)
        os.close(fd)
    os.execve(plan["argv"][0], plan["argv"], plan["env"])


try:
    main()
except OSError as failed_call:
    sys.exit(f"binding the jail's files failed: {failed_call.strerror}")

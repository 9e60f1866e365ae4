"""Starts nsjail for a root user, whose files the jail's user may not be able to reach.

A home directory that only root may enter (an interpreter under /root, say) cannot be bound by the
jail's unprivileged user. So each source is bound first, by root, to a directory that everybody may
enter, in a mount namespace that only nsjail will see: nothing is left on the machine afterwards.

Usage: launch.py EXTENSION PLAN, where PLAN is a JSON file
{"stage": DIR, "binds": [[source, name], ...], "argv": [...], "env": {...}}.
"""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
import load  # type: ignore[import-not-found]


def main() -> None:
    """Bind the plan's sources where the jail's user can reach them, then become nsjail."""
    os.umask(0o022)  # nsjail's mount points are root's, and the jail's user has to enter them
    extension_path, plan_path = sys.argv[1:]
    extension = load.extension(extension_path)
    with open(plan_path) as file:
        plan = json.load(file)
    extension.sandbox_unshare_mounts()
    # opened before the stage is mounted, which hides whatever lies beneath it
    sources = [os.open(source, os.O_PATH) for source, _ in plan["binds"]]
    extension.sandbox_mount(None, plan["stage"])
    for fd, (source, name) in zip(sources, plan["binds"], strict=True):
        target = os.path.join(plan["stage"], name)
        if os.path.isdir(source):
            os.mkdir(target, 0o755)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        extension.sandbox_mount(f"/proc/self/fd/{fd}", target)
        os.close(fd)
    os.execve(plan["argv"][0], plan["argv"], plan["env"])


main()

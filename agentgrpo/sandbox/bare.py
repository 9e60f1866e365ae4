"""The rung that is not on the ladder: sessions without namespaces, for ``allow_degraded=True``.

A session is a process group that nothing can leave, under the system call filter (without sockets,
signals and everything else that reaches other processes of its user), resource limits, Landlock
where the kernel has it, and, if the host is root, a user id of its own. The machine's processes,
loads and readable directories are seen; the disk is bounded per file only.
"""

import os
import stat
import subprocess
from pathlib import Path

from agentgrpo import _C
from agentgrpo.sandbox.errors import SandboxUnavailable
from agentgrpo.sandbox.jail import PYTHON_OPTIONS
from agentgrpo.sandbox.template import Template

GUEST = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guest")
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")


def readable_paths(template: Template) -> list[str]:
    """What sessions may read and execute."""
    own = (*template.interpreter_paths, *template.site_dirs, *template.mounts)
    every = (*SYSTEM, GUEST, str(_C.__file__), *own)
    return [os.path.realpath(path) for path in dict.fromkeys(every)]


def command(template: Template, scratch: str) -> list[str]:
    """The zygote's command line.

    Raises:
        SandboxUnavailable: nothing would keep sessions from this user's files and processes.
    """
    if os.geteuid() != 0 and _C.sandbox_landlock_version() == 0:
        raise SandboxUnavailable(
            "this kernel has no Landlock, and this user is not root: sessions could read and "
            "change all of this user's files; remedy: boot with lsm=landlock,..., or run as root"
        )
    if os.geteuid() == 0:
        for path in filter(os.path.exists, readable_paths(template)):
            _require_open(path)
        os.chmod(scratch, 0o711)
    return [template.interpreter, *PYTHON_OPTIONS, os.path.join(GUEST, "zygote.py")]


def _require_open(path: str) -> None:
    for above in Path(path).parents:
        if not above.stat().st_mode & stat.S_IXOTH:
            raise SandboxUnavailable(
                f"{path} is needed by sessions, which run as users of their own, but only its "
                f"owner may enter {above}; remedy: chmod o+x {above}, or an interpreter in /usr"
            )


def make_home(scratch: str, number: int, uid: int) -> None:
    """The directory of one session."""
    home = os.path.join(scratch, str(number))
    os.mkdir(home, 0o700)
    if os.geteuid() == 0:
        os.chown(home, uid, uid)


def remove(path: str) -> None:
    """Delete what sessions have left; what one still writes meanwhile goes with its zygote.

    By rm, which directories nested to any depth do not bring down.
    """
    subprocess.run(["/bin/rm", "-rf", "--", path], stderr=subprocess.DEVNULL, check=False)

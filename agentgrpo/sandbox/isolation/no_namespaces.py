"""The rung without namespaces, for ``allow_degraded=True``: what it does otherwise than the others.

A session is a process group that nothing can leave, under the system call filter (without sockets,
signals and everything else that reaches other processes of its user), resource limits, Landlock
where the kernel has it, and, if the host is root, a user id of its own. It has one directory, on
the machine's disk. The machine's processes, loads and readable directories are seen.
"""

import atexit
import contextlib
import functools
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from pathlib import Path

from agentgrpo import _C
from agentgrpo.sandbox.isolation.cgroup import owner_name
from agentgrpo.sandbox.isolation.errors import SandboxUnavailable
from agentgrpo.sandbox.isolation.jail import PYTHON_OPTIONS, Places
from agentgrpo.sandbox.isolation.template import Template

GUEST = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "inside"))
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives",
          "/etc/ssl/openssl.cnf")  # fmt: skip
UNUSED = ("site-packages", "dist-packages", "test", "config-*", "*.a")
"""Of an interpreter's directories: sessions import packages from the template's only."""
_copying, _copies = threading.Lock(), set[str]()


def places(template: Template) -> Places:
    """Where sessions find things; each has a home of its own."""
    interpreter = reachable(template.interpreter)
    is_copy = interpreter != template.interpreter
    for name in ("python", "python3") if is_copy else ():
        with contextlib.suppress(FileExistsError):
            os.symlink(interpreter, os.path.join(os.path.dirname(interpreter), name))
    return Places(
        interpreter,
        tuple(map(reachable, template.site_dirs)),
        reachable(GUEST),
        home="",
        own_root=False,
        libraries=str(Path(interpreter).parents[1] / "lib") if is_copy else "",
    )


def readable_paths(template: Template) -> list[str]:
    """What sessions may read and execute."""
    own = [reachable(path, UNUSED) for path in template.interpreter_paths]
    own += map(reachable, (*template.site_dirs, GUEST, str(_C.__file__)))
    for mount in template.mounts:
        if not _is_open(mount):
            raise SandboxUnavailable(
                f"{mount} is shown to sessions, whose users may not enter all directories above "
                "it; remedy: chmod o+x those, or put it elsewhere"
            )
    return list(dict.fromkeys(map(os.path.realpath, (*SYSTEM, *own, *template.mounts))))


def command(template: Template, scratch: str) -> list[str]:
    """The zygote's command line."""
    if os.geteuid() != 0 and _C.sandbox_landlock_version() == 0:
        raise SandboxUnavailable(
            "this kernel has no Landlock, and this user is not root: sessions could read and "
            "change all of this user's files; remedy: boot with lsm=landlock,..., or run as root"
        )
    if not _is_open(scratch):
        raise SandboxUnavailable(
            f"sessions run as users of their own, which may not enter {tempfile.gettempdir()}; "
            "remedy: TMPDIR=/tmp"
        )
    os.chmod(scratch, 0o711)
    readable_paths(template)  # makes what an interpreter looks for beside it
    found = places(template)
    return [found.interpreter, *PYTHON_OPTIONS, os.path.join(found.guest, "zygote.py")]


def _is_open(path: str) -> bool:
    """Whether the users of sessions may enter all directories above it."""
    above = Path(os.path.realpath(path)).parents
    return os.geteuid() != 0 or all(one.stat().st_mode & stat.S_IXOTH for one in above)


def reachable(path: str, unused: tuple[str, ...] = ()) -> str:
    """A path that the users of sessions can reach: itself, or, where it lies in a home that only
    its owner may enter, what is linked or copied to a place of its own, for as long as this process
    lives.
    """
    path = os.path.realpath(path)
    return path if _is_open(path) else _copied(path, unused)


@functools.cache
def _place(pid: int) -> str:
    place = tempfile.mkdtemp(prefix=f"{owner_name(pid)}.")

    def clear_up() -> None:
        if os.getpid() == pid:
            remove(place)

    atexit.register(clear_up)
    return place


def _copied(path: str, unused: tuple[str, ...]) -> str:
    place = _place(os.getpid())
    target = place + path  # the same layout: an interpreter finds its libraries beside it
    with _copying:
        if target not in _copies:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.isdir(path):
                ignored = shutil.ignore_patterns(*unused)
                shutil.copytree(path, target, True, ignored, _link, dirs_exist_ok=True)
            else:
                _link(path, target)
            for directory, _, _ in os.walk(place):
                os.chmod(directory, 0o755)
            _copies.add(target)
    return target


def _link(source: str, target: str) -> None:
    """Another name of a file; a copy where it is on another file system, or not for everybody."""
    if os.path.exists(target):  # of another copy: this package in the directory of a template's
        return
    mode = os.stat(source).st_mode
    if mode & stat.S_IROTH:
        try:
            os.link(source, target)
            return
        except OSError:
            pass
    shutil.copyfile(source, target)
    os.chmod(target, 0o755 if mode & stat.S_IXUSR else 0o644)


def make_home(scratch: str, number: int, uid: int) -> str:
    """The directory of one session."""
    home = os.path.join(scratch, str(number))
    os.mkdir(home, 0o700)
    if os.geteuid() == 0:
        os.chown(home, uid, uid)
    return home


def remove(path: str) -> None:
    """Delete what sessions have left; what one still writes meanwhile goes with its zygote.

    By rm, which directories nested to any depth do not bring down.
    """
    subprocess.run(["/bin/rm", "-rf", "--", path], stderr=subprocess.DEVNULL, check=False)

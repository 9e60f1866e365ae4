"""The rung without namespaces, for ``allow_degraded=True``.

A session is a process group that nothing can leave. It has a system call filter (without sockets,
signals and all other calls that reach processes of the same user), resource limits, Landlock if the
kernel has it, and its own user id if the host is root. Its only directory is on the machine's disk.
It can see the machine's processes, load and readable directories.
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
"""Not copied from an interpreter: sessions import packages from the template's site_dirs."""
_copying, _copies = threading.Lock(), set[str]()


def places(template: Template) -> Places:
    """Paths of the sessions. Each session also has its own home."""
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
    """Paths that sessions can read and execute."""
    paths = [reachable(path, UNUSED) for path in template.interpreter_paths]
    paths += map(reachable, (*template.site_dirs, GUEST, str(_C.__file__)))
    for mount in template.mounts:
        if not _is_open(mount):
            raise SandboxUnavailable(
                f"template.mounts: the users of sessions cannot enter all directories above {mount}"
                "; remedy: chmod o+x those, or move it"
            )
    return list(dict.fromkeys(map(os.path.realpath, (*SYSTEM, *paths, *template.mounts))))


def command(template: Template, scratch: str) -> list[str]:
    """The zygote's command line."""
    if os.geteuid() != 0 and _C.sandbox_landlock_version() == 0:
        raise SandboxUnavailable(
            "this kernel has no Landlock, and this user is not root: sessions could read and "
            "change all of this user's files; remedy: boot with lsm=landlock,..., or run as root"
        )
    if not _is_open(scratch):
        raise SandboxUnavailable(
            f"sessions have their own user ids, which cannot enter {tempfile.gettempdir()}; "
            "remedy: TMPDIR=/tmp"
        )
    os.chmod(scratch, 0o711)
    readable_paths(template)  # copies the libraries that a copied interpreter needs
    session_places = places(template)
    zygote = os.path.join(session_places.guest, "zygote.py")
    return [session_places.interpreter, *PYTHON_OPTIONS, zygote]


def _is_open(path: str) -> bool:
    """Whether the users of sessions can enter all directories above a path."""
    parents = Path(os.path.realpath(path)).parents
    return os.geteuid() != 0 or all(parent.stat().st_mode & stat.S_IXOTH for parent in parents)


def reachable(path: str, unused: tuple[str, ...] = ()) -> str:
    """A path that the users of sessions can reach.

    It is the path itself or, below a directory that only its owner can enter, a link or copy in a
    temporary directory that is deleted when this process exits.
    """
    path = os.path.realpath(path)
    return path if _is_open(path) else _copied(path, unused)


@functools.cache
def _copy_dir(pid: int) -> str:
    directory = tempfile.mkdtemp(prefix=f"{owner_name(pid)}.")

    def clear_up() -> None:
        if os.getpid() == pid:  # not in a forked child
            remove(directory)

    atexit.register(clear_up)
    return directory


def _copied(path: str, unused: tuple[str, ...]) -> str:
    copy_dir = _copy_dir(os.getpid())
    target = copy_dir + path  # the same layout: an interpreter finds its libraries by relative path
    with _copying:
        if target not in _copies:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.isdir(path):
                ignored = shutil.ignore_patterns(*unused)
                shutil.copytree(path, target, True, ignored, _link, dirs_exist_ok=True)
            else:
                _link(path, target)
            for directory, _, _ in os.walk(copy_dir):
                os.chmod(directory, 0o755)
            _copies.add(target)
    return target


def _link(source: str, target: str) -> None:
    """Hard-link a file; copy it if it is on another file system or not readable for all."""
    if os.path.exists(target):  # from another copy: this package inside one of site_dirs
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
    """Create the directory of a session."""
    home = os.path.join(scratch, str(number))
    os.mkdir(home, 0o700)
    if os.geteuid() == 0:
        os.chown(home, uid, uid)
    return home


def remove(path: str) -> None:
    """Delete a directory of sessions, by rm: Python's rmtree fails on deeply nested directories."""
    subprocess.run(["/bin/rm", "-rf", "--", path], stderr=subprocess.DEVNULL, check=False)

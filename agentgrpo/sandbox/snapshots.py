"""Snapshots: what a session of an image has changed, copied as one more layer to start others from.

The session may be hostile and goes on meanwhile. So both sides are reached by descriptors only, no
link is followed, what is opened is looked at again, holes stay holes, and bytes, files and depth
are bounded. Of extended attributes only overlayfs' mark of an opaque directory is kept.
"""

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentgrpo.sandbox import bare
from agentgrpo.sandbox.boundary import public
from agentgrpo.sandbox.cgroup import owner_name, stale_of
from agentgrpo.sandbox.errors import InvalidArgumentException, SandboxException
from agentgrpo.sandbox.images import store_dir
from agentgrpo.sandbox.jail import Bind, Image
from agentgrpo.sandbox.limits import Limits

MIB = 1 << 20
MAX_DEPTH = 128
"""Of directories in a snapshot. Each takes two descriptors while it is copied."""
MOUNT_OPTIONS = 4000
"""Bytes of names of layers: the kernel reads one page of mount options."""
OPAQUE = "user.overlay.opaque"
_counter = itertools.count()


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The files of a session at one time, as an image: pool.acquire(snapshot) starts from them.
    Processes are not part of it. It is removed with its pool.
    """

    name: str
    layers: tuple[str, ...]
    """Those of the session's image, and above them its changes."""
    env: Mapping[str, str]
    workdir: str

    def remove(self) -> None:
        """Delete the copied changes. No session or snapshot may use them any more."""
        bare.remove(self.layers[-1])


def _own_directory() -> Path:
    """Where this process keeps snapshots. Those of processes that were killed are removed."""
    parent = store_dir() / "snapshots"
    own = parent / owner_name(os.getpid())
    if not own.is_dir():
        own.mkdir(parents=True, exist_ok=True)
        own.chmod(0o755)  # sessions mount it as a user of their own
        for path in stale_of(parent):
            bare.remove(str(path))
    return own


def shown_layers() -> list[Bind]:
    """What the jail of images shows: csrc/sandbox_spawn.c mounts from there."""
    layers = store_dir() / "layers"
    layers.mkdir(parents=True, exist_ok=True)
    return [Bind(str(layers), "/sandbox/layers"), Bind(str(_own_directory()), "/sandbox/s")]


def lower_dirs(image: Image) -> str:
    """Mount options of an image's layers, the topmost first, relative to /sandbox/layers."""
    prefixes = {str(store_dir() / "layers"): "", str(_own_directory()): "../s/"}
    names = []
    for path in reversed(image.layers):
        parent, name = os.path.split(path)
        if parent not in prefixes or not os.path.isdir(path):
            raise SandboxException(
                f"image {image.name!r}: layer {path} is not there; remedy: add the image again"
            )
        names.append(prefixes[parent] + name)
    if sum(map(len, names)) + len(names) > MOUNT_OPTIONS:
        raise InvalidArgumentException(
            f"image {image.name!r}: expected names of layers of at most {MOUNT_OPTIONS} bytes, got "
            f"{len(names)} layers. Take fewer snapshots of snapshots"
        )
    return ":".join(names)


def take(upper: int, image: Image, limits: Limits, owner: int | None) -> Snapshot:
    """Copy the directory of a session's changes.

    Args:
        upper: descriptor of the directory.
        image: what the session was started from.
        limits: of the session; its memory bounds what can be there.
        owner: user id that the copies are given to; None: this process's.

    Raises:
        SandboxException: the changes are more or deeper than can be kept.
    """
    name = f"{next(_counter):x}"
    path = _own_directory() / name
    path.mkdir()
    try:
        target = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _Copy(target, limits, owner).directory(upper, target, "", 0)
        finally:
            os.close(target)
    except BaseException:
        bare.remove(str(path))
        raise
    return Snapshot(
        name=f"{image.name}+{name}",
        layers=(*image.layers, str(path)),
        env=image.env,
        workdir=image.workdir,
    )


class _Copy:
    """One copy of a tree that may change meanwhile."""

    def __init__(self, root: int, limits: Limits, owner: int | None) -> None:
        self._root, self._owner = root, owner
        self._bytes_left, self._files_left = limits.home_mib * MIB, limits.inodes
        self._links: dict[int, str] = {}

    def directory(self, source: int, target: int, path: str, depth: int) -> None:
        """Copy a directory's entries, then its own mode, times, owner and mark."""
        if depth > MAX_DEPTH:
            raise SandboxException(f"snapshot: directories are nested deeper than {MAX_DEPTH}")
        for name in os.listdir(source):
            self._files_left -= 1
            if self._files_left < 0:
                raise SandboxException("snapshot: more files than limits.inodes")
            with contextlib.suppress(FileNotFoundError):  # the session has removed it meanwhile
                self._entry(source, target, name, f"{path}{name}", depth)
        if OPAQUE in os.listxattr(source):
            os.setxattr(target, OPAQUE, b"y")
        self._finish(source, target, 0o700)

    def _entry(self, source: int, target: int, name: str, path: str, depth: int) -> None:
        about = os.stat(name, dir_fd=source, follow_symlinks=False)
        kind = stat.S_IFMT(about.st_mode)
        if kind == stat.S_IFDIR:
            with _opened(source, name, os.O_DIRECTORY) as below:
                os.mkdir(name, 0o700, dir_fd=target)
                with _opened(target, name, os.O_DIRECTORY) as copy:
                    self.directory(below, copy, f"{path}/", depth + 1)
        elif kind == stat.S_IFREG and about.st_ino in self._links:
            os.link(self._links[about.st_ino], name, src_dir_fd=self._root, dst_dir_fd=target)
        elif kind == stat.S_IFREG:
            self._file(source, target, name, path)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            self._give(name, target)
        elif kind == stat.S_IFCHR and about.st_rdev == 0:  # whiteout: the name was removed
            os.mknod(name, stat.S_IFCHR | 0o600, 0, dir_fd=target)
            self._give(name, target)
        elif kind == stat.S_IFIFO:
            os.mkfifo(name, 0o600, dir_fd=target)
            self._give(name, target)
        # a socket is of no use without its process

    def _file(self, source: int, target: int, name: str, path: str) -> None:
        with _opened(source, name, os.O_NONBLOCK) as file:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode):
                return  # it has become something else, which is there for the next snapshot
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            copy = os.open(name, flags, 0o600, dir_fd=target)
            try:
                self._data(file, copy, about.st_size)
                self._finish(file, copy, 0o400)
            finally:
                os.close(copy)
        if about.st_nlink > 1:
            self._links[about.st_ino] = path

    def _data(self, source: int, copy: int, size: int) -> None:
        """The written parts of a file: one that claims a terabyte may have none."""
        os.ftruncate(copy, size)
        at = 0
        while at < size:
            try:
                at = os.lseek(source, at, os.SEEK_DATA)
            except OSError:  # a hole to the end
                return
            end = min(size, os.lseek(source, at, os.SEEK_HOLE))
            while at < end:
                done = os.pwrite(copy, os.pread(source, min(end - at, MIB), at), at)
                if not done:  # it has become shorter
                    return
                at, self._bytes_left = at + done, self._bytes_left - done
                if self._bytes_left < 0:
                    raise SandboxException("snapshot: more data than limits.home_mib")

    def _finish(self, source: int, copy: int, least_mode: int) -> None:
        """Mode (without set-id bits), times and owner."""
        about = os.fstat(source)
        if self._owner is not None:
            os.chown(copy, self._owner, self._owner)
        os.chmod(copy, about.st_mode & 0o1777 | least_mode)
        os.utime(copy, ns=(about.st_atime_ns, about.st_mtime_ns))

    def _give(self, name: str, target: int) -> None:
        if self._owner is not None:
            os.chown(name, self._owner, self._owner, dir_fd=target, follow_symlinks=False)


@contextlib.contextmanager
def _opened(directory: int, name: str, flags: int) -> Iterator[int]:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)

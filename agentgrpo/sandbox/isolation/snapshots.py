"""Snapshots: copies a session's changes to its image as a new layer of the store.

The session may be hostile and keeps running. So both trees are accessed by descriptors, no link is
followed, holes stay holes, bytes, files and depth are limited, and of extended attributes only
overlayfs' mark of an opaque directory is copied. A layer without an image is deleted with its pool
or, after a kill, by images.delete_unused().
"""

import contextlib
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from enum import Enum

from agentgrpo.sandbox.isolation.errors import InvalidArgumentException, SandboxException
from agentgrpo.sandbox.isolation.images import (
    Image,
    layer_name,
    new_layer,
    save_image,
    set_bytes,
    store_dir,
)
from agentgrpo.sandbox.isolation.layers import OPAQUE
from agentgrpo.sandbox.isolation.limits import Limits


class Kept(Enum):
    """Whether a snapshot copies an entry."""

    NO = 0
    PARTLY = 1
    """Copy a directory, without hiding the image's entries in it."""
    ALL = 2


Keep = Callable[[str, bool], Kept]
"""Called with an entry's path ("app/file"; "" is the root) and whether it is a directory."""
MIB = 1 << 20
MAX_DEPTH = 128
"""Depth of directories: each needs two descriptors while it is copied."""
MOUNT_OPTIONS = 4000
"""Bytes of the names of layers: the kernel reads one page of mount options."""


def lower_dirs(image: Image) -> str:
    """The layers as overlayfs' mount option, topmost first, relative to the store's directory."""
    if image.workdir and not (image.workdir[0] == "/" and image.workdir.isprintable()):
        raise InvalidArgumentException(
            f"image {image.name!r}: expected an absolute working directory, got {image.workdir!r}"
        )
    layers = str(store_dir() / "layers")
    for path in image.layers:
        if os.path.dirname(path) != layers or not os.path.isdir(path):
            raise SandboxException(
                f"image {image.name!r}: layer {path} does not exist; remedy: add the image again"
            )
    option = ":".join(map(os.path.basename, reversed(image.layers)))
    if len(option) > MOUNT_OPTIONS:
        raise InvalidArgumentException(
            f"image {image.name!r}: expected at most {MOUNT_OPTIONS} bytes of layer names, got "
            f"{len(option)} ({len(image.layers)} layers). Take fewer snapshots of snapshots"
        )
    return option


def take(
    upper: int, image: Image, limits: Limits, owner: int | None, name: str | None = None,
    keep: Keep | None = None, since: Image | None = None,
) -> Image:  # fmt: skip
    """Copy a session's changes as a layer. Returns an image of the session's layers and the copy.

    Args:
        upper: descriptor of the directory with the changes.
        image: the image of the session.
        limits: of the session; they limit the size and number of files.
        owner: user id of the copies; None: this process's.
        name: keep the snapshot in the store under this name.
        keep: decides whether to copy an entry; None: copy all.
        since: an image that `image` is based on: copy all changes since it, as a layer on it.

    Raises:
        SandboxException: the changes exceed a limit of size, number or depth.
    """
    key = layer_name("snapshot", uuid.uuid4().hex)
    with new_layer(key) as layer:
        assert layer is not None
        target = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            copy = _Copy(target, limits, owner, keep)
            for path in image.layers[len((since or image).layers) :]:
                below = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    copy.add(below)
                finally:
                    os.close(below)
            copy.add(upper)
        finally:
            os.close(target)
        set_bytes(layer, copy.bytes)
    image = since or image
    layers = (*image.layers, str(store_dir() / "layers" / key))
    if name is not None:
        return save_image(name, [*map(os.path.basename, layers)], image.env, image.workdir, key)
    return image._replace(name=f"{image.name}+{key}", layers=layers, digest=key)


def remove(snapshot: Image) -> None:
    """Delete the copied changes. No session and no other snapshot may use them."""
    shutil.rmtree(snapshot.layers[-1], ignore_errors=True)


class _Copy:
    """Copies trees, each on top of those before, while the session may change them."""

    def __init__(self, root: int, limits: Limits, owner: int | None, keep: Keep | None) -> None:
        self._root, self._limits, self._owner, self._keep = root, limits, owner, keep
        self.bytes = self._files = self._max_bytes = 0
        self._links: dict[int, str] = {}

    def add(self, source: int) -> None:
        """Copy a tree on top of the copies before, as overlayfs would merge them."""
        self._files, self._links = 0, {}
        self._max_bytes = self.bytes + self._limits.home_mib * MIB
        self.directory(source, self._root, "", 0)

    def directory(self, source: int, target: int, path: str, depth: int) -> None:
        """Copy a directory: its entries, then its opaque mark, mode, times and owner."""
        if depth > MAX_DEPTH:
            raise SandboxException(f"snapshot: directories are nested deeper than {MAX_DEPTH}")
        for name in os.listdir(source):
            self._files += 1
            if self._files > self._limits.inodes:
                raise SandboxException("snapshot: more files than limits.inodes")
            with contextlib.suppress(FileNotFoundError):  # the session has removed the entry
                self._entry(source, target, name, f"{path}{name}", depth)
        # with PARTLY the image's entries must stay visible, so no opaque mark
        partly = self._keep is not None and self._keep(path.rstrip("/"), True) is Kept.PARTLY
        if OPAQUE in os.listxattr(source) and not partly:
            os.setxattr(target, OPAQUE, b"y")
        self._finish(source, target, 0o700)

    def _entry(self, source: int, target: int, name: str, path: str, depth: int) -> None:
        info = os.stat(name, dir_fd=source, follow_symlinks=False)
        kind = stat.S_IFMT(info.st_mode)
        if kind != stat.S_IFDIR:  # it replaces an earlier copy, even if it is not kept itself
            _remove(target, name)
        if self._keep is not None and self._keep(path, kind == stat.S_IFDIR) is Kept.NO:
            return
        if kind == stat.S_IFDIR:
            with _opened(source, name, info.st_mode) as below:
                if OPAQUE in os.listxattr(below):
                    _remove(target, name)
                hides = _make_directory(target, name)
                with _opened(target, name, info.st_mode | 0o700) as copy:
                    if hides:
                        os.setxattr(copy, OPAQUE, b"y")
                    self.directory(below, copy, f"{path}/", depth + 1)
            return
        if kind == stat.S_IFREG and info.st_ino in self._links:
            os.link(self._links[info.st_ino], name, src_dir_fd=self._root, dst_dir_fd=target)
        elif kind == stat.S_IFREG:
            self._file(source, target, name, info.st_mode)
            if info.st_nlink > 1:
                self._links[info.st_ino] = path
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif kind == stat.S_IFCHR and info.st_rdev == 0:  # whiteout: the name was removed
            os.mknod(name, stat.S_IFCHR | 0o600, 0, dir_fd=target)
        elif kind == stat.S_IFIFO:
            os.mkfifo(name, 0o600, dir_fd=target)
        else:  # a socket is useless without its process
            return
        if self._owner is not None:
            os.chown(name, self._owner, self._owner, dir_fd=target, follow_symlinks=False)

    def _file(self, source: int, target: int, name: str, mode: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _opened(source, name, mode) as file:
            copy = os.open(name, flags, 0o600, dir_fd=target)
            try:
                self._data(file, copy, os.fstat(file).st_size)
                self._finish(file, copy, 0o400)
            finally:
                os.close(copy)

    def _data(self, source: int, copy: int, size: int) -> None:
        """Copy the data of a file without its holes: a sparse terabyte may have no data."""
        os.ftruncate(copy, size)
        at = 0
        while at < size:
            try:
                at = os.lseek(source, at, os.SEEK_DATA)
            except OSError:  # a hole to the end
                return
            end = min(size, os.lseek(source, at, os.SEEK_HOLE))
            while at < end:
                written = os.pwrite(copy, os.pread(source, min(end - at, MIB), at), at)
                if not written:  # the file has become shorter
                    return
                at, self.bytes = at + written, self.bytes + written
                if self.bytes > self._max_bytes:
                    raise SandboxException("snapshot: more data than limits.home_mib")

    def _finish(self, source: int, copy: int, least_mode: int) -> None:
        """Set owner, mode without set-id bits, and times."""
        info = os.fstat(source)
        if self._owner is not None:
            os.chown(copy, self._owner, self._owner)
        os.chmod(copy, info.st_mode & 0o1777 | least_mode)
        os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))


def _make_directory(parent: int, name: str) -> bool:
    """Create a directory unless it exists. Returns whether it replaced a file or whiteout."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            return False
        os.unlink(name, dir_fd=parent)
        os.mkdir(name, 0o700, dir_fd=parent)
        return True
    return False


def _remove(directory: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except IsADirectoryError:
        shutil.rmtree(name, dir_fd=directory)
    except FileNotFoundError:
        pass


@contextlib.contextmanager
def _opened(directory: int, name: str, mode: int) -> Iterator[int]:
    """Open a directory or regular file. FileNotFoundError if its type has changed since mode."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    # O_PATH first: check the type before the file is really opened
    path_fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        current_mode = os.fstat(path_fd).st_mode
        if stat.S_IFMT(current_mode) != stat.S_IFMT(mode):
            raise FileNotFoundError(name)
        needed = 0o500 if stat.S_ISDIR(current_mode) else 0o400
        path = f"/proc/self/fd/{path_fd}"
        # the session may have removed its own user's permission
        if current_mode & needed != needed and os.geteuid() != 0:
            os.chmod(path, stat.S_IMODE(current_mode) | needed)
        fd = os.open(path, flags & ~os.O_NOFOLLOW)
    finally:
        os.close(path_fd)
    try:
        yield fd
        if current_mode & needed != needed:
            os.fchmod(fd, stat.S_IMODE(current_mode))
    finally:
        os.close(fd)

"""Reads and writes a session's files from the host, without leaving the session's root.

Untrusted code owns these directories: any name can be a symbolic link to anywhere or a FIFO, and
can change at any time. So every path is opened with openat2(RESOLVE_IN_ROOT, no magic links),
without blocking, as the session's user. Only regular files are read and written, up to a size.
Other operations use the opened parent directory and a last name that the kernel does not follow.
"""

import builtins
import contextlib
import datetime
import errno
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Any, Literal, overload

from agentgrpo import _C
from agentgrpo.sandbox.isolation.channels import Channels, Root
from agentgrpo.sandbox.isolation.errors import (
    FileNotFoundException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    NotSupportedException,
    SandboxException,
    SandboxInfraError,
    SandboxNotFoundException,
    TimeoutException,
)
from agentgrpo.sandbox.isolation.guards import ProcessBound, as_bytes, wraps_os_errors
from agentgrpo.sandbox.session.program import Program

MIB = 1 << 20
MAX_ENTRIES = 10_000
REMOVE = 'PATH=/usr/bin:/bin; chmod -Rf u+rwx -- "$0"; exec rm -rf -- "$0"'
REMOVE_S = 30.0
LATEST = 253402300799
"""The largest timestamp of a datetime: untrusted code can set any modification time."""


class FileType(StrEnum):
    """Type of a directory entry."""

    FILE = "file"
    DIR = "dir"


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """A directory entry."""

    name: str
    type: FileType | None
    """None: neither a file nor a directory."""
    path: str
    size: int
    mode: int
    modified_time: datetime.datetime
    symlink_target: str | None = None


@dataclass(frozen=True, slots=True)
class WriteInfo:
    """A written file."""

    name: str
    type: FileType
    path: str


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Translate the kernel's errors to E2B's exceptions."""
    try:
        yield
    except OSError as error:
        reason = f"{path}: {error.strerror}"
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise SandboxInfraError(reason) from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise FileNotFoundException(reason) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotEnoughSpaceException(reason) from error
        if error.errno in (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO, errno.EEXIST):
            raise InvalidArgumentException(reason) from error
        raise SandboxException(reason) from error


@wraps_os_errors
class Files(ProcessBound):
    """The file system of a session.

    After the session's end every method raises SandboxNotFoundException, or SandboxInfraError if
    the machine ended it.

    Args:
        root: closed by close().
        channels: owned by the session.
        size_max: maximum bytes of a file, because reading a sparse file needs memory here.
    """

    def __init__(self, root: Root, channels: Channels, size_max: int) -> None:
        self._root, self._channels, self._size_max = root, channels, size_max

    def close(self) -> None:
        self._root.close()

    def _full(self, path: str) -> str:
        """The absolute path inside the session; a relative path starts at its home."""
        if not isinstance(path, str) or "\0" in path or not path:
            raise InvalidArgumentException(f"path: expected text without NUL, got {path!r}")
        return os.fsdecode(as_bytes(self._root.path_of(path)))

    @contextlib.contextmanager
    def _as_user(self) -> Iterator[None]:
        if self._root.owner is None:
            yield
            return
        previous_user = _C.sandbox_act_as(self._root.owner)
        try:
            yield
        finally:
            _C.sandbox_act_as(previous_user)

    @contextlib.contextmanager
    def _open(self, path: str, flags: int) -> Iterator[int]:
        """Open a path as the session's user."""
        full = self._full(path)
        with self._root.borrowed(), _translated(path), self._as_user():
            self._root.require_alive()
            fd = _C.sandbox_open_in(
                self._root.directory, os.fsencode(self._root.beneath(full)), flags, 0o644
            )
            try:
                yield fd
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Open the parent directory of a path. Yields its descriptor and the last name."""
        directory, name = os.path.split(os.path.normpath(self._full(path)))
        if name in ("", ".", ".."):
            raise InvalidArgumentException(f"path: expected a name in a directory, got {path!r}")
        with self._open(directory, os.O_RDONLY | os.O_DIRECTORY) as fd:
            yield fd, name

    @overload
    def read(self, path: str, format: Literal["text"] = "text") -> str: ...
    @overload
    def read(self, path: str, format: Literal["bytes"]) -> bytearray: ...
    def read(self, path: str, format: str = "text") -> str | bytearray:
        """Read a regular file, as text (undecodable bytes replaced) or bytes."""
        if format not in ("text", "bytes"):
            raise NotSupportedException(f"format: expected 'text' or 'bytes', got {format!r}")
        with self._open(path, os.O_RDONLY) as fd:
            self._require_regular(fd, path)
            data = bytearray()
            while len(data) <= self._size_max:
                more = os.read(fd, min(MIB, self._size_max + 1 - len(data)))
                if not more:
                    return data if format == "bytes" else data.decode("utf-8", "replace")
                data += more
        raise InvalidArgumentException(f"{path} is larger than {self._size_max} bytes")

    def _require_regular(self, fd: int, path: str) -> None:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise InvalidArgumentException(f"{path} is not a regular file")
        if info.st_size > self._size_max:
            raise InvalidArgumentException(f"{path} is larger than {self._size_max} bytes")

    def write(self, path: str, data: str | bytes | IO[str] | IO[bytes]) -> WriteInfo:
        """Create or replace a regular file and its missing parent directories."""
        text: Any = data
        if not isinstance(data, (str, bytes, bytearray)):
            text = data.read(self._size_max + 1)
        content: bytes = as_bytes(text) if isinstance(text, str) else text
        if len(content) > self._size_max:
            raise NotEnoughSpaceException(f"{path}: more than {self._size_max} bytes")
        with contextlib.suppress(InvalidArgumentException):
            self.make_dir(os.path.dirname(self._full(path)))
        with self._open(path, os.O_WRONLY | os.O_CREAT) as fd:
            self._require_regular(fd, path)
            os.ftruncate(fd, 0)
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
        full = os.path.normpath(self._full(path))
        return WriteInfo(os.path.basename(full), FileType.FILE, full)

    def _bind(self, host: socket.socket, name: str) -> str:
        """Bind a Unix socket to a name in the session's home. Returns its path inside."""
        with self._open(".", os.O_RDONLY | os.O_DIRECTORY) as fd:
            host.bind(f"/proc/self/fd/{fd}/{name}")
        return self._full(name)

    def write_files(self, files: list[dict[str, str | bytes]]) -> list[WriteInfo]:
        """Write several files: [{"path": ..., "data": ...}, ...]."""
        return [self.write(str(file["path"]), file["data"]) for file in files]

    def list(self, path: str = ".", depth: int = 1) -> list[EntryInfo]:
        """List depth levels of a directory. Follows no links, skips unreadable directories."""
        if depth < 1:
            raise InvalidArgumentException(f"depth must be at least 1, got {depth}")
        entries = self._entries(path)
        top = os.path.normpath(self._full(path)).rstrip("/").count("/")
        for entry in entries:  # the loop appends to the list
            deeper = entry.path.count("/") - top < depth and len(entries) < MAX_ENTRIES
            if deeper and entry.type is FileType.DIR:
                try:
                    entries += self._entries(entry.path)
                except (SandboxNotFoundException, SandboxInfraError):
                    raise
                except SandboxException:
                    continue
        return entries[:MAX_ENTRIES]

    def _entries(self, path: str) -> builtins.list[EntryInfo]:
        entries: builtins.list[EntryInfo] = []
        full = os.path.normpath(self._full(path))
        with self._open(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            for name in sorted(os.listdir(fd)):
                with contextlib.suppress(FileNotFoundError):
                    entries.append(_entry(fd, name, full))
        return entries

    def get_info(self, path: str) -> EntryInfo:
        """Describe a directory entry, without following a link."""
        with self._parent(path) as (fd, name):
            full = os.path.normpath(self._full(path))
            return _entry(fd, name, os.path.dirname(full))

    def exists(self, path: str) -> bool:
        """Whether a path exists. A link is followed inside the session."""
        try:
            with self._open(path, os.O_PATH):
                return True
        except (FileNotFoundException, InvalidArgumentException):
            return False

    def remove(self, path: str) -> None:
        """Delete a file, a link (not its target), or a directory with its content."""
        with self._parent(path) as (fd, name):
            if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=fd)
                return
        self._remove_directory(os.path.normpath(self._full(path)))

    def _remove_directory(self, path: str) -> None:
        """Delete by a program in the session, so that its code cannot redirect it to the host."""
        argv = ["/bin/bash", "-c", REMOVE, path]
        program = Program(self._channels, argv, env={}, directory="/", output_max=MIB)
        program.close_stdin()
        try:
            if not program.wait(REMOVE_S):
                raise TimeoutException(f"{path}: not removed in {REMOVE_S:g} s")
            if program.exit_code != 0:
                message = program.stderr[:500].decode("utf-8", "replace")
                exception = SandboxInfraError if program.machine_failed else SandboxException
                raise exception(f"{path}: {message or program.error}")
        finally:
            program.close()

    def rename(self, old_path: str, new_path: str) -> EntryInfo:
        with self._parent(old_path) as (old, old_name), self._parent(new_path) as (new, new_name):
            os.rename(old_name, new_name, src_dir_fd=old, dst_dir_fd=new)
        return self.get_info(new_path)

    def make_dir(self, path: str) -> bool:
        """Create a directory and its missing parents. False if it existed."""
        existing = os.path.normpath(self._full(path))
        missing: builtins.list[str] = []
        while not self.exists(existing):
            missing.append(existing)
            existing = os.path.dirname(existing)
        with self._open(existing, os.O_RDONLY | os.O_DIRECTORY):  # raises if it is a file
            pass
        for part in reversed(missing):
            with self._parent(part) as (fd, name):
                os.mkdir(name, 0o755, dir_fd=fd)
        return bool(missing)

    def watch_dir(self, path: str, **_: object) -> None:
        raise NotSupportedException("watch_dir() is not supported; call list() again instead")


def _entry(directory: int, name: str, path: str) -> EntryInfo:
    info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    types = {stat.S_IFREG: FileType.FILE, stat.S_IFDIR: FileType.DIR}
    is_link = stat.S_ISLNK(info.st_mode)
    return EntryInfo(
        name,
        types.get(stat.S_IFMT(info.st_mode)),
        os.path.join(path, name),
        info.st_size,
        stat.S_IMODE(info.st_mode),
        datetime.datetime.fromtimestamp(min(max(0, info.st_mtime), LATEST), datetime.UTC),
        os.readlink(name, dir_fd=directory) if is_link else None,
    )

"""Files of a session, read and written by the host without ever leaving the session's root.

Untrusted code owns these directories: every name may be a symbolic link to anywhere, a FIFO, or
change under us. So every path is opened by openat2(RESOLVE_IN_ROOT, no magic links), without
blocking, as the session's user; only regular files are read and written, up to a size; everything
else works on the opened parent directory and a last name that the kernel does not follow.
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
from agentgrpo.sandbox.isolation.guards import ProcessBound, as_bytes, public
from agentgrpo.sandbox.session.program import Program

MIB = 1 << 20
MAX_ENTRIES = 10_000
REMOVE = 'PATH=/usr/bin:/bin; chmod -Rf u+rwx -- "$0"; exec rm -rf -- "$0"'
REMOVE_S = 30.0
LATEST = 253402300799
"""The last second that a datetime can say, of times that untrusted code has set."""


class FileType(StrEnum):
    """What a directory entry is."""

    FILE = "file"
    DIR = "dir"


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One entry of a directory."""

    name: str
    type: FileType | None
    """None for what is neither a file nor a directory."""
    path: str
    size: int
    mode: int
    modified_time: datetime.datetime
    symlink_target: str | None = None


@dataclass(frozen=True, slots=True)
class WriteInfo:
    """A file that was written."""

    name: str
    type: FileType
    path: str


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """The kernel's refusals in E2B's words."""
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


@public
class Files(ProcessBound):
    """The file system of one session, for as long as it lives: afterwards every method raises
    SandboxNotFoundException, or SandboxInfraError if the machine ended the session.

    The root is closed by close(), the channels stay the session's. size_max: bytes of a file, which
    bounds the memory that a sparse one takes here.
    """

    def __init__(self, root: Root, channels: Channels, size_max: int) -> None:
        self._root, self._channels, self._size_max = root, channels, size_max

    def close(self) -> None:
        """Let go of the session's root."""
        self._root.close()

    def _full(self, path: str) -> str:
        """An absolute path inside the session; relative ones start at its home."""
        if not isinstance(path, str) or "\0" in path or not path:
            raise InvalidArgumentException(f"path: expected text without NUL, got {path!r}")
        return os.fsdecode(as_bytes(self._root.path_of(path)))

    @contextlib.contextmanager
    def _as_user(self) -> Iterator[None]:
        if self._root.owner is None:
            yield
            return
        before = _C.sandbox_act_as(self._root.owner)
        try:
            yield
        finally:
            _C.sandbox_act_as(before)

    @contextlib.contextmanager
    def _open(self, path: str, flags: int) -> Iterator[int]:
        """An open descriptor, while acting as the session's user."""
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
        """The directory that path is in, opened, and its last name."""
        directory, name = os.path.split(os.path.normpath(self._full(path)))
        if name in ("", ".", ".."):
            raise InvalidArgumentException(f"{path!r} names no entry of a directory")
        with self._open(directory, os.O_RDONLY | os.O_DIRECTORY) as fd:
            yield fd, name

    @overload
    def read(self, path: str, format: Literal["text"] = "text") -> str: ...
    @overload
    def read(self, path: str, format: Literal["bytes"]) -> bytearray: ...
    def read(self, path: str, format: str = "text") -> str | bytearray:
        """The content of a regular file, as text (undecodable bytes replaced) or bytes."""
        if format not in ("text", "bytes"):
            raise NotSupportedException(f"format {format!r}; 'text' and 'bytes' are there")
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
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise InvalidArgumentException(f"{path} is not a regular file")
        if about.st_size > self._size_max:
            raise InvalidArgumentException(f"{path} is larger than {self._size_max} bytes")

    def write(self, path: str, data: str | bytes | IO[str] | IO[bytes]) -> WriteInfo:
        """Make or replace a regular file, with the directories it needs."""
        given: Any = data
        if not isinstance(data, (str, bytes, bytearray)):
            given = data.read(self._size_max + 1)
        content: bytes = as_bytes(given) if isinstance(given, str) else given
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
        """Bind a Unix socket to a name in the session's home; returns its path inside."""
        with self._open(".", os.O_RDONLY | os.O_DIRECTORY) as fd:
            host.bind(f"/proc/self/fd/{fd}/{name}")
        return self._full(name)

    def write_files(self, files: list[dict[str, str | bytes]]) -> list[WriteInfo]:
        """Several files at once: [{"path": ..., "data": ...}, ...]."""
        return [self.write(str(file["path"]), file["data"]) for file in files]

    def list(self, path: str = ".", depth: int = 1) -> list[EntryInfo]:
        """The entries of a directory, depth levels down, links not followed. Those of a directory
        further down that cannot be read are left out.
        """
        if depth < 1:
            raise InvalidArgumentException(f"depth must be at least 1, got {depth}")
        found = self._entries(path)
        top = os.path.normpath(self._full(path)).rstrip("/").count("/")
        for entry in found:  # which grows meanwhile
            deeper = entry.path.count("/") - top < depth and len(found) < MAX_ENTRIES
            if deeper and entry.type is FileType.DIR:
                try:
                    found += self._entries(entry.path)
                except (SandboxNotFoundException, SandboxInfraError):
                    raise
                except SandboxException:
                    continue
        return found[:MAX_ENTRIES]

    def _entries(self, path: str) -> builtins.list[EntryInfo]:
        found: builtins.list[EntryInfo] = []
        full = os.path.normpath(self._full(path))
        with self._open(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            for name in sorted(os.listdir(fd)):
                with contextlib.suppress(FileNotFoundError):
                    found.append(_entry(fd, name, full))
        return found

    def get_info(self, path: str) -> EntryInfo:
        """What an entry is; a link is not followed."""
        with self._parent(path) as (fd, name):
            full = os.path.normpath(self._full(path))
            return _entry(fd, name, os.path.dirname(full))

    def exists(self, path: str) -> bool:
        """Whether something is there; a link counts as what it points to inside the session."""
        try:
            with self._open(path, os.O_PATH):
                return True
        except (FileNotFoundException, InvalidArgumentException):
            return False

    def remove(self, path: str) -> None:
        """Delete a file, or a directory with all in it; a link, not what it points to."""
        with self._parent(path) as (fd, name):
            if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=fd)
                return
        self._remove_directory(os.path.normpath(self._full(path)))

    def _remove_directory(self, path: str) -> None:
        """By a program in the session: what its code puts there meanwhile is the session's."""
        argv = ["/bin/bash", "-c", REMOVE, path]
        program = Program(self._channels, argv, env={}, directory="/", output_max=MIB)
        program.close_stdin()
        try:
            if not program.wait(REMOVE_S):
                raise TimeoutException(f"{path}: not removed in {REMOVE_S:g} s")
            if program.exit_code != 0:
                said = program.stderr[:500].decode("utf-8", "replace")
                failed = SandboxInfraError if program.machine_failed else SandboxException
                raise failed(f"{path}: {said or program.error}")
        finally:
            program.close()

    def rename(self, old_path: str, new_path: str) -> EntryInfo:
        """Move an entry."""
        with self._parent(old_path) as (old, old_name), self._parent(new_path) as (new, new_name):
            os.rename(old_name, new_name, src_dir_fd=old, dst_dir_fd=new)
        return self.get_info(new_path)

    def make_dir(self, path: str) -> bool:
        """Make a directory and those above it. False if it was there."""
        there = os.path.normpath(self._full(path))
        missing: builtins.list[str] = []
        while not self.exists(there):
            missing.append(there)
            there = os.path.dirname(there)
        with self._open(there, os.O_RDONLY | os.O_DIRECTORY):
            pass
        for part in reversed(missing):
            with self._parent(part) as (fd, name):
                os.mkdir(name, 0o755, dir_fd=fd)
        return bool(missing)

    def watch_dir(self, path: str, **_: object) -> None:
        """Not supported: list() again instead."""
        raise NotSupportedException("watch_dir() is not supported; list() the directory again")


def _entry(directory: int, name: str, path: str) -> EntryInfo:
    about = os.stat(name, dir_fd=directory, follow_symlinks=False)
    kinds = {stat.S_IFREG: FileType.FILE, stat.S_IFDIR: FileType.DIR}
    link = stat.S_ISLNK(about.st_mode)
    return EntryInfo(
        name,
        kinds.get(stat.S_IFMT(about.st_mode)),
        os.path.join(path, name),
        about.st_size,
        stat.S_IMODE(about.st_mode),
        datetime.datetime.fromtimestamp(min(max(0, about.st_mtime), LATEST), datetime.UTC),
        os.readlink(name, dir_fd=directory) if link else None,
    )

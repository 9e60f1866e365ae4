"""Unpacks the tar of an image layer into a directory that overlayfs stacks.

The tar may be hostile. Names are resolved inside the image before anything is opened, and each
write goes through a descriptor of a directory that was reached without following a link.
"""

import os
import shutil
import stat
import tarfile
from collections.abc import Sequence
from typing import IO, Any, Self

MAX_BYTES, MAX_FILES, MAX_DEPTH, MAX_LINKS = 32 << 30, 2_000_000, 200, 40
MAX_HEADER = 1 << 18  # bytes of a long name or of extended attributes: tarfile reads them at once
OPAQUE = "user.overlay.opaque"
WHITEOUT, HIDE_ALL = ".wh.", ".wh..wh..opq"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
Entry = tuple[str, os.stat_result]


class ImageError(ValueError):
    """A source that is no valid image, or has something that is not supported."""


class Header(tarfile.TarInfo):
    """A tar header whose sizes are checked before tarfile allocates memory for them."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        if len(buf) % tarfile.BLOCKSIZE:  # tarfile takes it for the end, as it does a damaged one
            raise ImageError("the tar is truncated")
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if any(buf):
                raise ImageError(f"damaged, or no tar: {error}") from error
            raise
        if header.size < 0 or (header.type in b"xgXLK" and header.size > MAX_HEADER):
            raise ImageError(f"{header.name!r}: a tar header of {header.size} bytes")
        return header


def clean(name: str) -> str:
    """A tar's name without "/", "./" and "..", which lead to the root at most, as in tar(1)."""
    path = os.path.normpath("/" + name.replace("\0", "")).strip("/")
    if path.count("/") > MAX_DEPTH or any(len(os.fsencode(p)) > 255 for p in path.split("/")):
        raise ImageError(f"{name[:80]!r}...: a name is too long or too deep")
    return path


def is_whiteout(info: os.stat_result) -> bool:
    """Whether overlayfs reads it as "removed"."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


class Stack:
    """The merged view of finished layers, which do not change any more."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._directories = {"": list(layers[::-1])}

    def directories(self, path: str) -> list[str]:
        """The directories that are merged at a real path, topmost first."""
        if path not in self._directories:
            parent, _, name = path.rpartition("/")
            merged = self._directories[path] = []
            for directory in self.directories(parent):
                if (info := _lstat(at := f"{directory}/{name}")) is None:
                    continue
                if not stat.S_ISDIR(info.st_mode):
                    break
                merged.append(at)
                if OPAQUE in os.listxattr(at):
                    break
        return self._directories[path]

    def entry(self, path: str) -> Entry | None:
        """What is at a real path."""
        parent, _, name = path.rpartition("/")
        for directory in self.directories(parent):
            if (info := _lstat(at := f"{directory}/{name}")) is not None:
                return None if is_whiteout(info) else (at, info)
        return None

    def real(self, path: str) -> tuple[str, bool]:
        """A path with its links resolved inside the image, and whether all of it exists."""
        pending, at, links, exists = path.split("/")[::-1], "", 0, True
        while pending:
            name = pending.pop()
            if name in ("", ".", ".."):
                at = at.rpartition("/")[0] if name == ".." else at
                continue
            step = f"{at}/{name}" if at else name
            entry = self.entry(step)
            exists &= entry is not None
            if entry is not None and stat.S_ISLNK(entry[1].st_mode):
                target, links = os.readlink(entry[0]), links + 1
                pending += target.split("/")[::-1]
                step = "" if target.startswith("/") else at
            if links > MAX_LINKS or step.count("/") > MAX_DEPTH:
                raise ImageError(f"{path[:80]!r}: too many symbolic links or directories")
            at = step
        return at, exists


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


class NewLayer(Stack):
    """A layer while it is unpacked: the view of an image with it on top."""

    def __init__(self, top: str, below: Sequence[str], owner: int) -> None:
        super().__init__(below)
        self._top, self._owner, self.bytes = top, owner, 0
        self._known: dict[str, str] = {}
        self._opaque: set[str] = set()
        self._at = ("", os.open(top, _DIRECTORY))

    def close(self) -> None:
        os.close(self._at[1])

    def entry(self, path: str) -> Entry | None:
        try:
            info = os.lstat(at := f"{self._top}/{path}")
        except NotADirectoryError:
            return None
        except FileNotFoundError:
            parts = path.split("/")
            hidden = any("/".join(parts[:n]) in self._opaque for n in range(len(parts)))
            return None if hidden else super().entry(path)
        return None if is_whiteout(info) else (at, info)

    def unpack(self, file: IO[bytes]) -> None:
        """Read one tar, from the first byte to its end mark."""
        with tarfile.open(fileobj=file, mode="r|", tarinfo=Header) as tar:
            number = 0
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # or it keeps all of them
                number += 1
                self.bytes += member.size if member.isreg() else 0
                if number > MAX_FILES or self.bytes > MAX_BYTES or len(tar.pax_headers) > 64:
                    raise ImageError(f"a layer has over {MAX_FILES} files or {MAX_BYTES} bytes")
                self._add(tar, member)

    def _add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parent, _, base = clean(member.name).rpartition("/")
        parent = self._parent(parent)
        path, mode = f"{parent}/{base}".strip("/"), member.mode & 0o1777
        if base.startswith(WHITEOUT):
            self._hide(parent, base)
        elif not base:
            if member.isdir():
                os.chmod(self._top, mode | 0o700)
        elif member.isdir():
            self._forget(path, directory=True)
            self._make_directory(self._directory(parent), base, path, mode)
        elif member.islnk():
            self._link(parent, base, path, clean(member.linkname))
        elif member.isreg() or member.issym() or member.isfifo():  # devices: a session has its own
            self._forget(path)
            at = self._directory(parent)
            self._remove(at, base, path)
            if member.issym():
                os.symlink(member.linkname, base, dir_fd=at)
            elif member.isfifo():
                os.mkfifo(base, mode & 0o777, dir_fd=at)
            else:
                self._write(at, base, tar.extractfile(member), member)
            if self._owner >= 0:
                os.chown(base, self._owner, self._owner, dir_fd=at, follow_symlinks=False)

    def _parent(self, path: str) -> str:
        if path not in self._known:
            real, exists = self.real(path)
            if not exists:
                return real
            self._known[path] = real
        return self._known[path]

    def _forget(self, path: str, *, directory: bool = False) -> None:
        """Drop resolved names if a directory or link of them is about to be replaced."""
        entry = self.entry(path)
        kind = stat.S_IFMT(entry[1].st_mode) if entry is not None else 0
        if kind == stat.S_IFLNK or (kind == stat.S_IFDIR and not directory):
            self._known.clear()

    def _directory(self, path: str) -> int:
        """A descriptor of a directory of this layer, which is made if it is missing."""
        if path == self._at[0]:
            return self._at[1]
        fd, at = os.open(self._top, _DIRECTORY), ""
        try:
            for part in path.split("/") if path else ():
                at = f"{at}/{part}".strip("/")
                info = _lstat_at(part, fd)
                if info is None or not stat.S_ISDIR(info.st_mode):
                    below = self.directories(at)
                    mode = os.lstat(below[0]).st_mode if below else 0o755
                    self._make_directory(fd, part, at, mode)
                inner = os.open(part, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = inner
        except BaseException:
            os.close(fd)
            raise
        os.close(self._at[1])
        self._at = (path, fd)
        return fd

    def _make_directory(self, at: int, name: str, path: str, mode: int) -> None:
        info = _lstat_at(name, at)
        if info is None or not stat.S_ISDIR(info.st_mode):
            hidden = info is not None and is_whiteout(info)
            self._remove(at, name, path)
            os.mkdir(name, 0o700, dir_fd=at)
        else:
            hidden = False
        fd = os.open(name, _DIRECTORY, dir_fd=at)
        try:
            os.fchmod(fd, mode & 0o1777 | 0o700)
            if self._owner >= 0:
                os.fchown(fd, self._owner, self._owner)
            if hidden:  # what the whiteout hid must not show through
                self._make_opaque(fd, path)
        finally:
            os.close(fd)

    def _make_opaque(self, fd: int, path: str) -> None:
        os.setxattr(fd, OPAQUE, b"y")
        self._opaque.add(path)
        self._known.clear()

    def _hide(self, parent: str, base: str) -> None:
        """What a whiteout asks for."""
        name = base.removeprefix(WHITEOUT)
        if base == HIDE_ALL:
            self._make_opaque(self._directory(parent), parent)
            return
        if name in ("", ".", ".."):  # `.wh...` would remove the parent of this layer
            raise ImageError(f"{base!r}: not a whiteout")
        path = f"{parent}/{name}".strip("/")
        if self.entry(path) is None:
            return
        at = self._directory(parent)
        self._remove(at, name, path)
        self._known.clear()
        if self.entry(path) is not None:
            os.mknod(name, stat.S_IFCHR | 0o600, 0, dir_fd=at)  # anybody may, since Linux 5.8
            if self._owner >= 0:
                os.chown(name, self._owner, self._owner, dir_fd=at, follow_symlinks=False)

    def _link(self, parent: str, base: str, path: str, linked: str) -> None:
        """A hard link, to a file of this layer or of one below."""
        head, _, tail = linked.rpartition("/")
        source = f"{self._parent(head)}/{tail}".strip("/")
        entry = self.entry(source)
        if entry is None or not (stat.S_ISREG(entry[1].st_mode) or stat.S_ISLNK(entry[1].st_mode)):
            raise ImageError(f"{path!r} is a link to {linked!r}, which is no file")
        if source == path:
            return
        self._forget(path)
        at = self._directory(parent)
        self._remove(at, base, path)
        os.link(entry[0], base, dst_dir_fd=at, follow_symlinks=False)

    def _remove(self, at: int, name: str, path: str) -> None:
        """Remove what this layer has there."""
        info = _lstat_at(name, at)
        if info is not None and stat.S_ISDIR(info.st_mode):
            shutil.rmtree(name, dir_fd=at)
            self._opaque = {p for p in self._opaque if p != path and not p.startswith(f"{path}/")}
            if f"{self._at[0]}/".startswith(f"{path}/"):
                os.close(self._at[1])
                self._at = ("", os.open(self._top, _DIRECTORY))
        elif info is not None:
            os.unlink(name, dir_fd=at)

    def _write(self, at: int, name: str, data: Any, member: tarfile.TarInfo) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=at), "wb") as out:
            shutil.copyfileobj(data, out, 1 << 20)
            os.fchmod(out.fileno(), member.mode & 0o777 | 0o400)  # no set-id bit on the host
        seconds = member.mtime if 0 <= member.mtime < 1 << 33 else 0
        os.utime(name, (seconds, seconds), dir_fd=at, follow_symlinks=False)


def _lstat_at(name: str, at: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return None

"""Unpacks the tar of an image layer into a directory for overlayfs.

The tar may be hostile. Names are resolved inside the image before anything is opened, and each
write goes through the descriptor of a directory that was opened without following a link.
"""

import contextlib
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any, Self

MAX_BYTES, MAX_FILES, MAX_DEPTH, MAX_LINKS = 32 << 30, 2_000_000, 200, 40
MAX_HEADER = 1 << 18  # bytes of a long name or of extended attributes, which tarfile reads whole
OPAQUE = "user.overlay.opaque"
WHITEOUT, HIDE_ALL = ".wh.", ".wh..wh..opq"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
Entry = tuple[str, os.stat_result]


class ImageError(ValueError):
    """A source that is not a valid image or has unsupported content."""


class Header(tarfile.TarInfo):
    """A tar header whose sizes are checked before tarfile allocates memory for them."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        if len(buf) % tarfile.BLOCKSIZE:  # tarfile would treat a short block as the end
            raise ImageError("the tar is truncated")
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if any(buf):
                raise ImageError(f"damaged, or not a tar: {error}") from error
            raise
        if header.size < 0 or (header.type in b"xgXLK" and header.size > MAX_HEADER):
            raise ImageError(f"{header.name!r}: a tar header of {header.size} bytes")
        return header


def clean(name: str) -> str:
    """Normalise a tar's name. As in tar(1), "/" and ".." cannot leave the root."""
    path = os.path.normpath("/" + name.replace("\0", "")).strip("/")
    if path.count("/") > MAX_DEPTH or any(len(os.fsencode(p)) > 255 for p in path.split("/")):
        raise ImageError(f"{name[:80]!r}...: a name is too long or too deep")
    return path


def is_whiteout(info: os.stat_result) -> bool:
    """Whether overlayfs treats the file as a removed name."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


class Stack:
    """The merged view of finished layers, which do not change."""

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
        parent, _, name = path.rpartition("/")
        for directory in self.directories(parent):
            if (info := _lstat(at := f"{directory}/{name}")) is not None:
                return None if is_whiteout(info) else (at, info)
        return None

    def real(self, path: str) -> str:
        """A path with its links resolved inside the image."""
        pending, at, links = path.split("/")[::-1], "", 0
        while pending:
            name = pending.pop()
            if name in ("", ".", ".."):
                at = at.rpartition("/")[0] if name == ".." else at
                continue
            step = f"{at}/{name}" if at else name
            entry = self.entry(step)
            if entry is not None and stat.S_ISLNK(entry[1].st_mode):
                target, links = os.readlink(entry[0]), links + 1
                pending += target.split("/")[::-1]
                step = "" if target.startswith("/") else at
            if links > MAX_LINKS or step.count("/") > MAX_DEPTH:
                raise ImageError(f"{path[:80]!r}: too many symbolic links or directories")
            at = step
        return at


def _lstat(path: str, at: int | None = None) -> os.stat_result | None:
    try:
        return os.stat(path, dir_fd=at, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


class NewLayer(Stack):
    """A layer that is being unpacked, on top of the layers below."""

    def __init__(self, top: str, below: Sequence[str], owner: int) -> None:
        super().__init__(below)
        self._top, self._owner, self.bytes = top, owner, 0
        self._opaque: set[str] = set()

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

    def unpack(self, file: Any) -> None:
        """Unpack a tar, up to its end mark."""
        with tarfile.open(fileobj=file, mode="r|", tarinfo=Header) as tar:
            number = 0
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # else tarfile keeps all of them
                number += 1
                self.bytes += member.size if member.isreg() else 0
                if number > MAX_FILES or self.bytes > MAX_BYTES or len(tar.pax_headers) > 64:
                    raise ImageError(f"a layer has over {MAX_FILES} files or {MAX_BYTES} bytes")
                parent, _, name = clean(member.name).rpartition("/")
                self._add(tar, member, self.real(parent), name)

    def _add(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parent: str, name: str) -> None:
        if name.startswith(WHITEOUT):
            self._hide(parent, name)
        elif member.isdir():
            with self._directory(f"{parent}/{name}".strip("/"), member.mode):
                pass
        elif name and (member.isreg() or member.issym() or member.isfifo() or member.islnk()):
            linked = self._linked(member) if member.islnk() else ""
            path = f"{parent}/{name}".strip("/")
            if linked == f"{self._top}/{path}":
                return
            with self._directory(parent) as at:
                self._remove(at, name, path)
                if linked:
                    os.link(linked, name, dst_dir_fd=at, follow_symlinks=False)
                elif member.issym():
                    os.symlink(member.linkname, name, dir_fd=at)
                elif member.isfifo():
                    os.mkfifo(name, member.mode & 0o777, dir_fd=at)
                else:
                    _write(at, name, tar.extractfile(member), member)
                self._own(name, at)

    def _own(self, name: str, at: int) -> None:
        if self._owner >= 0:
            os.chown(name, self._owner, self._owner, dir_fd=at, follow_symlinks=False)

    @contextlib.contextmanager
    def _directory(self, path: str, mode: int | None = None) -> Iterator[int]:
        """Open a directory of this layer. Creates it if it is missing."""
        fd, at = os.open(self._top, _DIRECTORY), ""
        try:
            for name in path.split("/") if path else ():
                at = f"{at}/{name}".strip("/")
                info = _lstat(name, fd)
                if is_new := info is None or not stat.S_ISDIR(info.st_mode):
                    below = self.directories(at)
                    self._remove(fd, name, at)
                    os.mkdir(name, 0o700, dir_fd=fd)
                    self._own(name, fd)
                inner = os.open(name, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = inner
                if is_new:
                    os.fchmod(fd, (os.stat(below[0]).st_mode if below else 0o755) & 0o1777 | 0o700)
                    if info is not None and is_whiteout(info):  # what it hid must stay hidden
                        self._make_opaque(fd, at)
            if mode is not None:
                os.fchmod(fd, mode & 0o1777 | 0o700)
            yield fd
        finally:
            os.close(fd)

    def _make_opaque(self, fd: int, path: str) -> None:
        os.setxattr(fd, OPAQUE, b"y")
        self._opaque.add(path)

    def _hide(self, parent: str, whiteout: str) -> None:
        name = whiteout.removeprefix(WHITEOUT)
        if name in ("", ".", ".."):  # `.wh...` would remove the parent of this layer
            raise ImageError(f"{whiteout!r}: not a whiteout")
        path = f"{parent}/{name}".strip("/")
        if whiteout != HIDE_ALL and self.entry(path) is None:
            return
        with self._directory(parent) as at:
            if whiteout == HIDE_ALL:
                self._make_opaque(at, parent)
                return
            self._remove(at, name, path)
            if self.entry(path) is not None:
                os.mknod(name, stat.S_IFCHR | 0o600, 0, dir_fd=at)  # unprivileged since Linux 5.8
                self._own(name, at)

    def _linked(self, member: tarfile.TarInfo) -> str:
        """The target of a hard link of this layer; it may be in a layer below."""
        head, _, name = clean(member.linkname).rpartition("/")
        entry = self.entry(f"{self.real(head)}/{name}".strip("/"))
        if entry is None or not (stat.S_ISREG(entry[1].st_mode) or stat.S_ISLNK(entry[1].st_mode)):
            raise ImageError(f"{member.name!r} links to {member.linkname!r}, which is not a file")
        return entry[0]

    def _remove(self, at: int, name: str, path: str) -> None:
        info = _lstat(name, at)
        if info is not None and stat.S_ISDIR(info.st_mode):
            shutil.rmtree(name, dir_fd=at)
            self._opaque = {p for p in self._opaque if not f"{p}/".startswith(f"{path}/")}
        elif info is not None:
            os.unlink(name, dir_fd=at)


def _write(at: int, name: str, data: Any, member: tarfile.TarInfo) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(name, flags, 0o600, dir_fd=at), "wb") as out:
        shutil.copyfileobj(data, out, 1 << 20)
        os.fchmod(out.fileno(), member.mode & 0o777 | 0o400)  # no set-id bit on the host
    seconds = member.mtime if 0 <= member.mtime < 1 << 33 else 0
    os.utime(name, (seconds, seconds), dir_fd=at, follow_symlinks=False)

"""Where images come from: OCI layouts, archives of `docker save`, root directories, registries."""

import contextlib
import gzip
import hashlib
import importlib
import json
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from agentgrpo.sandbox.layers import MAX_BYTES, Header, ImageError, clean

MAX_JSON, MAX_MEMBERS = 8 << 20, 100_000
ROOT_FOLDERS = {"bin", "usr", "etc", "sbin"}
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class Layer(NamedTuple):
    """Where a layer is read from: its digest, or a name inside an archive; and its diff id."""

    blob: str
    diff: str
    size: int


class Contents(NamedTuple):
    """What a source consists of, its layers the lowest first, and what opens a layer."""

    config: dict[str, Any]
    layers: list[Layer]
    digest: str
    open: Callable[[str], Any]


class Blobs(Protocol):
    """Where the parts of an OCI image are read from; nothing is verified yet."""

    def index(self) -> Any:
        """The image's manifest, or an index of manifests."""

    def manifest(self, digest: str) -> Any:
        """A manifest."""

    def open(self, digest: str) -> Any:
        """A configuration or layer."""


def find_contents(source: str, opened: contextlib.ExitStack) -> Contents:
    """Recognise a source, and read all of it but its layers."""
    if source.startswith("docker://"):
        from agentgrpo.sandbox.registry import Registry

        registry = Registry(source.removeprefix("docker://"))
        return _oci(registry, registry.digest, several=True)
    path = Path(source)
    if (path / "oci-layout").is_file():
        return _oci(_Layout(lambda name: (path / name).open("rb")))
    if path.is_dir():
        if not ROOT_FOLDERS & set(os.listdir(path)):
            raise ImageError("expected an OCI layout or a root directory with bin, usr or etc")
        packed = opened.enter_context(scratch_file())
        with tarfile.open(fileobj=packed, mode="w") as tar:
            pack(tar, path, "")
        return _root(packed)
    if not path.is_file():
        raise ImageError("no such file or folder; an image of a registry is docker://NAME")
    file = _plain(path, opened)
    archive = _Archive(file)
    if archive.has("oci-layout"):
        return _oci(_Layout(archive.open))
    if archive.has("manifest.json"):
        return _docker(archive)
    if not ROOT_FOLDERS & archive.folders:
        raise ImageError("the tar holds no OCI layout, no image of `docker save` and no root")
    return _root(file)


def machine() -> str:
    """This machine's architecture, as images name it."""
    return {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


def _fits(manifest: dict[str, Any]) -> bool:
    platform = manifest.get("platform") or {"os": "linux", "architecture": machine()}
    return (platform.get("os"), platform.get("architecture")) == ("linux", machine())


def _read(file: IO[bytes], digest: str = "") -> tuple[Any, str]:
    """A JSON file that has this digest, and its digest."""
    with file:
        data = b""
        while len(data) <= MAX_JSON and (more := file.read(1 << 20)):
            data += more
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if len(data) > MAX_JSON or digest not in ("", found):
        raise ImageError(f"{digest}: expected a manifest of this digest, got {found}")
    return json.loads(data), found


def _oci(blobs: Blobs, digest: str = "", *, several: bool = False) -> Contents:
    """The image for this machine of a layout or registry."""
    manifest, digest = _read(blobs.index(), digest)
    while "manifests" in manifest:  # an index of platforms may be below the first
        fits = list(dict.fromkeys(m["digest"] for m in manifest["manifests"] if _fits(m)))
        if not fits:
            raise ImageError(f"no image for linux/{machine()}")
        if len(fits) > 1 and not several:
            raise ImageError(f"expected one image, got {len(fits)}. Remedy: copy out one of them")
        manifest, digest = _read(blobs.manifest(fits[0]), fits[0])
    config, _ = _read(blobs.open(manifest["config"]["digest"]), manifest["config"]["digest"])
    named = [(layer["digest"], int(layer.get("size", 0))) for layer in manifest["layers"]]
    return Contents(config, _layers(config, named), digest, blobs.open)


def _layers(config: dict[str, Any], named: list[tuple[str, int]]) -> list[Layer]:
    diffs = config["rootfs"]["diff_ids"]
    if len(diffs) != len(named) or not named:
        raise ImageError(f"{len(named)} layers, and {len(diffs)} digests of their content")
    return [Layer(blob, diff, size) for (blob, size), diff in zip(named, diffs, strict=True)]


def _docker(archive: "_Archive") -> Contents:
    images, _ = _read(archive.open("manifest.json"))
    if len(images) != 1:
        raise ImageError(f"expected one image, got {len(images)}. Remedy: docker save NAME")
    config, digest = _read(archive.open(images[0]["Config"]))
    named = [(name, 0) for name in images[0]["Layers"]]
    return Contents(config, _layers(config, named), digest, archive.open)


def _root(file: IO[bytes]) -> Contents:
    """The one layer of a root directory's tar."""

    def start(_: str) -> Any:
        file.seek(0)
        return contextlib.nullcontext(file)

    with start("") as whole:
        diff = Hashed(whole).finish()
    return Contents({}, [Layer("", diff, file.tell())], diff, start)


class _Layout:
    """An OCI layout, in a folder or in an archive."""

    def __init__(self, open_file: Callable[[str], IO[bytes]]) -> None:
        self._open = open_file

    def index(self) -> IO[bytes]:
        return self._open("index.json")

    def open(self, digest: str) -> IO[bytes]:
        match = _DIGEST.fullmatch(digest)
        if match is None:
            raise ImageError(f"expected a sha256 digest, got {digest!r:.80}")
        return self._open(f"blobs/sha256/{match[1]}")

    manifest = open


def scratch_file() -> IO[bytes]:
    """A file without a name."""
    return tempfile.TemporaryFile()


class _Archive:
    """The files of an uncompressed tar, read where they are."""

    def __init__(self, file: IO[bytes]) -> None:
        self._tar = tarfile.open(fileobj=file, mode="r:", tarinfo=Header)  # noqa: SIM115
        self._members: dict[str, tarfile.TarInfo] = {}
        self.folders: set[str] = set()
        while (member := self._tar.next()) is not None:
            self._tar.members.clear()  # type: ignore[attr-defined]
            name = clean(member.name)
            self.folders.add(name.partition("/")[0])
            if name.count("/") < 3 and not member.isdir():
                self._members[name] = member
            if len(self._members) > MAX_MEMBERS:
                raise ImageError(f"over {MAX_MEMBERS} files at the top of the archive")

    def has(self, name: str) -> bool:
        return name in self._members

    def open(self, name: str) -> IO[bytes]:
        member = self._members.get(clean(name))
        for _ in range(8):  # before 2024 `docker save` wrote equal layers as links
            if member is not None and member.issym():
                target = f"{os.path.dirname(member.name)}/{member.linkname}"
                member = self._members.get(clean(target))
        file = self._tar.extractfile(member) if member is not None and member.isreg() else None
        if file is None:
            raise ImageError(f"the archive has no file {name!r:.80}")
        return file


def _plain(path: Path, opened: contextlib.ExitStack) -> IO[bytes]:
    """A tar, decompressed to a temporary file if it is compressed."""
    file = opened.enter_context(path.open("rb"))
    with decompressed(file) as content:
        if isinstance(content, Prefixed):
            file.seek(0)
            return file
        copy = opened.enter_context(scratch_file())
        counted = Hashed(content)
        while data := counted.read():
            copy.write(data)
        copy.seek(0)
        return copy


def pack(tar: tarfile.TarFile, folder: Path, target: str, mtime: int | None = None) -> None:
    """Add a folder's files, folders and links; no link is followed, also if files are exchanged."""
    for base, folders, files, fd in os.fwalk(folder):
        folders.sort()
        for name in sorted((*folders, *files)):
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            at = os.path.normpath(f"/{target}/{os.path.relpath(base, folder)}/{name}").strip("/")
            member = tarfile.TarInfo(at)
            member.mode = stat.S_IMODE(info.st_mode)
            member.mtime = int(info.st_mtime) if mtime is None else mtime
            if stat.S_ISDIR(info.st_mode):
                member.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(info.st_mode):
                member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=fd)
            elif stat.S_ISREG(info.st_mode):
                pack_file(tar, member, os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=fd))
                continue
            else:
                continue
            tar.addfile(member)


def pack_file(tar: tarfile.TarFile, member: tarfile.TarInfo, fd: int) -> None:
    """Add one open file, of the size that it has now."""
    with open(fd, "rb") as file:
        member.size = os.fstat(fd).st_size
        tar.addfile(member, file)


class Hashed:
    """A file that is hashed and counted while it is read."""

    def __init__(self, file: Any, report: Callable[[int], None] | None = None) -> None:
        self._file, self._hash, self._size, self._report = file, hashlib.sha256(), 0, report

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._file.read(min(size, 1 << 20) if size >= 0 else 1 << 20)
        self._hash.update(data)
        self._size += len(data)
        if self._size > MAX_BYTES:
            raise ImageError(f"a layer has over {MAX_BYTES} bytes")
        if self._report is not None:
            self._report(self._size)
        return data

    def finish(self) -> str:
        """The digest of all of it."""
        while self.read():
            pass
        return f"sha256:{self._hash.hexdigest()}"


class Prefixed:
    """A file whose first bytes were read already."""

    def __init__(self, head: bytes, file: Any) -> None:
        self._head, self._file = head, file

    def read(self, size: int = -1) -> bytes:
        if not self._head:
            return bytes(self._file.read(size))
        size = len(self._head) if size < 0 else size
        data, self._head = self._head[:size], self._head[size:]
        return data


@contextlib.contextmanager
def decompressed(file: Any) -> Iterator[Any]:
    """What a file holds, by its first bytes."""
    head = b""
    while len(head) < 4 and (more := file.read(4 - len(head))):
        head += more
    whole = Prefixed(head, file)
    if head.startswith(b"\x1f\x8b"):
        with gzip.GzipFile(fileobj=whole) as plain:  # type: ignore[call-overload]
            yield plain
    elif head == b"\x28\xb5\x2f\xfd":
        with _zstd(whole) as plain:
            yield plain
    else:
        yield whole


@contextlib.contextmanager
def _zstd(file: Any) -> Iterator[Any]:
    """By Python's own module (from 3.14 on), its backport, or zstandard."""
    for name in ("compression.zstd", "backports.zstd", "zstandard"):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            break
    else:
        raise ImageError("a layer is compressed by zstd. Remedy: pip install zstandard")
    try:
        if name == "zstandard":
            yield module.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        else:
            yield module.ZstdFile(file)
    except module.ZstdError as error:
        raise ImageError(f"zstd: {error}") from error

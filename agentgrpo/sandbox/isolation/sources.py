"""Sources of images: OCI layouts, archives of `docker save`, root directories, registries."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from agentgrpo.sandbox.isolation.layers import MAX_BYTES, Header, ImageError, clean
from agentgrpo.sandbox.isolation.registry import Registry

MAX_JSON, MAX_MEMBERS = 8 << 20, 100_000
ROOT_FOLDERS = {"bin", "usr", "etc", "sbin"}


class Layer(NamedTuple):
    """A layer: its digest or its name in an archive (blob), its diff id and size."""

    blob: str
    diff: str
    size: int


class Contents(NamedTuple):
    """The content of a source: layers lowest first, and a function that opens a layer."""

    config: dict[str, Any]
    layers: list[Layer]
    digest: str
    open: Callable[[str], Any]


def find_contents(source: str, opened: contextlib.ExitStack) -> Contents:
    """Detect the type of a source and read everything except the layers."""
    if source.startswith("docker://"):
        registry = Registry(source.removeprefix("docker://"))
        return _oci(registry.manifest, registry.blob, registry.reference, several=True)
    path = Path(source)
    if path.is_dir() and (path / "oci-layout").is_file():
        return _layout(lambda name: (path / name).open("rb"))
    if path.is_dir():
        if not ROOT_FOLDERS & set(os.listdir(path)):
            raise ImageError("expected an OCI layout or a root directory with bin, usr or etc")
        tar_file = opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        with tarfile.open(fileobj=tar_file, mode="w") as tar:
            pack(tar, path, "")
        return _root(tar_file)
    if not path.is_file():
        raise ImageError("no such file or folder. For an image in a registry: docker://NAME")
    file = _uncompressed(path, opened)
    archive = _Archive(file)
    if "oci-layout" in archive.members:
        return _layout(archive.open)
    if "manifest.json" in archive.members:
        return _docker(archive)
    if not ROOT_FOLDERS & archive.folders:
        raise ImageError("expected a tar of an OCI layout, `docker save` or a root directory")
    return _root(file)


def machine() -> str:
    """This machine's architecture, in the spelling of images."""
    return {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


def _fits(manifest: dict[str, Any]) -> bool:
    platform = manifest.get("platform") or {"os": "linux", "architecture": machine()}
    return (platform.get("os"), platform.get("architecture")) == ("linux", machine())


def _read(file: Any, digest: str = "") -> tuple[Any, str]:
    """Read a JSON file and its digest. Checks a given digest if it is sha256."""
    data = b""
    with file:
        while len(data) <= MAX_JSON and (more := file.read(1 << 20)):
            data += more
    actual = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if len(data) > MAX_JSON or (digest.startswith("sha256:") and digest != actual):
        raise ImageError(f"{digest}: expected a file of this digest, got {actual}")
    return json.loads(data), actual


def _layout(open_file: Callable[[str], Any]) -> Contents:
    def blob(digest: str) -> Any:
        match = re.fullmatch("sha256:([0-9a-f]{64})", digest)
        if match is None:
            raise ImageError(f"expected a sha256 digest, got {digest!r:.80}")
        return open_file(f"blobs/sha256/{match[1]}")

    return _oci(lambda name: blob(name) if name else open_file("index.json"), blob)


def _oci(
    manifest: Callable[[str], Any], blob: Callable[[str], Any], name: str = "",
    *, several: bool = False,
) -> Contents:  # fmt: skip
    """Find the image for this machine in a layout or registry."""
    document, digest = _read(manifest(name), name)
    while "manifests" in document:  # an index can point to another index
        fits = list(dict.fromkeys(m["digest"] for m in document["manifests"] if _fits(m)))
        if not fits or (len(fits) > 1 and not several):
            raise ImageError(f"expected one image for linux/{machine()}, got {len(fits)}")
        document, digest = _read(manifest(fits[0]), fits[0])
    config, _ = _read(blob(document["config"]["digest"]), document["config"]["digest"])
    blobs = [(layer["digest"], int(layer.get("size", 0))) for layer in document["layers"]]
    return Contents(config, _layers(config, blobs), digest, blob)


def _layers(config: dict[str, Any], blobs: list[tuple[str, int]]) -> list[Layer]:
    diffs = config["rootfs"]["diff_ids"]
    if len(diffs) != len(blobs) or not blobs:
        raise ImageError(f"expected a diff id for each of {len(blobs)} layers, got {len(diffs)}")
    return [Layer(blob, diff, size) for (blob, size), diff in zip(blobs, diffs, strict=True)]


def _docker(archive: "_Archive") -> Contents:
    images, _ = _read(archive.open("manifest.json"))
    if len(images) != 1:
        raise ImageError(f"expected one image, got {len(images)}. Remedy: docker save NAME")
    config, digest = _read(archive.open(images[0]["Config"]))
    layers = _layers(config, [(name, 0) for name in images[0]["Layers"]])
    return Contents(config, layers, digest, archive.open)


def _root(file: IO[bytes]) -> Contents:
    file.seek(0)
    diff = Hashed(file).finish()
    size = file.tell()

    def start(_: str) -> Any:
        file.seek(0)
        return contextlib.nullcontext(file)

    return Contents({}, [Layer("", diff, size)], diff, start)


class _Archive:
    """Reads files of an uncompressed tar in place."""

    def __init__(self, file: IO[bytes]) -> None:
        self._tar = tarfile.open(fileobj=file, mode="r:", tarinfo=Header)  # noqa: SIM115
        self.members: dict[str, tarfile.TarInfo] = {}
        self.folders: set[str] = set()
        while (member := self._tar.next()) is not None:
            self._tar.members.clear()  # type: ignore[attr-defined]
            name = clean(member.name)
            self.folders.add(name.partition("/")[0])
            if name.count("/") < 3 and not member.isdir():
                self.members[name] = member
            if len(self.members) > MAX_MEMBERS:
                raise ImageError(f"over {MAX_MEMBERS} files at the top of the archive")

    def open(self, name: str) -> Any:
        member = self.members.get(clean(name))
        for _ in range(8):  # before 2024 `docker save` wrote equal layers as links
            if member is not None and member.issym():
                target = f"{os.path.dirname(member.name)}/{member.linkname}"
                member = self.members.get(clean(target))
        if member is None or not member.isreg():
            raise ImageError(f"the archive has no file {name!r:.80}")
        return self._tar.extractfile(member)


def _uncompressed(path: Path, opened: contextlib.ExitStack) -> IO[bytes]:
    """Open a tar; decompress it to a temporary file if it is compressed."""
    file = opened.enter_context(path.open("rb"))
    with decompressed(file) as content:
        if content is file:
            return file  # type: ignore[no-any-return]
        copy: IO[bytes] = opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        limited = Hashed(content)  # raises after MAX_BYTES
        while data := limited.read(1 << 20):
            copy.write(data)
    copy.seek(0)
    return copy


def pack(
    tar: tarfile.TarFile, path: Path, target: str, mtime: int | None = None, mode: int | None = None
) -> None:
    """Add a file or the content of a folder, without following links, also if files change.

    mtime and mode replace those of all files.
    """
    if not path.is_dir():
        _pack_file(tar, str(path), None, target, mtime, mode)
        return
    for base, folders, files, fd in os.fwalk(path):
        folders.sort()
        for name in sorted((*folders, *files)):
            name_in_tar = f"{target}/{os.path.relpath(base, path)}/{name}"
            _pack_file(tar, name, fd, name_in_tar, mtime, mode)


def _pack_file(
    tar: tarfile.TarFile, name: str, at: int | None, target: str, mtime: int | None,
    mode: int | None,
) -> None:  # fmt: skip
    info = os.stat(name, dir_fd=at, follow_symlinks=False)
    member = tarfile.TarInfo(os.path.normpath(f"/{target}").strip("/"))
    member.mtime = int(info.st_mtime) if mtime is None else mtime
    member.mode = stat.S_IMODE(info.st_mode) if mode is None else mode
    if stat.S_ISREG(info.st_mode):
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=at), "rb") as file:
            member.size = os.fstat(file.fileno()).st_size
            tar.addfile(member, file)
    elif stat.S_ISDIR(info.st_mode):
        member.type, member.mode = tarfile.DIRTYPE, stat.S_IMODE(info.st_mode)
        tar.addfile(member)
    elif stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=at)
        tar.addfile(member)


class Hashed(io.RawIOBase):
    """Wraps a file to hash and count its bytes while they are read."""

    def __init__(self, file: Any, report: Callable[[int], None] | None = None) -> None:
        self._file, self._hash, self._size, self._report = file, hashlib.sha256(), 0, report

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._hash.update(data)
        self._size += len(data)
        if self._size > MAX_BYTES:
            raise ImageError(f"a layer has over {MAX_BYTES} bytes")
        if self._report is not None:
            self._report(self._size)
        return len(data)

    def finish(self) -> str:
        """Read the rest and return the digest of the whole file."""
        while self.read(1 << 20):
            pass
        return f"sha256:{self._hash.hexdigest()}"


@contextlib.contextmanager
def decompressed(file: Any) -> Iterator[Any]:
    """Decompress a buffered file, if its first bytes say that it is compressed."""
    head = file.peek(4)
    if head.startswith(b"\x1f\x8b"):
        with gzip.GzipFile(fileobj=file) as content:
            yield content
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            import zstandard  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise ImageError(
                "the layer is compressed with zstd. Remedy: pip install 'agentgrpo[images]'"
            ) from None
        try:
            yield zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        except zstandard.ZstdError as error:
            raise ImageError(f"zstd: {error}") from error
    else:
        yield file

"""Container images as root directories of sessions: added once, shared by layer.

The store is agentgrpo/images in the user's cache directory: layers/NAME is an unpacked layer,
images/NAME.json an image. Processes share it: a layer gets its name when it is complete, and layers
are only deleted while no process uses the store.
"""

import contextlib
import errno
import fcntl
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from agentgrpo.sandbox.isolation.errors import SandboxInfraError
from agentgrpo.sandbox.isolation.guards import wraps_os_errors
from agentgrpo.sandbox.isolation.jail import FIRST_UID, JAIL_ID, has_own_ids
from agentgrpo.sandbox.isolation.layers import ImageError, NewLayer
from agentgrpo.sandbox.isolation.sources import Hashed, Layer, decompressed, find_contents, machine
from agentgrpo.sandbox.isolation.template import Image as Image

MAX_LAYERS = 128
UNFINISHED = ".new-"
SIZE = "user.agentgrpo.bytes"
"""Attribute of a layer: the bytes of its files."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Progress = Callable[[str, int, int], None]
"""Called with what is read, its bytes so far, and their number (0: unknown)."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,200}")


def store_dir() -> Path:
    """The directory of images, which is made if it is missing."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    store = Path(cache, "agentgrpo", "images")
    for folder in (store, store / "layers", store / "images"):
        folder.mkdir(mode=0o700 if folder == store else 0o755, parents=True, exist_ok=True)
    return store


def owner() -> int:
    """Whom the files of layers belong to: the user of all sessions of images (-1: this one)."""
    if os.geteuid() != 0:
        return -1
    return FIRST_UID if has_own_ids() else JAIL_ID


def hold() -> contextlib.AbstractContextManager[None]:
    """Keep all layers: none is deleted until the end, in any process."""
    return _locked("used", fcntl.LOCK_SH)


def get_image(name: str) -> Image:
    """The image of that name; ValueError if it was not added."""
    try:
        record = json.loads(_file(name).read_text())
    except FileNotFoundError:
        nearest = get_close_matches(name, [image.name for image in list_images()], 5, 0.0)
        raise ImageError(
            f"image: expected one of the store ({', '.join(nearest) or 'none'}), got {name!r}. "
            f"Remedy: agentgrpo sandbox image add {name} SOURCE"
        ) from None
    layers = tuple(str(store_dir() / "layers" / layer) for layer in record.pop("layers"))
    return Image(name=name, layers=layers, **record)


def list_images() -> list[Image]:
    """All images, by name."""
    found = sorted((store_dir() / "images").glob("*.json"))
    return [get_image(path.stem.replace("%", "/")) for path in found]


@wraps_os_errors
def remove_image(name: str) -> None:
    """Remove an image, and the layers that no other has once no process uses the store."""
    get_image(name)
    _file(name).unlink(missing_ok=True)
    delete_unused()


def delete_unused(pattern: str = "*") -> bool:
    """Delete layers of no image; False if the store is in use, so that nothing was deleted."""
    try:
        with _locked("used", fcntl.LOCK_EX | fcntl.LOCK_NB):
            used = {layer for image in list_images() for layer in image.layers}
            for path in (store_dir() / "layers").glob(pattern):
                if str(path) not in used:
                    shutil.rmtree(path)
        return True
    except BlockingIOError:
        return False


def save_image(
    name: str, layers: Sequence[str], env: Mapping[str, str], workdir: str, digest: str
) -> Image:
    """Record an image of finished layers (names, the lowest first); hold() must keep them."""
    if len(layers) > MAX_LAYERS:
        raise ImageError(f"{name}: expected at most {MAX_LAYERS} layers, got {len(layers)}")
    folder = store_dir()
    sizes = [int(os.getxattr(folder / "layers" / layer, SIZE)) for layer in layers]
    record = {"layers": list(layers), "env": dict(env), "workdir": workdir, "digest": digest}
    path = _file(name)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
        json.dump({**record, "bytes": sum(sizes)}, file, indent=1)
    os.replace(file.name, path)
    return get_image(name)


def layer_name(*key: object) -> str:
    """The name of a layer of this content, which depends on what lies below and on its owner."""
    digest = hashlib.sha256(json.dumps([owner(), *key]).encode()).digest()
    return urlsafe_b64encode(digest[:15]).decode()


@contextlib.contextmanager
def new_layer(name: str) -> Iterator[Path | None]:
    """A directory to fill, which becomes the layer; None if the layer exists.

    Of two processes that make the same layer, the first to finish gives it its name. hold() must
    keep the directory: without, delete_unused() takes it for that of a process that was killed.
    """
    final = store_dir() / "layers" / name
    if final.is_dir():
        yield None
        return
    scratch = Path(tempfile.mkdtemp(dir=final.parent, prefix=UNFINISHED))
    try:
        scratch.chmod(0o755)
        if owner() >= 0:
            os.chown(scratch, owner(), owner())
        yield scratch
        publish(scratch, final)
    except BaseException:
        shutil.rmtree(scratch)
        raise


def publish(finished: Path, final: Path) -> None:
    """Give a finished directory its name, unless another process was first."""
    try:
        finished.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(finished)


@contextlib.contextmanager
def _locked(name: str, kind: int) -> Iterator[None]:
    with (store_dir() / name).open("a") as lock:
        fcntl.flock(lock, kind)
        yield


def set_bytes(layer: Path, size: int) -> None:
    """Record how many bytes the files of a layer have."""
    os.setxattr(layer, SIZE, b"%d" % size)


@wraps_os_errors
def add_image(
    name: str, source: str | os.PathLike[str], *, progress: Progress | None = None
) -> Image:
    """Unpack an image into the store, as far as its layers are not there.

    Args:
        name: what to call it; an image of that name is replaced.
        source: a folder or tar of an OCI layout, a tar of `docker save`, a folder or tar of a root
            directory (tars may be compressed), or a registry's `docker://[HOST/]NAME[:TAG][@DIGEST]`.
        progress: called while a layer is read.

    Raises:
        ImageError: the source is no image, is damaged, or is larger than the bounds.
    """
    _file(name)
    delete_unused(f"{UNFINISHED}*")  # of processes that were killed
    with hold(), _explained(os.fspath(source)), contextlib.ExitStack() as opened:
        contents = find_contents(os.fspath(source), opened)
        platform = (
            contents.config.get("os", "linux"),
            contents.config.get("architecture", machine()),
        )
        if platform != ("linux", machine()):
            raise ImageError(f"expected an image for linux/{machine()}, got {'/'.join(platform)}")
        if len(contents.layers) > MAX_LAYERS:
            raise ImageError(f"expected at most {MAX_LAYERS} layers, got {len(contents.layers)}")
        layers: list[str] = []
        for number, layer in enumerate(contents.layers):
            key = layer_name(*(below.diff for below in contents.layers[: number + 1]))
            with new_layer(key) as scratch:
                if scratch is not None:
                    label = f"{name}: layer {number + 1} of {len(contents.layers)}"
                    report = partial(progress or _quiet, label)
                    fill(scratch, layers, layer, contents.open, report)
            layers.append(key)
        ran = contents.config.get("config") or {}
        env = {"PATH": PATH} | dict(pair.split("=", 1) for pair in ran.get("Env") or ())
        return save_image(name, layers, env, ran.get("WorkingDir") or "/", contents.digest)


def _quiet(label: str, done: int, total: int) -> None:
    del label, done, total


def _file(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ImageError(f"image name: expected letters, digits and '._-:/@', got {name!r}")
    return store_dir() / "images" / f"{name.replace('/', '%')}.json"


@contextlib.contextmanager
def _explained(source: str) -> Iterator[None]:
    """Name the source in each error that its content causes."""
    try:
        yield
    except ImageError as error:
        raise ImageError(f"{source}: {error}") from error
    except (
        *(tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, ValueError, LookupError),
        *(TypeError, AttributeError, OverflowError, RecursionError, FileNotFoundError),
    ) as error:
        raise ImageError(f"{source}: damaged, or no image: {error!r:.200}") from error
    except OSError as error:
        raise SandboxInfraError(f"{source}: {error}") from error


def fill(
    scratch: Path, below: Sequence[str], layer: Layer, open_blob: Callable[[str], Any],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:  # fmt: skip
    """Unpack a layer and verify both of its digests."""
    paths = [str(scratch.parent / name) for name in below]
    with open_blob(layer.blob) as raw:
        packed = Hashed(raw, lambda done: report(done, layer.size))
        new = NewLayer(str(scratch), paths, owner())
        with decompressed(io.BufferedReader(packed)) as plain:
            content = Hashed(plain)
            new.unpack(content)
            if content.finish() != layer.diff:
                raise ImageError(f"the content of layer {layer.blob} is not {layer.diff}")
        if layer.blob.startswith("sha256:") and packed.finish() != layer.blob:
            raise ImageError(f"layer {layer.blob} is not what its digest says")
        set_bytes(scratch, new.bytes)

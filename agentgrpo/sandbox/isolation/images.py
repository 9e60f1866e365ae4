"""Store of container images, which are root directories of sessions. Images share layers.

The store is agentgrpo/images in the user's cache directory: layers/NAME is an unpacked layer,
images/NAME.json an image. Processes share it: a layer gets its name when it is complete, and layers
are deleted only while no process uses the store.
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
"""Extended attribute of a layer: the size of its files."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Progress = Callable[[str, int, int], None]
"""Called with a label, the bytes read so far, and the total (0: unknown)."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,200}")


def store_dir() -> Path:
    """The directory of images; created if it is missing."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    store = Path(cache, "agentgrpo", "images")
    for folder in (store, store / "layers", store / "images"):
        folder.mkdir(mode=0o700 if folder == store else 0o755, parents=True, exist_ok=True)
    return store


def owner() -> int:
    """User id of the files of layers and of all sessions of images (-1: this process's)."""
    if os.geteuid() != 0:
        return -1
    return FIRST_UID if has_own_ids() else JAIL_ID


@contextlib.contextmanager
def hold(kind: int = fcntl.LOCK_SH) -> Iterator[None]:
    """Context manager during which no process deletes a layer."""
    with (store_dir() / "used").open("a") as lock:
        fcntl.flock(lock, kind)
        yield


def get_image(name: str) -> Image:
    """Find an image by name. Raises ValueError if it does not exist."""
    try:
        record = json.loads(_file(name).read_text())
    except FileNotFoundError:
        nearest = get_close_matches(name, [image.name for image in list_images()], 5, 0.0)
        raise ImageError(
            f"image: expected one in the store ({', '.join(nearest) or 'none'}), got {name!r}. "
            f"Remedy: agentgrpo sandbox image add {name} SOURCE"
        ) from None
    layers = tuple(str(store_dir() / "layers" / layer) for layer in record.pop("layers"))
    return Image(name=name, layers=layers, **record)


def list_images() -> list[Image]:
    """All images, sorted by name."""
    paths = sorted((store_dir() / "images").glob("*.json"))
    return [get_image(path.stem.replace("%", "/")) for path in paths]


@wraps_os_errors
def remove_image(name: str) -> None:
    """Remove an image. Its unused layers are deleted once no process uses the store."""
    get_image(name)
    _file(name).unlink(missing_ok=True)
    delete_unused()


def delete_unused(pattern: str = "*") -> bool:
    """Delete layers that no image has. False if the store is in use: nothing was deleted."""
    try:
        with hold(fcntl.LOCK_EX | fcntl.LOCK_NB):
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
    """Record an image of finished layers (names, lowest first). Call it within hold()."""
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
    """The name of a layer: a hash of its content, the layers below, and the owner of its files."""
    digest = hashlib.sha256(json.dumps([owner(), *key]).encode()).digest()
    return urlsafe_b64encode(digest[:15]).decode()


@contextlib.contextmanager
def new_layer(name: str) -> Iterator[Path | None]:
    """Yield a directory that becomes the layer, None if the layer exists. Call it within hold()."""
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


def set_bytes(layer: Path, size: int) -> None:
    """Record the size of a layer's files."""
    os.setxattr(layer, SIZE, b"%d" % size)


@wraps_os_errors
def add_image(
    name: str, source: str | os.PathLike[str], *, progress: Progress | None = None
) -> Image:
    """Unpack an image into the store. Layers that it has already are not read again.

    Args:
        name: the name of the image; an existing image of that name is replaced.
        source: a folder or tar of an OCI layout, a tar of `docker save`, a folder or tar of a root
            directory (tars may be compressed), or `docker://[HOST/]NAME[:TAG][@DIGEST]`.
        progress: called while a layer is read.

    Raises:
        ImageError: the source is not an image, is damaged, or is too large.
    """
    _file(name)
    delete_unused(f"{UNFINISHED}*")  # left by killed processes
    with hold(), _explained(os.fspath(source)), contextlib.ExitStack() as opened:
        contents = find_contents(os.fspath(source), opened)
        config = {"os": "linux", "architecture": machine()} | contents.config
        platform = (config["os"], config["architecture"])
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
                    report = partial(progress or (lambda *_: None), label)
                    fill(scratch, layers, layer, contents.open, report)
            layers.append(key)
        settings = contents.config.get("config") or {}
        env = {"PATH": PATH} | dict(pair.split("=", 1) for pair in settings.get("Env") or ())
        return save_image(name, layers, env, settings.get("WorkingDir") or "/", contents.digest)


def _file(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ImageError(f"image name: expected letters, digits and '._-:/@', got {name!r}")
    return store_dir() / "images" / f"{name.replace('/', '%')}.json"


@contextlib.contextmanager
def _explained(source: str) -> Iterator[None]:
    """Add the source to each error that its content causes."""
    try:
        yield
    except ImageError as error:
        raise ImageError(f"{source}: {error}") from error
    except (
        *(tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, ValueError, LookupError),
        *(TypeError, AttributeError, OverflowError, RecursionError, FileNotFoundError),
    ) as error:
        raise ImageError(f"{source}: damaged, or not an image: {error!r:.200}") from error
    except OSError as error:
        raise SandboxInfraError(f"{source}: {error}") from error


def fill(
    scratch: Path, below: Sequence[str], layer: Layer, open_blob: Callable[[str], Any],
    report: Callable[[int, int], None],
) -> None:  # fmt: skip
    """Unpack a layer and verify its two digests, of the blob and of the content."""
    paths = [str(scratch.parent / name) for name in below]
    with open_blob(layer.blob) as raw:
        blob = Hashed(raw, lambda done: report(done, layer.size))
        new = NewLayer(str(scratch), paths, owner())
        with decompressed(io.BufferedReader(blob)) as tar:
            content = Hashed(tar)
            new.unpack(content)
            if content.finish() != layer.diff:
                raise ImageError(f"the content of layer {layer.blob} is not {layer.diff}")
        if layer.blob.startswith("sha256:") and blob.finish() != layer.blob:
            raise ImageError(f"layer {layer.blob} does not match its digest")
        set_bytes(scratch, new.bytes)

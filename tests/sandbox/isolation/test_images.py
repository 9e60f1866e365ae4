"""Images: sources, invalid sources, and hostile layers."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

import agentgrpo
from agentgrpo.sandbox import SandboxInfraError
from agentgrpo.sandbox.isolation import images
from agentgrpo.sandbox.isolation.images import (
    add_image,
    get_image,
    list_images,
    remove_image,
    store_dir,
)
from agentgrpo.sandbox.isolation.layers import OPAQUE, ImageError, NewLayer, Stack, is_whiteout
from tests.sandbox.isolation.test_nobody import _python

OTHER = {"x86_64": "arm64", "aarch64": "amd64"}[os.uname().machine]
REPOSITORY = Path(__file__).parents[3]
FILES = "etc/ etc/os=one bin->usr/bin"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return store_dir()


def tar_of(text: str) -> bytes:
    """A tar of words: folder/ file=content link->target hard=>target set-id!x block# fifo| x^."""
    types = {"->": b"2", "=>": b"1", "/": b"5", "#": b"4", "|": b"6"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for word in text.split():
            match = re.fullmatch(r"(.+?)(->|=>|=|!|#|\||\^|/$)(.*)", word)
            assert match is not None, word
            name, kind, value = match.groups()
            info = tarfile.TarInfo(name)
            info.mode, info.mtime = 0o4755 if kind == "!" else 0o755, 1_700_000_000
            info.type = types.get(kind, tarfile.REGTYPE)
            if kind in ("->", "=>"):
                info.linkname, value = value, ""
            if kind == "^":
                info.pax_headers = {"SCHILY.xattr.user.overlay.redirect": "/etc"}
            info.size = len(value)
            tar.addfile(info, io.BytesIO(value.encode()))
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def write_layout(
    folder: Path, *tars: bytes, pack: Any = gzipped, architecture: str = "", **config: Any
) -> Path:
    """An OCI layout of one image."""
    (folder / "blobs" / "sha256").mkdir(parents=True)

    def blob(data: bytes) -> dict[str, Any]:
        (folder / "blobs" / "sha256" / sha256(data)).write_bytes(data)
        return {"digest": f"sha256:{sha256(data)}", "size": len(data)}

    about = {"architecture": architecture} if architecture else {}
    diffs = [f"sha256:{sha256(data)}" for data in tars]
    configuration = about | {"config": config, "rootfs": {"diff_ids": diffs}}
    manifest = {
        "config": blob(json.dumps(configuration).encode()),
        "layers": [blob(pack(data)) for data in tars],
    }
    index = {"manifests": [blob(json.dumps(manifest).encode())]}
    (folder / "oci-layout").write_text("{}")
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def unpack(data: bytes, top: Path, *below: Path) -> NewLayer:
    new = NewLayer(str(top), [str(path) for path in below], -1)
    new.unpack(io.BytesIO(data))
    return new


HOSTILE = {
    "../ in a name": "../outside/canary=x",
    "absolute name": "OUT/canary=x",
    "link out, then through it": "a->OUT a/canary=x",
    "directory, then a link for it": "a/ a/x=x a->OUT a/canary=x",
    "the same by another name": "d/ d/a/ d/a/x=x l->d l/a->OUT d/a/canary=x",
    "relative link out": "d/ d/a->../../outside d/a/canary=x",
    "hard link to outside": "h=>OUT/canary h=x",
    "hard link by ..": "h=>../outside/canary",
    "hard link through a link": "a->OUT h=>a/canary",
    "hard link to a link, then written": "s->OUT/canary h=>s h=x",
    "link in the place of a hard link": "s->OUT h=>s h/canary=x",
    "file over a link": "f->OUT/canary f=x",
    "directory over a link": "a->OUT a/ a/canary=x",
    "whiteout of outside": "../outside/.wh.canary=",
    "whiteout through a link": "a->OUT a/.wh.canary=",
    "whiteout named ..": ".wh...=",
    "whiteout named .": ".wh..=",
    "whiteout without a name": ".wh.=",
    "opaque through a link": "a->OUT a/.wh..wh..opq=",
    "set-id file": "su!x",
    "device": "sda#",
    "link loop": "a->b b->a a/x=x",
    "link of a lower layer": "low/canary=x",
    "attribute of overlayfs": "x^x",
    "fifo over a link": "f->OUT/canary f|",
    "directory over a lower link": "low/ low/canary=x",
    "whiteout of a lower link's file": "low/.wh.canary=",
    "a link that climbs": f"a->{'../' * 30}outside a/canary=x",
    "1,000 levels": "d/" * 1000,
    "a name of 300 characters": f"{'n' * 300}=x",
    "links that double": " ".join(f"l{i}->l{i + 1}/l{i + 1}" for i in range(50)) + " l0/x=x",
}  # fmt: skip


@pytest.mark.parametrize("title", HOSTILE)
def test_a_layer_cannot_write_outside_its_directory(title: str, tmp_path: Path) -> None:
    outside, top, below = (tmp_path / name for name in ("outside", "top", "below"))
    for folder in (outside, top, below):
        folder.mkdir()
    (outside / "canary").write_bytes(b"whole")
    (below / "low").symlink_to(outside)
    refusal = ""
    try:
        unpack(tar_of(HOSTILE[title].replace("OUT", str(outside))), top, below)
    except ImageError as error:
        refusal = str(error)
    assert (outside / "canary").read_bytes() == b"whole", refusal
    assert os.listdir(outside) == ["canary"]
    assert not os.listxattr(outside)
    assert (outside / "canary").stat().st_nlink == 1
    assert sorted(os.listdir(tmp_path)) == sorted(["below", "cache", "outside", "top"])
    for path in top.rglob("*"):
        info = path.lstat()
        assert not info.st_mode & 0o6000 or path.is_symlink()
        assert not stat.S_ISBLK(info.st_mode)
        assert path.is_symlink() or set(os.listxattr(path)) <= {OPAQUE}


def test_a_directory_replaced_by_a_link_during_unpacking_is_not_followed(tmp_path: Path) -> None:
    outside, top = tmp_path / "outside", tmp_path / "top"
    for folder in (outside, top):
        folder.mkdir()
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            for number in range(20):
                path = top / f"d{number}"
                try:
                    path.rename(top / "gone")
                    path.symlink_to(outside)
                    path.unlink()
                    (top / "gone").rename(path)
                except OSError:
                    shutil.rmtree(top / "gone", ignore_errors=True)

    entries = " ".join(f"d{n}/" for n in range(20))
    entries += "".join(f" d{i % 20}/e{i}/f=x" for i in range(100))
    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        for _ in range(5):
            with contextlib.suppress(ImageError, OSError):
                unpack(tar_of(entries), top)
    finally:
        stop.set()
        thread.join()
    assert os.listdir(outside) == []


def shown(image: images.Image) -> str:
    """What a session of it would see, as tar_of() takes it."""
    stack, words, pending = Stack(image.layers), [], [""]
    while pending:
        at = pending.pop()
        for name in {name for folder in stack.directories(at) for name in os.listdir(folder)}:
            path = f"{at}/{name}".strip("/")
            entry = stack.entry(path)
            if entry is None:
                continue
            if stat.S_ISLNK(entry[1].st_mode):
                words.append(f"{path}->{os.readlink(entry[0])}")
            elif stat.S_ISDIR(entry[1].st_mode):
                pending.append(path)
                words.append(f"{path}/")
            else:
                words.append(f"{path}={Path(entry[0]).read_text()}")
    return " ".join(sorted(words, key=lambda word: re.split(r"/$|->|=", word)[0]))


LAYERS = {
    "a file over a file": ("f=1", "f=2", "f=2"),
    "removed": ("d/ d/f=1", "d/.wh.f=", "d/"),
    "removed, nothing below": ("f=1", "x/.wh.g=", "f=1"),
    "a directory removed and made again": ("d/ d/f=1", ".wh.d= d/ d/g=2", "d/ d/g=2"),
    "opaque": ("d/f=1 d/e/f=1", "d/ d/.wh..wh..opq= d/e/g=2", "d/ d/e/ d/e/g=2"),
    "through a link below": ("b/ a->b", "a/x=2", "a->b b/ b/x=2"),
    "through a link that climbs": ("b/ l->../../b", "l/x=2", "b/ b/x=2 l->../../b"),
    "a file in place of a directory": ("d/f=1", "d=2", "d=2"),
    "a directory in place of a file": ("d=1", "d/ d/f=2", "d/ d/f=2"),
    "a directory in place of a link": ("e/f=1 d->e", "d/ d/g=2", "d/ d/g=2 e/ e/f=1"),
    "a hard link to a file below": ("f=1", "g=>f", "f=1 g=1"),
    "a hard link, then the file": ("f=1", "g=>f f=2", "f=2 g=1"),
    "names with ./ and /": ("./d// /d/f=1", "./d/g=2", "d/ d/f=1 d/g=2"),
}  # fmt: skip


@pytest.mark.parametrize("title", LAYERS)
def test_layers_are_merged_as_overlayfs_merges_them(title: str, tmp_path: Path) -> None:
    lower, upper, expected = LAYERS[title]
    image = add_image("x", write_layout(tmp_path / "x", tar_of(lower), tar_of(upper)))
    assert shown(image) == expected


def packed(folder: Path, target: Path, mode: Any = "w") -> Path:
    with tarfile.open(target, mode) as tar:
        tar.add(folder, ".")
    return target


def docker_save(folder: Path, *tars: bytes) -> Path:
    """As `docker save` wrote it before Docker 25, equal layers as links."""
    folder.mkdir()
    config = {"rootfs": {"diff_ids": [f"sha256:{sha256(data)}" for data in tars]}}
    (folder / "c.json").write_text(json.dumps(config))
    names = []
    for number, data in enumerate(tars):
        (folder / str(number)).mkdir()
        names.append(f"{number}/layer.tar")
        if number and tars[number] == tars[number - 1]:
            (folder / names[-1]).symlink_to(f"../{number - 1}/layer.tar")
        else:
            (folder / names[-1]).write_bytes(data)
    manifest = [{"Config": "c.json", "RepoTags": ["x:1"], "Layers": names}]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


ROOT = tar_of(FILES)
SOURCES: dict[str, Any] = {
    "OCI layout, gzip": lambda at: write_layout(at / "s", ROOT),
    "OCI layout, zstd": lambda at: write_layout(at / "s", ROOT, pack=zstd),
    "OCI layout, plain": lambda at: write_layout(at / "s", ROOT, pack=bytes),
    "OCI archive": lambda at: packed(write_layout(at / "s", ROOT), at / "s.tar"),
    "OCI archive, gzip": lambda at: packed(write_layout(at / "s", ROOT), at / "s.tgz", "w:gz"),
    "docker save": lambda at: packed(docker_save(at / "s", ROOT), at / "s.tar"),
    "docker save, equal layers": lambda at: packed(docker_save(at / "s", ROOT, ROOT), at / "s.tar"),
    "tar of a root": lambda at: write(at / "s.tar", ROOT),
    "tar of a root, gzip": lambda at: write(at / "s.tar.gz", gzip.compress(ROOT)),
    "tar of a root, zstd": lambda at: write(at / "s.tar.zst", zstd(ROOT)),
    "folder of a root": lambda at: extracted(at / "s", ROOT),
}  # fmt: skip


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def extracted(folder: Path, data: bytes) -> Path:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("title", SOURCES)
def test_each_kind_of_source_can_be_added(title: str, tmp_path: Path) -> None:
    image = add_image("x", SOURCES[title](tmp_path))
    assert shown(image) == "bin->usr/bin etc/ etc/os=one"
    assert image == get_image("x")
    assert list_images() == [image]
    assert all(len(Path(layer).name) <= 20 for layer in image.layers)
    owner = images.owner() if images.owner() >= 0 else os.geteuid()
    for layer in image.layers:
        assert {path.lstat().st_uid for path in Path(layer).rglob("*")} == {owner}
    assert image.bytes == 3 * len(image.layers)


def damaged(kind: str, data: bytes) -> bytes:
    packed = gzip.compress(data, mtime=0)
    if kind == "flipped":
        return packed[:60] + bytes([packed[60] ^ 4]) + packed[61:]
    return {"truncated": packed[:-20], "other": gzip.compress(tar_of("g=2"))}[kind]


@pytest.mark.parametrize("kind", ["flipped", "truncated", "other"])
@pytest.mark.parametrize("renamed", [False, True], ids=["in place", "with a new digest"])
def test_a_layer_with_a_wrong_digest_is_refused(kind: str, renamed: bool, tmp_path: Path) -> None:
    folder = write_layout(tmp_path / "s", ROOT)
    blobs = folder / "blobs" / "sha256"
    blob = next(path for path in blobs.iterdir() if path.read_bytes().startswith(b"\x1f\x8b"))
    data = damaged(kind, tar_of(f"{FILES} noise={os.urandom(2048).hex()}") if renamed else ROOT)
    blob.write_bytes(data)
    if renamed:  # the digest of the blob is right then, and what it holds is wrong
        text = (folder / "index.json").read_text()
        manifest = json.loads(text)["manifests"][0]["digest"].removeprefix("sha256:")
        new = (blobs / manifest).read_text().replace(blob.name, sha256(data)).encode()
        (blobs / sha256(new)).write_bytes(new)
        blob.rename(blobs / sha256(data))
        (folder / "index.json").write_text(text.replace(manifest, sha256(new)))
    with pytest.raises(ImageError, match=str(folder)):
        add_image("x", folder)
    assert list(store_dir().glob("*/*")) == []


def refused_sources(at: Path) -> dict[str, tuple[Path, str]]:
    layout = write_layout(at / "other", ROOT, architecture=OTHER)
    two = write_layout(at / "two", ROOT)
    index = json.loads((two / "index.json").read_text())
    again = write_layout(at / "again", tar_of("etc/"))
    shutil.copytree(again / "blobs", two / "blobs", dirs_exist_ok=True)
    index["manifests"] += json.loads((again / "index.json").read_text())["manifests"]
    (two / "index.json").write_text(json.dumps(index))
    outside = write_layout(at / "outside", ROOT)
    (outside / "index.json").write_text('{"manifests": [{"digest": "sha256:../../../x"}]}')
    odd = write_layout(at / "odd", ROOT)
    (odd / "index.json").write_text('{"manifests": 7}')
    deep = write_layout(at / "deep", ROOT)
    (deep / "index.json").write_text("[" * 100_000)
    many = write_layout(at / "many", *[ROOT] * 129)
    (at / "empty").mkdir()
    huge = tarfile.TarInfo("f")
    huge.size = 1 << 40
    (at / "huge.tar").write_bytes(ROOT[:2048] + huge.tobuf() + b"\0" * 4096)
    return {
        "another machine's": (layout, OTHER),
        "several images": (two, "expected one image .* got 2"),
        "a digest that is a path": (outside, "expected a sha256 digest"),
        "no list of manifests": (odd, "not an image"),
        "nested without end": (deep, "not an image"),
        "129 layers": (many, "at most 128 layers"),
        "an empty folder": (at / "empty", "expected an OCI layout or a root directory"),
        "nothing": (at / "nothing", "no such file"),
        "not a tar": (write(at / "text", b"hello" * 1000), "not a tar"),
        "a tar of something": (write(at / "t.tar", tar_of("x=1")), "expected a tar of"),
        "a truncated header": (write(at / "cut.tar", ROOT[:1600]), "truncated"),
        "a truncated file": (write(at / "cut2.tar", ROOT[:1026]), "damaged"),
        "a damaged header": (write(at / "bad.tar", ROOT[:1540] + b"?" + ROOT[1541:]), "damaged"),
        "a file of a terabyte": (at / "huge.tar", "damaged|bytes"),
    }  # fmt: skip


def test_invalid_sources_raise(tmp_path: Path) -> None:
    for title, (source, expected) in refused_sources(tmp_path).items():
        with pytest.raises(ImageError, match=expected):
            raise AssertionError(f"{title}: {add_image('x', source)}")
        assert list(store_dir().glob("*/.*")) == [], title
    with pytest.raises(ImageError, match=r"image add other SOURCE"):
        get_image("other")
    with pytest.raises(ImageError, match="image name"):
        add_image("../x", tmp_path)


@pytest.mark.parametrize("what", ["bytes", "sparse", "files", "header"])
def test_decompression_bombs_are_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentgrpo.sandbox.isolation.layers.MAX_FILES", 100)
    monkeypatch.setattr("agentgrpo.sandbox.isolation.layers.MAX_BYTES", 1 << 20)
    entries = {
        "bytes": "f=" + "x" * (2 << 20),
        "files": " ".join(f"d{n}/" for n in range(101)),
        "header": "n/" * 200_000 + "f=",
    }
    data = tar_of(entries.get(what, ""))
    if what == "sparse":  # a file of a terabyte in one block
        info = tarfile.TarInfo("f")
        header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
        header[156:157] = tarfile.GNUTYPE_SPARSE
        header[257:265] = b"ustar  \0"
        header[386:398], header[398:410] = b"%011o\0" % 0, b"%011o\0" % 0
        header[483:495] = b"%011o\0" % (1 << 32)
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        data = bytes(header) + bytes(1024)
    with pytest.raises(ImageError):
        add_image("x", write_layout(tmp_path / "s", data))
    assert list(store_dir().glob("*/*")) == []


ADD = (
    "import sys; from agentgrpo.sandbox.isolation.images import add_image; add_image(*sys.argv[1:])"
)


def test_processes_can_add_the_same_layers_at_once(tmp_path: Path) -> None:
    source = write_layout(tmp_path / "s", ROOT, tar_of(" ".join(f"d{i}/f=1" for i in range(500))))
    names = ["a", "b", "c"]
    started = [
        subprocess.Popen([sys.executable, "-c", ADD, name, str(source)], cwd=REPOSITORY)
        for name in names
    ]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    (layers,) = {image.layers for image in list_images()}
    assert {str(path) for path in (store_dir() / "layers").iterdir()} == {*layers}


def test_leftovers_of_a_killed_process_are_replaced(tmp_path: Path) -> None:
    folder = write_layout(tmp_path / "s", ROOT, tar_of("x=2"))
    blobs = {path.name: path for path in (folder / "blobs" / "sha256").iterdir()}
    slow = blobs[sha256(gzipped(tar_of("x=2")))]
    data = slow.read_bytes()
    slow.unlink()
    os.mkfifo(slow)  # the second layer waits for somebody who writes
    process = subprocess.Popen([sys.executable, "-c", ADD, "x", str(folder)], cwd=REPOSITORY)
    with slow.open("wb") as pipe:
        pipe.write(data[:30])
        pipe.flush()
        while not list((store_dir() / "layers").glob(".new-*")):
            assert process.poll() is None
        process.kill()
        process.wait()
    assert list((store_dir() / "layers").glob(".new-*"))
    assert list_images() == []
    slow.unlink()
    slow.write_bytes(data)
    assert shown(add_image("x", folder)) == "bin->usr/bin etc/ etc/os=one x=2"
    assert not list((store_dir() / "layers").glob(".new-*"))


def test_unused_layers_are_deleted(tmp_path: Path) -> None:
    add_image("x", write_layout(tmp_path / "x", ROOT, tar_of("x=1")))
    kept = add_image("y", write_layout(tmp_path / "y", ROOT))
    with images.hold():
        remove_image("x")
        assert len(list((store_dir() / "layers").iterdir())) == 2
    images.delete_unused()
    assert [str(path) for path in (store_dir() / "layers").iterdir()] == list(kept.layers)
    with pytest.raises(ImageError, match="image add x SOURCE"):
        remove_image("x")


def test_environment_and_directory_of_an_image_are_applied(tmp_path: Path) -> None:
    config: dict[str, Any] = {"Env": ["A=b=c", "PATH=/opt/bin"], "WorkingDir": "/app"}
    image = add_image("x", write_layout(tmp_path / "x", ROOT, **config))
    assert (image.env, image.workdir) == ({"PATH": "/opt/bin", "A": "b=c"}, "/app")
    other = add_image("x", write_layout(tmp_path / "y", tar_of("etc/")))
    assert other.layers != image.layers
    assert get_image("x") == other


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_unprivileged_user_can_add_an_image(tmp_path: Path) -> None:
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        home.chmod(0o777)
        layout = write_layout(tmp_path / "s", ROOT, tar_of("etc/.wh.os= b=1"))
        source = packed(layout, home / "s.tar")
        package = home / "agentgrpo"
        shutil.copytree(Path(agentgrpo.__path__[0], "sandbox"), package / "sandbox")
        shutil.copytree(Path(agentgrpo.__path__[0], "support"), package / "support")
        for name in ("_C", "cli"):
            for path in Path(agentgrpo.__path__[0]).glob(f"{name}*.*"):
                shutil.copy(path, package)
        (package / "__init__.py").touch()
        done = subprocess.run(
            [_python(), "-B", "-c", ADD, "x", str(source)], cwd=home, user=65534, group=65534,
            extra_groups=[], env={"XDG_CACHE_HOME": str(home / "cache"), "PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        files = [path.lstat() for path in (home / "cache/agentgrpo/images/layers").rglob("*")]
        assert {info.st_uid for info in files} == {65534}
        assert any(is_whiteout(info) for info in files)
    finally:
        shutil.rmtree(home)


def test_errors_name_similar_images_and_the_unreachable_source(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [images.Image(f"harbor/task-{n}", (), {}, "/", "", 0) for n in range(1000)]
    monkeypatch.setattr(images, "list_images", lambda: known)
    with pytest.raises(ImageError, match=r"store \((harbor/task-\d+, ){4}harbor/task-\d+\), got"):
        get_image("harbor/task")
    with pytest.raises(SandboxInfraError, match=r"^docker://localhost:1/a: .*refused"):
        add_image("a", "docker://localhost:1/a")

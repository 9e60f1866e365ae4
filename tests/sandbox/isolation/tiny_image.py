"""A small image of the host's own bash, coreutils and Python, for tests without a registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from agentgrpo.sandbox.isolation.images import add_image, get_image, set_bytes, store_dir
from agentgrpo.sandbox.isolation.jail import FIRST_UID, has_own_ids

TOOLS = [
    "bash", "cat", "chmod", "chown", "chroot", "cp", "dash", "env", "expr", "find",
    "grep", "head", "hostname", "id", "ln", "ls", "mkdir", "mkfifo", "mknod", "mount",
    "mv", "nsenter", "ps", "readlink", "rm", "rmdir", "sed", "seq", "sh", "sleep", "sort",
    "stat", "tail", "touch", "tr", "true", "truncate", "tty", "umount", "uname",
    "unshare", "wc", "script",
]  # fmt: skip
STDLIB = ("test", "idlelib", "tkinter", "ensurepip", "lib2to3", "site-packages", "__pycache__",
          "config-*", "dist-packages", "pydoc_data", "turtledemo")  # fmt: skip
PASSWD = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/sh\n"


def libraries(programs: Iterable[str]) -> set[str]:
    """The shared libraries of programs, their loader included."""
    listing = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    return {word for word in listing.split() if word.startswith("/") and not word.endswith(":")}


def add_tiny_image(name: str = "base", *, python: bool = True, tools: Iterable[str] = TOOLS) -> str:
    """Put it into the store that $XDG_CACHE_HOME names; its name."""
    root = Path(tempfile.mkdtemp())
    for folder in ("root", "etc", "usr/bin", "usr/lib", "usr/lib64"):
        (root / folder).mkdir(parents=True)
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    for folder in ("bin", "lib", "lib64"):
        (root / folder).symlink_to(f"usr/{folder}")
    found = {f"/usr/bin/{tool}": shutil.which(tool, path="/usr/bin:/bin") for tool in tools}
    programs = {target: source for target, source in found.items() if source is not None}
    extensions: list[str] = []
    if python:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        real = os.path.realpath(os.path.join(sys.base_prefix, "bin", version))
        programs[f"/usr/bin/{version}"] = real
        (root / "usr/bin/python3").symlink_to(version)
        stdlib = os.path.dirname(os.__file__)
        copied = root / "usr/lib" / version
        shutil.copytree(stdlib, copied, True, shutil.ignore_patterns(*STDLIB))
        extensions = [*map(str, (copied / "lib-dynload").glob("*.so"))]
    needed = libraries([*programs.values(), *extensions])
    for target, source in {**programs, **{path: path for path in needed}}.items():
        _copy(source, root, target)
    (root / "etc/passwd").write_text(PASSWD)
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (root / "etc/version").write_text("1\n")
    add_image(name, root)
    shutil.rmtree(root)
    return name


def _copy(source: str, root: Path, target: str) -> None:
    place = root / target.lstrip("/")
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(source), place)


def give(layer: Path) -> None:
    """Make a directory a layer: what belongs to the user of sessions."""
    layer.chmod(0o755)
    set_bytes(layer, 0)
    if has_own_ids():
        subprocess.run(["chown", "-hR", f"{FIRST_UID}:{FIRST_UID}", layer], check=True)


def record(name: str, layers: list[str], workdir: str = "/app/work") -> None:
    """Record an image of these layers above the one of add_tiny_image("base")."""
    env = {"PATH": "/usr/bin:/bin", "GREETING": "hello world"}
    base = Path(get_image("base").layers[0]).name
    fields = {"layers": [base, *layers], "env": env, "workdir": workdir, "digest": "", "bytes": 0}
    (store_dir() / "images" / f"{name}.json").write_text(json.dumps(fields))

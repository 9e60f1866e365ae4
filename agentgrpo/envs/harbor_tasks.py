"""Task folders in Harbor's form: read, refused by name, turned into rows (docs/environments.md)."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, PositiveInt
from rich.console import Console
from rich.progress import track

from agentgrpo.config.read import by_key, format_error
from agentgrpo.sandbox import Limits, SandboxException
from agentgrpo.sandbox.isolation.images import Image
from agentgrpo.sandbox.session.dockerfile import Builder
from agentgrpo.support.atomic_files import write_lines

MAX_FILE = 16 << 20
"""Bytes of a file of tests/ or solution/."""
PROMPT = (
    "You work in a Linux container. Write bash between <code> and </code>; you see what it prints. "
    "Variables, directory and files stay. When the task is done, reply with: Answer: done"
)
INSTALLS = (b"apt-get ", b"apt ", b"pip install", b"pip3 install", b"curl ", b"wget ", b"uvx ")
"""Words of scripts that use the network."""
REHEARSE = "mkdir -p /logs/verifier; chmod +x /tests/test.sh; /tests/test.sh; true"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Network = Literal["public", "no-network"]
Root = Literal["root", "0", 0]
Empty = Annotated[tuple[()], Field(strict=False)]


class _Table(pydantic.BaseModel):
    """A table of task.toml: the keys that are played here. Others are refused by name."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Agent(_Table):
    timeout_sec: Seconds = 600.0
    user: Root = "root"
    network_mode: Network = "public"
    allowed_hosts: Empty = ()


class _Verifier(_Agent):
    environment_mode: Literal["shared"] = "shared"
    env: dict[str, str] = {}


class _Environment(_Table):
    docker_image: str = ""
    build_timeout_sec: Seconds = 600.0
    os: Literal["linux"] = "linux"
    cpus: Annotated[float, Field(gt=0, le=4096)] = 1
    memory_mb: PositiveInt = 2048
    storage_mb: PositiveInt = 10_240
    memory: Annotated[str, Field(pattern=r"^\d+[MG]i?B?$")] = ""
    storage: Annotated[str, Field(pattern=r"^\d+[MG]i?B?$")] = ""
    gpus: Literal[0] = 0
    gpu_types: Empty = ()
    mcp_servers: Empty = ()
    network_mode: Network = "public"
    allow_internet: bool = True
    allowed_hosts: Empty = ()
    workdir: Annotated[str, Field(pattern="^/")] = ""
    env: dict[str, str] = {}


class _Solution(_Table):
    env: dict[str, str] = {}


class HarborTask(_Table):
    """A task.toml, and the folder that it is in."""

    folder: Path
    schema_version: str = ""
    version: str = ""
    source: str = ""
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    artifacts: list[Any] = []
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()

    @property
    def limits(self) -> Limits:
        """Of its sessions. What they write is memory; seconds are counted by the episode."""
        asked = self.environment
        memory, storage = (
            int(old.rstrip("iB")[:-1]) << 10 * (old.rstrip("iB")[-1] == "G") if old else mib
            for old, mib in ((asked.memory, asked.memory_mb), (asked.storage, asked.storage_mb))
        )
        return Limits(
            memory_mib=memory, home_mib=min(memory, storage), cpus=asked.cpus, inodes=1 << 17,
            processes=512, open_files=1024, steps=10_000, timeout_s=3600, cpu_s=86_400,
            session_s=2 * 86_400,
        )  # fmt: skip

    def digest(self, image: Image) -> str:
        """Of what decides a verdict: task.toml, the tests and the image."""
        whole = hashlib.sha256(image.digest.encode() + (self.folder / "task.toml").read_bytes())
        for name, (data, executable) in files_of(self.folder / "tests").items():
            whole.update(f"{name}\0{executable}\0{len(data)}\0".encode() + data)
        return whole.hexdigest()


def files_of(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Content of each file, and whether it is executable, by its path; ValueError if one is too
    large or leads out of the folder.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path}: expected a file of the folder, got a link out of it")
        if path.is_file():
            if path.stat().st_size > MAX_FILE:
                raise ValueError(f"{path}: expected at most {MAX_FILE >> 20} MiB")
            executable = bool(path.stat().st_mode & 0o100)
            files[str(path.relative_to(folder))] = path.read_bytes(), executable
    return files


def read_task(folder: Path, grant: Sequence[str] = ()) -> HarborTask:
    """Read a folder's task.toml, with `grant` as the variables of this process that its ${NAME}
    may read; ValueError names what is malformed or cannot be played.
    """
    environment = folder / "environment"
    try:
        for found in (*environment.glob("*compose*.y*ml"), folder / "steps"):
            if found.exists():
                raise ValueError(f"expected one container and one step, got {found.name}")
        if (folder / "tests/Dockerfile").exists():
            raise ValueError("expected tests in the task's own image, got tests/Dockerfile")
        for name in ("instruction.md", "tests/test.sh"):
            if not (folder / name).is_file():
                raise ValueError(f"expected a file {name}")
        config = tomllib.loads((folder / "task.toml").read_text())
        for name in ("environment", "verifier", "solution"):
            _grant(name, config.get(name), grant)
        task = HarborTask(**config | {"folder": folder})
        if not task.environment.docker_image and not (environment / "Dockerfile").is_file():
            raise ValueError("expected environment/Dockerfile or environment.docker_image")
    except pydantic.ValidationError as error:
        lines = [
            f"{key}: not supported here, got {one[0]['input']!r:.80}"
            if one[0]["type"] == "extra_forbidden"
            else format_error(key, *one)
            for key, one in by_key(error).items()
        ]
        raise ValueError("\n".join(f"{folder}/task.toml: {line}" for line in lines)) from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{folder}: {error}") from error
    return task


def _grant(name: str, table: Any, grant: Sequence[str]) -> None:
    """Replace ${NAME} and ${NAME:-TEXT} in the variables of a table."""

    def value(match: re.Match[str]) -> str:
        granted = os.environ.get(match[1]) if match[1] in grant else None
        if granted is None and match[2] is None:
            raise ValueError(
                f"{name}.env: expected variables that are set and granted, got {match[0]}. Remedy: "
                f"set {match[1]}, and env.options.grant = [{match[1]!r}]"
            )
        return granted if granted is not None else match[2]

    env = table.get("env") if isinstance(table, dict) else None
    if isinstance(env, dict):
        env |= {k: _VARIABLE.sub(value, v) for k, v in env.items() if isinstance(v, str)}


def folders_of(source: Path) -> list[Path]:
    """The task folders below a folder, or it alone."""
    found = sorted(path.parent.resolve() for path in source.rglob("task.toml"))
    if not found:
        raise ValueError(f"{source}: expected folders with a task.toml, got none")
    return found


def make_row(folder: Path, builder: Builder, grant: Sequence[str] = ()) -> Mapping[str, Any]:
    """The row of a task, its image built; ValueError or SandboxException if it cannot be played."""
    task = read_task(folder, grant)
    if task.environment.docker_image:
        image = builder.base(task.environment.docker_image)
    else:
        source, timeout_s = folder / "environment", task.environment.build_timeout_sec
        name = f"harbor/{re.sub(r'[^A-Za-z0-9._-]', '-', folder.name)}-{_key(source)}"
        image = builder.build(name, source, timeout_s=timeout_s)
    judge = rehearse(task, image, builder)
    return {
        "id": folder.name, "question": (folder / "instruction.md").read_text().strip(),
        "folder": str(folder), "image": image.name, "judge": judge.name,
        "digest": task.digest(judge),
    }  # fmt: skip


def rehearse(task: HarborTask, image: Image, builder: Builder) -> Image:
    """The image of verdicts: with the network, what the tests' script installs is a layer of it."""
    script = (task.folder / "tests/test.sh").read_bytes()
    if not builder.network or not any(word in script for word in INSTALLS):
        return image
    workdir = task.environment.workdir or image.workdir or "/"
    steps = [f"FROM {image.name}", "COPY tests /tests", f"WORKDIR {workdir}", f"RUN {REHEARSE}"]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(task.folder / "tests", Path(folder, "tests"))
        Path(folder, "Dockerfile").write_text("\n".join(steps))
        name = f"{image.name}-tests-{_key(task.folder / 'tests')}"
        return builder.build(name, folder, timeout_s=task.verifier.timeout_sec)


def _key(folder: Path) -> str:
    content = sorted((name, *file) for name, file in files_of(folder).items())
    return hashlib.sha256(repr(content).encode()).hexdigest()[:12]


def write(
    sources: Sequence[str], config: Path, *, network: bool, grant: Sequence[str] = ()
) -> list[str]:
    """Write rows beside a config to be: the file to train on, and its settings. About a quarter is
    held out, by instruction. What a folder that is left out lacks is printed.
    """
    rows, console = [], Console(stderr=True)
    folders = [folder for source in sources for folder in folders_of(Path(source))]
    with Builder(network=network) as builder:
        for folder in track(folders, "images", console=console, transient=True):
            try:
                rows.append(make_row(folder, builder, grant))
            except (ValueError, SandboxException) as error:
                console.print(f"left out: {error}", markup=False, highlight=False)
    hashes = [hashlib.sha256(row["question"].encode()).digest() for row in rows]
    different = sorted({*hashes})
    if len(different) < 2:
        raise ValueError(f"--harbor: expected 2 or more tasks that differ, got {len(different)}")
    held = different[: max(1, len(different) // 4)]
    paths = [config.resolve().with_suffix(f".{name}.jsonl") for name in ("train", "heldout")]
    for path, out in zip(paths, (False, True), strict=True):
        write_lines(path, [r for r, h in zip(rows, hashes, strict=True) if (h in held) is out])
    verdict_s = max(read_task(Path(row["folder"]), grant).verifier.timeout_sec for row in rows)
    return [
        str(paths[0]), "env.kind=harbor", "reward.format=0.0", f"data.heldout={paths[1]}",
        f"data.num_heldout={min(64, sum(h in held for h in hashes))}",
        f"agent.options.system_prompt={PROMPT}", "agent.options.language=bash",
        "rollout.max_turns=10", "sandbox.timeout_s=60", f"rollout.call_timeout_s={verdict_s + 300}",
    ]  # fmt: skip

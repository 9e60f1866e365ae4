"""Read task folders in Harbor's format and convert them to rows (docs/environments.md)."""

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
"""Maximum bytes of a file in tests/ or solution/."""
PROMPT = (
    "You work in a Linux container. Write bash between <code> and </code>; you see what it prints. "
    "Variables, directory and files stay. When the task is done, reply with: Answer: done"
)
INSTALLS = (b"apt-get ", b"apt ", b"pip install", b"pip3 install", b"curl ", b"wget ", b"uvx ")
"""Words of scripts that need the network."""
RUN_TESTS = "mkdir -p /logs/verifier; chmod +x /tests/test.sh; /tests/test.sh; true"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Network = Literal["public", "no-network"]
Root = Literal["root", "0", 0]
Empty = Annotated[tuple[()], Field(strict=False)]


class _Table(pydantic.BaseModel):
    """A table of task.toml with the supported keys. Others are rejected by name."""

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
    """A task.toml and its folder."""

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
        """Limits of its sessions, whose files are in memory. The episode limits the time."""
        env = self.environment
        memory, storage = (
            int(size.rstrip("iB")[:-1]) << 10 * (size.rstrip("iB")[-1] == "G") if size else mib
            for size, mib in ((env.memory, env.memory_mb), (env.storage, env.storage_mb))
        )
        return Limits(
            memory_mib=memory, home_mib=min(memory, storage), cpus=env.cpus, inodes=1 << 17,
            processes=512, open_files=1024, steps=10_000, timeout_s=3600, cpu_s=86_400,
            session_s=2 * 86_400,
        )  # fmt: skip

    def digest(self, image: Image) -> str:
        digest = hashlib.sha256(image.digest.encode() + (self.folder / "task.toml").read_bytes())
        for name, (data, executable) in files_of(self.folder / "tests").items():
            digest.update(f"{name}\0{executable}\0{len(data)}\0".encode() + data)
        return digest.hexdigest()


def files_of(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Content and executable bit of each file by its path.

    Raises ValueError if a file is too large or a link out of the folder.
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
    """Read a folder's task.toml. `grant`: variables of this process that ${NAME} in it may read.

    Raises ValueError with the malformed or unsupported key or file.
    """
    environment = folder / "environment"
    try:
        for unsupported in (*environment.glob("*compose*.y*ml"), folder / "steps"):
            if unsupported.exists():
                raise ValueError(f"expected one container and one step, got {unsupported.name}")
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
            f"{key}: not supported here, got {found[0]['input']!r:.80}"
            if found[0]["type"] == "extra_forbidden"
            else format_error(key, *found)
            for key, found in by_key(error).items()
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
    """The task folders in a folder, which may be a task folder itself."""
    folders = sorted(path.parent.resolve() for path in source.rglob("task.toml"))
    if not folders:
        raise ValueError(f"{source}: expected folders with a task.toml, got none")
    return folders


def make_row(folder: Path, builder: Builder, grant: Sequence[str] = ()) -> Mapping[str, Any]:
    """Build a task's image and make its row.

    Raises ValueError or SandboxException if the task is not supported.
    """
    task = read_task(folder, grant)
    if task.environment.docker_image:
        image = builder.base(task.environment.docker_image)
    else:
        source, timeout_s = folder / "environment", task.environment.build_timeout_sec
        name = f"harbor/{re.sub(r'[^A-Za-z0-9._-]', '-', folder.name)}-{_content_key(source)}"
        image = builder.build(name, source, timeout_s=timeout_s)
    judge = build_verdict_image(task, image, builder)
    return {
        "id": folder.name, "question": (folder / "instruction.md").read_text().strip(),
        "folder": str(folder), "image": image.name, "judge": judge.name,
        "digest": task.digest(judge),
    }  # fmt: skip


def build_verdict_image(task: HarborTask, image: Image, builder: Builder) -> Image:
    """Make the image for verdicts. With the network, the tests' installations are a layer of it."""
    script = (task.folder / "tests/test.sh").read_bytes()
    if not builder.network or not any(word in script for word in INSTALLS):
        return image
    workdir = task.environment.workdir or image.workdir or "/"
    steps = [f"FROM {image.name}", "COPY tests /tests", f"WORKDIR {workdir}", f"RUN {RUN_TESTS}"]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(task.folder / "tests", Path(folder, "tests"))
        Path(folder, "Dockerfile").write_text("\n".join(steps))
        name = f"{image.name}-tests-{_content_key(task.folder / 'tests')}"
        return builder.build(name, folder, timeout_s=task.verifier.timeout_sec)


def _content_key(folder: Path) -> str:
    content = sorted((name, *file) for name, file in files_of(folder).items())
    return hashlib.sha256(repr(content).encode()).hexdigest()[:12]


def write_rows(
    sources: Sequence[str], config: Path, *, network: bool, grant: Sequence[str] = ()
) -> list[str]:
    """Write rows next to a future config. Returns the training file and settings.

    About a quarter is held out, by instruction. The reason for each skipped folder is printed.
    """
    rows, console = [], Console(stderr=True)
    folders = [folder for source in sources for folder in folders_of(Path(source))]
    with Builder(network=network) as builder:
        for folder in track(folders, "images", console=console, transient=True):
            try:
                rows.append(make_row(folder, builder, grant))
            except (ValueError, SandboxException) as error:
                console.print(f"skipped: {error}", markup=False, highlight=False)
    hashes = [hashlib.sha256(row["question"].encode()).digest() for row in rows]
    distinct = sorted({*hashes})
    if len(distinct) < 2:
        raise ValueError(f"--harbor: expected 2 or more different tasks, got {len(distinct)}")
    heldout = distinct[: max(1, len(distinct) // 4)]
    paths = [config.resolve().with_suffix(f".{name}.jsonl") for name in ("train", "heldout")]
    for path, held in zip(paths, (False, True), strict=True):
        write_lines(path, [r for r, k in zip(rows, hashes, strict=True) if (k in heldout) is held])
    verdict_s = max(read_task(Path(row["folder"]), grant).verifier.timeout_sec for row in rows)
    return [
        str(paths[0]), "env.kind=harbor", "reward.format=0.0", f"data.heldout={paths[1]}",
        f"data.num_heldout={min(64, sum(key in heldout for key in hashes))}",
        f"agent.options.system_prompt={PROMPT}", "agent.options.language=bash",
        "rollout.max_turns=10", "sandbox.timeout_s=60", f"rollout.call_timeout_s={verdict_s + 300}",
    ]  # fmt: skip

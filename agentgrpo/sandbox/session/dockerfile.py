"""Builds images from Dockerfiles without Docker: each RUN in a session, each step a cached layer.

Supported: one stage of FROM, RUN, COPY and ADD of files, ENV, ARG, WORKDIR, SHELL and USER root.
Instructions that only describe the start of a container are ignored. All others are errors with
their line.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from agentgrpo.sandbox.isolation import images
from agentgrpo.sandbox.isolation.errors import SandboxException
from agentgrpo.sandbox.isolation.images import Image, Progress
from agentgrpo.sandbox.isolation.layers import ImageError, NewLayer, Stack
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.isolation.sources import pack
from agentgrpo.sandbox.isolation.template import Template
from agentgrpo.sandbox.session.pool import SandboxPool
from agentgrpo.sandbox.session.program import Program
from agentgrpo.sandbox.session.session import Session

IGNORED = "CMD ENTRYPOINT EXPOSE HEALTHCHECK LABEL MAINTAINER ONBUILD STOPSIGNAL VOLUME"
LIMITS = Limits(
    memory_mib=8192, home_mib=8192, tmp_mib=1024, inodes=1 << 20, processes=4096, open_files=1024,
    timeout_s=3600, session_s=7200, cpu_s=7200, cpus=64,
)  # fmt: skip
"""Limits of a RUN. The files that it writes are in memory until it ends."""
MTIME = 1_577_836_800  # 2020, for all copied files: the same files must give the same layer
APT = 'APT::Sandbox::User "root";\n'  # apt would download as another user, which sessions lack
_HEREDOC = re.compile(r"(?<!<)<<-?\s*[\"']?([A-Za-z_]\w*)[\"']?")
_VARIABLE = re.compile(r"\\\$|\$(?:\{(\w+)(?::([-+])([^}]*))?\}|(\w+))")


def instructions(text: str) -> Iterator[tuple[int, str, dict[str, str], str]]:
    """Parse line, name, flags and arguments of each instruction, with here-documents."""
    lines, at = text.splitlines(), 0
    while at < len(lines):
        begin, line = at + 1, lines[at].strip()
        at += 1
        if not line or line.startswith("#"):
            continue
        while line.endswith("\\") and at < len(lines):
            continuation, at = lines[at].strip(), at + 1
            if continuation and not continuation.startswith("#"):
                line = f"{line[:-1]} {continuation}"
        name, _, rest = line.partition(" ")
        for end in _HEREDOC.findall(rest) if name.upper() in ("RUN", "COPY", "ADD") else ():
            if end in map(str.strip, lines[at:]):
                last = next(n for n in range(at, len(lines)) if lines[n].strip() == end)
                rest, at = "\n".join([rest, *lines[at:last], end]), last + 1
        flags = {}
        while match := re.match(r"\s*--([\w-]+)(?:=(\S+))?\s+", rest):
            flags[match[1]], rest = match[2] or "", rest[match.end() :]
        yield begin, name.upper(), flags, rest.strip()


def expand(text: str, variables: dict[str, str]) -> str:
    """Replace $NAME, ${NAME}, ${NAME:-WORD} and ${NAME:+WORD}."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "\\$":
            return "$"
        current, word = variables.get(match[1] or match[4], ""), match[3] or ""
        return (word if current else "") if match[2] == "+" else current or word

    return _VARIABLE.sub(value, text)


def _words(text: str) -> list[str]:
    """Parse a JSON list of words; [] if the text is something else."""
    with contextlib.suppress(ValueError):
        if isinstance(words := json.loads(text), list):
            return list(map(str, words))
    return []


class Builder:
    """Builds images, with one pool for all RUN steps.

    Args:
        network: RUN steps use this machine's network, including its loopback services.
        limits: limits of RUN steps.
    """

    def __init__(self, *, network: bool = False, limits: Limits = LIMITS) -> None:
        self.network, self._limits, self._ends_at = network, limits, math.inf
        self._pool: SandboxPool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()

    def build(
        self, name: str, folder: str | os.PathLike[str], *, progress: Progress | None = None,
        timeout_s: float = math.inf,
    ) -> Image:  # fmt: skip
        """Build the Dockerfile in a folder. Steps that were built before do not run again.

        Raises:
            ImageError: a step failed or is not supported; the message has its line.
        """
        folder, self._ends_at = Path(folder), time.monotonic() + timeout_s
        try:
            text = (folder / "Dockerfile").read_text()
        except OSError as error:
            raise ImageError(f"{folder}: expected a folder with a Dockerfile: {error}") from error
        build = _Build(self, name, folder)
        with images.hold():
            for line, kind, flags, rest in instructions(text):
                if progress is not None:
                    progress(f"{name}: {kind} {rest.splitlines()[0][:50] if rest else ''}", 0, 0)
                try:
                    build.step(kind, flags, rest)
                except (ValueError, SandboxException) as error:
                    raise ImageError(f"{folder}/Dockerfile:{line}: {kind}: {error}") from error
            return build.save()

    def base(self, reference: str) -> Image:
        """Find the image of FROM in the store or, with the network, in a registry."""
        if not self.network or reference in {image.name for image in images.list_images()}:
            return images.get_image(reference)
        return images.add_image(reference, f"docker://{reference}")

    def run(self, image: Image, argv: list[str], final: Path) -> None:
        """Run a command in an image. The changed files become a layer."""
        with self._session(image) as session:
            resolver = self._prepare(session, image)
            assert session.channels is not None
            program = Program(
                session.channels, argv, env=image.env, directory=image.workdir, output_max=64 << 20
            )
            with contextlib.closing(program):
                program.close_stdin()
                remaining = max(0.0, self._ends_at - time.monotonic())
                ended = program.wait(min(self._limits.timeout_s, remaining))
            if not ended or program.exit_code:
                output = (program.stdout + program.stderr)[-2000:].decode(errors="replace")
                reason = f"ended with {program.exit_code}" if ended else "took too long"
                raise ImageError(f"the command {reason} {program.error}\n{output}")
            changes = Path(session.snapshot().layers[-1])
        etc, file = changes / "etc", changes / "etc/resolv.conf"
        has_links = etc.is_symlink() or file.is_symlink()  # a link could lead out of the layer
        if not has_links and file.is_file() and file.read_bytes() == resolver:
            file.unlink()
        images.publish(changes, final)

    def _session(self, image: Image) -> Session:
        if self._pool is None:
            self._pool = SandboxPool(
                template=Template(image=image.name), limits=self._limits, min_idle=0, zygotes=1,
                own_network=not self.network,
            )  # fmt: skip
        return self._pool.acquire(image)

    def _prepare(self, session: Session, image: Image) -> bytes:
        """Configure apt and the resolver. Returns the content written to resolv.conf."""
        resolver = Path("/etc/resolv.conf").read_bytes() if self.network else b""
        with contextlib.closing(session.files()) as files:
            if Stack(image.layers).entry("etc/apt/apt.conf.d"):
                files.write("/etc/apt/apt.conf.d/90user", APT)
            if self.network:
                files.write("/etc/resolv.conf", resolver)
        return resolver


class _Build:
    def __init__(self, builder: Builder, name: str, folder: Path) -> None:
        self._builder, self._name, self._folder = builder, name, folder
        self._base: Image | None = None
        self._layers: tuple[str, ...] = ()
        self._env: dict[str, str] = {}
        self._arguments: dict[str, str] = {}
        self._workdir, self._shell = "/", ["/bin/sh", "-c"]

    def save(self) -> Image:
        if self._base is None:
            raise ImageError(f"{self._folder}/Dockerfile: expected a FROM, got none")
        names = [os.path.basename(layer) for layer in self._layers]
        state = json.dumps([names, self._env, self._workdir])
        digest = f"sha256:{hashlib.sha256(state.encode()).hexdigest()}"
        return images.save_image(self._name, names, self._env, self._workdir, digest)

    def step(self, kind: str, flags: dict[str, str], rest: str) -> None:
        supported = {
            "COPY": {"chown", "chmod", "link"},
            "ADD": {"chown", "chmod"},
            "FROM": {"platform"},
        }
        if unknown := flags.keys() - supported.get(kind, set()):
            raise ImageError(f"--{min(unknown)} is not supported")
        if not rest:
            raise ImageError("expected an argument")
        variables = {**self._arguments, **self._env}
        if kind == "FROM":
            self._from(expand(rest, variables).split())
        elif kind == "ARG":
            name, _, value = rest.partition("=")
            self._arguments[name] = "".join(shlex.split(expand(value, variables)))
        elif self._base is None:
            raise ImageError("expected FROM first")
        elif kind == "ENV":
            words = shlex.split(expand(rest, variables))
            pairs = words if "=" in words[0] else [f"{words[0]}={' '.join(words[1:])}"]
            self._env |= dict(pair.split("=", 1) for pair in pairs)
        elif kind == "SHELL":
            self._shell = _words(rest) or self._shell
        elif kind == "WORKDIR":
            self._workdir = os.path.normpath(os.path.join(self._workdir, expand(rest, variables)))
            self._unpack("WORKDIR", self._workdir, [])
        elif kind == "RUN":
            self._run(rest, variables)
        elif kind in ("COPY", "ADD"):
            self._copy(kind, flags, rest, variables)
        elif kind == "USER" and expand(rest, variables).partition(":")[0] not in ("root", "0"):
            raise ImageError(f"expected root, got {rest}. Sessions have no other user")
        elif kind != "USER" and kind not in IGNORED.split():
            raise ImageError("this instruction is not supported")

    def _from(self, words: list[str]) -> None:
        if self._base is not None or len(words) != 1:
            raise ImageError("expected one stage, FROM IMAGE")
        self._base = base = self._builder.base(words[0])
        self._layers, self._env, self._workdir = base.layers, dict(base.env), base.workdir
        self._arguments = {}

    def _run(self, rest: str, variables: dict[str, str]) -> None:
        """RUN with a command, a JSON list of words or a here-document."""
        argv = [*self._shell, rest]
        if rest.startswith("<<"):
            argv = [*self._shell, "\n".join(rest.splitlines()[1:-1])]
        else:
            argv = _words(rest) or argv
        assert self._base is not None
        env = {"HOME": "/root", **variables}
        image = self._base._replace(layers=self._layers, env=env, workdir=self._workdir)
        final = self._next("RUN", argv, variables, self._workdir)
        if not final.is_dir():
            self._builder.run(image, argv, final)
        self._layers = (*self._layers, str(final))

    def _copy(self, kind: str, flags: dict[str, str], rest: str, variables: dict[str, str]) -> None:
        *sources, target = _words(rest) or shlex.split(expand(rest, variables))
        paths = [path for source in sources for path in self._find(kind, source)]
        if not paths:
            raise ImageError(f"expected SOURCE and TARGET, got {rest!r:.80}")
        at = os.path.normpath(os.path.join(self._workdir, target))
        into = target.endswith(("/", ".")) or len(paths) > 1 or self._is_folder(at)
        folder = at if into or paths[0].is_dir() else ""
        files = [(path, f"{at}/{path.name}" if into and path.is_file() else at) for path in paths]
        self._unpack(kind, folder, files, flags.get("chmod", ""))

    def _find(self, kind: str, source: str) -> list[Path]:
        """Find the sources of COPY or ADD, which must be in the folder of the Dockerfile."""
        if source.startswith("<<") or "://" in source:
            raise ImageError(f"{source}: here-documents and URLs are not supported")
        if kind == "ADD" and re.search(r"\.(tar|tgz|tar\.\w+)$", source):
            raise ImageError(f"{source}: archives are not supported. COPY it and RUN tar")
        pattern = os.path.normpath(source).lstrip("/")
        paths = [self._folder] if pattern in (".", "") else sorted(self._folder.glob(pattern))
        if not paths or not all(p.resolve().is_relative_to(self._folder.resolve()) for p in paths):
            raise ImageError(f"{source}: expected a file or folder in {self._folder}")
        if (self._folder / ".dockerignore").is_file() and any(path.is_dir() for path in paths):
            raise ImageError(".dockerignore is not supported. Copy files, or remove it")
        return paths

    def _is_folder(self, path: str) -> bool:
        stack = Stack(self._layers)
        entry = stack.entry(stack.real(path.strip("/")))
        return path == "/" or (entry is not None and stat.S_ISDIR(entry[1].st_mode))

    def _unpack(
        self, kind: str, folder: str, files: list[tuple[Path, str]], chmod: str = ""
    ) -> None:
        """Make a layer of files, and of the folder if it is missing."""
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                if folder and not self._is_folder(folder):
                    member = tarfile.TarInfo(folder)
                    member.type, member.mode, member.mtime = tarfile.DIRTYPE, 0o755, MTIME
                    tar.addfile(member)
                for path, target in files:
                    pack(tar, path.resolve(), target, MTIME, int(chmod, 8) if chmod else None)
                if not tar.offset:
                    return
            file.seek(0)
            final = self._next(kind, hashlib.file_digest(file, "sha256").hexdigest())
            with images.new_layer(final.name) as scratch:
                if scratch is not None:
                    file.seek(0)
                    new = NewLayer(str(scratch), self._layers, images.owner())
                    new.unpack(file)
                    images.set_bytes(scratch, new.bytes)
        self._layers = (*self._layers, str(final))

    def _next(self, *step: object) -> Path:
        """The path of a step's layer, which depends on the layers below."""
        name = images.layer_name(*map(os.path.basename, self._layers), *step)
        return images.store_dir() / "layers" / name

"""Template: the environment in which every session of a pool starts."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from agentgrpo.sandbox.isolation.errors import InvalidArgumentException
from agentgrpo.sandbox.isolation.guards import wraps_os_errors
from agentgrpo.sandbox.isolation.limits import Limits

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Image(NamedTuple):
    """A container image in the store."""

    name: str
    layers: tuple[str, ...]
    """Paths of the unpacked layers, lowest first; each name has at most 20 characters."""
    env: dict[str, str]
    workdir: str
    digest: str
    """sha256 of the manifest; without one, of the configuration or of the tar file."""
    bytes: int
    """Size of all files. Other images may share the layers."""


@wraps_os_errors
@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The environment of sessions: an interpreter, packages, preloaded modules.

    Paths appear inside under the same name as outside, read-only. Of the machine, sessions see
    these paths and ``/usr``, nothing else. Do not list a directory that contains secrets.

    Raises:
        ValueError: a path is not absolute or does not exist, or an environment name is invalid.
    """

    name: str = "python"
    python: str = ""
    """Path of the interpreter. "": the running one, without its virtual environment."""
    site_dirs: tuple[str, ...] = ()
    """Package directories (``.../site-packages``) that sessions can import from."""
    preload: tuple[str, ...] = ()
    """Modules to import once, in the zygote; all sessions share them. They must not start threads.
    They are trusted code, unlike the code of sessions."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the code, in addition to PATH, HOME, LANG and TMPDIR."""
    mounts: tuple[str, ...] = ()
    """More files or directories that sessions can read."""
    tree: str = ""
    """A directory that appears as ~/repo in each session; each session changes its own copy. Needs
    user namespaces. The sessions share one user id, which must own all files in the directory."""
    image: str = ""
    """Name of an image (``agentgrpo sandbox image add``) that is the root directory of each
    session. Steps are bash commands. Needs user namespaces; the sessions share one user id."""
    limits: Limits | None = None
    """Limits of the sessions, unless the pool sets its own."""
    setup: str = ""
    """Python code that every session runs before it is used, such as the functions of a tool
    script. It runs inside the session and is as untrusted as the code after it."""

    def __post_init__(self) -> None:
        for key, paths in (("site_dirs", self.site_dirs), ("mounts", self.mounts)):
            for path in paths:
                if not os.path.isabs(path) or not os.path.exists(path):
                    raise ValueError(
                        f"template.{key}: expected an absolute path that exists, got {path!r}"
                    )
        check_environment("template.env", self.env)
        unused = ("python", "site_dirs", "preload", "mounts", "tree", "setup") if self.image else ()
        for key in unused:
            if getattr(self, key):
                raise ValueError(
                    f"template.{key}: expected nothing, because sessions of an image see only the "
                    f"image, got {getattr(self, key)!r:.99}. Remove it, or template.image"
                )

    @property
    def interpreter(self) -> str:
        """The real path of the executable, not of a shim or a virtual environment."""
        if self.python:
            return os.path.realpath(self.python)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return os.path.realpath(os.path.join(sys.base_prefix, "bin", version))

    @property
    def interpreter_paths(self) -> list[str]:
        """Paths of the interpreter that sessions can read, without the prefix itself.

        The prefix may be a home directory (``--prefix=$HOME``); then only Python's directories and
        libraries are shown. Otherwise all of lib/, include/ and share/: conda's libraries need it.
        """
        prefix = Path(self.interpreter).parents[1]
        home = Path(os.path.realpath(os.path.expanduser("~")))
        kinds: tuple[str, ...] = ("lib", "lib64", "include", "share")
        mine = (home, Path(os.path.realpath(home / ".local")))
        if any(path.is_relative_to(prefix) for path in mine) or prefix.name == ".local":
            kinds = ("lib/python3.*", "lib64/python3.*", "lib/*.so*", "lib64/*.so*")
        paths = [path for kind in kinds for path in sorted(prefix.glob(kind)) if path.exists()]
        return [self.interpreter, *map(str, paths)]


def check_environment(key: str, env: Mapping[str, str]) -> None:
    """Raise InvalidArgumentException unless env is a valid environment of a process."""
    if not isinstance(env, Mapping):
        raise InvalidArgumentException(f"{key}: expected names and values, got {env!r:.99}")
    for name, value in env.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidArgumentException(f"{key}: expected names like HOME, got {name!r}")
        if not isinstance(value, str) or "\0" in value:
            raise InvalidArgumentException(
                f"{key}[{name!r}]: expected text without NUL, got {value!r}"
            )
        os.fsencode(value)  # a lone surrogate is a ValueError

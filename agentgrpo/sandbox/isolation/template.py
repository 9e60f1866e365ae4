"""What every session of a pool finds when it starts."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from agentgrpo.sandbox.isolation.errors import InvalidArgumentException
from agentgrpo.sandbox.isolation.guards import public
from agentgrpo.sandbox.isolation.limits import Limits

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Image(NamedTuple):
    """An image of the store."""

    name: str
    layers: tuple[str, ...]
    """Paths of its unpacked layers, the lowest first; each name has at most 20 characters."""
    env: dict[str, str]
    workdir: str
    digest: str
    """sha256 of its manifest; without one, of its configuration or of its tar."""
    bytes: int
    """Of all its files. Other images may share its layers."""


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """An environment for sessions: an interpreter, packages, what is imported already.

    Paths are seen inside at the same place as outside, read-only; nothing else of the machine but
    ``/usr`` is seen. Do not list a directory that holds secrets.

    Raises:
        ValueError: a path is not absolute or does not exist, an environment key is not a name.
    """

    name: str = "python"
    python: str = ""
    """The interpreter. "" is the one that runs now, without its virtual environment."""
    site_dirs: tuple[str, ...] = ()
    """Directories of packages (``.../site-packages``) that sessions may import from."""
    preload: tuple[str, ...] = ()
    """Modules imported once, in the zygote, and shared by all sessions. They must not start
    threads; they are trusted code, unlike what sessions run."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the code, besides PATH, HOME, LANG and TMPDIR."""
    mounts: tuple[str, ...] = ()
    """Further files or directories to show read-only."""
    tree: str = ""
    """A directory that is ~/repo in each session, whose changes are its own copies. Needs user
    namespaces; the sessions share a user id, whom all files in it must belong to."""
    image: str = ""
    """The name of an image (``agentgrpo sandbox image add``), whose files are the root directory of
    each session; steps are bash commands. Needs user namespaces; the sessions share a user id."""
    limits: Limits | None = None
    """Bounds of its sessions, where the pool is not given others."""
    setup: str = ""
    """Python that every session runs before it is handed out, such as the functions of a tool
    script. It runs inside, as untrusted as what follows it."""

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
                    f"template.{key}: expected nothing, as sessions of an image see only the "
                    f"image, got {getattr(self, key)!r:.99}. Remove it, or template.image"
                )

    @property
    def interpreter(self) -> str:
        """The real executable: no shim and no virtual environment in between."""
        if self.python:
            return os.path.realpath(self.python)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return os.path.realpath(os.path.join(sys.base_prefix, "bin", version))

    @property
    def interpreter_paths(self) -> list[str]:
        """What is shown of the interpreter: not the directory that it was installed in, which may
        be somebody's home (``--prefix=$HOME``). Of such a one only Python's own directories and
        libraries are, of others what lies beside them too: libraries may need it (conda's do).
        """
        prefix = Path(self.interpreter).parents[1]
        home = Path(os.path.realpath(os.path.expanduser("~")))
        kinds: tuple[str, ...] = ("lib", "lib64", "include", "share")
        mine = (home, Path(os.path.realpath(home / ".local")))
        if any(path.is_relative_to(prefix) for path in mine) or prefix.name == ".local":
            kinds = ("lib/python3.*", "lib64/python3.*", "lib/*.so*", "lib64/*.so*")
        found = [path for kind in kinds for path in sorted(prefix.glob(kind)) if path.exists()]
        return [self.interpreter, *map(str, found)]


def check_environment(key: str, env: Mapping[str, str]) -> None:
    """Raise InvalidArgumentException unless env is something a process can be given."""
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

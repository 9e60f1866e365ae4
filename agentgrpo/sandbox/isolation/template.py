"""Template: the environment in which every session of a pool starts, and templates by name.

A named template is built once: a directory with ``manifest.json`` and, if it was built from
requirements, ``site/``. They are under $AGENTGRPO_TEMPLATES, or agentgrpo/templates in the user's
cache directory.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from agentgrpo.sandbox.isolation.errors import (
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
)
from agentgrpo.sandbox.isolation.guards import wraps_os_errors
from agentgrpo.sandbox.isolation.limits import Limits

BUILT_IN = (None, "python", "base", "code-interpreter-v1")
"""Names of the built-in template; the last two are E2B's defaults."""
DATA = ("IPython", "numpy", "pandas", "matplotlib", "e2b_charts")
"""Packages of template ``data``, as far as this process has them. IPython is required."""
INSTALL = "pip install ipython numpy pandas matplotlib"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
    hidden: tuple[str, ...] = ()
    """Directories, below those that sessions see, that appear empty. Needs user namespaces."""
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
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise InvalidArgumentException(f"{key}: expected names like HOME, got {name!r}")
        if not isinstance(value, str) or "\0" in value:
            raise InvalidArgumentException(
                f"{key}[{name!r}]: expected text without NUL, got {value!r}"
            )
        os.fsencode(value)  # a lone surrogate is a ValueError


def directory() -> Path:
    """The directory of all templates."""
    if path := os.environ.get("AGENTGRPO_TEMPLATES"):
        return Path(path)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "agentgrpo", "templates")


@wraps_os_errors
def find_template(name: str | None) -> Template:
    """Return the template of a name.

    None is the running interpreter without packages. "data" has IPython, and numpy, pandas and
    matplotlib as far as the environment of this process has them.

    Raises:
        NotFoundException: no template of this name was built.
    """
    if name in BUILT_IN:
        return Template()
    if name == "data":
        return _data()
    path = directory() / str(name) / "manifest.json"
    if not _NAME.fullmatch(str(name)) or not path.is_file():
        known = sorted(entry.parent.name for entry in directory().glob("*/manifest.json"))
        raise NotFoundException(f"no template {name!r}; built so far: {', '.join(known) or 'none'}")
    fields: dict[str, Any] = json.loads(path.read_text())["template"]
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    limits = Limits(**values["limits"]) if values["limits"] is not None else None
    return Template(**values | {"limits": limits})


def _data() -> Template:
    homes = {name: home for name in DATA if (home := home_of(name)) is not None}
    if "IPython" not in homes:
        raise NotFoundException(f"template 'data' needs IPython; remedy: {INSTALL}")
    return Template(
        name="data",
        site_dirs=tuple(dict.fromkeys(homes.values())),
        preload=tuple({"matplotlib": "matplotlib.pyplot"}.get(name, name) for name in homes),
        env={
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "MPLCONFIGDIR": "/tmp/matplotlib",
        },
    )


def home_of(module: str) -> str | None:
    """The package directory that a top-level module of this process would be imported from.

    None if the module does not exist or belongs to the standard library.
    """
    if not module.isidentifier() or module in sys.stdlib_module_names:
        return None
    spec = PathFinder.find_spec(module)  # importlib.util.find_spec() can raise for absent modules
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        return None
    path = Path(spec.origin).resolve()
    return str(path.parents[1] if path.name == "__init__.py" else path.parent)


def has_data() -> bool:
    """Whether template ``data`` is available."""
    return home_of("IPython") is not None


@wraps_os_errors
def build_template(
    name: str,
    *,
    requirements: Path | None = None,
    site_dirs: Sequence[str] = (),
    preload: Sequence[str] = (),
    tools: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    mounts: Sequence[str] = (),
    limits: Limits | None = None,
) -> tuple[Template, bool]:
    """Build a template, unless one with this name and content exists.

    Args:
        name: the name of the template.
        requirements: a pip requirements file; this interpreter's pip installs the packages.
        site_dirs: existing package directories, such as those of a virtual environment.
        preload: modules to import once for all sessions.
        tools: Python files whose code every session runs first.
        env: environment variables.
        mounts: more paths that sessions can read.
        limits: limits of the sessions.

    Returns:
        The template, and whether it was built now.

    Raises:
        ValueError: the name has characters other than letters, digits, ".", "_" and "-".
        SandboxException: the installation failed.
    """
    if not _NAME.fullmatch(name) or name in (*BUILT_IN, "data"):
        raise ValueError(f"template name: expected letters, digits, '._-', got {name!r}")
    home = directory() / name
    packages = requirements.read_text() if requirements is not None else ""
    fields: dict[str, Any] = {
        "name": name,
        "preload": tuple(preload),
        "env": dict(env or {}),
        "mounts": tuple(mounts),
        "limits": limits,
        "setup": "\n\n".join(path.read_text() for path in tools),
    }
    content = json.dumps([sys.version, packages, list(site_dirs), fields], default=asdict)
    digest = hashlib.sha256(content.encode()).hexdigest()
    manifest = home / "manifest.json"
    if manifest.is_file() and json.loads(manifest.read_text())["sha256"] == digest:
        return find_template(name), False
    _replace(home, requirements)
    new_site = (str(home / "site"),) if requirements is not None else ()
    template = Template(site_dirs=(*new_site, *site_dirs), **fields)
    partial = manifest.with_suffix(".partial")
    partial.write_text(json.dumps({"sha256": digest, "template": asdict(template)}, indent=2))
    partial.rename(manifest)
    return template, True


def _replace(home: Path, requirements: Path | None) -> None:
    """Replace directory home, by renames: a reader never sees half of a template."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        if requirements is not None:
            (new / "site").mkdir()
            _install(requirements, new / "site")
        if home.exists():
            home.rename(Path(scratch, "old"))
        new.rename(home)


def _install(requirements: Path, site: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site)]
    process = subprocess.run(
        [*command, "-r", str(requirements)], capture_output=True, text=True, check=False
    )
    if process.returncode != 0:
        raise SandboxException(f"pip could not install {requirements}:\n{process.stderr[-4000:]}")

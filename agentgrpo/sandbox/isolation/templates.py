"""Named templates: built once, reused by name.

A template is a directory with ``manifest.json`` and, if it was built from requirements, ``site/``.
They are under $AGENTGRPO_TEMPLATES, or agentgrpo/templates in the user's cache directory.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from agentgrpo.sandbox.isolation.errors import NotFoundException, SandboxException
from agentgrpo.sandbox.isolation.guards import wraps_os_errors
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.isolation.template import Template

BUILT_IN = (None, "python", "base", "code-interpreter-v1")
"""Names of the built-in template; the last two are E2B's defaults."""
DATA = ("IPython", "numpy", "pandas", "matplotlib", "e2b_charts")
"""Packages of template ``data``, as far as this process has them. IPython is required."""
INSTALL = "pip install ipython numpy pandas matplotlib"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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

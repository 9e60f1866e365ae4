"""Named templates: prepared once, hashed, reused by name.

A template is a directory with ``manifest.json`` and, if it was built from requirements, ``site/``.
They live under $AGENTGRPO_TEMPLATES, or agentgrpo/templates in the user's cache directory.
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
from agentgrpo.sandbox.isolation.guards import public
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.isolation.template import Template

BUILT_IN = (None, "python", "base", "code-interpreter-v1")
"""Names of the template that needs no building; the last two are E2B's defaults."""
DATA = ("IPython", "numpy", "pandas", "matplotlib", "e2b_charts")
"""What template ``data`` has, of what the environment of this process has; IPython it must have."""
INSTALL = "pip install ipython numpy pandas matplotlib"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def directory() -> Path:
    """Where templates are kept."""
    if chosen := os.environ.get("AGENTGRPO_TEMPLATES"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "agentgrpo", "templates")


@public
def find_template(name: str | None) -> Template:
    """The template of that name; None is the interpreter that runs this, without packages. "data"
    has IPython, and numpy, pandas and matplotlib, as far as the environment that runs this has
    them.

    Raises:
        NotFoundException: none was built under this name.
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
        raise NotFoundException(f"template 'data' is there where IPython is; remedy: {INSTALL}")
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
    """The directory of packages that a top-level module of this process would come from; None if
    there is none, or it is the standard library's.
    """
    if not module.isidentifier() or module in sys.stdlib_module_names:
        return None
    spec = PathFinder.find_spec(module)  # find_spec() raises for what a program may be without
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        return None
    path = Path(spec.origin).resolve()
    return str(path.parents[1] if path.name == "__init__.py" else path.parent)


def has_data() -> bool:
    """Whether template ``data`` is to be had."""
    return home_of("IPython") is not None


@public
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
    """Make a template, unless one of this name and content is there.

    Args:
        name: what to call it.
        requirements: a pip requirements file; its packages are installed by this interpreter's.
        site_dirs: directories of packages that exist already, such as a virtual environment's.
        preload: modules to import once for all sessions.
        tools: Python files whose code every session runs first.
        env: environment variables.
        mounts: further paths to show read-only.
        limits: bounds of its sessions.

    Returns:
        The template, and whether it had to be built.

    Raises:
        ValueError: the name has characters besides letters, digits, ".", "_" and "-".
        SandboxException: the installation failed.
    """
    if not _NAME.fullmatch(name) or name in (*BUILT_IN, "data"):
        raise ValueError(f"template name: expected letters, digits, '._-', got {name!r}")
    home = directory() / name
    wanted = requirements.read_text() if requirements is not None else ""
    fields: dict[str, Any] = {
        "name": name,
        "preload": tuple(preload),
        "env": dict(env or {}),
        "mounts": tuple(mounts),
        "limits": limits,
        "setup": "\n\n".join(path.read_text() for path in tools),
    }
    recipe = json.dumps([sys.version, wanted, list(site_dirs), fields], default=asdict)
    digest = hashlib.sha256(recipe.encode()).hexdigest()
    manifest = home / "manifest.json"
    if manifest.is_file() and json.loads(manifest.read_text())["sha256"] == digest:
        return find_template(name), False
    _replace(home, requirements)
    own_site = (str(home / "site"),) if requirements is not None else ()
    template = Template(site_dirs=(*own_site, *site_dirs), **fields)
    partial = manifest.with_suffix(".partial")
    partial.write_text(json.dumps({"sha256": digest, "template": asdict(template)}, indent=2))
    partial.rename(manifest)
    return template, True


def _replace(home: Path, requirements: Path | None) -> None:
    """A new directory instead of home, with the packages of requirements in site/. Both moves
    are renames: a reader finds the old template, none, or the new one.
    """
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
    done = subprocess.run(
        [*command, "-r", str(requirements)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SandboxException(f"pip could not install {requirements}:\n{done.stderr[-4000:]}")

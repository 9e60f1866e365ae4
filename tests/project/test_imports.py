"""Allowed imports between packages, which keep agents, environments and kernels independent."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from agentgrpo.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "agentgrpo"


def python_files(*folders: str) -> list[Path]:
    return [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]


def parsed(path: Path) -> ast.Module:
    """Parse a file, with the relative imports of kernels/ resolved; others are not allowed."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert path.parent.name == "kernels", f"{path}: a relative import"
            assert node.level == 1, f"{path} leaves its folder"
            node.module = ".".join(filter(None, ["agentgrpo.kernels", node.module]))
    return tree


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


ROOMS = {
    "kernels": "",
    "sandbox/inside": "",
    "types": "",
    "support": "types",
    "actions": "support",
    "cli": "support",
    "config": "kernels types support",
    "sandbox/isolation": "sandbox/inside support",
    "agents": "types actions",
    "models": "types support actions config",
    "records": "types support config",
    "sandbox/session": "sandbox/inside support sandbox/isolation",
    "engine": "kernels types support actions config models",
    "inspect/view": "types support cli config models records",
    "rewards": "types support actions config models",
    "sandbox/e2b": "sandbox/isolation sandbox/session",
    "learn": "kernels types support config models records engine",
    "sandbox": "support cli sandbox/isolation sandbox/session sandbox/e2b",
    "sandbox/grading": "sandbox/inside sandbox/isolation sandbox/session sandbox/e2b",
    "envs": (
        "types support actions config sandbox/isolation sandbox/session sandbox sandbox/grading"
    ),
    "envs/adapters": "sandbox/inside types support actions sandbox sandbox/grading envs",
    "rollout": "types support actions config agents models engine envs",
    "programs": (
        "types support actions config sandbox/isolation agents models sandbox/session "
        "sandbox envs rollout"
    ),
    "data": "types support config records envs programs",
    "examples": "types config agents models rewards sandbox envs envs/adapters rollout data",
    "train": (
        "types support actions cli config agents models records engine rewards learn "
        "sandbox envs rollout programs data examples"
    ),
    "inspect/verify": "types support config records engine rewards learn train",
    "recipe": (
        "types support actions config agents models records engine rewards learn envs "
        "rollout data train"
    ),
    "inspect": (
        "types support config models records engine inspect/view rewards sandbox train "
        "inspect/verify"
    ),
    "testing": ("types support actions config records inspect/view train inspect/verify inspect"),
}
"""Room: the rooms that it may import, besides itself; lower rooms first.

A room is a module at the top of agentgrpo/ or a folder; the folders in `sandbox`, `inspect` and
`envs` are rooms of their own.
"""
NESTED = ("sandbox", "inspect", "envs")
OURS = [p for p in python_files("agentgrpo") if "kernels" not in p.parts]
ITSELF = ("__init__", "__main__")
"""Modules that no other module imports."""


def room_of(name: str) -> str:
    """The package of an imported name; "" for agentgrpo itself and its C extension."""
    first, *rest = [*name.split(".")[1:], ""]
    if first in NESTED and (PACKAGE / first / rest[0] / "").is_dir() and rest[0]:
        return f"{first}/{rest[0]}"
    return "" if first in ("_C", "__version__") else first


def room_of_file(path: Path) -> str:
    """The package of a file."""
    return room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


def test_package_imports_only_what_its_row_allows() -> None:
    for path in OURS:
        room = room_of_file(path)
        for name in imports(path) if room not in ITSELF else ():
            if is_within(name, "agentgrpo") and (other := room_of(name)):
                allowed = {room, *ROOMS[room].split()}
                assert other in allowed, f"{path} imports {name}"


def test_every_package_has_a_row() -> None:
    assert {room_of_file(path) for path in OURS} - {*ITSELF} == {*ROOMS} - {"kernels"}
    used = {
        (room_of_file(path), room_of(name))
        for path in OURS
        for name in imports(path)
        if is_within(name, "agentgrpo") and room_of_file(path) not in ITSELF
    }
    unused = {
        (room, other)
        for room, others in ROOMS.items()
        for other in others.split()
        if (room, other) not in used and room != "kernels"
    }
    assert not unused


def test_imports_point_downwards() -> None:
    """A package comes after all that it may import."""
    seen: set[str] = set()
    for room, others in ROOMS.items():
        assert set(others.split()) <= seen, room
        seen.add(room)


def test_package_stays_small() -> None:
    """Limits the number of packages, of imports between them, and of top-level entries."""
    assert len(ROOMS) <= 30
    assert sum(len(others.split()) for others in ROOMS.values()) <= 170
    top = {path.relative_to(PACKAGE).parts[0] for path in OURS} - {"__pycache__"}
    assert sum(name.endswith(".py") for name in top) <= 6
    assert sum(not name.endswith(".py") for name in top) <= 18


def test_no_two_files_import_each_other() -> None:
    """Those behind TYPE_CHECKING and within functions are counted too.

    But for those of agentgrpo itself, which are made when a name is asked for.
    """
    names = {p: ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in OURS}
    files = {name.removesuffix(".__init__"): path for path, name in names.items()}
    needs = {
        path: {
            files[found]
            for name in imports(path)
            if (found := name if name in files else name.rpartition(".")[0]) in files
        }
        - {path}
        for path in OURS
        if path != PACKAGE / "__init__.py"
    }
    list(graphlib.TopologicalSorter(needs).static_order())  # raises CycleError


def test_kernels_import_torch_triton_and_each_other() -> None:
    for path in python_files("kernels"):
        assert "import agentgrpo" not in path.read_text(), "a copied folder has another name"
        for name in imports(path):
            top = name.partition(".")[0]
            known = top in ("torch", "triton") or top in sys.stdlib_module_names
            assert known or is_within(name, "agentgrpo.kernels"), f"{path} imports {name}"


MODEL_FREE = ("agents", "envs", "sandbox", "config", "actions", "types")
LOADS_MODELS = (
    "learn/policy.py",
    "train/memory_estimate.py",
    "models/text_encoder.py",
    "models/gguf.py",
)


def test_each_dependency_is_imported_only_where_allowed() -> None:
    """Agents and environments do not import models; only the engine imports vLLM."""
    for path in OURS:
        where = path.relative_to(PACKAGE)
        for name in imports(path):
            if where.parts[0].removesuffix(".py") in MODEL_FREE:
                libraries = ("torch", "vllm", "transformers", "triton")
                assert not is_within(name, *libraries), f"{path} imports {name}"
            if is_within(name, "vllm"):
                assert where.parts[0] == "engine", f"{path} imports {name}"
            if name.startswith("transformers.AutoModel"):
                assert str(where) in LOADS_MODELS, f"{path} imports {name}"


def test_kernels_folder_is_linked_and_has_no_init() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (PACKAGE / "kernels").is_symlink()
    assert os.readlink(PACKAGE / "kernels") == "../kernels"


def modules_after(*imported: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after these imports."""
    program = f"import {', '.join(imported)}, sys\nprint(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(ran.stdout.split())


def test_kernels_load_neither_vllm_nor_transformers() -> None:
    kernels = {f"agentgrpo.kernels.{path.stem}" for path in python_files("kernels")}
    loaded = modules_after(*kernels)
    assert kernels <= loaded
    assert not loaded & {"vllm", "transformers", "agentgrpo.engine.engine", "agentgrpo.types"}


def test_early_modules_do_not_import_torch() -> None:
    """A command sets the environment before it imports torch."""
    commands = [module for module, _ in COMMANDS.values()]
    loaded = modules_after("agentgrpo.sandbox", "agentgrpo.envs.python", *commands)
    assert not loaded & {"torch", "vllm", "transformers", "triton"}


def test_transformers_can_be_imported_from_the_repository() -> None:
    assert "transformers" in modules_after("transformers")

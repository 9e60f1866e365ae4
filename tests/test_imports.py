"""Who may import whom: the direction that keeps agents, environments and kernels usable alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "agentgrpo"


def python_files(*folders: str) -> list[Path]:
    return [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, wherever it does; False for those only type checkers do."""
    tree = ast.parse(path.read_text())
    unreal = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.unparse(test.test)
        for statement in test.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in unreal) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it goes"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((name, id(node) not in unreal) for name in names)


def is_within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


COMMANDS = ("train.py", "evaluate.py", "sft.py", "data/flywheel.py", "data/curriculum.py")
OURS = [p for p in python_files("agentgrpo") if "kernels" not in p.parts]


@pytest.mark.parametrize("path", python_files("kernels"), ids=lambda path: path.name)
def test_kernels_import_torch_triton_and_each_other(path: Path) -> None:
    for name, _ in imports(path):
        top = name.partition(".")[0]
        assert (
            top in ("torch", "triton")
            or is_within(name, "agentgrpo.kernels")
            or top in sys.stdlib_module_names
        ), f"{path} imports {name}"


@pytest.mark.parametrize("folder", ["agents", "envs", "sandbox"])
def test_agents_and_environments_know_nothing_of_models(folder: str) -> None:
    libraries = ("torch", "vllm", "transformers", "triton")
    ours = tuple(f"agentgrpo.{part}" for part in ("engine", "learner", "build", "train"))
    found = python_files(f"agentgrpo/{folder}")
    assert found
    for path in found:
        for name, _ in imports(path):
            assert not is_within(name, *libraries, *ours), f"{path} imports {name}"


def test_the_sandbox_stands_alone() -> None:
    for path in python_files("agentgrpo/sandbox"):
        for name, _ in imports(path):
            if is_within(name, "agentgrpo"):
                assert is_within(name, "agentgrpo.sandbox", "agentgrpo._C"), f"{path}: {name}"


def test_values_and_config_import_nothing_of_ours_but_values() -> None:
    config = sorted((PACKAGE / "config").glob("*.py"))
    for path in (PACKAGE / "types.py", *config, PACKAGE / "runtime.py"):
        for name, _ in imports(path):
            values = path in config and is_within(name, "agentgrpo.types", "agentgrpo.config")
            assert values or not is_within(name, "agentgrpo", "torch"), f"{path} imports {name}"


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_dependency_has_its_place(path: Path) -> None:
    where = str(path.relative_to(PACKAGE))
    for name, real in imports(path):
        if is_within(name, "vllm"):
            allowed = ("engine.py", "vllm_start.py", "tool_parsers.py")
            assert where in allowed, f"{path} imports {name}"
        if name.startswith("transformers.AutoModel"):
            assert where in ("policy.py", "sft.py"), f"{path} imports {name}"
        if is_within(name, "agentgrpo.build") and real:
            assert where in COMMANDS, f"{path} imports {name}"


def test_kernels_is_no_package_and_linked_into_ours() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (PACKAGE / "kernels").is_symlink()
    assert os.readlink(PACKAGE / "kernels") == "../kernels"


def modules_after(*imported: str) -> set[str]:
    """What a fresh interpreter has loaded after these imports."""
    program = f"import {', '.join(imported)}, sys\nprint(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(ran.stdout.split())


def test_kernels_load_neither_vllm_nor_transformers() -> None:
    kernels = {f"agentgrpo.kernels.{path.stem}" for path in python_files("kernels")}
    loaded = modules_after(*kernels)
    assert kernels <= loaded
    assert not loaded & {"vllm", "transformers", "agentgrpo.engine", "agentgrpo.types"}


def test_what_runs_before_the_model_loads_no_torch() -> None:
    early = ("agentgrpo", "agentgrpo.sandbox", "agentgrpo.envs.python")
    loaded = modules_after(*early, "agentgrpo.train", "agentgrpo.build")
    assert not loaded & {"torch", "vllm", "transformers", "triton"}


def test_transformers_can_be_imported_from_the_repository() -> None:
    assert "transformers" in modules_after("transformers")

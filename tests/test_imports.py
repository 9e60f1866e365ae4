"""Who may import whom: the direction that keeps agents, environments and kernels usable alone."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from agentgrpo.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "agentgrpo"


def python_files(*folders: str) -> list[Path]:
    return [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]


def parsed(path: Path) -> ast.Module:
    """A file, the relative imports of kernels/ written out; others would hide where they go."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert path.parent.name == "kernels", f"{path}: a relative import"
            assert node.level == 1, f"{path} leaves its folder"
            node.module = ".".join(filter(None, ["agentgrpo.kernels", node.module]))
    return tree


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever it does."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


WINGS = {
    "types": "",
    "files": "",
    "extras": "",
    "cli": "extras",
    "parallel": "",
    "usercode": "",
    "sandbox": "usercode",
    "kernels": "",
    "config": "types files usercode kernels",
    "actions": "types usercode",
    "run": "types files extras usercode config parallel",
    "proof": "types config",
    "machine": "types files extras config parallel run sandbox kernels",
    "rewards": "types files extras usercode config",
    "agents": "types config actions",
    "envs": "types files extras usercode config actions run sandbox",
    "models": "types files extras config",
    "engine": "types files extras usercode config actions parallel machine models kernels",
    "rollout": "types usercode config actions parallel agents envs models engine",
    "programs": "types usercode config actions agents envs models rollout sandbox",
    "learn": "types extras config parallel run machine kernels models engine",
    "measures": "types actions rewards engine",
    "audit": "types engine proof",
    "data": "types files extras usercode config run envs programs",
    "view": "types files config run models",
    "diagnosis": "types files config run rewards measures view sandbox",
}
"""Wing: the wings that it may import, besides itself. What is not named may import all above it."""
TOP = [
    *(
        "setup",
        "push",
        "evaluate",
        "collect",
        "loop",
        "trainer",
        "again",
        "verify",
        "train",
    ),
    *("recipe", "examples", "init", "testing", "__main__"),
]
"""Assembly and commands, each of which may import the wings and what stands before it."""
ALLOWED = {wing: {wing, "cli", *may.split()} for wing, may in WINGS.items()}
ALLOWED |= {module: {*WINGS, *TOP[: TOP.index(module) + 1], "__version__"} for module in TOP}
OURS = [p for p in python_files("agentgrpo") if "kernels" not in p.parts]


def wing_of(name: str) -> str:
    """The wing of an imported name: the second part, "" for agentgrpo's compiled half."""
    part = [*name.split("."), ""][1]
    return "" if part == "_C" else part


def test_a_wing_imports_what_its_row_says() -> None:
    for path in OURS:
        wing = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in imports(path) if wing != "__init__" else ():
            if is_within(name, "agentgrpo") and wing_of(name):
                assert wing_of(name) in ALLOWED[wing], f"{path} imports {name}"


def test_every_wing_has_its_row() -> None:
    there = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in OURS}
    assert there - {"__init__"} == {*WINGS, *TOP} - {"kernels"}


def test_the_rows_hold_no_circle() -> None:
    """A wing comes after all that it may import."""
    seen: set[str] = set()
    for wing, may in WINGS.items():
        assert set(may.split()) <= seen, wing
        seen.add(wing)


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
LOADS_MODELS = ("learn/policy.py", "machine/footprint.py", "models/encoder.py", "models/gguf.py")


def test_each_dependency_has_its_place() -> None:
    """Agents and environments know nothing of models; vLLM is the engine's."""
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
    assert not loaded & {"vllm", "transformers", "agentgrpo.engine.engine", "agentgrpo.types"}


def test_what_runs_before_the_model_loads_no_torch() -> None:
    """A command sets the environment first, then imports torch."""
    commands = [module for module, _ in COMMANDS.values()]
    loaded = modules_after("agentgrpo.sandbox", "agentgrpo.envs.python", *commands)
    assert not loaded & {"torch", "vllm", "transformers", "triton"}


def test_transformers_can_be_imported_from_the_repository() -> None:
    assert "transformers" in modules_after("transformers")

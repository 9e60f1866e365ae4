"""The two package sets: the GPU set is the one tested on GPUs, the CPU set is complete."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from agentgrpo.support.packages import GPU_TESTED

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "intel-openmp", "llm", "llama-cpp-python"}
"""Required by a package of the CPU set, and not needed."""
BENCH_ONLY = {"trl", "datasets", "multiprocess", "liger-kernel", "distro"}
"""Carried to the cards for a comparison, not for training."""


def pins(name: str) -> dict[str, str]:
    """Package: version of a requirements file, whose every line must be pinned."""
    actual = {}
    for line in (ROOT / name).read_text().splitlines():
        if not line.startswith("#"):
            package, version = re.fullmatch(r"([\w.-]+)={2,3}([\w.+]+)", line).groups()  # type: ignore[union-attr]
            actual[normal(package)] = version
    return actual


def normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def test_gpu_set_is_what_ran_on_gpus() -> None:
    gpu = pins("requirements-gpu.txt")
    ran = pins("bench/gpu/wheels.txt") | GPU_TESTED
    assert {name: gpu.get(name) for name in ran if name not in BENCH_ONLY} == {
        name: version for name, version in ran.items() if name not in BENCH_ONLY
    }
    assert gpu["torchvision"] == "0.26.0", "of torch 2.11.0"
    assert "flashinfer-python" not in gpu, "neither card had it"


def test_cpu_set_contains_its_requirements() -> None:
    """On every supported Python: pip is called with --no-deps."""
    cpu, lacking = pins("requirements-cpu.txt"), set()
    assert not LEFT_OUT & {*cpu}
    for package in cpu.keys() - {"torch"}:  # install.py lets pip resolve a CUDA build's libraries
        for needed in map(Requirement, metadata.requires(package) or []):
            pythons = [{"extra": "", "python_version": f"3.{minor}"} for minor in (11, 12, 13)]
            if needed.marker and not any(map(needed.marker.evaluate, pythons)):
                continue
            if (name := normal(needed.name)) in LEFT_OUT:
                continue
            versions = (cpu.get(name), f"{cpu.get(name)}+cpu")
            if name not in cpu or not any(
                needed.specifier.contains(v, True) for v in versions if v
            ):
                lacking.add(f"{package}: {needed}")
    assert not lacking

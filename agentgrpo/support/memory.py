"""How much memory this process holds, and what to say when it runs out.

Importing this loads no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from agentgrpo.support.hardware import kib_of
from agentgrpo.types import Metrics

PACKAGE = Path(__file__).parent.parent
_SAID = (
    "can't allocate memory",
    "could not create a primitive",
    "error: out of memory",
    "cublas_status_alloc_failed",
)
"""What plain RuntimeErrors say of it: torch's and oneDNN's on the host; the CUDA driver's, through
vLLM's sleeping allocator ("CUDA Error: out of memory at ...") and torch; cuBLAS's workspace."""


class OutOfMemory(ValueError):
    """Memory ran out; the message says while doing what, and what to set lower."""


@contextlib.contextmanager
def explained(doing: str, remedy: Callable[[], str]) -> Iterator[None]:
    """Turn an error that says that memory ran out into one that says what to do about it.

    `remedy` is called when what had been allocated inside is released.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold what they had allocated
        release()
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise OutOfMemory(f"out of memory while {doing}: {remedy()} ({said})") from None


def memory(device: str) -> Metrics:
    """Memory in use, in GiB: `rss_gib` of this process; on CUDA also `cuda_gib` of the device.

    `cuda_gib` is what the driver counts, over all processes: vLLM's pool is not torch's.
    """
    used = {"rss_gib": rss_bytes() / 2**30}
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        used["cuda_gib"] = (total - free) / 2**30
    return used


def rss_bytes() -> int:
    """Resident memory of this process, in bytes, shared pages included."""
    return kib_of("/proc/self/status")["VmRSS"] * 1024


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the host."""
    if isinstance(error, OutOfMemory | MemoryError):  # Python's, numpy's, C++'s std::bad_alloc
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in said for words in _SAID)


def release_frames(error: BaseException) -> None:
    """Drop what our functions held when they raised: a notebook keeps an error's frames.

    Those of other code are left as they are, for a debugger.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            with contextlib.suppress(RuntimeError):  # it still runs
                frame.clear()


def release() -> None:
    """Give what nobody refers to back to the device."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim()


def trim() -> None:
    """Give what glibc keeps of freed blocks back to the machine: its arenas' holes only grow."""
    ctypes.CDLL(None).malloc_trim(0)

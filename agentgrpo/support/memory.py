"""Memory of this process, and errors with a remedy when it runs out.

Importing this module does not import torch.
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
_MESSAGES = (
    "can't allocate memory",
    "could not create a primitive",
    "error: out of memory",
    "cublas_status_alloc_failed",
)
"""Texts of plain RuntimeErrors: torch's and oneDNN's on the host; the CUDA driver's, through vLLM's
sleeping allocator ("CUDA Error: out of memory at ...") and torch; cuBLAS's workspace."""


class OutOfMemory(ValueError):
    """Memory ran out; the message names the activity and the settings to lower."""


@contextlib.contextmanager
def explain_out_of_memory(doing: str, remedy: Callable[[], str]) -> Iterator[None]:
    """Convert out-of-memory errors in the context to OutOfMemory with a remedy.

    `remedy` is called after the memory allocated within the context has been released.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # frames keep their allocations alive
        release()
        message = (str(error) or type(error).__name__).splitlines()[0]
        raise OutOfMemory(f"out of memory while {doing}: {remedy()} ({message})") from None


def memory(device: str) -> Metrics:
    """Memory in use in GiB: `rss_gib` of this process; on CUDA also `cuda_gib` of the device.

    `cuda_gib` is the driver's count over all processes, because vLLM's pool is not torch's.
    """
    used = {"rss_gib": rss_bytes() / 2**30}
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        used["cuda_gib"] = (total - free) / 2**30
    return used


def rss_bytes() -> int:
    """Resident memory of this process in bytes, including shared pages."""
    return kib_of("/proc/self/status")["VmRSS"] * 1024


def out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out, on a GPU or on the host."""
    if isinstance(error, OutOfMemory | MemoryError):  # Python's, numpy's, C++'s std::bad_alloc
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in message for words in _MESSAGES)


def release_frames(error: BaseException) -> None:
    """Clear agentgrpo's frames of an error, because a notebook keeps them and their allocations.

    Frames of other code stay, for a debugger.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            with contextlib.suppress(RuntimeError):  # the frame is still executing
                frame.clear()


def release() -> None:
    """Return unreferenced memory to the device and to the system."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim()


def trim() -> None:
    """Return freed memory from glibc's arenas to the system; it would never shrink otherwise."""
    ctypes.CDLL(None).malloc_trim(0)

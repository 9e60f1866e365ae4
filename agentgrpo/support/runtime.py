"""Environment variables to set before importing torch and vLLM, each with its reason."""

from __future__ import annotations

import gc
import logging
import os
import stat
import sys
import tempfile
import warnings

from agentgrpo.support import hardware, parallel

ENVIRONMENT = {
    # otherwise vLLM starts its engine in a second process, where the weights cannot be shared
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # libgomp's spinning threads make decoding ten times slower as soon as anything else runs
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # on CUDA vLLM would import FlashInfer, which not all machines have, for a sampler that does not
    # support requests for log-probabilities, as all of ours are
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

TOO_LATE = (
    "torch was imported before agentgrpo: its threads spin while they wait, which makes a run on "
    "a CPU up to ten times slower if the machine is busy. Restart Python, and write `from "
    "agentgrpo import Trainer` above `import torch`; or start Python with OMP_WAIT_POLICY=PASSIVE"
)

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Either one configures torch's allocator; vLLM reads the second."""
ONE_GPU = "expandable_segments:True"
"""Fixed-size blocks of one step are too small for the batches of the next, and vLLM's CUDA graphs,
whose memory nothing else may use, leave no room for both. vLLM turns it off around its sleeping
pool (from 0.21 on; never run by us). Not with several GPUs: vLLM and NCCL share memory with other
processes, which such segments do not support."""


def prepare_environment() -> None:
    """Set the variables above unless the user has, and silence vLLM. Call before importing torch.

    Variables that torch reads on import affect only the speed on a CPU: if torch is already
    imported, this warns.
    """
    if not os.access(
        os.path.expanduser("~"), os.W_OK
    ):  # such as a container's user without a passwd entry
        os.environ["HOME"] = _home_elsewhere()
    torch_imported = "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ
    gpu = hardware.has_nvidia_gpu()
    if torch_imported and not gpu:
        warnings.warn(TOO_LATE, RuntimeWarning, stacklevel=2)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not gpu:  # otherwise a CUDA build of torch offers a GPU that vLLM for CPUs cannot use
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    single_gpu = parallel.world_size() == 1 and gpu
    if single_gpu and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[1]] = ONE_GPU
    # torch and vLLM create a million permanent objects; traversing them every 700 allocations
    # (Python's default) takes a tenth of the time to the first token
    gc.set_threshold(50_000)
    # silences vLLM's messages about its imports, before it configures its logging
    logging.getLogger("vllm.triton_utils").setLevel(logging.ERROR)
    if not gpu:  # a CUDA build of torch next to a CUDA toolkit warns
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def _home_elsewhere() -> str:
    """A private folder for the caches of all libraries if the home directory is not writable."""
    folder = os.path.join(tempfile.gettempdir(), f"agentgrpo-home-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ValueError(
            f"HOME: {folder} is not private to this user; set HOME to a folder that is"
        )
    return folder

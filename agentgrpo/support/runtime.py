"""What must be set before torch and vLLM are imported, each with its reason."""

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
    # vLLM would start its engine in a second process, and hide the weights that we share with it
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # libgomp's spinning threads make decoding ten times slower as soon as anything else runs
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # on CUDA vLLM would import FlashInfer, not all machines have it, for a sampler that serves no
    # request whose log-probabilities come back, as ours all do
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

TOO_LATE = (
    "torch was imported before agentgrpo: its threads spin while they wait, which makes a run on "
    "a CPU up to ten times slower beside other work. Restart Python, and write `from agentgrpo "
    "import Trainer` above `import torch`; or start Python with OMP_WAIT_POLICY=PASSIVE"
)

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Either configures torch's allocator; vLLM looks at the second."""
ONE_CARD = "expandable_segments:True"
"""Blocks of fixed size that a step leaves are too small for the next one's, whose batches are
others; and beside vLLM's CUDA graphs, whose memory nobody else may use, there is no room for both.
vLLM turns it off around the pool that sleeps (0.21 on; never run by us). On several cards not: vLLM
and NCCL hand memory to other processes, which such segments cannot be."""


def prepare_environment() -> None:
    """Set the variables above where the user has not, and quieten vLLM. Call before torch.

    What torch reads when it is imported changes speed on a CPU alone: too late is a warning.
    """
    if not os.access(os.path.expanduser("~"), os.W_OK):  # a container's user without a name
        os.environ["HOME"] = _home_elsewhere()
    late = "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ
    gpu = hardware.has_nvidia_gpu()
    if late and not gpu:
        warnings.warn(TOO_LATE, RuntimeWarning, stacklevel=2)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not gpu:  # or a CUDA build of torch would offer a card that vLLM for CPUs cannot use
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    alone = parallel.world_size() == 1 and gpu
    if alone and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[1]] = ONE_CARD
    # importing torch and vLLM makes a million objects that stay; a look at all of them every 700
    # (Python's default) is a tenth of the time to the first token
    gc.set_threshold(50_000)
    # what vLLM says about its own imports, before it has set its logging up
    logging.getLogger("vllm.triton_utils").setLevel(logging.ERROR)
    if not gpu:  # a CUDA build of torch beside a CUDA toolkit says so
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def _home_elsewhere() -> str:
    """A folder of this user's for the caches of all libraries, where the home cannot be written."""
    folder = os.path.join(tempfile.gettempdir(), f"agentgrpo-home-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ValueError(f"HOME: {folder} is not this user's alone; set HOME to one that is")
    return folder

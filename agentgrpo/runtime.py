"""What must be in the environment before torch and vLLM are imported, each with its reason."""

from __future__ import annotations

import os
import sys

ENVIRONMENT = {
    # vLLM would start its engine in a second process, and hide the weights that we share with it
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # libgomp's spinning threads make decoding ten times slower as soon as anything else runs
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_environment() -> None:
    """Set the variables above where the user has not. Call before torch is imported.

    Raises:
        RuntimeError: torch is loaded already and OMP_WAIT_POLICY is unset: too late to matter.
    """
    if "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        raise RuntimeError("prepare_environment() must run before torch is imported")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)

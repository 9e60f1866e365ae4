"""agentgrpo: train LLM agents with GRPO in one process. Imports are lazy."""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentgrpo.train.callbacks import Callback
    from agentgrpo.train.trainer import Trainer

__all__ = ["Callback", "Trainer", "__version__"]


def __getattr__(name: str) -> object:
    """Import Trainer and Callback on first access: `agentgrpo.kernels` needs neither."""
    if name not in __all__:
        raise AttributeError(f"module 'agentgrpo' has no attribute {name!r}")
    from agentgrpo.support.runtime import prepare_environment

    prepare_environment()  # before the imports below, which import torch
    from agentgrpo.train.callbacks import Callback
    from agentgrpo.train.trainer import Trainer

    return {"Trainer": Trainer, "Callback": Callback}[name]

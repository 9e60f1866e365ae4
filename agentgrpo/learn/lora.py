"""LoRA adapters (peft), which are trained, saved and published instead of the weights.

The base model never changes and shares its tensors with the sampler, which receives the adapter
alone, in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentgrpo.config import LoraConfig
from agentgrpo.models.models import ADAPTER_TENSORS
from agentgrpo.support import parallel
from agentgrpo.support.optional_deps import import_optional


class Adapter:
    """A LoRA adapter injected into a transformers model, whose own parameters are frozen.

    `saved`: a folder that save() wrote; None: a new adapter with B = 0, which changes nothing.
    ValueError: peft is missing, no layer has one of the names, or only the head has.
    """

    def __init__(self, model: Any, config: LoraConfig, saved: Path | None = None) -> None:
        peft = import_optional("peft", "learner.lora.rank")
        require_layers(model, config.target_modules)
        model.requires_grad_(False)
        if saved is not None:
            self._peft: Any = peft.PeftModel.from_pretrained(model, saved, is_trainable=True)
        else:
            targets: Any = list(config.target_modules) or "all-linear"
            alpha: Any = config.alpha  # peft declares an int, but a float works
            options = peft.LoraConfig(
                r=config.rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM"
            )
            try:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)  # the random A must be equal on all ranks
                    self._peft = peft.get_peft_model(model, options)
            except ValueError as error:
                raise ValueError(f"learner.lora.target_modules: {error}") from error

    @property
    def parameters(self) -> list[Tensor]:
        return [p for p in self._peft.parameters() if p.requires_grad]

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = self._peft.peft_config["default"].to_dict()
        return config

    def tensors(self) -> dict[str, Tensor]:
        """Clones of the tensors by peft's names (`base_model.model.<layer>.lora_A.weight`)."""
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        return {name: parallel.full_tensor(tensor).clone() for name, tensor in state.items()}

    def save(self, folder: Path) -> None:
        """Write the adapter alone, as peft does; on several ranks all must call it."""
        from safetensors.torch import save_file

        tensors = {name: t.cpu().contiguous() for name, t in self.tensors().items()}
        if parallel.rank() == 0:
            self._peft.peft_config["default"].save_pretrained(folder)
            save_file(tensors, folder / ADAPTER_TENSORS, metadata={"format": "pt"})


def require_layers(model: Any, targets: Sequence[str]) -> None:
    """Raise ValueError unless each of `targets` names linear layers below the head.

    peft itself ignores a name that matches nothing. linear_logp reads the head's weight alone, so
    an adapter of the head would have no effect.
    """
    head = model.get_output_embeddings()
    linear = {
        f".{name}": module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    for target in targets:
        layers = [module for name, module in linear.items() if name.endswith(f".{target}")]
        if not layers or head in layers:
            why = "the head cannot have an adapter" if layers else "no linear layer has this name"
            names = sorted({name.rpartition(".")[2] for name in linear if linear[name] != head})
            raise ValueError(
                f"learner.lora.target_modules: {why}: {target!r}; linear layers of this model: "
                f"{', '.join(names)}"
            )

"""Low-rank adapters (peft): what is trained, saved and published instead of the weights.

The base model never changes and is one replica with the sampler's, which is handed the adapter
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

    `saved`: a folder that save() wrote, to go on from; None: B = 0, the model as it was. ValueError
    where peft is missing, or no layer has such a name or only the head has.
    """

    def __init__(self, model: Any, config: LoraConfig, saved: Path | None = None) -> None:
        peft = import_optional("peft", "learner.lora.rank")
        require_layers(model, config.target_modules)
        model.requires_grad_(False)
        if saved is not None:
            self._peft: Any = peft.PeftModel.from_pretrained(model, saved, is_trainable=True)
        else:
            wanted: Any = list(config.target_modules) or "all-linear"
            alpha: Any = config.alpha  # a float is as good as the int that peft declares
            options = peft.LoraConfig(
                r=config.rank, lora_alpha=alpha, target_modules=wanted, task_type="CAUSAL_LM"
            )
            try:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)  # A is random: the same on every rank, of any number
                    self._peft = peft.get_peft_model(model, options)
            except ValueError as error:
                raise ValueError(f"learner.lora.target_modules: {error}") from error

    @property
    def parameters(self) -> list[Tensor]:
        return [p for p in self._peft.parameters() if p.requires_grad]

    @property
    def config(self) -> dict[str, Any]:
        described: dict[str, Any] = self._peft.peft_config["default"].to_dict()
        return described

    def tensors(self) -> dict[str, Tensor]:
        """The adapter under peft's names (`base_model.model.<layer>.lora_A.weight`), cloned."""
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        return {name: parallel.whole(tensor).clone() for name, tensor in state.items()}

    def save(self, folder: Path) -> None:
        """Write the adapter, and nothing else, as peft does; on several ranks, all must call it."""
        from safetensors.torch import save_file

        tensors = {name: t.cpu().contiguous() for name, t in self.tensors().items()}
        if parallel.rank() == 0:
            self._peft.peft_config["default"].save_pretrained(folder)
            save_file(tensors, folder / ADAPTER_TENSORS, metadata={"format": "pt"})


def require_layers(model: Any, targets: Sequence[str]) -> None:
    """Each of `targets` names linear layers below the head; peft passes over one that names none.

    The head is read by its weight alone (linear_logp): an adapter of its own would not be seen.
    """
    head = model.get_output_embeddings()
    linear = {
        f".{name}": module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    for target in targets:
        found = [module for name, module in linear.items() if name.endswith(f".{target}")]
        if not found or head in found:
            what = "the head cannot have an adapter" if found else "no linear layer has this name"
            names = sorted({name.rpartition(".")[2] for name in linear if linear[name] != head})
            said = f"{what}: {target!r}; linear layers of this model: {', '.join(names)}"
            raise ValueError(f"learner.lora.target_modules: {said}")

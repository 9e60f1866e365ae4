"""The policy as a transformers model: where its weights lie, what of it is trained, how a packed
batch goes through it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from agentgrpo.engine.weights import CannotShare, install, parameters_on_meta, views_for
from agentgrpo.kernels.linear_logp import linear_logp
from agentgrpo.learn.attention import TREE, Tree, why_rows
from agentgrpo.types import Int32, PackedBatch


class WeightOwner(Protocol):
    """The part of the engine that a policy is made from."""

    device: Any
    dtype: Any

    @property
    def model(self) -> nn.Module: ...


class Scored(NamedTuple):
    """Nats, fp32 (fp64 for fp64 models), one per term."""

    logp_N: Tensor
    entropy_N: Tensor


class Scorer(nn.Module):
    """A causal language model that scores the terms of packed batches, and nothing else.

    One module from token ids to log-probabilities, so that FSDP gathers and shards the head with
    the rest. Models that cannot share prefixes see every rollout as a padded row of its own;
    `rows` says why (None: they can).
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.rows = why_rows(model)
        if self.rows is None:
            model.set_attn_implementation(TREE)
        config = model.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Granite divides its logits, Cohere multiplies them
        self._tempering = (getattr(config, "logits_scaling", None) or 1.0) / (
            getattr(config, "logit_scale", None) or 1.0
        )

    def forward(self, batch: PackedBatch, temperature: float) -> Scored:
        """Log-probability and entropy of each term under the tempered distribution."""
        device = self.device
        hidden = self._hidden(batch)
        head = self.model.get_output_embeddings()
        return Scored(
            *linear_logp(
                hidden,
                head.weight,
                torch.from_numpy(batch.row_N).to(device, torch.int64),
                torch.from_numpy(batch.target_N).to(device, torch.int64),
                bias_V=getattr(head, "bias", None),
                temperature=temperature * self._tempering,
                softcap=self._softcap,
            )
        )

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def _hidden(self, batch: PackedBatch) -> Tensor:
        """[T, H] after the final norm."""
        ids = torch.from_numpy(batch.input_ids_T).to(self.device, torch.int64)
        if self.rows is not None:
            return self._hidden_by_row(ids, batch.tout_T)
        tree = Tree(batch.tout_T, batch.positions_T, self.device)
        hidden: Tensor = self.model.get_decoder()(
            input_ids=ids[None],
            position_ids=torch.from_numpy(batch.positions_T).to(self.device, torch.int64)[None],
            use_cache=False,
            tree=tree,
        ).last_hidden_state[0]
        return hidden

    def _hidden_by_row(self, ids: Tensor, tout_T: Int32) -> Tensor:
        """Right-padded rows: padding comes after the tokens, so that even a state cannot see it."""
        starts = np.flatnonzero(np.diff(tout_T, prepend=-1))
        lengths = torch.from_numpy(np.diff(starts, append=len(tout_T)))
        if (tout_T[starts] != [*starts[1:], len(tout_T)]).any():
            raise ValueError("prefixes are shared, but the model cannot: pack unshared rows")
        inside = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
        inside = inside.to(ids.device)
        padded = ids.new_zeros(inside.shape).masked_scatter(inside, ids)
        hidden: Tensor = self.model.get_decoder()(
            input_ids=padded, attention_mask=inside.long(), use_cache=False
        ).last_hidden_state
        return hidden[inside]


def make_policy(model: str | Path, engine: WeightOwner, weights: str) -> tuple[str, Any]:
    """The transformers model, on the engine's own tensors where the two can share them.

    Args:
        model: Hugging Face directory or name.
        engine: whose tensors, dtype and device.
        weights: "auto", "shared" or "copy"; see EngineConfig.

    Returns:
        ("shared" or "copy (why)", the model).

    Raises:
        ValueError: weights="shared" where it is impossible.
    """
    options = {"dtype": getattr(torch, engine.dtype)}
    if weights == "copy":
        return "copy", load_frozen(model, engine).requires_grad_(True)
    with parameters_on_meta():
        policy: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), **options)
    try:
        install(policy, views_for(engine.model, policy))
    except CannotShare as error:
        if weights == "shared":
            raise ValueError(f"engine.weights = 'shared' is impossible here: {error}") from error
        return f"copy ({error})", load_frozen(model, engine).requires_grad_(True)
    return "shared", policy.to(engine.device).eval()


def load_frozen(model: str | Path, engine: WeightOwner) -> Any:
    """The model in tensors of its own, of the engine's device and dtype, without gradients."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, engine.dtype))
    return loaded.to(engine.device).eval().requires_grad_(False)


def freeze_all_but(model: Any, trained_layers: int | None) -> list[Tensor]:
    """Require gradients of the last layers only (None: of everything); returns those parameters.

    Raises:
        ValueError: the model has fewer layers.
    """
    if trained_layers is None:
        trained = list(model.parameters())
    else:
        layers = model.get_decoder().layers
        if trained_layers > len(layers):
            raise ValueError(
                f"learner.trained_layers must be at most {len(layers)}, got {trained_layers}"
            )
        trained = [p for layer in layers[-trained_layers:] for p in layer.parameters()]
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    return trained


def checkpoint_layers(model: Any) -> None:
    """Keep only the layers' inputs for the backward pass and compute the rest again."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # the layer only asks itself; dropout, in its parts, stays off

"""The policy as a transformers model: trained parameters, forward on packed batches, saving."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from agentgrpo.config import LearnerConfig
from agentgrpo.engine.weights import parameters_on_meta, saved_buffers
from agentgrpo.kernels.linear_logp import linear_logp
from agentgrpo.kernels.products import multiply_by_onednn
from agentgrpo.learn import recurrent
from agentgrpo.learn.attention import TREE, Tree
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.flex import pad_to_blocks
from agentgrpo.learn.forward_check import ForwardCheck, decoder_of, layers_of, why_not_packed
from agentgrpo.learn.lora import Adapter
from agentgrpo.models.liger import fuse_layers, why_not_fused
from agentgrpo.models.multimodal_text import NAMES, TEXT_PARTS, MultimodalCheckpoint, language_model
from agentgrpo.support import parallel
from agentgrpo.types import Int32

CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config keys of the logit soft cap."""
SCALES = {
    "logits_scaling": True, "logits_mup_width_multiplier": True, "logit_scale": False,
    "lm_head_multiplier": False,
}  # fmt: skip
"""Config keys of a logit scale: True if logits are divided by it, False if multiplied.

forward_check.py compares the result with the model's own forward pass.
"""
TOPK_CHUNK_ROWS = 512
"""Rows whose full logits are in memory at once."""
MIN_LENGTH_RATIO = 3 / 4
"""Shortest to longest row of a padded pass: padding adds at most a third."""


class PolicyOutput(NamedTuple):
    """Log-probabilities and entropies in nats, fp32 (fp64 for fp64 models), one per term."""

    logp_N: Tensor
    entropy_N: Tensor
    candidate_logp_NK: Tensor
    """Log-probabilities of other tokens at the term's position."""
    candidate_ids_NK: Tensor
    """int64."""


class Scorer(nn.Module):
    """A causal language model that returns the log-probabilities of a packed batch's terms.

    One module from token ids to log-probabilities, so that FSDP gathers and shards the head with
    the rest. Models that cannot share prefixes process every rollout as a padded row;
    `unpacked_reason` is the reason (None: they can). `exact`: logits are not rounded to the
    weights' 16 bits. `sharded`: the weights are distributed over all ranks.

    On several ranks all must construct one, before the model is sharded.
    """

    sharded = False

    def __init__(self, model: Any, *, exact: bool = False) -> None:
        super().__init__()
        self.exact = exact
        check = ForwardCheck(model)  # before attention is replaced below
        self.model = model
        config = model.config.get_text_config()
        caps = (getattr(config, name, None) for name in CAPS)
        self._softcap: float | None = next(filter(None, caps), None)
        self._logit_divisor = 1.0
        for name, divides in SCALES.items():
            scale = getattr(config, name, None) or 1.0
            # HyperCLOVA X uses Granite's key but multiplies
            divides = divides and config.model_type != "hyperclovax"
            self._logit_divisor *= scale if divides else 1 / scale
        kinds = {"full_attention", *(getattr(config, "layer_types", None) or ())}
        self._kinds = kinds if kinds & recurrent.LAYER_TYPES else set()
        """Layer types of a hybrid model, whose recurrent layers take the tree as their mask."""
        self.unpacked_reason = why_not_packed(model)
        if self.unpacked_reason is None:
            model.set_attn_implementation(TREE)
            for layer in layers_of(model) if self._kinds else ():
                for mixer in recurrent.mixers_in(layer):
                    recurrent.take_trees(mixer)
            self.unpacked_reason = check.failure(self)
            if self.unpacked_reason is not None:
                check.restore_attention(model)
        if self.unpacked_reason is not None and (reason := check.failure(self)):
            raise ValueError(
                f"a model of type {config.model_type!r} cannot be trained, since here {reason}"
            )

    def forward(
        self, batch: PackedBatch, temperature: float, candidates: Tensor | int = 0
    ) -> PolicyOutput:
        """Log-probability and entropy of each term at the given temperature.

        `candidates`: int64 [N, K], further tokens to score at each term's position; or K, to score
        the K likeliest tokens there.
        """
        head = self.model.get_output_embeddings()
        # checked here because CUDA embedding lookups do not check ids
        if batch.deltas.largest >= head.weight.shape[0]:
            raise ValueError(
                f"token id {batch.deltas.largest}: the model has {head.weight.shape[0]}"
            )
        hidden = self._hidden(batch)
        terms = batch.terms(self.device)
        row_N, target_N1 = terms.row_N, terms.target_N[:, None]
        if isinstance(candidates, int):  # soft cap and temperature are monotonic: plain logits do
            chunks = row_N.split(TOPK_CHUNK_ROWS) if candidates else ()
            topk = [head(hidden[rows]).topk(candidates).indices for rows in chunks]
            candidates = torch.cat(topk) if topk else target_N1[:, :0]
        per_term = 1 + candidates.shape[1]  # targets of the same row, which is projected once
        logp_N, entropy_N = linear_logp(
            hidden,
            head.weight,
            row_N.repeat_interleave(per_term),
            torch.cat([target_N1, candidates], 1).flatten(),
            uses_U=torch.from_numpy(batch.uses_U) * per_term,
            bias_V=getattr(head, "bias", None),
            temperature=temperature * self._logit_divisor,
            softcap=self._softcap,
            logits_dtype=torch.promote_types(hidden.dtype, torch.float32) if self.exact else None,
        )
        logp_NK, entropy_NK = logp_N.view(-1, per_term), entropy_N.view(-1, per_term)
        return PolicyOutput(logp_NK[:, 0], entropy_NK[:, 0], logp_NK[:, 1:], candidates)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def _hidden(self, batch: PackedBatch) -> Tensor:
        """[T, H] after the final norm; on CUDA with extra padding rows for a tree."""
        if self.unpacked_reason is None and self.device.type == "cuda":
            batch = pad_to_blocks(batch)
        tokens = batch.tokens(self.device)
        if self.unpacked_reason is not None:
            return self._hidden_by_row(tokens.input_ids_T, batch.tout_T)
        tree = Tree(batch, self.device)
        masks = {kind: tree if kind in recurrent.LAYER_TYPES else None for kind in self._kinds}
        decoded: Tensor = self._decoded(
            input_ids=tokens.input_ids_T[None],
            attention_mask=masks or None,
            position_ids=tokens.positions_T[None],
            tree=tree,
        )
        return decoded[0]

    def _decoded(self, **inputs: Any) -> Any:
        return decoder_of(self.model)(use_cache=False, **inputs).last_hidden_state

    def _hidden_by_row(self, ids: Tensor, tout_T: Int32) -> Tensor:
        """Process right-padded rows. Padding follows the tokens, so recurrent states do not see it
        either.

        Rows of similar length share a pass: padding all rows to the longest could outgrow the
        tokens.
        """
        starts = np.flatnonzero(np.diff(tout_T, prepend=-1))
        lengths = np.diff(starts, append=len(tout_T))
        if (tout_T[starts] != [*starts[1:], len(tout_T)]).any():
            raise ValueError("share_prefixes: expected False for this model, got a tree")
        parts, passes = ids.split(lengths.tolist()), _passes(lengths)
        # all ranks gather sharded weights together, so all need the same number of passes: this
        # rank repeats its last row, whose output is not used
        extra = int(parallel.largest(len(passes))) - len(passes) if self.sharded else 0
        outs, masks = [], []
        for rows in passes + extra * [passes[-1][-1:]]:
            padded = nn.utils.rnn.pad_sequence([parts[row] for row in rows], batch_first=True)
            sizes = torch.from_numpy(lengths[rows]).to(ids.device)
            masks.append(torch.arange(padded.shape[1], device=ids.device) < sizes[:, None])
            outs.append(self._decoded(input_ids=padded, attention_mask=masks[-1].long()))
        hidden = torch.cat([out[mask] for out, mask in zip(outs, masks, strict=True)])
        order = [np.arange(lengths[row]) + starts[row] for rows in passes for row in rows]
        places = torch.from_numpy(np.argsort(np.concatenate(order))).to(ids.device)
        return hidden.index_select(0, places)


def _passes(lengths: NDArray[np.int64]) -> list[list[int]]:
    """Group rows into passes by descending length, within MIN_LENGTH_RATIO of the longest."""
    passes: list[list[int]] = []
    for row in np.argsort(-lengths, kind="stable").tolist():
        if not passes or lengths[row] < MIN_LENGTH_RATIO * lengths[passes[-1][0]]:
            passes.append([])
        passes[-1].append(row)
    return passes


class Policy:
    """The trained model: all of a transformers model, its last layers, or a LoRA adapter.

    All other parameters are frozen, attention is replaced, the adapter is injected (`adapter`: a
    checkpoint's folder to load it from), and on several ranks the model is sharded. `weights`:
    where its parameters are stored, for the record. ValueError: more trained_layers than the model
    has, or as in Adapter and Scorer.
    """

    def __init__(
        self, model: Any, config: LearnerConfig, *, weights: str, adapter: Path | None = None
    ) -> None:
        self.model, self.weights = model, weights
        self._checkpoint = multimodal_checkpoint_of(model)
        self.device: str = model.device.type
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.adapter = Adapter(model, config.lora, adapter) if config.lora.rank else None
        self.trained = (
            self.adapter.parameters
            if self.adapter is not None
            else freeze_all_but(model, config.trained_layers)
        )
        self._num_trained = sum(p.numel() for p in self.trained)
        reason = why_not_fused(config.use_liger_kernel, model.config, self.device)
        self._layers = f"plain ({reason})" if reason else fuse_layers(model)
        self._products = multiply_by_onednn(model) if self.device == "cpu" else "PyTorch's"
        setting, several = config.gradient_checkpointing, parallel.world_size() > 1
        self.checkpointed = False
        # "auto" is decided by the preflight, which cannot try on several ranks: others would wait
        if setting is True or (setting == "auto" and several and self.device == "cuda"):
            self.checkpoint_layers()
        self.scorer = Scorer(model, exact=config.cast_lm_head_to_fp32)
        if several:
            parallel.shard(self.scorer, layers_of(model))
            self.scorer.sharded = True
            # sharding replaced every parameter by this rank's part of it
            self.trained = [p for p in model.parameters() if p.requires_grad]

    def checkpoint_layers(self) -> None:
        self.checkpointed = True
        checkpoint_layers(self.model)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    def describe(self) -> dict[str, Any]:
        reason = self.scorer.unpacked_reason
        return {
            "weights": self.weights,
            "device": self.device,
            "dtype": self.dtype,
            "layers": self._layers,
            "products": self._products,
            "gradient_checkpointing": self.checkpointed,
            "prefixes": "shared" if reason is None else f"not shared ({reason})",
            "trained_parameters": self._num_trained,
            "all_parameters": sum(p.numel() for p in self.model.parameters()),
        }

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor), gathered one at a time."""
        return ((name, parallel.full_tensor(p)) for name, p in self.model.named_parameters())

    def save(self, folder: Path) -> None:
        """Write a Hugging Face model directory, or a peft adapter, without the files that
        ChatTemplate.save() writes.

        On several ranks all must call it; the first one writes.
        """
        if self.adapter is not None:
            self.adapter.save(folder)
            return
        # cloned: fused q/k/v are slices of one tensor, and safetensors refuses to write slices
        named = [*self.model.named_parameters(), *saved_buffers(self.model).items()]
        state: dict[str, Any] = {name: parallel.on_first_host(p, copy=True) for name, p in named}
        if parallel.rank() != 0:
            return
        if self._checkpoint is None:
            # transformers refuses to write some models' own (a temperature without do_sample)
            self.model.generation_config = GenerationConfig()
            self.model.save_pretrained(folder, state_dict=state)
            return
        # a head tied to the embedding is one parameter here but may be two tensors in the files
        first_names = {id(p): name for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if name != first_names[id(p)] and self._checkpoint.holds(name):
                state[name] = state[first_names[id(p)]].clone()
        self._checkpoint.save(folder, state)


def freeze_all_but(model: Any, trained_layers: int | None) -> list[Tensor]:
    """Freeze all but the last layers (None: freeze nothing); returns the trained parameters."""
    if trained_layers is None:
        trained = list(model.parameters())
    else:
        layers = layers_of(model)
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
    """Enable gradient checkpointing: keep the inputs of the layers, recompute the rest."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # only this module: dropout, in submodules, stays off


def load_model(model: str | Path, *, device: str, dtype: str) -> Any:
    """Load a model into new tensors, without gradients."""
    config = AutoConfig.from_pretrained(model)
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    loaded, info = from_pretrained(
        model,
        config=language_model(config),
        dtype=getattr(torch, dtype),
        key_mapping=NAMES if config.model_type in TEXT_PARTS else None,
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"model {str(model)!r}: its files hold no {', '.join(missing[:3])}")
    return loaded.to(device).eval().requires_grad_(False)


def init_on_meta(model: str | Path, dtype: str) -> Any:
    """A model on the meta device: parameters have shapes but no storage."""
    config = language_model(AutoConfig.from_pretrained(model))
    with parameters_on_meta():
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


def multimodal_checkpoint_of(model: Any) -> MultimodalCheckpoint | None:
    """The multimodal checkpoint whose language model this is; None: it is a text model."""
    name = model.config.name_or_path
    is_part = name and AutoConfig.from_pretrained(name).model_type in TEXT_PARTS
    return MultimodalCheckpoint(name) if is_part else None

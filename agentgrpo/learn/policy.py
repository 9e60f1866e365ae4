"""The policy as a transformers model: what of it is trained, how a packed batch goes through it,
what of it is published and saved.
"""

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
from agentgrpo.learn.flex import whole_blocks
from agentgrpo.learn.forward_check import ForwardCheck, decoder_of, layers_of, why_not_packed
from agentgrpo.learn.lora import Adapter
from agentgrpo.models.liger import fuse, why_plain
from agentgrpo.models.multimodal_text import NAMES, TEXT_PARTS, Whole, language_model
from agentgrpo.support import parallel
from agentgrpo.types import Int32

CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""How configs name the cap of a soft-capped head."""
SCALES = {
    "logits_scaling": True, "logits_mup_width_multiplier": True, "logit_scale": False,
    "lm_head_multiplier": False,
}  # fmt: skip
"""How they name what logits are divided by, or (False) multiplied; forward_check.py sees if so."""


LIKELIEST_ROWS = 512
"""Whose logits are held at once."""
NEAR = 3 / 4
"""How long the rows of one pass are in units of its longest: padding is at most a third more."""


class PolicyOutput(NamedTuple):
    """Nats, fp32 (fp64 for fp64 models), one per term."""

    logp_N: Tensor
    entropy_N: Tensor
    beside_NK: Tensor
    """Log-probabilities of other tokens in its place."""
    ids_NK: Tensor
    """These tokens."""


class Scorer(nn.Module):
    """A causal language model that scores the terms of packed batches, and nothing else.

    One module from token ids to log-probabilities, so that FSDP gathers and shards the head with
    the rest. Models that cannot share prefixes see every rollout as a padded row of its own;
    `unpacked_reason` says why (None: they can). `exact`: logits are not rounded to the weights' 16
    bit. `sharded`: its weights lie on all ranks.

    On several ranks all must make one, of a model that is not sharded yet.
    """

    sharded = False

    def __init__(self, model: Any, *, exact: bool = False) -> None:
        super().__init__()
        self.exact = exact
        check = ForwardCheck(model)
        self.model = model
        config = model.config.get_text_config()
        caps = (getattr(config, name, None) for name in CAPS)
        self._softcap: float | None = next(filter(None, caps), None)
        self._tempering = 1.0
        """What logits are divided by."""
        for name, divides in SCALES.items():
            scale = getattr(config, name, None) or 1.0
            # HyperCLOVA X has Granite's name for it, and multiplies
            divides = divides and config.model_type != "hyperclovax"
            self._tempering *= scale if divides else 1 / scale
        kinds = {"full_attention", *(getattr(config, "layer_types", None) or ())}
        self._kinds = kinds if kinds & recurrent.KINDS else set()
        """Of a model with recurrent layers, which take the tree where the others take no mask."""
        self.unpacked_reason = why_not_packed(model)
        if self.unpacked_reason is None:
            model.set_attn_implementation(TREE)
            for layer in layers_of(model) if self._kinds else ():
                for mixer in recurrent.mixers_in(layer):
                    recurrent.take_trees(mixer)
            self.unpacked_reason = check.why_not(self)
            if self.unpacked_reason is not None:
                check.undo(model)
        if self.unpacked_reason is not None and (why := check.why_not(self)):
            raise ValueError(
                f"a model of type {config.model_type!r} cannot be trained, since here {why}"
            )

    def forward(
        self, batch: PackedBatch, temperature: float, beside: Tensor | int = 0
    ) -> PolicyOutput:
        """Log-probability and entropy of each term under the tempered distribution.

        `beside`: int64 [N, K], tokens whose log-probabilities in its place are wanted too; or K, of
        those that are likeliest there.
        """
        head = self.model.get_output_embeddings()
        if batch.deltas.largest >= head.weight.shape[0]:  # on a card nobody else would look
            raise ValueError(
                f"token id {batch.deltas.largest}: the model has {head.weight.shape[0]}"
            )
        hidden = self._hidden(batch)
        terms = batch.terms(self.device)
        row_N, target_N1 = terms.row_N, terms.target_N[:, None]
        if isinstance(beside, int):  # what caps and tempers logits keeps their order
            parts = row_N.split(LIKELIEST_ROWS) if beside else ()
            found = [head(hidden[rows]).topk(beside).indices for rows in parts]
            beside = torch.cat(found) if found else target_N1[:, :0]
        each = 1 + beside.shape[1]  # terms of the same row, which is projected once
        logp_N, entropy_N = linear_logp(
            hidden,
            head.weight,
            row_N.repeat_interleave(each),
            torch.cat([target_N1, beside], 1).flatten(),
            uses_U=torch.from_numpy(batch.uses_U) * each,
            bias_V=getattr(head, "bias", None),
            temperature=temperature * self._tempering,
            softcap=self._softcap,
            logits_dtype=torch.promote_types(hidden.dtype, torch.float32) if self.exact else None,
        )
        logp_NK, entropy_NK = logp_N.view(-1, each), entropy_N.view(-1, each)
        return PolicyOutput(logp_NK[:, 0], entropy_NK[:, 0], logp_NK[:, 1:], beside)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def _hidden(self, batch: PackedBatch) -> Tensor:
        """[T, H] after the final norm; on CUDA a tree has rows of padding behind."""
        if self.unpacked_reason is None and self.device.type == "cuda":
            batch = whole_blocks(batch)
        tokens = batch.tokens(self.device)
        if self.unpacked_reason is not None:
            return self._hidden_by_row(tokens.input_ids_T, batch.tout_T)
        tree = Tree(batch.tout_T, batch.positions_T, self.device, there=tokens)
        masks = {kind: tree if kind in recurrent.KINDS else None for kind in self._kinds}
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
        """Right-padded rows: padding comes after the tokens, so that even a state cannot see it.

        Rows of unlike lengths go one after another: padding would outgrow the tokens.
        """
        starts = np.flatnonzero(np.diff(tout_T, prepend=-1))
        lengths = np.diff(starts, append=len(tout_T))
        if (tout_T[starts] != [*starts[1:], len(tout_T)]).any():
            raise ValueError("prefixes are shared, but the model cannot: pack unshared rows")
        parts, passes = ids.split(lengths.tolist()), _passes(lengths)
        # sharded weights are gathered by all ranks together: a last row again, which nobody reads
        more = int(parallel.largest(len(passes))) - len(passes) if self.sharded else 0
        outs, insides = [], []
        for rows in passes + more * [passes[-1][-1:]]:
            padded = nn.utils.rnn.pad_sequence([parts[row] for row in rows], batch_first=True)
            sizes = torch.from_numpy(lengths[rows]).to(ids.device)
            insides.append(torch.arange(padded.shape[1], device=ids.device) < sizes[:, None])
            outs.append(self._decoded(input_ids=padded, attention_mask=insides[-1].long()))
        pairs = zip(outs, insides, strict=True)
        hidden = torch.cat([out[inside] for out, inside in pairs])
        order = [np.arange(lengths[row]) + starts[row] for rows in passes for row in rows]
        places = torch.from_numpy(np.argsort(np.concatenate(order))).to(ids.device)
        return hidden.index_select(0, places)


def _passes(lengths: NDArray[np.int64]) -> list[list[int]]:
    """Rows by length, the longest first; those of a pass at least NEAR as long as its first."""
    passes: list[list[int]] = []
    for row in np.argsort(-lengths, kind="stable").tolist():
        if not passes or lengths[row] < NEAR * lengths[passes[-1][0]]:
            passes.append([])
        passes[-1].append(row)
    return passes


class Policy:
    """What is trained: a transformers model, its last layers, or a LoRA adapter to it.

    The model's own parameters are frozen, but for those that are trained; its attention is
    replaced, adapted layers are put in place (`adapter`: a checkpoint's folder to take them from),
    and on several ranks it is sharded. `weights`: where its parameters lie, for the record.
    ValueError: more trained_layers than the model has, or as Adapter's and Scorer's.
    """

    def __init__(
        self, model: Any, config: LearnerConfig, *, weights: str, adapter: Path | None = None
    ) -> None:
        self.model, self.weights = model, weights
        self._whole = whole_of(model)
        self.device: str = model.device.type
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.adapter = Adapter(model, config.lora, adapter) if config.lora.rank else None
        self.trained = (
            self.adapter.parameters
            if self.adapter is not None
            else freeze_all_but(model, config.trained_layers)
        )
        self._num_trained = sum(p.numel() for p in self.trained)
        plain = why_plain(config.use_liger_kernel, model.config, self.device)
        self._layers = f"plain ({plain})" if plain else fuse(model)
        self._products = multiply_by_onednn(model) if self.device == "cpu" else "PyTorch's"
        asked, several = config.gradient_checkpointing, parallel.world_size() > 1
        self.checkpointed = False
        # "auto" is the preflight's, which cannot try on several ranks: the others would wait
        if asked is True or (asked == "auto" and several and self.device == "cuda"):
            self.checkpoint_layers()
        self.scorer = Scorer(model, exact=config.cast_lm_head_to_fp32)
        if several:
            parallel.shard(self.scorer, layers_of(model))
            self.scorer.sharded = True
            # sharding replaced every parameter by this rank's part of it
            self.trained = [p for p in model.parameters() if p.requires_grad]

    def checkpoint_layers(self) -> None:
        """Compute what is between the layers' inputs again in the backward pass."""
        self.checkpointed = True
        checkpoint_layers(self.model)

    @property
    def vocab_size(self) -> int:
        """Ids the model knows."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def describe(self) -> dict[str, Any]:
        """What it is, for the record."""
        rows = self.scorer.unpacked_reason
        return {
            "weights": self.weights,
            "device": self.device,
            "dtype": self.dtype,
            "layers": self._layers,
            "products": self._products,
            "gradient_checkpointing": self.checkpointed,
            "prefixes": "shared" if rows is None else f"not shared ({rows})",
            "trained_parameters": self._num_trained,
            "all_parameters": sum(p.numel() for p in self.model.parameters()),
        }

    def to_publish(self) -> Iterable[tuple[str, Tensor]]:
        """Whole tensors under the names of the checkpoint, one after the other: on several ranks
        each is whole only while it is looked at.
        """
        return ((name, parallel.whole(p)) for name, p in self.model.named_parameters())

    def save(self, folder: Path) -> None:
        """Write it as a Hugging Face model directory, or its adapter as a peft one, without the
        files that ChatTemplate.save() writes.

        On several ranks all must call it; the first one writes.
        """
        if self.adapter is not None:
            self.adapter.save(folder)
            return
        # cloned: fused q/k/v are slices of one tensor, which safetensors refuses to write
        named = [*self.model.named_parameters(), *saved_buffers(self.model).items()]
        state: dict[str, Any] = {name: parallel.on_first_host(p, copy=True) for name, p in named}
        if parallel.rank() != 0:
            return
        if self._whole is None:
            # transformers refuses to write what some models come with (temperature, not do_sample)
            self.model.generation_config = GenerationConfig()
            self.model.save_pretrained(folder, state_dict=state)
            return
        # a head of its own in the files is one with the embedding here, where the two are tied
        firsts = {id(p): name for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if name != firsts[id(p)] and self._whole.holds(name):
                state[name] = state[firsts[id(p)]].clone()
        self._whole.save(folder, state)


def freeze_all_but(model: Any, trained_layers: int | None) -> list[Tensor]:
    """Require gradients of the last layers only (None: of everything); returns those parameters."""
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
    """Keep only the layers' inputs for the backward pass and compute the rest again."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # the layer only asks itself; dropout, in its parts, stays off


def load_model(model: str | Path, *, device: str, dtype: str) -> Any:
    """A model in tensors of its own, without gradients."""
    whole = AutoConfig.from_pretrained(model)
    read: Any = AutoModelForCausalLM.from_pretrained
    loaded, found = read(
        model,
        config=language_model(whole),
        dtype=getattr(torch, dtype),
        key_mapping=NAMES if whole.model_type in TEXT_PARTS else None,
        output_loading_info=True,
    )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"model {str(model)!r}: its files hold no {', '.join(missing[:3])}")
    return loaded.to(device).eval().requires_grad_(False)


def init_on_meta(model: str | Path, dtype: str) -> Any:
    """A model whose parameters have shapes and no storage."""
    config = language_model(AutoConfig.from_pretrained(model))
    with parameters_on_meta():
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


def whole_of(model: Any) -> Whole | None:
    """The checkpoint that a model is the language model of; None: it is all of it."""
    name = model.config.name_or_path
    is_part = name and AutoConfig.from_pretrained(name).model_type in TEXT_PARTS
    return Whole(name) if is_part else None

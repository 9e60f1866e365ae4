"""What a run has to hold in memory, computed from its config and its model's shapes alone.

Sums of what must be there, not measurements: of activations the layers' inputs and the logits, and
nothing that kernels, allocators and CUDA graphs take beside. The preflight (learn/preflight.py)
tries the real thing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgrpo.config import LearnerConfig, TrainConfig, room_for_adapters
from agentgrpo.run import checkpoint

GIB = 2**30
WIDTH = {"float32": 4, "bfloat16": 2}
ALLOCATORS = 0.8
"""Share of a card that the sums may fill; the rest is for what they leave out."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one process, by what they are for."""

    parameters: int
    """How many numbers the model has; and of those the learner changes:"""
    trained: int
    weights: int
    copies: int
    """A replica of the learner's own, where weights are not shared, and the KL's frozen one."""
    adapter: int
    """The learner's, in float32, and the sampler's room for one, where it is served as it is."""
    optimizer: int
    """float32 masters and moments."""
    offloaded: bool
    """On CUDA with learner.offload_optimizer these are in host memory, but for what is passing."""
    passing: int
    gradients: int
    """The float32 sums, and those of 16 bit that are not in them yet."""
    activations: int
    """At least: the layers' inputs, which checkpointed ones keep alone, and the logits."""
    kv_cache: int
    checkpoint: int
    """On disk: the weights, or the adapter instead, the optimizer's state, and what of the KL's
    reference follows the policy or is an adapter's beginning."""
    cuda: bool

    @property
    def peak(self) -> int:
        """The most that is held at once: on CUDA the KV cache is given back while learning."""
        always = self.weights + self.copies + self.adapter + self.resident
        learning = self.gradients + max(self.activations, self.passing)
        return always + (max if self.cuda else int.__add__)(learning, self.kv_cache)

    @property
    def resident(self) -> int:
        """Of the optimizer's bytes those that stay where the weights are."""
        return 0 if self.offloaded else self.optimizer

    def listed(self) -> str:
        """The parts in GiB, as a sum."""
        parts = {
            "weights": self.weights,
            "copies": self.copies,
            "adapter": self.adapter,
            "gradients": self.gradients,
            "optimizer": self.resident,
            "activations": self.activations,
            "KV cache": self.kv_cache,
        }
        if self.offloaded and self.passing > self.activations:
            del parts["activations"]
            parts["optimizer's largest"] = self.passing
        rare = ("copies", "adapter", "optimizer", "KV cache")
        shown = " + ".join(f"{k} {v / GIB:.2f}" for k, v in parts.items() if v or k not in rare)
        more = ""
        if self.cuda and self.kv_cache:
            more = ", the KV cache being given back while learning"
        return f"{shown} = {self.peak / GIB:.1f} GiB{more}"


def footprint(
    config: TrainConfig, shapes: Shapes, *, cuda: bool, ranks: int = 1, trained: bool = True,
    sampled: bool = True,
) -> Footprint:  # fmt: skip
    """Memory of one process of a run.

    Args:
        config: of the run.
        shapes: of the model, from shapes_of() or shapes_in().
        cuda: a GPU, bfloat16 where the config says auto; else a CPU.
        ranks: of the run: each has a part of the learner, and an engine or its part of one.
        trained: there is a learner.
        sampled: there is an engine.
    """
    learner = config.learner
    width = WIDTH[config.engine.dtype_on("cuda" if cuda else "cpu")]
    parameters, changed = count(shapes), trained_count(shapes, learner)
    weights = parameters * width
    adapted = learner.lora.rank > 0
    copied = sampled and (ranks > 1 or config.engine.weights == "copy")
    exact = width == 4 or adapted  # adapters are float32: their own masters
    moments = 2 if learner.optimizer == "adamw_8bit" else 8
    state = moments + (0 if exact else 4)
    optimizer = changed * state
    largest = max(trained_sizes(shapes, learner), default=0)
    # on one process a gradient is added to its sum, and freed, as soon as it is there
    waiting = 0 if exact else width * (largest if ranks == 1 else changed)
    offloaded = learner.offload_optimizer and cuda
    passing = largest * state if offloaded else 0
    adapter = 4 * changed * adapted
    reference = (adapter or weights) * (config.loss.beta > 0)
    following = reference if adapted else changed * width * config.loss.sync_ref_model
    return Footprint(
        parameters=parameters,
        trained=changed,
        weights=weights // config.engine.tensor_parallel_size,
        copies=weights * copied // ranks + reference,
        adapter=adapter // ranks + sampled * width * _served_count(shapes, learner.lora.rank),
        optimizer=optimizer // ranks,
        offloaded=offloaded,
        passing=passing // ranks,
        gradients=(4 * changed + waiting) // ranks,
        activations=_activations(shapes, learner, width, cuda=cuda) if trained else 0,
        kv_cache=sampled * int(config.engine.kv_cache_gib * GIB),
        checkpoint=(adapter if adapted else weights) + optimizer + following,
        cuda=cuda,
    )


def _activations(shapes: Shapes, learner: LearnerConfig, width: int, *, cuda: bool) -> int:
    layers = 1 + max(map(_layer, shapes))
    if learner.trained_layers is not None and not learner.lora.rank:
        layers = learner.trained_layers
    vocab, hidden = _embedding(shapes)
    logits = vocab * (4 if learner.cast_lm_head_to_fp32 else width)
    # of more, linear_logp() makes them again in the backward pass
    kept = min(learner.max_tokens * logits, (6 if cuda else 1) * GIB)
    return kept + learner.max_tokens * hidden * width * layers


def _embedding(shapes: Shapes) -> tuple[int, ...]:
    """(vocabulary, hidden size): of the longest table that is no layer's, the first such."""
    tables = (shape for name, shape in shapes.items() if len(shape) == 2 and _layer(name) < 0)
    return max(tables, key=lambda shape: shape[0])


def count(shapes: Shapes) -> int:
    """How many numbers a model has."""
    return sum(map(math.prod, shapes.values()))


def trained_count(shapes: Shapes, learner: LearnerConfig) -> int:
    """How many numbers the learner changes: of the model, or of its adapter."""
    return sum(trained_sizes(shapes, learner))


def trained_sizes(shapes: Shapes, learner: LearnerConfig) -> list[int]:
    """Numbers in each of the trained parameters; of an adapter, in each layer's two matrices."""
    if rank := learner.lora.rank:
        return _adapter_sizes(shapes, rank, learner.lora.target_modules)
    first = -1
    if learner.trained_layers is not None:
        first = max(0, 1 + max(map(_layer, shapes)) - learner.trained_layers)
    return [math.prod(shape) for name, shape in shapes.items() if _layer(name) >= first]


def _adapter_sizes(shapes: Shapes, rank: int, targets: tuple[str, ...] = ()) -> list[int]:
    """Numbers in the matrices A and B of the linear layers with such names; (): of all."""
    linear = {n: s for n, s in shapes.items() if len(s) == 2 and _layer(n) >= 0}
    wanted = [s for n, s in linear.items() if not targets or _is_named(n, targets)]
    return [rank * (rows + columns) for rows, columns in wanted]


def _served_count(shapes: Shapes, rank: int) -> int:
    """Numbers that vLLM has room for: adapters of every layer, of the embedding and of the head."""
    room = room_for_adapters(rank)
    return sum(_adapter_sizes(shapes, room)) + 2 * room * sum(_embedding(shapes))


def _is_named(parameter: str, targets: tuple[str, ...]) -> bool:
    """As peft: by the layer's last name, or by several."""
    layer = "." + parameter.removesuffix(".weight")
    return any(layer.endswith(f".{target}") for target in targets)


def _layer(name: str) -> int:
    found = re.search(r"\b(?:layers|h)\.(\d+)\.", name)
    return int(found[1]) if found else -1


def shapes_in(folder: Path) -> Shapes:
    """Of each tensor of a model directory, from its safetensors headers; empty if it has none.

    Of a language model with parts for images or sound beside it, its own.

    Raises:
        ValueError: a file is damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        shapes |= checkpoint.shapes_in(path)
    if not any("language_model." in name for name in shapes):
        return shapes
    own = ("language_model.", "model.language_model.", "lm_head.")
    return {name: shape for name, shape in shapes.items() if name.startswith(own)}


def shapes_of(config: Any) -> Shapes:
    """Of each tensor of a model, from its transformers config; the model is made without storage.

    Raises:
        ValueError: transformers has no causal language model of this kind.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}

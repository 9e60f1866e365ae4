"""Whether a run fits this machine's memory and disk, said before the model is loaded.

Rough sums of what must be there, from the config and the model's shapes alone: of activations the
layers' inputs and the logits, and nothing that kernels, allocators and CUDA graphs take beside. The
preflight (learn/preflight.py) tries the real thing.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgrpo.config import LearnerConfig, TrainConfig
from agentgrpo.records import checkpoint
from agentgrpo.support import hardware, parallel
from agentgrpo.support.checks import Check

GIB = 2**30
WIDTH = {"float32": 4, "bfloat16": 2}
ALLOCATORS = 0.8
"""Share of a card that the sums may fill; the rest is for what they leave out."""
LIBRARIES = int(1.4 * GIB)
"""Of a process on a CPU: code, and what its libraries keep by shape once a run has settled, after
some 50 steps: 1.3 GiB beside the counted parts in 200 steps of the quickstart (bench/LOG.md)."""
SAID = 12
"""Of a likely token in the place of a sampled one: its id, what a teacher and the learner give it;
or on a GPU, where ids have 64 bits, without the last."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one process, by what they are for."""

    parameters: int
    """How many numbers the model has; and of those the learner changes:"""
    trained: int
    weights: int
    copies: int
    """A replica of the learner's own, where weights are not shared, the KL's frozen one, and the
    teacher: another model, or an average of what is trained; with teacher.topk what it said, of all
    that a step samples, or on a GPU of one batch."""
    optimizer: int
    """float32 masters (an adapter is its own) and moments; none here if offloaded on CUDA."""
    gradients: int
    """The float32 sums, and those of 16 bit that are not in them yet."""
    activations: int
    kv_cache: int
    checkpoint: int
    """On disk: the weights, unless an adapter is trained, and the optimizer's state."""
    libraries: int
    """On CUDA not counted: the host's memory."""
    cuda: bool

    @property
    def peak(self) -> int:
        """The most that is held at once: on CUDA the KV cache is given back while learning."""
        learning = self.gradients + self.activations
        together = (max if self.cuda else int.__add__)(learning, self.kv_cache)
        return self.weights + self.copies + self.optimizer + self.libraries + together

    def listed(self) -> str:
        """The parts in GiB, as a sum."""
        names = (
            "weights",
            "copies",
            "gradients",
            "optimizer",
            "activations",
            "kv_cache",
            "libraries",
        )
        parts = [(name.replace("kv_", "KV "), getattr(self, name)) for name in names]
        shown = " + ".join(f"{name} {size / GIB:.2f}" for name, size in parts if size)
        given = ", the KV cache being given back while learning" * (self.cuda and self.kv_cache > 0)
        return f"{shown} = {self.peak / GIB:.1f} GiB{given}"


def footprint(
    config: TrainConfig, shapes: Shapes, *, cuda: bool | None = None, ranks: int | None = None,
    trained: bool = True, sampled: bool = True, teacher: Shapes | None = None,
) -> Footprint:  # fmt: skip
    """Memory of one process of a run: of each rank, with a learner, or an engine, or both.

    `cuda`: a GPU, bfloat16 where the config says auto; else a CPU. None, as of `ranks`: what is
    here. `teacher`: of another model.
    """
    cuda = hardware.has_nvidia_gpu() if cuda is None else cuda
    ranks, learner, rollout = ranks or parallel.world_size(), config.learner, config.rollout
    width = WIDTH[config.engine.dtype_on("cuda" if cuda else "cpu")]
    parameters, sizes = count(shapes), trained_sizes(shapes, learner)
    weights, changed = parameters * width, sum(sizes)
    adapted = learner.lora.rank > 0
    copied = sampled and (ranks > 1 or config.engine.weights == "copy")
    exact = width == 4 or adapted  # adapters are float32
    masters = 4 if adapted or not exact else 0
    optimizer = changed * (masters + 8)
    # on one process a gradient is added to its sum, and freed, as soon as it is there
    waiting = 0 if exact else width * (max(sizes, default=0) if ranks == 1 else changed)
    beside = (4 * changed if adapted else weights) * (config.loss.beta > 0)
    if trained and sampled and config.teacher.teaches:
        beside += count(teacher or {}) * width
        beside += 4 * changed * (config.teacher.average > 0)
        played = rollout.tasks_per_step * rollout.group_size * rollout.max_sampled_tokens
        beside += SAID * config.teacher.topk * (learner.max_tokens if cuda else played)
    return Footprint(
        parameters=parameters,
        trained=changed,
        weights=weights // config.engine.tensor_parallel_size,
        copies=weights * copied // ranks + beside,
        optimizer=0 if learner.offload_optimizer and cuda else optimizer // ranks,
        gradients=(4 * changed + waiting) // ranks,
        activations=_activations(shapes, learner, width, cuda=cuda) if trained else 0,
        kv_cache=sampled * int(config.engine.kv_cache_gib * GIB),
        checkpoint=optimizer + (0 if adapted else weights),
        libraries=0 if cuda else LIBRARIES,
        cuda=cuda,
    )


def _activations(shapes: Shapes, learner: LearnerConfig, width: int, *, cuda: bool) -> int:
    """At least: the layers' inputs, which checkpointed ones keep alone, and the logits."""
    layers = 1 + max(map(_layer, shapes))
    if learner.trained_layers is not None and not learner.lora.rank:
        layers = learner.trained_layers
    tables = (shape for name, shape in shapes.items() if len(shape) == 2 and _layer(name) < 0)
    vocab, hidden = max(tables, key=lambda shape: shape[0])
    logits = vocab * (4 if learner.cast_lm_head_to_fp32 else width)
    # of more, linear_logp() makes them again in the backward pass
    kept = min(learner.max_tokens * logits, (6 if cuda else 1) * GIB)
    return kept + learner.max_tokens * hidden * width * layers


def count(shapes: Shapes) -> int:
    """How many numbers a model has."""
    return sum(map(math.prod, shapes.values()))


def trained_sizes(shapes: Shapes, learner: LearnerConfig) -> list[int]:
    """Numbers in each of the trained parameters; of an adapter, in each layer's two matrices."""
    if learner.lora.rank:
        linear = [n for n, shape in shapes.items() if len(shape) == 2 and _layer(n) >= 0]
        targets = tuple(f".{target}.weight" for target in learner.lora.target_modules)
        wanted = [n for n in linear if not targets or f".{n}".endswith(targets)]
        return [learner.lora.rank * sum(shapes[n]) for n in wanted]
    first = -1
    if learner.trained_layers is not None:
        first = max(0, 1 + max(map(_layer, shapes)) - learner.trained_layers)
    return [math.prod(shape) for name, shape in shapes.items() if _layer(name) >= first]


def _layer(name: str) -> int:
    found = re.search(r"\b(?:layers|h)\.(\d+)\.", name)
    return int(found[1]) if found else -1


def shapes_in(folder: Path) -> Shapes:
    """Of each tensor of a model directory, from its safetensors headers; empty if it has none.

    Of a language model with parts for images or sound beside it, its own.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        shapes |= checkpoint.shapes_in(path)
    if not any("language_model." in name for name in shapes):
        return shapes
    own = ("language_model.", "model.language_model.", "lm_head.")
    return {name: shape for name, shape in shapes.items() if name.startswith(own)}


def shapes_of(config: Any) -> Shapes:
    """Of each tensor of a model, by its transformers config; the model is made without storage."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def shapes_at(model: str) -> Shapes:
    """Of each tensor of a model, from its directory or hub name."""
    shapes = shapes_in(Path(model))
    if not shapes:  # its weights are not here yet
        from transformers import AutoConfig

        shapes = shapes_of(AutoConfig.from_pretrained(model).get_text_config())
    return shapes


def kv_bytes_per_token(shapes: Shapes, model: str, width: int) -> int:
    """Bytes of KV cache, by the outputs of the key and value layers; 0 where only vLLM knows: of
    sliding windows, recurrent layers, compressed keys and fused projections.
    """
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(model).get_text_config()
    others = {*(getattr(text, "layer_types", None) or ())} - {"full_attention"}
    if others or getattr(text, "sliding_window", None):
        return 0
    projected = (".k_proj.weight", ".v_proj.weight")
    return width * sum(shape[0] for name, shape in shapes.items() if name.endswith(projected))


def room_checks(
    config: TrainConfig, model: str, *, trained: bool, sampled: bool = True,
    teacher: str | None = None,
) -> Iterator[Check]:  # fmt: skip
    """What a run needs of this machine, beside what there is.

    vLLM would say that it has no room in its own words, after loading the model, or be ended by
    Linux, since a control group's limit is met only where memory is written to.
    """
    shapes = shapes_at(model)
    held = footprint(
        config, shapes, trained=trained, sampled=sampled,
        teacher=shapes_at(teacher) if teacher else None,
    )  # fmt: skip
    card = hardware.gpu_memory_bytes() if held.cuda else None
    known = card is not None or not held.cuda
    total, free = card or hardware.memory_bytes()
    there = f"free{' on the card' if card else ''}"
    cache, longest = config.engine.kv_cache_gib, config.engine.max_model_len
    width = WIDTH[config.engine.dtype_on("cuda" if held.cuda else "cpu")]
    token = kv_bytes_per_token(shapes, model, width) // config.engine.tensor_parallel_size
    if sampled and token * longest > held.kv_cache:
        enough = math.ceil(100 * token * (longest + 64) / GIB) / 100  # and two blocks
        yield Check(
            "engine.kv_cache_gib", False, f"engine.max_model_len = {longest} tokens take "
            f"{token * longest / GIB:.3g} GiB, and it is {cache:g}",
            f"engine.kv_cache_gib={enough:g}, or a lower engine.max_model_len", essential=True,
        )  # fmt: skip
    if known and sampled:
        need = held.weights + held.kv_cache
        yield Check(
            "room for vLLM",
            need <= free,
            f"weights {held.weights / GIB:.2f} + KV cache {held.kv_cache / GIB:.2f} = "
            f"{need / GIB:.2f} GiB are needed to start it, and {free / GIB:.2f} of "
            f"{total / GIB:.2f} GiB are {there}",
            f"a lower engine.kv_cache_gib (it is {cache:g}), or a smaller model",
            essential=True,
        )
    if not trained:
        return
    room, where = float(free), f"the {free / GIB:.1f} GiB that are {there}"
    if card and ALLOCATORS * total < free:
        room, where = ALLOCATORS * total, f"{ALLOCATORS:.0%} of the card's {total / GIB:.0f} GiB"
    fits = not known or held.peak <= room
    yield Check(
        "memory",
        fits,
        held.listed() if fits else f"{held.listed()} are needed, more than {where}",
        "fewer learner.trained_layers, learner.lora.rank, learner.gradient_checkpointing, a lower "
        f"learner.max_tokens{' or engine.kv_cache_gib' * sampled}, or a smaller model",
        essential=known and held.peak - held.activations > total,
    )
    disk = (config.keep_checkpoints + 1) * held.checkpoint
    folder = next(p for p in (config.out_dir, *config.out_dir.resolve().parents) if p.exists())
    left = shutil.disk_usage(folder).free
    yield Check(
        "disk",
        disk <= left,
        f"{disk / GIB:.1f} GiB for {config.keep_checkpoints} checkpoint(s) and the next while it "
        f"is written, {left / GIB:.0f} GiB free",
        "a lower keep_checkpoints, or another out_dir",
    )

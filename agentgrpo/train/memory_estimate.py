"""Estimates whether a run fits this machine's memory and disk, before the model is loaded.

A lower bound, from the config and the model's shapes alone. Of the activations it counts the
layers' inputs and the logits; it does not count what kernels, allocators and CUDA graphs need. The
preflight (learn/preflight.py) measures the rest by a real forward and backward pass.
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
"""Share of a GPU's memory that the estimate may fill; the rest is for what it does not count."""
LIBRARIES = int(1.4 * GIB)
"""On a CPU: code, and caches that libraries keep by shape, which stop growing after about 50 steps:
1.3 GiB beside the counted parts in 200 steps of the quickstart (bench/LOG.md)."""
TOPK_BYTES = 12
"""Per token of teacher.topk: its id, the teacher's and the learner's log-probability. On a GPU, ids
have 64 bits and the learner's are not kept."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of one process in bytes, by purpose. `parameters` and `trained` are counts."""

    parameters: int
    trained: int
    weights: int
    copies: int
    """The learner's own replica (if weights are not shared), the KL reference, and the teacher:
    another model, or an average of the trained weights. With teacher.topk also the teacher's
    log-probabilities: of all tokens of a step, or on a GPU of one batch."""
    optimizer: int
    """float32 masters (an adapter needs none) and moments; 0 if offloaded on CUDA."""
    gradients: int
    """float32 sums, and 16-bit gradients not yet added to them."""
    activations: int
    kv_cache: int
    checkpoint: int
    """On disk: optimizer state, and the weights unless an adapter is trained."""
    libraries: int
    """0 on CUDA, where they use the host's memory."""
    cuda: bool

    @property
    def peak(self) -> int:
        """The maximum at one time: on CUDA the KV cache is freed while the learner works."""
        learning = self.gradients + self.activations
        work = (max if self.cuda else int.__add__)(learning, self.kv_cache)
        return self.weights + self.copies + self.optimizer + self.libraries + work

    def format_sum(self) -> str:
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
        terms = " + ".join(f"{name} {size / GIB:.2f}" for name, size in parts if size)
        note = ", with the KV cache freed while learning" * (self.cuda and self.kv_cache > 0)
        return f"{terms} = {self.peak / GIB:.1f} GiB{note}"


def footprint(
    config: TrainConfig, shapes: Shapes, *, cuda: bool | None = None, ranks: int | None = None,
    trained: bool = True, sampled: bool = True, teacher: Shapes | None = None,
) -> Footprint:  # fmt: skip
    """Estimate the memory of one process (one rank).

    Args:
        config: of the run.
        shapes: of the model's tensors.
        cuda: estimate for a GPU, where dtype "auto" is bfloat16. None: this machine.
        ranks: number of processes. None: of this run.
        trained: there is a learner.
        sampled: there is an engine.
        teacher: shapes of a teacher that is another model.
    """
    cuda = hardware.has_nvidia_gpu() if cuda is None else cuda
    ranks, learner, rollout = ranks or parallel.world_size(), config.learner, config.rollout
    width = WIDTH[config.engine.dtype_on("cuda" if cuda else "cpu")]
    parameters, sizes = count(shapes), trained_sizes(shapes, learner)
    weights, changed = parameters * width, sum(sizes)
    is_lora = learner.lora.rank > 0
    is_copied = sampled and (ranks > 1 or config.engine.weights == "copy")
    is_float32 = width == 4 or is_lora  # adapters are float32
    master_bytes = 4 if is_lora or not is_float32 else 0
    optimizer = changed * (master_bytes + 8)
    # one process adds each gradient to its sum, and frees it, during the backward pass
    pending = 0 if is_float32 else width * (max(sizes, default=0) if ranks == 1 else changed)
    extra = (4 * changed if is_lora else weights) * (config.loss.beta > 0)
    if trained and sampled and config.teacher.teaches:
        extra += count(teacher or {}) * width
        extra += 4 * changed * (config.teacher.average > 0)
        played = rollout.tasks_per_step * rollout.group_size * rollout.max_sampled_tokens
        extra += TOPK_BYTES * config.teacher.topk * (learner.max_tokens if cuda else played)
    return Footprint(
        parameters=parameters,
        trained=changed,
        weights=weights // config.engine.tensor_parallel_size,
        copies=weights * is_copied // ranks + extra,
        optimizer=0 if learner.offload_optimizer and cuda else optimizer // ranks,
        gradients=(4 * changed + pending) // ranks,
        activations=_activations(shapes, learner, width, cuda=cuda) if trained else 0,
        kv_cache=sampled * int(config.engine.kv_cache_gib * GIB),
        checkpoint=optimizer + (0 if is_lora else weights),
        libraries=0 if cuda else LIBRARIES,
        cuda=cuda,
    )


def _activations(shapes: Shapes, learner: LearnerConfig, width: int, *, cuda: bool) -> int:
    """Lower bound: the layers' inputs (all that gradient checkpointing keeps) and the logits."""
    layers = 1 + max(map(_layer, shapes))
    if learner.trained_layers is not None and not learner.lora.rank:
        layers = learner.trained_layers
    tables = (shape for name, shape in shapes.items() if len(shape) == 2 and _layer(name) < 0)
    vocab, hidden = max(tables, key=lambda shape: shape[0])
    logits = vocab * (4 if learner.cast_lm_head_to_fp32 else width)
    # above this size linear_logp() recomputes them in the backward pass
    logits_kept = min(learner.max_tokens * logits, (6 if cuda else 1) * GIB)
    return logits_kept + learner.max_tokens * hidden * width * layers


def count(shapes: Shapes) -> int:
    """Number of parameters."""
    return sum(map(math.prod, shapes.values()))


def trained_sizes(shapes: Shapes, learner: LearnerConfig) -> list[int]:
    """Number of elements of each trained tensor. An adapter's two matrices count as one."""
    if learner.lora.rank:
        linear = [n for n, shape in shapes.items() if len(shape) == 2 and _layer(n) >= 0]
        targets = tuple(f".{target}.weight" for target in learner.lora.target_modules)
        adapted = [n for n in linear if not targets or f".{n}".endswith(targets)]
        return [learner.lora.rank * sum(shapes[n]) for n in adapted]
    first = -1
    if learner.trained_layers is not None:
        first = max(0, 1 + max(map(_layer, shapes)) - learner.trained_layers)
    return [math.prod(shape) for name, shape in shapes.items() if _layer(name) >= first]


def _layer(name: str) -> int:
    match = re.search(r"\b(?:layers|h)\.(\d+)\.", name)
    return int(match[1]) if match else -1


def shapes_in(folder: Path) -> Shapes:
    """Shapes in a model directory, from its safetensors headers; empty if it has none.

    Of a multimodal model, only those of the language model.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        shapes |= checkpoint.shapes_in(path)
    if not any("language_model." in name for name in shapes):
        return shapes
    prefixes = ("language_model.", "model.language_model.", "lm_head.")
    return {name: shape for name, shape in shapes.items() if name.startswith(prefixes)}


def shapes_of(config: Any) -> Shapes:
    """Shapes by a transformers config; the model is made without storage."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def shapes_at(model: str) -> Shapes:
    """Shapes of a model by its directory or Hub name."""
    shapes = shapes_in(Path(model))
    if not shapes:  # the weights are not downloaded yet
        from transformers import AutoConfig

        shapes = shapes_of(AutoConfig.from_pretrained(model).get_text_config())
    return shapes


def kv_bytes_per_token(shapes: Shapes, model: str, width: int) -> int:
    """Bytes of KV cache per token, from the outputs of the key and value projections.

    0 where only vLLM knows it: sliding windows, recurrent layers, compressed keys and fused
    projections.
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
    """Yield checks that compare the estimate with the memory and disk of this machine.

    Without them vLLM fails after loading the model, or Linux kills it: a control group's memory
    limit applies only when pages are written.
    """
    shapes = shapes_at(model)
    size = footprint(
        config, shapes, trained=trained, sampled=sampled,
        teacher=shapes_at(teacher) if teacher else None,
    )  # fmt: skip
    gpu = hardware.gpu_memory_bytes() if size.cuda else None
    is_known = gpu is not None or not size.cuda
    total, free = gpu or hardware.memory_bytes()
    available = f"free{' on the GPU' if gpu else ''}"
    cache, longest = config.engine.kv_cache_gib, config.engine.max_model_len
    width = WIDTH[config.engine.dtype_on("cuda" if size.cuda else "cpu")]
    token = kv_bytes_per_token(shapes, model, width) // config.engine.tensor_parallel_size
    if sampled and token * longest > size.kv_cache:
        enough = math.ceil(100 * token * (longest + 64) / GIB) / 100  # 64: two blocks
        yield Check(
            "engine.kv_cache_gib", False, f"engine.max_model_len = {longest} tokens need "
            f"{token * longest / GIB:.3g} GiB, got {cache:g}",
            f"engine.kv_cache_gib={enough:g}, or a lower engine.max_model_len", essential=True,
        )  # fmt: skip
    if is_known and sampled:
        need = size.weights + size.kv_cache
        yield Check(
            "room for vLLM",
            need <= free,
            f"weights {size.weights / GIB:.2f} + KV cache {size.kv_cache / GIB:.2f} = "
            f"{need / GIB:.2f} GiB are needed to start it, and {free / GIB:.2f} of "
            f"{total / GIB:.2f} GiB are {available}",
            f"a lower engine.kv_cache_gib (it is {cache:g}), or a smaller model",
            essential=True,
        )
    if not trained:
        return
    room, where = float(free), f"the {free / GIB:.1f} GiB that are {available}"
    if gpu and ALLOCATORS * total < free:
        room, where = ALLOCATORS * total, f"{ALLOCATORS:.0%} of the GPU's {total / GIB:.0f} GiB"
    fits = not is_known or size.peak <= room
    yield Check(
        "memory",
        fits,
        size.format_sum() if fits else f"{size.format_sum()} are needed, more than {where}",
        "fewer learner.trained_layers, learner.lora.rank, learner.gradient_checkpointing, a lower "
        f"learner.max_tokens{' or engine.kv_cache_gib' * sampled}, or a smaller model",
        essential=is_known and size.peak - size.activations > total,
    )
    disk = (config.keep_checkpoints + 1) * size.checkpoint
    folder = next(p for p in (config.out_dir, *config.out_dir.resolve().parents) if p.exists())
    disk_free = shutil.disk_usage(folder).free
    yield Check(
        "disk",
        disk <= disk_free,
        f"{disk / GIB:.1f} GiB for {config.keep_checkpoints} checkpoint(s) and the next while it "
        f"is written, {disk_free / GIB:.0f} GiB free",
        "a lower keep_checkpoints, or another out_dir",
    )

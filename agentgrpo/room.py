"""Whether a run fits this machine's memory and disk, said before the model is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from agentgrpo import parallel
from agentgrpo.config import TrainConfig
from agentgrpo.machine import hardware
from agentgrpo.machine.footprint import (
    ALLOCATORS,
    GIB,
    Footprint,
    Shapes,
    footprint,
    shapes_in,
    shapes_of,
)
from agentgrpo.sandbox.doctor import Check


def held_by(
    config: TrainConfig, model: str, *, trained: bool = True, sampled: bool = True
) -> Footprint:
    """What a run will hold here.

    Raises:
        ValueError: what is to be trained does not fit the model.
    """
    shapes = shapes_in(Path(model)) or shapes_named(model)
    cuda = hardware.has_nvidia_gpu()
    ranks = parallel.world_size()
    return footprint(config, shapes, cuda=cuda, ranks=ranks, trained=trained, sampled=sampled)


def room_checks(
    config: TrainConfig, model: str, *, trained: bool, sampled: bool = True
) -> Iterator[Check]:
    """What a run needs of this machine, beside what there is.

    vLLM would say that it has no room in its own words, after loading the model, or be ended by
    Linux, since a control group's limit is met only where memory is written to.

    Args:
        config: of the run.
        model: directory or hub name.
        trained: not only sampled from.
        sampled: not only trained: an engine is started.
    """
    if config.engine.dtype == "bfloat16" and not hardware.has_nvidia_gpu():
        there = hardware.has_bfloat16_instructions()
        yield Check(
            "bfloat16",
            there,
            f"this CPU has {'' if there else 'no '}instructions for it (avx512_bf16, amx_bf16)",
            'engine.dtype = "float32" is faster here',
        )
    held = held_by(config, model, trained=trained, sampled=sampled)
    card = hardware.gpu_memory_bytes() if held.cuda else None
    known = card is not None or not held.cuda
    total, free = card or hardware.memory_bytes()
    need = held.weights + held.kv_cache
    if known and sampled:
        yield Check(
            "room for vLLM",
            need <= free,
            f"weights {held.weights / GIB:.2f} + KV cache {held.kv_cache / GIB:.2f} = "
            f"{need / GIB:.2f} GiB are needed to start it, and {free / GIB:.2f} of "
            f"{total / GIB:.2f} GiB are free{' on the card' if card else ''}",
            f"a lower engine.kv_cache_gib (it is {config.engine.kv_cache_gib:g}), or a smaller "
            "model",
            essential=True,
        )
    if not trained:
        return
    room: float = free
    where = f"the {free / GIB:.1f} GiB that are free{' on the card' if card else ''}"
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
    if held.offloaded:
        yield _host_memory(held.optimizer)
    yield _disk(config, held.checkpoint)


def _host_memory(optimizer: float) -> Check:
    available, waits = hardware.memory_bytes()[1], optimizer * parallel.ranks_here()
    return Check(
        "host memory",
        waits <= available,
        f"{waits / GIB:.1f} GiB of optimizer state wait there, page-locked, and "
        f"{available / GIB:.1f} GiB are free",
        "fewer learner.trained_layers, or learner.lora.rank",
    )


def _disk(config: TrainConfig, checkpoint: float) -> Check:
    disk = (config.keep_checkpoints + 1) * checkpoint / GIB
    kept = f"{config.keep_checkpoints} checkpoint{'s' * (config.keep_checkpoints > 1)}"
    there = next(p for p in (config.out_dir, *config.out_dir.resolve().parents) if p.exists())
    left = shutil.disk_usage(there).free / GIB
    return Check(
        "disk",
        disk <= left,
        f"{disk:.1f} GiB for {kept} and the next while it is written, {left:.0f} GiB free",
        "a lower keep_checkpoints, or another out_dir",
    )


def shapes_named(model: str) -> Shapes:
    """Of a model that is known by its config alone: a hub name whose weights are not here yet."""
    from transformers import AutoConfig

    return shapes_of(AutoConfig.from_pretrained(model).get_text_config())

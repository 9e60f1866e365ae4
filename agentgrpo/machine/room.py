"""Whether a run fits this machine's memory, said before the model is loaded."""

from __future__ import annotations

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


def held_by(config: TrainConfig, model: str) -> Footprint | None:
    """What a run will hold here; None where that is not known before the model is loaded."""
    shapes = shapes_in(Path(model)) or shapes_named(model)
    if not any("embed_tokens" in name for name in shapes):
        return None
    cuda = hardware.has_nvidia_gpu()
    return footprint(config, shapes, cuda=cuda, ranks=parallel.world_size())


def require_room_to_sample(config: TrainConfig, model: str) -> None:
    """Refuse what vLLM has no room for: it would say so in its own words, after loading the model,
    or be ended by Linux, since a control group's limit is met only where memory is written to.

    Raises:
        ValueError: weights and KV cache exceed what is free, or the card; names what to lower.
    """
    held = held_by(config, model)
    if held is None:
        return
    card = hardware.gpu_memory_bytes() if held.cuda else None
    if held.cuda and card is None:
        return
    total, free = hardware.memory_bytes() if card is None else (card, card)
    need = held.weights + held.kv_cache
    if need > free:
        raise ValueError(
            f"no room for vLLM: weights {held.weights / GIB:.2f} + KV cache "
            f"{held.kv_cache / GIB:.2f} = {need / GIB:.2f} GiB are needed to start it, and "
            f"{free / GIB:.2f} of {total / GIB:.2f} GiB are free{' on the card' if card else ''}; "
            f"a lower engine.kv_cache_gib (it is {config.engine.kv_cache_gib:g}), or a smaller "
            "model, needs less"
        )


def memory_warnings(config: TrainConfig, model: str) -> list[str]:
    """What a run should say about memory before it loads a model: nothing, where it seems to fit.

    On a CPU it would not be told otherwise: Linux ends a process that uses too much without a word.
    """
    held = held_by(config, model)
    return [] if held is None else list(short_of_memory(held))


def short_of_memory(held: Footprint) -> Iterator[str]:
    """What is to be said where it seems not to fit."""
    advice = (
        "fewer learner.trained_layers, learner.lora.rank, learner.gradient_checkpointing, a lower "
        "learner.max_tokens or engine.kv_cache_gib, or a smaller model"
    )
    need, free = held.peak / GIB, hardware.memory_bytes()[1] / GIB
    if not held.cuda and need > free:
        yield (
            f"{need:.1f} GiB are needed at least, more than the {free:.1f} GiB that are free: "
            f"{advice}"
        )
    card = hardware.gpu_memory_bytes() if held.cuda else None
    if card is not None and held.peak > ALLOCATORS * card:
        yield (
            f"{need:.1f} GiB are needed, more than {ALLOCATORS:.0%} of the card's "
            f"{card / GIB:.0f} GiB: {advice}"
        )


def shapes_named(model: str) -> Shapes:
    """Of a model that is known by its config alone: a hub name whose weights are not here yet."""
    from transformers import AutoConfig

    return shapes_of(AutoConfig.from_pretrained(model).get_text_config())

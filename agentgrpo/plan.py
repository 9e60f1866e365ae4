"""What a run would do, and whether it fits: `agentgrpo train CONFIG --dry-run`.

Everything that the run itself checks before it loads the model has been checked when this is
printed; nothing is trained and nothing is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentgrpo import checkpoint, machine, parallel
from agentgrpo.config import TrainConfig
from agentgrpo.footprint import (
    ALLOCATORS,
    GIB,
    Footprint,
    Shapes,
    footprint,
    shapes_in,
    shapes_of,
)

if TYPE_CHECKING:
    from agentgrpo.build import Stage


def plan(config: TrainConfig, stage: Stage, prompt_tokens: Sequence[int]) -> str:
    """The plan of a run, as lines of `name  text`.

    Args:
        config: of the run.
        stage: everything but the engine, checked.
        prompt_tokens: lengths of the prompts that were looked at.
    """
    device = "cuda" if machine.has_nvidia_gpu() else "cpu"
    rows = [
        *_tasks(config, stage, prompt_tokens),
        *_steps(config),
        ("sandbox", "{rung}, {memory_limit}, python {python}".format_map(stage.pool.describe())),
        *_model(config, stage.model, device),
        *_folder(config),
    ]
    return "\n".join(f"  {name:10} {text}" for name, text in rows)


def _tasks(config: TrainConfig, stage: Stage, prompts: Sequence[int]) -> Iterator[tuple[str, str]]:
    r = config.rollout
    yield "data", f"{config.data.train}; {len(stage.heldout)} held-out tasks"
    longest = max(prompts)
    yield "prompts", f"{min(prompts)} to {longest} tokens ({len(prompts)} looked at)"
    budget = r.max_turns * r.max_turn_tokens + (r.max_turns - 1) * r.max_observation_tokens
    room = config.engine.max_model_len - longest
    yield (
        "rollouts",
        (
            f"agent {config.agent.kind}, up to {r.max_turns} turns of {r.max_turn_tokens} tokens "
            f"and observations of {r.max_observation_tokens}: {budget} tokens after the prompt"
        ),
    )
    if room < budget:
        yield (
            "WARNING",
            (
                f"the context is short: after the longest prompt engine.max_model_len = "
                f"{config.engine.max_model_len} leaves {room} tokens, so long rollouts are cut; "
                f"{longest + budget} would hold all"
            ),
        )


def _steps(config: TrainConfig) -> Iterator[tuple[str, str]]:
    r = config.rollout
    played = r.tasks_per_step * r.group_size
    sampled = played * r.max_sampled_tokens
    more = f", up to {1 + r.max_refills} times" if r.refill_below else ""
    yield (
        "a step",
        (
            f"{r.tasks_per_step} tasks x {r.group_size} = {played} rollouts{more}, at most "
            f"{sampled:,} sampled tokens, then one learner step"
        ),
    )
    yield "the run", f"{config.steps} steps, saved every {config.save_every}"


def _model(config: TrainConfig, model: str, device: str) -> Iterator[tuple[str, str]]:
    total, free = (size / GIB for size in machine.memory_bytes())
    host = f"{machine.cpu_count()} cores, {free:.1f} of {total:.1f} GiB free"
    card = machine.gpu_memory_bytes() if device == "cuda" else None
    named = f"{f'{card / GIB:.0f} GiB ' if card else ''}NVIDIA GPU; host: "
    dtype = config.engine.dtype_on(device)
    yield "device", f"{named if device == 'cuda' else 'CPU, '}{host}; {dtype}"
    held = _held(config, model)
    if held is None:
        yield "model", f"{model}: its size is not known before it is loaded"
        return
    changed = "of an adapter" if config.learner.lora.rank else "of them"
    yield (
        "model",
        f"{Path(model).name}: {held.parameters:,} parameters, {held.trained:,} {changed} trained",
    )
    yield "memory", held.listed()
    yield from (("WARNING", text) for text in _short_of_memory(held))
    yield from _disk(config, held)


def _held(config: TrainConfig, model: str) -> Footprint | None:
    """What a run will hold here; None where that is not known before the model is loaded."""
    shapes = shapes_in(Path(model)) or shapes_named(model)
    if not any("embed_tokens" in name for name in shapes):
        return None
    cuda = machine.has_nvidia_gpu()
    return footprint(config, shapes, cuda=cuda, ranks=parallel.world_size())


def require_room_to_sample(config: TrainConfig, model: str) -> None:
    """Refuse what vLLM has no room for: it would say so in its own words, after loading the model,
    or be ended by Linux, since a control group's limit is met only where memory is written to.

    Raises:
        ValueError: weights and KV cache exceed what is free, or the card; names what to lower.
    """
    held = _held(config, model)
    if held is None:
        return
    card = machine.gpu_memory_bytes() if held.cuda else None
    if held.cuda and card is None:
        return
    total, free = machine.memory_bytes() if card is None else (card, card)
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
    held = _held(config, model)
    return [] if held is None else list(_short_of_memory(held))


def _short_of_memory(held: Footprint) -> Iterator[str]:
    advice = (
        "fewer learner.trained_layers, learner.lora.rank, learner.gradient_checkpointing, a lower "
        "learner.max_tokens or engine.kv_cache_gib, or a smaller model"
    )
    need, free = held.peak / GIB, machine.memory_bytes()[1] / GIB
    if not held.cuda and need > free:
        yield (
            f"{need:.1f} GiB are needed at least, more than the {free:.1f} GiB that are free: "
            f"{advice}"
        )
    card = machine.gpu_memory_bytes() if held.cuda else None
    if card is not None and held.peak > ALLOCATORS * card:
        yield (
            f"{need:.1f} GiB are needed, more than {ALLOCATORS:.0%} of the card's "
            f"{card / GIB:.0f} GiB: {advice}"
        )


def _disk(config: TrainConfig, held: Footprint) -> Iterator[tuple[str, str]]:
    disk = (config.keep_checkpoints + 1) * held.checkpoint / GIB
    there = next(p for p in (config.out_dir, *config.out_dir.resolve().parents) if p.exists())
    left = shutil.disk_usage(there).free / GIB
    kept = f"{config.keep_checkpoints} checkpoints and the next while it is written"
    yield "disk", f"{disk:.1f} GiB for {kept}, {left:.0f} GiB free"
    if disk > left:
        yield "WARNING", "the checkpoints do not fit: a lower keep_checkpoints, or another out_dir"


def shapes_named(model: str) -> Shapes:
    """Of a model that is known by its config alone: a hub name whose weights are not here yet."""
    from transformers import AutoConfig

    return shapes_of(AutoConfig.from_pretrained(model).get_text_config())


def _folder(config: TrainConfig) -> Iterator[tuple[str, str]]:
    newest = checkpoint.newest(config.out_dir)
    if newest is not None and checkpoint.step_of(newest) >= config.steps:
        done = checkpoint.step_of(newest)
        yield "out_dir", f"{config.out_dir}: {done} steps are done; with a larger steps it goes on"
    elif newest is not None:
        yield "out_dir", f"{config.out_dir}: continues after step {checkpoint.step_of(newest)}"
    elif (config.out_dir / "metrics.jsonl").exists():
        yield "out_dir", f"{config.out_dir}: starts anew, no checkpoint was saved there yet"
    else:
        yield "out_dir", f"{config.out_dir}: new"

"""What a run would do, and whether it fits: `agentgrpo train CONFIG --dry-run`.

Everything that the run itself checks before it loads the model has been checked when this is
printed; nothing is trained and nothing is written.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentgrpo import checkpoint, machine
from agentgrpo.config import TrainConfig

if TYPE_CHECKING:
    from agentgrpo.build import Stage

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}


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
    dtype = config.engine.dtype_on(device)
    total, free = (size / GIB for size in machine.memory_bytes())
    host = f"{machine.cpu_count()} cores, {free:.1f} of {total:.1f} GiB free"
    yield "device", f"{'an NVIDIA GPU; host: ' if device == 'cuda' else 'CPU, '}{host}; {dtype}"
    shapes = parameters(Path(model))
    if not shapes:
        yield "model", f"{model}: not in a local directory, so its size is not known here"
        return
    counted, trained = sum(shapes.values()), trained_count(shapes, config.learner.trained_layers)
    yield "model", f"{Path(model).name}: {counted:,} parameters, {trained:,} of them trained"
    width = BYTES[dtype]
    parts = {
        "weights": counted * width,
        "gradients": trained * width,
        "optimizer": trained * (8 if width == 4 else 16),
        "KV cache": int(config.engine.kv_cache_gib * GIB),
    }
    if config.engine.weights == "copy":
        parts["the learner's copy"] = counted * width
    need = sum(parts.values()) / GIB
    listed = " + ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    yield "memory", f"{listed} = {need:.1f} GiB, and activations"
    if device == "cpu" and need > free:
        yield (
            "WARNING",
            (
                f"that is more than the {free:.1f} GiB that are free: fewer "
                "learner.trained_layers, a smaller engine.kv_cache_gib, or a smaller model"
            ),
        )
    disk = config.keep_checkpoints * (counted * width + parts["optimizer"]) / GIB
    there = next(p for p in (config.out_dir, *config.out_dir.resolve().parents) if p.exists())
    left = shutil.disk_usage(there).free / GIB
    yield "disk", f"{disk:.1f} GiB for {config.keep_checkpoints} checkpoints, {left:.0f} GiB free"
    if disk > left:
        yield "WARNING", "the checkpoints do not fit: a lower keep_checkpoints, or another out_dir"


def _folder(config: TrainConfig) -> Iterator[tuple[str, str]]:
    newest = checkpoint.newest(config.out_dir)
    if newest is not None:
        yield "out_dir", f"{config.out_dir}: continues after step {checkpoint.step_of(newest)}"
    elif (config.out_dir / "metrics.jsonl").exists():
        yield "out_dir", f"{config.out_dir}: starts anew, no checkpoint was saved there yet"
    else:
        yield "out_dir", f"{config.out_dir}: new"


def parameters(model: Path) -> dict[str, int]:
    """How many numbers each tensor of a model directory holds, from its safetensors headers."""
    shapes = {}
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 1
                for extent in tensor["shape"]:
                    size *= extent
                shapes[name] = size
    return shapes


def trained_count(shapes: dict[str, int], trained_layers: int | None) -> int:
    """How many of them the learner would change."""
    if trained_layers is None:
        return sum(shapes.values())
    layer = {name: int(m[1]) for name in shapes if (m := re.search(r"\blayers\.(\d+)\.", name))}
    first = 1 + max(layer.values(), default=-1) - trained_layers
    return sum(shapes[name] for name, number in layer.items() if number >= first)

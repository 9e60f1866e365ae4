"""What a run would do, and whether it fits: `agentgrpo train CONFIG --dry-run`.

Everything that the run itself checks before it loads the model has been checked when this is
printed; nothing is trained and nothing is written.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentgrpo.config import TrainConfig
from agentgrpo.learn.losses import objective_of
from agentgrpo.machine import hardware
from agentgrpo.machine.footprint import GIB, Footprint
from agentgrpo.machine.room import held_by, require_room_to_sample, short_of_memory
from agentgrpo.run import checkpoint
from agentgrpo.run.folder import require_same_run, whole_checkpoint
from agentgrpo.stage import Stage, prompt_length, set_stage


def plan(config: TrainConfig, stage: Stage, prompt_tokens: Sequence[int]) -> str:
    """The plan of a run, as lines of `name  text`.

    Args:
        config: of the run.
        stage: everything but the engine, checked.
        prompt_tokens: lengths of the prompts that were looked at.
    """
    device = "cuda" if hardware.has_nvidia_gpu() else "cpu"
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
    total, free = (size / GIB for size in hardware.memory_bytes())
    host = f"{hardware.cpu_count()} cores, {free:.1f} of {total:.1f} GiB free"
    card = hardware.gpu_memory_bytes() if device == "cuda" else None
    named = f"{f'{card / GIB:.0f} GiB ' if card else ''}NVIDIA GPU; host: "
    dtype = config.engine.dtype_on(device)
    yield "device", f"{named if device == 'cuda' else 'CPU, '}{host}; {dtype}"
    held = held_by(config, model)
    if held is None:
        yield "model", f"{model}: its size is not known before it is loaded"
        return
    changed = "of an adapter" if config.learner.lora.rank else "of them"
    yield (
        "model",
        f"{Path(model).name}: {held.parameters:,} parameters, {held.trained:,} {changed} trained",
    )
    yield "memory", held.listed()
    yield from (("WARNING", text) for text in short_of_memory(held))
    yield from _disk(config, held)


def _disk(config: TrainConfig, held: Footprint) -> Iterator[tuple[str, str]]:
    disk = (config.keep_checkpoints + 1) * held.checkpoint / GIB
    there = next(p for p in (config.out_dir, *config.out_dir.resolve().parents) if p.exists())
    left = shutil.disk_usage(there).free / GIB
    kept = f"{config.keep_checkpoints} checkpoints and the next while it is written"
    yield "disk", f"{disk:.1f} GiB for {kept}, {left:.0f} GiB free"
    if disk > left:
        yield "WARNING", "the checkpoints do not fit: a lower keep_checkpoints, or another out_dir"


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


NUM_LOOKED_AT = 256
"""Training tasks whose prompts a dry run measures."""


def planned(config: TrainConfig) -> str:
    """What a run would do, after all checks that it would make; writes nothing.

    Raises:
        As build().
    """
    objective_of(config.loss)
    require_same_run(config)
    whole_checkpoint(config)
    stage = set_stage(config)
    with contextlib.closing(stage):
        require_room_to_sample(config, stage.model)
        train = stage.training_tasks(config).next(NUM_LOOKED_AT)
        prompts = [prompt_length(stage.agent, stage.chat, t) for t in [*train, *stage.heldout]]
        return "the plan, nothing was trained:\n" + plan(config, stage, prompts)

"""What a command would do, and whether it fits: `agentgrpo train CONFIG --dry-run`.

Everything that the run itself checks before it loads the model has been checked when this is
printed; nothing is trained and nothing is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from agentgrpo import parallel
from agentgrpo.agents.program import ProgramAgent
from agentgrpo.config import TrainConfig
from agentgrpo.data.tasks import Tasks
from agentgrpo.learn.losses import objective_of
from agentgrpo.machine import hardware
from agentgrpo.machine.footprint import GIB
from agentgrpo.machine.packages import require
from agentgrpo.models.kinds import kinds_of, why_copied
from agentgrpo.models.liger import why_plain
from agentgrpo.room import held_by, room_checks
from agentgrpo.run import checkpoint
from agentgrpo.run.folder import (
    newest_saved,
    require_same_heldout,
    require_same_run,
    whole_checkpoint,
)
from agentgrpo.sandbox.doctor import Check
from agentgrpo.stage import Stage, heldout_of, prompt_length, set_stage
from agentgrpo.types import Task

Lines = Callable[[TrainConfig, Stage], Iterable[Check]]
"""What a command plays or trains on, read and checked."""


def plan(
    config: TrainConfig, stage: Stage, lines: Iterable[Check], *, trained: bool,
    sampled: bool = True, saved: Sequence[str] = (checkpoint.SAVED,),
) -> str:  # fmt: skip
    """The plan of a run, as lines of `name  text`; what may not work is a WARNING with its remedy.

    Args:
        config: of the run.
        stage: everything but the engine, checked.
        lines: what is played or trained on.
        trained: else it is only played.
        sampled: an engine is started.
        saved: patterns, below out_dir, of what the same command continues from; none: it does not.
    """
    jail = "not needed: the environment runs no code"
    if stage.jail is not None:
        jail = "{rung}, {memory_limit}, python {python}".format_map(stage.jail)
    checks = [
        *lines,
        said("sandbox", jail),
        *_model(config, stage.model, trained=trained, sampled=sampled),
        *(_learning(config, stage.model, sampled=sampled) if trained else ()),
        *room_checks(config, stage.model, trained=trained, sampled=sampled),
    ]
    if saved:
        checks.append(said("out_dir", f"{config.out_dir}: {_folder(config.out_dir, saved)}"))
    return "\n".join(
        f"  {check.name:10} {check.found}"
        if check.ok
        else f"  WARNING    {check.name}: {check.found}; remedy: {check.remedy}"
        for check in checks
    )


def said(name: str, text: str) -> Check:
    """A line of a plan that is no warning."""
    return Check(name, ok=True, found=text)


def to_be_trained_on(config: TrainConfig, stage: Stage, tasks: Tasks) -> Iterator[Check]:
    """The tasks of reinforcement learning, and one of its steps."""
    train = tasks.next(NUM_LOOKED_AT)
    yield from played(config, stage, [*train, *stage.heldout])
    yield from _step(config)


def to_be_trained(config: TrainConfig, stage: Stage) -> Iterator[Check]:
    """What `agentgrpo train` does: the same, and how long it is."""
    newest = checkpoint.newest(config.out_dir)
    if newest is not None:
        require_same_heldout(config.out_dir, heldout_of(config, stage))
    yield from to_be_trained_on(config, stage, stage.training_tasks(config))
    done = newest is not None and checkpoint.step_of(newest) >= config.steps
    more = "; all are done: with a larger steps it goes on" if done else ""
    yield said("the run", f"{config.steps} steps, saved every {config.save_every}{more}")


def to_be_evaluated(config: TrainConfig, stage: Stage) -> Iterator[Check]:
    """The held-out tasks."""
    yield from played(config, stage, stage.heldout)


def played(config: TrainConfig, stage: Stage, tasks: Sequence[Task]) -> Iterator[Check]:
    """Tasks, their prompts measured, and the room for what is played of them.

    Nothing is measured for a program: what it asks, and in how many conversations, is its own.
    """
    r, kind = config.rollout, config.agent.kind
    turns = f"agent {kind}, up to {r.max_turns} turns of {r.max_turn_tokens} tokens"
    yield said("data", f"{config.data.train}; {len(stage.heldout)} held-out tasks")
    if isinstance(stage.agent, ProgramAgent):
        yield said("rollouts", f"{turns} in all")
        return
    prompts = [prompt_length(stage.agent, stage.chat, task) for task in tasks]
    longest = max(prompts)
    yield said("prompts", f"{min(prompts)} to {longest} tokens ({len(prompts)} looked at)")
    budget = r.max_turns * r.max_turn_tokens + (r.max_turns - 1) * r.max_observation_tokens
    yield said(
        "rollouts",
        f"{turns} and observations of {r.max_observation_tokens}: {budget} tokens after the prompt",
    )
    room = config.engine.max_model_len - longest
    yield Check(
        "context",
        room >= budget,
        f"engine.max_model_len = {config.engine.max_model_len} leaves {room} tokens after the "
        f"longest prompt{'' if room >= budget else ', so long rollouts are cut'}",
        f"{longest + budget} would hold all",
    )


def _step(config: TrainConfig) -> Iterator[Check]:
    r = config.rollout
    played = r.tasks_per_step * r.group_size
    sampled = played * r.max_sampled_tokens
    more = f", up to {1 + r.max_refills} times" if r.refill_below else ""
    yield said(
        "a step",
        f"{r.tasks_per_step} tasks x {r.group_size} = {played} rollouts{more}, at most "
        f"{sampled:,} sampled tokens, then one learner step",
    )


def _model(config: TrainConfig, model: str, *, trained: bool, sampled: bool) -> Iterator[Check]:
    device = "cuda" if hardware.has_nvidia_gpu() else "cpu"
    total, free = (size / GIB for size in hardware.memory_bytes())
    host = f"{hardware.cpu_count()} cores, {free:.1f} of {total:.1f} GiB free"
    card = hardware.gpu_memory_bytes() if device == "cuda" else None
    named = f"{f'{card[0] / GIB:.0f} GiB ' if card else ''}NVIDIA GPU; host: "
    dtype = config.engine.dtype_on(device)
    yield said("device", f"{named if device == 'cuda' else 'CPU, '}{host}; {dtype}")
    held = held_by(config, model, trained=trained, sampled=sampled)
    changed = "of an adapter" if config.learner.lora.rank else "of them"
    much = f", {held.trained:,} {changed} trained" if trained else ""
    yield said("model", f"{Path(model).name}: {held.parameters:,} parameters{much}")


def _learning(config: TrainConfig, model: str, *, sampled: bool = True) -> Iterator[Check]:
    """How the learner will compute and hold the model, as its config.json tells."""
    # they import torch: the environment is set by now
    from agentgrpo.learn.policy import hollow
    from agentgrpo.learn.trial import foreseen

    hollowed = hollow(model, "bfloat16")
    rows = foreseen(hollowed)
    asked, why = config.engine.weights, why_copied(kinds_of(model))
    if parallel.world_size() > 1:
        why = "several ranks"
    elif asked == "copy":
        why = "engine.weights = 'copy'"
    yield said("prefixes", "trees" if rows is None else f"rows: {rows}")
    if sampled:
        yield said("weights", "shared with vLLM" if why is None else f"copied to vLLM: {why}")
    device = "cuda" if hardware.has_nvidia_gpu() else "cpu"
    plain = why_plain(config.learner.use_liger_kernel, hollowed.config, device)
    fused = "norms, rotations and MLPs of the layers are "
    yield said("kernels", fused + (f"transformers': {plain}" if plain else "Liger's"))


def _folder(out_dir: Path, saved: Sequence[str]) -> str:
    newest = newest_saved(out_dir, saved)
    if newest is not None:
        return f"continues from {newest.relative_to(out_dir)}"
    if (out_dir / "metrics.jsonl").exists():
        return "starts from the beginning, no checkpoint was saved there yet"
    return "new"


NUM_LOOKED_AT = 256
"""Training tasks whose prompts a dry run measures."""


def planned(
    config: TrainConfig,
    *,
    trained: bool = True,
    sampled: bool = True,
    lines: Lines = to_be_trained,
    saved: Sequence[str] = (checkpoint.SAVED,),
) -> str:
    """What a command would do, after all checks that it would make; writes nothing.

    Args:
        config: of the run, with the model that it begins with.
        trained: else the model, which may be an adapter's folder, is only played.
        sampled: an engine is started.
        lines: what is played or trained on; called when all else has been checked.
        saved: as of plan().

    Raises:
        As build().
    """
    if trained:
        objective_of(config.loss)
        require_same_run(config)
        whole_checkpoint(config)
    stage = set_stage(config, trained=trained)
    with contextlib.closing(stage):
        if sampled:
            require(room_checks(config, stage.model, trained=False))
        if trained:
            require(room_checks(config, stage.model, trained=True, sampled=sampled))
        told = plan(
            config, stage, lines(config, stage), trained=trained, sampled=sampled, saved=saved
        )
    return f"the plan, nothing was {'trained' if trained else 'played'}:\n{told}"

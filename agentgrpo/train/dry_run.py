"""The plan that a dry run prints: `agentgrpo train CONFIG --dry-run`.

A dry run is the run, stopped before its engine is started: all that the run itself checks before it
loads the model has been checked by then; nothing is trained and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from agentgrpo.config import TrainConfig
from agentgrpo.records import checkpoint
from agentgrpo.records.run_folder import newest_saved
from agentgrpo.rewards.answers import holds_answer
from agentgrpo.support import hardware
from agentgrpo.support.checks import Check
from agentgrpo.support.packages import card_versions, installed, require
from agentgrpo.train.memory_estimate import GIB, footprint, room_checks, shapes_at
from agentgrpo.train.parts import Parts
from agentgrpo.train.prepare import prompt_length
from agentgrpo.types import Task

NUM_LOOKED_AT = 256
"""Training tasks whose prompts a dry run measures."""


def plan(
    config: TrainConfig, parts: Parts, lines: Iterable[Check], *, trained: bool = True,
    sampled: bool = True, saved: Sequence[str] = (checkpoint.SAVED,),
) -> str:  # fmt: skip
    """The plan of a run, as lines of `name  text`; what may not work is a WARNING with its remedy.

    `lines`: what is played or trained on. `saved`: patterns, below out_dir, of what the same
    command continues from; none: it does not.
    """
    jail = "not needed: the environment runs no code"
    if parts.jail is not None:
        jail = "{rung}, {memory_limit}, python {python}".format_map(parts.jail)
    teacher = parts.teacher if trained else None
    room = [*room_checks(config, parts.model, trained=trained, sampled=sampled, teacher=teacher)]
    require(room)
    checks = [
        *lines,
        *([card_versions(installed())] if hardware.has_nvidia_gpu() else []),
        line("sandbox", jail),
        *_model(config, parts.model, trained=trained, sampled=sampled),
        *(_learning(config, parts.model) if trained else ()),
        *room,
    ]
    if saved:
        checks.append(line("out_dir", f"{config.out_dir}: {_folder(config.out_dir, saved)}"))
    shown = (
        f"  {check.name:10} {check.found}"
        if check.ok
        else f"  WARNING    {check.name}: {check.found}; remedy: {check.remedy}"
        for check in checks
    )
    done = "trained" if trained else "played"
    return "\n".join([f"the plan, nothing was {done}:", *shown])


def line(name: str, text: str) -> Check:
    """A line of a plan that is no warning."""
    return Check(name, ok=True, found=text)


def of_training(config: TrainConfig, parts: Parts) -> Iterator[Check]:
    """The tasks of reinforcement learning, and one of its steps."""
    yield from of_playing(config, parts, [*parts.tasks.next(NUM_LOOKED_AT), *parts.heldout])
    r = config.rollout
    played = r.tasks_per_step * r.group_size
    sampled = played * r.max_sampled_tokens
    more = f", up to {1 + r.max_refills} times" if r.refill_below else ""
    yield line(
        "a step",
        f"{r.tasks_per_step} tasks x {r.group_size} = {played} rollouts{more}, at most "
        f"{sampled:,} sampled tokens, then one learner step",
    )


def of_steps(config: TrainConfig, resumed: Path | None) -> Check:
    """How long a run is."""
    done = resumed is not None and checkpoint.step_of(resumed) >= config.steps
    more = "; all are done: with a larger steps it goes on" if done else ""
    return line("the run", f"{config.steps} steps, saved every {config.save_every}{more}")


def of_playing(config: TrainConfig, parts: Parts, tasks: Sequence[Task]) -> Iterator[Check]:
    """Tasks, their prompts measured, and the room for what is played of them.

    Nothing is measured for a program: what it asks, and in how many conversations, is its own.
    """
    r, reward = config.rollout, parts.resolved.reward.kind
    turns = f"agent {config.agent.kind}, up to {r.max_turns} turns of {r.max_turn_tokens} tokens"
    yield line("data", f"{config.data.train}; {len(parts.heldout)} held-out tasks")
    asked = {task.id: holds_answer(task) for task in tasks}
    if (held := sum(asked.values())) and reward != "choice":  # whose letters always are
        found = f"{held} of {len(asked)} questions hold their expected answer word for word"
        remedy = "another data.question, unless the answer is to be found in it"
        yield Check("answers", 2 * held < len(asked), found, remedy)
    if (column := _options(tasks)) and reward in ("numeric", "math", "text"):
        remedy = "show the options in data.question, and reward.kind = 'choice' (docs/agents.md)"
        yield Check("answers", False, f"each answer is an index of column {column!r}", remedy)
    if parts.program:
        yield line("rollouts", f"{turns} in all")
        return
    prompts = [prompt_length(parts.agent, parts.chat, task) for task in tasks]
    longest = max(prompts)
    yield line("prompts", f"{min(prompts)} to {longest} tokens ({len(prompts)} looked at)")
    budget = r.max_turns * r.max_turn_tokens + (r.max_turns - 1) * r.max_observation_tokens
    yield line(
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


def _options(tasks: Sequence[Task]) -> str:
    """The column of lists of which every task's answer is an index; "" if there is none."""
    for column in tasks[0].spec:
        rows = [(task.spec.get(column), str(task.spec.get("answer"))) for task in tasks]
        if all(isinstance(o, list) and index in map(str, range(len(o))) for o, index in rows):
            return column
    return ""


def _model(config: TrainConfig, model: str, *, trained: bool, sampled: bool) -> Iterator[Check]:
    device = "cuda" if hardware.has_nvidia_gpu() else "cpu"
    total, free = (size / GIB for size in hardware.memory_bytes())
    host = f"{hardware.cpu_count()} cores, {free:.1f} of {total:.1f} GiB free"
    card = hardware.gpu_memory_bytes() if device == "cuda" else None
    named = f"{f'{card[0] / GIB:.0f} GiB ' if card else ''}NVIDIA GPU; host: "
    dtype = config.engine.dtype_on(device)
    yield line("device", f"{named if device == 'cuda' else 'CPU, '}{host}; {dtype}")
    held = footprint(config, shapes_at(model), trained=trained, sampled=sampled)
    changed = "of an adapter" if config.learner.lora.rank else "of them"
    much = f", {held.trained:,} {changed} trained" if trained else ""
    yield line("model", f"{Path(model).name}: {held.parameters:,} parameters{much}")


def _learning(config: TrainConfig, model: str) -> Iterator[Check]:
    """How the learner will compute, as the model's config.json tells."""
    # they import torch: the environment is set by now
    from agentgrpo.learn.forward_check import why_not_packed
    from agentgrpo.learn.policy import init_on_meta

    rows = why_not_packed(init_on_meta(model, "bfloat16"))
    yield line("prefixes", "trees" if rows is None else f"rows: {rows}")
    if (c := config.teacher).teaches:
        where = "asked row by row" if c.endpoint else "held in this process"
        who = f"{c.model}, {where}" if c.model else f"the policy, reading {c.feedback}"
        kept = f" (its average, decay {c.decay:g})" if c.average else ""
        cost = "one more forward pass over what a step sampled"
        if c.feedback == "errors":
            cost += ", or several: a rollout is read once for each turn with another text"
        yield line("teacher", f"{who}{kept}, weight {c.weight:g}: {cost}")


def _folder(out_dir: Path, saved: Sequence[str]) -> str:
    newest = newest_saved(out_dir, saved)
    if newest is not None:
        return f"continues from {newest.relative_to(out_dir)}"
    if (out_dir / "metrics.jsonl").exists():
        return "starts from the beginning, no checkpoint was saved there yet"
    return "new"

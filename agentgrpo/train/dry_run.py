"""The plan that `agentgrpo train CONFIG --dry-run` prints.

A dry run is a run that stops before it starts the engine: it makes the same checks, and neither
trains nor writes anything.
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
from agentgrpo.support.packages import gpu_tested_versions, installed, require
from agentgrpo.train.memory_estimate import GIB, footprint, room_checks, shapes_at
from agentgrpo.train.parts import Parts
from agentgrpo.train.prepare import prompt_length
from agentgrpo.types import Task

NUM_MEASURED = 256
"""Training tasks whose prompts a dry run measures."""


def format_plan(
    config: TrainConfig, parts: Parts, lines: Iterable[Check], *, trained: bool = True,
    sampled: bool = True, saved: Sequence[str] = (checkpoint.SAVED,),
) -> str:  # fmt: skip
    """The plan of a run as text: lines of `name  text`, and WARNING lines with a remedy.

    Args:
        config: of the run.
        parts: from prepare(), or prepare_run().
        lines: about the tasks that the command plays or trains on.
        trained: a learner will train.
        sampled: an engine will sample.
        saved: glob patterns below out_dir of what the command resumes from; empty if it does not.
    """
    jail = "not needed: the environment runs no code"
    if parts.jail is not None:
        jail = "{rung}, {memory_limit}, python {python}".format_map(parts.jail)
    teacher = parts.teacher if trained else None
    room = [*room_checks(config, parts.model, trained=trained, sampled=sampled, teacher=teacher)]
    require(room)
    checks = [
        *lines,
        *([gpu_tested_versions(installed())] if hardware.has_nvidia_gpu() else []),
        plan_line("sandbox", jail),
        *_model(config, parts.model, trained=trained, sampled=sampled),
        *(_learning(config, parts.model) if trained else ()),
        *room,
    ]
    if saved:
        checks.append(plan_line("out_dir", f"{config.out_dir}: {_folder(config.out_dir, saved)}"))
    texts = (
        f"  {check.name:10} {check.found}"
        if check.ok
        else f"  WARNING    {check.name}: {check.found}; remedy: {check.remedy}"
        for check in checks
    )
    return "\n".join([f"dry run, nothing was {'trained' if trained else 'played'}:", *texts])


def plan_line(name: str, text: str) -> Check:
    """A line of a plan that is no warning."""
    return Check(name, ok=True, found=text)


def training_lines(config: TrainConfig, parts: Parts) -> Iterator[Check]:
    """Lines about the training tasks and one training step."""
    yield from playing_lines(config, parts, [*parts.tasks.next(NUM_MEASURED), *parts.heldout])
    rollout = config.rollout
    num_rollouts = rollout.tasks_per_step * rollout.group_size
    tokens = num_rollouts * rollout.max_sampled_tokens
    refills = f", up to {1 + rollout.max_refills} times" if rollout.refill_below else ""
    yield plan_line(
        "a step",
        f"{rollout.tasks_per_step} tasks x {rollout.group_size} = {num_rollouts} "
        f"rollouts{refills}, at most {tokens:,} sampled tokens, then one learner step",
    )


def run_length_line(config: TrainConfig, resumed: Path | None) -> Check:
    """The line about the number of steps."""
    done = resumed is not None and checkpoint.step_of(resumed) >= config.steps
    more = "; all are done: set a larger `steps` to continue" if done else ""
    return plan_line("the run", f"{config.steps} steps, saved every {config.save_every}{more}")


def playing_lines(config: TrainConfig, parts: Parts, tasks: Sequence[Task]) -> Iterator[Check]:
    """Lines about the tasks, the lengths of their prompts and the token budget of a rollout.

    A program's prompts are not measured: it decides what to send, and in how many conversations.
    """
    r, reward = config.rollout, parts.resolved.reward.kind
    turns = f"agent {config.agent.kind}, up to {r.max_turns} turns of {r.max_turn_tokens} tokens"
    yield plan_line("data", f"{config.data.train}; {len(parts.heldout)} held-out tasks")
    reveals = {task.id: holds_answer(task) for task in tasks}
    # a multiple-choice question always contains the letters that are its answers
    if (num_revealed := sum(reveals.values())) and reward != "choice":
        found = (
            f"{num_revealed} of {len(reveals)} questions contain their expected answer literally"
        )
        remedy = "another data.question, unless finding the answer in it is the task"
        yield Check("answers", 2 * num_revealed < len(reveals), found, remedy)
    if (column := _options_column(tasks)) and reward in ("numeric", "math", "text"):
        remedy = "show the options in data.question, and reward.kind = 'choice' (docs/agents.md)"
        yield Check("answers", False, f"each answer is an index of column {column!r}", remedy)
    if parts.program:
        yield plan_line("rollouts", f"{turns} in all")
        return
    lengths = [prompt_length(parts.agent, parts.chat, task) for task in tasks]
    longest = max(lengths)
    yield plan_line("prompts", f"{min(lengths)} to {longest} tokens ({len(lengths)} measured)")
    budget = r.max_turns * r.max_turn_tokens + (r.max_turns - 1) * r.max_observation_tokens
    yield plan_line(
        "rollouts",
        f"{turns} and observations of {r.max_observation_tokens}: {budget} tokens after the prompt",
    )
    room = config.engine.max_model_len - longest
    yield Check(
        "context",
        room >= budget,
        f"engine.max_model_len = {config.engine.max_model_len} leaves {room} tokens after the "
        f"longest prompt{'' if room >= budget else ', so long rollouts are cut'}",
        f"set it to {longest + budget}",
    )


def _options_column(tasks: Sequence[Task]) -> str:
    """The column of lists into which every task's answer is an index; "" if there is none."""
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
    gpu = f"{f'{card[0] / GIB:.0f} GiB ' if card else ''}NVIDIA GPU; host: "
    dtype = config.engine.dtype_on(device)
    yield plan_line("device", f"{gpu if device == 'cuda' else 'CPU, '}{host}; {dtype}")
    size = footprint(config, shapes_at(model), trained=trained, sampled=sampled)
    whose = "of an adapter" if config.learner.lora.rank else "of them"
    share = f", {size.trained:,} {whose} trained" if trained else ""
    yield plan_line("model", f"{Path(model).name}: {size.parameters:,} parameters{share}")


def _learning(config: TrainConfig, model: str) -> Iterator[Check]:
    """Lines about the learner's forward pass and its teacher."""
    # here, not at the top: they import torch, and prepare_environment() must run before that
    from agentgrpo.learn.forward_check import why_not_packed
    from agentgrpo.learn.policy import init_on_meta

    rows = why_not_packed(init_on_meta(model, "bfloat16"))
    yield plan_line("prefixes", "trees" if rows is None else f"rows: {rows}")
    if (c := config.teacher).teaches:
        where = "queried row by row" if c.endpoint else "in this process"
        source = f"{c.model}, {where}" if c.model else f"the policy, reading {c.feedback}"
        average = f" (its average, decay {c.decay:g})" if c.average else ""
        cost = "one more forward pass over what a step sampled"
        if c.feedback == "errors":
            cost += ", or several: one per rollout for each turn with a different error"
        yield plan_line("teacher", f"{source}{average}, weight {c.weight:g}: {cost}")


def _folder(out_dir: Path, saved: Sequence[str]) -> str:
    newest = newest_saved(out_dir, saved)
    if newest is not None:
        return f"continues from {newest.relative_to(out_dir)}"
    if (out_dir / "metrics.jsonl").exists():
        return "starts from the beginning: it has no checkpoint yet"
    return "new"

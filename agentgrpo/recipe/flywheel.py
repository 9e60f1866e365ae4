"""Generate fine-tuning data with operators: `agentgrpo flywheel CONFIG [key=value ...]`.

Each question has a buffer of trajectories, which starts with one rollout of the policy. In each of
`rounds` rounds the best unused trajectory is taken (right before wrong, then fewest tool calls).
Every operator for its kind makes a new trajectory from it (recipe/operators.py), which is played to
its end with fresh tool results, and scored. out_dir/flywheel then contains

    buffer.jsonl      a line per finished question: all of its trajectories, and a log
    rollouts.jsonl    every trajectory, as a rollout record
    sft.jsonl         the fine-tuning set, which agentgrpo.recipe.sft reads
    summary.json      counts by operator, and of selected trajectories

The fine-tuning set has trajectories that are right ([measures] quality of at least 0.75) and well
formed (ended by an answer, no malformed turn), without duplicates, and per question at most
[flywheel] keep: those with the fewest tool calls, then with the fewest tokens.

Many questions run concurrently on one engine. After an interruption at any time, the same command
keeps finished questions and starts the others again. A question with an infrastructure error is
skipped, and started again by the next command. Sampling depends on the other requests in flight, so
two runs differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentgrpo.actions import InfrastructureError
from agentgrpo.config import BranchConfig
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.data.tasks import Tasks
from agentgrpo.engine.in_process import EngineLoop, endpoint_of
from agentgrpo.envs.runner import EpisodeRunner
from agentgrpo.models.endpoints import Endpoint
from agentgrpo.recipe.operators import (
    FOR_RIGHT,
    FOR_WRONG,
    Candidate,
    OperatorContext,
    OperatorSkipped,
)
from agentgrpo.recipe.processes import command, require_same_work
from agentgrpo.recipe.trajectories import Trajectory, TrajectoryPlayer
from agentgrpo.records.run_folder import lock_run_dir, require_folder
from agentgrpo.rewards.answer_quality import Quality, make_quality
from agentgrpo.support.atomic_files import (
    append_lines,
    complete_lines,
    read_lines,
    write_json,
    write_lines,
)
from agentgrpo.train.build import start_engine
from agentgrpo.train.command_line import Begin
from agentgrpo.train.dry_run import format_plan, plan_line, playing_lines
from agentgrpo.train.parts import Parts
from agentgrpo.train.prepare import prepare_run, training_stream
from agentgrpo.train.progress import Progress
from agentgrpo.types import Task

SAVED = ("flywheel/buffer.jsonl",)
"""Files below out_dir from which the command continues."""
MAY_CHANGE = (
    *("flywheel.tasks", "flywheel.concurrency", "flywheel.keep"),
    *("learner.lora.rank", "learner.trained_layers"),
)
"""Settings that may differ when the flywheel continues."""


class Question:
    """The work on one question."""

    def __init__(
        self, task: Task, context: OperatorContext, quality: Quality, operators: Executor, seed: int
    ) -> None:
        self.task, self._context, self._quality = task, context, quality
        self._operators, self._seed = operators, seed
        self.buffer: list[Trajectory] = []
        self.log: list[dict[str, Any]] = []

    def run(self) -> None:
        """Fill the buffer: one rollout, then in each round new ones from the best unused one."""
        self._add(self._context.player.play(self.task, operator="fresh"))
        used: set[int] = set()
        for number in range(self._context.config.rounds):
            unused = [index for index in range(len(self.buffer)) if index not in used]
            if not unused:
                return
            best = min(unused, key=lambda index: self.buffer[index].rank)
            used.add(best)
            self._run_round(number, best)

    def _run_round(self, number: int, index: int) -> None:
        """Apply every operator to one trajectory. The buffer keeps the operators' order."""
        operators = FOR_RIGHT if self.buffer[index].right else FOR_WRONG
        names = [name for name in self._context.config.operators if name in operators]
        futures = [
            self._operators.submit(self._apply_operator, name, number, index) for name in names
        ]
        for name, future in zip(names, futures, strict=True):
            trajectory, reason, seconds = future.result()
            entry = {"round": number, "operator": name, "parent": index, "seconds": seconds}
            if trajectory is None:
                self.log.append({**entry, "made": None, "why": reason})
            else:
                self.log.append({**entry, "made": len(self.buffer)})
                self._add(trajectory)

    def _apply_operator(
        self, name: str, number: int, index: int
    ) -> tuple[Trajectory | None, str, float]:
        started = time.perf_counter()
        trajectory, reason = None, ""
        candidate = Candidate(
            task=self.task,
            trajectory=self.buffer[index],
            index=index,
            rng=random.Random(f"{self._seed}/{self.task.id}/{number}/{name}"),
        )
        try:
            trajectory = {**FOR_RIGHT, **FOR_WRONG}[name](self._context, candidate)
        except OperatorSkipped as skipped:
            reason = str(skipped)
        except InfrastructureError as error:
            reason = f"infrastructure error: {error}"
        return trajectory, reason, time.perf_counter() - started

    def _add(self, trajectory: Trajectory) -> None:
        self.buffer.append(replace(trajectory, quality=self._quality(trajectory.rollout)))

    def record(self) -> dict[str, Any]:
        trajectories = [trajectory.record() for trajectory in self.buffer]
        return {"id": self.task.id, "trajectories": trajectories, "log": self.log}


def filter_trajectories(
    trajectories: Sequence[Mapping[str, Any]], keep: int
) -> list[Mapping[str, Any]]:
    """Select a question's records for the fine-tuning set (see the module's docstring)."""

    def cost(record: Mapping[str, Any]) -> tuple[float, int]:
        return (record["stats"]["tool_calls"], sum(map(len, _policy_tokens(record))))

    eligible = [r for r in trajectories if r["flywheel"]["right"] and r["flywheel"]["valid"]]
    contents: list[list[list[int]]] = []
    selected = []
    for record in sorted(eligible, key=cost):
        if _policy_tokens(record) not in contents:
            contents.append(_policy_tokens(record))
            selected.append(record)
    return selected[:keep]


def _policy_tokens(record: Mapping[str, Any]) -> list[list[int]]:
    """The tokens of the policy, whether it sampled them or a model wrote them for it."""
    segments_with_authors = zip(record["segments"], record["flywheel"]["authors"], strict=True)
    return [segment["token_ids"] for segment, author in segments_with_authors if author is not None]


def questions_of(recipe: RecipeConfig, stream: Tasks, *, write: bool) -> list[Task]:
    """Draw the tasks and compare settings and data with earlier work; with `write`, store them."""
    tasks, data = stream.next(recipe.flywheel.tasks), {"data.train": stream.state_dict()["source"]}
    if (num_ids := len({task.id for task in tasks})) != len(tasks):
        raise ValueError(
            f"flywheel.tasks: expected at most the number of different task ids in the data, "
            f"{num_ids}, got {len(tasks)}"
        )
    require_same_work(recipe, "flywheel", SAVED, may_change=MAY_CHANGE, data=data, write=write)
    return tasks


def process_questions(
    tasks: Sequence[Task],
    context: OperatorContext,
    quality: Quality,
    recipe: RecipeConfig,
    progress: Progress,
) -> dict[str, Any]:
    """Process every unfinished task, then write the results. Returns the summary.

    Runs on its own thread while another thread runs the engine.
    """
    folder, config = recipe.out_dir / "flywheel", recipe.flywheel
    buffer = folder / "buffer.jsonl"
    finished_ids = {json.loads(line)["id"] for line in complete_lines(buffer)}
    remaining = [task for task in tasks if task.id not in finished_ids]
    progress.print(f"flywheel: {len(tasks)} questions, {len(tasks) - len(remaining)} already done")
    failed = 0
    with (
        ThreadPoolExecutor(3 * config.concurrency, "operator") as operators,
        ThreadPoolExecutor(config.concurrency, "question") as threads,
    ):
        futures: dict[Future[None], Question] = {}
        for task in remaining:
            question = Question(task, context, quality, operators, recipe.seed)
            futures[threads.submit(question.run)] = question
        try:
            for number, future in enumerate(as_completed(futures), 1):
                question = futures.pop(future)
                position = f"{number}/{len(remaining)}  {question.task.id}"
                try:
                    future.result()
                except InfrastructureError as error:
                    progress.print(f"{position}: infrastructure error: {error}")
                    failed += 1
                    continue
                append_lines(buffer, [question.record()])
                right = sum(trajectory.right for trajectory in question.buffer)
                progress.print(f"{position}: {right} of {len(question.buffer)} trajectories right")
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    records = read_lines(buffer) if buffer.exists() else []
    return write_results(folder, records, config.keep, failed)


def write_results(
    folder: Path, records: Sequence[Mapping[str, Any]], keep: int, failed: int
) -> dict[str, Any]:
    """Write rollouts.jsonl, sft.jsonl and summary.json from the buffer. Returns the summary."""
    all_records = [item for record in records for item in record["trajectories"]]
    selected = [
        item for record in records for item in filter_trajectories(record["trajectories"], keep)
    ]
    infos = [item["flywheel"] for item in all_records]
    summary = {
        "questions": len(records),
        "failed_by_the_machine": failed,
        "trajectories": len(infos),
        "right": sum(item["right"] for item in infos),
        "right_and_valid": sum(item["right"] and item["valid"] for item in infos),
        "kept": len(selected),
        "rule": f"right, valid, different, at most {keep} of a question by calls, then by tokens",
        "operators": {
            name: {
                "made": sum(item["operator"] == name for item in infos),
                "right": sum(item["operator"] == name and item["right"] for item in infos),
                "kept": sum(item["flywheel"]["operator"] == name for item in selected),
            }
            for name in dict.fromkeys(item["operator"] for item in infos)
        },
        "nothing_made": Counter(
            entry["operator"] for record in records for entry in record["log"] if "why" in entry
        ),
    }
    write_lines(folder / "rollouts.jsonl", all_records)
    write_lines(folder / "sft.jsonl", selected)
    write_json(folder / "summary.json", summary)
    return summary


def run_flywheel(recipe: RecipeConfig, parts: Parts, tasks: Sequence[Task]) -> Any:
    """Run the flywheel on a started engine. Returns the summary."""
    config = recipe.flywheel
    loop = EngineLoop(parts.engine)
    limits = recipe.rollout.model_copy(
        update={
            "max_turns": recipe.rollout.max_turns + config.extra_turns,
            "temperature": config.temperature,
            "branching": BranchConfig(),
            "history": "append",
            "max_retries": 0,
        }
    )

    def endpoint(name: str) -> Endpoint:
        return endpoint_of(parts.models[name], loop, parts.chat)

    judge = endpoint(recipe.measures.judge) if recipe.measures.judge else None
    quality = make_quality(recipe.measures.quality, weight=recipe.reward.answer, judge=judge)
    runner = EpisodeRunner(3 * config.concurrency, recipe.rollout.call_timeout_s)
    context = OperatorContext(
        player=TrajectoryPlayer(
            loop, parts.agent, parts.env, parts.chat, parts.reward, runner, limits
        ),
        reflector=endpoint(config.reflector),
        critic=endpoint(config.critic),
        config=config,
    )
    return loop.serve_while(
        partial(process_questions, tasks, context, quality, recipe, parts.progress)
    )


def check(recipe: RecipeConfig) -> None:
    """Check the settings. Raises ValueError if the flywheel cannot run with them."""
    if recipe.agent.kind == "program":
        raise ValueError(
            "agent.kind: expected another kind than 'program', since a flywheel continues rollouts "
            "from the middle"
        )
    recipe.require_sessions()
    require_folder(recipe.out_dir)


def run_command(recipe: RecipeConfig, args: argparse.Namespace, begin: Begin) -> None:
    """Run the flywheel, or print the plan of a dry run."""
    check(recipe)
    with contextlib.ExitStack() as undo:
        if not args.dry_run:
            undo.enter_context(lock_run_dir(recipe.out_dir / "flywheel"))
        parts = prepare_run(recipe, trained=False)
        undo.callback(parts.close)
        tasks = questions_of(recipe, training_stream(recipe, parts), write=not args.dry_run)
        if args.dry_run:
            c = recipe.flywheel
            work = f"{c.tasks} questions, {c.rounds} rounds of {', '.join(c.operators)}"
            lines = [*playing_lines(recipe, parts, tasks), plan_line("flywheel", work)]
            print(format_plan(recipe, parts, lines, trained=False, saved=SAVED))
            return
        start_engine(recipe, parts)
        begin()
        summary = run_flywheel(recipe, parts, tasks)
        parts.progress.print(f"kept {summary['kept']} of {summary['trajectories']} trajectories")


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit status."""
    return command("flywheel", __doc__, arguments, run_command, saved=SAVED)

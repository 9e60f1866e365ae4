"""The self-evolving data flywheel: `agentgrpo flywheel CONFIG [key=value ...]`.

For each question a buffer of trajectories grows from one attempt of the policy. `rounds` times the
best one not yet used is taken (right before wrong, then with the fewest tool calls) and every
operator of its kind makes a new one of it (recipe/operators.py); each new one is played to its end
with fresh results of its tools, and judged. out_dir/flywheel then holds

    buffer.jsonl      a line per question as it is finished: all of its trajectories, and a log
    rollouts.jsonl    every trajectory, as a rollout record
    sft.jsonl         the fine-tuning set, which agentgrpo.recipe.sft reads
    summary.json      counts by operator, what the filter let through

Into the fine-tuning set go trajectories that are right (by [measures] quality, at least 0.75) and
well formed (ended by answering, no malformed turn), no two of a question saying the same, of each
question at most [flywheel] keep: those with the fewest tool calls, then with the fewest tokens.

Many questions are worked on at once, all on one engine. Kill it at any moment and repeat the
command: finished questions stay, the others begin again. A question that the machine failed at is
left out and begins again next time. Sampling depends on what else is in flight: two runs differ.
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
"""What it continues from."""
MAY_CHANGE = (
    *("flywheel.tasks", "flywheel.concurrency", "flywheel.keep"),
    *("learner.lora.rank", "learner.trained_layers"),
)
"""Settings of the flywheel that may be otherwise when it goes on."""


class Question:
    """The work on one question."""

    def __init__(
        self, task: Task, context: OperatorContext, quality: Quality, operators: Executor, seed: int
    ) -> None:
        self.task, self._context, self._quality = task, context, quality
        self._operators, self._seed = operators, seed
        self.buffer: list[Trajectory] = []
        self.log: list[dict[str, Any]] = []

    def work(self) -> None:
        """Fill the buffer: an attempt, then in each round what is made of the best not yet used."""
        self._take(self._context.player.play(self.task, operator="fresh"))
        used: set[int] = set()
        for number in range(self._context.config.rounds):
            unused = [index for index in range(len(self.buffer)) if index not in used]
            if not unused:
                return
            best = min(unused, key=lambda index: self.buffer[index].rank)
            used.add(best)
            self._round(number, best)

    def _round(self, number: int, index: int) -> None:
        """Apply every operator to one trajectory; new ones enter the buffer in operators' order."""
        table = FOR_RIGHT if self.buffer[index].right else FOR_WRONG
        names = [name for name in self._context.config.operators if name in table]
        asked = [self._operators.submit(self._make, name, number, index) for name in names]
        for name, future in zip(names, asked, strict=True):
            made, why, seconds = future.result()
            entry = {"round": number, "operator": name, "parent": index, "seconds": seconds}
            if made is None:
                self.log.append({**entry, "made": None, "why": why})
            else:
                self.log.append({**entry, "made": len(self.buffer)})
                self._take(made)

    def _make(self, name: str, number: int, index: int) -> tuple[Trajectory | None, str, float]:
        started = time.perf_counter()
        made, why = None, ""
        chosen = Candidate(
            task=self.task,
            trajectory=self.buffer[index],
            index=index,
            rng=random.Random(f"{self._seed}/{self.task.id}/{number}/{name}"),
        )
        try:
            made = {**FOR_RIGHT, **FOR_WRONG}[name](self._context, chosen)
        except OperatorSkipped as reason:
            why = str(reason)
        except InfrastructureError as error:
            why = f"the machine failed: {error}"
        return made, why, time.perf_counter() - started

    def _take(self, trajectory: Trajectory) -> None:
        self.buffer.append(replace(trajectory, quality=self._quality(trajectory.rollout)))

    def record(self) -> dict[str, Any]:
        """A line of buffer.jsonl."""
        trajectories = [one.record() for one in self.buffer]
        return {"id": self.task.id, "trajectories": trajectories, "log": self.log}


def filter_trajectories(
    trajectories: Sequence[Mapping[str, Any]], keep: int
) -> list[Mapping[str, Any]]:
    """Records of one question that go into the fine-tuning set; see the module's docstring."""

    def cost(record: Mapping[str, Any]) -> tuple[float, int]:
        return (record["stats"]["tool_calls"], sum(map(len, _learned(record))))

    good = [r for r in trajectories if r["flywheel"]["right"] and r["flywheel"]["valid"]]
    said: list[list[list[int]]] = []
    chosen = []
    for record in sorted(good, key=cost):
        if _learned(record) not in said:
            said.append(_learned(record))
            chosen.append(record)
    return chosen[:keep]


def _learned(record: Mapping[str, Any]) -> list[list[int]]:
    """The tokens that somebody wrote for the policy, and its own."""
    written = zip(record["segments"], record["flywheel"]["authors"], strict=True)
    return [segment["token_ids"] for segment, author in written if author is not None]


def questions_of(recipe: RecipeConfig, stream: Tasks, *, write: bool) -> list[Task]:
    """The tasks that are worked on; settings and data are written, or else only compared."""
    tasks, data = stream.next(recipe.flywheel.tasks), {"data.train": stream.state_dict()["source"]}
    if (differ := len({task.id for task in tasks})) != len(tasks):
        raise ValueError(
            f"flywheel.tasks: {len(tasks)} are asked for, and the data has {differ} that have "
            "different ids"
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
    """Work on every task that is not done, then write the results; returns the summary.

    Called from a thread of its own while the engine is served by another.
    """
    folder, config = recipe.out_dir / "flywheel", recipe.flywheel
    buffer = folder / "buffer.jsonl"
    done = {json.loads(line)["id"] for line in complete_lines(buffer)}
    left = [task for task in tasks if task.id not in done]
    progress.print(f"flywheel: {len(tasks)} questions, {len(tasks) - len(left)} done before")
    failed = 0
    with (
        ThreadPoolExecutor(3 * config.concurrency, "operator") as operators,
        ThreadPoolExecutor(config.concurrency, "question") as threads,
    ):
        futures: dict[Future[None], Question] = {}
        for task in left:
            question = Question(task, context, quality, operators, recipe.seed)
            futures[threads.submit(question.work)] = question
        try:
            for number, future in enumerate(as_completed(futures), 1):
                question = futures.pop(future)
                place = f"{number}/{len(left)}  {question.task.id}"
                try:
                    future.result()
                except InfrastructureError as error:
                    progress.print(f"{place}: the machine failed: {error}")
                    failed += 1
                    continue
                append_lines(buffer, [question.record()])
                right = sum(one.right for one in question.buffer)
                progress.print(f"{place}: {right} of {len(question.buffer)} trajectories right")
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    records = read_lines(buffer) if buffer.exists() else []
    return write_results(folder, records, config.keep, failed)


def write_results(
    folder: Path, records: Sequence[Mapping[str, Any]], keep: int, failed: int
) -> dict[str, Any]:
    """rollouts.jsonl, sft.jsonl and summary.json from the buffer's records; returns the summary."""
    everything = [one for record in records for one in record["trajectories"]]
    chosen = [
        one for record in records for one in filter_trajectories(record["trajectories"], keep)
    ]
    made = [one["flywheel"] for one in everything]
    summary = {
        "questions": len(records),
        "failed_by_the_machine": failed,
        "trajectories": len(made),
        "right": sum(one["right"] for one in made),
        "right_and_valid": sum(one["right"] and one["valid"] for one in made),
        "kept": len(chosen),
        "rule": f"right, valid, different, at most {keep} of a question by calls, then by tokens",
        "operators": {
            name: {
                "made": sum(one["operator"] == name for one in made),
                "right": sum(one["operator"] == name and one["right"] for one in made),
                "kept": sum(one["flywheel"]["operator"] == name for one in chosen),
            }
            for name in dict.fromkeys(one["operator"] for one in made)
        },
        "nothing_made": Counter(
            entry["operator"] for record in records for entry in record["log"] if "why" in entry
        ),
    }
    write_lines(folder / "rollouts.jsonl", everything)
    write_lines(folder / "sft.jsonl", chosen)
    write_json(folder / "summary.json", summary)
    return summary


def run_flywheel(recipe: RecipeConfig, parts: Parts, tasks: Sequence[Task]) -> Any:
    """Run the flywheel on an engine; returns the summary."""
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

    def named(name: str) -> Endpoint:
        return endpoint_of(parts.models[name], loop, parts.chat)

    judge = named(recipe.measures.judge) if recipe.measures.judge else None
    quality = make_quality(recipe.measures.quality, weight=recipe.reward.answer, judge=judge)
    runner = EpisodeRunner(3 * config.concurrency, recipe.rollout.call_timeout_s)
    context = OperatorContext(
        player=TrajectoryPlayer(
            loop, parts.agent, parts.env, parts.chat, parts.reward, runner, limits
        ),
        reflector=named(config.reflector),
        critic=named(config.critic),
        config=config,
    )
    return loop.serve_while(
        partial(process_questions, tasks, context, quality, recipe, parts.progress)
    )


def check(recipe: RecipeConfig) -> None:
    """Refuse settings that no flywheel can turn with."""
    if recipe.agent.kind == "program":
        raise ValueError(
            "agent.kind: a flywheel takes attempts up in the middle, and 'program' plays its own "
            "turns: expected another kind"
        )
    recipe.require_sessions()
    require_folder(recipe.out_dir)


def run(recipe: RecipeConfig, args: argparse.Namespace, begin: Begin) -> None:
    """Turn the flywheel, or say what it would do."""
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
            lines = [*playing_lines(recipe, parts, tasks), plan_line("the work", work)]
            print(format_plan(recipe, parts, lines, trained=False, saved=SAVED))  # noqa: T201
            return
        start_engine(recipe, parts)
        begin()
        made = run_flywheel(recipe, parts, tasks)
        parts.progress.print(f"kept {made['kept']} of {made['trajectories']} trajectories")


def main(arguments: list[str]) -> int:
    """Parse the command line, run the flywheel. Returns the exit status."""
    return command("flywheel", __doc__, arguments, run, saved=SAVED)

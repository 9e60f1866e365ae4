"""Makes the training stream and the held-out tasks from [data]."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from agentgrpo.config import DataConfig
from agentgrpo.config.read import did_you_mean
from agentgrpo.config.section import forbid_unused
from agentgrpo.data import word_problems
from agentgrpo.data.files import is_from_hub, read_tasks
from agentgrpo.data.tasks import RowTasks, Tasks, WordProblemTasks
from agentgrpo.envs.base import Environment
from agentgrpo.support.user_calls import WrongResult, user_call
from agentgrpo.types import Task

NAMES = ("word_problems", "env", "split")


def training_tasks(
    config: DataConfig, seed: int, env: Environment | None = None, *, answers: bool = True
) -> Tasks:
    """The stream of training tasks, without the rows that data.heldout = "split" holds out."""
    require_used(config)
    if config.train == "word_problems":
        return WordProblemTasks(seed)
    rows = rows_of(config, "train", env, answers=answers, seed=seed)
    if config.heldout_source == "split":
        return rows.split(config.num_heldout)[1]
    return rows


def heldout_tasks(
    config: DataConfig, env: Environment | None = None, *, answers: bool = True
) -> list[Task]:
    """The held-out tasks in order; arguments and errors as in training_tasks()."""
    require_used(config)
    if config.heldout_source == "word_problems":
        return [word_problems.task("heldout", index) for index in range(config.num_heldout)]
    if config.heldout_source == "split":
        rows = rows_of(config, "train", env, answers=answers)
        return rows.split(config.num_heldout)[0]
    return rows_of(config, "heldout", env, answers=answers).rows[: config.num_heldout]


def require_used(config: DataConfig) -> None:
    """Raise ValueError for settings of Hub datasets if no Hub dataset is named."""
    train, heldout = (
        name not in NAMES and is_from_hub(name) for name in (config.train, config.heldout_source)
    )
    hub = "with a Hub dataset (owner/name)"
    forbid_unused(
        config,
        (
            ("split", f"data.train {hub}", lambda _: train),
            ("heldout_split", f"data.heldout {hub}", lambda _: heldout),
            ("subset", f"data.train or data.heldout {hub}", lambda _: train or heldout),
        ),
        section="data.",
    )


def rows_of(
    config: DataConfig,
    key: Literal["train", "heldout"],
    env: Environment | None,
    *,
    answers: bool,
    seed: int = 0,
) -> RowTasks:
    """All rows of a finite source."""
    name = config.train if key == "train" else config.heldout_source
    if name == "env":
        return RowTasks(_env_tasks(env, key), source=f"{type(env).__name__}, {key}", seed=seed)
    if not Path(name).exists() and not Path(name).suffix and "/" not in name:
        raise ValueError(
            f"data.{key}: expected word_problems, env, a .jsonl or .parquet file, a directory "
            "written by save_to_disk or owner/name on the Hub, got "
            f"{name!r}{did_you_mean(name, NAMES)}"
        )
    try:
        rows = read_tasks(
            name, question=config.question, answer=config.answer, answered=answers, id=config.id,
            drop_last=config.drop_last_message, columns=config.columns, subset=config.subset,
            seed=seed, split=config.split if key == "train" else config.heldout_split,
        )  # fmt: skip
    except OSError as error:
        raise type(error)(f"data.{key}: {error}") from None
    begin = getattr(env, "begin", None)
    if begin is not None:
        rows.rows = [_begin_task(begin, task) for task in rows.rows]
    return rows


def _begin_task(begin: Callable[[Task], Any], task: Task) -> Task:
    with user_call(begin, task=task.id):
        result = begin(task)
        if not isinstance(result, Task):
            raise WrongResult(f"expected a Task, got {result!r:.80}")
    return result


def _env_tasks(env: Environment | None, split: str) -> Sequence[Task]:
    tasks_of = getattr(env, "tasks", None)
    if tasks_of is None:
        raise ValueError(
            f"data.{split}: expected a file, since the environment ({type(env).__name__}) has no "
            "tasks of its own, got 'env'"
        )
    with user_call(tasks_of):
        result = tasks_of(split)
        if isinstance(result, str | bytes) or not isinstance(result, Iterable):
            raise WrongResult(f"expected tasks, got {result!r:.80}")
        tasks = [*result]
        wrong = [task for task in tasks if not isinstance(task, Task)]
        if wrong or not tasks:
            got = f"{wrong[0]!r:.80} among them" if wrong else "none"
            raise WrongResult(f"expected tasks for {split!r}, got {got}")
    return tasks

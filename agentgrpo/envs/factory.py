"""Environments as classes whose public methods are tools, as in TRL's environment_factory.

    class Counter:
        def reset(self, **row) -> str | None: ...   # a text is added to the question
        def add(self, n: int) -> int: ...           # a tool
        def get_reward(self) -> float: ...          # optional: the environment's own reward

One instance per rollout, so that nothing is shared between the members of a group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from agentgrpo.actions import Action, Observation, Schema
from agentgrpo.config.read import load_callable
from agentgrpo.envs.base import Episode
from agentgrpo.envs.runner import LOOP
from agentgrpo.envs.tools import Tool, Toolset, calls_of, observed, require_same
from agentgrpo.support.user_calls import as_number, run_sync
from agentgrpo.types import Task

NOT_TOOLS = ("reset", "get_reward", "close", "tasks")
NOT_SHOWN = "\0"
"""In place of what reset returned: the task's prompt was not made by begin()."""


class FactoryEnv:
    """Episodes of a user's class.

    Args:
        factory: the class, or `module:Class`; called without arguments for every rollout. Public
            methods but reset, get_reward, close and tasks are tools; they may be coroutines. An
            attribute `done` that becomes true ends the episode, an attribute `answer` is then what
            was answered, and no further call of the turn is made. A static or class method
            `tasks(split)` may give the tasks, as rows.

    Raises:
        ValueError: the class has no public methods, or one has a parameter without annotation.
    """

    answers = ("tools",)
    judges: bool | None = None
    """Whether the class has get_reward."""

    def __init__(self, factory: Callable[[], Any] | str) -> None:
        if isinstance(factory, str):
            factory = load_callable(factory, key="env.options.factory")
        self._factory = factory
        self._first = first = factory()  # tells of every task, and is played with by none
        self._openings: dict[tuple[str, str], str | None] = {}
        """What reset said of each task, by its id and its last message."""
        self.judges = hasattr(first, "get_reward")
        self._schemas = Toolset(_tools(first)).schemas
        if not self._schemas:
            raise ValueError(f"factory: {factory} has no public methods, so no tools")

    def tools(self, task: Task) -> Sequence[Schema]:
        return self._schemas

    def tasks(self, split: str) -> Sequence[Task]:
        """The class's own rows; what reset says of each is shown at the end of its question."""
        give = getattr(self._factory, "tasks", None)
        if give is None:
            raise ValueError("env.options.factory: the class has no tasks(split)")
        return [self.task(f"{split}/{i}", row) for i, row in enumerate(give(split))]

    def task(self, id: str, row: Mapping[str, Any]) -> Task:
        """A task from a row: its `question`, with what reset says; the whole row is the spec."""
        asked = {"role": "user", "content": str(row.get("question", ""))}
        return self.begin(Task(id=id, messages=(asked,), spec=dict(row)))

    def begin(self, task: Task) -> Task:
        """The task with what reset says of it at the end of its last message."""
        opening, again = _reset(self._first, task.spec), FactoryEpisode(self._factory(), task)
        try:
            again.begin(opening)
        finally:
            again.close()
        *before, last = task.messages
        content = "\n\n".join(text for text in (last["content"], opening) if text)
        self._openings[task.id, content] = opening
        return replace(task, messages=(*before, {**last, "content": content}))

    def reset(self, task: Task) -> FactoryEpisode:
        """A new instance; its reset runs before its first step."""
        shown = self._openings.get((task.id, task.messages[-1]["content"]), NOT_SHOWN)
        return FactoryEpisode(self._factory(), task, shown)


def _tools(instance: Any) -> list[Tool]:
    names = [name for name in dir(instance) if not name.startswith("_") and name not in NOT_TOOLS]
    found = {
        name: getattr(instance, name, None) for name in names if not _is_property(instance, name)
    }
    return [Tool(value, name) for name, value in found.items() if inspect.isroutine(value)]


def _is_property(instance: Any, name: str) -> bool:
    """Whether to read an attribute runs the user's code, which may need reset() first."""
    return isinstance(inspect.getattr_static(instance, name, None), property | cached_property)


def _reset(instance: Any, row: Mapping[str, Any]) -> str | None:
    said = instance.reset(**row) if hasattr(instance, "reset") else None
    if inspect.iscoroutine(said):
        said.close()
        name = type(instance).__name__
        raise ValueError(f"factory: {name}: reset runs before the loop does: no coroutine")
    return None if said is None else str(said)


class FactoryEpisode(Episode):
    """An instance of the class; its reset runs before all else."""

    def __init__(self, instance: Any, task: Task, shown: str | None = NOT_SHOWN) -> None:
        self._toolset = Toolset(_tools(instance))
        self.environment, self._task, self._shown = instance, task, shown
        """The instance, which reward functions in TRL's form may ask for."""
        self._begun = False

    def begin(self, shown: str | None) -> None:
        """Reset the instance once; it must return what the prompt shows."""
        if not self._begun:
            self._begun, name = True, type(self.environment).__name__
            opening = _reset(self.environment, self._task.spec)
            if shown != NOT_SHOWN:
                require_same(f"factory: {name}.reset({self._task.id})", shown, opening, "the row")

    def _call(self, name: str) -> Any:
        """A method of the instance, if it has one."""
        return run_sync(getattr(self.environment, name, dict)(), LOOP)

    def step(self, action: Action) -> Observation:
        """Call the methods of a turn in their order, until one ends the episode."""
        self.begin(self._shown)
        answers = []
        for call in calls_of(action):
            answers.append(self._toolset.call(call))
            if getattr(self.environment, "done", False):
                answer = getattr(self.environment, "answer", None)
                answer = None if answer is None else str(answer)
                return replace(observed(answers), done=True, answer=answer)
        return observed(answers)

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """What get_reward says: a number (part `environment`) or named parts."""
        self.begin(self._shown)
        value = self._call("get_reward")
        if isinstance(value, Mapping):
            return value
        number = as_number(value)
        if number is None:
            name = type(self.environment).__name__
            raise TypeError(f"{name}.get_reward: expected a number or named parts, got {value!r}")
        return {"environment": number}

    def close(self) -> None:
        self._call("close")

"""Environments as classes whose public methods are tools, as in TRL's environment_factory.

    class Counter:
        def reset(self, **row) -> str | None: ...   # a text is appended to the question
        def add(self, n: int) -> int: ...           # a tool
        def get_reward(self) -> float: ...          # optional: the environment's reward

Each rollout has its own instance, so the rollouts of a group share no state.
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
from agentgrpo.envs.tools import Tool, Toolset, calls_of, observation_of, require_same
from agentgrpo.support.user_calls import as_number, run_sync
from agentgrpo.types import Task

NOT_TOOLS = ("reset", "get_reward", "close", "tasks")
UNKNOWN = "\0"
"""Stands for the text of reset() if begin() did not make the task's prompt."""


class FactoryEnv:
    """Episodes of a user's class.

    Args:
        factory: the class, or `module:Class`; called without arguments for every rollout. All
            public methods except reset, get_reward, close and tasks are tools; they may be
            coroutines. If an attribute `done` becomes true, the episode ends with the attribute
            `answer` as its answer, and the remaining calls of the turn are skipped. A static or
            class method `tasks(split)` may return the tasks as rows.

    Raises:
        ValueError: the class has no public methods, or a method's parameter has no annotation.
    """

    answers = ("tools",)
    judges: bool | None = None
    """Whether the class has get_reward."""

    def __init__(self, factory: Callable[[], Any] | str) -> None:
        if isinstance(factory, str):
            factory = load_callable(factory, key="env.options.factory")
        self._factory = factory
        self._probe = probe = factory()  # resets every task for its prompt; no rollout uses it
        self._openings: dict[tuple[str, str], str | None] = {}
        """Text of reset() for each task, by the task's id and last message."""
        self.judges = hasattr(probe, "get_reward")
        self._schemas = Toolset(_tools(probe)).schemas
        if not self._schemas:
            raise ValueError(f"factory: {factory} has no public methods, so no tools")

    def tools(self, task: Task) -> Sequence[Schema]:
        return self._schemas

    def tasks(self, split: str) -> Sequence[Task]:
        """Make tasks from the class's rows, with the text of reset() appended to the questions."""
        make_rows = getattr(self._factory, "tasks", None)
        if make_rows is None:
            raise ValueError("env.options.factory: the class has no tasks(split)")
        return [self.task(f"{split}/{i}", row) for i, row in enumerate(make_rows(split))]

    def task(self, id: str, row: Mapping[str, Any]) -> Task:
        """Make a task from a row: its `question` plus the text of reset(). The row is the spec."""
        question = {"role": "user", "content": str(row.get("question", ""))}
        return self.begin(Task(id=id, messages=(question,), spec=dict(row)))

    def begin(self, task: Task) -> Task:
        """Append the text of reset() to the task's last message.

        Two instances are reset, to detect a class that returns another text each time.
        """
        opening, second = (_reset(self._probe, task.spec), FactoryEpisode(self._factory(), task))
        try:
            second.begin(opening)
        finally:
            second.close()
        *before, last = task.messages
        content = "\n\n".join(text for text in (last["content"], opening) if text)
        self._openings[task.id, content] = opening
        return replace(task, messages=(*before, {**last, "content": content}))

    def reset(self, task: Task) -> FactoryEpisode:
        text = self._openings.get((task.id, task.messages[-1]["content"]), UNKNOWN)
        return FactoryEpisode(self._factory(), task, text)


def _tools(instance: Any) -> list[Tool]:
    names = [name for name in dir(instance) if not name.startswith("_") and name not in NOT_TOOLS]
    members = {
        name: getattr(instance, name, None) for name in names if not _is_property(instance, name)
    }
    return [Tool(value, name) for name, value in members.items() if inspect.isroutine(value)]


def _is_property(instance: Any, name: str) -> bool:
    """Whether reading the attribute runs user code, which may need reset() first."""
    return isinstance(inspect.getattr_static(instance, name, None), property | cached_property)


def _reset(instance: Any, row: Mapping[str, Any]) -> str | None:
    text = instance.reset(**row) if hasattr(instance, "reset") else None
    if inspect.iscoroutine(text):
        text.close()
        name = type(instance).__name__
        raise ValueError(
            f"factory: {name}.reset: expected a function, got a coroutine function. It runs before "
            "the event loop does"
        )
    return None if text is None else str(text)


class FactoryEpisode(Episode):
    """One instance of the class. Its reset() runs before everything else."""

    def __init__(self, instance: Any, task: Task, prompt_text: str | None = UNKNOWN) -> None:
        self._toolset = Toolset(_tools(instance))
        self.environment, self._task, self._prompt_text = instance, task, prompt_text
        """The instance, which reward functions with TRL's signature may use."""
        self._begun = False

    def begin(self, prompt_text: str | None) -> None:
        """Reset the instance once. It must return the text that the prompt shows."""
        if not self._begun:
            self._begun, name = True, type(self.environment).__name__
            opening = _reset(self.environment, self._task.spec)
            if prompt_text != UNKNOWN:
                require_same(
                    f"factory: {name}.reset({self._task.id})", prompt_text, opening, "the row"
                )

    def _call(self, name: str) -> Any:
        return run_sync(getattr(self.environment, name, dict)(), LOOP)

    def step(self, action: Action) -> Observation:
        self.begin(self._prompt_text)
        results = []
        for call in calls_of(action):
            results.append(self._toolset.call(call))
            if getattr(self.environment, "done", False):
                answer = getattr(self.environment, "answer", None)
                answer = None if answer is None else str(answer)
                return replace(observation_of(results), done=True, answer=answer)
        return observation_of(results)

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """The value of get_reward(): a number (part `environment`) or named parts."""
        self.begin(self._prompt_text)
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

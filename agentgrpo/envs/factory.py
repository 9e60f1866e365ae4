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
from agentgrpo.envs.runner import LOOP, settled
from agentgrpo.envs.tools import AsyncToolEpisode, Tool, ToolEpisode, Toolset, calls_of, observed
from agentgrpo.types import Task, as_number
from agentgrpo.usercode import waited

NOT_TOOLS = ("reset", "get_reward", "close", "tasks")


class FactoryEnv:
    """Episodes of a user's class.

    Args:
        factory: the class, or `module:Class`; called without arguments for every rollout. Public
            methods but reset, get_reward, close and tasks are tools; they may be coroutines. An
            attribute `done` that becomes true ends the episode, an attribute `answer` is then what
            was answered, and no further call of the turn is made; where any method is a coroutine
            the calls of a turn run at once, so that each runs whatever another ends. A static or
            class method `tasks(split)` may give the tasks, as rows.

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
        self.judges = hasattr(first, "get_reward")
        self._schemas = Toolset(_tools(first)).schemas
        if not self._schemas:
            raise ValueError(f"factory: {factory} has no public methods, so no tools")

    def tools(self, task: Task) -> Sequence[Schema]:
        """The public methods."""
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
        opening = _reset(self._first, task.spec)
        *before, last = task.messages
        content = "\n\n".join(text for text in (last["content"], opening) if text)
        return replace(task, messages=(*before, {**last, "content": content}))

    def reset(self, task: Task) -> FactoryEpisode | AsyncFactoryEpisode:
        """A new instance; its reset runs before its first step."""
        world = self._factory()
        toolset = Toolset(_tools(world))
        others = [getattr(world, name, None) for name in ("get_reward", "close")]
        waits = toolset.any_async or any(map(inspect.iscoroutinefunction, others))
        return (AsyncFactoryEpisode if waits else FactoryEpisode)(world, toolset, task)


def _tools(world: Any) -> list[Tool]:
    names = [name for name in dir(world) if not name.startswith("_") and name not in NOT_TOOLS]
    found = {name: getattr(world, name, None) for name in names if not _is_property(world, name)}
    return [Tool(value, name) for name, value in found.items() if inspect.isroutine(value)]


def _is_property(world: Any, name: str) -> bool:
    """Whether to read an attribute runs the user's code, which may need reset() first."""
    return isinstance(inspect.getattr_static(world, name, None), property | cached_property)


def _reset(world: Any, row: Mapping[str, Any]) -> str | None:
    said = world.reset(**row) if hasattr(world, "reset") else None
    if inspect.iscoroutine(said):
        said.close()
        name = type(world).__name__
        raise ValueError(f"factory: {name}: reset runs before the loop does: no coroutine")
    return None if said is None else str(said)


class _World:
    """What both kinds of episode share."""

    def __init__(self, world: Any, toolset: Toolset, task: Task) -> None:
        self.toolset = toolset
        self.environment, self._spec = world, task.spec
        """The instance, which reward functions in TRL's form may ask for."""
        self._begun = False

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            _reset(self.environment, self._spec)

    def _is_done(self) -> bool:
        return bool(getattr(self.environment, "done", False))

    def _after(self, observation: Observation) -> Observation:
        if not self._is_done():
            return observation
        answer = getattr(self.environment, "answer", None)
        return replace(observation, done=True, answer=None if answer is None else str(answer))

    def _call(self, name: str) -> Any:
        """A method of the instance, if it has one."""
        return getattr(self.environment, name, dict)()

    def _rewards(self, value: Any) -> Mapping[str, float]:
        if isinstance(value, Mapping):
            return value
        number = as_number(value)
        if number is None:
            name = type(self.environment).__name__
            raise TypeError(f"{name}.get_reward: expected a number or named parts, got {value!r}")
        return {"environment": number}


class FactoryEpisode(_World, ToolEpisode):
    """An instance whose tools block."""

    def step(self, action: Action) -> Observation:
        """Call the methods of a turn in their order, until one ends the episode."""
        self._begin()
        answers = []
        for call in calls_of(action):
            answers.append(self.toolset.call(call))
            if self._is_done():
                break
        return self._after(observed(answers))

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """What get_reward says: a number (part `environment`) or named parts."""
        self._begin()
        return self._rewards(waited(self._call("get_reward"), LOOP))

    def close(self) -> None:
        """The instance's own close, if it has one."""
        waited(self._call("close"), LOOP)


class AsyncFactoryEpisode(_World, AsyncToolEpisode):
    """An instance of which something is a coroutine: a turn's calls run at once."""

    async def step(self, action: Action) -> Observation:
        """Call the methods of a turn at once; answers keep their order."""
        self._begin()
        return self._after(await super().step(action))

    async def finish(self, answer: str | None) -> Mapping[str, float]:
        """What get_reward says, awaited if it is a coroutine."""
        self._begin()
        return self._rewards(await settled(self._call("get_reward")))

    async def close(self) -> None:
        """The instance's own close, if it has one."""
        await settled(self._call("close"))

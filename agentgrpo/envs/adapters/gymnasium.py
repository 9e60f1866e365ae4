"""Gymnasium environments with a text state: FrozenLake, Taxi, Blackjack, text games.

The policy acts with the tool `act(action)` or, with act_by = "reply", with its reply. The first
observation of a seed is the task's question, so all rollouts of a group start in the same state.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from agentgrpo.actions import Action, Observation, Say, Schema
from agentgrpo.envs.base import Episode
from agentgrpo.envs.tools import Tool, calls_of, require_same
from agentgrpo.support.optional_deps import import_optional
from agentgrpo.types import Task

HELDOUT_SEED = 1_000_000


class GymnasiumEnv:
    """Episodes of one registered environment.

    Args:
        id: name in Gymnasium's registry, such as FrozenLake-v1; "module:Name-v0" imports first.
        kwargs: arguments of gymnasium.make.
        actions: names of a Discrete space's actions, in order; None: their numbers. A Text space
            takes any text. If the environment raises for a text outside its space, the policy gets
            an error.
        rules: text of the question before the first observation.
        act_by: "tool" or "reply".
        num_tasks: number of seeds of a split: 0, 1, ... (train); 1,000,000, ... (heldout).
        seed: added to the training seeds.

    Raises:
        ValueError: an argument is out of range, the environment does not exist, or its actions are
            neither discrete nor text. The message names the argument.
    """

    answers = ("tools",)
    judges = True

    def __init__(
        self,
        id: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        rules: str = "",
        act_by: Literal["tool", "reply"] = "tool",
        num_tasks: Annotated[int, Field(ge=1)] = 64,
        seed: int = 0,
    ) -> None:
        if abs(seed - HELDOUT_SEED) < num_tasks:
            message = f"seed: expected no seeds of held-out tasks (from {HELDOUT_SEED} on)"
            raise ValueError(f"{message}, got {num_tasks} training tasks from {seed} on")
        self._id, self._kwargs, self._seed = id, dict(kwargs or {}), seed
        self._num_tasks, self._rules = num_tasks, rules
        self.first_texts: dict[int, str] = {}
        """The first observation of each seed, as in its task's prompt."""
        self.has_user = act_by == "reply"
        world = self.make()
        self.actions = _action_names(world.action_space, actions)
        world.close()
        choices = "" if self.actions is None else f": one of {', '.join(self.actions)}"
        act = GymnasiumEpisode(self, seed).act
        self.tool = Tool(act, description=f"Take an action{choices}.")

    def make(self) -> Any:
        gymnasium = import_optional("gymnasium", "env.kind = 'gymnasium'")
        kwargs = {**self._kwargs}
        module, _, name = self._id.rpartition(":")
        try:
            if module:
                importlib.import_module(module)
            spec = gymnasium.spec(name)
            if "ansi" in getattr(_entry_point(spec), "metadata", {}).get("render_modes", ()):
                kwargs.setdefault("render_mode", "ansi")
            return gymnasium.make(name, **kwargs)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise ValueError(f"id: {error}") from error

    def tools(self, task: Task) -> Sequence[Schema]:
        return () if self.has_user else (self.tool.schema,)

    def tasks(self, split: str) -> list[Task]:
        first = HELDOUT_SEED if split == "heldout" else self._seed
        return [self._task(first + i) for i in range(self._num_tasks)]

    def _task(self, seed: int) -> Task:
        world = self.make()
        observation, _ = world.reset(seed=seed)
        first, second = state_text(world, observation), state_text(world, world.reset(seed=seed)[0])
        require_same(f"id: {self._id}.reset(seed={seed})", first, second, "np_random")
        world.close()
        message = {"role": "user", "content": f"{self._rules}\n\n{first}".strip()}
        self.first_texts[seed] = first
        return Task(id=f"{self._id}/{seed}", messages=(message,), spec={"seed": seed})

    def reset(self, task: Task) -> GymnasiumEpisode:
        return GymnasiumEpisode(self, int(task.spec["seed"]))


class GymnasiumEpisode(Episode):
    """The Gymnasium environment of one rollout."""

    def __init__(self, env: GymnasiumEnv, seed: int) -> None:
        self._env, self._seed = env, seed
        self._world: Any = None

    def step(self, action: Action) -> Observation:
        if self._world is None:
            self._world = self._env.make()
            observation, _ = self._world.reset(seed=self._seed)
            if first := self._env.first_texts.get(self._seed):
                text = state_text(self._world, observation)
                require_same(f"id: reset(seed={self._seed})", first, text, "np_random")
        if isinstance(action, Say):
            return self.act(action.text)
        texts, reward, failed = [], 0.0, False
        for call in calls_of(action):
            try:
                if call.name != self._env.tool.name:
                    raise ValueError(f"UnknownTool: no tool {call.name!r}; there is: act")
                result = self.act(**self._env.tool.arguments(call.arguments))
            except ValueError as error:
                result = Observation(str(error), failed=True)
            texts.append(result.text)
            reward, failed = reward + sum(result.rewards.values()), failed or result.failed
            if result.done:
                break
        rewards = {"environment": reward} if reward else {}
        return Observation(
            "\n".join(texts), failed=failed, done=result.done, outputs=tuple(texts), rewards=rewards
        )

    def act(self, action: str) -> Observation:
        """Take an action by its name. step() must have made the environment."""
        choice: Any = action.strip()
        if self._env.actions is not None:
            names = [name.lower() for name in self._env.actions]
            if choice.lower() not in names:
                return Observation(
                    f"Error: no action {choice[:80]!r}; there are: {', '.join(names)}", failed=True
                )
            choice = int(self._world.action_space.start) + names.index(choice.lower())
        try:
            observation, reward, terminated, truncated, _ = self._world.step(choice)
        except Exception:
            space = self._world.action_space
            if space.contains(choice):
                raise
            return Observation(f"Error: {choice[:80]!r} is not of {space}", failed=True)
        rewards = {"environment": float(reward)} if reward else {}
        text = state_text(self._world, observation)
        return Observation(text, done=bool(terminated or truncated), rewards=rewards)

    def close(self) -> None:
        if self._world is not None:
            self._world.close()


def state_text(world: Any, observation: Any) -> str:
    """Format a state: the environment's "ansi" rendering if it has one, else the observation."""
    rendered = world.render() if getattr(world, "render_mode", None) == "ansi" else None
    return str(observation if rendered is None else rendered).strip("\n")


def _entry_point(spec: Any) -> Any:
    from gymnasium.envs.registration import load_env_creator

    return spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)


def _action_names(space: Any, names: Sequence[str] | None) -> list[str] | None:
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return None
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"id: expected discrete or text actions, got {space}")
    if names is not None and len(names) != space.n:
        raise ValueError(f"actions: expected {space.n} names, got {list(names)}")
    return list(names) if names is not None else [str(space.start + i) for i in range(space.n)]

"""Python in the sandbox and a search (envs/search.py) in one episode, each with its limit.

What a call beyond a limit is told says so; nothing is made up in the policy's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentgrpo.actions import Action, CallTools, Observation
from agentgrpo.envs.python import PythonEnv, PythonEpisode
from agentgrpo.envs.search import Search, SearchEpisode, SearchOptions
from agentgrpo.sandbox import HostTools, SandboxPool
from agentgrpo.types import Task


class TaggedEnv(Search):
    """Episodes with a Python interpreter and, given a corpus or a retriever, a search.

    Args:
        pool: where interpreters come from; the caller closes it.
        timeout_s: wall-clock seconds of one code step.
        max_python: code steps of a rollout.
        max_search: searches of a rollout.
        max_calls: both together.
        host_tools: as for PythonEnv.
        search: what it finds texts in, by the options of env.kind = "search".
        models: the run's, by name.
        retrievers: the run's, by name.
        load_encoder: from folder and pooling to what encodes.

    Raises:
        FileNotFoundError, ValueError: as Search; or a limit is negative.
    """

    answers = ("code", "search")

    def __init__(
        self,
        pool: SandboxPool,
        timeout_s: float,
        *,
        max_python: int = 6,
        max_search: int = 6,
        max_calls: int = 6,
        host_tools: HostTools | None = None,
        search: SearchOptions | None = None,
        models: Mapping[str, Any] = MappingProxyType({}),
        retrievers: Mapping[str, Any] = MappingProxyType({}),
        load_encoder: Callable[[Path, str], Any] | None = None,
    ) -> None:
        limits = {"python": max_python, "search": max_search, "calls": max_calls}
        for name, limit in limits.items():
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
                raise ValueError(f"max_{name}: expected a number of at least 0, got {limit!r}")
        options: dict[str, Any] = {**(search or {})}
        super().__init__(**options, models=models, retrievers=retrievers, load_encoder=load_encoder)
        self.limits = limits
        self._python = PythonEnv(pool, timeout_s, host_tools=host_tools)

    def reset(self, task: Task) -> TaggedEpisode:
        """An episode that has used nothing yet."""
        search = self.episode(task) if self.searches else None
        return TaggedEpisode(self._python.reset(task), search, self.limits)


class TaggedEpisode:
    """One rollout's interpreter and searches."""

    def __init__(
        self, python: PythonEpisode, search: SearchEpisode | None, limits: Mapping[str, int]
    ) -> None:
        self._python, self._search, self._limits = python, search, limits
        self._used = {"python": 0, "search": 0}
        self._recalled: tuple[Any, ...] = ()

    def recall(self, memory: Any) -> None:
        """As PythonEpisode's and SearchEpisode's."""
        self._recalled = (memory,)

    def step(self, action: Action) -> Observation:
        """Run code (the value of its last expression is shown) or search, within the limits."""
        name = "search" if isinstance(action, CallTools) else "python"
        refused = self._refusal(name)
        if refused:
            return Observation(refused, failed=True, counts={"refused_calls": 1.0})
        self._used[name] += 1
        does: PythonEpisode | SearchEpisode = self._python
        if name == "search":
            assert self._search is not None
            does = self._search
        for memory in self._recalled:
            does.recall(memory)
        self._recalled = ()
        return does.step(action)

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """Nothing: what an answer is worth is for the reward to say."""
        return self._python.finish(answer)

    def close(self) -> None:
        """End the interpreter."""
        self._python.close()

    def _refusal(self, name: str) -> str:
        if name == "search" and self._search is None:
            return "Error: there is no search here"
        if self._used[name] >= self._limits[name]:
            return f"Error: the limit of {self._limits[name]} {name} calls is reached; answer now"
        if sum(self._used.values()) >= self._limits["calls"]:
            return f"Error: the limit of {self._limits['calls']} tool calls is reached; answer now"
        return ""

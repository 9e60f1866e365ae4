"""Python in the sandbox and a search (envs/search.py) in one episode."""

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
        host_tools: as for PythonEnv.
        search: what it finds texts in, by the options of env.kind = "search".
        models: the run's, by name.
        retrievers: the run's, by name.
        load_encoder: from folder and pooling to what encodes.

    Raises:
        FileNotFoundError, ValueError: as Search.
    """

    answers = ("code", "search")

    def __init__(
        self,
        pool: SandboxPool,
        timeout_s: float,
        *,
        host_tools: HostTools | None = None,
        search: SearchOptions | None = None,
        models: Mapping[str, Any] = MappingProxyType({}),
        retrievers: Mapping[str, Any] = MappingProxyType({}),
        load_encoder: Callable[[Path, str], Any] | None = None,
    ) -> None:
        options: dict[str, Any] = {**(search or {})}
        super().__init__(**options, models=models, retrievers=retrievers, load_encoder=load_encoder)
        self._python = PythonEnv(pool, timeout_s, host_tools=host_tools)

    def reset(self, task: Task) -> TaggedEpisode:
        """An interpreter, and a search where there is one."""
        search = self.episode(task) if self.searches else None
        return TaggedEpisode(self._python.reset(task), search)


class TaggedEpisode:
    """One rollout's interpreter and searches."""

    def __init__(self, python: PythonEpisode, search: SearchEpisode | None) -> None:
        self._python, self._search = python, search
        self._recalled: tuple[Any, ...] = ()

    def recall(self, memory: Any) -> None:
        self._recalled = (memory,)

    def step(self, action: Action) -> Observation:
        """Run code (the value of its last expression is shown) or search."""
        does = self._search if isinstance(action, CallTools) else self._python
        if does is None:
            return Observation("Error: there is no search here", failed=True)
        for memory in self._recalled:
            does.recall(memory)
        self._recalled = ()
        return does.step(action)

    def finish(self, answer: str | None) -> Mapping[str, float]:
        return self._python.finish(answer)

    def close(self) -> None:
        self._python.close()

"""An environment with both Python in the sandbox and a search (envs/search.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentgrpo.actions import Action, CallTools, Observation
from agentgrpo.envs.python import PythonEnv, PythonEpisode
from agentgrpo.envs.search import SearchEnv, SearchEpisode, SearchOptions
from agentgrpo.sandbox import HostTools, SandboxPool
from agentgrpo.types import Task


class TaggedEnv:
    """Episodes with a Python interpreter and, given a corpus or a retriever, a search.

    Args:
        pool: source of sessions; the caller closes it.
        timeout_s: wall-clock limit of one code step, in seconds.
        host_tools: as for PythonEnv.
        search: options of the search, as for env.kind = "search".
        models: the run's models by name.
        retrievers: the run's retrievers by name.
        load_encoder: (folder, pooling) -> text encoder.

    Raises:
        FileNotFoundError, ValueError: as for SearchEnv.
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
        load_encoder: Callable[[Path, Any], Any] | None = None,
    ) -> None:
        endpoints = {"models": models, "retrievers": retrievers}
        self._search: SearchEnv | None = None
        if search:
            self._search = SearchEnv(**search, **endpoints, load_encoder=load_encoder)
        self._python = PythonEnv(pool, timeout_s, host_tools=host_tools)

    def reset(self, task: Task) -> TaggedEpisode:
        search = self._search.reset(task) if self._search is not None else None
        return TaggedEpisode(self._python.reset(task), search)

    def close(self) -> None:
        if self._search is not None:
            self._search.close()


class TaggedEpisode:
    """The interpreter and searches of one rollout."""

    def __init__(self, python: PythonEpisode, search: SearchEpisode | None) -> None:
        self._python, self._search = python, search
        self._memories: tuple[Any, ...] = ()

    def recall(self, memory: Any) -> None:
        self._memories = (memory,)

    def step(self, action: Action) -> Observation:
        """Run code (the observation shows the value of its last expression) or search."""
        episode = self._search if isinstance(action, CallTools) else self._python
        if episode is None:
            return Observation("Error: there is no search here", failed=True)
        for memory in self._memories:
            episode.recall(memory)
        self._memories = ()
        return episode.step(action)

    def finish(self, answer: str | None) -> Mapping[str, float]:
        return self._python.finish(answer)

    def close(self) -> None:
        self._python.close()

"""Python in the sandbox and a search over the user's texts, in one episode, each with its limit.

What a call beyond a limit is told says so; nothing is made up in the policy's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentgrpo.actions import Action, CallTools, Observation, RunCode
from agentgrpo.envs.python import PythonEnv, PythonEpisode
from agentgrpo.envs.search import Corpus, SearchEnv
from agentgrpo.envs.tools import ToolEpisode
from agentgrpo.sandbox import HostTools, SandboxPool
from agentgrpo.types import Task


class TaggedEnv:
    """Episodes with a Python interpreter and, given a corpus, a search.

    Args:
        pool: where interpreters come from; the caller closes it.
        timeout_s: wall-clock seconds of one code step.
        corpus: texts to search (envs/search.py); None: there is no search.
        max_python: code steps of a rollout.
        max_search: searches of a rollout.
        max_calls: both together.
        top_k: results of a search.
        max_chars: of a result's text.
        host_tools: as for PythonEnv.

    Raises:
        FileNotFoundError, ValueError: as SearchEnv; or a limit is negative.
    """

    answers = ("code", "search")

    def __init__(
        self,
        pool: SandboxPool,
        timeout_s: float,
        *,
        corpus: Corpus | None = None,
        max_python: int = 6,
        max_search: int = 6,
        max_calls: int = 6,
        top_k: int = 3,
        max_chars: int = 500,
        host_tools: HostTools | None = None,
    ) -> None:
        limits = {"python": max_python, "search": max_search, "calls": max_calls}
        for name, limit in limits.items():
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
                raise ValueError(f"max_{name}: expected a number of at least 0, got {limit!r}")
        self.limits = limits
        self._python = PythonEnv(pool, timeout_s, host_tools=host_tools)
        self._search = (
            None if corpus is None else SearchEnv(corpus, top_k=top_k, max_chars=max_chars)
        )

    def reset(self, task: Task) -> TaggedEpisode:
        """An episode that has used nothing yet."""
        search = None if self._search is None else self._search.reset(task)
        return TaggedEpisode(self._python.reset(task), search, self.limits)


class TaggedEpisode:
    """One rollout's interpreter and searches."""

    def __init__(
        self, python: PythonEpisode, search: ToolEpisode | None, limits: Mapping[str, int]
    ) -> None:
        self._python, self._search, self._limits = python, search, limits
        self._used = {"python": 0, "search": 0}

    def recall(self, memory: Any) -> None:
        """As PythonEpisode's."""
        self._python.recall(memory)

    def step(self, action: Action) -> Observation:
        """Run code (the value of its last expression is shown) or search, within the limits."""
        name = "search" if isinstance(action, CallTools) else "python"
        refused = self._refusal(name)
        if refused:
            return Observation(refused, failed=True, counts={"refused_calls": 1.0})
        self._used[name] += 1
        if isinstance(action, RunCode):
            return self._python.step(action)
        assert self._search is not None
        return self._search.step(action)

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

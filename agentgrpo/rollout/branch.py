"""Branching rollouts: more samples of a group where the policy became uncertain after a tool call.

ARPO (arXiv:2507.19849, 3.1): a group starts with some rollouts. Where the entropy H of a turn after
a tool's result exceeds the entropy H0 of the rollout's first turn, up to beam_size - 1 others
branch off right after that result, each with probability clip(p + w * (H - H0), 0, 1). Intended
differences from the released code:

* H is a mean over a turn's first tokens, not a sum, so it does not grow with the turn's length. It
  is divided by ln(vocabulary). The tokens outside the top logprobs count as one token; the released
  code ignores them.
* H0 belongs to one rollout of one call. The released code keeps it from the first training batch.
* The branch starts after the result whose turn was measured, not one tool call later.
* Free places are divided among the first rollouts, and again at each branching, so that early ones
  do not take all. Places that a rollout leaves unused are played from the prompt as soon as it has
  ended, all at once, not one per round at the end.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from agentgrpo.actions import Action, Observation
from agentgrpo.config import BranchConfig
from agentgrpo.types import Float32


def turn_entropy(entropies: Float32, config: BranchConfig, vocab_size: int) -> float | None:
    """Mean entropy of a turn's first tokens, divided by ln(vocab_size); None for an empty turn."""
    first = entropies[: config.entropy_tokens]
    return float(first.mean()) / math.log(vocab_size) if len(first) else None


def branch_probability(delta: float, config: BranchConfig, consecutive: int = 0) -> float:
    """Probability of branching for delta = H - H0, both divided by ln(vocabulary)."""
    p = min(1.0, max(0.0, config.probability + config.entropy_weight * delta))
    return p * (1.0 - config.consecutive_penalty) ** consecutive


def aepo_initial(group_size: int, root: float, after_tools: float, beta: float) -> int:
    """Rollouts that start from the prompt: group_size * sigmoid(beta * (root - after_tools)).

    Uncertain first turns call for more starts, uncertain turns after tools for more branches (AEPO,
    arXiv:2510.14545).
    """
    return round(group_size / (1.0 + math.exp(-beta * (root - after_tools))))


@dataclass(frozen=True, slots=True)
class Step:
    """One action of an episode, and a hash of its observation."""

    action: Action
    digest: bytes
    memory: Any = field(default=None, compare=False)
    """See Observation."""

    @classmethod
    def of(cls, action: Action, observation: Observation) -> Step:
        return cls(action, digest(observation), observation.memory)


def digest(observation: Observation) -> bytes:
    """A hash of the fields that the policy or the second role can see."""
    o = observation
    fields = (o.text, o.failed, o.done, o.outputs, o.ask)
    return hashlib.blake2b(repr(fields).encode(errors="surrogatepass"), digest_size=16).digest()


class Copies:
    """Copies of episodes from which branches start, kept until their group has ended.

    Thread-safe. `close` starts closing a task's copy.
    """

    def __init__(self, close: Callable[[int, Any], Future[None]]) -> None:
        self._close, self._lock = close, threading.Lock()
        self._copies: dict[int, list[Any]] = {}
        self._ended: set[int] = set()
        self.closing: list[Future[None]] = []

    def keep(self, task: int, copy: Any) -> Any:
        """Store a copy, unless it is None. Close it at once if its group has ended meanwhile."""
        if copy is not None:
            with self._lock:
                self._copies.setdefault(task, []).append(copy)
                ended = task in self._ended
            if ended:
                self.end(task)
        return copy

    def end(self, task: int) -> None:
        with self._lock:
            self._ended.add(task)
            copies = self._copies.pop(task, [])
        self.closing += [self._close(task, copy) for copy in copies]


@dataclass(slots=True)
class GroupPlan:
    """Decides which rollouts of a group start from the prompt and which branch off, and when.

    Every index below group_size is handed out exactly once, by begin(), fork(), ended() or
    measured(). The remaining indices are divided among the rollouts that are playing.
    """

    group_size: int
    config: BranchConfig
    _next: int = 0
    _shares: dict[int, int] = field(default_factory=dict)
    """By playing rollout: number of indices that it may still hand out."""
    _undecided: bool = False
    _roots: dict[int, float] = field(default_factory=dict)
    _after_tools: list[float] = field(default_factory=list)

    def begin(self) -> list[int]:
        """Indices of the rollouts that start at once."""
        branching = 0 < self.config.initial < self.group_size
        first = self._hand_out(self.config.initial if branching else self.group_size)
        self._undecided = branching and self.config.budget == "aepo"
        self._shares = dict.fromkeys(first, 0)
        if branching and not self._undecided:
            self._share_out(self.group_size - self._next)
        return first

    def may_branch(self, index: int) -> bool:
        return self._shares.get(index, 0) > 0

    def fork(self, index: int, copies: int = 1) -> list[int]:
        """Indices of up to `copies` branches of this rollout, as many as it may hand out.

        The indices left are divided among the rollout and its branches.
        """
        copies = min(copies, self._shares[index])
        num_left = self._shares[index] - copies
        branches = self._hand_out(copies)
        for place, member in enumerate((index, *branches)):
            self._shares[member] = (num_left + copies - place) // (copies + 1)
        return branches

    def ended(self, index: int) -> list[int]:
        """A rollout has ended. Returns the indices that now start from the prompt."""
        roots: list[int] = []
        if self._undecided:  # it called no tool, so there is no entropy that speaks for branches
            roots = self._decide(self.group_size)
        unused = self._hand_out(self._shares.pop(index, 0))
        self._shares |= dict.fromkeys(unused, 0)
        return roots + unused

    def measured(self, index: int, entropy: float, *, after_tool: bool) -> list[int]:
        """A turn's entropy is known. Returns the indices that now start from the prompt (AEPO)."""
        if not self._undecided:
            return []
        if not after_tool:
            self._roots.setdefault(index, entropy)
            return []
        self._after_tools.append(entropy)
        root = sum(self._roots.values()) / len(self._roots)
        after = sum(self._after_tools) / len(self._after_tools)
        return self._decide(aepo_initial(self.group_size, root, after, self.config.aepo_beta))

    def _decide(self, initial: int) -> list[int]:
        self._undecided = False
        roots = self._hand_out(max(0, initial - self._next))
        self._shares |= dict.fromkeys(roots, 0)
        self._share_out(self.group_size - self._next)
        return roots

    def _hand_out(self, count: int) -> list[int]:
        start, self._next = self._next, self._next + count
        return list(range(start, self._next))

    def _share_out(self, count: int) -> None:
        playing = list(self._shares)
        for number in range(count):
            self._shares[playing[number % len(playing)]] += 1

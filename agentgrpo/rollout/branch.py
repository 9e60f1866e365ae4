"""Branching rollouts: more samples of a group start where the policy became unsure after a tool.

ARPO (arXiv:2507.19849, 3.1): a group starts with some rollouts. If the entropy H of a turn after a
tool's result exceeds the entropy H0 of its rollout's first turn, up to beam_size - 1 others branch
off after that result, each with probability clip(p + w * (H - H0), 0, 1). Intended differences from
the released code:

* H is a mean over a turn's first tokens, not a sum: it does not grow with the turn. It is divided
  by ln(vocabulary); tokens that are not among the likeliest count as one token, not as nothing.
* H0 belongs to one rollout of one call. The released code keeps that of the first training batch.
* The branch starts after the result whose turn was measured, not one tool call later.
* Free places are divided between the first rollouts, and again at each branching, so that early
  ones do not take all. Places that a rollout leaves unused start alone as soon as it has ended, not
  one per round at the end.
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
    """Mean entropy of a turn's first tokens as a share of ln(vocab_size); None of an empty turn."""
    first = entropies[: config.entropy_tokens]
    return float(first.mean()) / math.log(vocab_size) if len(first) else None


def branch_probability(delta: float, config: BranchConfig, consecutive: int = 0) -> float:
    """Of branching where the entropy has grown by delta (H - H0, as shares of ln(vocabulary)).

    >>> branch_probability(0.5, BranchConfig(probability=0.5, entropy_weight=0.2))
    0.6
    >>> branch_probability(-9.0, BranchConfig(probability=0.5, entropy_weight=0.2))
    0.0
    """
    p = min(1.0, max(0.0, config.probability + config.entropy_weight * delta))
    return p * (1.0 - config.consecutive_penalty) ** consecutive


def aepo_initial(group_size: int, root: float, after_tools: float, beta: float) -> int:
    """How many of a group begin alone: group_size * sigmoid(beta * (root - after_tools)), rounded.

    An unsure first turn asks for other beginnings, unsure turns after tools for branches (AEPO,
    arXiv:2510.14545).

    >>> aepo_initial(16, 0.5, 0.5, 2.0)
    8
    """
    return round(group_size / (1.0 + math.exp(-beta * (root - after_tools))))


@dataclass(frozen=True, slots=True)
class Step:
    """One action of an episode, and what it was answered."""

    action: Action
    digest: bytes
    memory: Any = field(default=None, compare=False)
    """See Observation."""

    @classmethod
    def of(cls, action: Action, observation: Observation) -> Step:
        """The step, its observation remembered by hash."""
        return cls(action, digest(observation), observation.memory)


def digest(observation: Observation) -> bytes:
    """A hash of all that an observation says."""
    o = observation
    said = (o.text, o.failed, o.done, o.outputs, o.ask)
    return hashlib.blake2b(repr(said).encode(errors="surrogatepass"), digest_size=16).digest()


class Copies:
    """Copies of episodes that branches start from, kept until their group has ended.

    Used by several threads. `close` begins to close a task's copy.
    """

    def __init__(self, close: Callable[[int, Any], Future[None]]) -> None:
        self._close, self._lock = close, threading.Lock()
        self._copies: dict[int, list[Any]] = {}
        self._ended: set[int] = set()
        self.closing: list[Future[None]] = []

    def keep(self, task: int, copy: Any) -> Any:
        """Keep a copy, if there is one. Close it at once if its group has ended meanwhile."""
        if copy is not None:
            with self._lock:
                self._copies.setdefault(task, []).append(copy)
                ended = task in self._ended
            if ended:
                self.end(task)
        return copy

    def end(self, task: int) -> None:
        """The group has ended: no episode uses a copy any more."""
        with self._lock:
            self._ended.add(task)
            copies = self._copies.pop(task, [])
        self.closing += [self._close(task, copy) for copy in copies]


@dataclass(slots=True)
class GroupPlan:
    """Which rollout of a group begins when, and how.

    Every index below group_size is handed out exactly once, by begin(), fork(), ended() or
    decide(). The indices that are not out yet are entrusted to the rollouts that play.
    """

    group_size: int
    config: BranchConfig
    _next: int = 0
    _shares: dict[int, int] = field(default_factory=dict)
    """By rollout that plays: how many indices it may still hand out."""
    _undecided: bool = False
    _roots: dict[int, float] = field(default_factory=dict)
    _after_tools: list[float] = field(default_factory=list)

    def begin(self) -> list[int]:
        """The rollouts that begin at once."""
        branching = 0 < self.config.initial < self.group_size
        first = self._hand_out(self.config.initial if branching else self.group_size)
        self._undecided = branching and self.config.budget == "aepo"
        self._shares = dict.fromkeys(first, 0)
        if branching and not self._undecided:
            self._share_out(self.group_size - self._next)
        return first

    def may_branch(self, index: int) -> bool:
        """Whether the rollout may hand an index out."""
        return self._shares.get(index, 0) > 0

    def fork(self, index: int, copies: int = 1) -> list[int]:
        """The indices of rollouts that branch off this one, as many as it may hand out; they and
        it share what may still branch.
        """
        copies = min(copies, self._shares[index])
        left = self._shares[index] - copies
        new = self._hand_out(copies)
        for place, one in enumerate((index, *new)):
            self._shares[one] = (left + copies - place) // (copies + 1)
        return new

    def ended(self, index: int) -> list[int]:
        """A rollout has ended; returns those that begin alone instead of what it left unused."""
        begun: list[int] = []
        if self._undecided:  # it ended without having called a tool: nothing tells for branches
            begun = self._decide(self.group_size)
        unused = self._hand_out(self._shares.pop(index, 0))
        self._shares |= dict.fromkeys(unused, 0)
        return begun + unused

    def measured(self, index: int, entropy: float, *, after_tool: bool) -> list[int]:
        """A turn's entropy is known; returns those that begin alone because of it (AEPO)."""
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
        begun = self._hand_out(max(0, initial - self._next))
        self._shares |= dict.fromkeys(begun, 0)
        self._share_out(self.group_size - self._next)
        return begun

    def _hand_out(self, count: int) -> list[int]:
        start, self._next = self._next, self._next + count
        return list(range(start, self._next))

    def _share_out(self, count: int) -> None:
        playing = list(self._shares)
        for number in range(count):
            self._shares[playing[number % len(playing)]] += 1

"""Sampling with one engine that spans several ranks (engine.tensor_parallel_size).

Each rank's vLLM has its own scheduler, and all must schedule the same, or the ranks wait for each
other in different layers. Ranks that play independently would not, since tools return at different
times. So one rank of the team plays the tasks of all, and the others repeat its engine calls step
by step. Each group then goes to the rank whose task it was. The rest of a run behaves as if each
rank had an engine.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentgrpo.config import RolloutConfig
from agentgrpo.engine.agreement import Disagreement
from agentgrpo.rollout.engine_protocol import Ended, SamplerStats, ignore
from agentgrpo.rollout.sampler import AnySampler
from agentgrpo.support.parallel import Team
from agentgrpo.types import Completion, Group, Int32, Task

if TYPE_CHECKING:  # it imports vLLM
    from agentgrpo.engine.engine import Engine

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def digest(completions: Iterable[Completion]) -> int:
    """Checksum of the sampled tokens, compared across ranks."""
    crc = 0
    for completion in completions:
        crc = zlib.crc32(completion.request_id.encode(), crc)
        crc = zlib.crc32(completion.token_ids.tobytes(), crc)
    return crc


class Leader:
    """The first rank's engine, as a sampler uses it. Its calls are repeated on all ranks."""

    def __init__(self, engine: Engine, team: Team) -> None:
        self._engine, self._team = engine, team
        self._calls: list[Call] = []
        self._digest = 0
        self.max_model_len = engine.max_model_len

    @property
    def llm(self) -> Any:
        """Raises: a call would run on this rank only and wait for the others forever."""
        raise RuntimeError(
            "engine.llm cannot be used with engine.tensor_parallel_size > 1: play through "
            "engine.add_request() and engine.step(), which all ranks follow"
        )

    @property
    def num_in_flight(self) -> int:
        return self._engine.num_in_flight

    def add_request(self, request_id: str, prompt_ids: Int32, **options: Any) -> None:
        if options.get("on_token") is not None:  # the other ranks would not stop at its token
            raise ValueError("on_token: requires engine.tensor_parallel_size = 1")
        if "filters" in options:
            options["filters"] = dict(options["filters"])  # a read-only view cannot be sent
        self._do("add_request", request_id, prompt_ids, **options)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._do("abort", list(request_ids))

    def abort_all(self) -> None:
        self._do("abort_all")

    def step(self) -> list[Completion]:
        self._broadcast(steps=True)
        completions = self._engine.step()
        self._digest = digest(completions)
        return completions

    def finish(self) -> None:
        """End follow() on the other ranks."""
        self._broadcast(steps=False)
        self._digest = 0

    def _do(self, name: str, *args: Any, **options: Any) -> None:
        getattr(self._engine, name)(*args, **options)
        self._calls.append((name, args, options))  # after the call: one that raised is not repeated

    def _broadcast(self, *, steps: bool) -> None:
        self._team.tell((self._calls, self._digest, steps))
        self._calls = []


def follow(engine: Engine, team: Team) -> None:
    """Repeat the leader's engine calls on this rank until its finish()."""
    own_digest, steps = 0, True
    while steps:
        calls, leader_digest, steps = team.tell()
        if own_digest != leader_digest:
            raise Disagreement(
                f"rank {team.place} of its engine sampled different tokens than the first: with "
                "engine.tensor_parallel_size all ranks must compute bitwise equal logits"
            )
        for name, args, options in calls:
            getattr(engine, name)(*args, **options)
        if steps:
            own_digest = digest(engine.step())


class TeamSampler(AnySampler):
    """Plays with an engine that spans the ranks of a team; all of them must call play()."""

    def __init__(
        self, config: RolloutConfig, sampler: AnySampler, leader: Leader, engine: Engine, team: Team
    ) -> None:
        super().__init__(config)
        self._sampler, self._leader, self._engine, self._team = sampler, leader, engine, team

    def close(self) -> None:
        self._sampler.close()

    def _play(
        self, tasks: Sequence[Task], group_size: int, config: RolloutConfig, seed: int,
        filters: Mapping[str, float], ended: Ended,
    ) -> tuple[list[Group], SamplerStats]:  # fmt: skip
        """The stats are zero on all ranks but the leader. `ended` is never called."""
        shares = self._team.gather(list(tasks))
        played: list[Group] = []
        stats = SamplerStats()
        if self._team.place:
            follow(self._engine, self._team)
        else:
            all_tasks = [task for share in shares for task in share]
            try:
                played, stats = self._sampler._play(
                    all_tasks, group_size, config, seed, filters, ignore
                )
            finally:
                self._leader.finish()  # also after an error: the others wait for the next call
        for rollout in (rollout for group in played for rollout in group.rollouts):
            rollout.environment = None  # an instance of a user's class, which may not pickle
        groups = self._team.tell(played)
        first = sum(map(len, shares[: self._team.place]))
        return groups[first : first + len(tasks)], stats

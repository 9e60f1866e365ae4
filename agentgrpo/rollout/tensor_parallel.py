"""Lets ranks that hold one engine together (engine.tensor_parallel_size) play together.

Each rank's vLLM has its own scheduler, and all must schedule alike, or the ranks wait for each
other in different layers. The order in which tools answer differs, so ranks that each played alone
would not. Here one rank of the team plays the tasks of all ranks, and the others repeat its
engine's requests step by step; each rollout goes back to the rank that owns its task. The code
around it behaves as if each rank had an engine.
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


def digest(done: Iterable[Completion]) -> int:
    """Of what was sampled: the same on two ranks if that was."""
    crc = 0
    for completion in done:
        crc = zlib.crc32(completion.request_id.encode(), crc)
        crc = zlib.crc32(completion.token_ids.tobytes(), crc)
    return crc


class Leader:
    """The leading rank's engine as a sampler sees it: whatever is asked of it, all ranks do."""

    def __init__(self, engine: Engine, team: Team) -> None:
        self._engine, self._team = engine, team
        self._calls: list[Call] = []
        self._seen = 0
        self.max_model_len = engine.max_model_len

    @property
    def llm(self) -> Any:
        """Refused: it would run on this rank alone, and wait for the others for ever."""
        raise RuntimeError(
            "engine.llm cannot be used with engine.tensor_parallel_size > 1: play through "
            "engine.add_request() and engine.step(), which all ranks follow"
        )

    @property
    def num_in_flight(self) -> int:
        return self._engine.num_in_flight

    def add_request(self, request_id: str, prompt_ids: Int32, **options: Any) -> None:
        if options.get("on_token") is not None:  # the others would not stop where it does
            raise ValueError("on_token: needs engine.tensor_parallel_size = 1")
        if "filters" in options:
            options["filters"] = dict(options["filters"])  # a read-only view cannot be sent
        self._do("add_request", request_id, prompt_ids, **options)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._do("abort", list(request_ids))

    def abort_all(self) -> None:
        self._do("abort_all")

    def step(self) -> list[Completion]:
        self._tell(goes_on=True)
        done = self._engine.step()
        self._seen = digest(done)
        return done

    def finish(self) -> None:
        self._tell(goes_on=False)
        self._seen = 0

    def _do(self, name: str, *args: Any, **options: Any) -> None:
        getattr(self._engine, name)(*args, **options)
        self._calls.append((name, args, options))  # and not what the engine refused

    def _tell(self, *, goes_on: bool) -> None:
        self._team.tell((self._calls, self._seen, goes_on))
        self._calls = []


def follow(engine: Engine, team: Team) -> None:
    """Do with this rank's engine what the leader does with its own, until it is finished."""
    seen, goes_on = 0, True
    while goes_on:
        calls, leader_saw, goes_on = team.tell()
        if seen != leader_saw:
            raise Disagreement(
                f"rank {team.place} of its engine sampled other tokens than the first: with "
                "engine.tensor_parallel_size all ranks must compute the same logits, to the bit"
            )
        for name, args, options in calls:
            getattr(engine, name)(*args, **options)
        if goes_on:
            seen = digest(engine.step())


class TeamSampler(AnySampler):
    """Plays as the sampler does, whose engine is a team's; all ranks of the team must play."""

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
        """The stats are the leader's. No rank watches groups of the others' tasks."""
        shares = self._team.gather(list(tasks))
        played: list[Group] = []
        stats = SamplerStats()
        if self._team.place:
            follow(self._engine, self._team)
        else:
            every = [task for share in shares for task in share]
            try:
                played, stats = self._sampler._play(
                    every, group_size, config, seed, filters, ignore
                )
            finally:
                self._leader.finish()
        for rollout in (rollout for group in played for rollout in group.rollouts):
            rollout.environment = None  # of a user's class, which need not be one that pickles
        groups = self._team.tell(played)
        first = sum(map(len, shares[: self._team.place]))
        return groups[first : first + len(tasks)], stats

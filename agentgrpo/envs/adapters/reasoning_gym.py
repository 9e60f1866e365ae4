"""reasoning-gym's generated tasks, judged by its verifiers; Python may be run on the way.

The verifiers run in sandboxes of their own, never in this process: several evaluate the answer as
code (countdown, puzzle24, n_queens, ...), and none is bounded in time. The questions come from
there too: those of some datasets hang on the seed of Python's hashes, another in each process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgrpo.actions import InfrastructureError
from agentgrpo.envs.graded import GradingPool, partial_credit
from agentgrpo.envs.python import PythonEnv, PythonEpisode, as_infra_error
from agentgrpo.sandbox import HostTools, SandboxPool, StepStatus
from agentgrpo.sandbox.grading.grade import VerdictClock
from agentgrpo.sandbox.inside.exchange import decode, encode
from agentgrpo.support.optional_deps import import_optional
from agentgrpo.types import Task

HELDOUT_SEED = 1_000_003
JUDGE = (Path(__file__).parent / "reasoning_gym_judge.py").read_text()
MEMORY_MIB = 1024
PAGE = 256
"""Questions that a sandbox is asked for at once."""
PAGE_S = 600.0

VERIFY_TIMEOUT_S = 10.0
"""Wall-clock seconds of judging an answer; one that takes longer is wrong."""


class ReasoningGymEnv(PythonEnv):
    """Tasks of one of its datasets.

    Args:
        pool: as for PythonEnv.
        timeout_s: as for PythonEnv.
        dataset: its name, such as chain_sum or countdown.
        size: tasks of a split.
        config: further arguments of reasoning_gym.create_dataset, besides size and seed.
        seed: of the training tasks; held-out ones have another.
        host_tools: as for PythonEnv.

    Raises:
        ValueError: there is no such dataset, its arguments are wrong, or the package is missing.
    """

    judges = True

    def __init__(
        self,
        pool: SandboxPool,
        timeout_s: float,
        *,
        dataset: str,
        size: int = 256,
        config: Mapping[str, Any] | None = None,
        seed: int = 0,
        host_tools: HostTools | None = None,
    ) -> None:
        super().__init__(pool, timeout_s, host_tools=host_tools)
        reasoning_gym = import_optional("reasoning_gym", "env.kind = 'reasoning_gym'")
        for key in {"size", "seed"} & (config or {}).keys():
            raise ValueError(f"config.{key}: would be that of both splits")
        self._name, self._timeout_s = dataset, VERIFY_TIMEOUT_S
        self._options = {
            split: {**(config or {}), "size": size, "seed": first + seed}
            for split, first in (("train", 0), ("heldout", HELDOUT_SEED))
        }
        try:
            for options in self._options.values():
                reasoning_gym.create_dataset(dataset, **options)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"dataset {dataset!r}: {error}") from error
        template = dataclasses.replace(
            pool.template,
            site_dirs=(*pool.template.site_dirs, str(Path(reasoning_gym.__file__).parents[1])),
            preload=("reasoning_gym",),
            setup=JUDGE,
        )
        self.graders = GradingPool(pool, template=template, memory_mib=MEMORY_MIB)

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split; only the verifier knows what is right."""
        size = self._options[split]["size"]
        return [
            Task(
                id=f"{self._name}/{split}/{first + place}",
                messages=({"role": "user", "content": question},),
                spec={"split": split, "index": first + place},
            )
            for first in range(0, size, PAGE)
            for place, question in enumerate(self._questions(split, first, min(first + PAGE, size)))
        ]

    def _questions(self, split: str, first: int, last: int) -> list[str]:
        asked = ("call_name", "questions", (self._name, self._options[split], first, last))
        with self.graders.pool().acquire() as session:
            told, answer = session.ask([encode(asked, id).encode()], PAGE_S)
        if told.status is StepStatus.OK:
            kind, *rest = decode(b"".join(answer).decode(), int)
            if kind == "value":
                return list(rest[0])
            told.detail = rest[-1]
        raise ValueError(
            f"dataset {self._name!r}: no questions {first} to {last} ({told.status}: {told.detail})"
        )

    def reset(self, task: Task) -> ReasoningGymEpisode:
        return ReasoningGymEpisode(self, task)

    def score(self, task: Task, answer: str | None) -> float:
        """The verifier's word, in [0, 1]; None is worth nothing, nor what it cannot read."""
        if answer is None:
            return 0.0
        options, index = self._options[task.spec["split"]], task.spec["index"]
        asked = f"judge({self._name!r}, {options!r}, {index!r}, {answer!r})"
        with as_infra_error(), self.graders.places, self.graders.pool().acquire() as session:
            clock = VerdictClock(self._timeout_s, session)
            with clock.running():
                told = session.step(asked, clock.seconds())
        failed = told.error is not None and told.error.name != "CodeTooLong"
        if told.status is StepStatus.INFRA_ERROR or (failed and told.status is StepStatus.ERROR):
            raise InfrastructureError(f"the verifier did not run: {told.detail} {told.error}")
        return float(told.value) if told.status is StepStatus.OK and told.value else 0.0

    def close(self) -> None:
        self.graders.close()


class ReasoningGymEpisode(PythonEpisode):
    """One rollout."""

    _env: ReasoningGymEnv

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """`solved` for a full score, `partial` for less."""
        return partial_credit(self._env.score(self._task, answer))

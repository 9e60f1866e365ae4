"""reasoning-gym's generated tasks, scored by its verifiers; the policy may run Python.

The verifiers run in separate sandboxes, never in this process: several evaluate the answer as code
(countdown, puzzle24, n_queens, ...), and none limits its time. The questions are generated there,
too: those of some datasets depend on Python's hash seed, which differs between processes.
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
"""Number of questions in one request to a sandbox."""
PAGE_S = 600.0

VERIFY_TIMEOUT_S = 10.0
"""Wall-clock limit for scoring an answer. An answer that exceeds it is wrong."""


class ReasoningGymEnv(PythonEnv):
    """Tasks of one dataset.

    Args:
        pool: as for PythonEnv.
        timeout_s: as for PythonEnv.
        dataset: name of the dataset, such as chain_sum or countdown.
        size: number of tasks of a split.
        config: other arguments of reasoning_gym.create_dataset than size and seed.
        seed: seed of the training tasks; held-out tasks have another one.
        host_tools: as for PythonEnv.

    Raises:
        ValueError: the dataset does not exist, its arguments are wrong, or the package is missing.
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
            raise ValueError(f"config.{key}: set the option `{key}` instead, outside of config")
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
        """All tasks of a split. The specs have no answers: only the verifier knows them."""
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
        request = ("call_name", "questions", (self._name, self._options[split], first, last))
        with self.graders.pool().acquire() as session:
            step_result, reply = session.ask([encode(request, id).encode()], PAGE_S)
        if step_result.status is StepStatus.OK:
            kind, *rest = decode(b"".join(reply).decode(), int)
            if kind == "value":
                return list(rest[0])
            step_result.detail = rest[-1]
        raise ValueError(
            f"dataset {self._name!r}: expected questions {first} to {last}, got "
            f"{step_result.status}: {step_result.detail}"
        )

    def reset(self, task: Task) -> ReasoningGymEpisode:
        return ReasoningGymEpisode(self, task)

    def score(self, task: Task, answer: str | None) -> float:
        """The verifier's score in [0, 1]; 0 without an answer or for one that it cannot parse."""
        if answer is None:
            return 0.0
        options, index = self._options[task.spec["split"]], task.spec["index"]
        code = f"judge({self._name!r}, {options!r}, {index!r}, {answer!r})"
        with as_infra_error(), self.graders.slots, self.graders.pool().acquire() as session:
            clock = VerdictClock(self._timeout_s, session)
            with clock.running():
                result = session.step(code, clock.seconds())
        failed = result.error is not None and result.error.name != "CodeTooLong"
        if result.status is StepStatus.INFRA_ERROR or (
            failed and result.status is StepStatus.ERROR
        ):
            raise InfrastructureError(f"the verifier failed: {result.detail} {result.error}")
        return float(result.value) if result.status is StepStatus.OK and result.value else 0.0

    def close(self) -> None:
        self.graders.close()


class ReasoningGymEpisode(PythonEpisode):
    """An episode whose answer a verifier scores."""

    _env: ReasoningGymEnv

    def finish(self, answer: str | None) -> Mapping[str, float]:
        return partial_credit(self._env.score(self._task, answer))

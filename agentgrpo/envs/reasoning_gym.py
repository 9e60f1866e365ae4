"""reasoning-gym's generated tasks, judged by its verifiers; Python may be run on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentgrpo.envs.python import PythonEnv, PythonEpisode
from agentgrpo.sandbox import SandboxPool
from agentgrpo.types import Task

HELDOUT_SEED = 1_000_003


class ReasoningGymEnv(PythonEnv):
    """Tasks of one of its datasets.

    Args:
        pool: as for PythonEnv.
        timeout_s: as for PythonEnv.
        dataset: its name, such as chain_sum or countdown.
        size: tasks of a split.
        config: further arguments of reasoning_gym.create_dataset.
        seed: of the training tasks; held-out ones have another.

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
    ) -> None:
        super().__init__(pool, timeout_s)
        try:
            import reasoning_gym
        except ImportError as error:
            raise ValueError(f"the package reasoning-gym is needed: {error}") from error
        self._name = dataset
        try:
            self._splits = {
                split: reasoning_gym.create_dataset(
                    dataset, size=size, seed=first + seed, **(config or {})
                )
                for split, first in (("train", 0), ("heldout", HELDOUT_SEED))
            }
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"dataset {dataset!r}: {error}") from error

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split; only the verifier knows what is right."""
        return [
            Task(
                id=f"{self._name}/{split}/{index}",
                messages=({"role": "user", "content": entry["question"]},),
                spec={"split": split, "index": index},
            )
            for index, entry in enumerate(self._splits[split])
        ]

    def reset(self, task: Task) -> ReasoningGymEpisode:
        """An episode of PythonEnv with a verifier at its end."""
        return ReasoningGymEpisode(self, task)

    def score(self, task: Task, answer: str | None) -> float:
        """The verifier's word, in [0, 1]; None is worth nothing."""
        dataset = self._splits[task.spec["split"]]
        if answer is None:
            return 0.0
        return float(dataset.score_answer(answer, dataset[task.spec["index"]]))


class ReasoningGymEpisode(PythonEpisode):
    """One rollout."""

    def __init__(self, env: ReasoningGymEnv, task: Task) -> None:
        super().__init__(env, task)
        self._verifier, self._task = env, task

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """`solved` for a full score, `partial` for less."""
        score = self._verifier.score(self._task, answer)
        return {"solved": float(score >= 1.0), "partial": score if score < 1.0 else 0.0}

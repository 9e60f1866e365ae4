"""Does a policy learn from this config, within so many steps? Decided with statistics."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.config.read import config_of
from agentgrpo.diagnosis import report
from agentgrpo.run.atomic import write_text
from agentgrpo.run.callbacks import Callback
from agentgrpo.run.records import read_rollouts
from agentgrpo.testing.engines import SHARED
from agentgrpo.trainer import Trainer
from agentgrpo.types import Metrics, Status
from agentgrpo.view.collect import read_run
from agentgrpo.view.page import make_page


@dataclass(frozen=True, slots=True)
class Learned:
    """What a run came to."""

    before: float
    """Share of the held-out tasks that are solved by the first weights."""
    after: float
    tasks: int
    gained: int
    """Tasks solved after and not before."""
    lost: int
    steps: int

    @property
    def p_value(self) -> float:
        """Of as many gained among those that changed, if each went either way by a coin."""
        return tail(self.gained, self.gained + self.lost, 0.5)

    def __str__(self) -> str:
        return (
            f"held-out share {self.before:.2f} -> {self.after:.2f} of {self.tasks} tasks after "
            f"{self.steps} steps ({self.gained} gained, {self.lost} lost, p = {self.p_value:.2g})"
        )


def tail(least: int, count: int, share: float) -> float:
    """Probability of at least so many successes among count, each of probability share."""
    if not 0 < share < 1:
        return float(least <= count * share)
    log_share, log_rest = math.log(share), math.log1p(-share)
    return math.fsum(
        math.exp(
            math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
            + k * log_share + (count - k) * log_rest
        )
        for k in range(least, count + 1)
    )  # fmt: skip


def assert_learns(
    config: str | Path | TrainConfig,
    *,
    solved: float | None = None,
    steps: int | None = None,
    risk: float = 0.01,
    looks: int = 2,
    keep: str | Path | None = None,
    **settings: Any,
) -> Learned:
    """Train, and fail unless the policy learned to solve held-out tasks that it could not.

    The same held-out tasks are played greedily before and after, and compared in pairs (the exact
    test of McNemar): of the tasks that changed more must have been gained than a coin would give.

    False pass: where training changes nothing for the better, each changed task is as likely lost
    as gained, and the test passes with probability `risk` at most, all looks together, if tasks
    change independently: of held-out tasks that are one question in several wordings, keep one.
    False failure: with `solved`, a policy that solves this share of all such tasks fails that part
    with probability `risk` at most: it fails only where so few were solved that such a policy would
    not. The paired part has no such bound without a gain to look for; docs/testing.md has how often
    it misses which gain on how many tasks.

    The run ends early once a look has shown both, and as hopeless where after half of the steps no
    group of rollouts has carried a gradient: nothing was trained on.

    Args:
        config: a file, a shipped config's name or a TrainConfig.
        solved: share of the held-out tasks that is to be solved in the end; None: any gain.
        steps: of training, instead of the config's.
        risk: see above.
        looks: evaluations after the first, evenly over the steps.
        keep: the run's folder, kept; None: a temporary one, which is kept if this fails.
        settings: what is to differ from the config, by section.

    Raises:
        AssertionError: it did not learn; says what is seen in the run, and where the run and its
            page are.
        As Trainer.
    """
    given = {**settings} if steps is None else {**settings, "steps": steps}
    folder = Path(keep or tempfile.mkdtemp(prefix="agentgrpo-learns-"))
    made = config_of(config, {**given, "out_dir": str(folder)})
    every = max(1, math.ceil(made.steps / looks))
    made = config_of(made, {"eval_every": every, "save_every": made.steps, "keep_checkpoints": 1})
    watch = _Watch(solved, risk, math.ceil(made.steps / every))
    shared = SHARED[-1].build if SHARED else None
    with Trainer(made, callbacks=watch, make=shared) as trainer:
        trainer.train()
    if watch.why is None:
        if keep is None:
            shutil.rmtree(folder)
        assert watch.learned is not None
        return watch.learned
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    page = folder / "view.html"
    write_text(page, make_page([read_run(folder)]))
    raise AssertionError(f"{watch.why}\n\n{report(folder)}\n\nlook at it: {page}")


class _Watch(Callback):
    """Looks at each evaluation, and ends a run that is decided."""

    def __init__(self, solved: float | None, risk: float, looks: int) -> None:
        self._solved, self._risk, self._looks = solved, risk, looks
        self._before: Mapping[str, bool] = {}
        self._live = 0.0
        self._decided = False
        self.learned: Learned | None = None
        self.why: str | None = "the run was stopped before its first look"
        """Why it is not said to learn; None: it learned."""

    def on_step_end(self, trainer: Any, step: int, metrics: Metrics) -> None:
        """Nothing was trained on in half of the steps: that is hopeless."""
        self._live += metrics["rollout/live_groups"]
        if 2 * step >= trainer.config.steps and not self._live:
            self.why = f"nothing to learn from: no group of {step} steps carried a gradient"
            trainer.stop()

    def on_evaluate(self, trainer: Any, step: int, metrics: Metrics) -> None:
        """Compare with the first."""
        if self._decided:
            return
        seen = _heldout(trainer.config.out_dir, step)
        if step == 0:
            self._before = seen
            return
        self._before = self._before or _heldout(trainer.config.out_dir, 0)  # a run that goes on
        tasks = seen.keys() & self._before.keys()
        self.learned = got = Learned(
            before=sum(self._before[t] for t in tasks) / len(tasks),
            after=sum(seen[t] for t in tasks) / len(tasks),
            tasks=len(tasks),
            gained=sum(seen[t] and not self._before[t] for t in tasks),
            lost=sum(self._before[t] and not seen[t] for t in tasks),
            steps=step,
        )
        last, right = step == trainer.config.steps, round(got.after * got.tasks)
        wanted = self._solved or 0.0
        self.why = None
        if got.p_value > self._risk / self._looks:
            self.why = f"did not learn: {got}; p must be at most {self._risk / self._looks:.2g}"
        elif 1 - tail(right + 1, got.tasks, wanted) <= self._risk:
            self.why = f"learned too little: {got}; to be solved: {wanted:.2f}"
        elif got.after >= wanted and not last:
            self._decided = True  # a step may still be trained, and evaluated
            trainer.stop()


def _heldout(run: Path, step: int) -> dict[str, bool]:
    """Which held-out tasks were solved, by id, at a step; one that timed out was not."""
    played = [
        rollout
        for place, rollout in read_rollouts(run / "rollouts.jsonl")
        if (place["split"], place["step"]) == ("heldout", step)
    ]
    if any(rollout.solved is None for rollout in played if rollout.in_baseline):
        raise ValueError("nobody says which rollouts are solved: set reward.solved_at")
    sound = (rollout for rollout in played if rollout.status is not Status.INFRA_ERROR)
    return {rollout.task.id: bool(rollout.solved) for rollout in sound}

"""Tests that a policy learns from a config (with a statistical test) and that a run repeats."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.config.read import config_of
from agentgrpo.inspect.run_doctor import report
from agentgrpo.inspect.verify.replay import replay_steps
from agentgrpo.inspect.view.collect import read_run
from agentgrpo.inspect.view.page import make_page
from agentgrpo.records.rollouts import read_rollouts
from agentgrpo.support.atomic_files import write_text
from agentgrpo.testing.engines import SHARED
from agentgrpo.train.callbacks import Callback
from agentgrpo.train.trainer import Trainer
from agentgrpo.types import Metrics, Status


@dataclass(frozen=True, slots=True)
class Learned:
    """The result of a run: the share of held-out tasks solved before and after."""

    before: float
    after: float
    tasks: int
    gained: int
    """Tasks solved after and not before."""
    lost: int
    steps: int
    p_value: float
    """Probability of at least `gained` among the changed tasks under a fair coin."""

    def __str__(self) -> str:
        return (
            f"held-out share {self.before:.2f} -> {self.after:.2f} of {self.tasks} tasks after "
            f"{self.steps} steps ({self.gained} gained, {self.lost} lost, p = {self.p_value:.2g})"
        )


def tail(least: int, count: int, share: float) -> float:
    """Probability of at least `least` successes in `count` trials of probability `share`."""
    p, q = share.as_integer_ratio()  # exact integers: floats would underflow
    successes = range(least, count + 1)
    ways = sum(math.comb(count, k) * p**k * (q - p) ** (count - k) for k in successes)
    return float(ways / q**count)


def assert_learns(
    config: str | Path | TrainConfig,
    *,
    solved: float | None = None,
    steps: int | None = None,
    risk: float = 0.01,
    keep: str | Path | None = None,
    **settings: Any,
) -> Learned:
    """Train, and fail unless the policy learned to solve more held-out tasks.

    The same held-out tasks are played greedily before and after and compared in pairs (McNemar's
    exact test): more of the changed tasks must be gained than a fair coin would give.

    False pass: if training improves nothing, a changed task is as likely lost as gained, and the
    test passes with probability `risk` at most, over all evaluations together. This assumes that
    tasks change independently: of several wordings of one question keep one.
    False failure: with `solved`, a policy that solves this share of all such tasks fails that part
    with probability `risk` at most. The paired part has no such bound; docs/python.md has its miss
    rate by gain and number of tasks.

    The run stops early once an evaluation passes both parts, and fails after half of the steps if
    no group of rollouts has had a gradient.

    Args:
        config: a file, a shipped config's name or a TrainConfig.
        solved: share of the held-out tasks to be solved in the end; None: any gain.
        steps: number of training steps, instead of the config's.
        risk: probability of a wrong result, see above.
        keep: folder of the run, which is kept; None: a temporary one, kept only on failure.
        settings: overrides of the config, by section.

    Raises:
        AssertionError: with the findings of `agentgrpo doctor` and the path of the run's page.
        Exception: those of Trainer.
    """
    folder = Path(keep or tempfile.mkdtemp(prefix="agentgrpo-learns-"))
    steps = steps or config_of(config, settings).steps
    eval_every = math.ceil(steps / 2)  # one evaluation halfway, one at the end
    schedule = {"eval_every": eval_every, "save_every": steps, "keep_checkpoints": 1}
    overrides = {**settings, **schedule, "steps": steps, "out_dir": str(folder)}
    watch = _Watch(solved or 0.0, risk, math.ceil(steps / eval_every))
    make = SHARED[-1].build if SHARED else None
    with Trainer(config_of(config, overrides), callbacks=watch, make=make) as trainer:
        trainer.train()
    if isinstance(watch.outcome, Learned):
        if keep is None:
            shutil.rmtree(folder)
        return watch.outcome
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    write_text(page := folder / "view.html", make_page([read_run(folder)]))
    raise AssertionError(f"{watch.outcome}\n\n{report(folder)}\n\nopen in a browser: {page}")


class _Watch(Callback):
    """Tests each evaluation and stops the run once the result is certain."""

    outcome: Learned | str = "the run was stopped before its first evaluation"
    """str: why the assertion fails."""

    def __init__(self, solved: float, risk: float, evaluations: int) -> None:
        self._solved, self._risk = solved, risk
        self._max_p = risk / evaluations  # Bonferroni: several evaluations share the risk
        self._live = self._decided = False

    def on_step_end(self, trainer: Any, step: int, metrics: Metrics) -> None:
        self._live |= metrics["rollout/live_groups"] > 0
        if 2 * step >= trainer.config.steps and not self._live:
            self.outcome = f"nothing to learn from: no group in {step} steps had a gradient"
            trainer.stop()

    def on_evaluate(self, trainer: Any, step: int, metrics: Metrics) -> None:
        if step == 0 or self._decided:  # after stop() one more step may be trained and evaluated
            return
        before, after = (_heldout(trainer.config.out_dir, at) for at in (0, step))
        pairs = Counter((before[task], after[task]) for task in before.keys() & after.keys())
        gained, lost, both = pairs[False, True], pairs[True, False], pairs[True, True]
        total, solved, p = pairs.total(), both + gained, tail(gained, gained + lost, 0.5)
        result = Learned((both + lost) / total, solved / total, total, gained, lost, step, p)
        if p > self._max_p:
            self.outcome = f"did not learn: {result}; expected p of at most {self._max_p:.2g}"
        elif 1 - tail(solved + 1, total, self._solved) <= self._risk:
            self.outcome = f"learned too little: {result}; expected share: {self._solved:.2f}"
        else:
            self.outcome = result
            if result.after >= self._solved and step < trainer.config.steps:
                self._decided = True
                trainer.stop()


def _heldout(run: Path, step: int) -> dict[str, bool]:
    """Whether each held-out task was solved at a step, by id; a timed-out one was not."""
    records = read_rollouts(run / "rollouts.jsonl")
    rollouts = [r for place, r in records if (place["split"], place["step"]) == ("heldout", step)]
    if any(rollout.solved is None for rollout in rollouts if rollout.in_baseline):
        raise ValueError("reward.solved_at: expected a number: this reward does not define solved")
    valid = (rollout for rollout in rollouts if rollout.status is not Status.INFRA_ERROR)
    return {rollout.task.id: bool(rollout.solved) for rollout in valid}


def assert_repeats(config: str | Path | TrainConfig, *, steps: int = 2, **settings: Any) -> None:
    """Train twice from the same weights and fail at the first bit that differs.

    Compares like `agentgrpo verify RUN --again`: every token, log-probability, observation, reward
    and advantage, the numbers of every step and the trained weights, but no times. Sets
    rollout.deterministic, which on CUDA costs the overlap of tools with decoding.

    Args:
        config: a file, a shipped config's name or a TrainConfig.
        steps: number of training steps.
        settings: overrides of the config, by section.

    Raises:
        AssertionError: names the step, rollout, turn and token where the second run differs.
        Exception: those of Trainer.
    """
    resolved = config_of(config, settings)
    data = {"num_heldout": min(resolved.data.num_heldout, 8)}  # enough to compare
    overrides = {"steps": steps, "save_every": steps, "rollout": {"deterministic": True}}
    make = SHARED[-1].build if SHARED else None
    with tempfile.TemporaryDirectory(prefix="agentgrpo-repeats-") as folder:
        repeated = config_of(resolved, {**overrides, "data": data, "out_dir": folder})
        with Trainer(repeated, make=make) as trainer:
            trainer.train()
        difference = replay_steps(Path(folder), f"1-{steps}", make=make)
    assert difference is None, f"the second run differs: {difference}"

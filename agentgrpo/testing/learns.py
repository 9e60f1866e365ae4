"""Does a policy learn from this config, decided with statistics; does a run repeat bit by bit?"""

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
from agentgrpo.inspect.verify.replay import play_again
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
    """What a run came to: of the held-out tasks, what share was solved before and after."""

    before: float
    after: float
    tasks: int
    gained: int
    """Tasks solved after and not before."""
    lost: int
    steps: int
    p_value: float
    """Of as many gained among those that changed, if each went either way by a coin."""

    def __str__(self) -> str:
        return (
            f"held-out share {self.before:.2f} -> {self.after:.2f} of {self.tasks} tasks after "
            f"{self.steps} steps ({self.gained} gained, {self.lost} lost, p = {self.p_value:.2g})"
        )


def tail(least: int, count: int, share: float) -> float:
    """Probability of at least so many successes among count, each of probability share."""
    yes, every = share.as_integer_ratio()
    parts = range(least, count + 1)
    ways = sum(math.comb(count, k) * yes**k * (every - yes) ** (count - k) for k in parts)
    return float(ways / every**count)


def assert_learns(
    config: str | Path | TrainConfig,
    *,
    solved: float | None = None,
    steps: int | None = None,
    risk: float = 0.01,
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
    with probability `risk` at most. The paired part has no such bound without a gain to look for;
    docs/python.md has how often it misses which gain on how many tasks.

    The run ends early once a look has shown both, and as hopeless where after half of the steps no
    group of rollouts has carried a gradient: nothing was trained on.

    Args:
        config: a file, a shipped config's name or a TrainConfig.
        solved: share of the held-out tasks that is to be solved in the end; None: any gain.
        steps: of training, instead of the config's.
        risk: see above.
        keep: the run's folder, kept; None: a temporary one, which is kept if this fails.
        settings: what is to differ from the config, by section.

    Raises:
        AssertionError: what `agentgrpo doctor` says of the run, and where its page is.
        As Trainer.
    """
    folder = Path(keep or tempfile.mkdtemp(prefix="agentgrpo-learns-"))
    steps = steps or config_of(config, settings).steps
    every = math.ceil(steps / 2)  # one look halfway, one at the end
    looks = {"eval_every": every, "save_every": steps, "keep_checkpoints": 1}
    made = config_of(config, {**settings, **looks, "steps": steps, "out_dir": str(folder)})
    watch = _Watch(solved or 0.0, risk, math.ceil(steps / every))
    with Trainer(made, callbacks=watch, make=SHARED[-1].build if SHARED else None) as trainer:
        trainer.train()
    if isinstance(watch.outcome, Learned):
        if keep is None:
            shutil.rmtree(folder)
        return watch.outcome
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    write_text(page := folder / "view.html", make_page([read_run(folder)]))
    raise AssertionError(f"{watch.outcome}\n\n{report(folder)}\n\nlook at it: {page}")


class _Watch(Callback):
    """Looks at each evaluation, and ends a run that is decided."""

    outcome: Learned | str = "the run was stopped before its first look"
    """Or why it is not said to learn."""

    def __init__(self, solved: float, risk: float, looks: int) -> None:
        self._solved, self._risk, self._each = solved, risk, risk / looks
        self._live = self._decided = False

    def on_step_end(self, trainer: Any, step: int, metrics: Metrics) -> None:
        self._live |= metrics["rollout/live_groups"] > 0
        if 2 * step >= trainer.config.steps and not self._live:
            self.outcome = f"nothing to learn from: no group of {step} steps carried a gradient"
            trainer.stop()

    def on_evaluate(self, trainer: Any, step: int, metrics: Metrics) -> None:
        if step == 0 or self._decided:  # a step may still be trained, and evaluated
            return
        then, now = (_heldout(trainer.config.out_dir, at) for at in (0, step))
        pairs = Counter((then[task], now[task]) for task in then.keys() & now.keys())
        gained, lost, kept = pairs[False, True], pairs[True, False], pairs[True, True]
        of, right, p = pairs.total(), kept + gained, tail(gained, gained + lost, 0.5)
        got = Learned((kept + lost) / of, right / of, of, gained, lost, step, p)
        if p > self._each:
            self.outcome = f"did not learn: {got}; p must be at most {self._each:.2g}"
        elif 1 - tail(right + 1, of, self._solved) <= self._risk:
            self.outcome = f"learned too little: {got}; to be solved: {self._solved:.2f}"
        else:
            self.outcome = got
            if got.after >= self._solved and step < trainer.config.steps:
                self._decided = True
                trainer.stop()


def _heldout(run: Path, step: int) -> dict[str, bool]:
    """Which held-out tasks were solved, by id, at a step; one that timed out was not."""
    every = read_rollouts(run / "rollouts.jsonl")
    played = [r for at, r in every if (at["split"], at["step"]) == ("heldout", step)]
    if any(rollout.solved is None for rollout in played if rollout.in_baseline):
        raise ValueError("nobody says which rollouts are solved: set reward.solved_at")
    sound = (rollout for rollout in played if rollout.status is not Status.INFRA_ERROR)
    return {rollout.task.id: bool(rollout.solved) for rollout in sound}


def assert_repeats(config: str | Path | TrainConfig, *, steps: int = 2, **settings: Any) -> None:
    """Train twice from the same weights and fail at the first bit that differs.

    As `agentgrpo verify RUN --again` does it: every token, log-probability, observation, reward and
    advantage, the numbers of every step and the trained weights are compared; times are not.
    rollout.deterministic is switched on, which on CUDA costs the overlap of tools with decoding.

    Args:
        config: a file, a shipped config's name or a TrainConfig.
        steps: of training.
        settings: what is to differ from the config, by section.

    Raises:
        AssertionError: names the step, rollout, turn and token where the second run differs.
        As Trainer.
    """
    made = config_of(config, settings)
    fewer = {"num_heldout": min(made.data.num_heldout, 8)}  # enough to see that they repeat
    given = {"steps": steps, "save_every": steps, "rollout": {"deterministic": True}, "data": fewer}
    make = SHARED[-1].build if SHARED else None
    with tempfile.TemporaryDirectory(prefix="agentgrpo-repeats-") as folder:
        with Trainer(config_of(made, {**given, "out_dir": folder}), make=make) as trainer:
            trainer.train()
        parted = play_again(Path(folder), f"1-{steps}", make=make)
    assert parted is None, f"the second run is another one from here on: {parted}"

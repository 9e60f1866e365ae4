"""A training run from Python: Trainer. loop.py has what becomes of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from agentgrpo.config import TrainConfig
from agentgrpo.config.read import config_of, name_of
from agentgrpo.rewards.rollout_view import RolloutView
from agentgrpo.rollout.sampler import as_task
from agentgrpo.support import parallel
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.support.memory import release, release_frames
from agentgrpo.support.runtime import prepare_environment
from agentgrpo.train.build import build
from agentgrpo.train.callbacks import Callback
from agentgrpo.train.interrupt import stop_after_step
from agentgrpo.train.loop import engine_awake, play_heldout, train
from agentgrpo.train.parts import Parts
from agentgrpo.types import Metrics, Task

RewardFunction = Callable[..., Any] | str


class Trainer:
    """A run, from Python: what `agentgrpo train` does is written with it.

        with Trainer("quickstart", steps=8, rollout={"group_size": 4}) as trainer:
            trainer.train()
            print(trainer.evaluate()["solved"])

    Everything is checked, and the model loaded, when it is made. A Trainer of the same settings and
    out_dir continues what an earlier one has saved, as the same command does.

    Args:
        config: a file, the name of a shipped config, or a TrainConfig; None: settings are all.
        callbacks: one Callback or several, told of every step.
        reward_funcs: functions in TRL's form or ours (docs/agents.md), instead of
            `reward.functions`: one or several, each with a name in a module or the notebook, or
            named as there ("module:function").
        reward_weights: of these; None: 1 each.
        make: instead of build(), what makes the parts.
        settings: what is to differ from the config, by section: `loss={"beta": 0.0}`.

    Raises:
        As build(); ValueError: there is not one weight for each function, two functions have one
        name, or a callback is no Callback.
    """

    def __init__(
        self,
        config: str | Path | TrainConfig | None = None,
        *,
        callbacks: Callback | Sequence[Callback] = (),
        reward_funcs: RewardFunction | Sequence[RewardFunction] = (),
        reward_weights: float | Sequence[float] | None = None,
        make: Callable[[TrainConfig], Parts] | None = None,
        **settings: Any,
    ) -> None:
        prepare_environment()
        names = [_name(function) for function in _several(reward_funcs)]
        given = [1.0] * len(names) if reward_weights is None else _several(reward_weights)
        weights = [float(weight) for weight in given]
        if len(weights) != len(names):
            raise ValueError(
                f"reward_weights: expected {len(names)}, as many as reward_funcs, "
                f"got {len(weights)}"
            )
        if len({*names}) < len(names):
            raise ValueError(f"reward_funcs: expected different names, got {', '.join(names)}")
        if names:
            functions = dict(zip(names, weights, strict=True))
            settings["reward"] = {**settings.get("reward", {}), "functions": functions}
        self._callbacks = _several(callbacks)
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise ValueError(f"callbacks: expected agentgrpo.Callback, got {callback!r}")
        self.config = config_of(config, settings)
        self._asked = self._finished = False
        self._parts: Parts | None = None
        parallel.start()
        try:
            self._parts = (make or build)(self.config)
        finally:
            if self._parts is None:
                parallel.stop()

    @property
    def parts(self) -> Parts:
        """Engine, learner, tasks and all else that the run is made of."""
        if self._parts is None:
            raise RuntimeError(
                "this Trainer is closed, or its train() was ended by an error or Ctrl-C; make "
                "another, which continues from the last checkpoint in out_dir"
            )
        return self._parts

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self.parts.learner.step_count

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, of steps and evaluations, also of before it was resumed."""
        return read_lines(self.config.out_dir / "metrics.jsonl")

    def train(self) -> None:
        """Train up to config.steps, or until stop(), Ctrl-C or a callback ends it after a step.

        Called again after that, it goes on. What is raised in it closes the Trainer: the memory is
        free, and another one continues from the last checkpoint.

        Raises:
            RuntimeError: it is closed.
            UserCodeError, InfrastructureError, Disagreement: what it has learnt from is not to be
                trusted; besides, whatever a callback raises.
        """
        say = self.parts.progress.say
        if self._finished:
            return
        self._asked = False
        try:
            with stop_after_step(say) as stopping:
                self._tell("on_train_begin")
                train(self.config, self.parts, lambda: self._asked or stopping(), self._tell)
            self._finished = self.step == self.config.steps
            self._tell("on_train_end")
        except BaseException as error:
            release_frames(error)
            self.close()
            raise

    def stop(self) -> None:
        """End train() after the step that it is in, with a checkpoint."""
        self._asked = True

    def evaluate(self) -> Metrics:
        """Play the held-out tasks with the policy as it is; `solved`, ... Not recorded."""
        return play_heldout(self.config, self.parts)[1]

    def generate(
        self, tasks: Task | str | Iterable[Task | str], n: int = 1, *, temperature: float = 0.0,
        seed: int = 0,
    ) -> list[list[RolloutView]]:  # fmt: skip
        """Play tasks with the policy as it is, in the run's environment; neither scored nor learnt.

        Args:
            tasks: one or several; a text becomes a task of one user message.
            n: rollouts of each; more than one need a temperature.
            temperature: 0: greedy.
            seed: of what is sampled.

        Returns:
            The n rollouts of each task, with `text`, `answer`, `turns`, `observations`, `stats`.
        """
        if n > 1 and not temperature:
            raise ValueError(
                f"n {n} with temperature 0 is the same attempt {n} times: set a temperature, 1.0 "
                "for what training samples"
            )
        parts = self.parts
        made = [as_task(task, str(place)) for place, task in enumerate(_several(tasks))]
        with engine_awake(parts), parts.progress.phase(f"playing {len(made)} tasks x {n}"):
            groups, _ = parts.sampler.play(made, n, seed=seed, temperature=temperature)
        return [[parts.reward.view(rollout) for rollout in group.rollouts] for group in groups]

    def close(self) -> None:
        """Stop the engine and free its memory and the learner's; another Trainer can be made."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        try:
            parts.close()
        finally:
            parallel.stop()
            del parts
            release()

    def _tell(self, event: str, *values: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(self, *values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _several(given: Any) -> list[Any]:
    """What may be given alone, or as several: a list, an array, a column of a data set."""
    alone = isinstance(given, str | Mapping) or not isinstance(given, Iterable)
    alone = alone or getattr(given, "ndim", 1) == 0
    return [given] if alone else list(given)


def _name(function: RewardFunction) -> str:
    if isinstance(function, str):
        return function
    if not callable(function):
        raise ValueError(
            f"reward_funcs: expected a function or 'module:function', got {function!r}"
        )
    return name_of(function, key="reward_funcs")

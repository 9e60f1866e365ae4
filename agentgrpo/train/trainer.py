"""Trainer: a training run from Python. loop.py runs the steps."""

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
from agentgrpo.train.loop import engine_awake, evaluate_heldout, train
from agentgrpo.train.parts import Parts
from agentgrpo.types import Metrics, Task

RewardFunction = Callable[..., Any] | str


class Trainer:
    """A training run from Python. `agentgrpo train` uses it too.

        with Trainer("quickstart", steps=8, rollout={"group_size": 4}) as trainer:
            trainer.train()
            print(trainer.evaluate()["solved"])

    The constructor makes all checks and loads the model. A Trainer with the settings and out_dir of
    an earlier one resumes from its last checkpoint.

    Args:
        config: path of a file, name of a shipped config, or a TrainConfig. None: the defaults.
        callbacks: one Callback or several.
        reward_funcs: replaces `reward.functions`: one reward function or several, in TRL's
            signature or agentgrpo's (docs/agents.md). Each is a module-level or notebook function,
            or its name as "module:function".
        reward_weights: one per function. None: 1 each.
        make: replaces build().
        settings: overrides of the config, by section: `loss={"beta": 0.0}`.

    Raises:
        ValueError: a setting is invalid, as in build(); the number of weights is not that of the
            functions, two functions have the same name, or a callback is no Callback.
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
        names = [_name(function) for function in _as_list(reward_funcs)]
        weights = [1.0] * len(names)
        if reward_weights is not None:
            weights = [float(weight) for weight in _as_list(reward_weights)]
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
        self._callbacks = _as_list(callbacks)
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise ValueError(f"callbacks: expected agentgrpo.Callback, got {callback!r}")
        self.config = config_of(config, settings)
        self._stop_requested = self._finished = False
        self._parts: Parts | None = None
        parallel.start()
        try:
            self._parts = (make or build)(self.config)
        finally:
            if self._parts is None:
                parallel.stop()

    @property
    def parts(self) -> Parts:
        """Engine, learner, tasks and the other parts of the run."""
        if self._parts is None:
            raise RuntimeError(
                "this Trainer is closed, or an error or Ctrl-C ended its train(). Make a new "
                "Trainer: it continues from the last checkpoint in out_dir"
            )
        return self._parts

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self.parts.learner.step_count

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, including those written before the run was resumed."""
        return read_lines(self.config.out_dir / "metrics.jsonl")

    def train(self) -> None:
        """Train up to config.steps, or until stop() or Ctrl-C ends it after a step.

        Called again after that, it continues. An exception closes the Trainer and frees its memory;
        a new Trainer continues from the last checkpoint.

        Raises:
            RuntimeError: the Trainer is closed.
            UserCodeError: user code failed.
            InfrastructureError: this machine failed.
            Disagreement: the engine and the learner compute different log-probabilities.
        """
        print_line = self.parts.progress.print
        if self._finished:
            return
        self._stop_requested = False
        try:
            with stop_after_step(print_line) as interrupted:
                self._notify("on_train_begin")
                train(
                    self.config,
                    self.parts,
                    lambda: self._stop_requested or interrupted(),
                    self._notify,
                )
            self._finished = self.step == self.config.steps
            self._notify("on_train_end")
        except BaseException as error:
            # the traceback's frames hold tensors: without this close() frees no GPU memory
            release_frames(error)
            self.close()
            raise

    def stop(self) -> None:
        """End train() after the current step, with a checkpoint."""
        self._stop_requested = True

    def evaluate(self) -> Metrics:
        """Play the held-out tasks with the current policy. Returns `solved`, `reward`, ...

        Not recorded.
        """
        return evaluate_heldout(self.config, self.parts)[1]

    def generate(
        self, tasks: Task | str | Iterable[Task | str], n: int = 1, *, temperature: float = 0.0,
        seed: int = 0,
    ) -> list[list[RolloutView]]:  # fmt: skip
        """Play tasks with the current policy in the run's environment, without scoring or training.

        Args:
            tasks: one or several; a string becomes a task with one user message.
            n: rollouts per task; more than one require a temperature.
            temperature: 0 is greedy.
            seed: of sampling.

        Returns:
            The n rollouts of each task, with `text`, `answer`, `turns`, `observations`, `stats`.
        """
        if n > 1 and not temperature:
            raise ValueError(
                f"temperature: expected above 0 for n = {n}, got 0, which samples the same "
                "rollout each time. Training samples at 1.0"
            )
        parts = self.parts
        task_list = [as_task(task, str(index)) for index, task in enumerate(_as_list(tasks))]
        with engine_awake(parts), parts.progress.phase(f"playing {len(task_list)} tasks x {n}"):
            groups, _ = parts.sampler.play(task_list, n, seed=seed, temperature=temperature)
        return [[parts.reward.view(rollout) for rollout in group.rollouts] for group in groups]

    def close(self) -> None:
        """Stop the engine and free its memory and the learner's, so that a new Trainer fits."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        try:
            parts.close()
        finally:
            parallel.stop()
            del parts
            release()

    def _notify(self, event: str, *values: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(self, *values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_list(value: Any) -> list[Any]:
    """Wrap a single value; copy a list, an array or a dataset's column."""
    is_single = isinstance(value, str | Mapping) or not isinstance(value, Iterable)
    is_single = is_single or getattr(value, "ndim", 1) == 0
    return [value] if is_single else list(value)


def _name(function: RewardFunction) -> str:
    if isinstance(function, str):
        return function
    if not callable(function):
        raise ValueError(
            f"reward_funcs: expected a function or 'module:function', got {function!r}"
        )
    return name_of(function, key="reward_funcs")

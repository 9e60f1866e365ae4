"""Score rollouts: after the environment's parts the shipped reward, then the user's functions.

    [reward.functions]
    "my_rewards:brevity" = 0.2     # module:function = weight
    length = 0.1                   # one of BUILT_IN

A function takes a RolloutView and returns one of

    a number                        the part of the reward named after the function
    {name: number}                  several parts
    a list of SpanReward            rewards of single turns or lines, named by themselves
    None                            this rollout cannot be scored: it leaves its group's baseline,
                                    as an infrastructure error does, also with on_error = "raise"

The values are multiplied by the function's weight. A function with a parameter `completions` has
TRL's signature and is called as in TRL (rewards/trl_functions.py). If there is such a function, the
functions alone are the reward, unless reward.kind names another reward. A function may be
`async def`: the calls for all rollouts of a step then wait for the network concurrently. An
exception in a function is an infrastructure error, not the policy's failure: the rollout gets
Status.INFRA_ERROR and a message that names task, rollout and function. With
reward.on_error = "raise", the run stops instead.

A group is scored as soon as its last rollout has ended, while other groups are still being played.
One background thread scores the groups one after another; only awaited calls overlap. SIGALRM
cannot be used on that thread: math_verify.parse uses it unless parsing_timeout is None.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentgrpo.config import RewardConfig
from agentgrpo.config.read import resolve_name
from agentgrpo.rewards.efficiency import add_efficiency, decay
from agentgrpo.rewards.rollout_view import BUILT_IN, Decode, RolloutView
from agentgrpo.rewards.shipped import Reward, ask, score_async
from agentgrpo.rewards.trl_functions import is_trl_form, require_columns, values_of_group
from agentgrpo.support.user_calls import (
    UserCodeError,
    WrongResult,
    as_number,
    describe_error,
    event_loop,
    user_call,
)
from agentgrpo.types import Group, Rollout, SpanReward, Status, Task


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    weight: float
    call: Callable[..., Any]
    in_trl_form: bool
    """Whether it has TRL's signature: it is called once per group."""

    @property
    def description(self) -> str:
        return f"the reward function {self.name}"


class Scoring:
    """A run's reward: the shipped or user-defined base reward, then the functions."""

    def __init__(
        self, base: Reward, config: RewardConfig, decode: Decode, *, total_steps: int = 1,
        limit_s: float | None = None,
    ) -> None:  # fmt: skip
        self._base, self._decode, self._raise = base, decode, config.on_error == "raise"
        self._limit_s = limit_s
        self._config, self._total_steps = config, total_steps
        self._functions = [_load(name, weight) for name, weight in config.functions.items()]
        self._logged: defaultdict[str, list[float]] = defaultdict(list)
        self.steps_done: Callable[[], int] = lambda: 0
        """Returns the learner's optimizer steps so far, for functions with TRL's signature."""
        names = [function.name for function in self._functions]
        if len(set(names)) < len(names):
            raise ValueError(f"reward.functions: expected different names, got {', '.join(names)}")

    def score(self, groups: Sequence[Group], *, step: int | None = None) -> None:
        """Set the rewards of every rollout without an infrastructure error.

        `step` is the training step. It is None in an evaluation, where rollouts are not compared
        with their group.
        """
        run_in_background(self._score(groups, step)).result()

    def require_columns(self, task: Task, *, environments: bool) -> None:
        """Check that the task has the columns that functions with TRL's signature need.

        Raises:
            ValueError: a column is missing, or `environments` are needed and not available.
        """
        for function in self._functions:
            if function.in_trl_form:
                name, call = function.name, function.call
                require_columns(name, call, task.spec, environments=environments)

    def view(self, rollout: Rollout) -> RolloutView:
        return RolloutView(rollout, self._decode)

    def take_logged(self) -> dict[str, list[float]]:
        """Return the values passed to log_metric since the last call, by name."""
        taken, self._logged = dict(self._logged), defaultdict(list)
        return taken

    def begin(self, group: Group, *, step: int | None = None) -> Future[None]:
        return run_in_background(self._score([group], step))

    async def _score(self, groups: Sequence[Group], step: int | None) -> None:
        scorable = [
            [(i, r) for i, r in enumerate(group.rollouts) if r.status is not Status.INFRA_ERROR]
            for group in groups
        ]
        for group in groups:
            await score_async(group, self._base, self.view, limit_s=self._limit_s)
        if self._functions:
            await asyncio.gather(*(self._apply_all(rollouts) for rollouts in scorable if rollouts))
        if self._config.solved_at is not None:
            for rollouts in scorable:
                for _, rollout in rollouts:
                    rollout.stats["solved"] = float(rollout.reward >= self._config.solved_at)
        if step is not None:
            for group in groups:
                self._add_efficiency(group, step)
        for group in groups:
            for rollout in group.rollouts:
                rollout.environment = None

    def _add_efficiency(self, group: Group, step: int) -> None:
        """Apply reward.sigma_tool and reward.sigma_length, which decay over the run."""
        c = self._config
        if c.sigma_tool or c.sigma_length:
            sigma_scale = decay(step, self._total_steps)
            tool, length = c.sigma_tool * sigma_scale, c.sigma_length * sigma_scale
            add_efficiency(group, sigma_tool=tool, sigma_length=length)

    async def _apply_all(self, rollouts: Sequence[tuple[int, Rollout]]) -> None:
        """Apply all functions in order to a group's rollouts (given with their index)."""
        views = [self.view(rollout) for _, rollout in rollouts]
        group_values = {
            function.name: asyncio.ensure_future(
                values_of_group(
                    function.call, views, what=function.description, limit_s=self._limit_s,
                    step=self.steps_done(), total_steps=self._total_steps, logged=self._logged,
                )
            )
            for function in self._functions
            if function.in_trl_form
        }  # fmt: skip

        async def parts_of(function: _Function, place: int) -> dict[str, float] | None:
            index, rollout = rollouts[place]
            task, read = rollout.task.id, partial(_weighted_parts, rollout, function)
            if not function.in_trl_form:
                call = partial(function.call, views[place])
                return await ask(
                    call, task, index, read, what=function.description, limit_s=self._limit_s
                )
            value = (await group_values[function.name])[place]
            if value is None:
                rollout.not_applicable.append(function.name)
                return {}
            with user_call(function.call, function.description, task=task, rollout=index):
                return read(value)

        try:
            await asyncio.gather(
                *(self._apply(i, r, place, parts_of) for place, (i, r) in enumerate(rollouts))
            )
        finally:
            for task_values in group_values.values():
                task_values.cancel()
            await asyncio.gather(*group_values.values(), return_exceptions=True)

    async def _apply(
        self, index: int, rollout: Rollout, place: int,
        parts_of: Callable[[_Function, int], Coroutine[Any, Any, dict[str, float] | None]],
    ) -> None:  # fmt: skip
        task = rollout.task.id
        for function in self._functions:
            try:
                parts = await parts_of(function, place)
            except Exception as error:
                if not isinstance(error, UserCodeError):  # raised by a built-in function
                    failure = UserCodeError(
                        function.description, describe_error(error), task=task, rollout=index
                    )
                else:  # the error of a group's call names no rollout: add this one
                    failure = UserCodeError(
                        error.function, error.failure, error.line, task=task, rollout=index
                    )
                # sys.exit() and KeyboardInterrupt stop the run, also with on_error = "drop"
                exits = not isinstance(error.__cause__, Exception | None)
                if self._raise or exits:
                    raise failure from error.__cause__
            else:
                if parts is not None:
                    rollout.rewards |= parts
                    continue
                message = "returned None: this rollout cannot be scored"
                failure = UserCodeError(function.description, message, task=task, rollout=index)
            rollout.status, rollout.error = Status.INFRA_ERROR, str(failure)
            return
        if rollout.not_applicable and not rollout.rewards and not rollout.span_rewards:
            rollout.status = Status.INFRA_ERROR  # as in TRL: not 0, but outside the baseline
            rollout.error = f"task {task!r}, rollout {index}: no reward function applies"


def run_in_background(coroutine: Coroutine[Any, Any, None]) -> Future[None]:
    """Start a coroutine on the process's event loop for rewards."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop("rewards"))


def reward_function(name: str) -> Callable[[RolloutView], Any]:
    """Resolve a key of `reward.functions` to its function."""
    return resolve_name(name, BUILT_IN, key="reward.functions")


def _load(name: str, weight: float) -> _Function:
    function = reward_function(name)
    return _Function(name.rpartition(":")[2], weight, function, is_trl_form(function))


def _weighted_parts(rollout: Rollout, function: _Function, value: Any) -> dict[str, float] | None:
    """Multiply a function's parts by its weight; append its span rewards to the rollout."""
    if value is None:
        return None
    spans: Sequence[SpanReward] = ()
    parts: dict[str, Any] = {}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        parts = dict(value)
    elif isinstance(value, Sequence) and all(isinstance(span, SpanReward) for span in value):
        spans = value
    else:
        parts = {function.name: value}
    # Each part has one weight (gdpo divides by it), so two functions cannot share a part.
    existing = rollout.rewards.keys() | {span.name for span in rollout.span_rewards}
    for name in [*parts, *(span.name for span in spans)]:
        if name in existing:
            raise WrongResult(f"the reward has a part {name!r} already")
    rollout.span_rewards += [_weighted_span(rollout, span, function.weight) for span in spans]
    weighted = {}
    for name, part in parts.items():
        number = as_number(part)
        if number is None:
            raise WrongResult(f"expected a finite number as {name}, got {part!r:.80}")
        weighted[name] = rollout.weighted(name, function.weight, number)
    return weighted


def _weighted_span(rollout: Rollout, span: SpanReward, weight: float) -> SpanReward:
    total = sum(len(segment.token_ids) for segment in rollout.all_segments)
    value = as_number(span.value)
    if value is None or not 0 <= span.start < span.end <= total:
        raise WrongResult(f"expected a finite value on tokens within [0, {total}), got {span}")
    return replace(span, value=rollout.weighted(span.name, weight, value))

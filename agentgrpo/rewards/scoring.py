"""A rollout's reward: the shipped one (rewards.py), then the user's own functions.

    [reward.functions]
    "my_rewards:brevity" = 0.2     # module:function = weight
    length = 0.1                   # one of BUILT_IN

A function takes a RolloutView and returns one of

    a number                        the part of the reward named after the function
    {name: number}                  several parts
    a list of SpanReward            rewards of single turns or lines, named by themselves
    None                            this rollout cannot be scored: it leaves its group's baseline,
                                    as one that the machine broke, also with on_error = "raise"

each times the function's weight. A function with a parameter `completions` is in TRL's form, and is
called as those are (rewards/trl_functions.py); all of them together are then the reward, unless
reward.kind names another besides. A function may be `async def`: those of all rollouts of a step
wait for one another's network, not in line. One that raises is the machine's failure, not the
policy's: the rollout is set to Status.INFRA_ERROR with a message that names task, rollout and
function, or the run stops there (reward.on_error = "raise").

A group is scored as soon as its last rollout has ended, while others play: on one thread beside the
run's, and one group after another but for what is awaited. Alarms cannot be set there:
math_verify.parse does, unless parsing_timeout is None.
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
    of_group: bool
    """It is in TRL's form."""

    @property
    def said(self) -> str:
        """In words."""
        return f"the reward function {self.name}"


class Scoring:
    """A run's reward: the built-in one, then the functions."""

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
        """The learner's optimizer steps so far, for functions in TRL's form."""
        names = [function.name for function in self._functions]
        if len(set(names)) < len(names):
            raise ValueError(f"reward.functions: two of one name among {', '.join(names)}")

    def score(self, groups: Sequence[Group], *, step: int | None = None) -> None:
        """Set the rewards of every rollout that the machine did not break.

        `step`: of the training; None in an evaluation, where no rollout is compared with others.
        """
        in_background(self._score(groups, step)).result()

    def require_columns(self, task: Task, *, environments: bool) -> None:
        """That there is what functions in TRL's form ask for: columns of the task, environments."""
        for function in self._functions:
            if function.of_group:
                name, call = function.name, function.call
                require_columns(name, call, task.spec, environments=environments)

    def view(self, rollout: Rollout) -> RolloutView:
        """A rollout as functions see it."""
        return RolloutView(rollout, self._decode)

    def take_logged(self) -> dict[str, list[float]]:
        """What functions have given to log_metric since this was last asked, by name."""
        taken, self._logged = dict(self._logged), defaultdict(list)
        return taken

    def begin(self, group: Group, *, step: int | None = None) -> Future[None]:
        """Begin to score a group in the background."""
        return in_background(self._score([group], step))

    async def _score(self, groups: Sequence[Group], step: int | None) -> None:
        sound = [
            [(i, r) for i, r in enumerate(group.rollouts) if r.status is not Status.INFRA_ERROR]
            for group in groups
        ]
        for group in groups:
            await score_async(group, self._base, self.view, limit_s=self._limit_s)
        if self._functions:
            await asyncio.gather(*(self._apply_all(rollouts) for rollouts in sound if rollouts))
        if self._config.solved_at is not None:
            for rollouts in sound:
                for _, rollout in rollouts:
                    rollout.stats["solved"] = float(rollout.reward >= self._config.solved_at)
        if step is not None:
            for group in groups:
                self._compare(group, step)
        for group in groups:
            for rollout in group.rollouts:
                rollout.environment = None

    def _compare(self, group: Group, step: int) -> None:
        """Reward spending less than one's siblings, where the config says so."""
        c = self._config
        if c.sigma_tool or c.sigma_length:
            left = decay(step, self._total_steps)
            tool, length = c.sigma_tool * left, c.sigma_length * left
            add_efficiency(group, sigma_tool=tool, sigma_length=length)

    async def _apply_all(self, rollouts: Sequence[tuple[int, Rollout]]) -> None:
        """Apply all functions to the sound rollouts of a group, in order."""
        views = [self.view(rollout) for _, rollout in rollouts]
        of_group = {
            function.name: asyncio.ensure_future(
                values_of_group(
                    function.call, views, what=function.said, limit_s=self._limit_s,
                    step=self.steps_done(), total_steps=self._total_steps, logged=self._logged,
                )
            )
            for function in self._functions
            if function.of_group
        }  # fmt: skip

        async def parts_of(function: _Function, place: int) -> dict[str, float] | None:
            index, rollout = rollouts[place]
            task, read = rollout.task.id, partial(_parts, rollout, function)
            if not function.of_group:
                call = partial(function.call, views[place])
                return await ask(call, task, index, read, what=function.said, limit_s=self._limit_s)
            value = (await of_group[function.name])[place]
            if value is None:
                rollout.not_applicable.append(function.name)
                return {}
            with user_call(function.call, function.said, task=task, rollout=index):
                return read(value)

        try:
            await asyncio.gather(
                *(self._apply(i, r, place, parts_of) for place, (i, r) in enumerate(rollouts))
            )
        finally:
            for asked in of_group.values():
                asked.cancel()
            await asyncio.gather(*of_group.values(), return_exceptions=True)

    async def _apply(
        self, index: int, rollout: Rollout, place: int,
        parts_of: Callable[[_Function, int], Coroutine[Any, Any, dict[str, float] | None]],
    ) -> None:  # fmt: skip
        task = rollout.task.id
        for function in self._functions:
            try:
                parts = await parts_of(function, place)
            except Exception as error:
                if not isinstance(error, UserCodeError):  # a shipped one
                    failed = UserCodeError(
                        function.said, describe_error(error), task=task, rollout=index
                    )
                else:  # of a group it is every rollout's
                    failed = UserCodeError(
                        error.function, error.failure, error.line, task=task, rollout=index
                    )
                # sys.exit() and its like were never meant for one rollout
                left = not isinstance(error.__cause__, Exception | None)
                if self._raise or left:
                    raise failed from error.__cause__
            else:
                if parts is not None:
                    rollout.rewards |= parts
                    continue
                said = "gave None: this rollout cannot be scored"
                failed = UserCodeError(function.said, said, task=task, rollout=index)
            rollout.status, rollout.error = Status.INFRA_ERROR, str(failed)
            return
        if rollout.not_applicable and not rollout.rewards and not rollout.span_rewards:
            rollout.status = Status.INFRA_ERROR  # as in TRL: no zero, and no part of the baseline
            rollout.error = f"task {task!r}, rollout {index}: no reward function applies"


def in_background(work: Coroutine[Any, Any, None]) -> Future[None]:
    """Start work on the event loop of all rewards, which is the process's."""
    return asyncio.run_coroutine_threadsafe(work, event_loop("rewards"))


def reward_function(name: str) -> Callable[[RolloutView], Any]:
    """What a key of `reward.functions` names."""
    return resolve_name(name, BUILT_IN, key="reward.functions")


def _load(name: str, weight: float) -> _Function:
    function = reward_function(name)
    return _Function(name.rpartition(":")[2], weight, function, is_trl_form(function))


def _parts(rollout: Rollout, function: _Function, value: Any) -> dict[str, float] | None:
    """The parts that a function returned, times its weight; spans are put in place."""
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
    # a part has one weight
    there = rollout.rewards.keys() | {span.name for span in rollout.span_rewards}
    for name in [*parts, *(span.name for span in spans)]:
        if name in there:
            raise WrongResult(f"the reward has a part {name!r} already")
    rollout.span_rewards += [_weighted(rollout, span, function.weight) for span in spans]
    made = {}
    for name, part in parts.items():
        number = as_number(part)
        if number is None:
            raise WrongResult(f"expected a finite number as {name}, got {part!r:.80}")
        made[name] = rollout.weighted(name, function.weight, number)
    return made


def _weighted(rollout: Rollout, span: SpanReward, weight: float) -> SpanReward:
    total = sum(len(segment.token_ids) for segment in rollout.all_segments)
    value = as_number(span.value)
    if value is None or not 0 <= span.start < span.end <= total:
        raise WrongResult(f"expected a finite value on tokens within [0, {total}), got {span}")
    return replace(span, value=rollout.weighted(span.name, weight, value))

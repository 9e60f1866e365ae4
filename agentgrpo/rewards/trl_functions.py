"""Reward functions in TRL's form, called as TRL 1.16 calls them (GRPOTrainer._calculate_rewards).

    def f(completions, prompts, completion_ids, solution, **kwargs) -> list[float | None]: ...

Such a function is known by a parameter of these names, and stands among `reward.functions` like any
other; it may be `async def`. It is called once a group, with lists of one entry per rollout:

    prompts          what the data's row asks: text, or a list of chat messages, as the row has it
                     (without the agent's system prompt and examples)
    completions      what followed, in the same form: text, or a list of messages, of which a tool's
                     answers are some
    completion_ids   the tokens that followed the prompt, those of tools' answers included
    NAME             the column of that name of the row, the same for all rollouts of a group
    trainer_state    a transformers.TrainerState, of which global_step and max_steps are set
    log_extra        log_extra(column, values): a value per rollout, recorded as its `extra`
    environments     of env.kind = "factory": the instance that each rollout was played in
    log_metric       log_metric(name, value): the mean over the step is `rollout/log/NAME`

A function without `**kwargs` gets of these what it names. None instead of a number: the function
does not apply to this rollout, which is then scored by the others; where none applies, the rollout
leaves its group's baseline. TRL's batch may be any part of a step, here it is a group.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from agentgrpo.rewards.rollout_view import RolloutView
from agentgrpo.rewards.shipped import ask
from agentgrpo.support.user_calls import WrongResult, as_number

GIVEN = (
    "prompts", "completions", "completion_ids", "environments", "trainer_state", "log_extra",
    "log_metric",
)  # fmt: skip
"""What a function may name besides the columns of a row."""
NO_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not pass on."""


def is_trl_form(function: Callable[..., Any]) -> bool:
    """Whether it has a parameter that only such functions have: `completions` or another of GIVEN.

    >>> is_trl_form(lambda completion_ids, **columns: []), is_trl_form(lambda view: 1.0)
    (True, False)
    """
    try:
        return not {*GIVEN}.isdisjoint(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some that are written in C tell nothing
        return False


def require_columns(
    name: str, function: Callable[..., Any], row: Mapping[str, Any], *, environments: bool
) -> None:
    """That a row has what the function cannot be called without."""
    columns = [column for column in row if column not in NO_COLUMNS]
    for parameter in inspect.signature(function).parameters.values():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        needed = named and parameter.default is parameter.empty
        if needed and parameter.name == "environments" and not environments:
            raise ValueError(
                f"reward.functions: {name!r} needs 'environments', which are instances of the "
                "class of env.kind = 'factory', on one GPU per engine"
            )
        if needed and parameter.name not in (*GIVEN, *columns):
            raise ValueError(
                f"reward.functions: {name!r} needs {parameter.name!r}, and the data has no such "
                f"column; it has {', '.join(columns) or 'none besides the question'}"
            )
    if taken := [column for column in columns if column in GIVEN]:
        raise ValueError(
            f"reward.functions: {name!r} is in TRL's form, which gives {taken[0]!r} itself: the "
            "data's column of that name needs another"
        )


async def values_of_group(
    function: Callable[..., Any], views: Sequence[RolloutView], *, what: str, limit_s: float | None,
    step: int, total_steps: int, logged: Mapping[str, list[float]],
) -> list[Any]:  # fmt: skip
    """What a function gives for each rollout of a group; None: it does not apply."""
    from transformers import TrainerState  # seconds, for a run that has no use for it

    def log_metric(name: str, value: float) -> None:
        number = as_number(value)
        if number is None:
            raise ValueError(f"log_metric({name!r}): expected a finite number, got {value!r}")
        logged[name].append(number)

    state = TrainerState(global_step=step, max_steps=total_steps)
    call = partial(function, **arguments_for(function, views, state, log_metric))
    read = partial(checked, count=len(views))
    return await ask(call, views[0].rollout.task.id, None, read, what=what, limit_s=limit_s)


def arguments_for(
    function: Callable[..., Any],
    views: Sequence[RolloutView],
    state: Any,
    log_metric: Callable[[str, float], None],
) -> dict[str, Any]:
    """What a function is called with, all by name."""
    task = views[0].rollout.task
    columns = {column: value for column, value in task.spec.items() if column not in NO_COLUMNS}
    messages = [dict(message) for message in task.messages]
    every = ([s for row in view.rollout.rows for s in row[1:]] for view in views)
    ids = [[token for s in segments for token in s.token_ids.tolist()] for segments in every]
    environments = [view.rollout.environment for view in views]

    def log_extra(column: str, values: Sequence[Any]) -> None:
        if len(values) != len(views):
            raise ValueError(f"log_extra({column!r}): {len(values)} values for {len(views)}")
        for view, value in zip(views, values, strict=True):
            view.rollout.extra[column] = _as_json(value)

    everything = {
        **{column: [value] * len(views) for column, value in columns.items()},
        "prompts": [messages[-1]["content"] if task.is_text else messages] * len(views),
        "completions": [
            view.decode(after) if task.is_text else conversation(view, after)
            for view, after in zip(views, ids, strict=True)
        ],
        "completion_ids": ids,
        **({"environments": environments} if any(e is not None for e in environments) else {}),
        "trainer_state": state,
        "log_extra": log_extra,
        "log_metric": log_metric,
    }
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return everything
    return {name: value for name, value in everything.items() if name in parameters}


def checked(returned: Any, count: int) -> list[Any]:
    """What a function returned, a value for each rollout.

    NaN is None: TRL does not tell them apart.
    """
    try:
        values = list(returned)
    except TypeError:
        said = f"expected a list of {count} numbers or None, got {returned!r:.80}"
        raise WrongResult(said) from None
    if len(values) != count:
        raise WrongResult(f"expected {count} values, one per completion, got {len(values)}")
    return [None if isinstance(value, float) and math.isnan(value) else value for value in values]


def conversation(view: RolloutView, after_prompt: Sequence[int]) -> list[dict[str, Any]]:
    """What followed the prompt as chat messages, the policy's and what it was told."""
    told = view.rollout.tool_messages
    if not told:  # one turn, or what another program has played: TRL's are one message too
        return [{"role": "assistant", "content": view.decode(after_prompt)}]
    made: list[dict[str, Any]] = []
    content = ""
    calls: list[tuple[str, Mapping[str, Any]]] = []
    for turn, (called, said) in zip_longest(view.turns, told, fillvalue=((), ())):
        content += turn if isinstance(turn, str) else ""
        calls += called
        if isinstance(said, str):  # the same message goes on behind it
            content += said
            continue
        made.append(_assistant(content, calls))
        made += [dict(message) for message in said]
        begins = bool(said) and made[-1]["role"] == "assistant"  # the policy's next message
        content, calls = str(made.pop()["content"]) if begins else "", []
    return [*made, _assistant(content, calls)] if content else made


def _assistant(content: str, calls: Collection[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    functions = [{"name": name, "arguments": dict(arguments)} for name, arguments in calls]
    made: dict[str, Any] = {"role": "assistant", "content": content}
    if functions:
        made["tool_calls"] = [{"type": "function", "function": f} for f in functions]
    return made


def _as_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return str(value)

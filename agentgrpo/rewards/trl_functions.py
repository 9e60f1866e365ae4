"""Call reward functions with TRL's signature as TRL 1.16 does (GRPOTrainer._calculate_rewards).

    def f(completions, prompts, completion_ids, solution, **kwargs) -> list[float | None]: ...

Such a function is recognised by these parameter names. It is listed in `reward.functions` like any
other and may be `async def`. It is called once per group, with lists of one entry per rollout:

    prompts          the question of the data's row: text, or a list of chat messages, as in the row
                     (without the agent's system prompt and examples)
    completions      what followed, in the same form: text, or a list of messages, including the
                     results of tools
    completion_ids   the token ids after the prompt, including those of tool results
    NAME             the row's column of that name, the same for all rollouts of a group
    trainer_state    a transformers.TrainerState with global_step and max_steps set
    log_extra        log_extra(column, values): one value per rollout, recorded as its `extra`
    environments     with env.kind = "factory": the instance that each rollout was played in
    log_metric       log_metric(name, value): the mean over the step is `rollout/log/NAME`

A function without `**kwargs` gets only the arguments that it names. It may return None instead of a
number if it does not apply to a rollout: the other functions then score the rollout. If none
applies, the rollout leaves its group's baseline. In TRL a batch may be any part of a step; here it
is a group.
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

RESERVED = (
    "prompts", "completions", "completion_ids", "environments", "trainer_state", "log_extra",
    "log_metric",
)  # fmt: skip
"""Parameters that are not columns of a row."""
NO_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not pass to reward functions."""


def is_trl_form(function: Callable[..., Any]) -> bool:
    """Whether a function has TRL's signature: a parameter `completions` or another of RESERVED.

    >>> is_trl_form(lambda completion_ids, **columns: []), is_trl_form(lambda view: 1.0)
    (True, False)
    """
    try:
        return not {*RESERVED}.isdisjoint(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function written in C may have no signature
        return False


def require_columns(
    name: str, function: Callable[..., Any], row: Mapping[str, Any], *, environments: bool
) -> None:
    """Check that a row has the columns that the function requires. Raises ValueError if not."""
    columns = [column for column in row if column not in NO_COLUMNS]
    for parameter in inspect.signature(function).parameters.values():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        is_needed = is_named and parameter.default is parameter.empty
        if is_needed and parameter.name == "environments" and not environments:
            raise ValueError(
                f"reward.functions: {name!r} needs 'environments', which exist only with "
                "env.kind = 'factory' and one GPU per engine"
            )
        if is_needed and parameter.name not in (*RESERVED, *columns):
            raise ValueError(
                f"reward.functions: {name!r} needs the column {parameter.name!r}, but the data "
                f"has {', '.join(columns) or 'no column except the question'}"
            )
    if conflicts := [column for column in columns if column in RESERVED]:
        raise ValueError(
            f"reward.functions: {name!r} has TRL's signature, where {conflicts[0]!r} is reserved. "
            "Rename the data's column of that name"
        )


async def values_of_group(
    function: Callable[..., Any], views: Sequence[RolloutView], *, what: str, limit_s: float | None,
    step: int, total_steps: int, logged: Mapping[str, list[float]],
) -> list[Any]:  # fmt: skip
    """Return a function's value for each rollout of a group. None: it does not apply."""
    from transformers import TrainerState  # imports for seconds: only if there is such a function

    def log_metric(name: str, value: float) -> None:
        number = as_number(value)
        if number is None:
            raise ValueError(f"log_metric({name!r}): expected a finite number, got {value!r}")
        logged[name].append(number)

    state = TrainerState(global_step=step, max_steps=total_steps)
    call = partial(function, **arguments_for(function, views, state, log_metric))
    parse = partial(check_values, count=len(views))
    return await ask(call, views[0].rollout.task.id, None, parse, what=what, limit_s=limit_s)


def arguments_for(
    function: Callable[..., Any],
    views: Sequence[RolloutView],
    state: Any,
    log_metric: Callable[[str, float], None],
) -> dict[str, Any]:
    """Build the keyword arguments of a function's call."""
    task = views[0].rollout.task
    columns = {column: value for column, value in task.spec.items() if column not in NO_COLUMNS}
    messages = [dict(message) for message in task.messages]
    segments_per_view = ([s for row in view.rollout.rows for s in row[1:]] for view in views)
    token_ids = [
        [token for s in segments for token in s.token_ids.tolist()]
        for segments in segments_per_view
    ]
    environments = [view.rollout.environment for view in views]

    def log_extra(column: str, values: Sequence[Any]) -> None:
        if len(values) != len(views):
            raise ValueError(
                f"log_extra({column!r}): expected {len(views)} values, got {len(values)}"
            )
        for view, value in zip(views, values, strict=True):
            view.rollout.extra[column] = _as_json(value)

    arguments = {
        **{column: [value] * len(views) for column, value in columns.items()},
        "prompts": [messages[-1]["content"] if task.is_text else messages] * len(views),
        "completions": [
            view.decode(after) if task.is_text else conversation(view, after)
            for view, after in zip(views, token_ids, strict=True)
        ],
        "completion_ids": token_ids,
        **({"environments": environments} if any(e is not None for e in environments) else {}),
        "trainer_state": state,
        "log_extra": log_extra,
        "log_metric": log_metric,
    }
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def check_values(returned: Any, count: int) -> list[Any]:
    """Check that a function returned one value per rollout. NaN becomes None, as in TRL."""
    try:
        values = list(returned)
    except TypeError:
        message = f"expected a list of {count} numbers or None, got {returned!r:.80}"
        raise WrongResult(message) from None
    if len(values) != count:
        raise WrongResult(f"expected {count} values, one per completion, got {len(values)}")
    return [None if isinstance(value, float) and math.isnan(value) else value for value in values]


def conversation(view: RolloutView, after_prompt: Sequence[int]) -> list[dict[str, Any]]:
    """Convert the rollout after its prompt to chat messages of the policy and its tools."""
    tool_messages = view.rollout.tool_messages
    # One turn, or a rollout of another program. TRL has one message here, too.
    if not tool_messages:
        return [{"role": "assistant", "content": view.decode(after_prompt)}]
    messages: list[dict[str, Any]] = []
    content = ""
    calls: list[tuple[str, Mapping[str, Any]]] = []
    for turn, (turn_calls, reply) in zip_longest(view.turns, tool_messages, fillvalue=((), ())):
        content += turn if isinstance(turn, str) else ""
        calls += turn_calls
        if isinstance(reply, str):  # inline result: the same message continues after it
            content += reply
            continue
        messages.append(_assistant(content, calls))
        messages += [dict(message) for message in reply]
        # The environment may prefill the policy's next message.
        continues = bool(reply) and messages[-1]["role"] == "assistant"
        content, calls = str(messages.pop()["content"]) if continues else "", []
    return [*messages, _assistant(content, calls)] if content else messages


def _assistant(content: str, calls: Collection[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    functions = [{"name": name, "arguments": dict(arguments)} for name, arguments in calls]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if functions:
        message["tool_calls"] = [{"type": "function", "function": f} for f in functions]
    return message


def _as_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return str(value)

"""Tools from typed Python functions: what they take is read off their annotations and checked.

The functions are the user's own and run in this process; only plain values (JSON) come from the
policy. What a tool raises is shown to the policy; InfrastructureError is the machine's fault.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pydantic

from agentgrpo.actions import (
    Action,
    CallTools,
    InfrastructureError,
    Observation,
    Schema,
    ToolCall,
    inlined,
)
from agentgrpo.config.read import load_callable
from agentgrpo.envs.base import AsyncEpisode, Episode
from agentgrpo.envs.runner import LOOP, settled
from agentgrpo.support.user_calls import run_sync
from agentgrpo.types import Task

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call came to."""

    text: str
    error: str = ""
    """"", or which kind: unknown_tool, bad_arguments, tool_exception."""


def tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> Schema:
    """A tool as templates and engines know it; `parameters` is the JSON schema of an object."""
    kept = {key: value for key, value in parameters.items() if key not in ("title", "$schema")}
    function = {"name": name, "description": description, "parameters": {"properties": {}, **kept}}
    return inlined({"type": "function", "function": function})


class Tool:
    """A function with the JSON schema of what it takes.

    Args:
        function: every parameter annotated with a type that JSON can carry; async or not. Its
            docstring's first paragraph describes it, its `name: text` lines under `Args:` describe
            the parameters.
        name: what the policy calls it by; None: its own name.
        description: instead of the docstring's first paragraph.

    Raises:
        ValueError: a parameter has no annotation, or one without a JSON schema; names it. It is no
            function, but a functools.partial or the like without a name.
    """

    def __init__(
        self, function: Function, name: str | None = None, *, description: str | None = None
    ) -> None:
        self.function = function
        self.name = str(name or getattr(function, "__name__", ""))
        if not self.name:
            raise ValueError(f"tools: expected functions, got {function!r:.80}, which has no name")
        self.is_async = inspect.iscoroutinefunction(function)
        documented, described = describe(inspect.getdoc(function) or "")
        try:
            signature = inspect.signature(function, eval_str=True)
            fields = {
                parameter.name: _field(self.name, parameter, described)
                for parameter in signature.parameters.values()
            }
            self._model = pydantic.create_model(
                self.name, __config__=pydantic.ConfigDict(extra="forbid"), **fields
            )
            parameters = self._model.model_json_schema()
        except (NameError, pydantic.errors.PydanticUserError) as error:
            raise ValueError(f"tool {self.name}: {error}") from error
        for value in parameters.get("properties", {}).values():
            value.pop("title", None)
        description = documented if description is None else description
        parameters.pop("description", None)
        self.schema = tool_schema(self.name, description, parameters)

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function's types; ValueError says what is wrong with which."""
        try:
            checked = self._model.model_validate(dict(values))
        except pydantic.ValidationError as error:
            problems = (
                f"{'.'.join(map(str, e['loc']))}: {e['msg']}"
                for e in error.errors(include_url=False)
            )
            raise ValueError("; ".join(problems)) from None
        return {name: getattr(checked, name) for name in self._model.model_fields}


class Toolset:
    """Tools by name, and their calls."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) != len(tools):
            raise ValueError(f"tools: names must differ, got {[tool.name for tool in tools]}")
        self.schemas: tuple[Schema, ...] = tuple(tool.schema for tool in tools)
        self.any_async = any(tool.is_async for tool in tools)

    def call(self, call: ToolCall) -> Answer:
        """Make a call; only what is the machine's fault is raised."""
        try:
            return Answer(show(run_sync(self._bound(call)(), LOOP)))
        except Exception as error:  # the user's function: what it raises is its answer
            return _failed(error)

    async def call_async(self, call: ToolCall) -> Answer:
        """Make a call of a tool that is a coroutine; others run as in call()."""
        try:
            bound = self._bound(call)
            waits = self._tools[call.name].is_async
            given = bound() if waits else await asyncio.to_thread(bound)
            return Answer(show(await settled(given)))
        except Exception as error:  # as in call()
            return _failed(error)

    def _bound(self, call: ToolCall) -> Callable[[], Any]:
        """The call as a function without arguments."""
        tool = self._tools.get(call.name)
        if tool is None:
            raise _Refused("unknown_tool", unknown_tool(call, self._tools))
        try:
            return partial(tool.function, **tool.arguments(call.arguments))
        except ValueError as error:
            raise _Refused("bad_arguments", f"BadArguments: {call.name}: {error}") from None


class _Refused(Exception):
    """A call is not made: the kind of the error, and what the policy is told."""


def _failed(error: Exception) -> Answer:
    if isinstance(error, InfrastructureError):
        raise error
    if isinstance(error, _Refused):
        kind, text = error.args
        return Answer(text, kind)
    return Answer(f"{type(error).__name__}: {error}".rstrip(": "), "tool_exception")


def unknown_tool(call: ToolCall, known: Iterable[str]) -> str:
    """What the policy is told of a call to an unknown tool."""
    return f"UnknownTool: no tool {call.name!r}; there are: {', '.join(known)}"


def observed(answers: Sequence[Answer]) -> Observation:
    """The answers of one turn's calls as an observation; failures are counted by their kind."""
    errors = Counter(answer.error for answer in answers if answer.error)
    texts = tuple(answer.text for answer in answers)
    counts = {kind: float(number) for kind, number in errors.items()}
    return Observation("\n".join(texts), failed=bool(errors), outputs=texts, counts=counts)


def require_same(reset: str, shown: str | None, text: str | None, source: str) -> None:
    """ValueError: a reset returned another text than the one that the task's prompt shows."""
    if text != shown:
        raise ValueError(
            f"{reset}: expected the same text each time, got {shown!r:.400}, which the prompt "
            f"shows, then {text!r:.400}. Draw the state from {source}, not anew in each reset"
        )


def calls_of(action: Action) -> tuple[ToolCall, ...]:
    """The calls of an action that can be nothing else here."""
    if not isinstance(action, CallTools):
        raise TypeError(f"the environment answers tool calls, got {action}")
    return action.calls


class ToolEnv:
    """Functions as tools, without a state of their own: one set for all rollouts.

    Args:
        tools: functions, or their names as `module:function`.
    """

    answers = ("tools",)

    def __init__(self, tools: Sequence[Function | str]) -> None:
        if isinstance(tools, str) or not tools:
            raise ValueError(f"tools: expected a list of functions, got {tools!r}")
        found = (
            load_callable(tool, key="env.options.tools") if isinstance(tool, str) else tool
            for tool in tools
        )
        self.toolset = Toolset([Tool(tool) for tool in found])

    def tools(self, task: Task) -> Sequence[Schema]:
        return self.toolset.schemas

    def reset(self, task: Task) -> ToolEpisode | AsyncToolEpisode:
        """Asynchronous if any of the tools is."""
        return (AsyncToolEpisode if self.toolset.any_async else ToolEpisode)(self.toolset)


class ToolEpisode(Episode):
    """Calls, one after another."""

    def __init__(self, toolset: Toolset) -> None:
        self.toolset = toolset

    def step(self, action: Action) -> Observation:
        return observed([self.toolset.call(call) for call in calls_of(action)])


class AsyncToolEpisode(AsyncEpisode):
    """Calls of a turn at the same time, answered in their order."""

    def __init__(self, toolset: Toolset) -> None:
        self.toolset = toolset

    async def step(self, action: Action) -> Observation:
        return observed(await asyncio.gather(*map(self.toolset.call_async, calls_of(action))))


def show(value: Any) -> str:
    """A tool's value as the policy sees it: text as it is, everything else as JSON.

    >>> show("a"), show({"b": 1}), show(None)
    ('a', '{"b": 1}', 'null')
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError):
        return str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    return str(value)


def describe(doc: str) -> tuple[str, dict[str, str]]:
    """A docstring's first paragraph, and what its `Args:` say of each parameter.

    >>> describe('''Adds.
    ...
    ... Args:
    ...     a: the first,
    ...         a number.
    ...     b (int): the other.''')
    ('Adds.', {'a': 'the first, a number.', 'b': 'the other.'})
    """
    head, _, rest = doc.partition("Args:\n")
    described: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(rest.partition("\n\n")[0]).splitlines():
        found = re.match(r"\*{0,2}(\w+)(?: \([^)]*\))?: (.*)", line)
        if found and not line.startswith(" "):
            name = found[1]
            described[name] = found[2].strip()
        elif line.startswith(" ") and name:
            described[name] += f" {line.strip()}"
    return " ".join(head.strip().split("\n\n")[0].split()), described


def _field(tool: str, parameter: inspect.Parameter, described: Mapping[str, str]) -> Any:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ValueError(f"tool {tool}: parameter {parameter} cannot be given by its name")
    if parameter.annotation is parameter.empty:
        raise ValueError(f"tool {tool}: parameter {parameter.name!r} has no annotation")
    default = ... if parameter.default is parameter.empty else parameter.default
    text = described.get(parameter.name)
    return (parameter.annotation, pydantic.Field(default, description=text))

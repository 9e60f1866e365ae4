"""Tools made from typed Python functions. Arguments are validated against the annotations.

The functions are the user's and run in this process; the policy supplies only JSON values. An
exception in a tool is shown to the policy, except InfrastructureError.
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
from agentgrpo.envs.runner import LOOP, await_if_needed
from agentgrpo.support.user_calls import run_sync
from agentgrpo.types import Task

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one tool call."""

    text: str
    error: str = ""
    """Kind of error: unknown_tool, bad_arguments or tool_exception; "": no error."""


def tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> Schema:
    """The schema of a tool for chat templates. `parameters` is the JSON schema of an object."""
    schema = {key: value for key, value in parameters.items() if key not in ("title", "$schema")}
    function = {
        "name": name,
        "description": description,
        "parameters": {"properties": {}, **schema},
    }
    return inlined({"type": "function", "function": function})


class Tool:
    """A function with the JSON schema of its parameters.

    Args:
        function: async or not. Every parameter must be annotated with a type that has a JSON
            schema. The docstring's first paragraph is the tool's description; `name: text` lines
            under `Args:` describe the parameters.
        name: the name for the policy; None: the function's name.
        description: replaces the docstring's first paragraph.

    Raises:
        ValueError: a parameter has no annotation or one without a JSON schema, or the function has
            no name (such as a functools.partial).
    """

    def __init__(
        self, function: Function, name: str | None = None, *, description: str | None = None
    ) -> None:
        self.function = function
        self.name = str(name or getattr(function, "__name__", ""))
        if not self.name:
            raise ValueError(f"tools: expected named functions, got {function!r:.80}")
        self.is_async = inspect.iscoroutinefunction(function)
        summary, parameter_texts = describe(inspect.getdoc(function) or "")
        try:
            signature = inspect.signature(function, eval_str=True)
            fields = {
                parameter.name: _field(self.name, parameter, parameter_texts)
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
        description = summary if description is None else description
        parameters.pop("description", None)
        self.schema = tool_schema(self.name, description, parameters)

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert arguments to the function's types. Raises ValueError with the wrong argument."""
        try:
            model = self._model.model_validate(dict(values))
        except pydantic.ValidationError as error:
            problems = (
                f"{'.'.join(map(str, e['loc']))}: {e['msg']}"
                for e in error.errors(include_url=False)
            )
            raise ValueError("; ".join(problems)) from None
        return {name: getattr(model, name) for name in self._model.model_fields}


class Toolset:
    """Tools by name. Executes their calls."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) != len(tools):
            raise ValueError(f"tools: names must differ, got {[tool.name for tool in tools]}")
        self.schemas: tuple[Schema, ...] = tuple(tool.schema for tool in tools)
        self.any_async = any(tool.is_async for tool in tools)

    def call(self, call: ToolCall) -> ToolResult:
        """Execute a call. Only InfrastructureError is raised; other errors are the result."""
        try:
            return ToolResult(show(run_sync(self._bound(call)(), LOOP)))
        except Exception as error:  # an exception of the user's function is its result
            return _error_result(error)

    async def call_async(self, call: ToolCall) -> ToolResult:
        """Execute a call. A function that is not async runs on a thread."""
        try:
            bound = self._bound(call)
            is_async = self._tools[call.name].is_async
            result = bound() if is_async else await asyncio.to_thread(bound)
            return ToolResult(show(await await_if_needed(result)))
        except Exception as error:  # as in call()
            return _error_result(error)

    def _bound(self, call: ToolCall) -> Callable[[], Any]:
        """Return a call as a function without arguments, after validation."""
        tool = self._tools.get(call.name)
        if tool is None:
            raise _RejectedCall("unknown_tool", unknown_tool(call, self._tools))
        try:
            return partial(tool.function, **tool.arguments(call.arguments))
        except ValueError as error:
            raise _RejectedCall("bad_arguments", f"BadArguments: {call.name}: {error}") from None


class _RejectedCall(Exception):
    """A call that is not executed: the kind of error and the text for the policy."""


def _error_result(error: Exception) -> ToolResult:
    if isinstance(error, InfrastructureError):
        raise error
    if isinstance(error, _RejectedCall):
        kind, text = error.args
        return ToolResult(text, kind)
    return ToolResult(f"{type(error).__name__}: {error}".rstrip(": "), "tool_exception")


def unknown_tool(call: ToolCall, known: Iterable[str]) -> str:
    """The text for the policy after a call to an unknown tool."""
    return f"UnknownTool: no tool {call.name!r}; there are: {', '.join(known)}"


def observation_of(answers: Sequence[ToolResult]) -> Observation:
    """Combine the results of a turn's calls in an observation. Errors are counted by kind."""
    errors = Counter(answer.error for answer in answers if answer.error)
    texts = tuple(answer.text for answer in answers)
    counts = {kind: float(number) for kind, number in errors.items()}
    return Observation("\n".join(texts), failed=bool(errors), outputs=texts, counts=counts)


def require_same(reset: str, expected: str | None, text: str | None, source: str) -> None:
    """Raise ValueError if reset() returned another text than the one in the task's prompt."""
    if text != expected:
        raise ValueError(
            f"{reset}: expected the same text each time, got {expected!r:.400} for the prompt, "
            f"then {text!r:.400}. Derive the state from {source}, not from new random numbers"
        )


def calls_of(action: Action) -> tuple[ToolCall, ...]:
    """Return an action's tool calls. Raises TypeError for any other action."""
    if not isinstance(action, CallTools):
        raise TypeError(f"expected tool calls, got {action}")
    return action.calls


class ToolEnv:
    """Functions as tools without state. All rollouts share them.

    Args:
        tools: functions, or their names as `module:function`.
    """

    answers = ("tools",)

    def __init__(self, tools: Sequence[Function | str]) -> None:
        if isinstance(tools, str) or not tools:
            raise ValueError(f"tools: expected a list of functions, got {tools!r}")
        functions = (
            load_callable(tool, key="env.options.tools") if isinstance(tool, str) else tool
            for tool in tools
        )
        self.toolset = Toolset([Tool(tool) for tool in functions])

    def tools(self, task: Task) -> Sequence[Schema]:
        return self.toolset.schemas

    def reset(self, task: Task) -> ToolEpisode | AsyncToolEpisode:
        return (AsyncToolEpisode if self.toolset.any_async else ToolEpisode)(self.toolset)


class ToolEpisode(Episode):
    """Executes the calls of a turn one after another."""

    def __init__(self, toolset: Toolset) -> None:
        self.toolset = toolset

    def step(self, action: Action) -> Observation:
        return observation_of([self.toolset.call(call) for call in calls_of(action)])


class AsyncToolEpisode(AsyncEpisode):
    """Executes the calls of a turn concurrently. Results keep the order of the calls."""

    def __init__(self, toolset: Toolset) -> None:
        self.toolset = toolset

    async def step(self, action: Action) -> Observation:
        return observation_of(await asyncio.gather(*map(self.toolset.call_async, calls_of(action))))


def show(value: Any) -> str:
    """Format a tool's return value for the policy: text unchanged, everything else as JSON.

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
    """Parse a docstring: the first paragraph, and the description of each parameter in `Args:`.

    >>> describe('''Adds.
    ...
    ... Args:
    ...     a: the first,
    ...         a number.
    ...     b (int): the other.''')
    ('Adds.', {'a': 'the first, a number.', 'b': 'the other.'})
    """
    head, _, rest = doc.partition("Args:\n")
    descriptions: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(rest.partition("\n\n")[0]).splitlines():
        match = re.match(r"\*{0,2}(\w+)(?: \([^)]*\))?: (.*)", line)
        if match and not line.startswith(" "):
            name = match[1]
            descriptions[name] = match[2].strip()
        elif line.startswith(" ") and name:
            descriptions[name] += f" {line.strip()}"
    return " ".join(head.strip().split("\n\n")[0].split()), descriptions


def _field(tool: str, parameter: inspect.Parameter, descriptions: Mapping[str, str]) -> Any:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ValueError(f"tool {tool}: parameter {parameter} cannot be passed by name")
    if parameter.annotation is parameter.empty:
        raise ValueError(f"tool {tool}: parameter {parameter.name!r} has no annotation")
    default = ... if parameter.default is parameter.empty else parameter.default
    text = descriptions.get(parameter.name)
    return (parameter.annotation, pydantic.Field(default, description=text))

"""Calls inside the policy's text: `<fn>weather("Seattle, WA")</fn>`, answered in the same message.

The policy continues after `<fn_results>` or `<fn_error>`, which this agent appends. Appended and
sampled tokens are different segments: a policy that writes the result tags itself gets no result
and is trained on its own text. Arguments are literals; nothing is evaluated.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentgrpo.actions import (
    Action,
    CallTools,
    Message,
    Observation,
    Say,
    Schema,
    ToolCall,
    as_json,
)
from agentgrpo.agents.tagged_text import PairAgent, Tag, Template
from agentgrpo.types import Task

PROMPT = (
    "You may call functions while you write, as {example}. The result follows; then go on. "
    "End with: {prefix} and your answer.{talk}\nFunctions:\n{tools}"
)
EXAMPLES = {
    "python": 'name("text", key=1)',
    "json": '{"name": "name", "arguments": {"key": 1}}',
}
OBSERVATION = "\n<{tag}>\n{output}\n</{tag}>\n"

ReadCall = Callable[[str, Mapping[str, Schema]], ToolCall]
"""Parses the text between the tags, given the tools by name.

Raises ValueError with a message for the policy if the form is wrong.
"""


@dataclass(kw_only=True, eq=False)
class InlineAgent(PairAgent):
    """See agents/base.py for the protocol.

    Args:
        env: the environment, whose tools can be called.
        observation: format of a result; {output} is replaced by the result, {tag} by fn_results or
            fn_error.
        call_form: syntax of a call: python, `f("x", n=1)`, or json, `{"name": "f", "arguments":
            {...}}`.
    """

    acts = ("tools",)
    error = "SyntaxError"
    env: Any
    open_tag: Tag = "<fn>"
    close_tag: Tag = "</fn>"
    observation: Template = OBSERVATION
    call_form: Literal["python", "json"] = "python"

    def prompt(self, task: Task) -> str:
        """The call syntax and the task's functions."""
        return PROMPT.format(
            example=f"{self.open_tag}{EXAMPLES[self.call_form]}{self.close_tag}",
            prefix=self.answer_prefix,
            talk=self.talk(self.open_tag, self.answer_prefix),
            tools="\n".join(map(signature, self.schemas(task))),
        )

    def act(self, body: str, task: Task) -> Action:
        known = {tool["function"]["name"]: tool for tool in self.schemas(task)}
        return CallTools((FORMS[self.call_form](body.strip(), known),))

    def observe(self, action: Action, observation: Observation) -> Sequence[Message] | str:
        if isinstance(action, Say):
            return super().observe(action, observation)
        tag = "fn_error" if observation.failed else "fn_results"
        return self.format_output(observation, tag=tag)


def read_python(body: str, known: Mapping[str, Schema]) -> ToolCall:
    """Parse a call in Python syntax with literal arguments; nothing is evaluated.

    >>> schema = {"function": {"parameters": {"properties": {"city": {}, "days": {}}}}}
    >>> read_python('weather("Oslo", days=2)', {"weather": schema}).arguments
    {'city': 'Oslo', 'days': 2}
    """
    try:
        call = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a call: {str(error)[:200]}") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError("expected one call of a function by its name")
    name = call.func.id
    parameters = known.get(name, {}).get("function", {}).get("parameters", {})
    names = list(parameters.get("properties", {}))
    if name in known and len(call.args) > len(names):
        raise ValueError(f"{name} takes {len(names)} arguments, got {len(call.args)}")
    arguments: dict[str, Any] = {}
    positional = zip(names, call.args, strict=False) if name in known else ()
    for key, value in [*positional, *((keyword.arg, keyword.value) for keyword in call.keywords)]:
        if key is None or key in arguments:
            raise ValueError(f"{name}: argument {key or '**'} is given twice or not by its name")
        arguments[key] = _literal(value, name, key)
    return ToolCall(name, arguments)


def _literal(node: ast.expr, name: str, key: str) -> Any:
    try:
        return as_json(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{name}: argument {key} must be a literal, of JSON's types") from None


def read_json(body: str, known: Mapping[str, Schema]) -> ToolCall:
    """Parse a call that is a JSON object with `name` and `arguments`."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError('expected {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    return ToolCall(call["name"], as_json(arguments))


FORMS: dict[str, ReadCall] = {"python": read_python, "json": read_json}


def signature(tool: Schema) -> str:
    """Format a tool as one line of a prompt.

    >>> signature({"function": {"name": "f", "description": "Does.", "parameters": {"properties":
    ...     {"a": {"type": "string"}, "n": {"type": "integer", "default": 1}}}}})
    'f(a: string, n: integer = 1): Does.'
    """
    function = tool["function"]
    parameters = []
    for name, value in function.get("parameters", {}).get("properties", {}).items():
        kind = value.get("type", "any")
        default = f" = {value['default']!r}" if "default" in value else ""
        parameters.append(f"{name}: {kind}{default}")
    return f"{function['name']}({', '.join(parameters)}): {function.get('description', '').strip()}"

"""Calls within the policy's text: `<fn>weather("Seattle, WA")</fn>`, answered in the same message.

The policy writes on after `<fn_results>` or `<fn_error>`, which only this agent puts there: what is
given and what was sampled are different segments, so that a policy that writes the result's tags
itself is shown nothing and trained on its own words. Arguments are literals: nothing is evaluated.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agentgrpo.actions import (
    Action,
    CallTools,
    Finish,
    Malformed,
    Message,
    Observation,
    Schema,
    ToolCall,
    answer_in,
    as_json,
)
from agentgrpo.config import AgentConfig
from agentgrpo.config.read import load_callable
from agentgrpo.types import Task

PROMPT = (
    "You may call functions while you write, as {example}. The result follows; then go on. "
    "End with: {prefix} and your answer.\nFunctions:\n{tools}"
)
EXAMPLES = {
    "python": 'name("text", key=1)',
    "json": '{"name": "name", "arguments": {"key": 1}}',
}
OBSERVATION = "\n<{tag}>\n{output}\n</{tag}>\n"

ReadCall = Callable[[str, Mapping[str, Schema]], ToolCall]
"""From what stands between the tags, and the known tools by name, to a call.

Raises ValueError with a message for the policy if it is not in the asked form.
"""


class InlineAgent:
    """See agents/base.py for the protocol and AgentConfig for the settings.

    Args:
        config: of the agent.
        tools: what can be called for a task.
    """

    def __init__(self, config: AgentConfig, tools: Callable[[Task], Sequence[Schema]]) -> None:
        self._config, self._tools_of = config, tools
        self._open = config.open_tag or "<fn>"
        self._close = config.close_tag or "</fn>"
        self._prefix = "Answer:" if config.answer_prefix is None else config.answer_prefix
        self._read: ReadCall = FORMS.get(config.call_form) or cast(
            ReadCall, load_callable(config.call_form, key="agent.call_form")
        )
        self._known: dict[str, Schema] = {}
        self.stop = (self._close,)

    def messages(self, task: Task) -> list[Message]:
        """The system prompt with the task's functions, worked examples, the task's messages."""
        tools = self._tools_of(task)
        self._known.update({tool["function"]["name"]: tool for tool in tools})
        c = self._config
        system = c.system_prompt
        if system is None:
            example = EXAMPLES.get(c.call_form, "...")
            system = PROMPT.format(
                example=f"{self._open}{example}{self._close}",
                prefix=self._prefix,
                tools="\n".join(map(signature, tools)),
            )
        head: list[Message] = [{"role": "system", "content": system}] if system else []
        shots = [message.model_dump() for shot in c.shots for message in shot]
        return [*head, *shots, *task.messages]

    def prefill(self, task: Task) -> str:
        """None: the policy begins its turn itself."""
        return ""

    def tools(self, task: Task) -> Sequence[Schema]:
        """None for the template: the functions are in the system prompt."""
        return ()

    def parse(self, text: str) -> Action:
        """The call between the tags; else the text after the answer prefix; else no answer."""
        _, opened, rest = text.partition(self._open)
        body, closed, _ = rest.partition(self._close)
        if opened and closed:
            try:
                return CallTools((self._read(body.strip(), self._known),))
            except ValueError as error:
                return self._malformed(f"SyntaxError: {error}")
        if opened or self._close in text:
            there, missing = (self._open, self._close) if opened else (self._close, self._open)
            return self._malformed(f"SyntaxError: {there} without {missing}")
        return Finish(answer_in(text, self._prefix))

    def _malformed(self, message: str) -> Action:
        return Finish(None) if self._config.after_malformed == "end" else Malformed(message)

    def observe(self, action: Action, observation: Observation) -> str:
        """The result in its tags, for the same message."""
        tag = "fn_error" if observation.failed else "fn_results"
        shown = self._config.observation or OBSERVATION
        output = "\n".join(observation.outputs) if observation.outputs else observation.text
        return shown.replace("{tag}", tag).replace("{output}", output)


def read_python(body: str, known: Mapping[str, Schema]) -> ToolCall:
    """A call in Python's syntax with literal arguments only; nothing is evaluated.

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
    """A call as a JSON object with `name` and `arguments`."""
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
    """A tool as one line for a prompt.

    >>> signature({"function": {"name": "f", "description": "Does.", "parameters": {"properties":
    ...     {"a": {"type": "string"}, "n": {"type": "integer", "default": 1}}}}})
    'f(a: string, n: integer = 1): Does.'
    """
    function = tool["function"]
    shown = []
    for name, value in function.get("parameters", {}).get("properties", {}).items():
        kind = value.get("type", "any")
        default = f" = {value['default']!r}" if "default" in value else ""
        shown.append(f"{name}: {kind}{default}")
    return f"{function['name']}({', '.join(shown)}): {function.get('description', '').strip()}"

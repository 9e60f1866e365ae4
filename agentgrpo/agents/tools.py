"""Tool calling as the model was taught it: its template shows the tools, vLLM's parser reads calls.

Agents never import the engine: the parser comes as a `ReadCalls` from whoever builds the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from agentgrpo.actions import (
    Action,
    CallTools,
    Finish,
    Malformed,
    Message,
    Observation,
    ReadCalls,
    Say,
    Schema,
    ToolCall,
    answer_in,
    as_json,
)
from agentgrpo.config import AgentConfig
from agentgrpo.types import Task

ONE_CALL = "Error: one call per turn; this one was not carried out"


class ToolAgent:
    """See agents/base.py for the protocol and AgentConfig for the settings.

    A turn without a call is the answer, or where the environment has somebody to talk with, what
    is said to them. A turn in which one call cannot be read carries out none.

    Args:
        config: of the agent.
        tools: what can be called for a task.
        read_calls: the parser of the model's family.
        talks: the environment answers what is said.
    """

    stop: tuple[str, ...] = ()

    def __init__(
        self,
        config: AgentConfig,
        tools: Callable[[Task], Sequence[Schema]],
        read_calls: ReadCalls,
        *,
        talks: bool = False,
    ) -> None:
        self._config, self._tools_of, self._read_calls = config, tools, read_calls
        self._talks = talks
        self._role = config.observation_role or "tool"
        self._known: dict[str, Schema] = {}
        self._head: list[Message] = []
        if config.system_prompt:
            self._head.append({"role": "system", "content": config.system_prompt})
        self._head += [message.model_dump() for shot in config.shots for message in shot]

    def messages(self, task: Task) -> list[Message]:
        """System prompt (the task's own joins it), worked examples, the task's messages."""
        if self._head and task.messages and task.messages[0]["role"] == "system":
            first, *rest = task.messages
            if self._head[0]["role"] == "system":
                joined = f"{self._head[0]['content']}\n\n{first['content']}"
                return [{"role": "system", "content": joined}, *self._head[1:], *rest]
            return [first, *self._head, *rest]
        return [*self._head, *task.messages]

    def prefill(self, task: Task) -> str:
        """None: the policy begins its turn itself."""
        return ""

    def tools(self, task: Task) -> Sequence[Schema]:
        """The task's tools, for the chat template."""
        tools = self._tools_of(task)
        self._known.update({tool["function"]["name"]: tool for tool in tools})
        return tools

    def parse(self, text: str) -> Action:
        """Calls, or an error if one cannot be read; else the answer or what is said."""
        reading = self._read_calls(text, list(self._known.values()))
        if not reading.calls:
            if reading.attempted:
                return self._malformed("Error: the tool call could not be read; no call was made")
            if self._talks:
                return Say(reading.content.strip())
            return Finish(answer_in(reading.content, self._config.answer_prefix or ""))
        calls = []
        for number, (name, arguments) in enumerate(reading.calls):
            try:
                values = as_json(json.loads(arguments or "{}"))
            except (ValueError, RecursionError) as error:
                return self._malformed(f"Error: {name}: the arguments are not JSON: {error}")
            if not isinstance(values, dict):
                return self._malformed(f"Error: {name}: the arguments must be a JSON object")
            calls.append(ToolCall(name, values, id=f"call_{number}"))
        if self._config.parallel_calls:
            return CallTools(tuple(calls))
        return CallTools(tuple(calls[:1]), refused=tuple(calls[1:]))

    def _malformed(self, message: str) -> Action:
        return Finish(None) if self._config.after_malformed == "end" else Malformed(message)

    def observe(self, action: Action, observation: Observation) -> list[Message]:
        """One message per call, in order; what somebody said is a user's."""
        if isinstance(action, Say):
            return [{"role": "user", "content": observation.text}]
        if not isinstance(action, CallTools):
            return [{"role": self._role, "content": observation.text}]
        texts = observation.outputs or (observation.text,)
        told = [
            {"role": self._role, "content": text, "name": call.name, "tool_call_id": call.id}
            for call, text in zip(action.calls, texts, strict=True)
        ]
        told += [
            {"role": self._role, "content": ONE_CALL, "name": call.name, "tool_call_id": call.id}
            for call in action.refused
        ]
        return told  # type: ignore[return-value]

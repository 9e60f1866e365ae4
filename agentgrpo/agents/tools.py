"""Native tool calling: the chat template renders the tools, vLLM's tool parser reads the calls.

Agents do not import the engine: train/prepare.py passes the parser as a `ReadCalls`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentgrpo.actions import (
    CALLS,
    Action,
    CallTools,
    Malformed,
    Message,
    Observation,
    ReadCalls,
    Say,
    Schema,
    ToolCall,
    as_json,
)
from agentgrpo.agents.tagged_text import TextAgent
from agentgrpo.types import Task

ONE_CALL = "Error: one call per turn; this one was not carried out"
ONE_CALL_RULE = (
    "In each turn call one function or none; a second call is not carried out, whatever is said "
    "elsewhere. What is asked for is done by calling a function, and by nothing else. Never say "
    "that something was done before the call that does it has answered so."
)


@dataclass(kw_only=True, eq=False)
class ToolAgent(TextAgent):
    """See agents/base.py for the protocol.

    A turn without a call is the answer, or if the environment has a user, a message to the user. If
    one call of a turn cannot be parsed, none is made.

    Args:
        env: the environment, whose tools can be called. If it has a user, the user replies to
            messages.
        call_reader: from a parser's name to the engine's tool call parser.
        system_prompt: the system message; a task's own system message is appended to it.
        observation_role: role of the message with a tool's result.
        answer_prefix: a turn with this text and without a call ends the rollout; the text after it
            is the answer. "": the whole turn, and no message to a user ends the rollout.
        parser: vLLM's tool parser: hermes (Qwen2.5, Qwen3), qwen3_coder, llama3_json, mistral,
            pythonic ...
        parallel_calls: make all calls of a turn. False: only the first; the others are answered
            with an error.
        one_call_rule: start the system message with the rule that a turn calls one function or none
            and confirms nothing that was not done. The template's own text may contradict it
            (Qwen's: "one or more functions").
    """

    acts = ("tools",)
    marks = CALLS
    env: Any
    call_reader: Callable[[str], ReadCalls]
    observation_role: Literal["user", "tool"] = "tool"
    answer_prefix: str = ""
    parser: str = "hermes"
    parallel_calls: bool = False
    one_call_rule: bool = False

    def __post_init__(self) -> None:
        if self.one_call_rule and self.parallel_calls:
            raise ValueError(
                "agent.options.one_call_rule: expected false with parallel_calls, got true"
            )
        if self.one_call_rule:
            self.system_prompt = f"{ONE_CALL_RULE}\n\n{self.system_prompt or ''}".strip()
        self._read_calls = self.call_reader(self.parser)

    def messages(self, task: Task) -> list[Message]:
        """System message (with the task's own appended), worked examples, the task's messages."""
        if not task.messages or task.messages[0]["role"] != "system":
            return super().messages(task)
        task_system, *rest = task.messages
        messages = super().messages(replace(task, messages=tuple(rest)))
        if not self.system_prompt:
            return [task_system, *messages]
        content = f"{self.system_prompt}\n\n{task_system['content']}"
        return [{"role": "system", "content": content}, *messages[1:]]

    def tools(self, task: Task) -> Sequence[Schema]:
        return self.schemas(task)

    def read(self, text: str, task: Task) -> Action:
        """The calls, or an error if one cannot be parsed; else the answer or a message."""
        reading = self._read_calls(text, self.schemas(task))
        if not reading.calls:
            if reading.attempted:
                return Malformed("Error: the tool call could not be read; no call was made")
            return self.answer_or_say(reading.content, self.answer_prefix)
        calls = []
        for name, arguments in reading.calls:
            try:
                values = as_json(json.loads(arguments or "{}"))
            except (ValueError, RecursionError) as error:
                return Malformed(f"Error: {name}: the arguments are not JSON: {error}")
            if not isinstance(values, dict):
                return Malformed(f"Error: {name}: the arguments must be a JSON object")
            calls.append(ToolCall(name, values))
        if self.parallel_calls:
            return CallTools(tuple(calls))
        return CallTools(tuple(calls[:1]), refused=tuple(calls[1:]))

    def observe(self, action: Action, observation: Observation) -> Sequence[Message] | str:
        """One message per call, in order; a user's reply is a user message."""
        if isinstance(action, Say):
            return super().observe(action, observation)
        role = self.observation_role
        if not isinstance(action, CallTools):
            return [{"role": role, "content": observation.text}]
        texts = observation.outputs or (observation.text,)
        if len(texts) != len(action.calls):
            name, expected = type(self.env).__name__, len(action.calls)
            raise ValueError(
                f"{name}: an observation's outputs: expected {expected}, one per call, "
                f"got {len(observation.outputs)}"
            )
        results = list(zip(action.calls, texts, strict=True))
        results += [(call, ONE_CALL) for call in action.refused]
        return [{"role": role, "content": text, "name": call.name} for call, text in results]

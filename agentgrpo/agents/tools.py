"""Tool calling as the model was taught it: its template shows the tools, vLLM's parser reads calls.

Agents never import the engine: the parser comes as a `ReadCalls` from whoever builds the run.
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

    A turn without a call is the answer, or where the environment has somebody to talk with, what
    is said to them. A turn in which one call cannot be read carries out none.

    Args:
        env: whose tools can be called; if it has a user, it answers what is said.
        call_reader: from a parser's name to what reads the calls of a turn.
        system_prompt: what the policy is told first; a task's own system message joins it.
        observation_role: role of the message that carries a tool's answer.
        answer_prefix: a reply that has this text and no call ends the rollout; what follows is the
            answer. "": the whole reply is, and nothing that is said to a user ends it.
        parser: which of vLLM's tool parsers reads the calls: hermes (Qwen2.5, Qwen3), qwen3_coder,
            llama3_json, mistral, pythonic ...
        parallel_calls: carry out all calls of a turn. False: the first; the others are answered
            with an error.
        one_call_rule: begin the system message with the rule that a turn calls one function or none
            and confirms nothing that was not done. A template's own words may say otherwise
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
            raise ValueError("agent.options.one_call_rule and parallel_calls exclude each other")
        if self.one_call_rule:
            self.system_prompt = f"{ONE_CALL_RULE}\n\n{self.system_prompt or ''}".strip()
        self._read_calls = self.call_reader(self.parser)

    def messages(self, task: Task) -> list[Message]:
        """System prompt (the task's own joins it), worked examples, the task's messages."""
        if not task.messages or task.messages[0]["role"] != "system":
            return super().messages(task)
        own, *rest = task.messages
        told = super().messages(replace(task, messages=tuple(rest)))
        if not self.system_prompt:
            return [own, *told]
        joined = f"{self.system_prompt}\n\n{own['content']}"
        return [{"role": "system", "content": joined}, *told[1:]]

    def tools(self, task: Task) -> Sequence[Schema]:
        return self.schemas(task)

    def read(self, text: str, task: Task) -> Action:
        """Calls, or an error if one cannot be read; else the answer or what is said."""
        reading = self._read_calls(text, self.schemas(task))
        if not reading.calls:
            if reading.attempted:
                return Malformed("Error: the tool call could not be read; no call was made")
            return self.answered(reading.content, self.answer_prefix)
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
        """One message per call, in order; what the user said is theirs."""
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
        made = list(zip(action.calls, texts, strict=True))
        return [
            {"role": role, "content": text, "name": call.name}
            for call, text in [*made, *((call, ONE_CALL) for call in action.refused)]
        ]

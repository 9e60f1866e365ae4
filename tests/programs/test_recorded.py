"""What clients really sent, read by the endpoint: every answer that comes back is found again.

recorded.jsonl has the requests of six clients against a server that answered as scripted, with
traps: white space at both ends, JSON in unusual form, content null, thoughts, two calls in a turn.
Texts of over 1,500 characters are shortened there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgrpo.programs.conversations import Conversations
from agentgrpo.programs.endpoint import APIS
from agentgrpo.programs.messages import Call, Message, json_key
from agentgrpo.types import Int32
from tests.playing import CHAT
from tests.programs.test_conversations import completed, read_messages

CASES = [
    json.loads(line) for line in Path(__file__).with_name("recorded.jsonl").read_text().splitlines()
]
FORKED = {
    ("openai", "async, 3 at once"): 3,
    ("openai", "client aborts its stream after 3 chunks, asks again"): 2,
    ("langgraph", "create_agent + SummarizationMiddleware(trigger 3 messages, keep 2)"): 3,
    ("langgraph", "create_react_agent response_format=Out (extra request)"): 2,
    ("langgraph", "batch of 2"): 2,
    ("openai_agents", "handoff"): 2,
    ("openai_agents", "agent as tool"): 2,
    ("smolagents", "ToolCallingAgent"): 3,  # writes each call as text
    ("smolagents", "ToolCallingAgent stream_outputs"): 2,
    ("smolagents", "ToolCallingAgent, no tool call in answer"): 2,
    ("smolagents", "CodeAgent"): 2,  # strips its answers, writes </code> behind them
    ("smolagents", "CodeAgent, no code in answer"): 3,
    ("smolagents", "CodeAgent stream_outputs"): 2,
    ("smolagents", "CodeAgent use_structured_outputs_internally"): 2,
    ("smolagents", "CodeAgent planning_interval=2"): 5,
    ("smolagents", "CodeAgent max_steps reached"): 2,
    ("smolagents", "CodeAgent with managed agent"): 3,
    ("mini_swe_agent", "mini, no tool call in answer"): 2,  # leaves the answer out
    ("mini_swe_agent", "mini, bad JSON arguments"): 2,
}
"""Rows of the cases that are not one conversation which keeps what it was answered."""


class Replay:
    """A case whose requests are made one by one."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.talks, self.case = Conversations(CHAT), case
        self.turns: list[Int32] = []

    def ask(self) -> bool:
        """Make the next request, if there is one."""
        if len(self.turns) == len(self.case["requests"]):
            return False
        request = self.case["requests"][len(self.turns)]
        read = APIS[request["path"]].read(request["body"])
        prompt = self.talks.prompt(read.messages, read.tools)
        ids = np.array([9 + len(self.turns), CHAT.end_of_turn_id], np.int32)
        row = self.talks.add_turn(prompt, completed(prompt.token_ids, ids), 99)
        self.talks.add_message(prompt, row, said(request["answered"]))
        self.turns.append(ids)
        return True


def said(answered: Mapping[str, Any]) -> Message:
    calls = tuple(Call(*call) for call in answered.get("tool_calls", ()))
    content, reasoning = answered.get("content") or "", answered.get("reasoning")
    return Message("assistant", content, calls, reasoning)


def rows_of(case: Mapping[str, Any]) -> int:
    return FORKED.get((case["client"], case["case"]), 1)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['client']} {c['case']}")
def test_recorded_conversation_continues_its_row(case: Mapping[str, Any]) -> None:
    replay = Replay(case)
    while replay.ask():
        pass
    assert len(replay.talks.rows) == rows_of(case)
    rows = [row.transcript.segments for row in replay.talks.rows]
    found = Counter(s.token_ids.tobytes() for row in rows for s in row if s.sampled)
    assert found == Counter(map(bytes, replay.turns)), "each in one row, as it was sampled"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_requests_are_parsed_like_vllm(path: str) -> None:
    """Its own translation to chat completions has the same messages and tools."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages

    count = 0
    for request in (r for case in CASES for r in case["requests"] if r["path"] == path):
        body = request["body"]
        if body.get("thread"):
            continue
        mine = APIS[path].read(body)
        if path == "/v1/messages":
            made = AnthropicServingMessages.to_chat_completion_request(
                AnthropicMessagesRequest(**body)
            )
            theirs = [dict(message) for message in made.messages]
            tools = [tool.model_dump(exclude_none=True) for tool in made.tools or ()]
            assert json_key(json.dumps(tools)) == json_key(json.dumps(mine.tools))
            assert (made.max_completion_tokens or made.max_tokens) == mine.max_tokens
        else:
            read = ResponsesRequest(**body)
            theirs = construct_input_messages(
                request_instructions=read.instructions, request_input=read.input
            )
        plain = json.loads(json.dumps(theirs, default=lambda one: one.model_dump()))
        known = read_messages(plain)
        assert [m.key for m in known] == [m.key for m in mine.messages]
        assert [m.reasoning or None for m in known] == [m.reasoning for m in mine.messages]
        count += 1
    assert count > 9

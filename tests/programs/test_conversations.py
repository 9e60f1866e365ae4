"""Random clients against the tree of conversations: no wrong token, and none in two rows.

Each request is written in one of the protocols, as recorded clients write it (dialects.py).
What it must be answered from is computed a second time, from its messages alone: the sampled
ids of each answer that it still has, with what the template puts between, if it goes on from the
last one; else the whole conversation rendered.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from agentgrpo.programs.conversations import Conversations
from agentgrpo.programs.endpoint import APIS
from agentgrpo.programs.messages import Call, Message, is_object, json_key
from agentgrpo.programs.requests import read_chat
from agentgrpo.types import Completion, Int32, Turn
from tests.playing import CHAT, TOKENIZER
from tests.programs import dialects

COUNT = int(os.environ.get("AGENTGRPO_FUZZ_CLIENTS", "300"))
TEXTS = ("", " ", "a", " b \n", "é日🙂", "<|im_end|>", "<tool_call>", "x" * 40, "}{", "</think>")
TOOLS: list[list[Any]] = [
    [],
    [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    [{"type": "function", "function": {"name": "g", "parameters": {"b": 1, "a": [True]}}}],
]


def sampled(rng: random.Random) -> Int32:
    """Ids that no text encodes to, mostly; closed or cut."""
    ids = [rng.randrange(len(TOKENIZER) - 10) for _ in range(rng.randrange(1, 8))]
    return np.array(ids + [CHAT.end_of_turn_id] * (rng.random() < 0.7), np.int32)


def completed(prompt: Int32, ids: Int32) -> Completion:
    return Completion(
        "r", ids, np.zeros(len(ids), np.float32), "stop", None, 0, Turn.of(prompt, ids, "stop")
    )


def as_client(rng: random.Random, message: Message) -> dict[str, Any]:
    """An answer, as one client or another sends it back."""
    made: dict[str, Any] = {"role": "assistant", "content": message.content}
    if rng.random() < 0.3:
        made["content"] = [{"type": "text", "text": message.content}] if message.content else None
    if message.calls and rng.random() < 0.3:  # crewai, semantic-kernel
        made["content"] = rng.choice([None, "", message.content.strip()])
    if message.reasoning and rng.random() < 0.5:
        made[rng.choice(["reasoning", "reasoning_content"])] = message.reasoning
    if message.calls:
        made["tool_calls"] = [
            {"id": c.id, "function": {"name": c.name, "arguments": rewritten(rng, c.arguments)}}
            for c in message.calls
        ]
    return {**made, **rng.choice([{}, {"refusal": None, "audio": None}, {"index": 0}])}


def rewritten(rng: random.Random, arguments: str) -> str:
    value = json.loads(arguments)
    items = list(value.items())
    rng.shuffle(items)
    return json.dumps(dict(items), ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))


def read_messages(sent: list[Any]) -> tuple[Message, ...]:
    return read_chat({"model": "policy", "messages": sent}).messages


class Client:
    """One that keeps its own books: every conversation that it has led, as messages and ids."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.talks = Conversations(CHAT)
        self.known: list[tuple[list[Any], Int32, int]] = []
        """Messages as they are sent, all ids behind the last answer, which tools."""
        self.turns: list[bytes] = []

    def ask(self) -> None:
        rng = self.rng
        held: Int32 | None
        how = rng.random()
        if self.known and how < 0.8:
            known, held, tools = rng.choice(self.known)
            sent = list(known)
            if how < 0.15:  # something before it is not what was answered
                self.edit(sent)
                held = None
            elif how < 0.25:
                tools, held = (tools + 1) % 3, None
        else:
            sent, held, tools = [], None, rng.randrange(3)
        if not sent:
            sent += [{"role": "system", "content": "s"}] * (rng.random() < 0.5)
        calls = (sent[-1].get("tool_calls") if sent else None) or []
        new = [
            {"role": "tool", "tool_call_id": c["id"], "content": rng.choice(TEXTS)} for c in calls
        ] or [{"role": "user", "content": rng.choice(TEXTS) + str(rng.randrange(99))}]
        path = rng.choice(dialects.PATHS)
        asked = APIS[path].read(dialects.request(path, [*sent, *new], TOOLS[tools], rng))
        messages = read_messages([*sent, *new])
        assert [m.key for m in asked.messages] == [m.key for m in messages]
        prompt = self.talks.prompt(asked.messages, asked.tools)
        shown = [message.for_template() for message in messages]
        if held is None:
            expected = CHAT.prompt_ids(shown, TOOLS[tools])
        else:
            roles = [message.role for message in messages[: len(sent) - 1]]
            between = CHAT.observation_ids(
                shown[len(sent) :], last_id=int(held[-1]), tools=bool(tools), roles=roles
            )
            expected = np.concatenate([held, between])
        assert prompt.token_ids.tolist() == expected.tolist()
        turn = completed(prompt.token_ids, sampled(rng))
        row = self.talks.add_turn(prompt, turn, 99)
        number = len(self.turns)
        made = tuple(
            Call(f"c{number}.{i}", "f", json.dumps({"a": 1.5, "é": [i, True], "b": number}))
            for i in range(rng.choice([0, 0, 1, 2]) if tools else 0)
        )
        message = Message(
            "assistant", f"said {number} " * (rng.random() < 0.8 or not made), made,
            rng.choice([None, "thought"]),
        )  # fmt: skip
        self.talks.add_message(prompt, row, message)
        self.turns.append(turn.token_ids.tobytes())
        ids = np.concatenate([expected, turn.token_ids])
        self.known.append(([*sent, *new, as_client(rng, message)], ids, tools))

    def edit(self, sent: list[Any]) -> None:
        """The last answer becomes another one, as a client writes it that has edited it."""
        sent[-1] = {**sent[-1], "content": f"edited {self.rng.randrange(99)}"}


@pytest.mark.parametrize("seed", range(COUNT // 10))
def test_random_clients(seed: int) -> None:
    for part in range(10):
        client = Client(10 * seed + part)
        for _ in range(client.rng.randrange(1, 14)):
            client.ask()
        rows = [row.transcript.segments for row in client.talks.rows]
        found = [s.token_ids.tobytes() for row in rows for s in row if s.sampled]
        assert Counter(found) == Counter(client.turns)
        assert sorted(n for row in client.talks.rows for n, _ in row.turns) == [
            *range(len(client.turns))
        ]
        for row in client.talks.rows:
            for (_, turn), end in zip(row.turns, ends(row.transcript.segments), strict=True):
                held = row.transcript.ids[: end[0]]
                assert Turn.of(held, row.transcript.ids[end[0] : end[1]], "stop") == Turn(
                    **{**{f: getattr(turn, f) for f in Turn.__slots__}, "asked_tokens": None}
                )


def ends(segments: list[Any]) -> list[tuple[int, int]]:
    found, start = [], 0
    for segment in segments:
        if segment.sampled:
            found.append((start, start + len(segment.token_ids)))
        start += len(segment.token_ids)
    return found


SAME = [
    ('{"a": 1, "b": [1.0, "é"]}', '{"b":[1,"\\u00e9"],\n"a":1.0}', True),
    ('{"a": true}', '{"a": 1}', False),
    ('{"a": 1}', '{"a": "1"}', False),
    ('{"a": NaN}', '{"a": NaN}', True),
    ('{"a": NaN}', '{"a":NaN}', False),  # no JSON: compared as text
    ("{bad", "{bad", True),
    ("{bad", "{bad ", False),
    ("[[[" * 9999, "[[[" * 9999, True),
    (f'{{"a": {"[" * 99}{"]" * 99}}}', f'{{"a":{"[" * 99}{"]" * 99}}}', True),
    (f'{{"a": {"[" * 100}{"]" * 100}}}', f'{{"a":{"[" * 100}{"]" * 100}}}', False),
]


@pytest.mark.parametrize(("one", "other", "same"), SAME)
def test_arguments_are_compared_as_values(one: str, other: str, same: bool) -> None:
    assert (json_key(one) == json_key(other)) is same


def test_reasoning_may_be_dropped_but_not_changed() -> None:
    given = Message("assistant", "x", reasoning="because")
    assert Message("assistant", "x").may_be(given)
    assert Message("assistant", "x", reasoning="because").may_be(given)
    assert not Message("assistant", "x", reasoning="not so").may_be(given)
    assert Message("assistant", " x \r\n").may_be(given)


QUESTION = [Message("user", "Q")]


def answered(talks: Conversations, sent: list[Message], reply: Message, id: int = 7) -> Int32:
    """Add a turn after the messages, delivered as `reply`. Returns the row's tokens."""
    prompt = talks.prompt(sent, [])
    ids = np.array([id, CHAT.end_of_turn_id], np.int32)
    talks.add_message(prompt, talks.add_turn(prompt, completed(prompt.token_ids, ids), 9), reply)
    return np.concatenate([prompt.token_ids, ids])


CALLS = (Call("c1", "f", '{"a": 1}'),)


@pytest.mark.parametrize(
    ("back", "same"),
    [
        (Message("assistant", "so \n", CALLS), True),
        (Message("assistant", "", CALLS), True),
        (Message("assistant", "so", CALLS), True),
        (Message("assistant", "so\r\n", CALLS), True),
        (Message("assistant", "so", (Call("c2", "f", '{"a": 1.0}'),)), True),
        (Message("assistant", "so", (Call("c2", "g", '{"a": 1}'),)), False),
        (Message("assistant", "no", CALLS), False),
        (Message("assistant", "", (Call("c2", "f", '{"a": 1}'),)), False),
        (Message("assistant", "", (Call("c1", "f", '{"a": 2}'),)), False),
        (Message("assistant", ""), False),
        (Message("assistant", "so"), False),
    ],
)
def test_message_with_calls_is_identified_by_their_ids(back: Message, same: bool) -> None:
    """Whatever became of the text beside them; text that a client puts there is another answer."""
    talks = Conversations(CHAT)
    answered(talks, QUESTION, Message("assistant", "so \n", CALLS))
    after = talks.prompt([*QUESTION, back, Message("tool", "3", call_id="c1")], []).after
    assert (after is not None) is same


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("x", 0),
        ("x ", 1),
        (" x", 1),
        ("c1 x", 2),
        ("c2 x", 3),
        ("c3 x", 3),
        ("c1 x ", 2),
        ("c2", 3),
    ],
)
def test_most_similar_message_is_matched(sent: str, meant: int) -> None:
    def message(text: str) -> Message:
        calls = (Call(text[:2], "f", "{}"),) if text.startswith("c") else ()
        return Message("assistant", text[3 * len(calls) :], calls)

    talks = Conversations(CHAT)
    for number, text in enumerate(("x", "x ", "c1 x", "c2 x")):
        answered(talks, QUESTION, message(text), 7 + number)
    after = talks.prompt([*QUESTION, message(sent), Message("user", "on")], []).after
    assert after is not None
    assert talks.rows.index(after.row) == meant


def test_client_messages_with_equal_calls_stay_separate() -> None:
    """Nobody answered them: all that they say counts."""
    talks, replied = Conversations(CHAT), Message("assistant", "x")
    sent = [
        [*QUESTION, Message("assistant", text, CALLS), Message("user", "on")]
        for text in ("a", "b", "a ")
    ]
    rows = [answered(talks, messages, replied) for messages in sent]
    for messages, row in zip(sent, rows, strict=True):
        asked = talks.prompt([*messages, replied, Message("user", "more")], [])
        assert asked.token_ids[: len(row)].tolist() == row.tolist()


def test_equal_messages_are_distinguished_by_their_reasoning() -> None:
    talks = Conversations(CHAT)
    replies = [Message("assistant", "x", reasoning=thought) for thought in ("a", "b")]
    rows = [answered(talks, QUESTION, reply, 7 + n) for n, reply in enumerate(replies)]
    for reply, row in zip(replies, rows, strict=True):
        asked = talks.prompt([*QUESTION, reply, Message("user", "on")], [])
        assert asked.token_ids[: len(row)].tolist() == row.tolist()


@pytest.mark.parametrize(("depth", "kind"), [(99, dict), (100, str), (900, str)])
def test_arguments_are_rendered_as_an_object_unless_nested_too_deeply(
    depth: int, kind: type
) -> None:
    text = f'{{"a":{"[" * depth}{"]" * depth}}}'
    (call,) = Message("assistant", "", (Call("1", "f", text),)).for_template()["tool_calls"]
    assert type(call["function"]["arguments"]) is kind
    assert is_object(text) is (kind is dict)


def test_tool_message_gets_the_name_of_its_call() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    read = read_messages(
        [
            {"role": "developer", "content": "s"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
        ]
    )
    assert [m.role for m in read] == ["system", "assistant", "tool"]
    assert (read[2].name, read[2].content) == ("f", "3")

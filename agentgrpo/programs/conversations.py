"""The conversations of one rollout, and the rows of tokens that they are sampled in.

A program may lead several conversations, go on from any earlier answer, rewrite its history or drop
it. Messages make a tree. A node that is an answer of the policy's knows where in which row its
tokens end. A request goes on from the deepest such node among its messages:

* the row ends there: what is new is appended, and the row goes on
* the row goes on otherwise by then (a retry, best of n, sub-agents of equal beginnings), or none of
  its messages was answered, or it says that the policy said what it did not: another row begins
  with the whole prompt, of which nothing is trained on there

A turn that the run cuts short ends its conversation: no request goes on from it.

So each sampled token is in the one row that it was sampled in, whole, and every row is what the
engine saw. Which row a turn belongs to is decided when it is answered.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from agentgrpo.models.chat import ChatTemplate
from agentgrpo.programs.messages import STRINGS, BadRequest, Message, json_key, letters, pieces
from agentgrpo.rollout.transcript import Transcript
from agentgrpo.types import Completion, Int32, Turn

TASK, PROBE = "the task", "conversations without the task's text"
"""What turns are of: a library asks for some before it is given the task."""


@dataclass(eq=False, slots=True)
class Row:
    """Tokens that follow each other, and the engine's account of the turns in them."""

    transcript: Transcript
    turns: list[tuple[int, Turn]] = field(default_factory=list)
    """With their places among all turns of the rollout."""
    opening: str = ""
    """Hash of the prompt that it begins with."""
    kind: str = PROBE
    """TASK as soon as a request that goes on in it has the task's text."""
    cut: bool = False
    """Whether its last turn was cut short by the run."""


@dataclass(eq=False, slots=True)
class Answer:
    """A turn of the policy's that its client was given."""

    row: Row
    end: int
    """How long the row was behind it."""


@dataclass(eq=False, slots=True)
class _Node:
    message: Message
    answer: Answer | None = None
    below: dict[Hashable, list[_Node]] = field(default_factory=dict)

    def find(self, message: Message) -> _Node | None:
        """The one below that is meant: of several the likest, and of these the last."""

        def alike(node: _Node) -> tuple[bool, bool]:
            return message.ids == node.message.ids, message.content == node.message.content

        nodes = reversed(self.below.get(message.key, ()))
        meant = (n for n in nodes if (message.is_of(n.message) if n.answer else all(alike(n))))
        return max(meant, key=alike, default=None)

    def add(self, message: Message, answer: Answer | None = None) -> _Node:
        node = _Node(message, answer)
        self.below.setdefault(message.key, []).append(node)
        return node


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine is to continue for a request."""

    token_ids: Int32
    messages: tuple[Message, ...]
    root: Hashable
    """Of its tree: the tools that it shows."""
    after: Answer | None
    """What it goes on from; None: it is rendered whole."""
    kind: str
    """TASK if it has the task's text, or text of an answer to a conversation that had it."""
    ended: bool
    """Whether it goes on from a turn that the run cut short."""


class Conversations:
    """All of a rollout's. Used on one thread, but for prompt(), which may run beside the others."""

    def __init__(self, chat: ChatTemplate, task: Sequence[str] = ("",)) -> None:
        """`task`: its texts. The empty one is in every conversation."""
        self._chat = chat
        forms = [*task, *map(json.dumps, task), *(json.dumps(t, ensure_ascii=False) for t in task)]
        self._known = dict.fromkeys(piece for form in forms for piece in pieces(form, 0))
        self._roots: dict[Hashable, _Node] = {}
        self.rows: list[Row] = []
        self.num_turns = 0

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> Prompt:
        root = json_key(json.dumps(list(tools)))
        for message in messages:
            _ = message.key  # made here, beside the others where that takes long; kept for said()
        node = self._roots.get(root)
        after, known = None, 0
        for place, message in enumerate(messages, 1):
            node = None if node is None else node.find(message)
            if node is None:
                break
            if node.answer is not None:
                after, known = node.answer, place
        kind = TASK if after and after.row.kind == TASK else self._kind(messages)
        ended = after is not None and after.row.cut and after.end == len(after.row.transcript)
        new = messages[known:]
        ids = None
        if after is not None and new and all(m.role != "assistant" for m in new):
            ids = self._appended(messages[: known - 1], after, new, tools=bool(tools))
        if ids is None:
            after, ids = None, self._rendered(messages, tools)
        return Prompt(ids, tuple(messages), root, after, kind, ended)

    def _kind(self, messages: Sequence[Message]) -> str:
        text = letters("\n".join(f"{message.call_id} {message.content}" for message in messages))
        return TASK if any(piece in text for piece in [*self._known]) else PROBE

    def know(self, message: Message) -> None:
        """An answer of the task's: sub-agents are asked what a call says."""
        parts = pieces(message.content)
        for call in message.calls:
            values = [text for text, is_key in STRINGS.findall(call.arguments) if not is_key]
            parts += [call.id, *(piece for value in values for piece in pieces(value, 3))]
        self._known |= dict.fromkeys(parts)

    def _appended(
        self, before: Sequence[Message], after: Answer, new: Sequence[Message], *, tools: bool
    ) -> Int32 | None:
        """None: the template does not show such messages behind a turn."""
        told = [message.shown() for message in new]
        held = after.row.transcript.ids[: after.end]
        roles = [message.role for message in before]
        try:
            said = self._chat.observation_ids(told, last_id=int(held[-1]), tools=tools, roles=roles)
        except ValueError:
            return None
        joined: Int32 = np.concatenate([held, said])
        return joined

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Any]) -> Int32:
        try:
            ids = self._chat.prompt_ids([message.shown() for message in messages], tools)
        except ValueError as error:
            raise BadRequest(f"messages: {error}", param="messages") from None
        shown = self._chat.tokenizer.decode(ids) if tools else ""
        if unseen := [name for t in tools if (name := t["function"]["name"]) not in shown]:
            why = f"does not show tools ({unseen[0]!r:.80} is not in the prompt)"
            remedy = "take a model made for tool calls, or describe them in a message"
            raise BadRequest(f"tools: the model's chat template {why}: {remedy}", param="tools")
        return ids

    def answered(self, prompt: Prompt, turn: Completion, asked_tokens: int) -> Row:
        """Put a turn where it belongs; its message follows, see said()."""
        after, ids = prompt.after, prompt.token_ids
        if after is not None and len(after.row.transcript) == after.end:
            row = after.row
            row.transcript.give(ids[after.end :].copy())
        else:
            row = Row(Transcript(ids.copy()), opening=turn.account.prompt_hash)
            self.rows.append(row)
        row.kind = TASK if prompt.kind == TASK else row.kind
        row.transcript.sample(turn.token_ids, turn.logprobs)
        row.turns.append((self.num_turns, replace(turn.account, asked_tokens=asked_tokens)))
        self.num_turns += 1
        return row

    def said(self, prompt: Prompt, row: Row, message: Message) -> None:
        """Remember what the client is given, so that it is known when it comes back."""
        answer = Answer(row, len(row.transcript))
        node = self._roots.setdefault(prompt.root, _Node(Message("")))
        for one in prompt.messages:
            node = node.find(one) or node.add(one)
        node.add(message, answer)

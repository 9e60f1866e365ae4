"""The conversations of one rollout, and the rows of tokens in which they are sampled.

A program may have several conversations, continue from any earlier turn, and rewrite or drop its
history. Messages form a tree. A node that is a turn of the policy knows the row and the position
where its tokens end. A request continues from the deepest such node among its messages:

* If the row ends there, the new messages are appended to the row.
* A new row starts with the whole prompt, which is not trained on, if the row already continues
  otherwise (a retry, best of n, sub-agents with equal prefixes), if no message is a turn of the
  policy, or if the request contains an assistant message that the policy did not write.

A turn that the run truncates ends its conversation: no request continues from it.

So each sampled token is in exactly one row, the one in which it was sampled, and every row is what
the engine saw. The row of a turn is decided when its response is delivered.
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
"""Kinds of turns. A library may make requests (probes) before it gets the task."""


@dataclass(eq=False, slots=True)
class Row:
    """A sequence of tokens, with the engine's account of its turns."""

    transcript: Transcript
    turns: list[tuple[int, Turn]] = field(default_factory=list)
    """Each turn with its index among all turns of the rollout."""
    opening: str = ""
    """Hash of the prompt with which the row starts."""
    kind: str = PROBE
    """TASK as soon as a request that continues the row contains the task's text."""
    cut: bool = False
    """Whether the run truncated the last turn."""


@dataclass(eq=False, slots=True)
class Delivered:
    """A turn of the policy that was delivered to its client."""

    row: Row
    end: int
    """Length of the row after the turn."""


@dataclass(eq=False, slots=True)
class _Node:
    message: Message
    answer: Delivered | None = None
    below: dict[Hashable, list[_Node]] = field(default_factory=dict)

    def find(self, message: Message) -> _Node | None:
        """The child for a message: the most similar one, and of equally similar ones the last."""

        def similarity(node: _Node) -> tuple[bool, bool]:
            return message.ids == node.message.ids, message.content == node.message.content

        nodes = reversed(self.below.get(message.key, ()))
        candidates = (
            n for n in nodes if (message.may_be(n.message) if n.answer else all(similarity(n)))
        )
        return max(candidates, key=similarity, default=None)

    def add(self, message: Message, answer: Delivered | None = None) -> _Node:
        node = _Node(message, answer)
        self.below.setdefault(message.key, []).append(node)
        return node


@dataclass(frozen=True, slots=True)
class Prompt:
    """The engine's prompt for a request."""

    token_ids: Int32
    messages: tuple[Message, ...]
    root: Hashable
    """Key of its tree: the tools in the prompt."""
    after: Delivered | None
    """The turn from which it continues. None: the whole prompt is rendered."""
    kind: str
    """TASK if it contains the task's text, or text of a turn of such a conversation."""
    ended: bool
    """Whether it continues from a turn that the run truncated."""


class Conversations:
    """All conversations of a rollout. Only prompt() may run on another thread."""

    def __init__(self, chat: ChatTemplate, task: Sequence[str] = ("",)) -> None:
        """`task`: texts of the task. The empty text is in every conversation."""
        self._chat = chat
        texts = [*task, *map(json.dumps, task), *(json.dumps(t, ensure_ascii=False) for t in task)]
        self._known_pieces = dict.fromkeys(piece for form in texts for piece in pieces(form, 0))
        self._roots: dict[Hashable, _Node] = {}
        self.rows: list[Row] = []
        self.num_turns = 0

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> Prompt:
        root = json_key(json.dumps(list(tools)))
        for message in messages:
            _ = message.key  # computed and cached here, off the event loop, for add_message()
        node = self._roots.get(root)
        after, known = None, 0
        for position, message in enumerate(messages, 1):
            node = None if node is None else node.find(message)
            if node is None:
                break
            if node.answer is not None:
                after, known = node.answer, position
        kind = TASK if after and after.row.kind == TASK else self._kind(messages)
        ended = after is not None and after.row.cut and after.end == len(after.row.transcript)
        new = messages[known:]
        ids = None
        if after is not None and new and all(m.role != "assistant" for m in new):
            ids = self._continue_row(messages[: known - 1], after, new, tools=bool(tools))
        if ids is None:
            after, ids = None, self._render(messages, tools)
        return Prompt(ids, tuple(messages), root, after, kind, ended)

    def _kind(self, messages: Sequence[Message]) -> str:
        text = letters("\n".join(f"{message.call_id} {message.content}" for message in messages))
        return TASK if any(piece in text for piece in [*self._known_pieces]) else PROBE

    def add_known_text(self, message: Message) -> None:
        """Add a turn's text to the task's text: sub-agents get the arguments of calls."""
        parts = pieces(message.content)
        for call in message.calls:
            values = [text for text, is_key in STRINGS.findall(call.arguments) if not is_key]
            parts += [call.id, *(piece for value in values for piece in pieces(value, 3))]
        self._known_pieces |= dict.fromkeys(parts)

    def _continue_row(
        self, before: Sequence[Message], after: Delivered, new: Sequence[Message], *, tools: bool
    ) -> Int32 | None:
        """Append messages to a row. None: the template cannot render them after a turn."""
        messages = [message.for_template() for message in new]
        prefix = after.row.transcript.ids[: after.end]
        roles = [message.role for message in before]
        try:
            added = self._chat.observation_ids(
                messages, last_id=int(prefix[-1]), tools=tools, roles=roles
            )
        except ValueError:
            return None
        token_ids: Int32 = np.concatenate([prefix, added])
        return token_ids

    def _render(self, messages: Sequence[Message], tools: Sequence[Any]) -> Int32:
        try:
            ids = self._chat.prompt_ids([message.for_template() for message in messages], tools)
        except ValueError as error:
            raise BadRequest(f"messages: {error}", param="messages") from None
        prompt_text = self._chat.tokenizer.decode(ids) if tools else ""
        if missing := [name for t in tools if (name := t["function"]["name"]) not in prompt_text]:
            problem = f"does not show tools ({missing[0]!r:.80} is not in the prompt)"
            remedy = "take a model made for tool calls, or describe them in a message"
            raise BadRequest(f"tools: the model's chat template {problem}: {remedy}", param="tools")
        return ids

    def add_turn(self, prompt: Prompt, turn: Completion, asked_tokens: int) -> Row:
        """Add a turn to its row, or to a new row. add_message() must follow."""
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

    def add_message(self, prompt: Prompt, row: Row, message: Message) -> None:
        """Store the message that is delivered to the client, to recognise it in later requests."""
        answer = Delivered(row, len(row.transcript))
        node = self._roots.setdefault(prompt.root, _Node(Message("")))
        for prompt_message in prompt.messages:
            node = node.find(prompt_message) or node.add(prompt_message)
        node.add(message, answer)

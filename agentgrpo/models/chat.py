"""How messages become tokens: the prompt once, then only what each turn adds.

A conversation is never rendered twice. The prompt is rendered once; what the policy samples stays
as it was sampled; an environment's messages become exactly the tokens that the model's chat
template puts between the end of an assistant turn and the start of the next, encoded alone and
appended. So the engine, the learner and the records all hold the same ids, whatever the tokenizer
would make of their text. What a message says is always text: it cannot end a turn or begin one.

Templates rewrite history (they drop thoughts, move system prompts, add default ones), so nothing
is learned from the history: messages are rendered behind a stand-in for the sampled turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jinja2

from agentgrpo.models.encoding import TextEncoder
from agentgrpo.types import Int32

Message = Mapping[str, Any]
_MARK = "\u241fassistant-turn\u241f"  # stands for a sampled turn; no template has it
_USER = {"role": "user", "content": "x"}


Keep = Literal["ends", "head", "tail"]


class ChatTemplate:
    """The model's chat template, as the operations a rollout needs.

    Args:
        tokenizer: a fast transformers tokenizer with a chat template.
        options: what the template is given besides messages and tools, for example
            `{"enable_thinking": False}`.

    Raises:
        ValueError: there is no chat template, or it does not close an assistant turn with a
            control token right after its content, so that a turn's tokens could not be appended.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        self._name = tokenizer.name_or_path
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer of {self._name!r} has no chat template; put a "
                "chat_template.jinja beside its tokenizer.json"
            )
        self.tokenizer = tokenizer
        self._options = dict(options or {})
        self._encoder = TextEncoder(tokenizer)
        inner = self._token_after(self._shown([_USER, _turn(_MARK), _USER], prompt=True))
        last = self._last_control(self._shown([_USER, _turn(_MARK)], prompt=False))
        self._end_of_turn = last or inner
        self.end_of_turn_id = self._encoder.control_ids[self._end_of_turn]
        """The token that closes an assistant turn; sampling it ends the turn."""
        called = [self._last_control(text) for text in self._called_turns()]
        stops = [self._end_of_turn, *filter(None, called)]
        eos = tokenizer.eos_token_id
        self.stop_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys(
                [self._encoder.control_ids[stop] for stop in stops] + ([] if eos is None else [eos])
            )
        )
        """Ids that end an assistant turn when sampled."""
        self._closing = re.compile("|".join(re.escape(token) for token in {*stops, inner}))

        self._shown_roles: set[tuple[str, ...]] = set()
        self.require_roles(["user"])

    def require_roles(self, roles: Sequence[str]) -> None:
        """Check that messages of these roles, in this order, can follow an assistant turn.

        Raises:
            ValueError: the template refuses them, or does not show one, or not in order.
        """
        contents = [f"message-{index}" for index in range(len(roles))]
        probes = _numbered(
            [{"role": role, "content": said} for role, said in zip(roles, contents, strict=True)]
        )
        shown = re.findall(r"message-\d+", self._after_turn(probes)[1])
        if shown != contents:
            raise ValueError(
                self._refusal(probes, "follow an assistant turn", "it does not show each once")
            )
        self._shown_roles.add(tuple(roles))

    def prompt_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        prefill: str = "",
    ) -> Int32:
        """The whole conversation so far, up to where the assistant's next turn begins.

        Args:
            messages: of the conversation.
            tools: JSON schemas that the template shows the policy.
            prefill: text that the turn begins with, unsampled.

        Raises:
            ValueError: the template refuses the messages; the message has its reason.
        """
        (said, schemas, begun), mark = self._encoder.shield([list(messages), list(tools), prefill])
        try:
            text = self._render(said, schemas, prompt=True)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(self._refusal(messages, "begin a conversation", error)) from error
        return self._encoder.encode(text + begun, mark)

    def observation_ids(self, messages: Sequence[Message], *, turn_closed: bool) -> Int32:
        """The tokens between a sampled turn and the next one: messages, and the generation prompt.

        Tool messages follow a turn that called tools, one call for each, with the message's `name`
        and `tool_call_id` (made up where they are missing), if the template knows such turns.

        Args:
            messages: what the environment says, all of it, as chat messages.
            turn_closed: the sampled turn ends with one of stop_token_ids already. If not (a stop
                string or a budget ended it), the closing token is part of what is returned,
                unsampled.

        Raises:
            ValueError: the template refuses the messages; the message has its reason.
        """
        roles = [message["role"] for message in messages]
        if tuple(roles) not in self._shown_roles:
            self.require_roles(roles)
        said, mark = self._encoder.shield(_numbered(messages))
        gap, text = self._after_turn(said)
        if not turn_closed:
            text = self._end_of_turn + gap + text
        return self._encoder.encode(text, mark)[1:]

    def text_ids(self, text: str) -> Int32:
        """The tokens of text put into an assistant's turn as it is, encoded alone."""
        plain, mark = self._encoder.shield(text)
        return self._encoder.encode(self._end_of_turn + plain, mark)[1:]

    def clip(self, text: str, max_tokens: int, keep: Keep = "ends") -> str:
        """Text of at most max_tokens: its head and tail, or the one of them; the cut is marked.

        Where the mark would take more than half of it, there is none, and of both ends the head.
        """
        total = len(self.text_ids(text))
        if total <= max_tokens:
            return text
        starts, ends = zip(*self._encoder.offsets(text), strict=True)
        note = f" ... [{total - max_tokens} tokens cut] ... "
        room = max_tokens - len(self.text_ids(note))
        marked = 2 * room >= max_tokens
        room = min(room if marked else max_tokens, len(ends))
        while room > 0:
            tail = room if keep == "tail" else room // 2 if keep == "ends" and marked else 0
            note = f" ... [{total - room} tokens cut] ... " if marked else ""
            head = text[: ends[room - tail - 1]] if room > tail else ""
            clipped = head + note + (text[starts[-tail] :] if tail else "")
            excess = len(self.text_ids(clipped)) - max_tokens
            if excess <= 0:
                return clipped
            room -= excess
        return ""

    def decode(self, token_ids: Int32) -> str:
        """The text of a sampled turn, without the tokens that end it."""
        ids = token_ids.tolist()
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids))

    # --- behind a stand-in for the sampled turn ---

    def _after_turn(self, messages: list[dict[str, Any]]) -> tuple[str, str]:
        """What the template puts behind a turn: white space, and all from its closing token on."""
        mark = _MARK
        while mark in repr(messages) or mark in str(messages):
            mark += _MARK[0]
        refused: Exception | str = "it does not show that turn"
        for turn in _turns_before(messages, mark):
            try:
                text = self._render([_USER, turn, *messages], (), prompt=True)
            except (jinja2.TemplateError, TypeError) as error:
                refused = error
                continue
            _, _, after = text.partition(mark)
            closed = self._closing.search(after)
            if closed is not None:
                gap = after[: closed.start()]
                return gap if gap.isspace() else "", after[closed.start() :]
        raise ValueError(self._refusal(messages, "follow an assistant turn", refused))

    def _shown(self, messages: list[Message], *, prompt: bool) -> str:
        """What follows the mark when these are rendered; the mark must be shown once."""
        try:
            text = self._render(messages, (), prompt=prompt)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(self._refusal(messages, "be shown", error)) from error
        after = text.partition(_MARK)[2]
        if text.count(_MARK) != 1:
            raise ValueError(
                f"the chat template of {self._name!r} does not show an assistant turn exactly once "
                f"in {[message['role'] for message in messages]}; put a chat_template.jinja that "
                "does beside its tokenizer.json"
            )
        return after

    def _called_turns(self) -> Iterator[str]:
        """What the template puts behind turns that call a tool, as far as it knows such turns."""
        for turn in _turns_before(_numbered([{"role": "tool"}]), _MARK):
            try:
                text = self._render([_USER, turn], (), prompt=False)
            except (jinja2.TemplateError, TypeError):
                continue
            yield text.partition(_MARK)[2]

    def _token_after(self, text: str) -> str:
        """The control token that text begins with, white space aside."""
        found = self._encoder.control.match(text.lstrip())
        if found is None:
            raise ValueError(
                f"the chat template of {self._name!r} must end an assistant turn with a special "
                f"token, but after the turn's text comes {text[:40]!r}; put a chat_template.jinja "
                "that does beside its tokenizer.json"
            )
        return found[0]

    def _last_control(self, text: str) -> str:
        """The last control token in text, or ""."""
        return ([""] + [found[0] for found in self._encoder.control.finditer(text)])[-1]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, prompt: bool
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=prompt,
                tokenize=False,
                **self._options,
            )
        )

    def _refusal(self, messages: Sequence[Message], what: str, reason: object) -> str:
        return (
            f"with the chat template of {self._name!r}, messages of the roles "
            f"{[message.get('role') for message in messages]} cannot {what}: {reason}; use roles "
            "that it knows, or put another chat_template.jinja beside its tokenizer.json"
        )


def _turn(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _numbered(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages, tool results with the name and the id of the call they answer."""
    return [
        {"name": "tool", "tool_call_id": f"call{index:05d}", **message}
        if message.get("role") == "tool"
        else dict(message)
        for index, message in enumerate(messages)
    ]


def _turns_before(messages: Sequence[Message], mark: str) -> Iterator[dict[str, Any]]:
    """Assistant turns that messages can follow, the likeliest first.

    Tool messages answer calls. Templates differ in whether a call's arguments are an object or a
    string, and some know no calls at all.
    """
    results = [message for message in messages if message.get("role") == "tool"]
    for arguments in ({"x": mark}, mark) if results else ():
        calls = [
            {
                "type": "function",
                "id": result["tool_call_id"],
                "function": {"name": result["name"], "arguments": arguments},
            }
            for result in results
        ]
        yield {"role": "assistant", "content": "", "tool_calls": calls}
    yield _turn(mark)

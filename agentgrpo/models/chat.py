"""Convert messages to tokens: the prompt once, then only what each turn adds.

A conversation is never rendered twice. The prompt is rendered once; sampled tokens stay as they
were sampled; an environment's messages become exactly the tokens that the model's chat template
writes between the end of an assistant turn and the start of the next, encoded alone and appended.
So the engine, the learner and the records hold the same ids, however the tokenizer would encode
their text. Message text is always plain text: it can neither end a turn nor begin one.

Templates rewrite history (they drop thoughts, move system prompts, add default ones), so the
history is not used to find these tokens: messages are rendered after a placeholder for the sampled
turn. Some templates render a message depending on earlier ones (Command R7B numbers all calls of a
conversation): for these, the history's roles and calls, without their text, precede the
placeholder.

The tokens that end a turn are also derived from the template, separately for turns of text and of
calls. Most templates close a turn: the closer is the last control token of what they write after it
both at the end of a conversation and before another message. Some do not: the policy samples the
token that opens the environment's message (`<|observation|>` of GLM, `<|tool_response>` of Gemma
4), and only the rest of it is appended.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jinja2

from agentgrpo.models.encoding import TextEncoder
from agentgrpo.types import Int32

Message = Mapping[str, Any]
_MARK = "\u241fassistant-turn\u241f"  # placeholder of a sampled turn; in no template
_USER = {"role": "user", "content": "x"}
CHARS_PER_TOKEN = 16
"""Characters encoded from either end of a text, per token that may be kept of it."""
_LATER = (["user"], ["tool"], ["tool", "tool"])
_PASTS = (["system", "user"], ["user", "assistant", "tool", "tool"], ["user", "assistant", "user"])

Keep = Literal["ends", "head", "tail"]
Form = Literal["object", "string", "text"]


@dataclass(frozen=True, slots=True)
class _Ending:
    """The control tokens that end turns of one form; "" if there is none."""

    final: str
    """The last control token of a conversation that ends with the turn, if not `closer`."""
    closer: str = ""
    """What the template writes after the turn before a message; "": the next opener."""


class ChatTemplate:
    """The model's chat template, as the operations that a rollout needs.

    `tokenizer` is a fast tokenizer of transformers; `options` are passed to the template in
    addition to messages and tools; `generation_config` is the model's, whose `eos_token_id` ends a
    turn too.

    ValueError: there is no chat template, or it does not write a control token directly after an
    assistant turn's content, so that the tokens after a turn cannot be determined.
    """

    def __init__(
        self, tokenizer: Any, options: Mapping[str, Any] | None = None, *,
        generation_config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._name = tokenizer.name_or_path
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer of {self._name!r} has no chat template; put a "
                "chat_template.jinja next to its tokenizer.json"
            )
        self.tokenizer = tokenizer
        self._options = dict(options or {})
        self._encoder = TextEncoder(tokenizer)
        self._inner: frozenset[str] = frozenset()
        self._generation_config = dict(generation_config)
        eos_ids = generation_config.get("eos_token_id")
        eos_token_ids = [eos_ids] if isinstance(eos_ids, int) else eos_ids or []
        self._eos_ids = {*eos_token_ids, tokenizer.eos_token_id}
        text_ending = self._ending("text", _turn(_MARK))
        self._inner = self._within_turns() - {text_ending.final or text_ending.closer}
        self._endings = {
            form: self._ending(form, turn)
            for form, turn in _turns_before(_numbered([{"role": "tool"}]), _MARK)
        }
        text_ending, eos = self._endings["text"], tokenizer.eos_token_id
        ends = self._ids(text_ending.closer, text_ending.final) + ([] if eos is None else [eos])
        for ending in self._endings.values():
            ends += self._ids(ending.closer, ending.final)
        openers = self._openers()
        ends += openers
        self.end_of_turn_id = ends[0]
        """The token that ends a turn of text at the end of a conversation."""
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*ends, *eos_token_ids]))
        """Ids that end an assistant turn when sampled."""
        self._opening_ids = frozenset(openers)

        self._checked_roles: set[tuple[str, ...]] = set()
        self.require_roles(["user"])
        self._uses_past = any(self._depends_on(roles, past) for roles in _LATER for past in _PASTS)

    def reads(self, option: str) -> bool:
        """Whether the template uses an option of this name; other options have no effect."""
        return bool(re.search(rf"\b{re.escape(option)}\b", str(self.tokenizer.chat_template)))

    @property
    def unknown_stops(self) -> tuple[str, ...]:
        """Tokens that end a turn here, but neither by the tokenizer nor by generation_config."""
        ids = [i for i in self.stop_token_ids if i not in self._eos_ids]
        return tuple(self.tokenizer.convert_ids_to_tokens(ids))

    def save(self, folder: Path) -> None:
        """Write the tokenizer, and stop_token_ids to generation_config.json.

        vLLM, SGLang, TGI and transformers read them there; the model's own file may contain only
        the end of a document.
        """
        self.tokenizer.save_pretrained(folder)
        table = {**self._generation_config, "eos_token_id": list(self.stop_token_ids)}
        path = folder / "generation_config.json"
        path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")

    def require_roles(self, roles: Sequence[str]) -> None:
        """Check that messages of these roles, in this order, can follow an assistant turn."""
        contents = [f"message-{index}" for index in range(len(roles))]
        probes = _numbered(
            [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
        )
        contents_in_text = re.findall(r"message-\d+", self._after_turn(probes, None)[2])
        if contents_in_text != contents:
            raise ValueError(
                self._refusal(probes, "follow an assistant turn", "it does not show each once")
            )
        self._checked_roles.add(tuple(roles))

    def require_shown(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Check that a prompt changes with the text, the calls and the role of each message."""
        messages = _numbered(messages)
        prompt = self._render(messages, tools, prompt=True)
        for index, message in enumerate(messages):
            role = str(message["role"])
            other: dict[str, Any] = {"content": f"{message.get('content')}x", "tool_calls": []}
            if role not in ("system", "user", "assistant", "tool"):
                other["role"] = "stand-in"  # some templates write any role name
            for key in filter(message.get, other):
                changed = [*messages[:index], {**message, key: other[key]}, *messages[index + 1 :]]
                text = self._render_or_empty(changed, tools, prompt=True).replace("stand-in", role)
                if text == prompt:
                    reason = f"the {key} of message {index + 1} ({role!r}) changes nothing"
                    raise ValueError(self._refusal(messages, "begin a conversation", reason))

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Int32:
        """The tokens of the conversation so far, up to the start of the assistant's next turn.

        ValueError: the template rejects the messages; the message contains its reason.
        """
        pairs = zip(messages, _numbered(messages), strict=True)
        messages = [dict(m) if m.get("tool_call_id") else numbered for m, numbered in pairs]
        own = [*_is_own(messages), False]
        (*shielded, schemas), mark = self._encoder.shield(*messages, list(tools), own=own)
        try:
            text = self._render(shielded, schemas, prompt=True)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(self._refusal(messages, "begin a conversation", error)) from error
        return self._encoder.encode(text, mark)

    def observation_ids(
        self, messages: Sequence[Message], *, last_id: int | None, tools: bool = False,
        roles: Sequence[str] = (),
    ) -> Int32:  # fmt: skip
        """The tokens between a sampled turn and the next one: messages and the generation prompt.

        Tool messages follow a turn that called tools, one call each, with the message's `name` and
        `tool_call_id` (generated if missing), if the template knows such turns. `roles` are those
        of all messages before the turn, for templates that read them.

        `last_id` is the last token of the sampled turn. If the template writes it there, the result
        starts after it. Otherwise, if the turn ended with another of stop_token_ids, the result
        starts after the closing token. If a budget, a stop string, or a token that opens another
        role's message ended the turn (None: the same), the result includes the closing token,
        unsampled.
        """
        message_roles = [message["role"] for message in messages]
        if tuple(message_roles) not in self._checked_roles:
            self.require_roles(message_roles)
        (shielded,), mark = self._encoder.shield(_numbered(messages))
        past = roles if self._uses_past else ()
        _, before, text = self._after_turn(shielded, last_id, tools=tools, roles=past)
        return self._encoder.encode_after(text, mark, before)

    def closing_id(self, messages: Sequence[Message]) -> int:
        """The token that ends a turn followed by these messages; without messages, a final turn."""
        ends = self._ids(self._after_turn(_numbered(messages), None)[0]) if messages else []
        return (ends or [self.end_of_turn_id])[0]

    def text_ids(self, text: str, *, own: bool = False) -> Int32:
        """The tokens of text inserted verbatim into an assistant's turn, encoded alone.

        `own`: written by the policy or its author, who may use the tokens within a turn, such as
        `<think>`; otherwise by the environment, without control tokens.
        """
        (plain,), mark = self._encoder.shield(text, own=[own])
        return self._encoder.encode_after(plain, mark)

    def clip(self, text: str, max_tokens: int, keep: Keep = "ends") -> str:
        """Shorten text to max_tokens: head and tail, or one of them, with a note at the cut.

        If the note would take more than half of the tokens, it is omitted, and "ends" keeps the
        head. Of a text that exceeds max_tokens by its length alone only the ends are encoded, and
        the note counts characters.
        """
        exact, end_chars = not self.exceeds(text, max_tokens), CHARS_PER_TOKEN * max_tokens
        total = len(self.text_ids(text)) if exact else len(text)
        if exact and total <= max_tokens:
            return text
        head_text, tail_text = (text, text) if exact else (text[:end_chars], text[-end_chars:])
        token_ends = [end for _, end in self._encoder.offsets(head_text)]
        token_starts = [start - len(tail_text) for start, _ in self._encoder.offsets(tail_text)]

        def joined(room: int, tail: int, *, marked: bool) -> str:
            head = text[: token_ends[room - tail - 1]] if room > tail else ""
            tail_part = text[token_starts[-tail] :] if tail else ""
            size, unit = (room, "tokens") if exact else (len(head) + len(tail_part), "characters")
            note = f" ... [{total - size} {unit} cut] ... " if marked else ""
            return head + note + tail_part

        note = f" ... [{total - max_tokens} tokens cut] ... "
        room = max_tokens - len(self.text_ids(note if exact else joined(0, 0, marked=True)))
        marked = 2 * room >= max_tokens
        room = min(room if marked else max_tokens, len(token_ends), len(token_starts))
        while room > 0:
            tail = room if keep == "tail" else room // 2 if keep == "ends" and marked else 0
            clipped = joined(room, tail, marked=marked)
            excess = len(self.text_ids(clipped)) - max_tokens
            if excess <= 0:
                return clipped
            room -= excess
        return ""

    def exceeds(self, text: str, max_tokens: int) -> bool:
        """Whether the text is longer than max_tokens by its number of characters alone."""
        return len(text) > 2 * CHARS_PER_TOKEN * max_tokens + 512

    def decode(self, token_ids: Int32) -> str:
        """The text of a sampled turn, without the tokens that end it."""
        ids = token_ids.tolist()
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids))

    # --- after a placeholder for the sampled turn ---

    def _after_turn(
        self, messages: list[dict[str, Any]], last_id: int | None, *, tools: bool = False,
        roles: Sequence[str] = (),
    ) -> tuple[str, str, str]:  # fmt: skip
        """(token that ends the turn, control token before the appended text or "", appended text).

        The turn is a placeholder, followed by these messages.
        """
        mark, word, message_text = _MARK, "stand-in-word", repr(messages) + str(messages)
        while mark in message_text or word in message_text:
            mark, word = mark + _MARK[0], word + "s"
        reasons: list[str] = []
        for form, turn in _turns_before(messages, mark):
            candidates = [(p, t) for p in ([_past(roles, form, word)] if roles else []) + [[_USER]]
                     for t in ([_schemas(word)] if tools else []) + [[]]]  # fmt: skip
            for past, schemas in candidates:  # the first that repeats no placeholder after the turn
                try:
                    text = self._render([*past, turn, *messages], schemas, prompt=True)
                except (jinja2.TemplateError, TypeError) as error:
                    reason = str(error)
                    continue
                if word not in text.partition(mark)[2]:
                    break
            else:
                reasons.append(reason)
                continue
            after, closer = text.partition(mark)[2], self._endings[form].closer
            ends = [m for m in self._controls(after, inner=True) if m[0] == closer]
            end = next(iter(ends if closer else self._controls(after)), None)
            if end is None:
                reasons.append("it does not show that turn and its end")
                continue
            start = self._start(after, end, form, last_id)
            before = [m[0] for m in self._controls(after, inner=True) if m.end() == start]
            return end[0], "".join(before), after[start:]
        raise ValueError(self._refusal(messages, "follow an assistant turn", reasons[0]))

    def _depends_on(self, roles: Sequence[str], past: Sequence[str]) -> bool:
        """Whether the template renders these roles differently after such a history."""
        messages = _numbered([{"role": role, "content": "x"} for role in roles])
        try:
            alone, with_past = (self._after_turn(messages, None, roles=r)[2] for r in ((), past))
        except ValueError:  # it does not render them at all
            return False
        return alone != with_past

    def _start(self, after: str, end: re.Match[str], form: Form, last_id: int | None) -> int:
        """The offset in `after` (the text after the turn, ended by `end`) of the text to append."""

        def has_only_controls(text: str) -> bool:
            return not self._encoder.control.sub("", text).strip()

        for control in reversed(self._controls(after[: end.end()], inner=True)):
            if not has_only_controls(after[control.end() : end.start()]):
                break
            if self._encoder.control_ids[control[0]] == last_id:
                return control.end()
        head = after[: end.start()]
        if last_id is None or last_id not in self.stop_token_ids or last_id in self._opening_ids:
            return 0 if form == "text" else len(head.rstrip())
        return end.end() if self._endings[form].closer else len(head.rstrip())

    def _ending(self, form: Form, turn: dict[str, Any]) -> _Ending:
        """How the template ends turns of this form; a turn of text needs a control token."""
        if form == "text":
            ended = self._after_placeholder([_USER, turn], prompt=False)
            after = self._after_placeholder([_USER, turn, _USER], prompt=True)
            if not self._encoder.control.match(after.lstrip()):
                raise ValueError(
                    f"the chat template of {self._name!r} must end an assistant turn with a "
                    f"special token, but after the turn's text comes {after[:40]!r}; put a "
                    "chat_template.jinja that does next to its tokenizer.json"
                )
        else:
            ended = self._render_or_empty([_USER, turn], prompt=False).partition(_MARK)[2]
            result = _numbered([{"role": "tool", "content": "x"}])
            after = self._render_or_empty([_USER, turn, *result], prompt=True).partition(_MARK)[2]
        final, shared = self._last(ended), _common_prefix(ended, after)
        closing = [m for m in self._controls(after) if m.end() <= shared]
        if closing:  # otherwise both continue with the opener of a message
            eos = [m for m in closing if self._encoder.control_ids[m[0]] in self._eos_ids]
            closer = closing[-1] if shared >= len(ended.rstrip()) else (closing[:1] + eos)[-1]
            final = ""
        elif controls := self._controls(after, inner=bool(final)):
            closer = controls[0]
        else:
            return _Ending(final)
        rest = after[closer.end() :].lstrip()
        # the closer of a user turn too
        closes = self._render_or_empty([_USER], prompt=False).rstrip().endswith(closer[0])
        opens = rest and not closes and not self._encoder.framing.match(rest)
        return _Ending(final, "" if opens else closer[0])

    def _openers(self) -> list[int]:
        """The tokens that open the environment's messages where the template closes no turn."""
        openers, closers = [], {ending.closer for ending in self._endings.values()}
        for role in ("user", "tool"):
            try:
                end, *_ = self._after_turn(_numbered([{"role": role, "content": "x"}]), None)
            except ValueError:
                continue
            openers += self._ids(*{end} - closers)
        return openers

    def _within_turns(self) -> frozenset[str]:
        """Control tokens that the template writes within a turn: around thoughts and calls."""
        prompt, tokens = self._render_or_empty([_USER], prompt=True), set()
        thought = dict.fromkeys(("thinking", "reasoning", "reasoning_content"), "y")
        for count in (1, 2):
            for _, turn in _turns_before(_numbered([{"role": "tool"}] * count), _MARK):
                text = self._render_or_empty([_USER, turn | thought], prompt=False)
                start, end = _common_prefix(prompt, text), text.rfind(_MARK)
                tokens |= {
                    m[0] for m in self._encoder.control.finditer(text) if start < m.end() <= end
                }
        return frozenset(tokens)

    def _controls(self, text: str, *, inner: bool = False) -> list[re.Match[str]]:
        """The control tokens in text; `inner`: including those within turns."""
        matches = self._encoder.control.finditer(text)
        return [m for m in matches if inner or m[0] not in self._inner]

    def _last(self, text: str) -> str:
        return ([""] + [m[0] for m in self._controls(text)])[-1]

    def _ids(self, *tokens: str) -> list[int]:
        """The ids of tokens that can end a turn: neither "" nor inner tokens."""
        return [self._encoder.control_ids[t] for t in tokens if t and t not in self._inner]

    def _render_or_empty(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, prompt: bool
    ) -> str:
        try:
            return self._render(messages, tools, prompt=prompt)
        except (jinja2.TemplateError, TypeError):
            return ""

    def _after_placeholder(self, messages: list[Message], *, prompt: bool) -> str:
        """The text after the placeholder, which must be rendered exactly once."""
        try:
            text = self._render(messages, (), prompt=prompt)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(self._refusal(messages, "be shown", error)) from error
        if text.count(_MARK) != 1:
            raise ValueError(
                f"the chat template of {self._name!r} does not show an assistant turn exactly once "
                f"in {[message['role'] for message in messages]}; put a chat_template.jinja that "
                "does next to its tokenizer.json"
            )
        return text.partition(_MARK)[2]

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

    def _refusal(self, messages: Sequence[Message], action: str, reason: object) -> str:
        return (
            f"with the chat template of {self._name!r}, messages of the roles "
            f"{[message.get('role') for message in messages]} cannot {action}: {reason}; use roles "
            "that it knows, or put another chat_template.jinja next to its tokenizer.json"
        )


def _is_own(messages: Sequence[Message]) -> Iterator[bool]:
    """Whether each message is the policy's, or the author's before the policy's first turn."""
    assistant_seen = False
    for message in messages:
        assistant_seen |= message.get("role") == "assistant"
        yield message.get("role") in (("assistant",) if assistant_seen else ("system", "developer"))


def _common_prefix(a: str, b: str) -> int:
    return len(os.path.commonprefix([a, b]))  # noqa: RUF071 - texts, not paths


def _schemas(name: str) -> list[dict[str, Any]]:
    x = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}}
    function = {"name": name, "description": "x", "parameters": x}
    return [{"type": "function", "function": function}]


def _turn(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _numbered(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages; tool results get a name and a call id if they have none."""
    return [
        {"name": "tool", "tool_call_id": f"call{index:05d}", **message}
        if message.get("role") == "tool"
        else dict(message)
        for index, message in enumerate(messages)
    ]


def _past(roles: Sequence[str], form: Form, word: str) -> list[Message]:
    """A conversation of these roles whose only text is a word; its calls have the given form."""
    messages: list[Message] = []
    for index, role in enumerate(roles):
        message: dict[str, Any] = {"role": role, "content": word}
        if role == "tool":
            message |= {"name": word, "tool_call_id": f"past{index:05d}"}
        elif role == "assistant":
            results = list(takewhile(lambda role: role == "tool", roles[index + 1 :]))
            ids = [f"past{index + 1 + call:05d}" for call in range(len(results))]
            results_before = [{"role": "tool", "name": word, "tool_call_id": i} for i in ids]
            forms: dict[Form, dict[str, Any]] = dict(_turns_before(results_before, word))
            message = forms[form] if form in forms else forms["text"]
        messages.append(message)
    return messages


def _turns_before(messages: Sequence[Message], mark: str) -> Iterator[tuple[Form, dict[str, Any]]]:
    """Assistant turns that messages can follow, by form, the most likely first.

    Tool messages answer calls. Templates differ in whether a call's arguments are an object or a
    string; some support no calls.
    """
    results = [message for message in messages if message.get("role") == "tool"]
    forms: tuple[tuple[Form, Any], ...] = (("object", {"x": mark}), ("string", mark))
    for form, arguments in forms if results else ():
        calls = [
            {
                "type": "function",
                "id": result["tool_call_id"],
                "function": {"name": result["name"], "arguments": arguments},
            }
            for result in results
        ]
        yield form, {"role": "assistant", "content": "", "tool_calls": calls}
    yield "text", _turn(mark)

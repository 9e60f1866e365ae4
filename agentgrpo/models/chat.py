"""How messages become tokens: the prompt once, then only what each turn adds.

A conversation is never rendered twice. The prompt is rendered once; what the policy samples stays
as it was sampled; an environment's messages become exactly the tokens that the model's chat
template puts between the end of an assistant turn and the start of the next, encoded alone and
appended. So the engine, the learner and the records all hold the same ids, whatever the tokenizer
would make of their text. What a message says is always text: it cannot end a turn or begin one.

Templates rewrite history (they drop thoughts, move system prompts, add default ones), so nothing
is learned from the history: messages are rendered behind a stand-in for the sampled turn. Some
write a message by what was before it (Command R7B numbers all calls of a conversation): there, the
history's roles and calls, without its words, are before that stand-in too.

What ends a turn is learned from the template too, for turns of text and of calls apart. Most close
a turn: its closer is the last control token of what they put behind it both at the end of a
conversation and before another message. Some close none: the policy samples the token that opens
the environment's message (`<|observation|>` of GLM, `<|tool_response>` of Gemma 4), of which only
the rest is appended.
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
_MARK = "\u241fassistant-turn\u241f"  # stands for a sampled turn; no template has it
_USER = {"role": "user", "content": "x"}
CHARACTERS = 16
"""Of either end of a text that are encoded, for each token that may be kept of it."""
_LATER = (["user"], ["tool"], ["tool", "tool"])
_PASTS = (["system", "user"], ["user", "assistant", "tool", "tool"], ["user", "assistant", "user"])

Keep = Literal["ends", "head", "tail"]
Form = Literal["object", "string", "text"]


@dataclass(frozen=True, slots=True)
class _Ending:
    """The control tokens that end turns of one form; "" where there is none."""

    final: str
    """The last one of a conversation that ends with the turn, if `closer` does not end that."""
    closer: str = ""
    """What the template puts behind the turn before another message; "": what opens that."""


class ChatTemplate:
    """The model's chat template, as the operations a rollout needs.

    `tokenizer` is a fast one of transformers; `options` is what the template is given besides
    messages and tools; `generation_config` is the model's, whose `eos_token_id` ends a turn too.

    ValueError: there is no chat template, or it does not end an assistant turn with a control token
    right after its content, so that a turn's tokens could not be appended.
    """

    def __init__(
        self, tokenizer: Any, options: Mapping[str, Any] | None = None, *,
        generation_config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._name = tokenizer.name_or_path
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer of {self._name!r} has no chat template; put a "
                "chat_template.jinja beside its tokenizer.json"
            )
        self.tokenizer = tokenizer
        self._options = dict(options or {})
        self._encoder = TextEncoder(tokenizer)
        self._inner: frozenset[str] = frozenset()
        self._generation_config = dict(generation_config)
        eos_ids = generation_config.get("eos_token_id")
        eos_token_ids = [eos_ids] if isinstance(eos_ids, int) else eos_ids or []
        self._eos_ids = {*eos_token_ids, tokenizer.eos_token_id}
        plain = self._ending("text", _turn(_MARK))
        self._inner = self._within_turns() - {plain.final or plain.closer}
        self._endings = {
            form: self._ending(form, turn)
            for form, turn in _turns_before(_numbered([{"role": "tool"}]), _MARK)
        }
        plain, eos = self._endings["text"], tokenizer.eos_token_id
        ends = self._ids(plain.closer, plain.final) + ([] if eos is None else [eos])
        for ending in self._endings.values():
            ends += self._ids(ending.closer, ending.final)
        openers = self._openers()
        ends += openers
        self.end_of_turn_id = ends[0]
        """The token that ends a turn of text that nothing follows."""
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*ends, *eos_token_ids]))
        """Ids that end an assistant turn when sampled."""
        self._opening_ids = frozenset(openers)

        self._shown_roles: set[tuple[str, ...]] = set()
        self.require_roles(["user"])
        self._looks_back = any(self._depends_on(roles, past) for roles in _LATER for past in _PASTS)

    def reads(self, option: str) -> bool:
        """Whether the template has an option of this name; another changes nothing."""
        return bool(re.search(rf"\b{re.escape(option)}\b", str(self.tokenizer.chat_template)))

    @property
    def unknown_stops(self) -> tuple[str, ...]:
        """Tokens that end a turn here, but neither by the tokenizer nor by generation_config."""
        ids = [i for i in self.stop_token_ids if i not in self._eos_ids]
        return tuple(self.tokenizer.convert_ids_to_tokens(ids))

    def save(self, folder: Path) -> None:
        """Write the tokenizer, and stop_token_ids where vLLM, SGLang, TGI and transformers read
        them: the model's own generation_config.json, which may name only the end of a document.
        """
        self.tokenizer.save_pretrained(folder)
        table = {**self._generation_config, "eos_token_id": list(self.stop_token_ids)}
        path = folder / "generation_config.json"
        path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")

    def require_roles(self, roles: Sequence[str]) -> None:
        """Check that messages of these roles, in this order, can follow an assistant turn."""
        contents = [f"message-{index}" for index in range(len(roles))]
        probes = _numbered(
            [{"role": role, "content": said} for role, said in zip(roles, contents, strict=True)]
        )
        shown = re.findall(r"message-\d+", self._after_turn(probes, None)[2])
        if shown != contents:
            raise ValueError(
                self._refusal(probes, "follow an assistant turn", "it does not show each once")
            )
        self._shown_roles.add(tuple(roles))

    def require_shown(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Check that a prompt changes with the text, the calls and the role of each message."""
        messages = _numbered(messages)
        prompt = self._render(messages, tools, prompt=True)
        for at, message in enumerate(messages):
            role = str(message["role"])
            other: dict[str, Any] = {"content": f"{message.get('content')}x", "tool_calls": []}
            if role not in ("system", "user", "assistant", "tool"):
                other["role"] = "stand-in"  # some templates write any name
            for key in filter(message.get, other):
                changed = [*messages[:at], {**message, key: other[key]}, *messages[at + 1 :]]
                text = self._tried(changed, tools, prompt=True).replace("stand-in", role)
                if text == prompt:
                    reason = f"the {key} of message {at + 1} ({role!r}) changes nothing"
                    raise ValueError(self._refusal(messages, "begin a conversation", reason))

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Int32:
        """The whole conversation so far, up to where the assistant's next turn begins.

        ValueError: the template refuses the messages; the message has its reason.
        """
        pairs = zip(messages, _numbered(messages), strict=True)
        messages = [dict(one) if one.get("tool_call_id") else made for one, made in pairs]
        own = [*_own(messages), False]
        (*said, schemas), mark = self._encoder.shield(*messages, list(tools), own=own)
        try:
            text = self._render(said, schemas, prompt=True)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(self._refusal(messages, "begin a conversation", error)) from error
        return self._encoder.encode(text, mark)

    def observation_ids(
        self, messages: Sequence[Message], *, last_id: int | None, tools: bool = False,
        roles: Sequence[str] = (),
    ) -> Int32:  # fmt: skip
        """The tokens between a sampled turn and the next one: messages, and the generation prompt.

        Tool messages follow a turn that called tools, one call for each, with the message's `name`
        and `tool_call_id` (made up where they are missing), if the template knows such turns.
        `roles` are those of all messages before the turn, for templates that look at them.

        `last_id` is the sampled turn's last token. What the template writes behind it there is
        returned. If it does not write it there: what follows the closing token, where the turn
        ended with another of stop_token_ids; with the closing token, unsampled, where a budget or a
        stop string ended it, or a token that opens another role's message. None: of the last kind.
        """
        told = [message["role"] for message in messages]
        if tuple(told) not in self._shown_roles:
            self.require_roles(told)
        (said,), mark = self._encoder.shield(_numbered(messages))
        past = roles if self._looks_back else ()
        _, before, text = self._after_turn(said, last_id, tools=tools, roles=past)
        return self._encoder.encode_behind(text, mark, before)

    def closing_id(self, messages: Sequence[Message]) -> int:
        """The token that ends a turn which these messages follow; none of them: nothing does."""
        ends = self._ids(self._after_turn(_numbered(messages), None)[0]) if messages else []
        return (ends or [self.end_of_turn_id])[0]

    def text_ids(self, text: str, *, own: bool = False) -> Int32:
        """The tokens of text put into an assistant's turn as it is, encoded alone.

        `own`: it is the policy's or its author's, who may write the tokens that a turn is written
        with, such as `<think>`; else it is the environment's, and no control token.
        """
        (plain,), mark = self._encoder.shield(text, own=[own])
        return self._encoder.encode_behind(plain, mark)

    def clip(self, text: str, max_tokens: int, keep: Keep = "ends") -> str:
        """Text of at most max_tokens: its head and tail, or the one of them; the cut is marked.

        Where the mark would take more than half of it, there is none, and of both ends the head.
        Of a text that is longer than so many tokens can be, no more is encoded than its ends, and
        the mark counts what is cut in characters.
        """
        whole, near = not self.exceeds(text, max_tokens), CHARACTERS * max_tokens
        total = len(self.text_ids(text)) if whole else len(text)
        if whole and total <= max_tokens:
            return text
        head_text, tail_text = (text, text) if whole else (text[:near], text[-near:])
        ends = [end for _, end in self._encoder.offsets(head_text)]
        starts = [start - len(tail_text) for start, _ in self._encoder.offsets(tail_text)]

        def joined(room: int, tail: int, *, marked: bool) -> str:
            head = text[: ends[room - tail - 1]] if room > tail else ""
            last = text[starts[-tail] :] if tail else ""
            left, unit = (room, "tokens") if whole else (len(head) + len(last), "characters")
            note = f" ... [{total - left} {unit} cut] ... " if marked else ""
            return head + note + last

        note = f" ... [{total - max_tokens} tokens cut] ... "
        room = max_tokens - len(self.text_ids(note if whole else joined(0, 0, marked=True)))
        marked = 2 * room >= max_tokens
        room = min(room if marked else max_tokens, len(ends), len(starts))
        while room > 0:
            tail = room if keep == "tail" else room // 2 if keep == "ends" and marked else 0
            clipped = joined(room, tail, marked=marked)
            excess = len(self.text_ids(clipped)) - max_tokens
            if excess <= 0:
                return clipped
            room -= excess
        return ""

    def exceeds(self, text: str, max_tokens: int) -> bool:
        """Whether a text is longer than so many tokens by its characters alone."""
        return len(text) > 2 * CHARACTERS * max_tokens + 512

    def decode(self, token_ids: Int32) -> str:
        """The text of a sampled turn, without the tokens that end it."""
        ids = token_ids.tolist()
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids))

    # --- behind a stand-in for the sampled turn ---

    def _after_turn(
        self, messages: list[dict[str, Any]], last_id: int | None, *, tools: bool = False,
        roles: Sequence[str] = (),
    ) -> tuple[str, str, str]:  # fmt: skip
        """The token that ends a turn that these messages follow; behind what, and what is appended.

        The latter is a control token that the template writes there, or "".
        """
        mark, word, said = _MARK, "stand-in-word", repr(messages) + str(messages)
        while mark in said or word in said:
            mark, word = mark + _MARK[0], word + "s"
        refused: list[str] = []
        for form, turn in _turns_before(messages, mark):
            tried = [(p, t) for p in ([_past(roles, form, word)] if roles else []) + [[_USER]]
                     for t in ([_schemas(word)] if tools else []) + [[]]]  # fmt: skip
            for past, shown in tried:  # the first in which nothing of the stand-ins is shown again
                try:
                    text = self._render([*past, turn, *messages], shown, prompt=True)
                except (jinja2.TemplateError, TypeError) as error:
                    reason = str(error)
                    continue
                if word not in text.partition(mark)[2]:
                    break
            else:
                refused.append(reason)
                continue
            after, closer = text.partition(mark)[2], self._endings[form].closer
            ends = [m for m in self._controls(after, inner=True) if m[0] == closer]
            end = next(iter(ends if closer else self._controls(after)), None)
            if end is None:
                refused.append("it does not show that turn and its end")
                continue
            start = self._start(after, end, form, last_id)
            before = [m[0] for m in self._controls(after, inner=True) if m.end() == start]
            return end[0], "".join(before), after[start:]
        raise ValueError(self._refusal(messages, "follow an assistant turn", refused[0]))

    def _depends_on(self, roles: Sequence[str], past: Sequence[str]) -> bool:
        """Whether the template writes messages of these roles otherwise behind such a history."""
        said = _numbered([{"role": role, "content": "x"} for role in roles])
        try:
            alone, behind = (self._after_turn(said, None, roles=r)[2] for r in ((), past))
        except ValueError:  # it does not show them at all
            return False
        return alone != behind

    def _start(self, after: str, end: re.Match[str], form: Form, last_id: int | None) -> int:
        """Where in `after`, what follows a turn that `end` ends, begins what is appended to it."""

        def bare(text: str) -> bool:
            return not self._encoder.control.sub("", text).strip()

        for control in reversed(self._controls(after[: end.end()], inner=True)):
            if not bare(after[control.end() : end.start()]):
                break
            if self._encoder.control_ids[control[0]] == last_id:
                return control.end()
        head = after[: end.start()]
        if last_id is None or last_id not in self.stop_token_ids or last_id in self._opening_ids:
            return 0 if form == "text" else len(head.rstrip())
        return end.end() if self._endings[form].closer else len(head.rstrip())

    def _ending(self, form: Form, turn: dict[str, Any]) -> _Ending:
        """How the template ends turns of this form; of text, with a control token at once."""
        if form == "text":
            ended = self._shown([_USER, turn], prompt=False)
            after = self._shown([_USER, turn, _USER], prompt=True)
            if not self._encoder.control.match(after.lstrip()):
                raise ValueError(
                    f"the chat template of {self._name!r} must end an assistant turn with a "
                    f"special token, but after the turn's text comes {after[:40]!r}; put a "
                    "chat_template.jinja that does beside its tokenizer.json"
                )
        else:
            ended = self._tried([_USER, turn], prompt=False).partition(_MARK)[2]
            result = _numbered([{"role": "tool", "content": "x"}])
            after = self._tried([_USER, turn, *result], prompt=True).partition(_MARK)[2]
        final, shared = self._last(ended), _shared(ended, after)
        closing = [m for m in self._controls(after) if m.end() <= shared]
        if closing:  # else both go on with what opens a message
            known = [m for m in closing if self._encoder.control_ids[m[0]] in self._eos_ids]
            found = closing[-1] if shared >= len(ended.rstrip()) else (closing[:1] + known)[-1]
            final = ""
        elif controls := self._controls(after, inner=bool(final)):
            found = controls[0]
        else:
            return _Ending(final)
        rest = after[found.end() :].lstrip()
        closes = self._tried([_USER], prompt=False).rstrip().endswith(found[0])  # a user's, too
        opens = rest and not closes and not self._encoder.framing.match(rest)
        return _Ending(final, "" if opens else found[0])

    def _openers(self) -> list[int]:
        """The tokens that open the environment's messages where the template closes no turn."""
        found, closers = [], {ending.closer for ending in self._endings.values()}
        for role in ("user", "tool"):
            try:
                end, *_ = self._after_turn(_numbered([{"role": role, "content": "x"}]), None)
            except ValueError:
                continue
            found += self._ids(*{end} - closers)
        return found

    def _within_turns(self) -> frozenset[str]:
        """Control tokens that the template writes within a turn: around thoughts and calls."""
        prompt, found = self._tried([_USER], prompt=True), set()
        thought = dict.fromkeys(("thinking", "reasoning", "reasoning_content"), "y")
        for count in (1, 2):
            for _, turn in _turns_before(_numbered([{"role": "tool"}] * count), _MARK):
                text = self._tried([_USER, turn | thought], prompt=False)
                start, end = _shared(prompt, text), text.rfind(_MARK)
                found |= {
                    m[0] for m in self._encoder.control.finditer(text) if start < m.end() <= end
                }
        return frozenset(found)

    def _controls(self, text: str, *, inner: bool = False) -> list[re.Match[str]]:
        """The control tokens in text, also those that turns have within."""
        found = self._encoder.control.finditer(text)
        return [m for m in found if inner or m[0] not in self._inner]

    def _last(self, text: str) -> str:
        """The last control token in text that is not within a turn, or ""."""
        return ([""] + [m[0] for m in self._controls(text)])[-1]

    def _ids(self, *tokens: str) -> list[int]:
        """The ids of tokens that can end a turn: not "", not those that turns have within."""
        return [self._encoder.control_ids[t] for t in tokens if t and t not in self._inner]

    def _tried(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, prompt: bool
    ) -> str:
        """The rendering, or "" if the template refuses the messages."""
        try:
            return self._render(messages, tools, prompt=prompt)
        except (jinja2.TemplateError, TypeError):
            return ""

    def _shown(self, messages: list[Message], *, prompt: bool) -> str:
        """What follows the mark when these are rendered; the mark must be shown once."""
        try:
            text = self._render(messages, (), prompt=prompt)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(self._refusal(messages, "be shown", error)) from error
        if text.count(_MARK) != 1:
            raise ValueError(
                f"the chat template of {self._name!r} does not show an assistant turn exactly once "
                f"in {[message['role'] for message in messages]}; put a chat_template.jinja that "
                "does beside its tokenizer.json"
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

    def _refusal(self, messages: Sequence[Message], what: str, reason: object) -> str:
        return (
            f"with the chat template of {self._name!r}, messages of the roles "
            f"{[message.get('role') for message in messages]} cannot {what}: {reason}; use roles "
            "that it knows, or put another chat_template.jinja beside its tokenizer.json"
        )


def _own(messages: Sequence[Message]) -> Iterator[bool]:
    """Which messages are not the environment's: the policy's, and the author's before its first."""
    played = False
    for message in messages:
        played |= message.get("role") == "assistant"
        yield message.get("role") in (("assistant",) if played else ("system", "developer"))


def _shared(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    return len(os.path.commonprefix([a, b]))  # noqa: RUF071 - texts, not paths


def _schemas(name: str) -> list[dict[str, Any]]:
    x = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}}
    function = {"name": name, "description": "x", "parameters": x}
    return [{"type": "function", "function": function}]


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


def _past(roles: Sequence[str], form: Form, word: str) -> list[Message]:
    """A conversation of these roles that says only a word, in which calls have a turn's form."""
    messages: list[Message] = []
    for index, role in enumerate(roles):
        said: dict[str, Any] = {"role": role, "content": word}
        if role == "tool":
            said |= {"name": word, "tool_call_id": f"past{index:05d}"}
        elif role == "assistant":
            results = list(takewhile(lambda role: role == "tool", roles[index + 1 :]))
            ids = [f"past{index + 1 + call:05d}" for call in range(len(results))]
            called = [{"role": "tool", "name": word, "tool_call_id": i} for i in ids]
            forms: dict[Form, dict[str, Any]] = dict(_turns_before(called, word))
            said = forms[form] if form in forms else forms["text"]
        messages.append(said)
    return messages


def _turns_before(messages: Sequence[Message], mark: str) -> Iterator[tuple[Form, dict[str, Any]]]:
    """Assistant turns that messages can follow, by their form, the likeliest first.

    Tool messages answer calls. Templates differ in whether a call's arguments are an object or a
    string, and some know no calls at all.
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

"""Compare appended turns with the templates' own renderings of random conversations.

python -m bench.conversations [--count 10000] [--seed 0] [--folder DIR] [NAME ...]

Conversations contain known problems: empty and blank contents, text that merges across message
borders, text that spells control tokens, thoughts, several calls and results. After each turn the
template renders the whole conversation and the tokenizer encodes it at once. The ids after the last
turn's closing token must equal those that ChatTemplate appended; if a budget ended the turn, the
ids after the turn's text. ChatTemplate may refuse only if the template raises, or does not show
each message once and in order.

For contents that spell control tokens, the expected ids come from a tokenizer and a template with
renamed control tokens. The closing tokens are listed by hand in bench.real_templates.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer

from agentgrpo.models.chat import ChatTemplate
from agentgrpo.models.encoding import TextEncoder
from agentgrpo.types import Int32
from bench.cached import NotToBeHad
from bench.harness import append_row
from bench.real_templates import MODELS, Model, models_in

PIECES = (
    "", " ", "  ", "\n", "\n\n", "\t", "\r\n", "a", " hello", "42", "1234567", "it's", "'", '"',
    "\\", "{", "}", "</code>", "<output>", ")\n", "))\n\n", "<|im", "_end|>", "[/INST", "</s",
    "é", "e\u0301", "日本語", "🙂", "\u200b", "\u2581", "print(", "\u00a0", "Answer:", "{{ x }}",
    "\u241fassistant-turn\u241f",
)  # fmt: skip
SPELLED = (
    "<|im_end|>", "<|im_start|>", "<|eot_id|>", "<|start_header_id|>", "<end_of_turn>", "</s>",
    "<|end|>", "<|call|>", "[INST]", "[/INST]", "<|endoftext|>", "<\uff5cUser\uff5c>", "<s>",
    "</tool_response>", "<tool_response>", "<tool_call>", "</tool_call>", "<think>", "</think>",
)  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a thing up.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
]


class LeftOut(Exception):
    """The token that opens the world's message is not there: the template leaves that out."""


REFUSED = (jinja2.TemplateError, TypeError)


@dataclass(slots=True)
class Seen:
    """What a run over conversations found."""

    conversations: int = 0
    deltas: int = 0
    disagreements: int = 0
    first: str = ""
    refused: Counter[str] = field(default_factory=Counter)
    """Roles whose messages template and ChatTemplate both refuse behind a turn."""


class Judge:
    """Compares ChatTemplate with a model's template, conversation by conversation.

    Raises:
        NotToBeHad: the tokenizer or the template cannot be got.
        ValueError: ChatTemplate refuses the template.
    """

    _encoders: dict[tuple[Any, ...], TextEncoder] = {}

    def __init__(self, model: Model) -> None:
        self.model = model
        self.tokenizer = model.load()
        self.template = self.tokenizer.chat_template
        self._names = {key: getattr(self.tokenizer, key) for key in ("bos_token", "eos_token")}
        self.chat = ChatTemplate(self.tokenizer)
        # models that share a tokenizer share what is made from it, which takes seconds
        key = (id(self.tokenizer), *self.chat._encoder.control_ids)
        self.chat._encoder = self._encoders.setdefault(key, self.chat._encoder)
        self.control = _control(self.tokenizer, self.template)
        self.spelled = [
            *SPELLED,
            *random.Random(0).sample([*self.control], min(9, len(self.control))),
        ]
        self.spelled += [token for token, framing in self.control.items() if not framing]
        # a template may write a quotation mark in JSON another way, or take words like "/think" out
        self.spelled = [token for token in self.spelled if '"' not in token]
        said = " ".join(self.spelled)
        if said not in self.render([{"role": "user", "content": said}]):
            self.spelled = [t for t in self.spelled if "think" not in t]
        self._shown: dict[tuple[str, ...], tuple[type | None, bool]] = {}

    def own_tokenizer(self) -> Any:
        """The tokenizer, with this model's template: models share tokenizers."""
        self.tokenizer.chat_template = self.template
        for key, token in self._names.items():
            setattr(self.tokenizer, key, token)
        return self.tokenizer

    def render(self, messages: Any, tools: Any = (), **options: Any) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False,
                **{"add_generation_prompt": True, **options},
            )
        )  # fmt: skip

    def expected(
        self, messages: Sequence[dict[str, Any]], tools: Any, sentinel: str = ""
    ) -> tuple[Int32, Int32]:
        """The ids behind the last turn's closing token and behind the sentinel, from one rendering
        and one encoding. With no sentinel, all ids.

        Raises:
            jinja2.TemplateError, TypeError: the template refuses the conversation.
        """
        names: dict[str, str] = {}
        backend, said = self.tokenizer.backend_tokenizer, list(messages)
        if spelled := [text for text in self.control if text in repr([*messages, tools])]:
            backend, names = _renamed(self.tokenizer, tuple(self.control))
            said = [
                # the policy and the author of prompts may write some of them
                _replaced(m, {t: _hidden(t) for t in spelled if self.control[t] or not own})
                for i, m in enumerate(messages)
                for own in [m["role"] == "assistant" or (m["role"] == "system" and i == 0)]
            ]
        text = self.render(said, tools)
        if spelled:
            text = _replaced(_replaced(text, names), {_hidden(t): t for t in spelled})
        encoded = backend.encode(text, add_special_tokens=False)
        start = end = 0
        if sentinel:
            last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
            closing = self.model.closing(messages[last], messages[last + 1]["role"])
            closing = names.get(closing, closing)
            end = text.rindex(sentinel) + len(sentinel)
            if closing not in text[end:]:
                raise LeftOut(f"{closing!r} does not end {text!r}")
            start = text.index(closing, end) + len(closing)
        ids = np.array(encoded.ids, np.int32)
        firsts = [sum(begin < at for begin, _ in encoded.offsets) for at in (start, end)]
        return ids[firsts[0] :], ids[firsts[1] :]

    def judge(self, rng: random.Random, seen: Seen) -> None:
        """Draw a conversation and compare every turn of it."""
        seen.conversations += 1
        tools = TOOLS if rng.random() < 0.3 else []
        messages = [{"role": "user", "content": self._text(rng)}]
        if rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": self._text(rng)})
        try:
            whole, _ = self.expected(messages, tools)
        except REFUSED:
            messages, tools = messages[-1:], tools if self._shows_tools() else []
            whole, _ = self.expected(messages, tools)
        self._compare(seen, self.chat.prompt_ids(messages, tools), whole, messages)
        for turn in range(rng.randint(1, 3)):
            sentinel = f"Q{rng.randrange(10**6)}T{turn}Z"
            drawn = self._drawn(rng, seen, sentinel, turn)
            if drawn is None:
                continue
            said, spoken = drawn
            messages += [spoken, *said]
            shown = messages
            if self.model.family.shows_prompt_again:
                shown, tools = [m for m in messages if m["role"] != "system"], []
                if shown[-1] is not messages[-1]:
                    return
            try:
                closed, unclosed = self.expected(shown, tools, sentinel)
            except REFUSED:  # behind this turn it shows them, but not in this conversation
                seen.refused["in some conversations"] += 1
                return
            except LeftOut:
                assert not all(message["content"] for message in said)
                seen.refused["empty messages"] += 1
                return
            closing = self.model.sampled(spoken, said[0]["role"])
            last_id = self.tokenizer.convert_tokens_to_ids(closing)
            assert said[0]["role"] == "system" or last_id in self.chat.stop_token_ids, closing
            roles = [message["role"] for message in messages[: -len(said) - 1]]
            append = partial(self.chat.observation_ids, said, tools=bool(tools), roles=roles)
            self._compare(seen, append(last_id=last_id), closed, shown)
            if "tool_calls" not in spoken:
                ids = append(last_id=None)
                self._compare(seen, ids, unclosed, shown)

    def _compare(self, seen: Seen, ids: Int32, expected: Int32, messages: Any) -> None:
        seen.deltas += 1
        if ids.tolist() != expected.tolist():
            seen.disagreements += 1
            seen.first = seen.first or (
                f"{self.model.name}: {messages!r}\n  appended "
                f"{self.tokenizer.convert_ids_to_tokens(ids.tolist())}\n  rendered "
                f"{self.tokenizer.convert_ids_to_tokens(expected.tolist())}"
            )

    def _drawn(
        self, rng: random.Random, seen: Seen, sentinel: str, number: int
    ) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
        """What the world says and the assistant's turn before it; None if it cannot be said."""
        role = rng.choice(("user", "user", "tool", "tool", "system"))
        count = rng.randint(1, 3) if role == "tool" else 1
        roles = (role,) * count
        if roles not in self._shown:
            self._shown[roles] = self._how_shown(roles)
        arguments, shown = self._shown[roles]
        if not shown:
            try:
                self.chat.require_roles(roles)
            except ValueError:
                seen.refused[" ".join(roles)] += 1
            else:
                seen.disagreements += 1
                seen.first = seen.first or f"{self.model.name}: {roles} are not refused"
            return None
        texts, drawn = [self._text(rng) for _ in roles], rng.randrange(9999)
        # no id twice in a conversation: templates look calls up by theirs
        said = self._said(roles, texts, drawn - drawn % 3 + number)
        thought = f"<think>\n{self._text(rng)}\n</think>\n\n" if rng.random() < 0.3 else ""
        content = "" if arguments else thought + self._text(rng) + sentinel
        x = self._text(rng)
        return said, self._turn(said, arguments, content, {"x": x, "y": sentinel})

    @staticmethod
    def _said(roles: Sequence[str], texts: Sequence[str], number: int) -> list[dict[str, Any]]:
        return [
            {"role": role, "content": text}
            | (
                {"name": "look_up", "tool_call_id": f"call{i}{number:04d}"}
                if role == "tool"
                else {}
            )
            for i, (role, text) in enumerate(zip(roles, texts, strict=True))
        ]

    @staticmethod
    def _turn(
        said: Sequence[dict[str, Any]], arguments: type | None, content: str, given: dict[str, str]
    ) -> dict[str, Any]:
        """An assistant's turn: text, or a call for each of the results that follow it."""
        turn: dict[str, Any] = {"role": "assistant", "content": content}
        if arguments is None:
            return turn
        shown = json.dumps(given, ensure_ascii=False) if arguments is str else given
        return turn | {
            "tool_calls": [
                {
                    "type": "function",
                    "id": message["tool_call_id"],
                    "function": {"name": "look_up", "arguments": shown},
                }
                for message in said
            ]
        }

    def _shows_tools(self) -> bool:
        try:
            self.render([{"role": "user", "content": "x"}], TOOLS)
        except REFUSED:
            return False
        return True

    def _how_shown(self, roles: tuple[str, ...]) -> tuple[type | None, bool]:
        """What arguments of calls the template shows before these messages (None: it shows none),
        and whether it shows the messages behind the turn.
        """
        texts = [f"M{i}M" for i in range(len(roles))]
        said = self._said(roles, texts, 0)
        for arguments in (dict, str, None) if roles[0] == "tool" else (None,):
            turn = self._turn(said, arguments, "" if arguments else "Q0Z", {"y": "Q0Z"})
            try:
                text = self.render([{"role": "user", "content": "x"}, turn, *said])
            except REFUSED:
                continue
            after = text.rpartition("Q0Z")[2]
            if "Q0Z" in text and [t for t in after.split("M") if t.isdigit()] == [
                t[1:-1] for t in texts
            ]:
                return arguments, True
        return None, False

    def _text(self, rng: random.Random) -> str:
        pool = (*PIECES, *self.spelled) if rng.random() < 0.15 else PIECES
        return "".join(rng.choices(pool, k=rng.randint(0, 6)))


def _control(tokenizer: Any, template: str) -> dict[str, bool]:
    """The added tokens that nobody can spell (True), and those that the world cannot."""
    return {
        token.content: framing
        for token in tokenizer.added_tokens_decoder.values()
        if (framing := token.special or token.content[:2] in ("<|", "<\uff5c"))
        or (token.content in template and not token.content.replace("\u2581", " ").isspace())
    }


def _hidden(token: str) -> str:
    """What stands for a spelled token while the template renders."""
    return "".join(chr(0xF0000 + ord(character)) for character in token)


def _replaced(value: Any, names: Mapping[str, str]) -> Any:
    """The nested value with each string's pieces renamed, the longest first."""
    if isinstance(value, dict):
        return {key: _replaced(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, names) for item in value]
    pieces = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
    return re.sub(pieces, lambda m: names[m[0]], value)


@cache
def _renamed(tokenizer: Any, control: tuple[str, ...]) -> tuple[Tokenizer, dict[str, str]]:
    """A tokenizer's control tokens under other names, and these."""
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    # another mark at the end than at the beginning: a "42" between two names is no name
    names = {text: f"\U000ffff0{index}\U000ffff1" for index, text in enumerate(control)}
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = spec["model"]
    model["vocab"] = {names.get(text, text): i for text, i in model["vocab"].items()}
    model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in names]
    return Tokenizer.from_str(json.dumps(spec)), names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of bench.real_templates.MODELS; all by default")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="templates *.jinja, on the stand-in tokenizer")
    arguments = parser.parse_args()
    for model in models_in(arguments.folder) if arguments.folder else MODELS:
        if arguments.names and model.name not in arguments.names:
            continue
        try:
            judge = Judge(model)
        except (NotToBeHad, ValueError) as error:
            print(f"{model.name}: refused: {error}")
            continue
        seen, started = Seen(), time.process_time()
        for index in range(arguments.count):
            judge.judge(random.Random(f"{arguments.seed} {model.name} {index}"), seen)
        shape = {"conversations": seen.conversations, "deltas": seen.deltas}
        refused = "".join(f", refused: {roles}" for roles in sorted(seen.refused))
        append_row(
            "conversations", model.name, [float(seen.disagreements)], unit="disagreements",
            shape=shape,
            note=f"{time.process_time() - started:.0f} s of CPU, {model.tokens} tokenizer{refused}",
        )  # fmt: skip
        if seen.first:
            print(seen.first)


if __name__ == "__main__":
    main()

"""How messages become tokens: the prompt once, then only what each turn adds.

A conversation is never rendered twice. The prompt is rendered once; what the policy samples stays
as it was sampled; an environment's message becomes exactly the tokens that the model's chat
template puts between the end of an assistant turn and the start of the next, encoded alone and
appended. So the engine, the learner and the records all hold the same ids, whatever the tokenizer
would make of their text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentgrpo.types import Int32

Message = Mapping[str, Any]
_MARK = "\u241fassistant-turn\u241f"  # stands for a sampled turn; no template has it


class ChatTemplate:
    """The model's chat template, as the two operations a rollout needs.

    Args:
        tokenizer: a transformers tokenizer with a chat template.

    Raises:
        ValueError: there is no chat template, or it does not close an assistant turn with a
            special token right after its content, so that a turn's tokens could not be appended.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; put a "
                "chat_template.jinja beside its tokenizer.json"
            )
        self.tokenizer = tokenizer
        closing = self._after_turn([{"role": "user", "content": "x"}])
        ids = self._encode(closing)
        if not len(ids) or int(ids[0]) not in tokenizer.get_added_vocab().values():
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path!r} must end an assistant turn with "
                f"a special token, but after the turn's text comes {closing[:40]!r}"
            )
        self.end_of_turn_id = int(ids[0])
        """The special token that closes an assistant turn; sampling it ends the turn."""
        self._end_of_turn = tokenizer.decode([self.end_of_turn_id])

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn when sampled."""
        eos = self.tokenizer.eos_token_id
        return tuple(dict.fromkeys([self.end_of_turn_id] + ([] if eos is None else [eos])))

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Int32:
        """The whole conversation so far, up to where the assistant's next turn begins."""
        return self._encode(self._render(messages, tools))

    def text_ids(self, text: str) -> Int32:
        """Text that is put into an assistant's turn as it is."""
        return self._encode(text)

    def observation_ids(self, messages: Sequence[Message], *, turn_closed: bool) -> Int32:
        """The tokens between a sampled turn and the next one: messages, and the generation prompt.

        Args:
            messages: what the environment says, as chat messages.
            turn_closed: the sampled turn ends with end_of_turn_id already. If not (a stop string or
                a budget ended it), the closing token is part of what is returned, unsampled.
        """
        text = self._after_turn(messages)
        return self._encode(text.removeprefix(self._end_of_turn) if turn_closed else text)

    def clip(self, text: str, max_tokens: int) -> str:
        """Text cut to about max_tokens, head and tail kept, the cut marked."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= max_tokens:
            return text
        head = (max_tokens + 1) // 2
        tail = max_tokens - head
        kept = self.tokenizer.decode(ids[:head]), self.tokenizer.decode(ids[len(ids) - tail :])
        return f"{kept[0]} ... [{len(ids) - max_tokens} tokens cut] ... {kept[1] if tail else ''}"

    def decode(self, token_ids: Int32) -> str:
        """The text of a sampled turn, without the tokens that end it."""
        ids = token_ids.tolist()
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids))

    def _after_turn(self, messages: Sequence[Message]) -> str:
        history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        text = self._render([*history, *messages])
        _, _, after = text.partition(_MARK)
        if text.count(_MARK) != 1 + sum(m["content"].count(_MARK) for m in messages):
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} does not show an assistant "
                f"turn exactly once when {[m['role'] for m in messages]} messages follow it"
            )
        return after

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                tokenize=False,
            )
        )

    def _encode(self, text: str) -> Int32:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

"""Streams: a function of yours sees each token as it is decoded, and may stop or insert text.

    class Mine:                                            # rollout.sampler = "module:Mine"
        def __init__(self, chat, config):                  # ChatTemplate, RolloutConfig
            self.streams = Streams(chat, config, tags=("</fn>", "</answer>"))

        def rollout(self, engine, tasks, n, params):
            return self.streams.play(engine, tasks, n, params, self.on_token)

        def on_token(self, stream, token):                 # each sampled token, at once
            if stream.tag == "</fn>":
                stream.inject("<fn_results>sunny</fn_results>")
            elif stream.tag == "</answer>":
                stream.finish("...")

For a complete example see agentgrpo/examples/custom_sampler/sampler.py. Sampled ids are kept up to
and including the one at which the stream stopped, even if the tag ends within it. Inserted text is
encoded alone and appended as not sampled, and the engine continues from these ids. The idea is that
of TRL's issue 2723.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from agentgrpo.actions import Message
from agentgrpo.config import RolloutConfig
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.models.token_bytes import token_bytes
from agentgrpo.rollout.custom import RolloutParams
from agentgrpo.rollout.engine_protocol import request_seed
from agentgrpo.rollout.limits import RolloutBudget
from agentgrpo.rollout.transcript import Transcript
from agentgrpo.types import COUNTS, Completion, Rollout, Segment, Status, Task

if TYPE_CHECKING:  # it imports vLLM
    from agentgrpo.engine.engine import Engine


@dataclass(slots=True, eq=False)
class Stream:
    """A rollout while it is decoded."""

    rollout: Rollout
    """The result; you may set its `rewards`, `stats` and `span_rewards`."""
    chat: ChatTemplate
    place: tuple[int, int]
    """Index of the task, and of the rollout among those of the task."""
    budget: RolloutBudget
    transcript: Transcript
    roles: list[str]
    """Roles of the messages before the current one."""
    token_ids: list[int] = field(default_factory=list)
    """The ids sampled since the prompt or the last insertion."""
    tag: str = ""
    """The first tag that ends in the last token; "" if none does."""
    tail: bytes = b""
    """The last bytes, in which a tag may have started."""
    _inserted: str | Sequence[Message] | None = None
    _answer: str | None = None
    _finished: bool = False

    @property
    def text(self) -> str:
        """The text of token_ids, without the token that ends a turn."""
        return self.chat.decode(np.array(self.token_ids, np.int32))

    def inject(self, content: str | Sequence[Message]) -> None:
        """Stop at this token, insert text or messages, and continue."""
        self._inserted = content

    def finish(self, answer: str | None) -> None:
        """End the rollout at this token, with this answer."""
        self._answer, self._finished = answer, True

    @property
    def stopped(self) -> bool:
        """Whether inject() or finish() was called since the last request."""
        return self._finished or self._inserted is not None

    def resume(self) -> Status | None:
        """Append the inserted content. Returns how the rollout ends if it cannot continue."""
        content, self._inserted = self._inserted, None
        if self._finished or content is None:
            self.rollout.answer = self._answer
            return Status.COMPLETED
        last_id = self.token_ids[-1] if self.token_ids else None
        if not isinstance(content, str):
            ids = self.chat.observation_ids(content, last_id=last_id, roles=self.roles)
            self.roles += ["assistant", *(message["role"] for message in content)]
        elif last_id in self.chat.stop_token_ids:  # the message that the text continues is closed
            return Status.COMPLETED
        else:
            ids = self.chat.text_ids(content)
        if not self.budget.fits(len(self.transcript) + len(ids)):
            return Status.TRUNCATED_LENGTH
        self.transcript.give(ids)
        self.token_ids, self.tag, self.tail = [], "", b""
        return None


OnToken = Callable[[Stream, int], None]
"""on_token(stream, token) is called with each sampled token and may call the stream's inject() or
finish(). All rollouts wait for it, since it is called between two steps of the engine."""


class Streams:
    """Plays tasks and calls a function of yours with each token.

    Args:
        chat, config: the arguments of a RolloutSampler; the limits are those of config.
        tags: strings to look for.

    Raises:
        ValueError: a tag is empty or repeated; or the bytes of the tokenizer's tokens are unknown
            (models/token_bytes.py).
    """

    def __init__(self, chat: ChatTemplate, config: RolloutConfig, tags: Sequence[str] = ()) -> None:
        if not all(tags) or len({*tags}) < len(tags):
            raise ValueError(f"tags: expected different texts, none of them empty, got {tags}")
        self._chat, self._config = chat, config
        self._tags = {tag: tag.encode() for tag in tags}
        self._longest = max(map(len, self._tags.values()), default=0)
        self._vocabulary = token_bytes(chat.tokenizer)

    def play(
        self,
        engine: Engine,
        tasks: Sequence[Task],
        n: int,
        params: RolloutParams,
        on_token: OnToken,
        messages: Callable[[Task], Sequence[Message]] = lambda task: task.messages,
    ) -> list[list[Rollout]]:
        """Play each task n times, as RolloutSampler.rollout() does."""
        played = []
        decoding: dict[str, Stream] = {}
        for index, task in enumerate(tasks):
            prompt_messages = messages(task)
            prompt = self._chat.prompt_ids(prompt_messages)
            if len(prompt) >= engine.max_model_len:
                raise ValueError(
                    f"engine.max_model_len: expected more than the {len(prompt)} tokens of the "
                    f"prompt of task {task.id!r}, got {engine.max_model_len}"
                )
            prompt_segment = Segment(prompt)
            for member in range(n):
                transcript = Transcript.of([prompt_segment])
                rollout = Rollout(
                    task=task, segments=transcript.segments, status=Status.COMPLETED,
                    stats=dict.fromkeys(COUNTS, 0.0),
                )  # fmt: skip
                budget = RolloutBudget(self._config, len(prompt), engine.max_model_len)
                roles = [message["role"] for message in prompt_messages]
                place = (index, member)
                stream = Stream(rollout, self._chat, place, budget, transcript, roles)
                self._request(engine, stream, params, on_token, decoding)
                played.append(rollout)
        while self._end_overdue(engine, decoding):
            for turn in sorted(engine.step(), key=lambda turn: turn.request_id):
                stream = decoding.pop(turn.request_id)
                status = self._turn_ended(stream, turn)
                if status is None:
                    self._request(engine, stream, params, on_token, decoding)
                else:
                    stream.rollout.status = status
        return [played[i : i + n] for i in range(0, len(played), n)]

    def _request(
        self, engine: Engine, stream: Stream, params: RolloutParams, on_token: OnToken,
        decoding: dict[str, Stream],
    ) -> None:  # fmt: skip
        """Let the engine continue, or end the rollout if its budgets allow no further turn."""
        length, turn = len(stream.transcript), stream.budget.turns
        status = stream.budget.end(length)
        if status is not None:
            stream.rollout.status = status
            return
        name = "{}.{}.{}".format(*stream.place, turn)

        def stop_after(token: int) -> bool:
            stream.token_ids.append(token)
            stream.tag, stream.tail = self._scan(token, stream.tail)
            on_token(stream, token)
            return stream.stopped

        engine.add_request(
            name,
            stream.transcript.ids,
            max_tokens=stream.budget.turn_tokens(length),
            temperature=params.temperature,
            seed=request_seed(params.seed, *stream.place, turn) if params.temperature else None,
            stop_token_ids=params.stop_token_ids,
            filters=params.filters,
            on_token=stop_after,
        )
        decoding[name] = stream

    def _end_overdue(self, engine: Engine, decoding: dict[str, Stream]) -> bool:
        """End overdue rollouts without their last turn. Returns whether others are left."""
        overdue = [name for name, stream in decoding.items() if stream.budget.overdue()]
        if overdue:
            engine.abort(overdue)
        for name in overdue:
            decoding.pop(name).rollout.status = Status.TIMED_OUT
        return bool(decoding)

    def _scan(self, token: int, tail: bytes) -> tuple[str, bytes]:
        """The first tag that ends in a token, or "", and the new tail."""
        if token >= len(self._vocabulary):  # a padding row of the model beyond its tokenizer
            return "", b""
        text = tail + self._vocabulary[token]
        ends = []
        for tag, encoded in self._tags.items():
            start = text.find(encoded, max(0, len(tail) - len(encoded) + 1))
            if start >= 0:
                ends.append((start + len(encoded), tag))
        return min(ends, default=(0, ""))[1], text[max(0, len(text) - self._longest) :]

    def _turn_ended(self, stream: Stream, turn: Completion) -> Status | None:
        """Append a turn. Returns how the rollout ends, or None if it continues."""
        stream.transcript.sample(turn.token_ids, turn.logprobs)
        stream.rollout.turns.append(replace(turn.account, row=0))
        stream.rollout.stats["turns"] += 1
        stream.budget.turns += 1
        if turn.finish_reason not in ("stop", "length"):
            stream.rollout.error = f"the engine gave up a request: {turn.finish_reason!r}"
            return Status.INFRA_ERROR
        if turn.finish_reason == "length":
            return Status.TRUNCATED_LENGTH
        return stream.resume()

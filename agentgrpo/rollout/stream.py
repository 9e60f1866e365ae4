"""Watch tokens as they are decoded: match a tag, stop, insert text, continue.

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

agentgrpo/examples/custom_sampler/sampler.py is a full example. Sampled ids stay as they are, up to
and including the one in which the stream was stopped, even if the tag ends inside it. Inserted text
is encoded alone and appended unsampled, and the engine continues from those ids. The idea is from
TRL's issue 2723.
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
    """One rollout while it is decoded."""

    rollout: Rollout
    """What it becomes; `rewards`, `stats` and `span_rewards` are yours to set."""
    chat: ChatTemplate
    place: tuple[int, int]
    """Which task, and which of its rollouts."""
    budget: RolloutBudget
    transcript: Transcript
    roles: list[str]
    """Those of the messages before the one that is being decoded."""
    token_ids: list[int] = field(default_factory=list)
    """What was sampled since the prompt, or since something was put in."""
    tag: str = ""
    """The tag that ends in the last token, the first of several; "" if none does."""
    tail: bytes = b""
    """The last bytes, in which a tag may have begun."""
    _said: str | Sequence[Message] | None = None
    _answer: str | None = None
    _finished: bool = False

    @property
    def text(self) -> str:
        """Of token_ids, without the token that ends a turn."""
        return self.chat.decode(np.array(self.token_ids, np.int32))

    def inject(self, said: str | Sequence[Message]) -> None:
        """Stop here, put words in, go on."""
        self._said = said

    def finish(self, answer: str | None) -> None:
        """Stop here: the rollout has ended, with this answer."""
        self._answer, self._finished = answer, True

    @property
    def stopped(self) -> bool:
        """Whether inject() or finish() was called since the last request."""
        return self._finished or self._said is not None

    def resume(self) -> Status | None:
        """Append what was put in; how the rollout ends, if it cannot go on."""
        said, self._said = self._said, None
        if self._finished or said is None:
            self.rollout.answer = self._answer
            return Status.COMPLETED
        last_id = self.token_ids[-1] if self.token_ids else None
        if not isinstance(said, str):
            ids = self.chat.observation_ids(said, last_id=last_id, roles=self.roles)
            self.roles += ["assistant", *(message["role"] for message in said)]
        elif last_id in self.chat.stop_token_ids:  # the message it would have gone into is closed
            return Status.COMPLETED
        else:
            ids = self.chat.text_ids(said)
        if not self.budget.fits(len(self.transcript) + len(ids)):
            return Status.TRUNCATED_LENGTH
        self.transcript.give(ids)
        self.token_ids, self.tag, self.tail = [], "", b""
        return None


OnToken = Callable[[Stream, int], None]
"""Told of each sampled token; may call the stream's inject() or finish(). It is called between two
steps of the engine: all rollouts wait for it."""


class Streams:
    """Plays tasks while a function of yours looks on.

    Args:
        chat, config: as a RolloutSampler gets them; the limits are config's.
        tags: texts to look for.

    Raises:
        ValueError: a tag is empty or named twice; the tokenizer is of a kind whose tokens' bytes
            are not known (models/token_bytes.py).
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
        """Play each task n times; a RolloutSampler's rollout()."""
        played = []
        decoding: dict[str, Stream] = {}
        for index, task in enumerate(tasks):
            said = messages(task)
            prompt = self._chat.prompt_ids(said)
            if len(prompt) >= engine.max_model_len:
                raise ValueError(
                    f"task {task.id!r}: its prompt has {len(prompt)} tokens, engine.max_model_len "
                    f"is {engine.max_model_len}"
                )
            shown = Segment(prompt)
            for member in range(n):
                transcript = Transcript.of([shown])
                rollout = Rollout(
                    task=task, segments=transcript.segments, status=Status.COMPLETED,
                    stats=dict.fromkeys(COUNTS, 0.0),
                )  # fmt: skip
                budget = RolloutBudget(self._config, len(prompt), engine.max_model_len)
                roles = [message["role"] for message in said]
                place = (index, member)
                stream = Stream(rollout, self._chat, place, budget, transcript, roles)
                self._ask(engine, stream, params, on_token, decoding)
                played.append(rollout)
        while self._in_time(engine, decoding):
            for turn in sorted(engine.step(), key=lambda turn: turn.request_id):
                stream = decoding.pop(turn.request_id)
                end = self._ended(stream, turn)
                if end is None:
                    self._ask(engine, stream, params, on_token, decoding)
                else:
                    stream.rollout.status = end
        return [played[i : i + n] for i in range(0, len(played), n)]

    def _ask(
        self, engine: Engine, stream: Stream, params: RolloutParams, on_token: OnToken,
        decoding: dict[str, Stream],
    ) -> None:  # fmt: skip
        """Have the engine go on, or end the rollout if its limits say so."""
        length, turn = len(stream.transcript), stream.budget.turns
        end = stream.budget.end(length)
        if end is not None:
            stream.rollout.status = end
            return
        name = "{}.{}.{}".format(*stream.place, turn)

        def told(token: int) -> bool:
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
            on_token=told,
        )
        decoding[name] = stream

    def _in_time(self, engine: Engine, decoding: dict[str, Stream]) -> bool:
        """End those whose time is up, without their last turn; whether others are left."""
        late = [name for name, stream in decoding.items() if stream.budget.overdue()]
        if late:
            engine.abort(late)
        for name in late:
            decoding.pop(name).rollout.status = Status.TIMED_OUT
        return bool(decoding)

    def _scan(self, token: int, tail: bytes) -> tuple[str, bytes]:
        """The tag that ends in a token, the first of several; and the last bytes behind it."""
        if token >= len(self._vocabulary):  # of the rows that a model has beyond its tokenizer
            return "", b""
        text = tail + self._vocabulary[token]
        ends = []
        for tag, spelled in self._tags.items():
            at = text.find(spelled, max(0, len(tail) - len(spelled) + 1))
            if at >= 0:
                ends.append((at + len(spelled), tag))
        return min(ends, default=(0, ""))[1], text[max(0, len(text) - self._longest) :]

    def _ended(self, stream: Stream, turn: Completion) -> Status | None:
        """Take what was sampled; how the rollout ends, if it does."""
        stream.transcript.sample(turn.token_ids, turn.logprobs)
        stream.rollout.turns.append(replace(turn.account, row=0))
        stream.rollout.stats["turns"] += 1
        stream.budget.turns += 1
        if turn.finish_reason not in ("stop", "length"):
            stream.rollout.error = f"the engine gave a request up: {turn.finish_reason!r}"
            return Status.INFRA_ERROR
        if turn.finish_reason == "length":
            return Status.TRUNCATED_LENGTH
        return stream.resume()

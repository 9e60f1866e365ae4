"""One rollout at the endpoint: its conversations, what it may still use, and what it was told.

Everything here runs on the endpoint's event loop; turns are sampled on the thread of the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from agentgrpo.actions import (
    CALLS,
    InfrastructureError,
    ReadCalls,
    Reading,
    open_thought,
    split_thoughts,
)
from agentgrpo.config import RolloutConfig
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.programs.conversations import PROBE, TASK, Conversations, Prompt, Row
from agentgrpo.programs.messages import BadRequest, Call, Message, is_object, letters
from agentgrpo.programs.requests import FROZEN, MODEL, Reply, TurnRequest
from agentgrpo.types import Completion, Int32, Status, token_hash

TOO_MANY = 64
"""Requests of a rollout that may wait for their turns at once."""
BYTES = 64
"""Of a request, for each token that the engine takes: more are not even counted in tokens."""
TOO_LONG = "context_length_exceeded"
UNENFORCED = "unenforced_"
"""How the counts of what is not obeyed begin."""
HERE = 16 << 10
"""Bytes of a request that is read and shown to the model on the endpoint's own thread."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A turn that the engine is to sample; its future is the endpoint's loop's."""

    token_ids: Int32
    max_tokens: int
    stop: tuple[str, ...]
    seed_key: tuple[str, int]
    """Hash of the prompt, and how many turns had it before: what the seed is made of."""
    temperature: float | None
    """In place of the run's, of what is not trained on."""
    on_result: Callable[[Completion | BaseException], None]


@dataclass(eq=False, slots=True)
class Pending:
    """A request, from when it came until its answer was delivered."""

    asked: TurnRequest
    prompt: Prompt
    seed_key: tuple[str, int]
    """As of SampleRequest."""
    budget: int
    """Tokens that the run allows the turn."""
    turn: asyncio.Future[Completion]
    kind: str
    """FROZEN, TASK or PROBE: whose budget of turns it uses."""


def call_id(*of: str | int) -> str:
    """Nine letters and digits, as Mistral's templates ask for; the same in a repeated run."""
    return hashlib.blake2b(repr(of).encode()).hexdigest()[:9]


@dataclass(eq=False)
class Session:
    """A rollout's, for as long as its program runs."""

    key: str
    chat: ChatTemplate
    config: RolloutConfig
    max_model_len: int
    read_calls: ReadCalls
    ask: Callable[[SampleRequest], None]
    act_in_thoughts: bool
    """Whether the text that is read, and given to the client, is the whole turn."""
    tell_once: Callable[[str, str], None]
    """Prints a line, the first of each kind in a run."""
    texts: Sequence[str] = ("",)
    """Of its task: conversations with one of them are trained on."""
    ended_by: Status | None = None
    """Why the policy says nothing more, if that is so."""
    refused: Status | None = None
    """Why the last request was not answered, if it was not; a shorter one may be."""
    last_refusal: str = ""
    """What was wrong with the last request that was not answered."""
    stats: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.conversations = Conversations(self.chat, self.texts)
        self._task_asked = False
        self.refusals: set[str] = set()
        self._pending: list[Pending] = []
        """Not delivered yet."""
        self._left: Counter[str] = Counter()
        """Turns whose client left, by their kind: the engine has sampled them."""
        self._prompts: Counter[str] = Counter()
        self._over = False
        self._answers = 0
        self._large = asyncio.Lock()
        self.receiving = 0
        """Bytes of bodies that are on their way."""

    # --- requests

    async def run_off_loop(self, size: int, work: Callable[[], Result]) -> Result:
        """What a function gives, on another thread if it has so many bytes to work on.

        One at a time, so that a rollout's large requests hold up no other's.
        """
        try:
            if size <= HERE:
                return work()
            async with self._large:
                return await asyncio.get_running_loop().run_in_executor(None, work)
        except RecursionError:
            raise BadRequest("the request is nested too deeply") from None

    def require_size(self, size: int) -> None:
        """Refuse what is not worth being read, let alone counted in tokens."""
        if size > BYTES * self.max_model_len:
            self.refused = self.ended_by or Status.TRUNCATED_LENGTH
            raise self._too_long(f"your request has {size} bytes")

    async def begin(self, asked: TurnRequest, size: int) -> Pending:
        """Have a turn sampled for a request of so many bytes."""
        try:
            return await self._begin(asked, size)
        except BadRequest as error:
            if error.code == TOO_LONG and not asked.frozen:
                self.refused = self.ended_by or Status.TRUNCATED_LENGTH
            raise

    async def _begin(self, asked: TurnRequest, size: int) -> Pending:
        if asked.model not in (MODEL, FROZEN):
            self.tell_once("model", f"the policy answers for the model {asked.model!r:.80} too")
        prompt = await self.run_off_loop(
            size, lambda: self.conversations.prompt(asked.messages, asked.tools)
        )
        if self._over:
            raise BadRequest("this rollout is over", "rollout_over")
        if len(self._pending) >= TOO_MANY:
            raise BadRequest(f"{TOO_MANY} requests of this rollout are waiting", "rate_limit")
        name = token_hash(prompt.token_ids)
        kind = FROZEN if asked.frozen else prompt.kind
        budget = self._budget(prompt, kind)
        temperature = self._temperature(asked)
        most = budget if asked.max_tokens is None else min(budget, asked.max_tokens)
        seed_key = name, self._prompts[name]
        turn: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._ask(prompt, most, asked.stop, seed_key, temperature, turn)
        self._prompts[name] += 1
        made = Pending(asked, prompt, seed_key, budget, turn, kind)
        self._pending.append(made)
        return made

    def leave(self, pending: Pending) -> None:
        """Its client is there no more: what was not delivered is in no record, but was a turn."""
        if pending in self._pending:
            self._pending.remove(pending)
            self._left[pending.kind] += 1
            self.stats["undelivered"] += 1

    def _temperature(self, asked: TurnRequest) -> float | None:
        """What the engine is to obey of a request; all else is the run's, and counted."""
        options, unread = self.config.template_options, set[str]()
        for name, value in asked.template_options.items():
            if not self.chat.reads(name):
                unread.add(name)
            elif name not in options or options[name] != value:
                raise BadRequest(
                    "chat_template_kwargs: expected rollout.template_options, which are the run's, "
                    f"{dict(options)}, got { {name: value} }", param="chat_template_kwargs",
                )  # fmt: skip
        ignored = {name for name, value in asked.overrides.items() if options.get(name) != value}
        temperature = asked.overrides.get("temperature") if asked.frozen else None
        if temperature is not None:
            ignored.remove("temperature")
        self.stats.update(f"{UNENFORCED}{name}" for name in ignored | unread)
        return temperature

    def _budget(self, prompt: Prompt, kind: str) -> int:
        """Tokens of a turn behind a prompt; ends the rollout's turns if there are none."""
        joined = prompt.after.row if prompt.after and kind == TASK else None
        rows = [row for row in self.conversations.rows if row.kind == kind or row is joined]
        turns = self._left[kind] + sum(pending.kind == kind for pending in self._pending)
        turns += sum(len(row.turns) for row in rows)
        turns += self.stats["frozen_turns"] * (kind == FROZEN)
        spent, length = turns >= self.config.max_turns, len(prompt.token_ids)
        if self.ended_by is Status.TIMED_OUT:
            raise self._too_long("the rollout's time is up")
        if prompt.ended and kind != FROZEN:
            raise self._too_long("a turn of this conversation was cut at rollout.max_turn_tokens")
        if kind == TASK or (kind == PROBE and not self._task_asked):
            self.ended_by = Status.TRUNCATED_TURNS if spent else None
        if spent:
            raise self._too_long(f"the rollout had its rollout.max_turns turns of {kind}")
        if length >= self.max_model_len:
            raise self._too_long(f"your messages resulted in {length} tokens")
        self._task_asked |= kind == TASK
        for row in rows:
            row.kind = kind
        self.refused = self.refused if kind == FROZEN else None
        return min(self.config.max_turn_tokens, self.max_model_len - length)

    def _too_long(self, why: str) -> BadRequest:
        """What a request is told that is not answered for its length, or a budget's."""
        return BadRequest(
            f"This model's maximum context length is reached: {why}.",  # OpenAI's words at first
            TOO_LONG, "messages",
        )  # fmt: skip

    def _ask(
        self, prompt: Prompt, most: int, stop: tuple[str, ...], seed_key: tuple[str, int],
        temperature: float | None, turn: asyncio.Future[Completion],
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()

        def settle(told: Completion | BaseException) -> None:
            if turn.done():
                return
            if isinstance(told, BaseException):
                turn.set_exception(told)
                turn.exception()  # whether or not a client still waits
            else:
                turn.set_result(told)

        def hand_over(told: Completion | BaseException) -> None:
            loop.call_soon_threadsafe(settle, told)

        self.ask(
            SampleRequest(
                token_ids=prompt.token_ids, max_tokens=most, stop=stop, seed_key=seed_key,
                temperature=temperature, on_result=hand_over,
            )
        )  # fmt: skip

    # --- answers

    def deliver(self, pending: Pending) -> Reply:
        """The answer of a turn that has ended; from now on it is part of its conversation."""
        if self._over:
            raise BadRequest("this rollout is over", "rollout_over")
        asked, turn = pending.asked, pending.turn.result()
        most = pending.budget if asked.max_tokens is None else asked.max_tokens
        message = self._read(pending, turn)  # first: what cannot be read is in no row
        cut = turn.finish_reason == "length"
        if pending.prompt.kind == TASK:
            self.conversations.know(message)
        if asked.frozen:
            self.stats["frozen_turns"] += 1
            self.stats["frozen_tokens"] += len(turn.token_ids)
        else:
            row = self.conversations.answered(pending.prompt, turn, min(most, pending.budget))
            row.cut = cut and most >= pending.budget  # by the run
            self.conversations.said(pending.prompt, row, message)
            self.stats["tool_calls"] += len(message.calls)
        self._answers += 1
        self._pending.remove(pending)
        return Reply(
            id=f"{turn.account.prompt_hash[:16]}-{self._answers}",
            message=message,
            finish_reason="length" if cut else "tool_calls" if message.calls else "stop",
            turn=turn,
            created=int(time.time()),
        )

    def _read(self, pending: Pending, turn: Completion) -> Message:
        """What a turn says."""
        asked = pending.asked
        text = self.chat.decode(turn.token_ids)
        stopped = turn.stop_reason
        if isinstance(stopped, str) and stopped in text:
            text = text[: text.index(stopped)]
        thoughts: str | None = None
        if not self.act_in_thoughts:
            text = open_thought(self.chat.decode(pending.prompt.token_ids[-16:])) + text
            text, thoughts, _ = split_thoughts(text, CALLS if asked.tools else r"\S")
        if not asked.tools or turn.finish_reason == "length":
            return Message("assistant", text, reasoning=thoughts)
        try:
            reading = self.read_calls(text, asked.tools)
        except Exception:  # for what a client's schema says
            reading = Reading(text, (), attempted=True)
        found = [(name, arguments or "{}") for name, arguments in reading.calls]
        if not found or (asked.objects and not all(is_object(text) for _, text in found)):
            self.stats["malformed"] += reading.attempted or bool(found)
            return Message("assistant", text, reasoning=thoughts)
        calls = tuple(
            Call(call_id(*pending.seed_key, number), function, arguments)
            for number, (function, arguments) in enumerate(found)
        )
        return Message("assistant", reading.content, calls, thoughts)

    # --- the end

    def rows(self, probes: set[str]) -> tuple[list[Row], list[Row]]:
        """Those that are trained on, and those of conversations without the task's text.

        Where none has it, the latter are those that begin as such of other rollouts do: `probes`.
        """
        rows = sorted(self.conversations.rows, key=lambda row: row.turns[-1][0])
        if self._task_asked:
            task = {row.opening for row in rows if row.kind == TASK}
            probes |= {row.opening for row in rows} - task
            kept = [row for row in rows if row.kind == TASK]
        elif kept := [row for row in rows if row.opening not in probes]:
            self.tell_once("task", "programs send no task's text: all that they ask is trained on")
        return kept, [row for row in rows if row not in kept]

    def answer(self, answer: str | None) -> str | None:
        """Its program's answer; None if it has the text of an error that the program was sent."""
        plain = letters(answer or "")
        if not any(letters(text)[:48] in plain for text in self.refusals):
            return answer
        self.stats["error_answers"] += 1
        self.tell_once("answer", "a program answered with an error of the endpoint: no answer")
        return None

    def close(self) -> None:
        """The program has ended: nothing more is answered, and what was not is forgotten."""
        self._over = True
        for pending in self._pending:
            self.stats["undelivered"] += 1
            if not pending.turn.done():
                pending.turn.set_exception(InfrastructureError("the rollout is over"))
                pending.turn.exception()
        self._pending.clear()

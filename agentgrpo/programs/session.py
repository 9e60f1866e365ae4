"""One rollout at the endpoint: its conversations, budgets and responses.

Everything here runs on the endpoint's event loop. The engine's thread samples turns.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
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

MAX_PENDING = 64
"""Maximum pending requests of a rollout."""
MAX_BYTES_PER_TOKEN = 64
"""Maximum bytes of a request per token of max_model_len. A larger request is not tokenized."""
TOO_LONG = "context_length_exceeded"
UNENFORCED = "unenforced_"
"""Prefix of the counts of ignored options."""
INLINE_BYTES = 16 << 10
"""Maximum bytes of a request that is parsed and rendered on the endpoint's event loop."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A turn for the engine to sample."""

    token_ids: Int32
    max_tokens: int
    stop: tuple[str, ...]
    seed_key: tuple[str, int]
    """Hash of the prompt, and how many turns had this prompt before: input of the seed."""
    temperature: float | None
    """Replaces the run's temperature, for a turn that is not trained on."""
    on_result: Callable[[Completion | BaseException], object]
    """Called on the engine's thread."""


@dataclass(eq=False, slots=True)
class Pending:
    """A request from its arrival until its reply is delivered."""

    request: TurnRequest
    prompt: Prompt
    seed_key: tuple[str, int]
    """As in SampleRequest."""
    budget: int
    """Maximum tokens of the turn by the run's limits."""
    turn: asyncio.Future[Completion]
    kind: str
    """FROZEN, TASK or PROBE. Each has its own budget of turns."""


def call_id(*parts: str | int) -> str:
    """Nine letters and digits, which Mistral's templates require. Equal in a repeated run."""
    return hashlib.blake2b(repr(parts).encode()).hexdigest()[:9]


def settle(turn: asyncio.Future[Completion], result: Completion | BaseException) -> None:
    """Set a turn's result or exception, unless it has one."""
    if turn.done():
        return
    if isinstance(result, BaseException):
        turn.set_exception(result)
        turn.exception()  # marks it as retrieved, in case the client has disconnected
    else:
        turn.set_result(result)


@dataclass(eq=False)
class Session:
    """The endpoint's state of one rollout while its program runs."""

    chat: ChatTemplate
    config: RolloutConfig
    max_model_len: int
    read_calls: ReadCalls
    ask: Callable[[SampleRequest], None]
    act_in_thoughts: bool
    """Whether the whole turn, including its thoughts, is parsed and sent to the client."""
    tell_once: Callable[[str, str], None]
    """Prints a line, only the first of each kind in a run."""
    texts: Sequence[str] = ("",)
    """Texts of the task. Conversations that contain one of them are trained on."""
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")
    """API key of the program's requests."""
    ended_by: Status | None = None
    """Why the rollout gets no more turns, or None."""
    refused: Status | None = None
    """Why the last request was refused, or None. A shorter request may succeed."""
    last_refusal: str = ""
    """Error message of the last refused request."""
    stats: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.conversations = Conversations(self.chat, self.texts)
        self._task_seen = False
        self.refusals: set[str] = set()
        self._pending: list[Pending] = []
        """Requests that have no delivered reply."""
        self._num_left: Counter[str] = Counter()
        """Number of sampled turns whose client had disconnected, by kind."""
        self._prompts: Counter[str] = Counter()
        self._over = False
        self._num_replies = 0
        self._large = asyncio.Lock()
        self.receiving = 0
        """Bytes of request bodies that are being received."""

    # --- requests

    async def run_off_loop(self, size: int, work: Callable[[], Result]) -> Result:
        """Call a function, on another thread if it has `size` > INLINE_BYTES to process.

        One at a time, so that a rollout's large requests do not delay other rollouts.
        """
        try:
            if size <= INLINE_BYTES:
                return work()
            async with self._large:
                return await asyncio.get_running_loop().run_in_executor(None, work)
        except RecursionError:
            raise BadRequest("the request is nested too deeply") from None

    def require_size(self, size: int) -> None:
        if size > MAX_BYTES_PER_TOKEN * self.max_model_len:
            self.refused = self.ended_by or Status.TRUNCATED_LENGTH
            raise self._too_long(f"your request has {size} bytes")

    async def begin(self, request: TurnRequest, size: int) -> Pending:
        try:
            return await self._begin(request, size)
        except BadRequest as error:
            if error.code == TOO_LONG and not request.frozen:
                self.refused = self.ended_by or Status.TRUNCATED_LENGTH
            raise

    async def _begin(self, request: TurnRequest, size: int) -> Pending:
        if request.model not in (MODEL, FROZEN):
            self.tell_once("model", f"the policy also serves the model name {request.model!r:.80}")
        prompt = await self.run_off_loop(
            size, lambda: self.conversations.prompt(request.messages, request.tools)
        )
        if self._over:
            raise BadRequest("this rollout is over", "rollout_over")
        if len(self._pending) >= MAX_PENDING:
            raise BadRequest(f"{MAX_PENDING} requests of this rollout are waiting", "rate_limit")
        prompt_hash = token_hash(prompt.token_ids)
        kind = FROZEN if request.frozen else prompt.kind
        budget = self._budget(prompt, kind)
        temperature = self._temperature_of(request)
        max_tokens = budget if request.max_tokens is None else min(budget, request.max_tokens)
        seed_key = prompt_hash, self._prompts[prompt_hash]
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[Completion] = loop.create_future()
        self.ask(
            SampleRequest(
                token_ids=prompt.token_ids, max_tokens=max_tokens, stop=request.stop,
                seed_key=seed_key, temperature=temperature,
                on_result=lambda result: loop.call_soon_threadsafe(settle, turn, result),
            )
        )  # fmt: skip
        self._prompts[prompt_hash] += 1
        pending = Pending(request, prompt, seed_key, budget, turn, kind)
        self._pending.append(pending)
        return pending

    def leave(self, pending: Pending) -> None:
        """Forget a request whose client has disconnected. Its turn counts, but is not recorded."""
        if pending in self._pending:
            self._pending.remove(pending)
            self._num_left[pending.kind] += 1
            self.stats["undelivered"] += 1

    def _temperature_of(self, request: TurnRequest) -> float | None:
        """Return the request's temperature if the engine uses it, and count ignored options."""
        options, unread = self.config.template_options, set[str]()
        for name, value in request.template_options.items():
            if not self.chat.reads(name):
                unread.add(name)
            elif name not in options or options[name] != value:
                raise BadRequest(
                    "chat_template_kwargs: expected rollout.template_options, which are the run's, "
                    f"{dict(options)}, got { {name: value} }", param="chat_template_kwargs",
                )  # fmt: skip
        ignored = {name for name, value in request.overrides.items() if options.get(name) != value}
        temperature = request.overrides.get("temperature") if request.frozen else None
        if temperature is not None:
            ignored.remove("temperature")
        self.stats.update(f"{UNENFORCED}{name}" for name in ignored | unread)
        return temperature

    def _budget(self, prompt: Prompt, kind: str) -> int:
        """Maximum tokens of a turn after a prompt. Raises BadRequest if a budget is used up."""
        continued_row = prompt.after.row if prompt.after and kind == TASK else None
        rows = [row for row in self.conversations.rows if row.kind == kind or row is continued_row]
        turns = self._num_left[kind] + sum(pending.kind == kind for pending in self._pending)
        turns += sum(len(row.turns) for row in rows)
        turns += self.stats["frozen_turns"] * (kind == FROZEN)
        is_spent, length = turns >= self.config.max_turns, len(prompt.token_ids)
        if self.ended_by is Status.TIMED_OUT:
            raise self._too_long("the rollout's time is up")
        if prompt.ended and kind != FROZEN:
            raise self._too_long("a turn of this conversation was cut at rollout.max_turn_tokens")
        if kind == TASK or (kind == PROBE and not self._task_seen):
            self.ended_by = Status.TRUNCATED_TURNS if is_spent else None
        if is_spent:
            raise self._too_long(f"the rollout had its rollout.max_turns turns of {kind}")
        if length >= self.max_model_len:
            raise self._too_long(f"your messages resulted in {length} tokens")
        self._task_seen |= kind == TASK
        for row in rows:
            row.kind = kind
        self.refused = self.refused if kind == FROZEN else None
        return min(self.config.max_turn_tokens, self.max_model_len - length)

    def _too_long(self, why: str) -> BadRequest:
        return BadRequest(
            # begins like OpenAI's error, which clients match
            f"This model's maximum context length is reached: {why}.",
            TOO_LONG, "messages",
        )  # fmt: skip

    # --- answers

    def deliver(self, pending: Pending) -> Reply:
        """Return the reply of a finished turn and add the turn to its conversation."""
        if self._over:
            raise BadRequest("this rollout is over", "rollout_over")
        request, turn = pending.request, pending.turn.result()
        max_tokens = pending.budget if request.max_tokens is None else request.max_tokens
        message = self._parse(pending, turn)  # first: if it raises, no row contains the turn
        is_truncated = turn.finish_reason == "length"
        if pending.prompt.kind == TASK:
            self.conversations.add_known_text(message)
        if request.frozen:
            self.stats["frozen_turns"] += 1
            self.stats["frozen_tokens"] += len(turn.token_ids)
        else:
            row = self.conversations.add_turn(pending.prompt, turn, min(max_tokens, pending.budget))
            row.cut = is_truncated and max_tokens >= pending.budget  # by the run
            self.conversations.add_message(pending.prompt, row, message)
            self.stats["tool_calls"] += len(message.calls)
        self._num_replies += 1
        self._pending.remove(pending)
        return Reply(
            id=f"{turn.account.prompt_hash[:16]}-{self._num_replies}",
            message=message,
            finish_reason="length" if is_truncated else "tool_calls" if message.calls else "stop",
            turn=turn,
            created=int(time.time()),
        )

    def _parse(self, pending: Pending, turn: Completion) -> Message:
        request = pending.request
        text = self.chat.decode(turn.token_ids)
        stopped = turn.stop_reason
        if isinstance(stopped, str) and stopped in text:
            text = text[: text.index(stopped)]
        thoughts: str | None = None
        if not self.act_in_thoughts:
            text = open_thought(self.chat.decode(pending.prompt.token_ids[-16:])) + text
            text, thoughts, _ = split_thoughts(text, CALLS if request.tools else r"\S")
        if not request.tools or turn.finish_reason == "length":
            return Message("assistant", text, reasoning=thoughts)
        try:
            reading = self.read_calls(text, request.tools)
        except Exception:  # a client's tool schema can cause any error
            reading = Reading(text, (), attempted=True)
        calls = [(name, arguments or "{}") for name, arguments in reading.calls]
        if not calls or (request.objects and not all(is_object(text) for _, text in calls)):
            self.stats["malformed"] += reading.attempted or bool(calls)
            return Message("assistant", text, reasoning=thoughts)
        parsed_calls = tuple(
            Call(call_id(*pending.seed_key, number), function, arguments)
            for number, (function, arguments) in enumerate(calls)
        )
        return Message("assistant", reading.content, parsed_calls, thoughts)

    # --- the end

    def rows(self, probes: set[str]) -> tuple[list[Row], list[Row]]:
        """Return the rows that are trained on, and those of conversations without the task's text.

        If no row has the text, the latter are rows that start like such rows of other rollouts,
        whose openings are in `probes`.
        """
        rows = sorted(self.conversations.rows, key=lambda row: row.turns[-1][0])
        if self._task_seen:
            task = {row.opening for row in rows if row.kind == TASK}
            probes |= {row.opening for row in rows} - task
            trained_rows = [row for row in rows if row.kind == TASK]
        elif trained_rows := [row for row in rows if row.opening not in probes]:
            self.tell_once(
                "task", "programs do not send the task's text: all their requests are trained on"
            )
        return trained_rows, [row for row in rows if row not in trained_rows]

    def answer(self, answer: str | None) -> str | None:
        """The program's answer, or None if it contains an error message of the endpoint."""
        plain = letters(answer or "")
        if not any(letters(text)[:48] in plain for text in self.refusals):
            return answer
        self.stats["error_answers"] += 1
        self.tell_once(
            "answer", "a program's answer is an error of the endpoint: it counts as no answer"
        )
        return None

    def close(self) -> None:
        """End the rollout: refuse all requests, and drop pending ones."""
        self._over = True
        for pending in self._pending:
            self.stats["undelivered"] += 1
            settle(pending.turn, InfrastructureError("the rollout is over"))
        self._pending.clear()

"""Models that are asked for text by name: over HTTP, in this process, or a script in their place.

An endpoint may be asked by many threads at once; a call blocks its own thread only. A fault is said
in the log of this module and tried again; what is left of it is an InfrastructureError, never text.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from agentgrpo.actions import InfrastructureError
from agentgrpo.config.read import load_callable
from agentgrpo.config.recipe import EndpointConfig
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.types import Completion, Int32

if TYPE_CHECKING:
    from agentgrpo.engine.engine import Engine

Message = Mapping[str, Any]
LOG = logging.getLogger(__name__)


class Endpoint(Protocol):
    """Something that continues a conversation."""

    def complete(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 1024,
        stop: Sequence[str] = (),
    ) -> list[str]:
        """N replies, without the stop string that ended them.

        Raises:
            InfrastructureError: no reply could be had.
        """


@dataclass(frozen=True, slots=True)
class ScriptedEndpoint:
    """A function in the place of a model: `reply(messages)` is every reply.

    Raises:
        TypeError: from complete(): the function returned something else than text.
    """

    reply: Callable[[Sequence[Message]], str]

    def complete(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 1024,
        stop: Sequence[str] = (),
    ) -> list[str]:
        replies = [self.reply(messages) for _ in range(n)]
        for reply in replies:
            if not isinstance(reply, str):
                raise TypeError(f"a scripted endpoint must return text, got {reply!r:.80}")
        return [_cut_at(reply, stop) for reply in replies]


class BadAnswer(Exception):
    """A server answered in another form than it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpEndpoint:
    """An OpenAI-compatible server (vLLM, llama.cpp, a hosted API): POST {url}/chat/completions.

    Failures of the network, answers that are not of the asked form, 408, 429 and 5xx are tried
    again, each time after about twice as long; other refusals of the server are final.
    """

    url: str
    """Up to and with the version, `http://localhost:8000/v1`."""
    model: str
    api_key_env: str = ""
    """Name of the environment variable that holds the key; empty: none is sent."""
    timeout_s: float = 120.0
    retries: int = 3
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the request (top_p, ...)."""
    backoff_s: float = 1.0

    def complete(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 1024,
        stop: Sequence[str] = (),
    ) -> list[str]:
        body = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "n": n,
            "temperature": temperature,
            "max_tokens": max_tokens,
            **({"stop": list(stop)} if stop else {}),
            **self.extra,
        }
        for attempt in range(self.retries + 1):
            try:
                return self._replies(self._post(body), n)
            except (OSError, http.client.HTTPException, BadAnswer) as error:
                said = f"endpoint {self.url}: {_said(error)}"
                final = isinstance(error, urllib.error.HTTPError) and not (
                    error.code in (408, 429) or error.code >= 500
                )
                LOG.warning("%s (try %d of %d)", said, attempt + 1, self.retries + 1)
                if final or attempt == self.retries:
                    raise InfrastructureError(said) from error
                time.sleep(self.backoff_s * 2**attempt * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable")

    def _post(self, body: Mapping[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.api_key_env:
            key = os.environ.get(self.api_key_env)
            if not key:
                raise InfrastructureError(
                    f"endpoint {self.url}: the environment has no {self.api_key_env}"
                )
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
            return bytes(answer.read())

    @staticmethod
    def _replies(answer: bytes, n: int) -> list[str]:
        try:
            replies = [choice["message"]["content"] for choice in json.loads(answer)["choices"]]
        except (ValueError, KeyError, TypeError) as error:
            raise BadAnswer(f"expected choices with messages, got {answer[:200]!r}") from error
        if not all(isinstance(reply, str) for reply in replies):
            raise BadAnswer(f"expected text in each message, got {answer[:200]!r}")
        if len(replies) != n:
            raise BadAnswer(f"{len(replies)} of {n} replies came")
        return replies


class EngineLoop:
    """Lets many threads share one engine: all that they ask is decoded together.

    The thread that owns the engine calls serve(); any other calls ask() and waits for the future.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked: SimpleQueue[tuple[dict[str, Any], Future[Completion]] | None] = SimpleQueue()
        self._count = 0
        self._failed: BaseException | None = None

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and reply together."""
        return self._engine.max_model_len

    def ask(self, prompt_ids: Int32, **options: Any) -> Future[Completion]:
        """Queue one continuation; the arguments are Engine.add_request's but the id.

        The future raises ValueError as add_request does, and whatever ended serve().
        """
        future: Future[Completion] = Future()
        self._asked.put(({"prompt_ids": prompt_ids, **options}, future))
        if self._failed is not None:
            self._refuse_all()
        return future

    def stop(self) -> None:
        """Make serve() return once nothing is in flight. From any thread."""
        self._asked.put(None)

    def serve(self) -> None:
        """Decode what is asked until stop(). Whoever waits when an error ends it gets the error."""
        waiting: dict[str, Future[Completion]] = {}
        stopping = False
        try:
            while waiting or not stopping:
                stopping |= self._take(waiting, block=not waiting)
                if waiting:
                    for completion in self._engine.step():
                        waiting.pop(completion.request_id).set_result(completion)
        except BaseException as error:
            self._failed = error
            self._engine.abort(list(waiting))
            for future in waiting.values():
                future.set_exception(error)
            self._refuse_all()
            raise

    def _take(self, waiting: dict[str, Future[Completion]], *, block: bool) -> bool:
        """Submit what was asked; returns whether stop() was among it."""
        stopping = False
        while block or not self._asked.empty():
            asked = self._asked.get()
            block = False
            if asked is None:
                stopping = True
                continue
            options, future = asked
            request_id = f"asked.{self._count}"
            self._count += 1
            try:
                self._engine.add_request(request_id, **options)
            except ValueError as error:  # of this request alone
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)
                raise
            else:
                waiting[request_id] = future
        return stopping

    def _refuse_all(self) -> None:
        while not self._asked.empty():
            try:
                asked = self._asked.get_nowait()
            except Empty:
                return
            if asked is not None:
                asked[1].set_exception(self._failed)


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """The model of an engine in this process."""

    loop: EngineLoop
    chat: ChatTemplate

    def complete(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 1024,
        stop: Sequence[str] = (),
    ) -> list[str]:
        prompt = self.chat.prompt_ids(messages)
        room = self.loop.max_model_len - len(prompt)
        if room < 1:
            raise InfrastructureError(
                f"a prompt of {len(prompt)} tokens leaves no room for a reply in "
                f"engine.max_model_len {self.loop.max_model_len}"
            )
        asked = [
            self.loop.ask(
                prompt,
                max_tokens=min(max_tokens, room),
                temperature=temperature,
                stop=tuple(stop),
                stop_token_ids=self.chat.stop_token_ids,
            )
            for _ in range(n)
        ]
        return [_cut_at(self.chat.decode(one.result().token_ids), stop) for one in asked]


def make_endpoint(config: EndpointConfig, name: str) -> Endpoint:
    """The endpoint that a config describes, if it needs no engine.

    Raises:
        ValueError: there is no such function; or it is of kind "engine".
    """
    if config.kind == "script":
        return ScriptedEndpoint(load_callable(config.function, key=f"endpoints.{name}.function"))
    if config.kind == "http":
        return HttpEndpoint(
            url=config.url,
            model=config.model,
            api_key_env=config.api_key_env,
            timeout_s=config.timeout_s,
            retries=config.retries,
            extra=config.extra,
        )
    raise ValueError(f"endpoints.{name}: an engine is needed, and there is none here")


def _cut_at(text: str, stop: Sequence[str]) -> str:
    ends = [at for at in (text.find(string) for string in stop) if at >= 0]
    return text[: min(ends)] if ends else text


def _said(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}: {error.read()[:200].decode(errors='replace')}"
    return str(error) or type(error).__name__

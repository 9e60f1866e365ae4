"""Let many threads share the engine in this process: all that they ask is decoded together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from agentgrpo.actions import InfrastructureError, Model
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.types import Completion, Int32

if TYPE_CHECKING:
    from agentgrpo.engine.engine import Engine
from agentgrpo.models.endpoints import Endpoint, Message, T


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

    def serve_while(self, work: Callable[[], T]) -> T:
        """Serve what work(), on a thread of its own, asks; returns what it does."""
        with ThreadPoolExecutor(1, "asks the engine") as side:
            result = side.submit(work)
            result.add_done_callback(lambda _: self.stop())
            self.serve()
            return result.result()

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
class EngineEndpoint(Endpoint):
    """The model of an engine in this process."""

    loop: EngineLoop
    chat: ChatTemplate
    reference: bool = False
    """Without the adapter."""

    def complete(
        self, messages: Sequence[Message], *, n: int = 1, temperature: float = 1.0,
        max_tokens: int = 1024,
    ) -> list[str]:  # fmt: skip
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
                stop_token_ids=self.chat.stop_token_ids,
                reference=self.reference,
            )
            for _ in range(n)
        ]
        return [self.chat.decode(one.result().token_ids) for one in asked]


def endpoint_of(model: Model, loop: EngineLoop, chat: ChatTemplate) -> Endpoint:
    """The endpoint of one of a run's models; the engine's own are asked through `loop`."""
    if isinstance(model, str):
        return EngineEndpoint(loop, chat, reference=model == "reference")
    return cast(Endpoint, model)

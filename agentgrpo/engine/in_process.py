"""Share the engine of this process among threads: their requests are decoded in one batch."""

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
    """Shares one engine among threads: all their requests are decoded together.

    The thread that owns the engine calls serve(); the others call submit() and wait for the future.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: SimpleQueue[tuple[dict[str, Any], Future[Completion]] | None] = SimpleQueue()
        self._count = 0
        self._failed: BaseException | None = None

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def submit(self, prompt_ids: Int32, **options: Any) -> Future[Completion]:
        """Queue one completion; the arguments are those of Engine.add_request without the id.

        The future raises ValueError as add_request does, or the error that ended serve().
        """
        future: Future[Completion] = Future()
        self._queue.put(({"prompt_ids": prompt_ids, **options}, future))
        if self._failed is not None:
            self._refuse_all()
        return future

    def stop(self) -> None:
        """Make serve() return once no request is in flight. May be called from any thread."""
        self._queue.put(None)

    def serve_while(self, work: Callable[[], T]) -> T:
        """Run work() on another thread and serve its requests; returns its result."""
        with ThreadPoolExecutor(1, "engine requests") as pool:
            result = pool.submit(work)
            result.add_done_callback(lambda _: self.stop())
            self.serve()
            return result.result()

    def serve(self) -> None:
        """Decode requests until stop(). An error that ends it is also set on waiting futures."""
        waiting: dict[str, Future[Completion]] = {}
        stopping = False
        try:
            while waiting or not stopping:
                stopping |= self._submit_queued(waiting, block=not waiting)
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

    def _submit_queued(self, waiting: dict[str, Future[Completion]], *, block: bool) -> bool:
        """Submit the queued requests to the engine; returns whether stop() was among them."""
        stopping = False
        while block or not self._queue.empty():
            item = self._queue.get()
            block = False
            if item is None:
                stopping = True
                continue
            options, future = item
            request_id = f"loop.{self._count}"
            self._count += 1
            try:
                self._engine.add_request(request_id, **options)
            except ValueError as error:  # concerns this request only
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)
                raise
            else:
                waiting[request_id] = future
        return stopping

    def _refuse_all(self) -> None:
        while not self._queue.empty():
            try:
                item = self._queue.get_nowait()
            except Empty:
                return
            if item is not None:
                item[1].set_exception(self._failed)


@dataclass(frozen=True, slots=True)
class EngineEndpoint(Endpoint):
    """A chat endpoint on the engine of this process."""

    loop: EngineLoop
    chat: ChatTemplate
    reference: bool = False
    """Sample without the adapter."""

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
        futures = [
            self.loop.submit(
                prompt,
                max_tokens=min(max_tokens, room),
                temperature=temperature,
                stop_token_ids=self.chat.stop_token_ids,
                reference=self.reference,
            )
            for _ in range(n)
        ]
        return [self.chat.decode(future.result().token_ids) for future in futures]


def endpoint_of(model: Model, loop: EngineLoop, chat: ChatTemplate) -> Endpoint:
    """The endpoint of one of a run's models; the engine's own models are reached through `loop`."""
    if isinstance(model, str):
        return EngineEndpoint(loop, chat, reference=model == "reference")
    return cast(Endpoint, model)

"""Where episodes run: blocking ones on threads, asynchronous ones on one event loop.

The loop is the process's: clients that outlive an episode, as a judge's, keep their connections.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, Self

from agentgrpo.actions import Action, Observation
from agentgrpo.envs.base import AnyEpisode


class EpisodeRunner:
    """Starts what episodes do and hands out its future; a context manager.

    Args:
        max_threads: blocking steps that may run at once; others wait their turn. Coroutines have
            no such limit.
    """

    def __init__(self, max_threads: int) -> None:
        self._threads = ThreadPoolExecutor(max_threads, "episode")

    def step(self, episode: AnyEpisode, action: Action) -> Future[Observation]:
        """Begin a step."""
        return self._start(episode.step, action)

    def replay(
        self, episode: AnyEpisode, actions: Sequence[tuple[Action, Any]]
    ) -> Future[list[Observation]]:
        """Begin to carry out actions one after another, as they were in another episode.

        Args:
            episode: a fresh one. With a method recall() it is first told what comes with an action.
            actions: each with the memory of its observation.
        """
        run = _replay_async if _is_async(episode.step) else _replay
        return self._start(run, episode, actions)

    def finish(self, episode: AnyEpisode, answer: str | None) -> Future[Mapping[str, float]]:
        """Begin the end of an episode: its rewards, then, whatever their outcome, its closing."""
        waits = _is_async(episode.finish) or _is_async(episode.close)
        run = _finish_async if waits else _finish
        return self._start(run, episode, answer)

    def close(self, episode: AnyEpisode) -> Future[None]:
        """Begin to close an episode that did not come to its end."""
        return self._start(episode.close)

    def _start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if not _is_async(function):
            return self._threads.submit(function, *args)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a coroutine has begun: it cannot be taken back
        asyncio.run_coroutine_threadsafe(_settle(future, function(*args)), _event_loop())
        return future

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for what has begun, then stop the threads."""
        self._threads.shutdown()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="episodes", daemon=True).start()
    return loop


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function)


def _recalled(episode: Any, actions: Sequence[tuple[Action, Any]]) -> Iterator[Action]:
    recall = getattr(episode, "recall", None)
    for action, memory in actions:
        if recall is not None:
            recall(memory)
        yield action


def _replay(episode: Any, actions: Sequence[tuple[Action, Any]]) -> list[Observation]:
    return [episode.step(action) for action in _recalled(episode, actions)]


async def _replay_async(episode: Any, actions: Sequence[tuple[Action, Any]]) -> list[Observation]:
    return [await episode.step(action) for action in _recalled(episode, actions)]


def _finish(episode: Any, answer: str | None) -> Any:
    try:
        return episode.finish(answer)
    finally:
        episode.close()


async def _finish_async(episode: Any, answer: str | None) -> Any:
    try:
        return await settled(episode.finish(answer))
    finally:
        await settled(episode.close())


async def settled(value: Any) -> Any:
    """The value, awaited if need be: of an episode only some methods may be coroutines."""
    return await value if inspect.isawaitable(value) else value


async def _settle(future: Future[Any], work: Awaitable[Any]) -> None:
    try:
        future.set_result(await work)
    except BaseException as error:
        future.set_exception(error)

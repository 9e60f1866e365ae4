"""Run episodes: blocking ones on threads, asynchronous ones on one event loop of the process.

Clients that outlive an episode, such as a judge's, keep their connections on that loop.

All calls have the same time limit. A call that exceeds it, or that fails with TimeoutError or
ConnectionError, is an InfrastructureError: its rollout is retried or leaves its group. A coroutine
is then cancelled. A thread cannot be cancelled: it is abandoned, another thread may take its place,
and its episode is closed if the call ever returns.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from agentgrpo.actions import Action, InfrastructureError, ModelRequest, Observation
from agentgrpo.envs.base import AnyEpisode, Episode
from agentgrpo.envs.validate import checked_observation
from agentgrpo.support.user_calls import (
    CallTimeout,
    UserCodeError,
    WrongResult,
    await_within,
    describe_error,
    event_loop,
    name_of,
    named_numbers,
    run_sync,
    user_call,
)

LOOP = "episodes"
"""Name of the event loop for coroutines of environments."""
RolloutId = tuple[str | None, int | None]
"""A task's id and the rollout's index in its group."""


class EpisodeRunner:
    """Starts calls of episodes and returns their futures.

    At most max_threads blocking calls run at the same time. limit_s: time limit of one call, in
    seconds; None: no limit.
    """

    def __init__(self, max_threads: int, limit_s: float | None = None) -> None:
        self._places = threading.Semaphore(max_threads)
        self._limit_s = limit_s

    def step(
        self, episode: AnyEpisode, action: Action, of: RolloutId = (None, None)
    ) -> Future[Any]:
        return self._start(episode, of, episode.step, action, read=checked_observation)

    def snapshot(
        self, episode: Any, keep: Callable[[Any], Any], of: RolloutId = (None, None)
    ) -> Future[Any]:
        """Start copying an episode (envs/base.py). The result is keep(copy)."""
        return self._start(episode, of, episode.snapshot, read=keep)

    def replay(
        self, episode: AnyEpisode, actions: Sequence[tuple[Action, Any]],
        of: RolloutId = (None, None), copy: Any = None,
    ) -> Future[list[Observation] | None]:  # fmt: skip
        """Start repeating the actions of another episode.

        Each action comes with the `memory` of its observation, which is passed to recall() if the
        episode has it. The result is None if the episode resumed from a copy instead.
        """
        replay = _replay_async if _is_async(episode.step) else _replay
        return self._start(
            episode, of, replay, episode, actions, copy, called=episode.step,
            read=lambda observations: observations and [*map(checked_observation, observations)],
        )  # fmt: skip

    def ask(
        self,
        episode: AnyEpisode,
        speaker: Callable[[ModelRequest], str],
        ask: ModelRequest,
        of: RolloutId = (None, None),
    ) -> Future[str]:
        return self._start(episode, of, speaker, ask)

    def finish(
        self, episode: AnyEpisode, answer: str | None, of: RolloutId = (None, None)
    ) -> Future[Mapping[str, float]]:
        """Start the end of an episode: get its rewards and close it, also after an error."""
        waits = _is_async(episode.finish) or _is_async(episode.close)
        finish = _finish_async if waits else _finish
        return self._start(
            episode, of, finish, episode, answer, called=episode.finish, read=named_numbers
        )

    def close(self, episode: AnyEpisode, of: RolloutId = (None, None)) -> Future[None]:
        """Start closing an episode that did not end by finish()."""
        return self._start(episode, of, episode.close)

    def _start(
        self, episode: AnyEpisode, of: RolloutId, function: Callable[..., Any], *args: Any,
        called: Any = None, read: Callable[[Any], Any] = lambda result: result,
    ) -> Future[Any]:  # fmt: skip
        future: Future[Any] = Future()
        work = _Work(future, episode, called or function, read, of, self._limit_s)
        if _is_async(function):
            future.set_running_or_notify_cancel()  # from here on, future.cancel() has no effect
            asyncio.run_coroutine_threadsafe(work.run_async(function, *args), event_loop(LOOP))
        else:
            # Thread.start() waits until the thread runs: a millisecond with hundreds of threads
            _thread.start_new_thread(work.run_blocking, (self._places, function, *args))
        return future


class _Nothing(Episode):
    def step(self, action: Action) -> Observation:
        raise TypeError("this rollout has no environment, so it cannot take an action")


NOTHING = _Nothing()
"""The episode of a rollout without an environment, or before it has one."""


def checked_episode(episode: Any) -> AnyEpisode:
    """Check the return value of reset()."""
    if not all(callable(getattr(episode, name, None)) for name in ("step", "finish", "close")):
        raise WrongResult(f"expected an episode: step(), finish(), close(), got {episode!r:.80}")
    return episode  # type: ignore[no-any-return]


@contextlib.contextmanager
def network_errors_as_infra(called: Any) -> Iterator[None]:
    """Convert an environment's TimeoutError or ConnectionError to InfrastructureError."""
    try:
        yield
    except UserCodeError as error:
        if isinstance(error.__cause__, CallTimeout):
            raise Abandoned(str(error)) from error
        if isinstance(error.__cause__, TimeoutError | ConnectionError):
            raise InfrastructureError(str(error)) from error
        raise
    except (TimeoutError, ConnectionError) as error:  # raised by a shipped environment
        raise InfrastructureError(f"{name_of(called)} {describe_error(error)}") from error


class Abandoned(InfrastructureError):
    """A call exceeded its limit. Its thread closes the episode if the call ever returns."""


class _Work:
    """One call of an episode. Sets `future` once, to read(result) or an exception."""

    def __init__(
        self, future: Future[Any], episode: AnyEpisode, called: Any, read: Callable[[Any], Any],
        of: RolloutId, limit_s: float | None,
    ) -> None:  # fmt: skip
        self._future, self._episode, self._called = future, episode, called
        self._read, self._limit_s = read, limit_s
        self._task, self._rollout = of
        self._lock = threading.Lock()

    def run_blocking(
        self, places: threading.Semaphore, function: Callable[..., Any], *args: Any
    ) -> None:
        places.acquire()
        if not self._future.set_running_or_notify_cancel():
            places.release()
            return

        def on_timeout(message: str) -> None:
            if self._set_outcome(None, Abandoned(message)):
                places.release()

        error = result = None
        try:
            with self._error_context(limit_s=self._limit_s, late=on_timeout):
                result = self._read(run_sync(function(*args), LOOP, self._limit_s))
        except BaseException as exception:
            error = exception
        in_time = self._set_outcome(result, error)
        if in_time:
            places.release()
        if self._must_close(in_time, error) and function != _finish:
            run_sync(self._episode.close(), LOOP)

    async def run_async(
        self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any
    ) -> None:
        """Await the function's coroutine. One that blocks the event loop ends the command."""
        error = result = None
        try:
            with self._error_context(limit_s=self._limit_s and 2 * self._limit_s):
                result = self._read(await await_within(self._limit_s, function(*args)))
        except BaseException as exception:
            error = exception
        if self._must_close(self._set_outcome(result, error), error) and function != _finish_async:
            await await_if_needed(self._episode.close())

    @contextlib.contextmanager
    def _error_context(self, **limit: Any) -> Iterator[None]:
        call = user_call(self._called, task=self._task, rollout=self._rollout, **limit)
        with network_errors_as_infra(self._called), call:
            yield

    def _must_close(self, in_time: bool, error: BaseException | None) -> bool:
        """Whether this call must close the episode, because the caller has given it up."""
        return (not in_time or isinstance(error, Abandoned)) and self._called != self._episode.close

    def _set_outcome(self, result: Any, error: BaseException | None) -> bool:
        """Set the future's outcome. Returns False if it was set before, by the time limit."""
        with self._lock:
            if self._future.done():
                return False
            if error is None:
                self._future.set_result(result)
            else:
                self._future.set_exception(error)
            return True


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function)


def _actions_with_recall(episode: Any, actions: Sequence[tuple[Action, Any]]) -> Iterator[Action]:
    recall = getattr(episode, "recall", None)
    for action, memory in actions:
        if recall is not None:
            recall(memory)
        yield action


def _replay(
    episode: Any, actions: Sequence[tuple[Action, Any]], copy: Any
) -> list[Observation] | None:
    if copy is not None and run_sync(episode.resume(copy), LOOP):
        return None
    return [
        run_sync(episode.step(action), LOOP) for action in _actions_with_recall(episode, actions)
    ]


async def _replay_async(
    episode: Any, actions: Sequence[tuple[Action, Any]], copy: Any
) -> list[Observation] | None:
    if copy is not None and await await_if_needed(episode.resume(copy)):
        return None
    return [await episode.step(action) for action in _actions_with_recall(episode, actions)]


def _finish(episode: Any, answer: str | None) -> Any:
    try:
        return run_sync(episode.finish(answer), LOOP)
    finally:
        run_sync(episode.close(), LOOP)


async def _finish_async(episode: Any, answer: str | None) -> Any:
    try:
        return await await_if_needed(episode.finish(answer))
    finally:
        await await_if_needed(episode.close())


async def await_if_needed(value: Any) -> Any:
    """Await a value if it is awaitable: only some methods of an episode may be coroutines."""
    return await value if inspect.isawaitable(value) else value

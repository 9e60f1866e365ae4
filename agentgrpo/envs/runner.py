"""Where episodes run: blocking ones on threads, asynchronous ones on one event loop.

The loop is the process's: clients that outlive an episode, as a judge's, keep their connections.

However an episode is written, its calls have one limit. One that takes longer, and one whose
network fails (TimeoutError, ConnectionError), is an InfrastructureError: its rollout is played
again or leaves its group. A coroutine is then cancelled. A thread cannot be: it is left to itself,
another may begin in its place, and should it come back its episode is closed.
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
from agentgrpo.envs.validate import checked_observation, checked_rewards
from agentgrpo.support.user_calls import (
    CallTimeout,
    UserCodeError,
    WrongResult,
    await_within,
    describe_error,
    event_loop,
    name_of,
    run_sync,
    user_call,
)

LOOP = "episodes"
"""The loop of all that environments await."""
Of = tuple[str | None, int | None]
"""The id of a task, and the place of a rollout in its group."""


class EpisodeRunner:
    """Starts what episodes do and hands out its future; who has begun something waits for it.

    Of blocking steps max_threads run at once; one call may take limit_s seconds, None: any.
    """

    def __init__(self, max_threads: int, limit_s: float | None = None) -> None:
        self._places = threading.Semaphore(max_threads)
        self._limit_s = limit_s

    def step(self, episode: AnyEpisode, action: Action, of: Of = (None, None)) -> Future[Any]:
        """Begin a step; gives its Observation."""
        return self._start(episode, of, episode.step, action, read=checked_observation)

    def snapshot(
        self, episode: Any, keep: Callable[[Any], Any], of: Of = (None, None)
    ) -> Future[Any]:
        """Begin to copy an episode (envs/base.py); gives what keep(copy) returns."""
        return self._start(episode, of, episode.snapshot, read=keep)

    def replay(
        self, episode: AnyEpisode, actions: Sequence[tuple[Action, Any]], of: Of = (None, None),
        copy: Any = None,
    ) -> Future[list[Observation] | None]:  # fmt: skip
        """Begin to carry out actions one after another, as they were in another episode.

        Each comes with the memory of its observation, which recall(), if there is one, is told.
        None: the episode resumed from a copy of the other one instead.
        """
        run = _replay_async if _is_async(episode.step) else _replay
        return self._start(
            episode, of, run, episode, actions, copy, called=episode.step,
            read=lambda told: told and [checked_observation(one) for one in told],
        )  # fmt: skip

    def ask(
        self,
        episode: AnyEpisode,
        speaker: Callable[[ModelRequest], str],
        ask: ModelRequest,
        of: Of = (None, None),
    ) -> Future[str]:
        """Begin to have another model say what an episode asks for; gives its reply."""
        return self._start(episode, of, speaker, ask)

    def finish(
        self, episode: AnyEpisode, answer: str | None, of: Of = (None, None)
    ) -> Future[Mapping[str, float]]:
        """Begin the end of an episode: its rewards, then, whatever their outcome, its closing."""
        waits = _is_async(episode.finish) or _is_async(episode.close)
        run = _finish_async if waits else _finish
        return self._start(
            episode, of, run, episode, answer, called=episode.finish, read=checked_rewards
        )

    def close(self, episode: AnyEpisode, of: Of = (None, None)) -> Future[None]:
        """Begin to close an episode that did not come to its end."""
        return self._start(episode, of, episode.close)

    def _start(
        self, episode: AnyEpisode, of: Of, function: Callable[..., Any], *args: Any,
        called: Any = None, read: Callable[[Any], Any] = lambda result: result,
    ) -> Future[Any]:  # fmt: skip
        future: Future[Any] = Future()
        work = _Work(future, episode, called or function, read, of, self._limit_s)
        if _is_async(function):
            future.set_running_or_notify_cancel()  # it has begun: it cannot be taken back
            asyncio.run_coroutine_threadsafe(work.wait(function, *args), event_loop(LOOP))
        else:
            # threading's start() waits for the thread to run: a millisecond where hundreds do
            _thread.start_new_thread(work.run, (self._places, function, *args))
        return future


class _Nothing(Episode):
    def step(self, action: Action) -> Observation:
        raise TypeError("there is no environment that could do anything")


NOTHING = _Nothing()
"""The episode of a rollout that has no environment, or none yet."""


def checked_episode(made: Any) -> AnyEpisode:
    """What reset() returned."""
    if not all(callable(getattr(made, name, None)) for name in ("step", "finish", "close")):
        raise WrongResult(f"expected an episode: step(), finish(), close(), got {made!r:.80}")
    return made  # type: ignore[no-any-return]


@contextlib.contextmanager
def networks_fault(called: Any) -> Iterator[None]:
    """A TimeoutError or ConnectionError that an environment raises is an InfrastructureError."""
    try:
        yield
    except UserCodeError as error:
        if isinstance(error.__cause__, CallTimeout):
            raise Abandoned(str(error)) from error
        if isinstance(error.__cause__, TimeoutError | ConnectionError):
            raise InfrastructureError(str(error)) from error
        raise
    except (TimeoutError, ConnectionError) as error:  # of a shipped one
        raise InfrastructureError(f"{name_of(called)} {describe_error(error)}") from error


class Abandoned(InfrastructureError):
    """A call has not come back. Who has it closes the episode, should it ever come back."""


class _Work:
    """One call of an episode's: `future` is told its outcome, once, which `read` makes of it."""

    def __init__(
        self, future: Future[Any], episode: AnyEpisode, called: Any, read: Callable[[Any], Any],
        of: Of, limit_s: float | None,
    ) -> None:  # fmt: skip
        self._future, self._episode, self._called = future, episode, called
        self._read, self._limit_s = read, limit_s
        self._task, self._rollout = of
        self._lock = threading.Lock()

    def run(self, places: threading.Semaphore, function: Callable[..., Any], *args: Any) -> None:
        places.acquire()
        if not self._future.set_running_or_notify_cancel():
            places.release()
            return

        def late(said: str) -> None:
            if self._end(None, Abandoned(said)):
                places.release()

        error = result = None
        try:
            with self._named(limit_s=self._limit_s, late=late):
                result = self._read(run_sync(function(*args), LOOP, self._limit_s))
        except BaseException as raised:
            error = raised
        in_time = self._end(result, error)
        if in_time:
            places.release()
        if self._is_left(in_time, error) and function != _finish:
            run_sync(self._episode.close(), LOOP)

    async def wait(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> None:
        """Await a coroutine of this function. What keeps the loop for itself ends the command."""
        error = result = None
        try:
            with self._named(limit_s=self._limit_s and 2 * self._limit_s):
                result = self._read(await await_within(self._limit_s, function(*args)))
        except BaseException as raised:
            error = raised
        if self._is_left(self._end(result, error), error) and function != _finish_async:
            await settled(self._episode.close())

    @contextlib.contextmanager
    def _named(self, **limit: Any) -> Iterator[None]:
        call = user_call(self._called, task=self._task, rollout=self._rollout, **limit)
        with networks_fault(self._called), call:
            yield

    def _is_left(self, in_time: bool, error: BaseException | None) -> bool:
        """Whether nobody else closes the episode now."""
        return (not in_time or isinstance(error, Abandoned)) and self._called != self._episode.close

    def _end(self, result: Any, error: BaseException | None) -> bool:
        """Tell the future, if it has not been told."""
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


def _recalled(episode: Any, actions: Sequence[tuple[Action, Any]]) -> Iterator[Action]:
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
    return [run_sync(episode.step(action), LOOP) for action in _recalled(episode, actions)]


async def _replay_async(
    episode: Any, actions: Sequence[tuple[Action, Any]], copy: Any
) -> list[Observation] | None:
    if copy is not None and await settled(episode.resume(copy)):
        return None
    return [await episode.step(action) for action in _recalled(episode, actions)]


def _finish(episode: Any, answer: str | None) -> Any:
    try:
        return run_sync(episode.finish(answer), LOOP)
    finally:
        run_sync(episode.close(), LOOP)


async def _finish_async(episode: Any, answer: str | None) -> Any:
    try:
        return await settled(episode.finish(answer))
    finally:
        await settled(episode.close())


async def settled(value: Any) -> Any:
    """The value, awaited if need be: of an episode only some methods may be coroutines."""
    return await value if inspect.isawaitable(value) else value

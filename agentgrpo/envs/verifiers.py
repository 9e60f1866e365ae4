"""Environments of the package verifiers: SingleTurnEnv, ToolEnv, StatefulToolEnv, MultiTurnEnv.

They run as they are: their own `rollout()` plays against a client that looks like OpenAI's and
whose answers are the policy's turns, so that their stop conditions, set-up, tools and clean-up are
theirs. What a turn of the environment adds to the conversation is what the policy is shown; the
reward is that of their rubric.

The package is the one before its version 0.3, which has other environments under the same name.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from agentgrpo.actions import Action, CallTools, InfrastructureError, Observation, Say, Schema
from agentgrpo.config.read import load_callable
from agentgrpo.envs.base import AsyncEpisode
from agentgrpo.extras import needed
from agentgrpo.types import Task

MODEL = "policy"
OVER = "the policy's budget is spent: this model's maximum context length is reached"
"""What the environment is told when a rollout ends from our side; it knows the second half."""


class VerifiersEnv:
    """Episodes of one environment; agent.kind = "tools" acts in it.

    Args:
        load: its id, as `verifiers.load_environment` takes it, or `module:function` that returns
            an environment.
        args: arguments of either.
        num_heldout: rows at the end of its dataset that are held out, where it has no eval_dataset.

    Raises:
        ValueError: there is no such environment, it is no chat environment, its rubric compares the
            rollouts of a group, it has an eval_dataset besides num_heldout, or the package is
            missing.
    """

    answers = ("tools",)
    judges = True
    talks = True

    def __init__(
        self, load: str, args: Mapping[str, Any] | None = None, *, num_heldout: int = 0
    ) -> None:
        self.package = _package()
        with _signals_kept():
            self.upstream = _load(self.package, load, dict(args or {}))
        if getattr(self.upstream, "message_type", "chat") != "chat":
            raise ValueError(f"load: {load!r} completes texts; expected a chat environment")
        rubric = self.upstream.rubric
        compared = [f for f in rubric._get_reward_funcs() if rubric._is_group_func(f)]
        if compared:
            raise ValueError(
                f"load: {load!r}: the reward {compared[0].__name__!r} compares the rollouts of a "
                "group; here each is judged alone"
            )
        if num_heldout < 0 or (num_heldout and self.upstream.eval_dataset is not None):
            has = "has an eval_dataset" if self.upstream.eval_dataset is not None else "has none"
            raise ValueError(f"num_heldout: got {num_heldout}, and the environment {has}")
        self._num_heldout = num_heldout

    def tools(self, task: Task) -> Sequence[Schema]:
        """The task's own tools (its `info`), or the environment's."""
        info = _info(task.spec)
        return tuple(info.get("oai_tools") or getattr(self.upstream, "oai_tools", None) or ())

    def tasks(self, split: str) -> list[Task]:
        """The rows of its dataset, or of its eval_dataset for "heldout".

        Raises:
            ValueError: it has no such dataset.
        """
        return [
            Task(id=f"{split}/{i}", messages=tuple(map(_plain, row["prompt"])), spec=dict(row))
            for i, row in enumerate(self._rows(split))
        ]

    def _rows(self, split: str) -> Sequence[Mapping[str, Any]]:
        apart = self.upstream.eval_dataset
        if split == "heldout" and apart is not None:
            return list(apart)
        rows = list(self.upstream.dataset or ())
        cut = len(rows) - self._num_heldout
        found = rows[cut:] if split == "heldout" else rows[: max(cut, 0)]
        if not found:
            hint = "; env.options.num_heldout sets rows of its dataset aside" if rows else ""
            raise ValueError(f"data.{split}: the environment has no rows for it{hint}")
        return found

    def reset(self, task: Task) -> VerifiersEpisode:
        """An episode whose environment sets itself up at the first step."""
        return VerifiersEpisode(self, task)


class VerifiersEpisode(AsyncEpisode):
    """One run of the environment's rollout(), a turn at a time."""

    def __init__(self, env: VerifiersEnv, task: Task) -> None:
        self._env, self._task = env, task
        self._client = PolicyClient()
        self._rollout: asyncio.Task[Any] | None = None
        self._conversation: list[Mapping[str, Any]] | None = None

    async def step(self, action: Action) -> Observation:
        """Say the turn to the environment; what it adds to the conversation is the answer."""
        before = await self._begun()
        if before is None:  # its stop conditions held before the first turn
            return Observation("", done=True)
        said = _message(action)
        self._client.say(said)
        now = await self._next_request()
        if now is None:
            return Observation("", done=True, answer=said.get("content"))
        if now[: len(before)] != before:
            raise ValueError(
                f"task {self._task.id!r}: the environment rewrites the conversation; only what it "
                "appends can be trained on"
            )
        return _observation(action, now[len(before) + 1 :])

    async def finish(self, answer: str | None) -> Mapping[str, float]:
        """`environment`: what the rubric says of the finished rollout.

        Raises:
            InfrastructureError: the environment ended with an error of its infrastructure.
        """
        asked = await self._begun()
        if asked is not None and answer is not None:
            self._client.say({"role": "assistant", "content": answer})
            asked = await self._next_request()
        if asked is not None:
            self._client.end()
        assert self._rollout is not None
        state = await self._rollout
        if isinstance(state.get("error"), self._env.package.InfraError):
            raise InfrastructureError(repr(state["error"]))
        score = self._env.upstream.rubric.score_rollout
        needs = inspect.signature(score).parameters
        free = contextlib.nullcontext()  # how many are judged at once is not limited here
        await score(state, **({"score_sem": free} if "score_sem" in needs else {}))
        return {"environment": float(state["reward"])}

    async def close(self) -> None:
        """End the environment's rollout, if it runs."""
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._rollout

    async def _begun(self) -> list[Mapping[str, Any]] | None:
        """The conversation that waits for the policy's turn; None if the rollout is over."""
        if self._rollout is None:
            row = {key: value for key, value in self._task.spec.items() if value is not None}
            work = self._env.upstream.rollout(row, self._client, MODEL)
            self._rollout = asyncio.create_task(work)
            self._rollout.add_done_callback(lambda _: self._client.requests.put_nowait(None))
            first = await self._next_request()
            if first is not None and first != list(map(_plain, self._task.messages)):
                raise ValueError(
                    f"task {self._task.id!r}: the environment changes the prompt while it sets "
                    "itself up; the policy was shown the dataset's"
                )
        return self._conversation

    async def _next_request(self) -> list[Mapping[str, Any]] | None:
        messages = await self._client.requests.get()
        if messages is None:
            assert self._rollout is not None
            self._rollout.result()  # raises what the environment raised
        self._conversation = None if messages is None else list(map(_plain, messages))
        return self._conversation


class PolicyClient:
    """What an environment takes for an OpenAI client: its answers are the policy's turns."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[list[Mapping[str, Any]] | None] = asyncio.Queue()
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))
        self._turn: asyncio.Future[Mapping[str, Any]] | None = None

    async def _create(self, *, messages: list[Mapping[str, Any]], **_: Any) -> Any:
        from openai.types.chat import ChatCompletion

        self._turn = asyncio.get_running_loop().create_future()
        self.requests.put_nowait(messages)
        message = await self._turn
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        return ChatCompletion.model_validate(
            {"id": "", "object": "chat.completion", "created": 0, "model": MODEL}
            | {"choices": [choice]}
        )

    def say(self, message: Mapping[str, Any]) -> None:
        """Answer the request that waits."""
        assert self._turn is not None
        self._turn.set_result(message)

    def end(self) -> None:
        """Tell the environment that waits that there is no room for another turn."""
        from openai import BadRequestError

        assert self._turn is not None
        response: Any = SimpleNamespace(text=OVER, status_code=400, request=None, headers={})
        self._turn.set_exception(BadRequestError(OVER, response=response, body=None))


def _message(action: Action) -> dict[str, Any]:
    if isinstance(action, Say):
        return {"role": "assistant", "content": action.text}
    if not isinstance(action, CallTools):
        raise TypeError(f"verifiers environments answer tool calls and messages, got {action}")
    calls = [
        {
            "id": call.id or f"call_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for number, call in enumerate(action.calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _observation(action: Action, added: Sequence[Mapping[str, Any]]) -> Observation:
    """What the environment appended; what is no call's answer follows the last one's."""
    texts = [str(message.get("content") or "") for message in added]
    if not isinstance(action, CallTools):
        return Observation("\n".join(texts))
    count = len(action.calls)
    outputs = [*texts[: count - 1], "\n".join(texts[count - 1 :])]
    outputs += [""] * (count - len(outputs))
    return Observation("\n".join(texts), outputs=tuple(outputs))


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the empty columns that a dataset puts into its rows."""
    return {key: value for key, value in message.items() if value is not None}


def _info(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    info = spec.get("info") or {}
    found: Mapping[str, Any] = json.loads(info) if isinstance(info, str) else info
    return found


def _package() -> Any:
    verifiers = needed("verifiers", "env.kind = 'verifiers'")
    if not hasattr(verifiers, "MultiTurnEnv"):
        version = getattr(verifiers, "__version__", "unknown")
        raise ValueError(
            f"the package verifiers is {version}, which has no MultiTurnEnv or lacks a package it "
            "needs; expected a version before 0.3"
        )
    return verifiers


def _load(package: Any, load: str, args: dict[str, Any]) -> Any:
    if ":" in load:
        return load_callable(load, key="env.options.load")(**args)
    try:
        return package.load_environment(load, **args)
    except (ValueError, RuntimeError) as error:  # what it makes of every failure
        raise ValueError(f"load: {error}") from error


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Its environments take SIGINT and SIGTERM for themselves, which the run needs."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Simulated customers and their cases: what tau2-bench and tau-bench have in common.

A customer called `scripted` says what it knows piece by piece, another is played by a model:
`model` is the policy, whose words change as it is trained, `reference` and `endpoint:NAME` are
models that stay as they are. One of the user's own is a class with the two methods of User.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from agentgrpo.actions import (
    MODELS,
    Action,
    CallTools,
    Message,
    Model,
    ModelReply,
    ModelRequest,
    Observation,
    Say,
    Schema,
    ToolCall,
    split_thoughts,
)
from agentgrpo.config import NO_REFERENCE
from agentgrpo.config.read import load_callable
from agentgrpo.envs.base import Episode
from agentgrpo.envs.tools import tool_schema
from agentgrpo.types import Task

STOP_MARKERS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""What the benchmarks' customers write when they end the talk."""
PLAYED_BY = {"model": "policy", "reference": "reference"}
"""Modes in which a model is the customer, and which; besides `endpoint:NAME`."""
GREETING = "Hi! How can I help you today?"
DONE = "done"
ALONE = (
    "You are a customer service agent that handles a ticket on its own: nobody answers questions. "
    "Help the customer according to the policy, with tool calls only. Call done when you are done."
)
TALK = (
    "You are a customer service agent that helps the customer according to the policy. In each "
    "turn, either send a message to the customer or make a tool call; not both."
)
DONE_SCHEMA = tool_schema(
    DONE, "Call this function when you are done with the task.", {"type": "object"}
)


class User(Protocol):
    """A simulated customer of one episode."""

    def reply(self, said: str, *, satisfied: bool) -> str | ModelRequest | None:
        """What the customer says; None: they hang up; a ModelRequest: the engine is to say it.

        Args:
            said: what the agent said.
            satisfied: the task's goal is reached.
        """

    def on_reply(self, text: str) -> str | None:
        """After a ModelRequest, and only then: what the engine said; returns a text or None."""


class ScriptedUser:
    """Says its pieces, one a turn, then agrees; hangs up when satisfied.

    Deterministic: a function of the pieces and of how often the agent has spoken.
    """

    def __init__(self, pieces: Sequence[str], patience: int = 8) -> None:
        self._pieces, self._patience = list(pieces), patience
        self._turn = 0

    def reply(self, said: str, *, satisfied: bool) -> str | None:
        """The next piece; when all are told, consent until satisfied or out of patience."""
        self._turn += 1
        if self._turn <= len(self._pieces):
            return self._pieces[self._turn - 1]
        if satisfied or self._turn > len(self._pieces) + self._patience:
            return None
        return "Yes, please go ahead."

    def on_reply(self, text: str) -> str | None:
        """Never called: a script asks nobody."""
        raise TypeError("a scripted customer asked nothing")


class ModelUser:
    """A customer whom a model plays. What it says is never trained on."""

    def __init__(
        self, system: str, opening: str, *, max_tokens: int, temperature: float = 0.0,
        model: Model = "policy",
    ) -> None:  # fmt: skip
        self._messages: list[Message] = [
            {"role": "system", "content": system},
            {"role": "user", "content": GREETING},
            {"role": "assistant", "content": opening},
        ]
        self._temperature, self._max_tokens, self._model = temperature, max_tokens, model

    def reply(self, said: str, *, satisfied: bool) -> ModelRequest:
        """The talk so far, as the customer sees it: the agent is their user."""
        self._messages.append({"role": "user", "content": said})
        return ModelRequest(tuple(self._messages), self._max_tokens, self._temperature, self._model)

    def on_reply(self, text: str) -> str | None:
        """What the customer says, without its thoughts; None where they end the talk."""
        said = split_thoughts(text, "(?!)")[0].strip()
        self._messages.append({"role": "assistant", "content": said})
        return None if any(mark in said for mark in STOP_MARKERS) else said


class UserSimulators:
    """Makes the customers of an environment's episodes, as its options say."""

    def __init__(
        self, mode: str, silent: str, played: Sequence[str],
        models: Mapping[str, Model] = MODELS, max_tokens: int = 256,
    ) -> None:  # fmt: skip
        kind, colon, endpoint = mode.partition(":")
        others = ("reference", "endpoint:NAME") if "model" in played else ()
        modes = (silent, *played, *others)
        if f"{kind}:NAME" not in modes and mode not in modes and (not colon or kind == "endpoint"):
            raise ValueError(f"mode: expected {', '.join(modes)} or 'module:Class', got {mode!r}")
        name = endpoint if kind == "endpoint" else PLAYED_BY.get(mode)
        if name is not None and name not in models:
            known = f"no endpoint {name!r}; there are: {', '.join(models)}"
            raise ValueError(f"mode: {NO_REFERENCE if name == 'reference' else known}")
        self.talk = mode != silent
        self._mode, self._max_tokens = mode, max_tokens
        self._model = None if name is None else models[name]
        own = colon and name is None
        self._own = load_callable(mode, key="env.options.mode") if own else None

    def of(self, task: Task, pieces: Sequence[str], system: str) -> User | None:
        """The customer of one episode; None where nobody talks."""
        if self._own is not None:
            return cast(User, self._own(task.spec))
        if self._mode == "scripted":
            return ScriptedUser(pieces)
        if self._model is None:
            return None
        opening = str(task.messages[-1]["content"])
        return ModelUser(system, opening, max_tokens=self._max_tokens, model=self._model)


class UserDialogue:
    """What a step of an episode does with its customer, and what was said to them."""

    def __init__(self, user: User | None) -> None:
        self.user = user
        self.said: list[str] = []
        self.over = False
        """The customer has ended the talk."""

    def say(self, text: str, *, satisfied: bool) -> Observation:
        if self.user is None:
            return Observation("Error: nobody listens; make a tool call", failed=True)
        self.said.append(text)
        return self._told(self.user.reply(text, satisfied=satisfied))

    def on_reply(self, text: str) -> Observation:
        assert self.user is not None
        return self._told(self.user.on_reply(text))

    def has_said(self, wanted: Sequence[str], *more: str) -> bool:
        """Whether each of the texts was said to the customer so far or in `more`."""
        said = [text.lower().replace(",", "") for text in [*self.said, *more]]
        return all(any(text.lower() in one for one in said) for text in wanted)

    def _told(self, reply: str | ModelRequest | None) -> Observation:
        if isinstance(reply, ModelRequest):
            return Observation("", ask=reply)
        self.over = reply is None
        return Observation("", done=True) if reply is None else Observation(reply)


class SupportEnv:
    """An environment whose tasks are customers' cases."""

    answers = ("tools",)
    judges = True

    def __init__(self, customers: UserSimulators, schemas: Sequence[Schema], policy: str) -> None:
        self.customers, self.has_user, self.policy = customers, customers.talk, policy
        self.schemas = (*schemas, *(() if self.has_user else (DONE_SCHEMA,)))
        self._gold: dict[str, Any] = {}
        self._lock = threading.Lock()

    def tools(self, task: Task) -> Sequence[Schema]:
        return self.schemas

    def messages(self, ticket: str, opening: str) -> tuple[Message, ...]:
        """A task's: the policy, and the case as a ticket or the customer's first words."""
        system, first = (
            (TALK, opening) if self.has_user else (ALONE, f"<ticket>\n{ticket}\n</ticket>")
        )
        return (
            {"role": "system", "content": f"{system}\n<policy>\n{self.policy}\n</policy>"},
            {"role": "user", "content": first},
        )

    def once(self, key: str, compute: Callable[[], Any]) -> Any:
        """What the ground truth of a case changes, computed when it is first asked for."""
        with self._lock:
            if key not in self._gold:
                self._gold[key] = compute()
            return self._gold[key]


class SupportEpisode(Episode):
    """One customer's case: the agent calls tools or talks, until somebody ends it."""

    ends: tuple[str, ...] = ()
    """Tools whose call ends the case, besides `done` where nobody listens."""

    def __init__(self, user: User | None) -> None:
        self.talk = UserDialogue(user)
        self._done = False

    @abstractmethod
    def call(self, call: ToolCall) -> tuple[str, bool]:
        """What a tool says, and whether it failed."""

    @abstractmethod
    def reward(self, *more: str) -> float:
        """What the case is worth after what was said to the customer so far and `more`."""

    def step(self, action: Action) -> Observation:
        if isinstance(action, Say):
            return self.talk.say(action.text, satisfied=self.reward(action.text) == 1.0)
        if isinstance(action, ModelReply):
            return self.talk.on_reply(action.text)
        if not isinstance(action, CallTools):
            raise TypeError(f"{type(self).__name__} answers tool calls and messages, got {action}")
        texts, errors = [], 0
        for call in action.calls:
            self._done = call.name in self.ends or (call.name == DONE and self.talk.user is None)
            text, failed = ("", False) if self._done else self.call(call)
            texts.append(text)
            errors += failed
            if self._done:
                break
        counts = {"domain_errors": float(errors)}
        return Observation(
            "\n".join(texts), errors > 0, self._done, outputs=tuple(texts), counts=counts
        )

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """`solved`: the benchmark's reward; 0.0 where nobody ended the case."""
        return {"solved": self.reward() if self._done or self.talk.over else 0.0}

"""Simulated users, and the common part of tau2-bench and tau-bench.

A `scripted` user sends its texts one by one. Otherwise a model is the user: `model` is the policy,
whose texts change during training; `reference` and `endpoint:NAME` are fixed models. A user-defined
class has the two methods of User.
"""

from __future__ import annotations

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
"""Markers with which the benchmarks' customers end the dialogue."""
MODEL_OF_MODE = {"model": "policy", "reference": "reference"}
"""Modes in which a model is the user, and that model. There is also `endpoint:NAME`."""
GREETING = "Hi! How can I help you today?"
DONE = "done"
TICKET_PROMPT = (
    "You are a customer service agent that handles a ticket on its own: nobody answers questions. "
    "Help the customer according to the policy, with tool calls only. Call done when you are done."
)
DIALOGUE_PROMPT = (
    "You are a customer service agent that helps the customer according to the policy. In each "
    "turn, either send a message to the customer or make a tool call; not both."
)
DONE_SCHEMA = tool_schema(
    DONE, "Call this function when you are done with the task.", {"type": "object"}
)


class User(Protocol):
    """The simulated user of one episode."""

    def reply(self, message: str, *, satisfied: bool) -> str | ModelRequest | None:
        """Return the user's reply, None to end the dialogue, or a ModelRequest for a model's reply.

        Args:
            message: the agent's message.
            satisfied: the task's goal is reached.
        """

    def on_reply(self, text: str) -> str | None:
        """Convert the model's reply to a ModelRequest to the user's reply or None."""


class ScriptedUser:
    """Sends its texts, one per turn, then consents; ends the dialogue when satisfied.

    Deterministic: the reply depends only on the texts and the number of the agent's messages.
    """

    def __init__(self, pieces: Sequence[str], patience: int) -> None:
        self._pieces, self._patience = list(pieces), patience
        self._turn = 0

    def reply(self, message: str, *, satisfied: bool) -> str | None:
        self._turn += 1
        if self._turn <= len(self._pieces):
            return self._pieces[self._turn - 1]
        if satisfied or self._turn > len(self._pieces) + self._patience:
            return None
        return "Yes, please go ahead."

    def on_reply(self, text: str) -> str | None:
        raise TypeError("a scripted user makes no request to a model")


class ModelUser:
    """A user played by a model. Its tokens are never trained on."""

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

    def reply(self, message: str, *, satisfied: bool) -> ModelRequest:
        """Request a reply to the dialogue with swapped roles: the agent is the model's user."""
        self._messages.append({"role": "user", "content": message})
        return ModelRequest(tuple(self._messages), self._max_tokens, self._temperature, self._model)

    def on_reply(self, text: str) -> str | None:
        """The reply without its thoughts, or None if it ends the dialogue."""
        message = split_thoughts(text, "(?!)")[0].strip()
        self._messages.append({"role": "assistant", "content": message})
        return None if any(mark in message for mark in STOP_MARKERS) else message


class UserSimulators:
    """Makes the users of an environment's episodes from its options."""

    def __init__(
        self, mode: str, silent: str, played: Sequence[str],
        models: Mapping[str, Model] = MODELS, max_tokens: int = 256, patience: int = 8,
    ) -> None:  # fmt: skip
        kind, colon, endpoint = mode.partition(":")
        model_modes = ("reference", "endpoint:NAME") if "model" in played else ()
        modes = (silent, *played, *model_modes)
        if f"{kind}:NAME" not in modes and mode not in modes and (not colon or kind == "endpoint"):
            raise ValueError(f"mode: expected {', '.join(modes)} or 'module:Class', got {mode!r}")
        name = endpoint if kind == "endpoint" else MODEL_OF_MODE.get(mode)
        if name is not None and name not in models:
            message = f"no endpoint {name!r}; there are: {', '.join(models)}"
            raise ValueError(f"mode: {NO_REFERENCE if name == 'reference' else message}")
        self.has_dialogue = mode != silent
        self._mode, self._max_tokens, self._patience = mode, max_tokens, patience
        self._model = None if name is None else models[name]
        is_user_class = colon and name is None
        self._user_class = load_callable(mode, key="env.options.mode") if is_user_class else None

    def of(self, task: Task, pieces: Sequence[str], system: str) -> User | None:
        """Make the user of one episode. None: the environment has no user."""
        if self._user_class is not None:
            return cast(User, self._user_class(task.spec))
        if self._mode == "scripted":
            return ScriptedUser(pieces, self._patience)
        if self._model is None:
            return None
        opening = str(task.messages[-1]["content"])
        return ModelUser(system, opening, max_tokens=self._max_tokens, model=self._model)


class UserDialogue:
    """The dialogue of one episode with its user."""

    def __init__(self, user: User | None) -> None:
        self.user = user
        self.messages: list[str] = []
        self.over = False
        """The user has ended the dialogue."""

    def say(self, text: str, *, satisfied: bool) -> Observation:
        if self.user is None:
            return Observation(
                "Error: there is no user in this task; call a tool instead", failed=True
            )
        self.messages.append(text)
        return self._observation(self.user.reply(text, satisfied=satisfied))

    def on_reply(self, text: str) -> Observation:
        assert self.user is not None
        return self._observation(self.user.on_reply(text))

    def has_said(self, expected: Sequence[str], *more: str) -> bool:
        """Whether each expected text is in a message to the user or in `more`."""
        messages = [text.lower().replace(",", "") for text in [*self.messages, *more]]
        return all(any(text.lower() in message for message in messages) for text in expected)

    def _observation(self, reply: str | ModelRequest | None) -> Observation:
        if isinstance(reply, ModelRequest):
            return Observation("", ask=reply)
        self.over = reply is None
        return Observation("", done=True) if reply is None else Observation(reply)


class SupportEnv:
    """An environment whose tasks are customer-support cases."""

    answers = ("tools",)
    judges = True

    def __init__(self, customers: UserSimulators, schemas: Sequence[Schema], policy: str) -> None:
        self.customers, self.has_user, self.policy = customers, customers.has_dialogue, policy
        self.schemas = (*schemas, *(() if self.has_user else (DONE_SCHEMA,)))
        self._gold: dict[str, Any] = {}

    def tools(self, task: Task) -> Sequence[Schema]:
        return self.schemas

    def messages(self, ticket: str, opening: str) -> tuple[Message, ...]:
        """A task's messages: the policy, and the ticket or the customer's first message."""
        system, first = (
            (DIALOGUE_PROMPT, opening)
            if self.has_user
            else (TICKET_PROMPT, f"<ticket>\n{ticket}\n</ticket>")
        )
        return (
            {"role": "system", "content": f"{system}\n<policy>\n{self.policy}\n</policy>"},
            {"role": "user", "content": first},
        )

    def cached(self, key: str, compute: Callable[[], Any]) -> Any:
        if key not in self._gold:
            self._gold[key] = compute()
        return self._gold[key]


class SupportEpisode(Episode):
    """One case: the agent calls tools or sends messages until the agent or the user ends it."""

    ends: tuple[str, ...] = ()
    """Tools whose call ends the case. `done` does, too, if there is no user."""

    def __init__(self, user: User | None) -> None:
        self.talk = UserDialogue(user)
        self._done = False

    @abstractmethod
    def call(self, call: ToolCall) -> tuple[str, bool]:
        """Execute a tool call. Returns its text and whether it failed."""

    @abstractmethod
    def reward(self, *more: str) -> float:
        """The case's reward after the dialogue so far plus the messages `more`."""

    def step(self, action: Action) -> Observation:
        if isinstance(action, Say):
            return self.talk.say(action.text, satisfied=self.reward(action.text) == 1.0)
        if isinstance(action, ModelReply):
            return self.talk.on_reply(action.text)
        if not isinstance(action, CallTools):
            raise TypeError(
                f"{type(self).__name__}: expected tool calls or a message, got {action}"
            )
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
        """`solved`: the benchmark's reward, or 0.0 if nobody ended the case."""
        return {"solved": self.reward() if self._done or self.talk.over else 0.0}

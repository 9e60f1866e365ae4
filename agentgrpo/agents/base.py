"""What a turn of the policy means, whatever the agent, and how the world's answer is said to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from agentgrpo.types import Task

if TYPE_CHECKING:
    from agentgrpo.envs.base import Observation

Message = Mapping[str, Any]
"""A chat message, `{"role": ..., "content": ...}`, and what else the model's template reads."""

Schema = Mapping[str, Any]
"""A tool as templates and engines know it: `{"type": "function", "function": {"name": ...}}`."""


@dataclass(frozen=True, slots=True)
class RunCode:
    """The policy wants this code run."""

    code: str
    language: str = "python"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool by its name."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """What the answer refers to, for templates that show it."""


@dataclass(frozen=True, slots=True)
class CallTools:
    """The policy wants these tools called, in this order."""

    calls: tuple[ToolCall, ...]
    refused: tuple[ToolCall, ...] = ()
    """Calls beyond the one that the agent may make in a turn: answered with an error, not made."""


@dataclass(frozen=True, slots=True)
class Say:
    """The policy says this to whom it talks with in the environment (a simulated user)."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The policy is done."""

    answer: str | None
    """What it answered; None if it stopped without saying so in the asked form."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """The policy tried to act and got the form wrong; it is told how, and may try again."""

    message: str


@dataclass(frozen=True, slots=True)
class Heard:
    """What the engine said in the second role that an episode asked for (Observation.ask).

    The one action that is not the policy's: an agent never makes it.
    """

    text: str


Action = RunCode | CallTools | Say | Finish | Malformed | Heard


class Agent(Protocol):
    """Turns a task into messages, and sampled text into actions. Holds no state of a rollout."""

    @property
    def stop(self) -> Sequence[str]:
        """Strings that end a turn."""

    def messages(self, task: Task) -> Sequence[Message]:
        """The conversation up to the policy's first turn."""

    def prefill(self, task: Task) -> str:
        """Text that the policy's first turn begins with, given and not sampled; mostly ""."""

    def tools(self, task: Task) -> Sequence[Schema]:
        """Tools that the chat template shows the policy; mostly none."""

    def parse(self, text: str) -> Action:
        """The action of one sampled turn (its own text only, so a prompt can never act)."""

    def observe(self, action: Action, observation: Observation) -> Sequence[Message] | str:
        """How the policy is told what its action did.

        Args:
            action: what was done; a Malformed one was not, and the observation holds its message.
            observation: what came of it, its texts clipped to the run's budget.

        Returns:
            Messages close the policy's turn and are rendered by the chat template before the next.
            A str is appended as it is to the same assistant message, and the turn goes on.
        """


def answer_in(text: str, prefix: str) -> str | None:
    """What follows the prefix, stripped; None if it is not there. A tag ends at its end tag.

    >>> answer_in("so Answer: 4", "Answer:"), answer_in("<answer>4</answer>.", "<answer>")
    ('4', '4')
    >>> answer_in(" all of it ", ""), answer_in("4", "Answer:")
    ('all of it', None)
    """
    _, found, answer = text.partition(prefix) if prefix else ("", "all", text)
    if prefix.startswith("<") and prefix.endswith(">"):
        answer = answer.partition(f"</{prefix[1:]}")[0]
    return answer.strip() if found else None


def as_json(value: Any) -> Any:
    """What a policy gave as an argument, as JSON carries it: tuples are lists, keys are text.

    Half of a surrogate pair, which nothing that encodes text takes, becomes a question mark.

    Raises:
        ValueError: JSON cannot carry it.

    >>> as_json((1, "a", {2: None}))
    [1, 'a', {'2': None}]
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    return json.loads(text.encode("utf-8", "replace"))

"""Applies an observation to a rollout: its counts, its rewards, and its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from agentgrpo.actions import (
    Action,
    CallTools,
    Finish,
    Message,
    Observation,
    Say,
    Schema,
)
from agentgrpo.agents.base import Agent
from agentgrpo.config import RolloutConfig
from agentgrpo.envs.validate import checked_answer
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rollout.state import RunningRollout
from agentgrpo.support.user_calls import WrongResult
from agentgrpo.types import Int32, Rollout, SpanReward, Status, Task

Users = Callable[[Any], AbstractContextManager[Any]]
"""Of a function of an agent's: within what it is called (usercode.user_call)."""


def prompt_of(
    agent: Agent, chat: ChatTemplate, task: Task, users: Users, more: str = ""
) -> tuple[Int32, int, list[Message], Sequence[Schema]]:
    """A task before the policy's first token: its ids, how many of them are before the policy's
    message, the messages, and the tools shown. `more` is behind the last that the user says.
    """
    with users(agent.tools):
        tools = _listed(agent.tools(task), "tools")
    with users(agent.messages):
        messages = _listed(agent.messages(task), "messages")
        if more:
            at = max(i for i, said in enumerate(messages) if said["role"] == "user")
            messages[at] = {**messages[at], "content": f"{messages[at]['content']}{more}"}
        prompt = chat.prompt_ids(messages, tools)
    with users(agent.prefill):
        prefill: Any = agent.prefill(task)
        if not isinstance(prefill, str):
            raise WrongResult(f"expected a text, got {prefill!r:.80}")
    return _with_prefill(prompt, prefill, chat), len(prompt), messages, tools


def _with_prefill(ids: Int32, prefill: str, chat: ChatTemplate) -> Int32:
    """Ids up to where the policy's message begins, and what that begins with."""
    return np.concatenate([ids, chat.text_ids(prefill, own=True)]) if prefill else ids


def _prefill_of(said: list[Message]) -> tuple[list[Message], str]:
    """The messages that close the policy's turn, and what its next one begins with."""
    if not said or said[-1]["role"] != "assistant":
        return said, ""
    return said[:-1], str(said[-1]["content"])


def parsed(agent: Agent, text: str, task: Task) -> Action:
    """What a turn means."""
    action: Any = agent.parse(text, task)
    if not isinstance(action, Action):
        raise WrongResult(f"expected an action of actions.py, got {action!r:.80}")
    if isinstance(action, Finish | Say):
        checked_answer(action.answer)
    return action


def said_by(agent: Agent, action: Action, shown: Observation) -> str | list[Message]:
    """What an agent makes of an observation."""
    said: Any = agent.observe(action, shown)
    return said if isinstance(said, str) else _listed(said, "a text or messages")


def _listed(given: Any, what: str) -> list[Any]:
    if not isinstance(given, Sequence) or not all(isinstance(one, Mapping) for one in given):
        raise WrongResult(f"expected {what}, got {given!r:.80}")
    return [*given]


def note(rollout: Rollout, wrong: str) -> None:
    """Write down what the environment said that was wrong with the last turn, if anything."""
    if wrong:
        turns = max(1, int(rollout.stats["turns"]))
        rollout.feedback += [""] * (turns - len(rollout.feedback))
        rollout.feedback[-1] = f"{rollout.feedback[-1]}\n{wrong}".strip()


def count(live: RunningRollout, observation: Observation) -> None:
    """Add what the policy's last action cost and earned, the latter credited to its turn."""
    rollout, transcript = live.rollout, live.transcript
    rollout.stats["tool_errors"] += observation.failed
    for name, number in observation.counts.items():
        rollout.stats[name] = rollout.stats.get(name, 0.0) + number
    start, end = _closed(rollout) + transcript.turn_start, _closed(rollout) + len(transcript)
    rollout.span_rewards += [
        SpanReward(start, end, name, value) for name, value in observation.rewards.items()
    ]


def append_observation(
    live: RunningRollout, action: Action, observation: Observation, *,
    agent: Agent, chat: ChatTemplate, config: RolloutConfig,
) -> Status | None:  # fmt: skip
    """Append what the policy is told, if there is room for it; how the rollout ends if not."""

    def cut(text: str) -> str:
        return chat.clip(text, config.max_observation_tokens, config.keep_observation)

    shown = replace(
        observation, text=cut(observation.text), outputs=tuple(map(cut, observation.outputs))
    )
    if (shown.outputs or shown.text) != (observation.outputs or observation.text):
        counts = live.rollout.stats
        counts["cut_answers"] = counts.get("cut_answers", 0.0) + 1
    if observation.failed:
        note(live.rollout, "\n".join(shown.outputs) or shown.text)
    said = said_by(agent, action, shown)
    end = _append(live, said, agent, chat, config)
    if end is None:
        calls = action.calls + action.refused if isinstance(action, CallTools) else ()
        live.rollout.tool_messages.append(([(call.name, call.arguments) for call in calls], said))
    return end


def _append(
    live: RunningRollout,
    said: str | list[Message],
    agent: Agent,
    chat: ChatTemplate,
    config: RolloutConfig,
) -> Status | None:
    texts = [said] if isinstance(said, str) else [m.get("content") for m in said]
    if any(isinstance(t, str) and chat.exceeds(t, live.budget.max_length) for t in texts):
        return Status.TRUNCATED_LENGTH  # whatever the agent made of what was cut
    last_id = int(live.transcript.ids[-1])
    live.thought = live.thought if isinstance(said, str) else ""
    if isinstance(said, str):
        if last_id in chat.stop_token_ids:  # that closed what the text would have gone into
            return Status.COMPLETED
        ids = chat.text_ids(said)
    elif config.history == "render":
        return _render(live, said, agent, chat)
    else:
        said, begun = _prefill_of(said)
        ids = chat.observation_ids(
            said, last_id=last_id, tools=bool(agent.tools(live.rollout.task)), roles=live.roles
        )
        ids = _with_prefill(ids, begun, chat)
        live.roles += ["assistant", *(message["role"] for message in said)]
    if not live.budget.fits(len(live.transcript) + len(ids)):
        return Status.TRUNCATED_LENGTH
    live.transcript.give(ids)
    return None


def _render(
    live: RunningRollout, said: list[Message], agent: Agent, chat: ChatTemplate
) -> Status | None:
    """Render the whole conversation for the next turn and make the rollout's rows follow."""
    rollout, transcript = live.rollout, live.transcript
    said, begun = _prefill_of(said)
    written = chat.decode(transcript.ids[live.message_start :])
    live.messages += [{"role": "assistant", "content": written}, *said]
    prompt = chat.prompt_ids(live.messages, agent.tools(rollout.task))
    message_start = len(prompt)
    prompt = _with_prefill(prompt, begun, chat)
    if not live.budget.fits(len(prompt)):
        return Status.TRUNCATED_LENGTH
    num_sampled = len(transcript.turn)
    drift = transcript.rerender(prompt)
    live.message_start = message_start
    rollout.stats[f"prompts_{drift}"] = rollout.stats.get(f"prompts_{drift}", 0.0) + 1
    rollout.segments = transcript.segments
    if replaced := transcript.replaced:
        rollout.turns[-1] = replace(rollout.turns[-1], replaced=replaced)
        _shorten(live, num_sampled - len(replaced))
    return None


def _shorten(live: RunningRollout, kept: int) -> None:
    """Credit what the last turn earned to what is left of it, not to what replaces it."""
    end = _closed(live.rollout) + live.transcript.turn_start + max(1, kept)
    live.rollout.span_rewards = [
        replace(span, end=min(span.end, end)) for span in live.rollout.span_rewards
    ]


def _closed(rollout: Rollout) -> int:
    """Tokens of the rows before the current one."""
    return sum(len(segment.token_ids) for row in rollout.closed_rows for segment in row)

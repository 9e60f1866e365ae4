"""Renders prompts and observations to tokens, and adds observations to a rollout."""

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

UserCalls = Callable[[Any], AbstractContextManager[Any]]
"""From an agent's method to the context in which it is called (user_calls.user_call)."""


def prompt_of(
    agent: Agent, chat: ChatTemplate, task: Task, users: UserCalls, more: str = ""
) -> tuple[Int32, int, list[Message], Sequence[Schema]]:
    """Render a task's prompt.

    Returns its ids including the prefill, its length without the prefill (where the policy's
    message begins), the messages, and the tools. `more` is appended to the last user message.
    """
    with users(agent.tools):
        tools = _require_mappings(agent.tools(task), "tools")
    with users(agent.messages):
        messages = _require_mappings(agent.messages(task), "messages")
        if more:
            at = max(i for i, message in enumerate(messages) if message["role"] == "user")
            messages[at] = {**messages[at], "content": f"{messages[at]['content']}{more}"}
        prompt = chat.prompt_ids(messages, tools)
    with users(agent.prefill):
        prefill: Any = agent.prefill(task)
        if not isinstance(prefill, str):
            raise WrongResult(f"expected a text, got {prefill!r:.80}")
    return _with_prefill(prompt, prefill, chat), len(prompt), messages, tools


def _with_prefill(ids: Int32, prefill: str, chat: ChatTemplate) -> Int32:
    return np.concatenate([ids, chat.text_ids(prefill, own=True)]) if prefill else ids


def _split_prefill(messages: list[Message]) -> tuple[list[Message], str]:
    """Split off a last message of the assistant, with which the policy's next turn begins."""
    if not messages or messages[-1]["role"] != "assistant":
        return messages, ""
    return messages[:-1], str(messages[-1]["content"])


def parse_turn(agent: Agent, text: str, task: Task) -> Action:
    """agent.parse(), with its result checked."""
    action: Any = agent.parse(text, task)
    if not isinstance(action, Action):
        raise WrongResult(f"expected an action of actions.py, got {action!r:.80}")
    if isinstance(action, Finish | Say):
        checked_answer(action.answer)
    return action


def format_observation(
    agent: Agent, action: Action, observation: Observation
) -> str | list[Message]:
    """agent.observe(), with its result checked: text for the policy's message, or messages."""
    reply: Any = agent.observe(action, observation)
    return reply if isinstance(reply, str) else _require_mappings(reply, "a text or messages")


def _require_mappings(value: Any, expected: str) -> list[Any]:
    if not isinstance(value, Sequence) or not all(isinstance(item, Mapping) for item in value):
        raise WrongResult(f"expected {expected}, got {value!r:.80}")
    return [*value]


def add_feedback(rollout: Rollout, message: str) -> None:
    """Add the environment's error message, if any, to the feedback of the last turn."""
    if message:
        turns = max(1, int(rollout.stats["turns"]))
        rollout.feedback += [""] * (turns - len(rollout.feedback))
        rollout.feedback[-1] = f"{rollout.feedback[-1]}\n{message}".strip()


def add_counts(live: RunningRollout, observation: Observation) -> None:
    """Add an observation's counts, and its rewards as rewards of the last turn."""
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
    """Append an observation's tokens; returns how the rollout ends if they do not fit."""

    def cut(text: str) -> str:
        return chat.clip(text, config.max_observation_tokens, config.keep_observation)

    clipped = replace(
        observation, text=cut(observation.text), outputs=tuple(map(cut, observation.outputs))
    )
    if (clipped.outputs or clipped.text) != (observation.outputs or observation.text):
        stats = live.rollout.stats
        stats["cut_answers"] = stats.get("cut_answers", 0.0) + 1
    if observation.failed:
        add_feedback(live.rollout, "\n".join(clipped.outputs) or clipped.text)
    reply = format_observation(agent, action, clipped)
    status = _append(live, reply, agent, chat, config)
    if status is None:
        calls = action.calls + action.refused if isinstance(action, CallTools) else ()
        live.rollout.tool_messages.append(([(call.name, call.arguments) for call in calls], reply))
    return status


def _append(
    live: RunningRollout,
    reply: str | list[Message],
    agent: Agent,
    chat: ChatTemplate,
    config: RolloutConfig,
) -> Status | None:
    texts = [reply] if isinstance(reply, str) else [m.get("content") for m in reply]
    # an agent's own texts may be long although the observation in them was clipped: check before
    # encoding, which takes long for megabytes
    if any(isinstance(t, str) and chat.exceeds(t, live.budget.max_length) for t in texts):
        return Status.TRUNCATED_LENGTH
    last_id = int(live.transcript.ids[-1])
    live.thought = live.thought if isinstance(reply, str) else ""
    if isinstance(reply, str):
        if last_id in chat.stop_token_ids:  # the message that the text would continue is closed
            return Status.COMPLETED
        ids = chat.text_ids(reply)
    elif config.history == "render":
        return _render(live, reply, agent, chat)
    else:
        messages, prefill = _split_prefill(reply)
        ids = chat.observation_ids(
            messages, last_id=last_id, tools=bool(agent.tools(live.rollout.task)), roles=live.roles
        )
        ids = _with_prefill(ids, prefill, chat)
        live.roles += ["assistant", *(message["role"] for message in messages)]
    if not live.budget.fits(len(live.transcript) + len(ids)):
        return Status.TRUNCATED_LENGTH
    live.transcript.give(ids)
    return None


def _render(
    live: RunningRollout, reply: list[Message], agent: Agent, chat: ChatTemplate
) -> Status | None:
    """Render the whole conversation again for the next turn and update the rollout's rows."""
    rollout, transcript = live.rollout, live.transcript
    messages, prefill = _split_prefill(reply)
    turn = chat.decode(transcript.ids[live.message_start :])
    live.messages += [{"role": "assistant", "content": turn}, *messages]
    prompt = chat.prompt_ids(live.messages, agent.tools(rollout.task))
    message_start = len(prompt)
    prompt = _with_prefill(prompt, prefill, chat)
    if not live.budget.fits(len(prompt)):
        return Status.TRUNCATED_LENGTH
    num_sampled = len(transcript.turn)
    drift = transcript.rerender(prompt)
    live.message_start = message_start
    rollout.stats[f"prompts_{drift}"] = rollout.stats.get(f"prompts_{drift}", 0.0) + 1
    rollout.segments = transcript.segments
    if replaced := transcript.replaced:
        rollout.turns[-1] = replace(rollout.turns[-1], replaced=replaced)
        _shorten_spans(live, num_sampled - len(replaced))
    return None


def _shorten_spans(live: RunningRollout, num_left: int) -> None:
    """End the last turn's span rewards at its remaining sampled tokens."""
    end = _closed(live.rollout) + live.transcript.turn_start + max(1, num_left)
    live.rollout.span_rewards = [
        replace(span, end=min(span.end, end)) for span in live.rollout.span_rewards
    ]


def _closed(rollout: Rollout) -> int:
    """Tokens of the rows before the current one."""
    return sum(len(segment.token_ids) for row in rollout.closed_rows for segment in row)

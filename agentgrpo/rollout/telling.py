"""What an observation does to a rollout: its counts and rewards, and the tokens that tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentgrpo.actions import Action, CallTools, Message, Observation
from agentgrpo.agents.base import Agent
from agentgrpo.config import RolloutConfig
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rollout.live import Live
from agentgrpo.types import Rollout, SpanReward, Status


def count(live: Live, observation: Observation) -> None:
    """Add what the policy's last action cost and earned, the latter credited to its turn."""
    rollout, transcript = live.rollout, live.transcript
    rollout.stats["tool_errors"] += observation.failed
    for name, number in observation.counts.items():
        rollout.stats[name] = rollout.stats.get(name, 0.0) + number
    start, end = _closed(rollout) + transcript.turn_start, _closed(rollout) + len(transcript)
    rollout.span_rewards += [
        SpanReward(start, end, name, value) for name, value in observation.rewards.items()
    ]


def tell(
    live: Live, action: Action, observation: Observation, *,
    agent: Agent, chat: ChatTemplate, config: RolloutConfig,
) -> Status | None:  # fmt: skip
    """Append what the policy is told, if there is room for it; how the rollout ends if not."""

    def cut(text: str) -> str:
        return chat.clip(text, config.max_observation_tokens, config.keep_observation)

    shown = replace(
        observation, text=cut(observation.text), outputs=tuple(map(cut, observation.outputs))
    )
    said: Any = agent.observe(action, shown)
    end = _append(live, said, agent, chat, config)
    if end is None:
        calls = action.calls + action.refused if isinstance(action, CallTools) else ()
        live.rollout.told.append(([(call.name, call.arguments) for call in calls], said))
    return end


def _append(
    live: Live, said: Any, agent: Agent, chat: ChatTemplate, config: RolloutConfig
) -> Status | None:
    last_id = int(live.transcript.ids[-1])
    if isinstance(said, str):
        if last_id in chat.stop_token_ids:  # that closed what the text would have gone into
            return Status.COMPLETED
        ids = chat.text_ids(said)
    elif not isinstance(said, Sequence):
        name = type(agent).__name__
        raise TypeError(f"{name}.observe: expected a text or messages, got {said!r:.80}")
    elif config.history == "render":
        return _render(live, said, agent, chat)
    else:
        ids = chat.observation_ids(
            said, last_id=last_id, tools=bool(agent.tools(live.rollout.task))
        )
    if not live.spent.fits(len(live.transcript) + len(ids)):
        return Status.TRUNCATED_LENGTH
    live.transcript.give(ids)
    return None


def _render(live: Live, said: Sequence[Message], agent: Agent, chat: ChatTemplate) -> Status | None:
    """Render the whole conversation for the next turn and make the rollout's rows follow."""
    rollout, transcript = live.rollout, live.transcript
    turn = transcript.turn
    live.messages += [{"role": "assistant", "content": chat.decode(turn)}, *said]
    prompt = chat.prompt_ids(live.messages, agent.tools(rollout.task))
    if not live.spent.fits(len(prompt)):
        return Status.TRUNCATED_LENGTH
    num_sampled = len(turn)
    drift = transcript.rerender(prompt)
    rollout.stats[f"prompts_{drift}"] = rollout.stats.get(f"prompts_{drift}", 0.0) + 1
    rollout.segments = transcript.segments
    if replaced := transcript.replaced:
        rollout.turns[-1] = replace(rollout.turns[-1], replaced=replaced)
        _shorten(live, num_sampled - len(replaced))
    return None


def _shorten(live: Live, kept: int) -> None:
    """Credit what the last turn earned to what is left of it, not to what replaces it."""
    end = _closed(live.rollout) + live.transcript.turn_start + max(1, kept)
    live.rollout.span_rewards = [
        replace(span, end=min(span.end, end)) for span in live.rollout.span_rewards
    ]


def _closed(rollout: Rollout) -> int:
    """Tokens of the rows before the current one."""
    return sum(len(segment.token_ids) for row in rollout.closed_rows for segment in row)

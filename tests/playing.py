"""Playing one scripted policy with a real agent and a real world: what the agents' tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from agentgrpo.config import RolloutConfig
from agentgrpo.rollout import generate
from agentgrpo.types import Rollout, Task
from tests.rollout.stubs import StubEngine, Turn
from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
EOT = "<|im_end|>"


def task(text: str = "Q", **spec: Any) -> Task:
    """A task of one user message."""
    return Task(id="t", messages=({"role": "user", "content": text},), spec=spec)


def tasks(count: int) -> list[Task]:
    """Tasks t0, t1, ... that ask Q0, Q1, ..."""
    return [
        Task(id=f"t{i}", messages=({"role": "user", "content": f"Q{i}"},), spec={})
        for i in range(count)
    ]


def play(
    agent: Any,
    env: Any,
    *turns: str | Turn,
    given: Task | None = None,
    engine: StubEngine | None = None,
    **config: Any,
) -> Rollout:
    """The rollout of a policy that says these turns, one after another."""
    script = [turn if isinstance(turn, Turn) else Turn(turn) for turn in turns]
    engine = engine or StubEngine(TOKENIZER, lambda number, _: script[number])
    (group,) = play_all(agent, env, engine, [given or task()], 1, **config)
    return group[0]


def play_all(
    agent: Any, env: Any, engine: StubEngine, tasks: Sequence[Task], n: int, **config: Any
) -> list[list[Rollout]]:
    """Groups of rollouts with a stub engine."""
    settings = {"max_turns": 99, "max_turn_tokens": 500, "max_observation_tokens": 9000, **config}
    groups = generate(
        tasks,
        cast(Any, engine),
        agent,
        n,
        env=env,
        tokenizer=TOKENIZER,
        config=RolloutConfig(**settings),
    )
    return [group.rollouts for group in groups]


def scripted(policy: Callable[[int, str], Turn], **settings: Any) -> StubEngine:
    """An engine that asks `policy(request number, prompt text)`."""
    return StubEngine(TOKENIZER, policy, **settings)


def shown(rollout: Rollout) -> str:
    """All of a rollout as text."""
    return str(TOKENIZER.decode(rollout.token_ids))


def given_and_sampled(rollout: Rollout) -> list[tuple[bool, str]]:
    """The segments: whether the policy sampled each, and its text."""
    return [(s.sampled, TOKENIZER.decode(s.token_ids)) for s in rollout.segments]

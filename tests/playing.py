"""Plays a scripted policy with a real agent and a real environment, for the tests of agents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

from agentgrpo.actions import CallTools, ToolCall
from agentgrpo.config import RolloutConfig
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rollout.engine_protocol import SamplerStats
from agentgrpo.rollout.sampler import Sampler, as_task
from agentgrpo.types import Group, Rollout, Task
from tests.rollout.stubs import StubEngine, Turn
from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
CHAT = ChatTemplate(TOKENIZER)
EOT = "<|im_end|>"


def generate(
    tasks: Sequence[Task | str], engine: Any, agent: Any, n: int = 1, *, env: Any, tokenizer: Any,
    config: RolloutConfig | None = None, seed: int = 0,
) -> list[Group]:  # fmt: skip
    """Play every task n times."""
    config = config or RolloutConfig()
    sampler = Sampler(engine, agent, env, ChatTemplate(tokenizer, config.template_options), config)
    return sampler.play([as_task(task, str(i)) for i, task in enumerate(tasks)], n, seed=seed)[0]


def task(text: str = "Q", **spec: Any) -> Task:
    """A task with one user message."""
    return Task(id="t", messages=({"role": "user", "content": text},), spec=spec)


def call(name: str, **arguments: Any) -> CallTools:
    """The action of one tool call."""
    return CallTools((ToolCall(name, arguments),))


def tasks(count: int) -> list[Task]:
    """Tasks t0, t1, ... with questions Q0, Q1, ..."""
    return [
        Task(id=f"t{i}", messages=({"role": "user", "content": f"Q{i}"},), spec={})
        for i in range(count)
    ]


def says(*turns: str | Turn, tokenizer: Any = TOKENIZER, **settings: Any) -> StubEngine:
    """An engine that returns these turns in order."""
    script = [turn if isinstance(turn, Turn) else Turn(turn) for turn in turns]
    return StubEngine(tokenizer, lambda number, _: script[number], **settings)


def play(
    agent: Any,
    env: Any,
    *turns: str | Turn,
    given: Task | None = None,
    engine: StubEngine | None = None,
    tokenizer: Any = TOKENIZER,
    **config: Any,
) -> Rollout:
    """The rollout of a policy with these turns."""
    engine = engine or says(*turns, tokenizer=tokenizer)
    (group,) = play_all(agent, env, engine, [given or task()], 1, **config)
    return group[0]


def play_all(
    agent: Any, env: Any, engine: StubEngine, tasks: Sequence[Task], n: int, **config: Any
) -> list[list[Rollout]]:
    """Groups of rollouts from a stub engine."""
    settings = {"max_turns": 99, "max_turn_tokens": 500, "max_observation_tokens": 9000, **config}
    groups = generate(
        tasks,
        cast(Any, engine),
        agent,
        n,
        env=env,
        tokenizer=engine.tokenizer,
        config=RolloutConfig(**settings),
    )
    return [group.rollouts for group in groups]


def sampled(
    engine: StubEngine,
    agent: Any,
    env: Any,
    given: int | Sequence[Task] = 1,
    n: int = 1,
    *,
    seed: int = 0,
    max_live: int = 256,
    threads: int = 64,
    **config: Any,
) -> tuple[list[Group], SamplerStats]:
    """Groups of n rollouts per task (`given`: tasks or their number), and the sampler's stats."""
    settings = {"max_turns": 9, "max_turn_tokens": 99, "max_observation_tokens": 200, **config}
    settings = {"max_retries": 0, **settings}
    sampler = Sampler(
        cast(Any, engine), agent, env, CHAT, RolloutConfig(**settings),
        max_live=max_live, max_tool_threads=threads,
    )  # fmt: skip
    return sampler.play(tasks(given) if isinstance(given, int) else given, n, seed=seed)


def scripted(policy: Callable[[int, str], Turn], **settings: Any) -> StubEngine:
    """An engine that calls `policy(request number, prompt text)` for each turn."""
    return StubEngine(TOKENIZER, policy, **settings)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap like a user's decorator, which hides that a function is a coroutine function."""

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return called


def shown(rollout: Rollout) -> str:
    """A rollout as text."""
    return str(TOKENIZER.decode(rollout.token_ids))


def given_and_sampled(rollout: Rollout) -> list[tuple[bool, str]]:
    """Per segment: whether the policy sampled it, and its text."""
    return [(s.sampled, TOKENIZER.decode(s.token_ids)) for s in rollout.segments]

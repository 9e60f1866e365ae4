"""Every kind of agent with a real engine: records match the engine, and tool use is learned."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgrpo.agents.code import CodeAgent
from agentgrpo.agents.inline import InlineAgent
from agentgrpo.agents.repl import ReplAgent
from agentgrpo.agents.tools import ToolAgent
from agentgrpo.config import EngineConfig, LearnerConfig, LossConfig, RolloutConfig
from agentgrpo.engine.agreement import check_agreement, probe_prompts
from agentgrpo.engine.engine import Engine
from agentgrpo.engine.tool_parsers import tool_call_reader
from agentgrpo.envs.calculator import calculate
from agentgrpo.envs.console import ConsoleEnv
from agentgrpo.envs.python import PythonEnv
from agentgrpo.envs.tools import ToolEnv
from agentgrpo.learn.advantages import assign_advantages
from agentgrpo.learn.minibatches import Update
from agentgrpo.learn.packing import pack_tree
from agentgrpo.learn.token_weights import token_weights
from agentgrpo.rewards.shipped import score
from agentgrpo.rollout.sampler import Sampler
from agentgrpo.sandbox import Limits, SandboxPool
from agentgrpo.types import Rollout, Status
from tests.learn.given import learner_on
from tests.playing import CHAT, generate, task, tasks
from tests.rollout.stubs import StubEnv

TOOLS = ToolEnv([calculate])
BUDGET = RolloutConfig(max_turns=3, max_turn_tokens=24, max_observation_tokens=32)


def common_letters(engine: Engine, tokenizer: Any) -> tuple[str, str]:
    """The two letters that the random model writes most."""
    agent = CodeAgent(system_prompt="S")
    config = RolloutConfig(max_turns=1, max_turn_tokens=48)
    (group,) = generate(
        [task("Q0")], engine, agent, 32, env=StubEnv(), tokenizer=tokenizer, config=config
    )
    text = "".join(tokenizer.decode(r.segments[1].token_ids) for r in group.rollouts)
    counted = Counter(c for c in text if c.isascii() and c.isalpha())
    (first, _), (second, _) = counted.most_common(2)
    return first, second


@pytest.mark.nsjail
@pytest.mark.parametrize("kind", ["code", "repl", "inline", "tools"])
def test_every_agent_plays_with_real_engine_and_sandbox(
    engine: Engine, tokenizer: Any, kind: str
) -> None:
    """Tags are letters that the random model writes often, so that it makes calls."""
    opens, closes = common_letters(engine, tokenizer)
    tags: dict[str, Any] = {"open_tag": opens, "close_tag": closes, "system_prompt": ""}
    with SandboxPool(limits=Limits(timeout_s=2.0), max_live=8, min_idle=1, zygotes=1) as pool:
        pair: tuple[Any, Any] = {  # type: ignore[no-untyped-call]
            "code": lambda: (CodeAgent(**tags), PythonEnv(pool, 2.0)),
            "repl": lambda: (
                ReplAgent(banner="", system_prompt=""),
                ConsoleEnv(pool, 2.0),
            ),
            "inline": lambda: (InlineAgent(env=TOOLS, **tags), TOOLS),
            "tools": lambda: (
                ToolAgent(
                    env=TOOLS, call_reader=lambda parser: tool_call_reader(parser, tokenizer)
                ),
                TOOLS,
            ),
        }[kind]()
        agent, env = pair
        (group,) = generate(
            [task("2+2?")],
            engine,
            agent,
            8,
            env=env,
            tokenizer=tokenizer,
            config=BUDGET,
        )
    assert len(group.rollouts) == 8
    for rollout in group.rollouts:
        assert rollout.status is not Status.INFRA_ERROR, rollout.error
        assert 1 <= rollout.stats["turns"] <= 3
        assert len(rollout.token_ids) <= 256
        assert not rollout.segments[0].sampled
        assert all(
            np.isfinite(s.logprobs).all() for s in rollout.segments if s.logprobs is not None
        )
    if kind in ("code", "inline"):
        assert sum(r.stats["tool_calls"] + r.stats["malformed"] for r in group.rollouts) > 0


def calls(rollout: Rollout) -> dict[str, float]:
    """Rewards code execution, like the format reward of early agents of this kind."""
    return {"called": float(rollout.stats["tool_calls"] > 0)}


def learned(
    engine: Engine, model: Path, agent: Any, reward: Any, config: RolloutConfig, *, steps: int
) -> list[float]:
    """The mean reward of each step on four tasks; sampler and learner agree before each."""
    learner = learner_on(
        engine, model, LearnerConfig(learning_rate=2e-3), LossConfig(), total_steps=steps,
        dlogp_limit=1e-4,
    )  # fmt: skip
    sampler = Sampler(engine, agent, StubEnv(), CHAT, config)
    probes = probe_prompts(learner.policy.vocab_size)
    count = 4 * config.group_size
    rewards = []
    for step in range(steps):
        engine.wake()
        learner.publish()
        check_agreement(engine, learner, probes, threshold=EngineConfig().agreement_on("cpu"))
        groups, _ = sampler.play(tasks(4), config.group_size, seed=step)
        engine.sleep()
        for group in groups:
            score(group, reward)
        assign_advantages(groups, LossConfig())
        weights = token_weights(groups, "dapo", config.max_sampled_tokens)
        batches = pack_tree(groups, max_tokens=4096, weights=weights)
        learner.step([Update(batches=batches, num_samples=count)])
        rewards.append(sum(r.reward for g in groups for r in g.rollouts) / count)
    return rewards


def test_S0_14_share_of_rollouts_with_code_rises(
    engine: Engine, tiny_model: Path, tokenizer: Any
) -> None:
    opens, closes = common_letters(engine, tokenizer)
    agent = CodeAgent(system_prompt="S", open_tag=opens, close_tag=closes)
    config = RolloutConfig(max_turns=1, max_turn_tokens=24, group_size=16, deterministic=True)
    shares = learned(engine, tiny_model, agent, calls, config, steps=14)
    assert sum(shares[-2:]) / 2 - sum(shares[:2]) / 2 >= 0.2, shares

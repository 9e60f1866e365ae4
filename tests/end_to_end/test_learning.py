"""A policy learns a toy reward through the whole loop except the sandbox, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentgrpo.agents.code import CodeAgent
from agentgrpo.config import EngineConfig, LearnerConfig, LossConfig, RolloutConfig
from agentgrpo.engine.agreement import check_agreement, probe_prompts
from agentgrpo.engine.engine import Engine
from agentgrpo.learn.advantages import assign_advantages
from agentgrpo.learn.minibatches import Update
from agentgrpo.learn.packing import pack_tree
from agentgrpo.learn.token_weights import token_weights
from agentgrpo.rewards.shipped import score
from agentgrpo.rollout.sampler import Sampler
from agentgrpo.types import Rollout
from tests.learn.given import learner_on
from tests.playing import CHAT, tasks
from tests.rollout.stubs import StubEnv


def even_share(rollout: Rollout) -> dict[str, float]:
    """The share of even sampled ids: 0.5 by chance."""
    ids = [i for s in rollout.segments if s.sampled for i in s.token_ids.tolist()]
    return {"even": sum(i % 2 == 0 for i in ids) / len(ids)}


def learned(
    engine: Engine, model: Path, agent: Any, reward: Any, config: RolloutConfig, *, steps: int,
    loss: LossConfig,
) -> list[float]:  # fmt: skip
    """The mean reward of each step on four tasks; sampler and learner agree before each."""
    learner = learner_on(
        engine, model, LearnerConfig(learning_rate=2e-3), loss, total_steps=steps, dlogp_limit=1e-4
    )
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
        weights = token_weights(groups, loss.loss_type, config.max_sampled_tokens)
        batches = pack_tree(groups, max_tokens=4096, weights=weights)
        learner.step([Update(batches=batches, num_samples=count)])
        rewards.append(sum(r.reward for g in groups for r in g.rollouts) / count)
    return rewards


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_mean_reward_of_toy_task_rises(engine: Engine, tiny_model: Path, loss_type: Any) -> None:
    config = RolloutConfig(max_turns=1, max_turn_tokens=12, group_size=8, deterministic=True)
    agent, loss = CodeAgent(system_prompt="S"), LossConfig(loss_type=loss_type)
    rewards = learned(engine, tiny_model, agent, even_share, config, steps=12, loss=loss)
    assert sum(rewards[-2:]) / 2 - sum(rewards[:2]) / 2 >= 0.15, rewards

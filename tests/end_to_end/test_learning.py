"""A policy learns a toy reward through every part of the loop but the sandbox, in process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentgrpo.agents.code import CodeAgent
from agentgrpo.config import EngineConfig, LearnerConfig, LossConfig, RolloutConfig
from agentgrpo.engine.agreement import check_agreement, probe_prompts
from agentgrpo.engine.engine import Engine
from agentgrpo.learn.advantages import assign_advantages
from agentgrpo.learn.losses import token_weights
from agentgrpo.learn.packing import pack_tree
from agentgrpo.learn.updates import Update
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rewards.rewards import score
from agentgrpo.rollout.sampler import Sampler
from agentgrpo.types import Rollout, Task
from tests.learn.given import learner_on
from tests.rollout.stubs import StubEnv

ITERATIONS = 12


def even_share(rollout: Rollout) -> dict[str, float]:
    """What share of the sampled ids is even: 0.5 by chance."""
    ids = [i for s in rollout.segments if s.sampled for i in s.token_ids.tolist()]
    return {"even": sum(i % 2 == 0 for i in ids) / len(ids)}


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_the_mean_reward_of_a_toy_task_rises(
    engine: Engine, tiny_model: Path, tokenizer: Any, loss_type: Any
) -> None:
    config = RolloutConfig(max_turns=1, max_turn_tokens=12, group_size=8, deterministic=True)
    learner = learner_on(
        engine,
        tiny_model,
        LearnerConfig(learning_rate=2e-3),
        LossConfig(loss_type=loss_type),
        total_steps=ITERATIONS,
        dlogp_limit=1e-4,
    )
    agent = CodeAgent(system_prompt="S")
    sampler = Sampler(engine, agent, StubEnv(), ChatTemplate(tokenizer), config)
    tasks = [
        Task(id=str(i), messages=({"role": "user", "content": f"Q{i}"},), spec={}) for i in range(4)
    ]
    probes = probe_prompts(learner.policy.vocab_size)
    rewards = []
    for step in range(ITERATIONS):
        engine.wake()
        learner.publish()
        check_agreement(engine, learner, probes, threshold=EngineConfig().agreement_on("cpu"))
        groups, _ = sampler.play(tasks, config.group_size, seed=step)
        engine.sleep()
        for group in groups:
            score(group, even_share)
        assign_advantages(groups, LossConfig())
        weights = token_weights(groups, loss_type, config.max_sampled_tokens)
        batches = pack_tree(groups, max_tokens=2048, weights=weights)
        learner.step([Update(batches=batches, num_samples=32)])
        rewards.append(sum(r.reward for g in groups for r in g.rollouts) / 32)
    assert sum(rewards[-2:]) / 2 - sum(rewards[:2]) / 2 >= 0.15, rewards

"""The learner on the engine's weights: agreement with it, effects of a step, saved state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgrpo.config import LearnerConfig, LossConfig
from agentgrpo.engine.agreement import Disagreement, check_agreement, probe_prompts
from agentgrpo.engine.engine import Engine
from agentgrpo.learn.advantages import assign_advantages
from agentgrpo.learn.learner import Learner
from agentgrpo.learn.minibatches import Update
from agentgrpo.learn.packing import pack_tree
from agentgrpo.learn.token_weights import token_weights
from agentgrpo.types import Completion, Group, Rollout, Segment, Status, Task
from tests.learn.given import learner_on
from tests.tiny import VOCAB

TASK = Task(id="t", messages=(), spec={})
PROBES = probe_prompts(VOCAB)
THRESHOLD = 1e-3
MakeLearner = Callable[..., Learner]


@pytest.fixture
def make_learner(engine: Engine, tiny_model: Path) -> MakeLearner:
    def make(
        *, weights: str = "shared", temperature: float = 1.0, dlogp_limit: float = 1e-3,
        **config: Any,
    ) -> Learner:  # fmt: skip
        settings = LearnerConfig(**{"learning_rate": 1e-2, "max_grad_norm": 1e9, **config})
        return learner_on(
            engine, tiny_model, settings, temperature=temperature, weights=weights,
            dlogp_limit=dlogp_limit,
        )  # fmt: skip

    return make


def agree(engine: Engine, learner: Learner) -> float:
    return check_agreement(engine, learner, PROBES, threshold=THRESHOLD)["max_dlogp"]


def sample(engine: Engine, *, temperature: float = 1.0, seed: int = 0) -> list[Group]:
    """Two groups of four two-turn rollouts from the real engine, rewarded at random."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(2):
        prompt = rng.integers(VOCAB, size=40, dtype=np.int32)
        rollouts = []
        for i in range(4):
            segments = [Segment(prompt)]
            for turn in range(2):
                ids = np.concatenate([s.token_ids for s in segments])
                engine.add_request(
                    f"{g}.{i}", ids, max_tokens=5 + turn, temperature=temperature,
                    seed=100 * seed + 10 * i + 2 * g + turn,
                )  # fmt: skip
                done: list[Completion] = []
                while not done:
                    done = engine.step()
                segments.append(Segment(done[0].token_ids, done[0].logprobs))
                segments.append(Segment(rng.integers(VOCAB, size=3, dtype=np.int32)))
            rollouts.append(Rollout(task=TASK, segments=segments, status=Status.COMPLETED))
            rollouts[-1].rewards = {"r": float(rng.integers(3))}
        groups.append(Group(task=TASK, rollouts=rollouts))
    assign_advantages(groups, LossConfig())
    return groups


def packed(groups: Sequence[Group]) -> list[Update]:
    """One update with all of them, rollouts without an advantage included."""
    batches = pack_tree(
        groups,
        max_tokens=4096,
        weights=token_weights(groups, "dapo", 11),
        drop_zero_advantage=False,
    )
    return [Update(batches=batches, num_samples=sum(len(g.rollouts) for g in groups))]


def state(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_sampler_and_learner_are_one_policy(make_learner: MakeLearner, engine: Engine) -> None:
    learner = make_learner()
    learner.publish()
    assert agree(engine, learner) <= 1e-5
    for ids in PROBES:
        (turn,) = engine.probe([ids], 8)
        scored = learner.score(np.concatenate([ids, turn.token_ids]))
        np.testing.assert_allclose(scored[len(ids) - 1 :], turn.logprobs, atol=1e-5)
        for position in (0, 7):  # greedy is the learner's argmax, too
            so_far = np.concatenate([ids, turn.token_ids[:position]])
            alternatives = [
                learner.score(np.append(so_far, np.int32(token)))[-1]
                for token in range(0, VOCAB, 7)
            ]
            assert max(alternatives) <= turn.logprobs[position] + 1e-5


@pytest.mark.parametrize("weights", ["shared", "copy"])
def test_sampler_and_learner_stay_equal_over_steps(
    make_learner: MakeLearner, engine: Engine, weights: str
) -> None:
    learner = make_learner(weights=weights)
    before = learner.score(PROBES[0])
    for step in range(3):
        learner.publish()
        assert agree(engine, learner) <= 1e-5
        metrics = learner.step(packed(sample(engine, seed=step)))
        assert metrics["sampler_gap_max"] <= 1e-5
    learner.publish()
    assert agree(engine, learner) <= 1e-5
    assert np.abs(learner.score(PROBES[0]) - before).max() > 0.1, "the policy did not move"


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_learner_uses_the_sampling_temperature(
    make_learner: MakeLearner, engine: Engine, temperature: float
) -> None:
    learner = make_learner(temperature=temperature)
    metrics = learner.step(packed(sample(engine, temperature=temperature)))
    assert metrics["sampler_gap_max"] <= 2e-5


def test_trained_layers_limits_training_to_the_last_layers(
    make_learner: MakeLearner, engine: Engine
) -> None:
    learner = make_learner(trained_layers=1)
    before = state(learner)
    learner.step(packed(sample(engine)))
    changed = {name for name, p in state(learner).items() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".layers.1." in name}
    assert learner.describe()["trained_parameters"] == sum(before[n].numel() for n in changed)


def test_step_without_batches_counts_but_changes_nothing(make_learner: MakeLearner) -> None:
    learner = make_learner(weight_decay=0.5)
    before = state(learner)
    metrics = learner.step([])
    assert same(state(learner), before)
    assert learner.step_count == 1
    assert (metrics["loss"], metrics["packed_tokens"]) == (0.0, 0.0)


def test_rollouts_of_another_policy_are_refused(make_learner: MakeLearner, engine: Engine) -> None:
    learner = make_learner()
    groups = sample(engine)
    learner.step(packed(groups))
    before = state(learner)
    with pytest.raises(Disagreement, match="on the sampled tokens"):
        learner.step(packed(groups))
    assert same(state(learner), before)
    assert learner.step_count == 1


def test_resumed_learner_repeats_the_bits(
    make_learner: MakeLearner, engine: Engine, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    batches = [packed(sample(engine, seed=seed)) for seed in (0, 1)]
    learner = make_learner(dlogp_limit=1e9)
    learner.step(batches[0])
    learner.policy.save(tmp_path)
    learner.save_state(tmp_path / "state.pt", tasks={"next": 3})
    saved = state(learner)
    learner.step(batches[1])
    expected = state(learner)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert same(dict(loaded.named_parameters()), saved)
    resumed = make_learner(dlogp_limit=1e9)
    with torch.no_grad():
        for name, parameter in resumed.model.named_parameters():
            parameter.copy_(saved[name])
    assert resumed.load_state(tmp_path / "state.pt")["tasks"] == {"next": 3}
    assert resumed.step_count == 1
    resumed.step(batches[1])
    assert same(state(resumed), expected)


def test_state_of_other_parameters_is_refused(make_learner: MakeLearner, tmp_path: Path) -> None:
    make_learner(trained_layers=1).save_state(tmp_path / "state.pt")
    with pytest.raises(ValueError, match=r"state\.pt is of a run with other trained parameters"):
        make_learner().load_state(tmp_path / "state.pt")

"""Options with TRL's names train as in TRL: gradients are compared with TRL's own code.

The learner runs unchanged from config to optimizer, except for the model: a table gives each token
its log-probability and entropy, and TRL's loss reads the same table. docs/coming-from.md lists
the deliberate differences.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentgrpo.config import LossConfig
from agentgrpo.learn.advantages import assign_advantages
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.learner import Learner
from agentgrpo.learn.minibatches import mini_batches, plan_updates
from agentgrpo.learn.policy import PolicyOutput
from agentgrpo.types import Group, Rollout, Segment, Treatment
from tests.learn.given import group_of, rollout_of, run_config
from tests.learn.trl_step import trl_loss

pytest.importorskip("trl", reason="trl is in requirements-dev.txt")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's, about versions

MakeLearner = Callable[..., Learner]
Gradient = tuple[Tensor, Tensor]
"""Of the log-probabilities, and of the entropies."""
ALIKE = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
SIZE = 400
BUDGET = 192
"""rollout.max_turns times rollout.max_turn_tokens."""
OUR_DEFAULTS = {
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
}


class Table:
    """A model whose log-probability of a token depends on its id only, not on earlier tokens.

    With `beside`, log-probabilities of other tokens too, from a distribution over the ids.
    """

    unpacked_reason = None

    def __init__(self, seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        self.logp = -torch.rand(SIZE, generator=noise, dtype=torch.float64) * 2 - 0.1
        self.entropy = torch.rand(SIZE, generator=noise, dtype=torch.float64) * 3
        for leaf in (self.logp, self.entropy):
            leaf.requires_grad_()

    def __call__(
        self, batch: PackedBatch, temperature: float, beside: Tensor | int = 0
    ) -> PolicyOutput:
        at = torch.from_numpy(batch.target_N).long()
        if isinstance(beside, int):
            beside = self.rows(at).topk(beside).indices
        return PolicyOutput(
            self.logp[at], self.entropy[at], self.rows(at).gather(1, beside), beside
        )

    def rows(self, at: Tensor) -> Tensor:
        """A distribution for each place of the ids, which nobody else has."""
        turned = (torch.arange(SIZE) + 7 * at[..., None]) % SIZE
        return torch.log_softmax(3 * self.logp, -1)[turned]

    def move(self) -> None:
        """What an update does to it here."""
        with torch.no_grad():
            self.logp += 0.3 * torch.sin(torch.arange(SIZE))


class Recorder:
    """In place of the optimizer: records each update's gradient, then moves the table."""

    lr = 0.0

    def __init__(self, table: Table) -> None:
        self.table = table
        self.seen: list[Gradient] = []

    def set_lr(self, lr: float) -> None: ...
    def collect(self) -> None: ...
    def zero_grad(self) -> None:
        self.table.logp.grad = self.table.entropy.grad = None

    def step(self, *, max_grad_norm: float) -> float:
        logp, entropy = self.table.logp.grad, self.table.entropy.grad
        assert logp is not None
        self.seen.append((logp, torch.zeros_like(logp) if entropy is None else entropy))
        self.table.move()
        return 1.0


@pytest.fixture
def played() -> list[Group]:
    """Four groups of four rollouts, one or two turns each; no token id twice; the last is dead."""
    rng = np.random.default_rng(1)
    ids = iter(range(SIZE))
    sampler = Table(0).logp.detach() + torch.from_numpy(rng.normal(0, 0.4, SIZE))

    def taken(count: int, *, sampled: bool = False) -> Segment:
        own = np.fromiter(itertools.islice(ids, count), np.int32)
        return Segment(
            own,
            sampler[torch.from_numpy(own).long()].numpy().astype(np.float32) if sampled else None,
        )

    groups = []
    for g in range(4):
        prompt, rollouts = taken(3), []
        for i in range(4):
            segments = [prompt, taken(2 + 3 * i + g, sampled=True)]
            if i % 2:
                segments += [taken(2), taken(3, sampled=True)]
            rollout = rollout_of(*segments)
            rollout.rewards = {"r": float(i * i + g) if g < 3 else 1.0}
            rollouts.append(rollout)
        groups.append(group_of(*rollouts))
    return groups


def ours(make_learner: MakeLearner, groups: list[Group], loss: LossConfig) -> list[Gradient]:
    """The gradient of each update, starting from the config."""
    assign_advantages(groups, loss)
    learner: Any = make_learner(loss)
    learner._scorer = table = Table(0)
    if learner._reference is not None:
        learner._reference.scorer = Table(7)
    learner._optimizer = recorder = Recorder(table)
    updates = plan_updates(groups, run_config(loss, max_tokens=32), step=0)
    assert any(len(update.batches) > 1 for update in updates)
    learner.step(updates)
    return recorder.seen


def theirs(
    groups: list[Group], loss: LossConfig, *, trainer: Any = None, **settings: Any
) -> list[Gradient]:
    """TRL's gradients for the same rollouts in the same updates."""
    table, start, reference = Table(0), Table(0).logp.detach(), Table(7).logp.detach()
    parts = [
        [r for g in part for r in g.rollouts]
        for part in mini_batches(groups, run_config(loss), step=0)
    ]
    tokens = sum(r.num_sampled for part in parts for r in part if r.trained)
    actual = []
    for part in parts:
        total = trl_loss(
            {"max_completion_length": BUDGET, **OUR_DEFAULTS, **settings},
            padded(part, table, start, reference),
            tokens_sampled=tokens, updates=len(parts), trainer=trainer,
        )  # fmt: skip
        leaves = (table.logp, table.entropy)
        logp, entropy = torch.autograd.grad(total, leaves, materialize_grads=True)
        actual.append((logp, entropy))
        table.move()
    return actual


def padded(
    rollouts: Sequence[Rollout], table: Table, start: Tensor, reference: Tensor
) -> dict[str, Tensor]:
    """The update in TRL's form: padded completions and their mask."""
    width = max(len(r.token_ids) for r in rollouts) - 3
    ids = torch.zeros(len(rollouts), width, dtype=torch.int64)
    mask, sampler = torch.zeros(len(rollouts), width), torch.zeros(len(rollouts), width).double()
    for row, rollout in enumerate(rollouts):
        at = 0
        for segment in rollout.segments[1:]:
            here = slice(at, at := at + len(segment.token_ids))
            ids[row, here] = torch.from_numpy(segment.token_ids).long()
            if segment.logprobs is not None:
                mask[row, here] = float(rollout.trained)
                sampler[row, here] = torch.from_numpy(segment.logprobs).double()
    return {
        "ids": ids, "logp": table.logp[ids], "entropy": table.entropy[ids], "old": start[ids],
        "ref": reference[ids], "sampler": sampler, "mask": mask.double(),
        "advantages": torch.tensor([r.advantage for r in rollouts], dtype=torch.float32).double(),
    }  # fmt: skip


def assert_same(have: list[Gradient], want: list[Gradient]) -> None:
    """Up to the rounding of float32 weights and advantages."""
    assert len(have) == len(want)
    for mine, other in zip(have, want, strict=True):
        assert other[0].abs().max() > 1e-4
        torch.testing.assert_close(mine, other, rtol=3e-6, atol=1e-9)


def options_of(loss_type: str) -> dict[str, Any]:
    return {"loss_type": loss_type} | ({"epsilon_high": 1.1} if loss_type == "cispo" else {})


@pytest.mark.parametrize("loss_type", ALIKE)
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("masked", [0, 1])
def test_update_equals_trl(
    make_learner: MakeLearner, played: list[Group], loss_type: str, updates: int, masked: int
) -> None:
    """With KL and entropy bonus; masked: one of four rollouts per group."""
    for group in played:
        for rollout in group.rollouts[1 : 1 + masked]:
            rollout.treatment = Treatment.MASK
    options = {**options_of(loss_type), "beta": 0.1, "entropy_coef": 0.3}
    loss = LossConfig(**options, num_mini_batches=updates)
    assert_same(ours(make_learner, played, loss), theirs(played, loss, **options))


CASES: dict[str, dict[str, Any]] = {
    "no KL, no bonus": {"epsilon": 0.1, "epsilon_high": 0.15},
    "uncorrected KL": {"beta": 0.1, "use_bias_correction_kl": False},
    "two-sided": {"delta": 1.1},
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 0.05, "beta": 0.1},
    "luspo by sequence": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo by sequence": {
        "loss_type": "vespo", "importance_sampling_level": "sequence", "beta": 0.1,
    },
    "no correction": {"vllm_importance_sampling_correction": False},
    "off-policy mask": {"off_policy_mask_threshold": 0.02},
    "sapo's temperatures": {
        "loss_type": "sapo", "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 0.7,
    },
    "vespo's numbers": {
        "loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.5,
        "vespo_lambda_neg": 1.5,
    },
    "high entropy": {"top_entropy_quantile": 0.4, "entropy_coef": 0.3},
    "high entropy without a bonus": {"top_entropy_quantile": 0.4},
    **{
        f"{kind} {mode}": {
            "loss_type": kind, "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_max": 1.5, "vllm_importance_sampling_clip_min": 0.6,
        }
        for kind in ("dapo", "vespo")
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_option_equals_trl(make_learner: MakeLearner, played: list[Group], case: str) -> None:
    options = CASES[case]
    updates = 1 if "top_entropy_quantile" in options else 2  # the ratio leaves 1
    loss = LossConfig(**options, num_mini_batches=updates)
    assert_same(ours(make_learner, played, loss), theirs(played, loss, **options))


@pytest.mark.parametrize("corrects", [False, True])
def test_gmpo_equals_trl_trainer(
    make_learner: MakeLearner, played: list[Group], corrects: bool
) -> None:
    """As it is by default; the correction is there to be switched on."""
    trainer = importlib.import_module("trl.experimental.gmpo").GMPOTrainer
    more: Any = {"vllm_importance_sampling_correction": True} if corrects else {}
    loss = LossConfig(loss_type="gmpo", beta=0.1, num_mini_batches=2, **more)
    have = ours(make_learner, played, loss)
    expected = theirs(played, loss, trainer=trainer, beta=0.1, epsilon=0.4)
    if corrects:
        assert (have[0][0] - expected[0][0]).abs().max() > 1e-2 * expected[0][0].abs().max()
    else:
        assert_same(have, expected)


def test_threshold_is_computed_before_the_first_update(
    make_learner: MakeLearner, played: list[Group]
) -> None:
    """TRL computes it in each update."""
    loss = LossConfig(top_entropy_quantile=0.4, num_mini_batches=2)
    mine, other = ours(make_learner, played, loss), theirs(played, loss, top_entropy_quantile=0.4)
    assert (mine[0][0] - other[0][0]).abs().max() > 0.05 * other[0][0].abs().max()

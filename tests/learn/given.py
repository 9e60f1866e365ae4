"""Shared helpers of the learner's tests: a stand-in engine, groups, and the step in plain float64.

The stand-in only stores what it receives, so no vLLM starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentgrpo.config import (
    BranchConfig,
    LearnerConfig,
    LossConfig,
    RolloutConfig,
    TeacherConfig,
    TrainConfig,
)
from agentgrpo.learn.learner import Learner
from agentgrpo.learn.weight_sync import policy_on
from agentgrpo.types import Group, Int32, Rollout, Segment, Status, Task

TASK = Task(id="t", messages=(), spec={})
TEMPERATURE = 0.9
EPS = 1e-3
"""Of AdamW: large, so that a gradient of rounding errors stays one."""
LR = 1e-2
DAPO = LossConfig()


def observed(*ids: int) -> Segment:
    return Segment(np.array(ids, np.int32))


def sampled(*ids: int, logp: float = -0.5) -> Segment:
    return Segment(np.array(ids, np.int32), np.full(len(ids), logp, np.float32))


def rollout_of(*segments: Segment, **fields: Any) -> Rollout:
    defaults: dict[str, Any] = {"task": TASK, "status": Status.COMPLETED, "advantage": 1.0}
    return Rollout(segments=list(segments), **defaults | fields)


def group_of(*rollouts: Rollout) -> Group:
    return Group(task=TASK, rollouts=list(rollouts))


class Holder:
    """The engine's interface to the learner; stores the weights that it receives."""

    device = "cpu"
    dtype = "float64"

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self.weights: dict[str, Tensor] = {}
        self.adapter: dict[str, Tensor] = {}

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.weights |= {name: tensor.clone() for name, tensor in named}

    def set_adapter(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        self.adapter = tensors

    def prepack_frozen_linears(self, trained: Iterable[Tensor]) -> int:
        return 0

    def reset_prefix_cache(self) -> None: ...
    def weights_loaded(self) -> None: ...
    def unpack(self) -> None: ...


def learner_on(
    engine: Any, model: Path | str, config: LearnerConfig | None = None,
    loss: LossConfig | None = None, **arguments: Any,
) -> Learner:  # fmt: skip
    """A learner of four steps at temperature 1 on the engine's weights, with overrides."""
    options = {"total_steps": 4, "temperature": 1.0, "dlogp_limit": 1e-3}
    config, weights = config or LearnerConfig(), arguments.pop("weights", "shared")
    adapter, arguments["reference"] = (
        arguments.pop("adapter", None),
        arguments.get("reference") or model,
    )
    policy, publisher = policy_on(engine, model, config, weights=weights, adapter=adapter)
    return Learner(policy, publisher, config, loss or LossConfig(), **{**options, **arguments})


def distributions(model: Any, token_ids: Int32, temperature: float = TEMPERATURE) -> Tensor:
    """[T - 1, V] log-probabilities of each next token, through the whole model."""
    ids = torch.from_numpy(token_ids.astype(np.int64))
    return torch.log_softmax(model(ids[None], use_cache=False).logits[0, :-1] / temperature, -1)


def logp_of(model: Any, rollout: Rollout) -> Tensor:
    """Log-probabilities of the sampled tokens, one rollout alone."""
    targets = torch.from_numpy(rollout.token_ids[1:].astype(np.int64))
    every = distributions(model, rollout.token_ids).gather(1, targets[:, None])[:, 0]
    return every[torch.from_numpy(mask_of(rollout)[1:])]


def mask_of(rollout: Rollout) -> Any:
    return np.concatenate([np.full(len(s.token_ids), s.sampled) for s in rollout.segments])


def sampled_logp(rollout: Rollout) -> Tensor:
    parts = [s.logprobs for s in rollout.segments if s.logprobs is not None]
    return torch.from_numpy(np.concatenate(parts)).double()


def oracle_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )


def run_config(
    loss: LossConfig, *, max_tokens: int | None = None, teacher: TeacherConfig | None = None
) -> TrainConfig:
    """`max_tokens` may be below engine.max_model_len, and the teacher's model need not exist."""
    config = TrainConfig(
        model="m", out_dir=Path("o"), loss=loss,
        rollout=RolloutConfig(tasks_per_step=2, branching=BranchConfig(initial=1)),
    )  # fmt: skip
    update: dict[str, Any] = {"teacher": teacher or TeacherConfig()}
    if max_tokens is not None:
        update["learner"] = LearnerConfig(max_tokens=max_tokens)
    return config.model_copy(update=update)


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def oracle_step(
    folder: Path, groups: Sequence[Group], order: Sequence[Sequence[int]], *, iterations: int,
    term: Callable[[Tensor, Tensor, Tensor, float], Tensor], old_is_sampler: bool = False,
    cap: float | None = 2.0, beta: float = 0.0, lr: float = LR,
) -> tuple[Any, list[float]]:  # fmt: skip
    """The trained model and the losses; `term(logp, old, sampler, advantage)` per rollout."""
    model, reference = oracle_model(folder), oracle_model(folder)
    adamw = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, eps=EPS)
    with torch.no_grad():
        before = {id(r): logp_of(model, r) for g in groups for r in g.rollouts}
    losses = []
    for _ in range(iterations):
        for chosen in order:
            rollouts = [r for i in chosen for r in groups[i].rollouts]
            tokens = sum(r.num_sampled for g in groups for r in g.rollouts) / len(order)
            loss = torch.zeros((), dtype=torch.float64)
            for rollout in rollouts:
                logp, sampler = logp_of(model, rollout), sampled_logp(rollout)
                old = sampler if old_is_sampler else before[id(rollout)]
                advantage = float(np.float32(rollout.advantage))
                each = term(logp, old, sampler, advantage)
                if cap is not None:
                    each = each * (old - sampler).exp().clamp(max=cap)
                if beta:
                    with torch.no_grad():
                        gap = logp_of(reference, rollout)
                    gap = gap - logp
                    each = each + beta * (gap.exp() - gap - 1) * (logp - old).exp()
                loss = loss + each.sum() / tokens
            adamw.zero_grad()
            loss.backward()
            adamw.step()
            losses.append(loss.item())
    return model, losses


def assert_same_model(ours: Any, theirs: Any, folder: Path) -> None:
    """Equal but for float32 advantages, weights and norms: to 1e-4 of how far training moved."""
    for (name, a), b, start in zip(
        ours.named_parameters(), theirs.parameters(), oracle_model(folder).parameters(), strict=True
    ):
        moved = (b - start).abs().max().item()
        assert moved > 1e-4, name
        assert (a - b).abs().max().item() <= 1e-3 * moved, name


def branched() -> list[Group]:
    """Two rollouts that share a turn, a third that shares nothing; and a group without branches."""

    def played(*segments: Segment, reward: float) -> Rollout:
        return rollout_of(observed(5, 6, 7), *segments, rewards={"answer": reward})

    common, observation = sampled(10, 11, 12), observed(20, 21)
    branches = [
        played(common, observation, sampled(30, 31), reward=1.0),
        played(common, observation, sampled(40), reward=0.0),
        played(sampled(50, 51), reward=0.5),
    ]
    others = [played(sampled(60), reward=1.0), played(sampled(70, 71), reward=0.0)]
    return [group_of(*branches), group_of(*others)]

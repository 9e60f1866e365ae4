"""Updates of a step against plain loops in float64: ratios, clipping, KL, epochs, adapters.

The engine is a stand-in that only holds what it is given, so that no vLLM starts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentgrpo.advantages import assign_advantages
from agentgrpo.agreement import Disagreement
from agentgrpo.config import LearnerConfig, LossConfig, RolloutConfig, TrainConfig
from agentgrpo.learner import Learner
from agentgrpo.optimizer import make_optimizer
from agentgrpo.types import Group, Rollout, Segment, Status, Task
from agentgrpo.updates import plan_updates
from tests.tiny import VOCAB, make_model_dir

TASK = Task(id="t", messages=(), spec={})
TEMPERATURE = 0.9
EPS = 1e-3
"""Of AdamW: large, so that a gradient of rounding errors stays one."""
LR = 1e-2


class Holder:
    """An engine's part in learning: it is told of new weights."""

    device = "cpu"
    dtype = "float64"
    lora_rank = 0

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.weights |= {name: tensor.clone() for name, tensor in named}

    def reset_prefix_cache(self) -> None: ...
    def weights_loaded(self) -> None: ...
    def unpack(self) -> None: ...


@pytest.fixture
def make_learner(tiny_model: Path) -> Callable[..., Learner]:
    def make(loss: LossConfig | None = None, **config: Any) -> Learner:
        given: dict[str, Any] = {name: config.pop(name, None) for name in ("adapter", "reference")}
        options: dict[str, Any] = {"learning_rate": LR, "max_grad_norm": 1e9, **config}
        engine: Any = Holder()
        learner = Learner(
            tiny_model, engine, LearnerConfig(**options), loss or LossConfig(), total_steps=4,
            temperature=TEMPERATURE, weights="copy", dlogp_limit=9.0, **given,
        )  # fmt: skip
        learner._optimizer._adamw.param_groups[0]["eps"] = EPS
        return learner

    return make


def logp_of(model: Any, rollout: Rollout) -> Tensor:
    """Of the sampled tokens, through the whole model, one rollout alone."""
    ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
    logits = model(ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE
    every = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
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


@pytest.fixture
def groups(tiny_model: Path) -> list[Group]:
    """Two groups of three two-turn rollouts, sampled by a policy a little off the learner's."""
    rng = np.random.default_rng(3)
    model, made = oracle_model(tiny_model), []
    for g in range(2):
        prompt = Segment(rng.integers(3, VOCAB, size=9, dtype=np.int32))
        rollouts = []
        for i in range(3):
            segments = [prompt]
            for length in (4, 3 + i):
                ids = rng.integers(3, VOCAB, size=length, dtype=np.int32)
                segments.append(Segment(ids, np.zeros(length, np.float32)))
                segments.append(Segment(rng.integers(3, VOCAB, size=2, dtype=np.int32)))
            played = Rollout(task=TASK, segments=segments, status=Status.COMPLETED)
            with torch.no_grad():
                logp = logp_of(model, played).numpy()
            noisy = (logp + rng.normal(0, 0.4, len(logp))).astype(np.float32)
            played.segments[1] = Segment(segments[1].token_ids, noisy[:4])
            played.segments[3] = Segment(segments[3].token_ids, noisy[4:])
            played.rewards = {"r": float(i * i + g)}  # no rollout at the mean
            rollouts.append(played)
        made.append(Group(task=TASK, rollouts=rollouts))
    assign_advantages(made, LossConfig())
    return made


def run_config(loss: LossConfig, **learner: Any) -> TrainConfig:
    return TrainConfig(
        model="m", out_dir=Path("o"), loss=loss,
        learner=LearnerConfig(**learner), rollout=RolloutConfig(tasks_per_step=2),
    )  # fmt: skip


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
            tokens = sum(r.num_sampled for r in rollouts)
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


DAPO = LossConfig()
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one update": ({}, {}),
    "no correction": ({"vllm_importance_sampling_correction": False}, {"cap": None}),
    "another cap": ({"vllm_importance_sampling_clip_max": 1.1}, {"cap": 1.1}),
    "three passes": ({"num_iterations": 3}, {"iterations": 3}),
    "clip higher": (
        {"num_iterations": 3, "epsilon": 0.01, "epsilon_high": 0.05},
        {"iterations": 3, "low": 0.01, "high": 0.05},
    ),
    "old from the sampler": (
        {"num_iterations": 2, "old_logps": "sampler"},
        {"iterations": 2, "old_is_sampler": True, "cap": None},
    ),
    "mini-batches": ({"num_mini_batches": 2, "num_iterations": 2}, {"iterations": 2, "split": 2}),
    "mini-batches once": ({"num_mini_batches": 2}, {"split": 2}),
    "kl": ({"beta": 0.3, "num_iterations": 2}, {"iterations": 2, "beta": 0.3}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_formula(
    make_learner: Callable[..., Learner], tiny_model: Path, groups: list[Group], case: str
) -> None:
    options, oracle = CASES[case]
    options = {"loss_type": "dapo", **options}
    loss = LossConfig(**options)
    oracle = {"iterations": 1, **oracle}
    low, high = oracle.pop("low", 0.2), oracle.pop("high", 0.2)
    split = oracle.pop("split", 1)
    learner = make_learner(loss)
    updates = plan_updates(groups, run_config(loss), step=0)
    assert len(updates) == split
    metrics = learner.step(updates)
    order: list[list[int]] = [[0, 1]]
    if split == 2:  # which group comes first is the planner's business
        prompts = [group.rollouts[0].token_ids[0] for group in groups]
        first = updates[0].batches[0].input_ids_T[0]
        order = [[0], [1]] if first == prompts[0] else [[1], [0]]
    model, losses = oracle_step(
        tiny_model, groups, order,
        term=lambda logp, old, _, a: clipped((logp - old).exp(), a, low, high), **oracle,
    )  # fmt: skip
    assert metrics["updates"] == len(losses)
    assert metrics["loss"] == pytest.approx(float(np.mean(losses)), abs=1e-6)
    assert_same_model(learner.model, model, tiny_model)


def test_gspo_and_cispo_are_their_formulas(
    make_learner: Callable[..., Learner], tiny_model: Path, groups: list[Group]
) -> None:
    gspo = LossConfig(
        importance_sampling_level="sequence", num_iterations=2, epsilon=0.005,
        vllm_importance_sampling_correction=False,
    )  # fmt: skip
    cispo = LossConfig(
        loss_type="cispo", epsilon_high=1.001, num_iterations=2,
        vllm_importance_sampling_correction=False,
    )  # fmt: skip

    def of_gspo(logp: Tensor, old: Tensor, _: Tensor, a: float) -> Tensor:
        return clipped((logp - old).mean().exp().expand(len(logp)), a, 0.005, 0.005)

    def of_cispo(logp: Tensor, old: Tensor, _: Tensor, a: float) -> Tensor:
        return -(logp - old).exp().detach().clamp(max=1.001) * a * logp

    for loss, term in ((gspo, of_gspo), (cispo, of_cispo)):
        learner = make_learner(loss)
        metrics = learner.step(plan_updates(groups, run_config(loss), step=0))
        model, losses = oracle_step(tiny_model, groups, [[0, 1]], iterations=2, term=term, cap=None)
        assert metrics["loss"] == pytest.approx(float(np.mean(losses)), abs=1e-6)
        assert_same_model(learner.model, model, tiny_model)


WHOLE: dict[str, dict[str, Any]] = {
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 0.005},
    "gspo-token": {"importance_sampling_level": "sequence_token", "epsilon": 0.005},
    "gmpo": {"loss_type": "gmpo", "epsilon": 0.005},
    "vespo": {"loss_type": "vespo"},
    "geometric correction": {"vllm_importance_sampling_mode": "geometric_truncate"},
    "sequence correction": {"vllm_importance_sampling_mode": "sequence_mask"},
    "off-policy mask": {"off_policy_mask_threshold": 0.02},
}
"""Objectives that read the terms of a rollout together."""


def forked(groups: Sequence[Group]) -> None:
    """Every rollout's second turn begins a row of its own; the first turn of some earns nothing."""
    for number, rollout in enumerate(r for g in groups for r in g.rollouts):
        rollout.closed_rows = [rollout.segments[:2]]
        rollout.segments = [Segment(rollout.token_ids[2:15]), *rollout.segments[3:]]
        first = 0.0 if number % 2 else rollout.advantage
        rollout.segment_advantages = [0.0, first, 0.0, rollout.advantage, 0.0]


@pytest.mark.parametrize("case", WHOLE)
def test_what_is_read_of_a_whole_rollout_does_not_depend_on_the_batches(
    make_learner: Callable[..., Learner], groups: list[Group], case: str
) -> None:
    """A rollout whose rows would lie in two batches: as in one undivided batch, in float64.

    But for norms, which transformers computes in float32; steps move parameters by 1e-2.
    """
    forked(groups)
    loss = LossConfig(**{"num_iterations": 2, **WHOLE[case]})
    seen = {}
    for budget in (1000, 34):
        config = run_config(loss)
        learner_config = config.learner.model_copy(update={"max_tokens": budget})
        config = config.model_copy(update={"learner": learner_config})
        learner = make_learner(loss)
        updates = plan_updates(groups, config, step=0)
        metrics = learner.step(updates)
        seen[budget] = len(updates[0].batches), metrics, list(learner.model.parameters())
    (one, want, undivided), (many, got, divided) = seen.values()
    assert one < many
    for name in ("loss", "grad_norm", "mismatch_ratio_max", "mismatch_modified"):
        assert got[name] == pytest.approx(want[name], rel=1e-6), name
    for a, b in zip(divided, undivided, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_the_mismatch_of_a_rollout_is_that_of_all_its_rows(
    make_learner: Callable[..., Learner], groups: list[Group]
) -> None:
    """Also where the loss reads tokens alone, so that its rows lie in several batches."""
    forked(groups)
    loss = LossConfig(
        vllm_importance_sampling_mode="sequence_mask", vllm_importance_sampling_correction=False,
        num_mini_batches=2,
    )  # fmt: skip
    seen = []
    for budget in (1000, 20):
        config = run_config(loss)
        learner_config = config.learner.model_copy(update={"max_tokens": budget})
        config = config.model_copy(update={"learner": learner_config})
        updates = plan_updates(groups, config, step=0)
        seen.append((len(updates[0].batches), make_learner(loss).step(updates)))
    (one, want), (many, got) = seen
    assert one < many
    totals = [
        sum(
            float((logp - segment.logprobs).sum())
            for logp, segment in zip(r.learner_logprobs or (), r.all_segments, strict=True)
            if logp is not None and segment.logprobs is not None
        )
        for group in groups
        for r in group.rollouts
    ]
    assert got["mismatch_ratio_max"] == pytest.approx(math.exp(max(totals)), rel=1e-5)
    for name in ("mismatch_ratio_max", "mismatch_ratio_mean", "mismatch_turn_1_ratio_max"):
        assert got[name] == pytest.approx(want[name], rel=1e-6), name


def test_span_advantages_reach_their_own_tokens(
    make_learner: Callable[..., Learner], groups: list[Group]
) -> None:
    for i, rollout in enumerate(r for g in groups for r in g.rollouts):
        rollout.segment_advantages = [9.0, 0.5 + i, 9.0, -1.0 - i, 9.0]
    (update,) = plan_updates(groups, run_config(DAPO), step=0)
    for batch in update.batches:
        want = np.where(batch.turn_N == 0, 0.5 + batch.sample_N, -1.0 - batch.sample_N)
        np.testing.assert_array_equal(batch.advantage_N, want.astype(np.float32))
        sizes = np.bincount(batch.turn_N)
        assert sizes.tolist() == [24, 24]


def test_the_mismatch_is_logged_raw_and_by_turn(
    make_learner: Callable[..., Learner], tiny_model: Path, groups: list[Group]
) -> None:
    loss = LossConfig(vllm_importance_sampling_clip_max=1.2)
    metrics = make_learner(loss).step(plan_updates(groups, run_config(loss), step=0))
    model = oracle_model(tiny_model)
    with torch.no_grad():
        gaps = [logp_of(model, r) - sampled_logp(r) for g in groups for r in g.rollouts]
    ratio = torch.cat(gaps).exp()
    assert metrics["mismatch_ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-5)
    assert metrics["mismatch_ratio_min"] == pytest.approx(ratio.min().item(), rel=1e-5)
    assert metrics["mismatch_ratio_mean"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    assert metrics["mismatch_modified"] == pytest.approx((ratio > 1.2).double().mean().item())
    late = torch.cat([gap[4:] for gap in gaps])
    assert metrics["mismatch_turn_1_kl"] == pytest.approx(
        (late.expm1() - late).mean().item(), rel=1e-4
    )


def test_only_tokens_of_high_entropy_are_trained_on(
    make_learner: Callable[..., Learner], tiny_model: Path, groups: list[Group]
) -> None:
    loss = LossConfig(top_entropy_quantile=0.25, vllm_importance_sampling_correction=False)
    learner = make_learner(loss)
    metrics = learner.step(plan_updates(groups, run_config(loss), step=0))
    model = oracle_model(tiny_model)
    entropies, advantages = [], []
    for rollout in (r for g in groups for r in g.rollouts):
        ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
        every = torch.log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, -1)
        mask = torch.from_numpy(mask_of(rollout)[1:])
        entropies.append(-(every.exp() * every).sum(-1)[mask])
        advantages.append(torch.full((rollout.num_sampled,), rollout.advantage))
    entropy, advantage = torch.cat(entropies), torch.cat(advantages)
    kept = entropy >= entropy.quantile(0.75)
    assert 0.2 < kept.double().mean() < 0.3
    assert metrics["loss"] == pytest.approx(-(advantage * kept).sum().item() / len(kept), abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_iterations": 2}, {"num_mini_batches": 2, "num_iterations": 2}],
    ids=["once", "twice", "mini-batches"],
)
def test_rollouts_are_told_what_the_learner_made_of_them_before_the_step(
    make_learner: Callable[..., Learner],
    tiny_model: Path,
    groups: list[Group],
    options: dict[str, Any],
) -> None:
    rollout, dead = groups[0].rollouts[0], groups[1].rollouts[2]
    rollout.closed_rows = [rollout.segments[:2]]  # two rows, of one turn each
    rollout.segments = [Segment(rollout.token_ids[3:13]), *rollout.segments[3:]]
    dead.advantage = 0.0
    loss = LossConfig(**options)
    make_learner(loss).step(plan_updates(groups, run_config(loss), step=0))
    assert dead.learner_logprobs is None
    assert dead.entropies is None
    model = oracle_model(tiny_model)
    for played in (r for g in groups for r in g.rollouts if r is not dead):
        assert played.learner_logprobs is not None
        assert played.entropies is not None
        seen = iter(zip(played.learner_logprobs, played.entropies, strict=True))
        for row in played.rows:
            ids = torch.from_numpy(np.concatenate([s.token_ids for s in row]).astype(np.int64))
            with torch.no_grad():
                every = torch.log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, -1)
            start = 0
            for segment in row:
                end = start + len(segment.token_ids)
                logp, entropy = next(seen)
                if not segment.sampled:
                    assert logp is None
                    assert entropy is None
                else:
                    own = every[start - 1 : end - 1]
                    want = own.gather(1, ids[start:end, None])[:, 0]
                    np.testing.assert_allclose(logp, want, atol=1e-5)  # type: ignore[arg-type]
                    np.testing.assert_allclose(entropy, -(own.exp() * own).sum(-1), atol=1e-5)  # type: ignore[arg-type]
                start = end
        assert next(seen, None) is None


def test_what_the_sampler_saw_is_checked_before_the_first_update(
    make_learner: Callable[..., Learner], groups: list[Group]
) -> None:
    twice = {"num_iterations": 2}
    cases: list[dict[str, Any]] = [{}, twice, {"old_logps": "sampler"}, {"num_mini_batches": 2}]
    for options in cases:
        loss = LossConfig(**options)
        learner = make_learner(loss)
        learner._dlogp_limit = 0.5
        before = {n: p.detach().clone() for n, p in learner.model.named_parameters()}
        with pytest.raises(Disagreement, match="on the sampled tokens"):
            learner.step(plan_updates(groups, run_config(loss), step=0))
        assert all(torch.equal(p, before[n]) for n, p in learner.model.named_parameters())


def test_dead_rollouts_are_laid_out_where_a_kl_moves_them(groups: list[Group]) -> None:
    for rollout in groups[0].rollouts:
        rollout.advantage = 0.0

    def terms(loss: LossConfig) -> int:
        updates = plan_updates(groups, run_config(loss), step=0)
        return sum(len(b.row_N) for u in updates for b in u.batches)

    alive = sum(r.num_sampled for r in groups[1].rollouts)
    every = sum(r.num_sampled for g in groups for r in g.rollouts)
    assert terms(LossConfig()) == alive
    assert terms(LossConfig(beta=0.1)) == every
    assert terms(LossConfig(entropy_coef=0.1)) == every
    groups[0].rollouts[0].status = Status.INFRA_ERROR
    assert terms(LossConfig(beta=0.1)) == every - groups[0].rollouts[0].num_sampled


def test_mini_batches_are_a_function_of_seed_and_step(groups: list[Group]) -> None:
    loss = LossConfig(num_mini_batches=2)
    many = [
        Group(task=TASK, rollouts=[replace(r, advantage=k + 1.0) for r in groups[0].rollouts])
        for k in range(7)
    ]

    def plan(step: int) -> list[set[float]]:
        updates = plan_updates(many, run_config(loss), step=step)
        assert [u.num_samples for u in updates] == [12, 9]
        shares = [set(np.concatenate([b.advantage_N for b in u.batches]).tolist()) for u in updates]
        assert sorted(x for share in shares for x in share) == [1, 2, 3, 4, 5, 6, 7]
        return shares

    assert plan(3) == plan(3)
    assert len({str(plan(step)) for step in range(8)}) > 1
    other = run_config(loss).model_copy(update={"seed": 1})
    orders = [
        [
            [b.advantage_N.tolist() for b in update.batches]
            for config in (run_config(loss), other)
            for update in plan_updates(many, config, step=step)
        ]
        for step in range(4)
    ]
    assert any(order[:2] != order[2:] for order in orders), "another seed, another order"


# Adapters


def test_an_adapter_is_all_that_moves_and_is_published_merged(
    make_learner: Callable[..., Learner], tiny_model: Path, groups: list[Group]
) -> None:
    learner = make_learner(lora={"rank": 4, "alpha": 8.0}, learning_rate=1e-2)
    engine: Any = learner._engine
    learner.publish()
    base = oracle_model(tiny_model).state_dict()
    for name, tensor in engine.weights.items():
        assert torch.equal(tensor, base[name]), "B = 0: nothing is changed yet"
    assert len(engine.weights) == 14, "all linear layers of both blocks"
    for _ in range(2):
        learner.step(plan_updates(groups, run_config(DAPO), step=0))
    learner.publish()
    merged = oracle_model(tiny_model)
    merged.load_state_dict(base | engine.weights)
    ids = groups[0].rollouts[0].token_ids
    whole = torch.from_numpy(ids.astype(np.int64))
    want = torch.log_softmax(merged(whole[None]).logits[0, :-1], -1).gather(1, whole[1:, None])
    np.testing.assert_allclose(learner.score(ids), want[:, 0].detach(), atol=1e-5)
    assert (
        engine.weights["model.layers.0.self_attn.q_proj.weight"]
        - base["model.layers.0.self_attn.q_proj.weight"]
    ).abs().max() > 1e-3
    trained = learner.describe()["trained_parameters"]
    assert (
        trained
        == sum(p.numel() for p in learner.trained)
        < 0.3 * sum(p.numel() for p in base.values())
    )


def test_an_adapters_kl_is_to_the_policy_without_it(
    make_learner: Callable[..., Learner], groups: list[Group]
) -> None:
    loss = LossConfig(beta=0.5)
    learner = make_learner(loss, lora={"rank": 4}, learning_rate=1e-2)
    assert learner._reference is None, "no second copy"
    updates = plan_updates(groups, run_config(loss), step=0)
    assert learner.step(updates)["ref_kl"] == pytest.approx(0.0, abs=1e-9)
    assert learner.step(updates)["ref_kl"] > 1e-4


def test_a_resumed_adapter_repeats_the_bits(
    make_learner: Callable[..., Learner], groups: list[Group], tmp_path: Path
) -> None:
    lora = {"rank": 2}
    learner = make_learner(lora=lora)
    updates = plan_updates(groups, run_config(DAPO), step=0)
    learner.step(updates)
    learner.save_model(tmp_path)
    learner.save_state(tmp_path / "state.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "state.pt",
    ]  # fmt: skip
    learner.step(updates)
    resumed = make_learner(lora=lora, adapter=tmp_path)
    resumed.load_state(tmp_path / "state.pt")
    assert resumed.step_count == 1
    resumed.step(updates)
    theirs = learner.adapter.tensors() if learner.adapter else {}
    ours = resumed.adapter.tensors() if resumed.adapter else {}
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    with pytest.raises(ValueError, match=r"adapter of rank 2 .* says 3"):
        make_learner(lora={"rank": 3}, adapter=tmp_path)
    with pytest.raises(ValueError, match=r"holds no adapter: adapter_config.json"):
        make_learner(lora=lora, adapter=tmp_path / "nothing")


def test_layers_that_are_not_there_get_no_adapter(make_learner: Callable[..., Learner]) -> None:
    with pytest.raises(ValueError, match=r"learner.lora.target_modules: .*nosuch"):
        make_learner(lora={"rank": 2, "target_modules": ("nosuch",)})


# Machinery


def test_checkpointed_layers_train_alike(
    make_learner: Callable[..., Learner], groups: list[Group]
) -> None:
    updates = plan_updates(groups, run_config(DAPO), step=0)
    plain, checkpointed = make_learner(), make_learner(gradient_checkpointing=True)
    assert plain.step(updates)["loss"] == checkpointed.step(updates)["loss"]
    for a, b in zip(plain.trained, checkpointed.trained, strict=True):
        assert torch.equal(a, b)


def test_an_offloaded_optimizer_trains_alike(
    make_learner: Callable[..., Learner], groups: list[Group]
) -> None:
    updates = plan_updates(groups, run_config(DAPO), step=0)
    plain, offloaded = make_learner(), make_learner(offload_optimizer=True)
    for _ in range(2):
        assert plain.step(updates)["loss"] == offloaded.step(updates)["loss"]
    assert all(p.grad is None for p in offloaded.trained), "nor do gradients wait on the device"


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"decay": "constant"}, [1.0] * 5),
        ({"decay": "linear", "final_learning_rate": 0.2}, [1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"decay": "cosine"}, [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0]),
        ({"decay": "cosine", "final_learning_rate": 0.5, "warmup_steps": 2},
         [0.5, 1.0, 1.0, 0.75, 0.5]),
        ({"decay": "linear", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0]),
    ],
)  # fmt: skip
def test_schedules(options: dict[str, Any], rates: list[float]) -> None:
    config = LearnerConfig(learning_rate=1.0, **options)
    assert [config.learning_rate_at(step, 4) for step in range(5)] == pytest.approx(rates)


def test_a_step_is_of_its_own_settings(
    make_learner: Callable[..., Learner], groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule's learning rate, the clipping asked for, only live updates, their tokens."""
    learner = make_learner(
        decay="linear", learning_rate=0.5, final_learning_rate=0.1, max_grad_norm=0.25
    )
    seen: list[Any] = []
    step = learner._optimizer.step

    def watched(*, max_grad_norm: float) -> float:
        seen.append((max_grad_norm, learner._optimizer.lr))
        return step(max_grad_norm=max_grad_norm)

    monkeypatch.setattr(learner._optimizer, "step", watched)
    (update,) = plan_updates(groups, run_config(DAPO), step=0)
    learner.step([])
    metrics = learner.step([replace(update, batches=[]), update])
    assert seen == [(0.25, pytest.approx(0.4))]
    assert metrics["learning_rate"] == pytest.approx(0.4)
    assert metrics["updates"] == 1
    assert metrics["packed_tokens"] == sum(len(b.input_ids_T) for b in update.batches)
    assert learner.step_count == 2


def test_the_mismatch_is_that_before_the_first_update(
    make_learner: Callable[..., Learner], groups: list[Group]
) -> None:
    """However often the batches are gone over."""
    once, thrice = (
        make_learner(loss).step(plan_updates(groups, run_config(loss), step=0))
        for loss in (
            LossConfig(old_logps="sampler"),
            LossConfig(old_logps="sampler", num_iterations=3),
        )
    )
    names = [name for name in once if name.startswith("mismatch_")]
    assert names
    assert {name: once[name] for name in names} == {name: thrice[name] for name in names}


def test_the_kl_is_to_the_reference_and_not_to_where_this_run_resumed(
    make_learner: Callable[..., Learner], groups: list[Group], tmp_path: Path
) -> None:
    loss = LossConfig(beta=0.1)
    updates = plan_updates(groups, run_config(loss), step=0)
    assert make_learner(loss).step(updates)["ref_kl"] == pytest.approx(0.0, abs=1e-9)
    other = make_model_dir(tmp_path / "other", seed=3)
    assert make_learner(loss, reference=other).step(updates)["ref_kl"] > 1e-3


def test_the_plan_follows_its_settings(groups: list[Group]) -> None:
    every = [r for group in groups for r in group.rollouts]
    # of each row nothing is computed from its last sampled token on: here that and two told tokens
    lengths = sum(len(r.token_ids) - 3 for r in every)
    loss = LossConfig(loss_type="dr_grpo")
    (update,) = plan_updates(groups, run_config(loss), step=0)
    budget = run_config(loss).rollout.max_sampled_tokens
    assert budget != run_config(loss).rollout.max_turn_tokens
    for batch in update.batches:
        np.testing.assert_allclose(batch.weight_N, 1 / (len(every) * budget), rtol=1e-6)
    assert len(update.batches) == 1
    assert len(update.batches[0].input_ids_T) < lengths
    (alone,) = plan_updates(groups, run_config(loss), step=0, share_prefixes=False)
    assert sum(len(b.input_ids_T) for b in alone.batches) == lengths
    small = run_config(loss).model_copy(update={"learner": LearnerConfig(max_tokens=40)})
    (many,) = plan_updates(groups, small, step=0)
    assert all(len(b.input_ids_T) <= 40 for b in many.batches)
    assert len(many.batches) > 1


@pytest.mark.parametrize("offload", [False, True])
def test_the_optimizers_state_waits_in_host_memory_between_steps(
    make_learner: Callable[..., Learner], groups: list[Group], monkeypatch: pytest.MonkeyPatch,
    offload: bool,
) -> None:  # fmt: skip
    learner = make_learner(offload_optimizer=offload)
    vars(learner)["device"] = "cpu:0"  # another name than the host's
    optimizer, seen = learner._optimizer, list[Any]()
    step = optimizer.step
    monkeypatch.setattr(optimizer, "to", lambda device: seen.append(device))

    def noted_step(**options: Any) -> float:
        seen.append("step")
        return step(**options)

    monkeypatch.setattr(optimizer, "step", noted_step)
    learner.step(plan_updates(groups, run_config(DAPO), step=0))
    assert seen == ["cpu:0", "step", "cpu"] if offload else ["cpu:0", "step"]
    kept = [p.grad is not None for p in learner.trained]
    assert not any(kept) if offload else all(kept)


def test_8_bit_moments_are_the_librarys(
    make_learner: Callable[..., Learner], groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitsandbytes needs a GPU; a module of its shape stands for it."""

    class AdamW8bit(torch.optim.AdamW):
        pass

    library: Any = SimpleNamespace(AdamW8bit=AdamW8bit)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(optim=library))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", library)
    made = make_optimizer(
        LearnerConfig(optimizer="adamw_8bit", learning_rate=0.5, weight_decay=0.1),
        [torch.zeros(3, requires_grad=True)],
    )
    assert type(made._adamw) is AdamW8bit
    (group,) = made._adamw.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.1)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ValueError, match="adamw_8bit' needs the package bitsandbytes"):
        make_optimizer(LearnerConfig(optimizer="adamw_8bit"), [torch.zeros(3, requires_grad=True)])


def test_8_bit_moments_need_a_gpu(make_learner: Callable[..., Learner]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="adamw_8bit' needs a CUDA device"):
        make_learner(optimizer="adamw_8bit")


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 half a zip"])
def test_an_unreadable_state_says_which_file(
    make_learner: Callable[..., Learner], tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "agentgrpo_state.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"agentgrpo_state\.pt"):
        make_learner().load_state(path)
    torch.save({"something": 1}, path)
    with pytest.raises(ValueError, match=r"agentgrpo_state\.pt cannot be read as the state"):
        make_learner().load_state(path)


def branched() -> list[Group]:
    """Two rollouts that share a turn, a third that shares nothing; and a group without branches."""

    def sampled(*ids: int) -> Segment:
        return Segment(np.array(ids, np.int32), np.full(len(ids), -1.0, np.float32))

    def played(*segments: Segment, reward: float) -> Rollout:
        prompt = Segment(np.array([5, 6, 7], np.int32))
        return Rollout(
            task=TASK, segments=[prompt, *segments], status=Status.COMPLETED,
            rewards={"answer": reward},
        )  # fmt: skip

    common, told = sampled(10, 11, 12), Segment(np.array([20, 21], np.int32))
    branches = [
        played(common, told, sampled(30, 31), reward=1.0),
        played(common, told, sampled(40), reward=0.0),
        played(sampled(50, 51), reward=0.5),
    ]
    others = [played(sampled(60), reward=1.0), played(sampled(70, 71), reward=0.0)]
    return [Group(task=TASK, rollouts=branches), Group(task=TASK, rollouts=others)]


def test_with_hard_credit_a_shared_turn_is_told_of_in_the_first_branch(tmp_path: Path) -> None:
    """What the learner made of the tokens reaches the rollouts that are recorded."""
    config = TrainConfig(model="m", out_dir=tmp_path, loss=LossConfig(branch_credit="hard"))
    groups = branched()
    for number, rollout in enumerate(r for g in groups for r in g.rollouts):
        rollout.advantage = 1.0 + number
    (update,) = plan_updates(groups, config, step=0)
    for batch in update.batches:
        update.take(
            batch.sample_N, batch.turn_N, -batch.target_N.astype(np.float32), batch.weight_N
        )
    told = [
        [None if logp is None else (-logp).tolist() for logp in r.learner_logprobs or ()]
        for g in groups
        for r in g.rollouts
    ]
    assert told == [
        [None, [10, 11, 12], None, [30, 31]],
        [None, None, None, [40]],
        [None, [50, 51]],
        [None, [60]],
        [None, [70, 71]],
    ]


@pytest.mark.parametrize("credit", ["soft", "hard"])
def test_S3_7_each_token_that_branches_share_enters_the_loss_once(credit: str) -> None:
    """With the mean of its branches' advantages; weights then count the unique sampled tokens."""
    loss: Any = {"branch_credit": credit, "scale_rewards": "none"}
    config = TrainConfig(model="m", out_dir=Path("x"), loss=LossConfig(**loss))
    groups = branched()
    assign_advantages(groups, config.loss)
    (update,) = plan_updates(groups, config, step=0)
    (batch,) = update.batches
    terms = list(zip(batch.target_N.tolist(), batch.advantage_N.tolist(), strict=True))
    shared = [advantage for token, advantage in terms if token in (10, 11, 12)]
    unique = 3 + 2 + 1 + 2 + 1 + 2
    assert sorted(batch.input_ids_T.tolist()).count(11) == 1  # laid out once in either case
    if credit == "soft":
        assert sorted(shared) == [-0.5] * 3 + [0.5] * 3
        assert batch.weight_N.tolist() == pytest.approx([1 / (unique + 3)] * len(terms))
        return
    assert shared == [0.0] * 3  # mean of 0.5 and -0.5
    assert {token: a for token, a in terms if token in (30, 31, 40)} == {30: 0.5, 31: 0.5, 40: -0.5}
    counted = batch.weight_N * unique
    assert counted.tolist() == pytest.approx([1.0] * len(terms))
    # the third rollout's terms have no advantage: it is left out of the batch, not of the count
    assert len(terms) == unique - 2
    assert [r.segments[1].sampled for r in groups[0].rollouts] == [True] * 3  # records stay whole

"""masked_grpo_loss against the oracle, from hidden states and from logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agentgrpo.kernels.checks import Backend
from agentgrpo.kernels.grpo_loss import grpo_loss
from agentgrpo.kernels.linear_logp import linear_logp
from agentgrpo.kernels.logp import logp
from agentgrpo.kernels.masked_grpo import masked_grpo_loss
from agentgrpo.kernels.objective import Objective
from tests.kernels.oracles import ORACLES, Sample, dense_logp, sample_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, L, H, V = 3, 6, 8, 21
LENGTHS = (4, 0, 6)
TIS = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None}


def make_batch() -> dict[str, Any]:
    gen = torch.Generator().manual_seed(0)

    def rand(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=gen) * scale

    mask = torch.zeros(B, L, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):  # a tool result sits inside the longest
        mask[row, :length] = True
    mask[2, 2:4] = False
    batch = {
        "hidden": rand(B, L, H), "head": rand(V, H, scale=0.4),
        "targets": torch.randint(V, (B, L), generator=gen), "advantages": rand(B),
        "ref_logp": rand(B, L, scale=0.3) - 3, "is_ratio": rand(B, L, scale=0.2).exp(),
        "mask": mask,
    }  # fmt: skip
    logits = batch["hidden"] @ batch["head"].T
    logp, _ = dense_logp(logits.view(-1, V), batch["targets"].view(-1))
    batch["old_logp"] = logp.view(B, L).float() + rand(B, L, scale=0.2)
    batch["sampler_logp"] = batch["old_logp"] - batch["is_ratio"].log()
    for name in ("hidden", "ref_logp", "old_logp", "sampler_logp", "is_ratio"):
        batch[name][~mask] = float("nan")
    batch["targets"][~mask] = -100
    return {name: x.to(DEVICE) for name, x in batch.items()}


def weights(loss_type: str, length: int) -> float:
    """The weight of one token of a sequence with this many trained tokens."""
    return ORACLES[loss_type].weight(max(length, 1), B, int(make_batch()["mask"].sum()), 10)


def oracle(
    batch: dict[str, Any], options: dict[str, Any], temperature: float = 1.0
) -> list[Tensor]:
    """(loss, d loss / d hidden, d loss / d head), computed on the CPU."""
    batch = {name: x.detach().cpu() for name, x in batch.items()}
    hidden = torch.where(batch["mask"][..., None], batch["hidden"], 0.0).double().requires_grad_()
    head = batch["head"].double().requires_grad_()
    losses = []
    for row in range(B):
        at = batch["mask"][row]
        logp, entropy = dense_logp(hidden[row][at] @ head.T, batch["targets"][row][at], temperature)
        ones = torch.ones_like(logp.detach())
        weight = ones * weights(options["loss_type"], len(ones))
        sample = Sample(
            logp=logp, old=batch["old_logp"][row][at].double(),
            advantage=ones * batch["advantages"][row], ref=batch["ref_logp"][row][at].double(),
            sampler=batch["sampler_logp"][row][at].double(), entropy=entropy, weight=weight,
            entropy_weight=1 / int(batch["mask"].sum()),
        )  # fmt: skip
        losses.append(sample_loss(sample, options, None, True))
    loss = torch.stack(losses).sum()
    return [x.to(DEVICE) for x in (loss.detach(), *torch.autograd.grad(loss, (hidden, head)))]


OPTIONS: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    "grpo kl": {"loss_type": "grpo", "beta": 0.1},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon_high": 0.28},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo", "beta": 0.04},
    "vespo": {"loss_type": "vespo"},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("source", ["hidden", "logits", "packed"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_one_call(source: str, name: str, backend: Backend) -> None:
    options = {**OPTIONS[name], **TIS}
    batch = make_batch()
    hidden, head = batch["hidden"].requires_grad_(), batch["head"].requires_grad_()
    common: dict[str, Any] = {
        key: batch[key]
        for key in ("old_logp", "ref_logp", "sampler_logp", "targets", "mask", "advantages")
    }
    first, second = (hidden, head) if source != "logits" else (hidden @ head.T, None)
    if source == "packed":
        first = hidden.reshape(B * L, H)
        common = {key: x.reshape(-1) for key, x in common.items()}
        rows = torch.arange(B, device=DEVICE).repeat_interleave(L)
        common |= {"sequence": rows, "num_sequences": B, "advantages": common["advantages"][rows]}
    loss, metrics = masked_grpo_loss(
        first, second, **common, objective=Objective(**options), max_completion_length=10,
        temperature=0.9, backend=backend,
    )  # fmt: skip
    grads = torch.autograd.grad(loss, (hidden, head) if source != "logits" else (hidden,))
    expected = oracle(batch, options, 0.9)
    torch.testing.assert_close(loss.detach().double(), expected[0], rtol=1e-5, atol=1e-6)
    at = batch["mask"]
    torch.testing.assert_close(grads[0][at].double(), expected[1][at], rtol=1e-5, atol=2e-6)
    if source != "logits":
        assert (grads[0][~at] == 0).all()
        torch.testing.assert_close(grads[1].double(), expected[2], rtol=1e-5, atol=2e-6)
    assert metrics["num_tokens"] == at.sum()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("source", ["hidden", "logits"])
def test_float64_equals_the_oracle(source: str, name: str) -> None:
    """But for the weights, which are made in fp32; what else is given may be of any precision."""
    batch, options = make_batch(), {**OPTIONS[name], **TIS}
    wide = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
    hidden, head = wide["hidden"].requires_grad_(), wide["head"]
    first, second = (hidden, head) if source == "hidden" else (hidden @ head.T, None)
    names = ("targets", "mask", "old_logp", "ref_logp", "sampler_logp")
    loss, _ = masked_grpo_loss(
        first, second, **{key: wide[key] for key in names}, advantages=batch["advantages"],
        objective=Objective(**options), max_completion_length=10, backend="torch",
    )  # fmt: skip
    assert loss.dtype == torch.float64
    (grad,) = torch.autograd.grad(loss, hidden)
    expected, at = oracle(batch, options), batch["mask"]
    torch.testing.assert_close(loss.detach(), expected[0], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(grad[at], expected[1][at], rtol=1e-7, atol=1e-7)


def test_without_old_logp_the_ratio_is_one() -> None:
    batch = make_batch()
    _, metrics = masked_grpo_loss(
        batch["hidden"],
        batch["head"],
        batch["targets"],
        batch["mask"],
        batch["advantages"],
        Objective(),
    )
    assert metrics["ratio_mean"] == metrics["ratio_max"] == 1


def test_given_weights_replace_the_computed_ones() -> None:
    batch = make_batch()
    names = ("head", "targets", "mask", "advantages")
    arguments = {"hidden_or_logits": batch["hidden"], **{name: batch[name] for name in names}}
    whole, _ = masked_grpo_loss(**arguments, objective=Objective())
    share = batch["mask"] / (2.0 * batch["mask"].sum())
    half, _ = masked_grpo_loss(**arguments, objective=Objective(), weights=share)
    torch.testing.assert_close(half * 2, whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"targets": torch.zeros(B, L - 1, dtype=torch.int64)},
            "targets: expected the shape of hidden_or_logits",
        ),
        ({"mask": torch.ones(B, L)}, "mask: expected bool"),
        ({"advantages": torch.ones(B, L + 1)}, "advantages: expected"),
        ({"old_logp": torch.ones(B)}, "old_logp: expected"),
        ({"weights": torch.ones(B, L, dtype=torch.int64)}, "weights: expected"),
        ({"sequence": torch.zeros(B, L, dtype=torch.int64)}, "num_sequences: needed with sequence"),
        (
            {"sequence": torch.full((B, L), 2), "num_sequences": 2, "weights": torch.ones(B, L)},
            r"sequence: expected ids in \[0, 2\), got 2 .. 2",
        ),
        (
            {"weights": torch.ones(B, L), "objective": Objective(entropy_coef=0.1)},
            "entropy_tokens: needed with weights, as entropy_coef is 0.1",
        ),
    ],
)
def test_invalid_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden_or_logits": torch.zeros(B, L, H), "head": torch.zeros(V, H),
        "targets": torch.zeros(B, L, dtype=torch.int64), "advantages": torch.zeros(B),
        "mask": torch.ones(B, L, dtype=torch.bool), "objective": Objective(), **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        masked_grpo_loss(**arguments)


def test_packed_batches_need_sequences() -> None:
    with pytest.raises(ValueError, match="sequence: needed for packed batches"):
        masked_grpo_loss(
            torch.zeros(4, H), torch.zeros(V, H), torch.zeros(4, dtype=torch.int64),
            torch.ones(4, dtype=torch.bool), torch.zeros(4), Objective(),
        )  # fmt: skip


@pytest.mark.parametrize("source", ["hidden", "logits", "logp"])
def test_second_derivative_is_refused(source: str) -> None:
    """What came out as zeros: the fused loss gives a gradient that depends on nothing."""
    x = torch.zeros(4, H, device=DEVICE, requires_grad=True)
    targets, ones = torch.zeros(4, dtype=torch.int64, device=DEVICE), torch.ones(4, device=DEVICE)
    if source == "hidden":
        value, _ = linear_logp(x, ones.new_ones(V, H), targets, targets)
    elif source == "logits":
        value, _ = logp(x, targets)
    else:
        old = x.detach()[:, 0]
        value, _ = grpo_loss(x[:, 0], old, ones, ones, Objective(), backend="triton")
    with pytest.raises(RuntimeError, match="create_graph: expected False"):
        torch.autograd.grad(value.sum(), x, create_graph=True)

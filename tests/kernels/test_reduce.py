"""Weights of a step, and metrics of several calls combined."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentgrpo.kernels.objective import LOSSES, NORMALISERS, LossType
from agentgrpo.kernels.reduce import combine_metrics, term_weights
from tests.kernels.oracles import ORACLES

SEQUENCE = torch.tensor([0, 0, 2, 0, 2, 1])
MASK = torch.tensor([True, True, True, False, True, False])


@pytest.mark.parametrize("loss_type", LOSSES)
def test_weights(loss_type: str) -> None:
    """Five samples: 2, 0, 2 and (the two without terms) 0 trained tokens."""
    weights = term_weights(loss_type, SEQUENCE, 5, mask_N=MASK, max_completion_length=10)
    torch.testing.assert_close(weights, ORACLES[loss_type].weight(2, 5, 4, 10) * MASK)


@pytest.mark.parametrize(
    ("normaliser", "expected"),
    [("sequence_mean", 1 / 10), ("token_mean", 1 / 4), ("budget", 1 / 50), ("sequence_sum", 1 / 5)],
)
def test_custom_loss_uses_its_normaliser(normaliser: Any, expected: float) -> None:
    own = LossType(term="clipped", normaliser=normaliser)
    weights = term_weights(own, SEQUENCE, 5, mask_N=MASK, max_completion_length=10)
    torch.testing.assert_close(weights, expected * MASK)
    assert normaliser in NORMALISERS


def test_share_of_tokens_divides_the_step() -> None:
    """Where an update is a part of what was sampled: three losses divide by it, as in TRL."""
    of_step = {name for name, loss in LOSSES.items() if loss.normaliser == "step_token_mean"}
    assert of_step == {"dapo", "cispo", "vespo"}
    for loss_type in LOSSES:
        plain = term_weights(loss_type, SEQUENCE, 5, mask_N=MASK, max_completion_length=10)
        for share in (8.0, 0.0, torch.tensor(8)):
            weights = term_weights(
                loss_type, SEQUENCE, 5, mask_N=MASK, max_completion_length=10,
                share_of_tokens=share,
            )  # fmt: skip
            expected = MASK / max(float(share), 1) if loss_type in of_step else plain
            torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_untrained_batch_gives_zero_weights(loss_type: str) -> None:
    weights = term_weights(
        loss_type, SEQUENCE, 3, mask_N=torch.zeros_like(MASK), max_completion_length=4
    )
    assert torch.equal(weights, torch.zeros(6))


def test_sequence_mean_weights_short_sequences_more() -> None:
    weights = term_weights("grpo", torch.tensor([0, 1, 1, 1]), 2)
    torch.testing.assert_close(weights, torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6]))


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="max_completion_length: the normaliser 'budget'"):
        term_weights("dr_grpo", SEQUENCE, 3)
    with pytest.raises(ValueError, match="loss_type: expected one of grpo"):
        term_weights("ppo", SEQUENCE, 3)
    with pytest.raises(ValueError, match="mask_N: expected bool"):
        term_weights("dapo", SEQUENCE, 3, mask_N=torch.ones(6))
    with pytest.raises(ValueError, match=r"sequence_N: expected ids in \[0, 2\)"):
        term_weights("grpo", SEQUENCE, 2)


def part(tokens: int, ratio: float, largest: float, **more: float) -> dict[str, torch.Tensor]:
    values = {"num_tokens": tokens, "ratio_mean": ratio, "ratio_max": largest, **more}
    return {name: torch.tensor(value) for name, value in values.items()}


def test_means_are_weighted_by_tokens_and_maxima_are_maxima() -> None:
    combined = combine_metrics([part(3, 1.0, 5.0), part(1, 2.0, 4.0), part(0, 0.0, 0.0)])
    assert combined == {"num_tokens": 4.0, "ratio_mean": 1.25, "ratio_max": 5.0}


def test_empty_parts_give_empty_metrics() -> None:
    assert combine_metrics([]) == {}
    assert combine_metrics([part(0, 0.0, 0.0)]) == {}

"""Weights that turn the loss of a step into a mean, and metrics of several calls combined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .checks import check_sequences, check_tensor
from .objective import NORMALISERS, LossType, loss_of

Metrics = dict[str, Tensor]


def term_weights(
    loss_type: str | LossType,
    sequence_N: Tensor,
    num_sequences: int,
    *,
    mask_N: Tensor | None = None,
    max_completion_length: int | None = None,
    share_of_tokens: Tensor | float | None = None,
) -> Tensor:
    """weight_N of grpo_loss for all terms of an optimizer update, independent of micro-batches.

    By the loss's normaliser (objective.NORMALISERS), with m the trained tokens of a sequence and B
    = num_sequences:

        sequence_mean    1 / (m B)    the mean over sequences of their token means
        token_mean       1 / sum m    the mean over tokens
        step_token_mean  1 / share_of_tokens
        budget           1 / (B max_completion_length)
        sequence_sum     1 / B        a long sequence counts for more

    TRL's bnpo takes sum m over the local micro-batch only; here it is the update's.

    Args:
        loss_type: A name of objective.LOSSES, or a LossType.
        sequence_N: [N] int64 in [0, num_sequences).
        num_sequences: B, samples of the update (all ranks), including those without a trained
            token.
        mask_N: [N] bool; terms where it is False get weight 0 and are not counted.
        max_completion_length: Token budget of a sample; needed by the normaliser "budget".
        share_of_tokens: Trained tokens of all samples of the step divided by its number of updates
            (TRL's num_items_in_batch, for dapo, cispo and vespo). None: there is one update.

    Returns:
        [N] fp32.

    Raises:
        ValueError: Unknown loss_type, a budget without max_completion_length or, on CPU, a
            sequence_N out of range.
    """
    if mask_N is None:
        mask_N = torch.ones_like(sequence_N, dtype=torch.bool)
    check_tensor("mask_N", mask_N, tuple(sequence_N.shape), (torch.bool,), sequence_N)
    normaliser = loss_of(loss_type).normaliser
    if normaliser == "budget" and not max_completion_length:
        raise ValueError(
            "max_completion_length: the normaliser 'budget' (dr_grpo) divides by it, expected a "
            f"positive number, got {max_completion_length}"
        )
    counted, samples = mask_N.float(), max(num_sequences, 1)
    sequence_N = torch.where(mask_N, sequence_N, 0)
    check_sequences("sequence_N", sequence_N, samples)
    length_S = counted.new_zeros(samples).index_add_(0, sequence_N, counted)
    lengths, tokens = length_S[sequence_N].clamp(min=1), counted.sum().clamp(min=1)
    share = tokens if share_of_tokens is None else torch.as_tensor(share_of_tokens).clamp(min=1)
    weight: Tensor | float = NORMALISERS[normaliser](
        lengths, samples, tokens, share.to(counted.device), max_completion_length or 1
    )
    return counted * weight


def combine_metrics(parts: Sequence[Metrics]) -> dict[str, float]:
    """Combine the metrics of several calls: the maximum of *_max, the token-weighted mean of the
    others.

    One transfer from the device. Empty if no call had a token.
    """
    keys = sorted({key for part in parts for key in part})
    counted = [part for part in _floats(parts, keys) if part["num_tokens"]]
    total = sum(part["num_tokens"] for part in counted)
    combined = {}
    for key in keys if counted else []:
        values = [part[key] for part in counted]
        if key == "num_tokens":
            combined[key] = total
        elif key.endswith("_max"):
            combined[key] = max(values)
        else:
            combined[key] = sum(part[key] * part["num_tokens"] for part in counted) / total
    return combined


def _floats(parts: Sequence[Metrics], keys: Iterable[str]) -> list[dict[str, float]]:
    if not parts:
        return []
    zero = parts[0]["num_tokens"].new_zeros(())
    rows = [torch.stack([part.get(key, zero).double() for key in keys]) for part in parts]
    return [dict(zip(keys, row, strict=True)) for row in torch.stack(rows).tolist()]

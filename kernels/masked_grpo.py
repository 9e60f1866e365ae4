"""From a model's output to the loss in one call, for other trainers.

Padded batches ([B, L], one sample per row) or packed ones ([T] with sequence ids); hidden states
and the LM head, or logits. Only the positions of the mask are projected, read and averaged over.
docs/kernels.md shows its use in TRL, verl and a plain loop.

Shape suffixes: B samples, L positions, T packed positions, N trained positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import Backend, check_sequences, check_tensor
from .grpo_loss import grpo_loss
from .linear_logp import linear_logp
from .logp import logp
from .objective import Objective
from .reduce import Metrics, term_weights
from .rows import working_dtype

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def masked_grpo_loss(
    hidden_or_logits: Tensor,
    head: Tensor | None,
    targets: Tensor,
    mask: Tensor,
    advantages: Tensor,
    objective: Objective,
    *,
    bias: Tensor | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    sampler_logp: Tensor | None = None,
    weights: Tensor | None = None,
    sequence: Tensor | None = None,
    num_sequences: int | None = None,
    max_completion_length: int | None = None,
    entropy_tokens: Tensor | float | None = None,
    entropy_threshold: Tensor | float | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logits_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
    inplace_backward: bool = False,
) -> tuple[Tensor, Metrics]:
    """The objective over the masked positions of a batch.

    Position t predicts targets[t]: shift by one before the call, as for any language-model loss
    (hidden[:, :-1] with ids[:, 1:]).

    Args:
        hidden_or_logits: With a head, hidden states after the final norm, [B, L, H] or [T, H];
            without, logits, [B, L, V] or [T, V]. fp32/bf16/fp16; the torch backend supports fp64
            too, and computes the loss in it.
        head: [V, H], or None if logits are given.
        targets: int64, [B, L] or [T].
        mask: bool, like targets: True where the policy sampled the target. Elsewhere all inputs may
            hold anything, NaN included.
        advantages: Float, like targets, or [B].
        objective: The loss and its options.
        bias: [V], the head's bias.
        old_logp: Float, like targets, nats; see grpo_loss. None: the policy's own, detached (one
            update per batch).
        ref_logp: Float, like targets, nats; see grpo_loss.
        sampler_logp: Float, like targets, nats; see grpo_loss.
        weights: Float, like targets: each position's share in the loss of the update (term_weights
            over the whole update). None: this batch is the whole update.
        sequence: int64, like targets, in [0, num_sequences): the sample of each position. None: its
            row of [B, L].
        num_sequences: Samples of the step; needed with sequence.
        max_completion_length: Token budget, for dr_grpo's weights.
        entropy_tokens: See grpo_loss; needed with weights if the objective has an entropy_coef.
        entropy_threshold: See grpo_loss.
        temperature: See linear_logp.
        softcap: See linear_logp.
        logits_dtype: See linear_logp.
        backend: See checks.backend_for.
        inplace_backward: For given logits, see logp.

    Returns:
        (loss, metrics) of grpo_loss.

    Raises:
        ValueError: An argument is not as above; the message names it.
    """
    if targets.ndim not in (1, 2) or hidden_or_logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets: expected the shape of hidden_or_logits without its last dimension, "
            f"{tuple(hidden_or_logits.shape[:-1])}, got {tuple(targets.shape)}"
        )
    check_tensor("mask", mask, tuple(targets.shape), (torch.bool,), hidden_or_logits)
    sequence_T, num_sequences = _sequences(targets, sequence, num_sequences)
    rows = mask.reshape(-1).nonzero().squeeze(1)
    dtype = working_dtype(hidden_or_logits.dtype)

    def terms(name: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        check_tensor(name, x, tuple(targets.shape), FLOATS, hidden_or_logits)
        return x.reshape(-1)[rows].to(dtype)

    if advantages.ndim == 1 and targets.ndim == 2:
        advantages = advantages[:, None].expand(targets.shape)
    advantage_N = terms("advantages", advantages)
    assert advantage_N is not None
    weight_N = terms("weights", weights)
    sequence_N = sequence_T[rows]
    check_sequences("sequence", sequence_N, num_sequences)
    if weight_N is not None and objective.entropy_coef and entropy_tokens is None:
        raise ValueError(
            f"entropy_tokens: needed with weights, as entropy_coef is {objective.entropy_coef}: "
            "how many tokens of the whole update are trained"
        )
    if weight_N is None:
        weight_N = term_weights(
            objective.row, sequence_N, num_sequences,
            max_completion_length=max_completion_length,
        ).to(dtype)  # fmt: skip
    if head is not None:
        logp_N, entropy_N = linear_logp(
            hidden_or_logits.reshape(-1, hidden_or_logits.shape[-1]), head, rows,
            targets.reshape(-1)[rows], bias_V=bias, temperature=temperature, softcap=softcap,
            logits_dtype=logits_dtype, backend=backend,
        )  # fmt: skip
    else:
        logp_all, entropy_all = logp(
            hidden_or_logits, targets, mask, temperature=temperature, softcap=softcap,
            backend=backend, inplace_backward=inplace_backward,
        )  # fmt: skip
        logp_N, entropy_N = logp_all.reshape(-1)[rows], entropy_all.reshape(-1)[rows]
    old_logp_N = terms("old_logp", old_logp)
    return grpo_loss(
        logp_N, logp_N.detach() if old_logp_N is None else old_logp_N, advantage_N, weight_N,
        objective, ref_logp_N=terms("ref_logp", ref_logp),
        sampler_logp_N=terms("sampler_logp", sampler_logp), entropy_N=entropy_N,
        entropy_tokens=entropy_tokens, entropy_threshold=entropy_threshold, sequence_N=sequence_N,
        num_sequences=num_sequences, backend=backend,
    )  # fmt: skip


def _sequences(
    targets: Tensor, sequence: Tensor | None, num_sequences: int | None
) -> tuple[Tensor, int]:
    if sequence is not None:
        check_tensor("sequence", sequence, tuple(targets.shape), (torch.int64,), targets)
        if num_sequences is None:
            raise ValueError("num_sequences: needed with sequence")
        return sequence.reshape(-1), num_sequences
    if targets.ndim == 1:
        raise ValueError("sequence: needed for packed batches, to tell the samples apart")
    rows = torch.arange(len(targets), device=targets.device)
    return rows[:, None].expand(targets.shape).reshape(-1), len(targets)

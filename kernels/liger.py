"""Liger-Kernel's two GRPO entries with its argument order and defaults, over our kernels.

    from liger_kernel.transformers.grpo_loss import triton_grpo_loss         ->
    from agentgrpo_kernels.liger import triton_grpo_loss
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss           ->
    from agentgrpo_kernels.liger import LigerFusedLinearGRPOLoss

A test compares both with Liger 0.8.5: values agree but for luspo, whose reduction here is TRL's
(Liger weighs padding). cispo, sapo and vespo ignore nothing; what has no meaning here (chunk_size,
compiled) is accepted and does nothing. There is no "sequence" level for cispo, sapo and vespo in
Liger; sapo and cispo have it here.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from .grpo_loss import grpo_loss, prepare
from .grpo_reference import clipped_terms, torch_terms
from .linear_logp import linear_logp
from .logp import logp
from .objective import Level, Objective
from .reduce import term_weights


def triton_grpo_loss(
    logits: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = True,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: Level = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: Tensor | float | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> Any:
    """Loss from logits [B, L + 1, V], whose last position is not used; see Liger's docstring.

    Returns:
        reduce=True: (loss, [kl_mean if beta, clip_ratio]); reduce=False: (per_token_loss,
        per_token_kl or None, is_clipped), each [B, L].
    """
    objective = _objective(locals(), epsilon=eps_low, epsilon_high=eps_high)
    mask = _bool_mask(completion_mask, completion_ids)
    logp_BL, _ = logp(
        logits[:, :-1], completion_ids, mask, temperature=temperature, inplace_backward=inplace
    )
    terms = _Terms(objective, logp_BL, mask, advantages, old_logp, ref_logp, vllm_is_ratio)
    if not reduce:
        return terms.per_token()
    loss, kl, clipped = terms.reduced(max_completion_length, num_items_in_batch)
    return loss, ([kl] if beta else []) + [clipped]


class LigerFusedLinearGRPOLoss(torch.nn.Module):
    """Loss from hidden states and LM head; only unmasked positions are projected."""

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: Level = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        self.objective = _objective(locals(), epsilon=epsilon_low)
        super().__init__()
        self.temperature = temperature
        self.use_ref_model = use_ref_model
        self.max_completion_length = max_completion_length

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(loss, (kl_mean if beta, clip_ratio))."""
        mask = _bool_mask(attention_mask, selected_token_ids)

        def score(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            rows = mask.reshape(-1).nonzero().squeeze(1)
            logp_N, _ = linear_logp(
                hidden.reshape(-1, hidden.shape[-1]), weight, rows,
                selected_token_ids.reshape(-1)[rows], bias_V=bias, temperature=self.temperature,
            )  # fmt: skip
            return logp_N.new_zeros(mask.numel()).index_copy(0, rows, logp_N).view(mask.shape)

        beta = self.objective.beta
        logp_BL = score(_input, lin_weight, bias)
        if not self.use_ref_model:  # as in Liger: a KL of 0, without a gradient
            ref_per_token_logps = logp_BL.detach()
        elif beta and ref_per_token_logps is None:
            if ref_input is None or ref_weight is None:
                raise ValueError(
                    "ref_per_token_logps, or ref_input and ref_weight: needed, as beta is set"
                )
            with torch.no_grad():
                ref_per_token_logps = score(ref_input, ref_weight, ref_bias)
        terms = _Terms(
            self.objective, logp_BL, mask, advantages, old_per_token_logps, ref_per_token_logps,
            vllm_is_ratio,
        )  # fmt: skip
        loss, kl, clipped = terms.reduced(self.max_completion_length, num_items_in_batch)
        return loss, (kl, clipped) if beta else (clipped,)


def _objective(given: dict[str, Any], **more: Any) -> Objective:
    """Of the arguments of an entry, those that are options; Liger's ratios come bounded already."""
    options = {field.name: given[field.name] for field in fields(Objective) if field.name in given}
    return Objective(**{**options, **more, "vllm_importance_sampling_clip_max": None})


def _bool_mask(mask: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask != 0


class _Terms:
    """A padded batch as grpo_loss's flat arguments."""

    def __init__(
        self, objective: Objective, logp_BL: Tensor, mask: Tensor, advantages: Tensor,
        old_logp: Tensor | None, ref_logp: Tensor | None, is_ratio: Tensor | None,
    ) -> None:  # fmt: skip
        self.shape = logp_BL.shape
        old = logp_BL.detach() if old_logp is None else old_logp
        advantage = advantages.float()
        if advantage.ndim == 1:
            advantage = advantage[:, None].expand(self.shape)
        sampler = None
        if is_ratio is not None:
            is_ratio = is_ratio.float().reshape(self.shape[0], -1)
            if (
                "correction" not in objective.row.folds
            ):  # the policy loss is linear in A >= 0 and in A < 0
                advantage = advantage * is_ratio
            elif is_ratio.shape == self.shape:
                sampler = old - is_ratio.clamp(min=1e-8).log()
            else:
                raise ValueError(
                    f"vllm_is_ratio: {objective.loss_type} needs one per token, "
                    f"{tuple(self.shape)}, got {tuple(is_ratio.shape)}"
                )
        rows = torch.arange(self.shape[0], device=mask.device)
        self.objective = objective
        self.mask = mask.reshape(-1)
        self.sequence = rows[:, None].expand(self.shape).reshape(-1)
        self.logp, self.old, self.advantage = (x.reshape(-1) for x in (logp_BL, old, advantage))
        self.ref = None if ref_logp is None else ref_logp.reshape(-1)
        self.sampler = None if sampler is None else sampler.reshape(-1)

    def weights(self, max_length: int | None, num_items: Tensor | float | None) -> Tensor:
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        return term_weights(
            self.objective.row, self.sequence, self.shape[0], mask_N=self.mask,
            max_completion_length=max_length or self.shape[1],
            share_of_tokens=None if num_items is None else num_items / ranks,
        )  # fmt: skip

    def reduced(
        self, max_length: int | None, num_items: Tensor | float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, mean KL, clipped fraction)."""
        loss, metrics = grpo_loss(
            self.logp, self.old, self.advantage, self.weights(max_length, num_items),
            self.objective, mask_N=self.mask, ref_logp_N=self.ref, sampler_logp_N=self.sampler,
            sequence_N=self.sequence, num_sequences=self.shape[0],
        )  # fmt: skip
        clipped = metrics["clip_low_fraction"] + metrics["clip_high_fraction"]
        return loss, metrics.get("ref_kl", torch.zeros_like(clipped)), clipped

    def per_token(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """(loss, KL, is_clipped), [B, L]."""
        batch = prepare(
            self.objective, self.logp, self.old, self.advantage, torch.ones_like(self.logp),
            mask_N=self.mask, ref_logp_N=self.ref, sampler_logp_N=self.sampler,
            sequence_N=self.sequence, num_sequences=self.shape[0],
        )  # fmt: skip
        terms = torch_terms(batch, self.objective)
        below, above = clipped_terms(batch, self.objective, terms.ratio)
        kl = None if terms.kl is None else torch.where(batch.mask, terms.kl, 0.0).view(self.shape)
        loss = torch.where(batch.mask, terms.loss, 0.0).view(self.shape)
        return loss, kl, ((below | above) & batch.mask).float().view(self.shape)

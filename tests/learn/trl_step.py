"""One optimizer update computed by TRL's own code, from numbers instead of a model.

GRPOTrainer._compute_loss runs unchanged on a stand-in trainer whose model returns given
log-probabilities and entropies. The sampler's importance ratio, which TRL computes during
generation, is re-implemented here.
"""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Ranks:
    """accelerate's interface to the loss, with one process."""

    num_processes = 1
    sync_gradients = False

    def gather(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x

    def pad_across_processes(self, x: Tensor, **_: Any) -> Tensor:
        return x

    gather_for_metrics = gather


def trl_loss(
    settings: dict[str, Any],
    batch: dict[str, Tensor],
    *,
    tokens_sampled: int,
    updates: int = 1,
    trainer: Any = None,
) -> Tensor:
    """TRL's loss of an update.

    Args:
        settings: of GRPOConfig.
        batch: logp, old, sampler, ref, entropy [B, T]; mask [B, T], 0 for padding, observations and
            masked rollouts; advantages [B].
        tokens_sampled: mask.sum() of all that was generated together.
        updates: that are made of it.
        trainer: None: GRPOTrainer.
    """
    trl: Any = importlib.import_module("trl")
    args = trl.GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[], **settings)
    args.steps_per_generation = updates
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    self = SimpleNamespace(**vars(args), args=args, model=SimpleNamespace(training=True))
    self.use_vllm, self.aux_loss_enabled, self.accelerator = True, False, Ranks()
    self.epsilon_low, self.epsilon_high = args.epsilon, high
    self.current_gradient_accumulation_steps = 1
    self._entropy_bonus_enabled = args.entropy_coef != 0
    self._metrics = {"train": defaultdict(list)}
    kind: Any = trainer or trl.GRPOTrainer
    for name in ("get_off_policy_mask", "get_gamma_weights"):
        setattr(self, name, getattr(kind, name))
    self.get_high_entropy_mask = partial(kind.get_high_entropy_mask, self)
    mask = batch["mask"]
    self._get_per_token_logps_and_entropies = lambda *_, **__: (
        batch["logp"], batch["entropy"], None,
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1), "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.zeros_like(mask), "completion_mask": mask,
        "advantages": batch["advantages"], "old_per_token_logps": batch["old"],
        "sampling_per_token_logps": batch["sampler"], "ref_per_token_logps": batch["ref"],
        "num_items_in_batch": torch.tensor(tokens_sampled),
    }  # fmt: skip
    if args.vllm_importance_sampling_correction:
        inputs["importance_sampling_ratio"] = sampler_ratio(batch, args)
    loss: Tensor = kind._compute_loss(self, None, inputs)
    return loss


def sampler_ratio(batch: dict[str, Tensor], args: Any) -> Tensor:
    """[B, T] or [B, 1], as in GRPOTrainer._generate_and_score_completions."""
    gap = torch.nan_to_num((batch["old"] - batch["sampler"]) * batch["mask"], nan=0.0)
    if args.vllm_importance_sampling_mode.startswith("sequence"):
        gap = gap.sum(-1, keepdim=True)
    ratio = gap.exp()
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if args.vllm_importance_sampling_mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)

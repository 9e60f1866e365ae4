"""The policy model, its optimizer, and one step on packed rollouts. Knows no algorithm by name:
it sees, per loss term, a row, a target, an advantage, a weight and the sampler's log-probability.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from agentgrpo.config import LearnerConfig, LossConfig
from agentgrpo.engine import Engine
from agentgrpo.kernels.grpo_loss import grpo_loss
from agentgrpo.kernels.linear_logp import linear_logp
from agentgrpo.optimizer import MasterAdamW
from agentgrpo.types import Float32, Int32, Metrics, PackedBatch
from agentgrpo.weights import CannotShare, install, parameters_on_meta, views_for


class Learner:
    """The trained side of the one policy.

    Args:
        model: Hugging Face directory or name, the one the engine was built from.
        engine: the sampler, whose weights are shared where they can be.
        config, loss: settings; total_steps is what the learning rate decays over.
        temperature: the rollouts' sampling temperature, which the log-probabilities are taken at.
        weights: "auto", "shared" or "copy"; see EngineConfig.

    Raises:
        ValueError: weights="shared" where sharing is impossible, with the reason; or more
            trained_layers than the model has.
    """

    def __init__(
        self,
        model: str | Path,
        engine: Engine,
        config: LearnerConfig,
        loss: LossConfig,
        *,
        total_steps: int,
        temperature: float,
        weights: str = "auto",
    ) -> None:
        self._engine, self._config, self._loss = engine, config, loss
        self._total_steps, self._temperature = total_steps, temperature
        self.device = engine.device
        self._threads = config.num_threads or torch.get_num_threads()
        self.weights, self.model = _policy(model, engine, weights)
        self.trained = _freeze_all_but(self.model, config.trained_layers)
        self._optimizer = MasterAdamW(
            self.trained, lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self.step_count = 0

    def describe(self) -> dict[str, Any]:
        """What was chosen, for the record."""
        return {
            "weights": self.weights,
            "device": self.device,
            "dtype": self._engine.dtype,
            "trained_parameters": sum(p.numel() for p in self.trained),
            "all_parameters": sum(p.numel() for p in self.model.parameters()),
            "loss_kernel": "triton" if self.device == "cuda" else "torch reference",
        }

    def publish(self) -> Metrics:
        """Make the sampler's policy this one: a copy unless shared, then forget its cached keys."""
        started = time.perf_counter()
        if self.weights == "copy":
            self._engine.load_weights(self.model.named_parameters())
        self._engine.reset_prefix_cache()
        return {"publish_s": time.perf_counter() - started}

    @torch.no_grad()
    def score(self, token_ids: Int32) -> Float32:
        """Log-probability at temperature 1 of token_ids[1:], each given all before it; [T-1] fp32."""
        ids = torch.from_numpy(token_ids.astype(np.int64)).to(self.device)
        hidden = self._decoder()(input_ids=ids[None]).last_hidden_state[0]
        rows = torch.arange(len(ids) - 1, device=self.device)
        logp, _ = linear_logp(hidden, self._head(), rows, ids[1:])
        return logp.cpu().numpy()

    def step(self, batches: Sequence[PackedBatch]) -> Metrics:
        """One optimizer step on all batches together; their weights are the normaliser."""
        started = time.perf_counter()
        torch.set_num_threads(self._threads)
        totals: dict[str, float] = {}
        loss = 0.0
        self._optimizer.zero_grad()
        for batch in batches:
            value, metrics = self._loss_of(batch)
            value.backward()  # type: ignore[no-untyped-call]
            loss += value.item()
            _merge(totals, metrics, share=len(batch.target_N))
        self._optimizer.set_lr(self.learning_rate)
        grad_norm = self._optimizer.step(max_grad_norm=self._config.max_grad_norm)
        self.step_count += 1
        num_terms = sum(len(batch.target_N) for batch in batches)
        return {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": self._optimizer.lr,
            "trained_tokens": float(num_terms),
            "packed_tokens": float(sum(len(batch.input_ids_T) for batch in batches)),
            "seconds": time.perf_counter() - started,
            **{k: v if k.endswith("_max") else v / num_terms for k, v in totals.items()},
        }

    @property
    def learning_rate(self) -> float:
        """Of the step about to be taken."""
        c = self._config
        if c.decay == "constant":
            return c.learning_rate
        left = max(0.0, 1 - self.step_count / self._total_steps)
        return c.final_learning_rate + (c.learning_rate - c.final_learning_rate) * left

    def _loss_of(self, batch: PackedBatch) -> tuple[Tensor, dict[str, float]]:
        def on_device(array: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(array).to(self.device, dtype)

        tout = on_device(batch.tout_T, torch.int64)
        at = torch.arange(len(tout), device=self.device)
        # query q (rows) sees key k (columns) iff k <= q < tout[k]
        mask = (at[None, :] <= at[:, None]) & (at[:, None] < tout[None, :])
        hidden = self._decoder()(
            input_ids=on_device(batch.input_ids_T, torch.int64)[None],
            position_ids=on_device(batch.positions_T, torch.int64)[None],
            attention_mask=mask[None, None],
        ).last_hidden_state[0]
        logp, entropy = linear_logp(
            hidden,
            self._head(),
            on_device(batch.row_N, torch.int64),
            on_device(batch.target_N, torch.int64),
            temperature=self._temperature,
        )
        return self._objective(logp, entropy, batch, on_device)

    def _decoder(self) -> Any:
        return self.model.get_decoder()

    def _head(self) -> Tensor:
        return self.model.get_output_embeddings().weight  # type: ignore[no-any-return]

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

from agentgrpo.agreement import require_agreement
from agentgrpo.config import LearnerConfig, LossConfig
from agentgrpo.engine import Engine
from agentgrpo.kernels.checks import backend_for
from agentgrpo.kernels.grpo_loss import grpo_loss
from agentgrpo.kernels.linear_logp import linear_logp
from agentgrpo.kernels.objective import Objective
from agentgrpo.kernels.reduce import Metrics as TermMetrics
from agentgrpo.kernels.reduce import combine_metrics
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
        dlogp_limit: largest |delta logp| in nats between the sampler's and the learner's view of a
            sampled token; above it step() refuses to update.

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
        dlogp_limit: float,
    ) -> None:
        self._engine, self._config = engine, config
        self._total_steps, self._temperature = total_steps, temperature
        self._dlogp_limit = dlogp_limit
        self._objective = _objective(loss)
        self.device = engine.device
        self.weights, self.model = _policy(model, engine, weights)
        self.trained = _freeze_all_but(self.model, config.trained_layers)
        self._optimizer = MasterAdamW(
            self.trained, lr=config.learning_rate, weight_decay=config.weight_decay
        )
        if self.weights == "shared":
            self.num_packed = engine.pack_frozen(self.trained)
        else:  # every weight is written to at each step
            self.num_packed = 0
            engine.unpack()
        self.step_count = 0

    def describe(self) -> dict[str, Any]:
        """What was chosen, for the record."""
        return {
            "weights": self.weights,
            "device": self.device,
            "dtype": self._engine.dtype,
            "packed_frozen_layers": self.num_packed,
            "trained_parameters": sum(p.numel() for p in self.trained),
            "all_parameters": sum(p.numel() for p in self.model.parameters()),
            "kernels": backend_for(torch.device(self.device)),
        }

    def publish(self) -> Metrics:
        """Make the sampler's policy this one: a copy unless shared, then forget its cached keys."""
        started = time.perf_counter()
        if self.weights != "shared":
            self._engine.load_weights(self._named())
        self._engine.reset_prefix_cache()
        return {"publish_s": time.perf_counter() - started}

    @torch.no_grad()
    def score(self, token_ids: Int32) -> Float32:
        """Log-probability at temperature 1 of token_ids[1:], each given all before; [T-1] fp32."""
        ids = torch.from_numpy(token_ids.astype(np.int64)).to(self.device)
        hidden = self._decoder()(input_ids=ids[None]).last_hidden_state[0]
        rows = torch.arange(len(ids) - 1, device=self.device)
        logp, _ = linear_logp(hidden, self._head(), rows, ids[1:])
        return logp.cpu().numpy()

    @property
    def vocab_size(self) -> int:
        """Ids the model knows."""
        return self._head().shape[0]

    def save_model(self, folder: Path) -> None:
        """Write the policy as a Hugging Face model directory (weights and config; no tokenizer)."""
        # cloned: fused q/k/v are slices of one tensor, which safetensors refuses to write
        state = {name: p.detach().to("cpu", copy=True) for name, p in self._named()}
        self.model.save_pretrained(folder, state_dict=state)

    def save_state(self, path: Path, **more: Any) -> None:
        """Write what a resumed run needs besides the weights: optimizer, step count, and `more`."""
        torch.save(
            {"optimizer": self._optimizer.state_dict(), "step": self.step_count, **more}, path
        )

    def load_state(self, path: Path) -> dict[str, Any]:
        """Restore what save_state() wrote (the weights came with the engine); returns `more`.

        Raises:
            ValueError: the file is of a run that trained other parameters.
        """
        state = torch.load(path, map_location=self.device, weights_only=True)
        try:
            self._optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise ValueError(
                f"{path} is of a run with other trained parameters: {error}"
            ) from error
        self.step_count = state["step"]
        return dict(state)

    def step(self, batches: Sequence[PackedBatch]) -> Metrics:
        """One optimizer step on all batches together; their weights are the normaliser.

        With no batches (no group had a gradient) the weights stay and the step still counts.

        Raises:
            Disagreement: the sampler saw another policy; nothing was updated.
            FloatingPointError: the gradient is not finite; nothing was updated.
        """
        started = time.perf_counter()
        self._optimizer.zero_grad()
        self._optimizer.set_lr(self.learning_rate)
        metrics: Metrics = {"learning_rate": self._optimizer.lr, "loss": 0.0, "grad_norm": 0.0}
        parts = []
        for batch in batches:
            loss, measured = self._loss_of(batch)
            loss.backward()
            metrics["loss"] += loss.item()
            parts.append(measured)
        metrics |= combine_metrics(parts)
        if batches:
            gap = metrics["sampler_gap_max"]
            require_agreement(gap, self._dlogp_limit, where="on the sampled tokens")
            metrics["grad_norm"] = self._optimizer.step(max_grad_norm=self._config.max_grad_norm)
        self.step_count += 1
        metrics["packed_tokens"] = float(sum(len(batch.input_ids_T) for batch in batches))
        metrics["seconds"] = time.perf_counter() - started
        return metrics

    @property
    def learning_rate(self) -> float:
        """Of the step about to be taken."""
        c = self._config
        if c.decay == "constant":
            return c.learning_rate
        left = max(0.0, 1 - self.step_count / self._total_steps)
        return c.final_learning_rate + (c.learning_rate - c.final_learning_rate) * left

    def _loss_of(self, batch: PackedBatch) -> tuple[Tensor, TermMetrics]:
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
        logp_N, entropy_N = linear_logp(
            hidden,
            self._head(),
            on_device(batch.row_N, torch.int64),
            on_device(batch.target_N, torch.int64),
            temperature=self._temperature,
        )
        loss, metrics = grpo_loss(
            logp_N,
            logp_N.detach(),  # one update per batch of rollouts: the old policy is this one
            on_device(batch.advantage_N, torch.float32),
            on_device(batch.weight_N, torch.float32),
            self._objective,
            sampler_logp_N=on_device(batch.old_logp_N, torch.float32),
            entropy_N=entropy_N.detach(),
        )
        return loss, metrics

    def _named(self) -> list[tuple[str, Tensor]]:
        return list(self.model.named_parameters())

    def _decoder(self) -> Any:
        return self.model.get_decoder()

    def _head(self) -> Tensor:
        return self.model.get_output_embeddings().weight  # type: ignore[no-any-return]


def _policy(model: str | Path, engine: Engine, weights: str) -> tuple[str, Any]:
    """The transformers model, on the engine's own tensors where the two can share them."""
    config = AutoConfig.from_pretrained(model)
    options = {"dtype": getattr(torch, engine.dtype), "attn_implementation": "sdpa"}
    if weights != "copy":
        with parameters_on_meta():
            policy: Any = AutoModelForCausalLM.from_config(config, **options)
        try:
            install(policy, views_for(engine.model, policy))
        except CannotShare as error:
            if weights == "shared":
                raise ValueError(
                    f"engine.weights = 'shared' is impossible here: {error}"
                ) from error
            return f"copy ({error})", _loaded(model, engine, options)
        return "shared", policy.to(engine.device).eval()
    return "copy", _loaded(model, engine, options)


def _loaded(model: str | Path, engine: Engine, options: dict[str, Any]) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, **options)
    return loaded.to(engine.device).eval()


def _freeze_all_but(model: Any, trained_layers: int | None) -> list[Tensor]:
    """Require gradients of the last layers only (None: of everything); returns those parameters."""
    if trained_layers is None:
        trained = list(model.parameters())
    else:
        layers = model.get_decoder().layers
        if trained_layers > len(layers):
            raise ValueError(
                f"learner.trained_layers must be at most {len(layers)}, got {trained_layers}"
            )
        trained = [p for layer in layers[-trained_layers:] for p in layer.parameters()]
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    return trained


def _objective(config: LossConfig) -> Objective:
    """The kernel's name for the config's options. The normaliser comes in as weights."""
    return Objective(
        loss_type=config.loss_type,
        vllm_importance_sampling_correction=config.mismatch_cap is not None,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=config.mismatch_cap or 1.0,
    )

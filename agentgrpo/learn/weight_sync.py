"""Weight sync: after each update the sampler gets the trained weights.

With shared tensors there is nothing to copy; an adapter is passed in memory; all else is copied in
place. Never through disk, HTTP or a second process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agentgrpo.config import LearnerConfig
from agentgrpo.engine.weights import CannotShare, InPlaceCopy, install, views_for
from agentgrpo.learn.policy import Policy, init_on_meta, load_model
from agentgrpo.support import parallel
from agentgrpo.types import Metrics

if TYPE_CHECKING:  # it imports vLLM, which fine-tuning does without
    from agentgrpo.engine.engine import Engine


class Publisher:
    """Makes the sampler's weights the policy's. The base class has no sampler (fine-tuning)."""

    about: Mapping[str, Any] = {}
    """Details for the run's record."""

    def publish(self) -> Metrics:
        """Make the sampler's weights the policy's, then drop its cached keys and values."""
        return {}


class SharedWeights(Publisher):
    """For an engine whose tensors the policy's parameters are views of: an update needs no copy.

    Also the base of the other ways to publish to an engine.
    """

    def __init__(self, engine: Engine, policy: Policy) -> None:
        self._engine, self._policy = engine, policy
        self.about: Mapping[str, Any] = self._prepare()

    def publish(self) -> Metrics:
        started = time.perf_counter()
        metrics = self._transfer()
        # cached keys and values come from the old weights: a rollout would mix two policies
        self._engine.reset_prefix_cache()
        return metrics | {"publish_s": time.perf_counter() - started}

    def _prepare(self) -> dict[str, Any]:
        return {"prepacked_layers": self._engine.prepack_frozen_linears(self._policy.trained)}

    def _transfer(self) -> Metrics:
        return {}


class CopiedWeights(SharedWeights):
    """The policy has its own tensors, which are copied into the engine's, a bucket at a time."""

    def _prepare(self) -> dict[str, Any]:
        self._engine.unpack()  # every step writes every weight
        self._copy = InPlaceCopy(self._engine.model, self._engine.load_weights)
        return {"prepacked_layers": 0}

    def _transfer(self) -> Metrics:
        started = time.perf_counter()
        copied = self._copy(self._policy.named_weights())
        self._engine.weights_loaded()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are only queued until here
        return {"publish_gb_per_s": copied / 1e9 / (time.perf_counter() - started)}


class ServedLora(SharedWeights):
    """The engine applies the policy's LoRA adapter itself, over weights that never change."""

    def _prepare(self) -> dict[str, Any]:
        packed = self._engine.prepack_frozen_linears(())
        return {"prepacked_layers": packed, "adapter": "served as it is"}

    def _transfer(self) -> Metrics:
        assert self._policy.adapter is not None
        self._engine.set_adapter(self._policy.adapter.tensors(), self._policy.adapter.config)
        return {}


def policy_on(
    engine: Engine,
    model: str | Path,
    config: LearnerConfig,
    *,
    weights: str = "auto",
    adapter: Path | None = None,
) -> tuple[Policy, Publisher]:
    """The policy, on the engine's own tensors where possible, and its publisher.

    ValueError: weights="shared" where that is impossible, with the reason; or as in Policy.
    """
    if parallel.world_size() > 1:
        if weights == "shared":
            raise ValueError("engine.weights = 'shared' is impossible on several ranks")
        weights = "copy"
    placement, module = _place_weights(engine, model, weights)
    policy = Policy(module, config, weights=placement, adapter=adapter)
    if policy.adapter:
        return policy, ServedLora(engine, policy)
    publisher = SharedWeights if placement == "shared" else CopiedWeights
    return policy, publisher(engine, policy)


def _place_weights(engine: Engine, model: str | Path, weights: str) -> tuple[str, Any]:
    """("shared" or "copy (why)", the transformers model)."""
    if weights == "copy":
        return "copy", load_model(model, device=engine.device, dtype=engine.dtype)
    policy = init_on_meta(model, engine.dtype)
    try:
        install(policy, views_for(engine.model, policy))
    except CannotShare as error:
        if weights == "shared":
            raise ValueError(f"engine.weights = 'shared' is impossible here: {error}") from error
        return f"copy ({error})", load_model(model, device=engine.device, dtype=engine.dtype)
    return "shared", policy.to(engine.device).eval()

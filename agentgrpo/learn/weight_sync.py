"""How the policy that samples becomes the one that is trained, after each update.

Where the two are one set of tensors there is nothing to do; an adapter is handed over in memory;
all else is copied in place. Never through disk, HTTP or a second process.
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
    """What a Learner's policy is published by; this one, of fine-tuning, has nobody who samples."""

    about: Mapping[str, Any] = {}
    """How, for the record."""

    def publish(self) -> Metrics:
        """Make the sampler's policy the learner's, then forget its cached keys."""
        return {}


class SharedWeights(Publisher):
    """To an engine whose tensors the policy's parameters are views of: an update is there already.

    Also what the other ways of publishing to an engine have in common.
    """

    def __init__(self, engine: Engine, policy: Policy) -> None:
        self._engine, self._policy = engine, policy
        self.about: Mapping[str, Any] = self._prepare()

    def publish(self) -> Metrics:
        started = time.perf_counter()
        metrics = self._hand_over()
        # cached keys and values are of the weights before: a rollout would mix two policies
        self._engine.reset_prefix_cache()
        return metrics | {"publish_s": time.perf_counter() - started}

    def _prepare(self) -> dict[str, Any]:
        return {"prepacked_layers": self._engine.prepack_frozen_linears(self._policy.trained)}

    def _hand_over(self) -> Metrics:
        return {}


class CopiedWeights(SharedWeights):
    """The policy has tensors of its own, which are copied into the engine's, a bucket at a time."""

    def _prepare(self) -> dict[str, Any]:
        self._engine.unpack()  # every weight is written to at each step
        self._copy = InPlaceCopy(self._engine.model, self._engine.load_weights)
        return {"prepacked_layers": 0}

    def _hand_over(self) -> Metrics:
        started = time.perf_counter()
        copied = self._copy(self._policy.to_publish())
        self._engine.weights_loaded()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are queued, and not done, before
        return {"publish_gb_per_s": copied / 1e9 / (time.perf_counter() - started)}


class ServedLora(SharedWeights):
    """The engine applies the policy's LoRA adapter itself, over weights that never change."""

    def _prepare(self) -> dict[str, Any]:
        packed = self._engine.prepack_frozen_linears(())
        return {"prepacked_layers": packed, "adapter": "served as it is"}

    def _hand_over(self) -> Metrics:
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
    """The policy, on the engine's own tensors where the two can share them, and its publisher.

    ValueError: weights="shared" where that is impossible, with the reason; or as Policy's.
    """
    if parallel.world_size() > 1:
        if weights == "shared":
            raise ValueError("engine.weights = 'shared' is impossible on several ranks")
        weights = "copy"
    lies, module = _placed(engine, model, weights)
    policy = Policy(module, config, weights=lies, adapter=adapter)
    kind = ServedLora if policy.adapter else SharedWeights if lies == "shared" else CopiedWeights
    return policy, kind(engine, policy)


def _placed(engine: Engine, model: str | Path, weights: str) -> tuple[str, Any]:
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

"""Proof, each step, that the policy that samples is the policy that is trained.

After every weight update the engine continues a few fixed prompts, through the same cache, decode
and log-probability path as rollouts, and the learner scores the same tokens. A skipped sync, a
stale prefix cache or a wrong dtype shows here before a rollout is wasted on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from agentgrpo.types import Float32, Int32, Metrics


class Disagreement(Exception):
    """Sampler and learner give the same tokens different log-probabilities: the run must stop."""


class Scorer(Protocol):
    """The part of the learner that is compared."""

    def score(self, token_ids: Int32) -> Float32: ...


class Continuation(Protocol):
    """The part of engine.Completion that is compared."""

    @property
    def token_ids(self) -> Int32: ...
    @property
    def logprobs(self) -> Float32: ...


class Prober(Protocol):
    """The part of the engine that is compared."""

    def probe(self, prompts: Sequence[Int32], num_tokens: int) -> Sequence[Continuation]: ...


NUM_PROMPTS = 2
PROMPT_TOKENS = 70  # over two cache blocks of 32: a stale prefix cache is hit
NEW_TOKENS = 4


def probe_prompts(vocab_size: int) -> list[Int32]:
    """Fixed token sequences, the same in every run of a model."""
    rng = np.random.default_rng(0)
    return [
        rng.integers(vocab_size, size=PROMPT_TOKENS, dtype=np.int32) for _ in range(NUM_PROMPTS)
    ]


def check_agreement(
    engine: Prober, learner: Scorer, prompts: Sequence[Int32], *, threshold: float
) -> Metrics:
    """Compare both sides on the probes.

    Args:
        engine: samples the continuations.
        learner: scores them.
        prompts: from probe_prompts().
        threshold: largest |delta logp| in nats that passes.

    Returns:
        `max_dlogp` and `mean_dlogp` in nats.

    Raises:
        Disagreement: above the threshold, or not a number.
    """
    deltas = []
    for prompt, turn in zip(prompts, engine.probe(prompts, NEW_TOKENS), strict=True):
        scored = learner.score(np.concatenate([prompt, turn.token_ids]))
        deltas.append(np.abs(scored[len(prompt) - 1 :] - turn.logprobs))
    delta = np.concatenate(deltas)
    metrics = {"max_dlogp": float(delta.max()), "mean_dlogp": float(delta.mean())}
    require_agreement(metrics["max_dlogp"], threshold, where="after the weight update")
    return metrics


def require_agreement(max_dlogp: float, threshold: float, *, where: str) -> None:
    """Raise Disagreement unless max_dlogp <= threshold (nan does not pass)."""
    if not max_dlogp <= threshold:
        raise Disagreement(
            f"sampler and learner disagree {where}: max |delta logp| {max_dlogp:.3g} nats, allowed "
            f"{threshold:.3g} (engine.agreement_threshold). What was sampled is not what would be "
            "trained; nothing was updated. Resume from the last checkpoint once the cause is known."
        )

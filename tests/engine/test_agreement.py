"""The agreement check: what passes, what fails, what is compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from agentgrpo.engine.agreement import (
    MAX_UNSEEN_UPDATES,
    NEW_TOKENS,
    Disagreement,
    check_agreement,
    probe_prompts,
    require_agreement,
)
from agentgrpo.support import parallel
from agentgrpo.types import Float32, Int32


def logp_of(token_ids: Int32) -> Float32:
    """A synthetic policy: the log-probability depends on the token and its position."""
    return (-(token_ids[1:] % 7) - np.arange(1, len(token_ids)) / 100).astype(np.float32)


@dataclass
class Continued:
    token_ids: Int32
    logprobs: Float32
    num_cached_tokens: int = 0


class Sides:
    """Engine and learner with one policy, except for `shift` nats at one probe's token."""

    def __init__(self, shift: float = 0.0, *, probe: int = 1, token: int = NEW_TOKENS - 1) -> None:
        self.shift, self.probe_index, self.token = shift, probe, token

    def score(self, token_ids: Int32) -> Float32:
        return logp_of(token_ids)

    def probe(self, prompts: Sequence[Int32], num_tokens: int) -> list[Any]:
        return [self._complete(i, prompt, num_tokens) for i, prompt in enumerate(prompts)]

    def _complete(self, index: int, prompt: Int32, num_tokens: int) -> Continued:
        new = np.arange(50, 50 + num_tokens, dtype=np.int32)
        logprobs = logp_of(np.concatenate([prompt, new]))[-num_tokens:].copy()
        if index == self.probe_index:
            logprobs[self.token] += np.float32(self.shift)
        return Continued(new, logprobs)


PROMPTS = probe_prompts(1000)


def test_equal_policies_agree_exactly() -> None:
    sides = Sides()
    assert check_agreement(sides, sides, PROMPTS, threshold=1e-9) == {
        "max_dlogp": 0.0,
        "mean_dlogp": 0.0,
    }


@pytest.mark.parametrize("shift", [0.5, -0.5])
@pytest.mark.parametrize("probe", range(len(PROMPTS)))
@pytest.mark.parametrize("token", range(NEW_TOKENS))
def test_one_differing_token_stops_the_run(shift: float, probe: int, token: int) -> None:
    sides = Sides(shift, probe=probe, token=token)
    with pytest.raises(Disagreement, match=r"0\.5 nats, allowed 0\.1 .*agreement_threshold"):
        check_agreement(sides, sides, PROMPTS, threshold=0.1)
    metrics = check_agreement(sides, sides, PROMPTS, threshold=0.6)
    assert metrics["max_dlogp"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["mean_dlogp"] == pytest.approx(0.5 / (len(PROMPTS) * NEW_TOKENS), abs=1e-5)


class Counted(Sides):
    """All ranks must score sharded weights together, or one waits forever."""

    scored = 0

    def score(self, token_ids: Int32) -> Float32:
        self.scored += 1
        return super().score(token_ids)


@pytest.mark.parametrize("shift", [0.5, float("nan")])
def test_failure_on_one_rank_stops_all(monkeypatch: pytest.MonkeyPatch, shift: float) -> None:
    recorded = {}
    for rank in range(3):
        sides, probes = Counted(), probe_prompts(1000)
        check_agreement(sides, sides, probes, threshold=0.1)
        if rank == 1:
            sides.shift = shift

        def gather(mine: Any, rank: int = rank) -> list[Any]:
            return [mine if r == rank else shift if r == 1 else 0.0 for r in range(3)]

        monkeypatch.setattr(parallel, "gather", gather)
        with pytest.raises(Disagreement, match=f"{shift:g} nats, allowed 0.1"):
            check_agreement(sides, sides, probes, threshold=0.1)
        monkeypatch.undo()
        recorded[rank] = sides.scored
    assert recorded[0] == recorded[1] == recorded[2]


class Update(Sides):
    """In bfloat16: the learner's numbers change in each update, the sampler's only if published."""

    drift, told, cached, noise = 0.0, 0.0, 0, 0.0

    def score(self, token_ids: Int32) -> Float32:
        self.drift += self.noise
        return logp_of(token_ids) + np.float32(self.drift)

    def probe(self, prompts: Sequence[Int32], num_tokens: int) -> list[Any]:
        turns = super().probe(prompts, num_tokens)
        return [Continued(t.token_ids, t.logprobs + self.told, self.cached) for t in turns]


def checks_that_pass(sides: Update, *, told: bool, learning: Sequence[float]) -> int:
    """With a threshold above all differences."""
    probes = probe_prompts(1000)
    check_agreement(sides, sides, probes, threshold=1.0)
    for passed, step in enumerate(learning):
        sides.drift += step
        sides.told = sides.drift if told else 0.0
        try:
            check_agreement(sides, sides, probes, threshold=1.0)
        except Disagreement:
            return passed
    return len(learning)


def test_stale_sampler_is_found_in_bfloat16() -> None:
    assert checks_that_pass(Update(), told=True, learning=[0.008] * 100) == 100
    assert checks_that_pass(Update(), told=False, learning=[0.008] * 100) == MAX_UNSEEN_UPDATES - 1
    between = [0.008, 0.0] * 50  # evaluations, or steps without a gradient
    assert checks_that_pass(Update(), told=False, learning=between) == 2 * (MAX_UNSEEN_UPDATES - 1)
    assert checks_that_pass(Update(), told=False, learning=[0.0] * 100) == 100


def test_nondeterministic_learner_is_not_evidence() -> None:
    sides = Update()
    sides.noise = 1e-5
    assert checks_that_pass(sides, told=False, learning=[0.0] * 30) == 30


def test_stale_prefix_cache_is_found() -> None:
    sides = Update()
    sides.cached = 64
    assert checks_that_pass(sides, told=False, learning=[0.0] * 30) == 30, "nothing was updated"
    assert checks_that_pass(sides, told=True, learning=[0.008]) == 0


@pytest.mark.parametrize("shift", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_difference_never_passes(shift: float) -> None:
    sides = Sides(shift)
    with pytest.raises(Disagreement):
        check_agreement(sides, sides, PROMPTS, threshold=1e30)


def test_difference_equal_to_the_threshold_passes() -> None:
    require_agreement(0.25, 0.25, where="here")
    with pytest.raises(Disagreement, match="disagree here"):
        require_agreement(np.nextafter(0.25, 1), 0.25, where="here")


def test_probes_are_fixed_and_within_the_vocabulary() -> None:
    again = probe_prompts(1000)
    assert all(np.array_equal(a, b) for a, b in zip(PROMPTS, again, strict=True))
    assert not np.array_equal(PROMPTS[0], PROMPTS[1])
    assert all(p.dtype == np.int32 and 0 <= p.min() <= p.max() < 1000 for p in PROMPTS)
    # a stale prefix cache can be hit only by prompts longer than its blocks of 32
    assert min(map(len, PROMPTS)) > 2 * 32

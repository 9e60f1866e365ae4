"""Check before the first step that the largest pass of the config fits in memory.

Running out of memory at step 300, on the first batch that fills its token budget, costs a night. So
the largest batch of the config goes through forward and backward while the engine sleeps, and the
engine wakes once, before anything is sampled. If it does not fit, the error names a size that does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from agentgrpo.learn.batch import Deltas, PackedBatch
from agentgrpo.learn.optimizer import MasterAdamW
from agentgrpo.learn.policy import MIN_LENGTH_RATIO, Policy
from agentgrpo.support import parallel
from agentgrpo.support.memory import (
    OutOfMemory,
    explain_out_of_memory,
    memory,
    out_of_memory,
    release,
)
from agentgrpo.types import Int32, Metrics, Segment

if TYPE_CHECKING:  # it imports vLLM
    from agentgrpo.engine.engine import Engine

TOKEN_STEP = 128
"""Resolution in tokens of the search for the largest size that fits."""
REDUCE_MEMORY_HINT = (
    "fewer learner.trained_layers, learner.gradient_checkpointing = true or learner.lora.rank "
    "need less"
)
Places = Sequence[tuple[int, ...]]


class DryLearner(Protocol):
    """The part of Learner that preflight() uses."""

    @property
    def device(self) -> str: ...
    def dry_pass(self, num_tokens: int) -> None: ...
    def checkpoint_if_auto(self) -> bool: ...
    def publish(self) -> Metrics: ...


def preflight(engine: Engine, learner: DryLearner, *, max_tokens: int) -> Metrics:
    """Sleep, learn on max_tokens tokens, wake, publish: as in a step, but without changing
    anything.

    The engine must be awake without requests in flight, and is left asleep, as between steps.
    Returns seconds and memory in GiB. OutOfMemory: it does not fit; the message has a size that
    does.
    """
    started = time.perf_counter()
    engine.sleep()
    require_fit(learner, max_tokens)
    release()
    remedy = "a lower engine.kv_cache_gib or learner.max_tokens"
    with explain_out_of_memory("waking the engine and publishing the weights", lambda: remedy):
        engine.wake()
        learner.publish()
    engine.sleep()
    return {"seconds": time.perf_counter() - started, **memory(learner.device)}


def require_fit(learner: DryLearner, max_tokens: int) -> None:
    """Try the largest pass; if it fails, again with gradient checkpointing where that is "auto"."""
    if _fits(learner, max_tokens):
        return
    if parallel.world_size() == 1 and learner.checkpoint_if_auto() and _fits(learner, max_tokens):
        return
    raise OutOfMemory(
        f"learner.max_tokens {max_tokens} does not fit in memory: "
        f"{largest_that_fits(learner, max_tokens)}"
    )


def _fits(learner: DryLearner, num_tokens: int) -> bool:
    try:
        learner.dry_pass(num_tokens)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    else:
        return True
    release()  # not in the except block: the error's frames keep their allocations alive
    return False


def largest_that_fits(learner: DryLearner, max_tokens: int) -> str:
    """How many packed tokens below max_tokens fit in one pass, found by trying, as a clause.

    On several ranks nothing is tried: the other ranks wait in the pass that failed on this one.
    """
    if parallel.world_size() > 1:
        return "fewer may (not tried on several ranks)"
    fits, fails = 0, -(-max_tokens // TOKEN_STEP)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if _fits(learner, middle * TOKEN_STEP) else (fits, middle)
    if fits == 0:
        return f"not even {TOKEN_STEP} tokens do; train fewer layers, or a smaller model"
    return f"{fits * TOKEN_STEP} tokens do"


def oom_hint_learner(learner: DryLearner, max_tokens: int) -> str:
    """Which settings to lower when memory ran out while learning, with a size that fits now."""
    fits = largest_that_fits(learner, max_tokens)
    return f"learner.max_tokens is {max_tokens}, and {fits}; {REDUCE_MEMORY_HINT}"


def dry_pass(policy: Policy, optimizer: MasterAdamW, num_tokens: int, temperature: float) -> None:
    """Run the largest forward and backward passes of a step on dummy tokens; changes nothing.

    Memory that the optimizer has yet to allocate on this rank is reserved meanwhile, as are the
    gradient sums of earlier batches.
    """
    # the first batch is not the worst: later ones share memory with moments and float32 sums
    num_bytes = optimizer.bytes_to_allocate
    reserved: list[Tensor] = []
    trees, cuda = policy.scorer.unpacked_reason is None, policy.device == "cuda"
    try:
        reserved.append(torch.empty(num_bytes, dtype=torch.uint8, device=policy.device))
        optimizer.allocate_sums()
        for batch in _largest_batches(num_tokens, trees=trees, cuda=cuda):
            scored = policy.scorer(batch, temperature)
            (scored.logp_N.sum() + scored.entropy_N.sum()).backward()
            del scored
            optimizer.collect()
        reserved.append(
            torch.empty(optimizer.offload_peak_bytes, dtype=torch.uint8, device=policy.device)
        )
    finally:
        reserved.clear()
        optimizer.zero_grad()


def _largest_batches(num_tokens: int, *, trees: bool, cuda: bool) -> Iterator[PackedBatch]:
    """A forked tree; on CUDA also a single row, which another kernel computes.

    Without trees: a row of the length that padded rows can reach.
    """
    if trees:
        yield _forked(num_tokens)
    if cuda or not trees:
        yield one_row(
            np.zeros(num_tokens if trees else math.ceil(num_tokens / MIN_LENGTH_RATIO), np.int32)
        )


def one_row(token_ids: Int32) -> PackedBatch:
    """One sequence; every token but the first is a loss term."""
    terms = [(0, 1, 0)] if len(token_ids) > 1 else []
    return _batch(token_ids, [(0, 0, 0, len(token_ids))], terms)


def _forked(num_tokens: int) -> PackedBatch:
    """A prompt of half the tokens and two rollouts; all tokens but the first are terms."""
    fork, second = num_tokens // 2, num_tokens * 3 // 4
    return _batch(
        np.zeros(num_tokens, np.int32),
        [(0, 0, 0, num_tokens), (fork, fork, fork, second), (second, second, fork, num_tokens)],
        [(0, 1, 0), (second - 1, second, fork - 1), (second, second + 1, second)],
    )


def _batch(token_ids: Int32, runs: Places, terms: Places) -> PackedBatch:
    """A batch from runs (start, source, position, tout) and terms (start, source, row)."""
    count = len(token_ids)
    runs_8Q = np.zeros((8, len(terms)), np.int32)
    if terms:
        runs_8Q[[0, 1, 3]] = np.transpose(terms)
    deltas = Deltas([Segment(token_ids, np.zeros(count, np.float32))])
    roots = sum(position == 0 for _, _, position, _ in runs)  # no token predicts them
    return PackedBatch(deltas, np.array(runs, np.int32).T.copy(), runs_8Q, count, count - roots)

"""The worst that a run will ask of the memory, asked before its first step.

Out of memory at step 300, on the first batch that fills its row, costs a night. So the largest row
of the config goes through forward and backward while the engine sleeps, and the engine wakes again,
once, before anything is sampled; what does not fit is told then, with the number that does.
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
from agentgrpo.learn.policy import NEAR, Policy
from agentgrpo.support import parallel
from agentgrpo.support.memory import OutOfMemory, memory, out_of_memory, release
from agentgrpo.types import Int32, Metrics, Segment

if TYPE_CHECKING:  # it imports vLLM
    from agentgrpo.engine.engine import Engine

GRAIN = 128
"""Tokens between two sizes that are told apart."""
LESS_TO_TRAIN = (
    "fewer learner.trained_layers, learner.gradient_checkpointing = true or learner.lora.rank "
    "need less"
)
Places = Sequence[tuple[int, ...]]


class DoesNotFit(ValueError):
    """The config asks for more memory than there is; the message has what fits."""


class DryLearner(Protocol):
    """The part of the learner that is tried."""

    @property
    def device(self) -> str: ...
    def dry_pass(self, num_tokens: int) -> None: ...
    def checkpoint_if_auto(self) -> bool: ...
    def publish(self) -> Metrics: ...


def preflight(engine: Engine, learner: DryLearner, *, max_tokens: int) -> Metrics:
    """Sleep, learn on a row of max_tokens, wake, publish: all as in a step, but nothing changes.

    The engine is awake, with no request in flight; it is left asleep, as between steps. Returns
    seconds, and memory in GiB after it. DoesNotFit: memory ran out.
    """
    started = time.perf_counter()
    engine.sleep()
    require_fit(learner, max_tokens)
    release()
    try:
        engine.wake()
        learner.publish()
    except (RuntimeError, MemoryError, OutOfMemory) as error:
        if not out_of_memory(error):
            raise
        raise DoesNotFit(
            "engine.kv_cache_gib does not fit in memory beside what the learner has kept: lower "
            f"it, or learner.max_tokens ({error})"
        ) from error
    engine.sleep()
    return {"seconds": time.perf_counter() - started, **memory(learner.device)}


def require_fit(learner: DryLearner, max_tokens: int) -> None:
    """Try the largest pass; with its layers checkpointed if it does not fit and they may be."""
    if _fits(learner, max_tokens):
        return
    if parallel.world_size() == 1 and learner.checkpoint_if_auto() and _fits(learner, max_tokens):
        return
    raise DoesNotFit(
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
    release()  # here and not above: the error's frames hold what they had allocated
    return False


def largest_that_fits(learner: DryLearner, max_tokens: int) -> str:
    """How many packed tokens below max_tokens one pass can have, found by trying, in words.

    On several ranks nothing is tried: the others wait in the pass that failed on this one.
    """
    if parallel.world_size() > 1:
        return "fewer may (on several ranks it is not tried how many)"
    fits, fails = 0, -(-max_tokens // GRAIN)
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if _fits(learner, middle * GRAIN) else (fits, middle)
    if fits == 0:
        return f"not even {GRAIN} tokens do; train fewer layers, or a smaller model"
    return f"{fits * GRAIN} tokens do"


def oom_hint_learner(learner: DryLearner, max_tokens: int) -> str:
    """What to set lower when memory ran out while learning, with the number that fits now."""
    fits = largest_that_fits(learner, max_tokens)
    return f"learner.max_tokens is {max_tokens}, and {fits}; {LESS_TO_TRAIN}"


def dry_pass(policy: Policy, optimizer: MasterAdamW, num_tokens: int, temperature: float) -> None:
    """A step's largest forward and backward passes, on made-up tokens; changes nothing.

    What the optimizer has yet to allocate on this rank is held meanwhile, as is what earlier
    batches of an update would have left.
    """
    # a run's first batch is not its worst: a later one finds moments and float32 sums there
    to_come = optimizer.bytes_to_come
    held: list[Tensor] = []
    trees, cuda = policy.scorer.unpacked_reason is None, policy.device == "cuda"
    try:
        held.append(torch.empty(to_come, dtype=torch.uint8, device=policy.device))
        optimizer.start_sums()
        for batch in _largest(num_tokens, trees=trees, cuda=cuda):
            scored = policy.scorer(batch, temperature)
            (scored.logp_N.sum() + scored.entropy_N.sum()).backward()
            del scored
            optimizer.collect()
        held.append(torch.empty(optimizer.bytes_passing, dtype=torch.uint8, device=policy.device))
    finally:
        held.clear()
        optimizer.zero_grad()


def _largest(num_tokens: int, *, trees: bool, cuda: bool) -> Iterator[PackedBatch]:
    """A forked tree, and on CUDA, where another kernel computes unshared rows, one row.

    Where batches may not be trees: a row as long as rows are with the most padding there may be.
    """
    if trees:
        yield _forked(num_tokens)
    if cuda or not trees:
        yield one_row(np.zeros(num_tokens if trees else math.ceil(num_tokens / NEAR), np.int32))


def one_row(token_ids: Int32) -> PackedBatch:
    """One sequence, every token but the first a term."""
    terms = [(0, 1, 0)] if len(token_ids) > 1 else []
    return _batch(token_ids, [(0, 0, 0, len(token_ids))], terms)


def _forked(num_tokens: int) -> PackedBatch:
    """A prompt of half the tokens and two rollouts behind it; every token but the first a term."""
    fork, second = num_tokens // 2, num_tokens * 3 // 4
    return _batch(
        np.zeros(num_tokens, np.int32),
        [(0, 0, 0, num_tokens), (fork, fork, fork, second), (second, second, fork, num_tokens)],
        [(0, 1, 0), (second - 1, second, fork - 1), (second, second + 1, second)],
    )


def _batch(token_ids: Int32, runs: Places, terms: Places) -> PackedBatch:
    """Of runs (start, source, position, tout) and of terms at (start, source, row)."""
    count = len(token_ids)
    runs_8Q = np.zeros((8, len(terms)), np.int32)
    if terms:
        runs_8Q[[0, 1, 3]] = np.transpose(terms)
    deltas = Deltas([Segment(token_ids, np.zeros(count, np.float32))])
    roots = sum(position == 0 for _, _, position, _ in runs)  # which nothing predicts
    return PackedBatch(deltas, np.array(runs, np.int32).T.copy(), runs_8Q, count, count - roots)

"""The worst that a run will ask of the memory, asked before its first step.

Out of memory at step 300, on the first batch that fills its row, costs a night. So the largest row
of the config goes through forward and backward while the engine sleeps, and the engine wakes again,
once, before anything is sampled; what does not fit is told then, with the number that does.
"""

from __future__ import annotations

import time
from typing import Protocol

from agentgrpo import parallel
from agentgrpo.machine.memory import OutOfMemory, memory, out_of_memory, release
from agentgrpo.types import Metrics

GRAIN = 128
"""Tokens between two sizes that are told apart."""
LESS_TO_TRAIN = (
    "fewer learner.trained_layers, learner.gradient_checkpointing = true or learner.lora.rank "
    "need less"
)


class DoesNotFit(ValueError):
    """The config asks for more memory than there is; the message has what fits."""


class Rehearsal(Protocol):
    """The part of the learner that is tried."""

    @property
    def device(self) -> str: ...
    def rehearse(self, num_tokens: int) -> None: ...
    def publish(self) -> Metrics: ...


class Sleeper(Protocol):
    """The part of the engine that is tried."""

    def sleep(self) -> None: ...
    def wake(self) -> Metrics: ...


def preflight(engine: Sleeper, learner: Rehearsal, *, max_tokens: int) -> Metrics:
    """Sleep, learn on a row of max_tokens, wake, publish: all as in a step, but nothing changes.

    Args:
        engine: awake, with no request in flight; it is left asleep, as between steps.
        learner: as it will train.
        max_tokens: learner.max_tokens.

    Returns:
        Seconds, and memory in GiB after it.

    Raises:
        DoesNotFit: memory ran out.
    """
    started = time.perf_counter()
    engine.sleep()
    if not _fits(learner, max_tokens):
        raise DoesNotFit(
            f"learner.max_tokens {max_tokens} does not fit in memory: "
            f"{largest_that_fits(learner, max_tokens)}"
        )
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


def _fits(learner: Rehearsal, num_tokens: int) -> bool:
    try:
        learner.rehearse(num_tokens)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    else:
        return True
    release()  # here and not above: the error's frames hold what they had allocated
    return False


def largest_that_fits(learner: Rehearsal, max_tokens: int) -> str:
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


def to_learn(learner: Rehearsal, max_tokens: int) -> str:
    """What to set lower when memory ran out while learning, with the number that fits now."""
    fits = largest_that_fits(learner, max_tokens)
    return f"learner.max_tokens is {max_tokens}, and {fits}; {LESS_TO_TRAIN}"

"""VLLM's code for CUDA, which lies in the CPU build too, given what we would give it on a card."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from agentgrpo.config import EngineConfig
from agentgrpo.engine.engine import Engine
from agentgrpo.engine.start import _settings


def test_a_card_that_others_use_too_is_no_reason_to_refuse() -> None:
    """VLLM wants a share of the card free before it looks at the size that the cache was given."""
    from vllm.config import CacheConfig
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    half_free = MemorySnapshot(device="cpu", auto_measure=False)
    half_free.total_memory, half_free.free_memory = 80 * 2**30, 40 * 2**30
    asked = _settings(EngineConfig(kv_cache_gib=8), "cuda", "bfloat16")
    assert asked["kv_cache_memory_bytes"] == 8 * 2**30
    share = {"gpu_memory_utilization": asked["gpu_memory_utilization"]}
    assert request_memory(half_free, CacheConfig(**share)) < half_free.free_memory
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(half_free, CacheConfig())


def test_the_seed_reaches_the_stream_of_vllms_newer_runner(engine: Engine) -> None:
    """CUDA gets it: a request without a seed has one drawn from numpy's stream, not torch's."""
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    drawn = []
    for seed in (7, 7, 8):
        engine.seed(seed)
        buffers = ("temperature", "top_k", "top_p", "min_p", "seeds")
        states: Any = SimpleNamespace(
            **{name: SimpleNamespace(np=np.zeros(1, np.int64)) for name in buffers},
            seeds_set=np.zeros(1), num_logprobs=np.zeros(1), vocab_size=9,
        )  # fmt: skip
        SamplingStates.add_request(states, 0, SamplingParams(temperature=1.0))
        drawn.append(states.seeds.np[0])
    assert drawn[0] == drawn[1] != drawn[2]

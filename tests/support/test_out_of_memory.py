"""An out-of-memory error names the activity, the setting to lower, and the number that fits."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from agentgrpo.config import EngineConfig
from agentgrpo.engine.engine import Engine, State
from agentgrpo.learn.learner import Learner
from agentgrpo.support.atomic_files import write_lines
from agentgrpo.support.memory import OutOfMemory, explain_out_of_memory, rss_bytes
from agentgrpo.train.memory_estimate import GIB
from tests import tiny
from tests.learn.given import Holder, learner_on

ROOT = Path(__file__).parents[2]


def hosts() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def arrays() -> None:
    np.empty(2**60, np.uint8)


def cuda() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")


def sleeping_allocator() -> None:
    """VLLM's wake_up: csrc/cumem_allocator.cpp raises what the driver said."""
    raise RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62")


def driver() -> None:
    raise torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be ...")


def cublas() -> None:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def cplusplus() -> None:
    raise MemoryError("std::bad_alloc")


FAULTS: list[Callable[[], None]] = [
    hosts, arrays, cuda, sleeping_allocator, driver, cublas, cplusplus,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_every_allocator_error_is_recognised(fault: Callable[[], None]) -> None:
    with (
        pytest.raises(OutOfMemory, match=r"^out of memory while learning: lower x \(.+\)$"),
        explain_out_of_memory("learning", lambda: "lower x"),
    ):
        fault()


def test_other_errors_pass_unchanged() -> None:
    fault = RuntimeError("shapes differ")
    with (
        pytest.raises(RuntimeError) as caught,
        explain_out_of_memory("learning", lambda: "lower x"),
    ):
        raise fault
    assert caught.value is fault


def test_memory_is_released_before_the_remedy_is_computed() -> None:
    """Else a search for the number that fits would run beside the memory of what did not."""
    alive: list[weakref.ref[np.ndarray]] = []

    def work() -> None:
        held = np.zeros(10)
        alive.append(weakref.ref(held))
        raise MemoryError

    with (
        pytest.raises(OutOfMemory, match="gone"),
        explain_out_of_memory("learning", lambda: "gone" if alive[0]() is None else "still there"),
    ):
        work()


def test_wake_error_after_level_2_names_the_cache_setting() -> None:
    """After level 2 of sleep the cache wakes by itself, when the weights are there."""
    empty = Engine.__new__(Engine)
    empty.state, empty._config = (
        State.WEIGHTS_DISCARDED,
        EngineConfig(sleep_level=2, weights="copy"),
    )
    empty._engine = cast(Any, SimpleNamespace(wake_up=lambda tags: sleeping_allocator()))
    with pytest.raises(
        OutOfMemory, match=r"^out of memory while waking the engine: a lower engine"
    ):
        empty.weights_loaded()
    assert empty.state is State.WEIGHTS_DISCARDED, "it can be asked again"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("doing", ["waking the engine", "generating"])
def test_engine_error_names_the_settings_to_lower(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, doing: str, fault: Callable[[], None]
) -> None:
    def failing(*_: object) -> None:
        fault()

    waking = doing == "waking the engine"
    with monkeypatch.context() as broken:
        if waking:
            engine.sleep()
        core = engine._engine.engine_core
        broken.setattr(core, "wake_up" if waking else "get_output", failing)
        with pytest.raises(
            OutOfMemory, match=f"^out of memory while {doing}: a lower engine.kv_cache_gib"
        ):
            engine.wake() if waking else engine.step()
    assert engine.asleep == waking, "it can be asked again"


def short_of_memory(engine: Engine, model: Path, fault: Callable[[], None]) -> Learner:
    """A learner that fails, and in which 900 tokens would fit."""
    learner: Any = learner_on(engine, model)

    def dry_pass(num_tokens: int) -> None:
        if num_tokens > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory")

    learner.dry_pass, learner._score_before_updates = dry_pass, lambda *_: fault()
    return cast(Learner, learner)


@pytest.mark.parametrize("fault", FAULTS)
def test_learner_error_names_the_number_that_fits(
    engine: Engine, tiny_model: Path, fault: Callable[[], None]
) -> None:
    learner = short_of_memory(engine, tiny_model, fault)
    with pytest.raises(
        OutOfMemory,
        match=r"max_tokens is 2048, and 896 tokens do; fewer learner",
    ):
        learner.step([])
    assert learner.step_count == 0


STARVED = """
import resource, sys
from agentgrpo.support.runtime import prepare_environment
prepare_environment()
import agentgrpo.engine.engine  # what vLLM maps when it is imported is not to count
from agentgrpo.train import __main__ as train
from agentgrpo.support import hardware
_, hard = resource.getrlimit(resource.RLIMIT_AS)
taken = hardware.kib_of("/proc/self/status")["VmSize"] * 1024
resource.setrlimit(resource.RLIMIT_AS, (taken + int(sys.argv[1]), hard))
sys.exit(train.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.nsjail
def test_vllm_start_without_memory_prints_one_line(tiny_model: Path, tmp_path: Path) -> None:
    """The real one, in a process whose address space ends at the size of its KV cache."""
    write_lines(tmp_path / "rows.jsonl", tiny.sums(9))
    (tmp_path / "c.toml").write_text(
        f'model = "{tiny_model}"\nout_dir = "run"\n'
        '[data]\ntrain = "rows.jsonl"\nheldout = "split"\nnum_heldout = 1\n'
        "[engine]\nmax_model_len = 256\nkv_cache_gib = 1.5\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", STARVED, str(int(1.85 * GIB)), "c.toml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if "cannot isolate" in ran.stderr:
        pytest.skip(ran.stderr)
    assert "engine: starting vLLM" in ran.stdout, "what was free was enough until then"
    assert ran.returncode == 2
    assert re.fullmatch(
        r"error: out of memory while starting vLLM: a lower engine\.kv_cache_gib \(it is 1\.5\) or "
        r"engine\.max_num_seqs \(128\), or a smaller model; [\d.]+ of the host's [\d.]+ GiB are "
        r"free now, .*\(.*allocate memory.*\)\n",
        ran.stderr,
    ), ran.stderr


def test_step_returns_freed_memory(tmp_path: Path) -> None:
    """Of 128 MiB in small blocks, all freed but the last: glibc keeps them."""
    learner = learner_on(Holder(), tiny.make_model_dir(tmp_path / "model"), weights="copy")
    libc = ctypes.CDLL(None)
    libc.malloc.restype, size = ctypes.c_void_p, 64 << 10
    blocks = [ctypes.c_void_p(libc.malloc(size)) for _ in range(2048)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:
        libc.free(block)
    before = rss_bytes()
    learner.step([])
    given_back = before - rss_bytes()
    libc.free(blocks[-1])
    assert given_back > 100 << 20

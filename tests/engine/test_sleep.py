"""The calls to vLLM around sleep: levels, and the order with weight updates.

On CPU vLLM releases no memory, so a missing call would not change any result there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentgrpo.config import EngineConfig
from agentgrpo.engine import engine as engine_module
from agentgrpo.engine import start as start_module
from agentgrpo.engine.agreement import probe_prompts
from agentgrpo.engine.engine import Engine, State
from agentgrpo.engine.start import _settings, start
from agentgrpo.train.loop import engine_awake
from tests.engine.test_engine import prompt
from tests.learn.given import learner_on
from tests.tiny import VOCAB


@pytest.fixture
def asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the calls of vLLM's engine in order, with their arguments."""
    calls: list[str] = []

    def record(owner: Any, name: str, shown: Any) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(shown(*args, **kwargs))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    llm = engine._engine
    record(llm, "sleep", lambda level=1, mode="abort": f"sleep {level} {mode}")
    record(llm, "wake_up", lambda tags=None: f"wake {tags}")
    record(llm, "reset_prefix_cache", lambda **_: "reset")
    record(llm.engine_core, "add_request", lambda _: "request")
    return calls


def a_night(engine: Engine, model: Path, asked: list[str], weights: str) -> list[str]:
    """The calls of one step: a request, sleep, an update, wake, and the next request."""
    learner = learner_on(engine, model, weights=weights)
    publish = learner._publisher._transfer  # type: ignore[attr-defined]

    def hand_over() -> Any:
        asked.append("publish")
        return publish()

    learner._publisher._transfer = hand_over  # type: ignore[attr-defined]
    parts: Any = SimpleNamespace(
        engine=engine, learner=learner, probes=probe_prompts(VOCAB), agreement_threshold=1e-3,
        progress=SimpleNamespace(phase=lambda _: nullcontext()),
    )  # fmt: skip
    engine.sleep()
    for _ in range(2):
        asked.clear()
        with engine_awake(parts):
            engine.add_request("a", prompt(9), max_tokens=2, temperature=0.0)
            while engine.num_in_flight:
                engine.step()
    return asked


PLAYED = ["request", "request", "request"]
"""Two probes and a turn."""


@pytest.mark.parametrize("weights", ["shared", "copy"])
def test_step_wakes_publishes_resets_samples_and_sleeps(
    engine: Engine, tiny_model: Path, asked: list[str], weights: str
) -> None:
    calls = a_night(engine, tiny_model, asked, weights)
    assert calls == ["wake None", "publish", "reset", *PLAYED, "sleep 1 keep"]


def test_dropped_weights_are_loaded_before_the_cache_wakes(
    engine: Engine, tiny_model: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_config", EngineConfig(sleep_level=2, weights="copy"))
    calls = a_night(engine, tiny_model, asked, "copy")
    assert calls == [
        "wake ['weights']", "publish", "wake ['kv_cache']", "reset", *PLAYED, "sleep 2 keep",
    ]  # fmt: skip


@pytest.mark.parametrize(("device", "can"), [("cuda", True), ("cpu", False)])
def test_cuda_engine_starts_with_sleep_mode(device: str, can: bool) -> None:
    """VLLM refuses sleep mode on CPU; on CUDA, sleep without it releases nothing."""
    settings = _settings(EngineConfig(), device, "bfloat16")
    assert settings["enable_sleep_mode"] is can


def of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SimpleNamespace(recurrent=False, wrapped="")
    monkeypatch.setattr(start_module, "read_architecture", lambda _: plain)


@pytest.mark.parametrize(
    ("weights", "pooled"), [("auto", False), ("shared", False), ("copy", True)]
)
def test_shared_weights_are_outside_the_sleep_pool(
    monkeypatch: pytest.MonkeyPatch, weights: Any, pooled: bool
) -> None:
    """The memory pool that vLLM's CUDA worker uses while it loads a model."""
    from vllm.v1.worker.gpu_worker import Worker

    recorded: list[str] = []

    def pool(self: Any, tag: str) -> Any:
        recorded.append(tag)
        return nullcontext()

    def load(*_: Any, **__: Any) -> SimpleNamespace:
        for tag in ("weights", "kv_cache"):
            with Worker._maybe_get_memory_pool_context(Any, tag):  # type: ignore[arg-type]
                pass
        return SimpleNamespace()

    monkeypatch.setattr(Worker, "_maybe_get_memory_pool_context", pool)
    monkeypatch.setattr(start_module, "LLM", load)
    of_any_kind(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = EngineConfig(weights=weights)
    start("m", config, device="cuda", dtype="bfloat16", seed=0, lora_rank=0)
    assert recorded == (["weights", "kv_cache"] if pooled else ["kv_cache"])
    assert Worker._maybe_get_memory_pool_context is pool, "only while it starts"


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


@pytest.mark.parametrize(("device", "serving"), [("cuda", 1), ("cpu", 3)])
def test_cuda_engine_uses_one_thread_learner_all(
    monkeypatch: pytest.MonkeyPatch, threads: int, device: Any, serving: int
) -> None:
    """VLLM's CUDA worker sets one thread, its CPU worker one fewer, and then a no-op."""
    llm = SimpleNamespace(sleep=lambda level, mode: None, wake_up=lambda tags: None)
    llm.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=None, scheduler=None))

    def load(*_: Any, **__: Any) -> SimpleNamespace:
        torch.set_num_threads(1 if device == "cuda" else 2)
        if device == "cpu":
            torch.set_num_threads = lambda nthreads: None
        return SimpleNamespace(llm_engine=llm)

    monkeypatch.setattr(start_module, "LLM", load)
    of_any_kind(monkeypatch)
    monkeypatch.setattr(engine_module, "engine_device", lambda: device)
    monkeypatch.setattr(engine_module, "memory", lambda _: {})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    engine = Engine("m", EngineConfig())
    Engine._running.discard(id(engine))
    counts = [torch.get_num_threads()]
    engine.sleep()
    counts.append(torch.get_num_threads())
    engine.wake()
    counts.append(torch.get_num_threads())
    assert counts == [serving, threads, serving]
    assert engine.state is State.AWAKE


def test_failed_start_restores_the_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    def load(*_: Any, **__: Any) -> None:
        torch.set_num_threads(1)
        raise ValueError("no")

    monkeypatch.setattr(start_module, "LLM", load)
    with pytest.raises(start_module.EngineStartError):
        start("m", EngineConfig(), device="cuda", dtype="bfloat16", seed=0, lora_rank=0)
    assert torch.get_num_threads() == threads

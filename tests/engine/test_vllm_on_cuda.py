"""vLLM's CUDA code, which the CPU build contains too, with the settings used on a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentgrpo.config import EngineConfig, TrainConfig
from agentgrpo.config.read import load_config_of, shipped_configs
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.engine import start as start_module
from agentgrpo.engine.start import _settings, graph_sizes, start
from tests import tiny


def test_shared_gpu_is_accepted() -> None:
    """VLLM requires a share of the GPU to be free before it reads the given cache size."""
    from vllm.config import CacheConfig
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    half_free = MemorySnapshot(device="cpu", auto_measure=False)
    half_free.total_memory, half_free.free_memory = 80 * 2**30, 40 * 2**30
    settings = _settings(EngineConfig(kv_cache_gib=8), "cuda", "bfloat16")
    assert settings["kv_cache_memory_bytes"] == 8 * 2**30
    share = {"gpu_memory_utilization": settings["gpu_memory_utilization"]}
    assert request_memory(half_free, CacheConfig(**share)) < half_free.free_memory
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(half_free, CacheConfig())


@pytest.mark.parametrize(
    ("device", "deterministic", "setting", "expected"),
    [
        ("cuda", False, None, True), ("cuda", "cpu", None, True), ("cuda", True, None, False),
        ("cuda", True, True, True), ("cuda", False, False, False), ("cpu", "cpu", None, False),
    ],
)  # fmt: skip
def test_deterministic_run_disables_async_scheduling(
    device: Any, deterministic: Any, setting: bool | None, expected: bool
) -> None:
    config = TrainConfig.model_validate(
        {
            "model": "m", "out_dir": "o", "rollout": {"deterministic": deterministic},
            "engine": {"async_scheduling": setting},
        }
    ).on(device)  # fmt: skip
    assert _settings(config.engine, device, "bfloat16")["async_scheduling"] is expected


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_use_async_scheduling_with_tools(name: str) -> None:
    config = load_config_of(RecipeConfig, name).on("cuda")
    assert config.rollout.deterministic is False
    assert config.engine.async_scheduling is True


def config_of(model: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    settings = _settings(EngineConfig(), "cpu", "float32")
    del settings["use_tqdm_on_load"]  # LLM's
    return EngineArgs(model=str(model), **settings).create_engine_config()


@pytest.mark.parametrize("running", [1, 8, 100, 128, 300, 512, 600, 1024])
def test_every_decode_batch_size_has_a_graph(tiny_model: Path, running: int) -> None:
    """VLLM's rule for the given sizes, and its default sizes."""
    from vllm.config import CUDAGraphMode

    captured = []
    for sizes in (graph_sizes(running), None):
        config = config_of(tiny_model)
        config.model_config.enforce_eager = False
        config.scheduler_config.max_num_seqs = running
        compilation = config.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        compilation.cudagraph_capture_sizes = sizes
        compilation.max_cudagraph_capture_size = None
        config._set_cudagraph_sizes()
        captured.append(compilation.cudagraph_capture_sizes)
        assert compilation.max_cudagraph_capture_size == max(captured[-1])
    ours, theirs = captured
    assert ours == graph_sizes(running)
    assert max(ours) >= max(running, max(theirs))
    assert running in ours
    if running <= 512:
        assert len(ours) <= len(theirs) + 1
    for count in range(65, running + 1):
        padded = min(size for size in ours if size >= count)
        assert (padded - count) / padded <= 1 / 9


@pytest.mark.parametrize("eager", [False, True])
def test_graph_sizes_are_passed_to_vllm(eager: bool) -> None:
    config = EngineConfig(max_num_seqs=600, enforce_eager=eager)
    sizes = _settings(config, "cuda", "bfloat16").get("cudagraph_capture_sizes")
    assert sizes == (None if eager else graph_sizes(600))
    assert "cudagraph_capture_sizes" not in _settings(config, "cpu", "float32")


def test_checkpoint_in_another_folder_reuses_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the key of vLLM's cache of compiled code."""
    folders = [tmp_path / name for name in ("step_1", "step_2", "other")]
    for folder in folders:
        folder.mkdir()
        tiny.make_model_dir(folder)
    described = folders[2] / "config.json"
    text = described.read_text()
    described.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert described.read_text() != text
    keys: list[str] = []

    def load(model: str, **_: Any) -> SimpleNamespace:
        keys.append(config_of(Path(model)).compute_hash())
        return SimpleNamespace()

    monkeypatch.setattr(start_module, "LLM", load)
    for folder in folders:
        start(folder, EngineConfig(), device="cpu", dtype="float32", seed=0, lora_rank=0)
    one, same, other = keys
    assert one == same != other
    assert config_of(folders[0]).compute_hash() != config_of(folders[1]).compute_hash()

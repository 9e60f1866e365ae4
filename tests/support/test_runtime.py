"""The environment that is set before torch and vLLM are imported."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from agentgrpo.support import hardware
from agentgrpo.support.runtime import ALLOCATOR, prepare_environment

NEW, OLD = ALLOCATOR
SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"


@pytest.mark.parametrize(
    ("card", "ranks", "options", "set_"),
    [
        (True, 1, {}, {OLD: "expandable_segments:True"}),
        (True, 8, {}, {}),
        (False, 1, {}, {}),
        (True, 1, {NEW: "max_split_size_mb:512"}, {NEW: "max_split_size_mb:512"}),
        (True, 1, {OLD: "expandable_segments:False"}, {OLD: "expandable_segments:False"}),
        (True, 1, {OLD: ""}, {OLD: ""}),
    ],
)
def test_expandable_segments_on_one_gpu_unless_configured(
    card: bool, ranks: int, options: dict[str, str], set_: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(hardware, "has_nvidia_gpu", lambda: card)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in options.items():
        monkeypatch.setenv(name, value)
    prepare_environment()
    assert {name: os.environ[name] for name in ALLOCATOR if name in os.environ} == set_


def test_torch_imported_first_warns_once_on_cpu(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", ModuleType("torch")))
    monkeypatch.setattr(hardware, "has_nvidia_gpu", lambda: False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    prepare_environment()
    assert not recwarn.list, "it was set before Python started"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.warns(RuntimeWarning, match="`from agentgrpo import Trainer` above `import torch`"):
        prepare_environment()
    prepare_environment()
    assert not recwarn.list
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(hardware, "has_nvidia_gpu", lambda: True)
    prepare_environment()
    assert not recwarn.list, "nothing waits for these threads there"


def test_gpu_without_flashinfer_can_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM imports it while the sampler is built, unless it was told not to use it."""
    ops = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(ops.current_platform, "is_cuda", lambda: True)
    monkeypatch.delenv(SAMPLER, raising=False)
    prepare_environment()
    assert not ops.flashinfer_sampler_supported()
    monkeypatch.setenv(SAMPLER, "1")
    prepare_environment()
    assert os.environ[SAMPLER] == "1", "who has it may use it"


def test_caches_move_if_home_is_not_writable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "HOME": "/proc/none"})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prepare_environment()
    home = Path(os.environ["HOME"])
    assert (home.parent, home.stat().st_mode & 0o777) == (tmp_path, 0o700)
    home.chmod(0o777)  # as if another user had made it
    monkeypatch.setenv("HOME", "/proc/none")
    with pytest.raises(ValueError, match=r"HOME: .* is not private to this user"):
        prepare_environment()

"""What a newcomer runs into: one line that says what is wrong and what to do, found by a dry run.

The packages' part is in support/test_hardware.py, the sandbox's in sandbox/test_doctor.py; every
message is in docs/debug.md.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.config.read import load_config
from agentgrpo.records import checkpoint
from agentgrpo.support import hardware, packages
from agentgrpo.support.atomic_files import write_lines
from agentgrpo.support.files import write_checksums
from agentgrpo.train.__main__ import main
from agentgrpo.train.memory_estimate import GIB, room_checks
from tests import tiny

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "debug.md").read_text()

pytestmark = pytest.mark.nsjail

DryRun = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dry_run(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> DryRun:
    """Runs `agentgrpo train --dry-run` on SUMS with settings of its own; status, out, err.

    dry=False: `agentgrpo train`.
    """
    write_lines(tmp_path / "rows.jsonl", tiny.sums(20))
    path = tmp_path / "c.toml"
    path.write_text(
        f'model = "{tiny_model}"\nout_dir = "{tmp_path / "run"}"\nsteps = 3\n'
        f'[data]\ntrain = "{tmp_path / "rows.jsonl"}"\nheldout = "split"\nnum_heldout = 4\n'
        "[engine]\nkv_cache_gib = 0.0625\n"
    )

    def run(*overrides: str, dry: bool = True) -> tuple[int, str, str]:
        status = main([str(path), *["--dry-run"][: int(dry)], *overrides])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def refused(answer: tuple[int, str, str], message: str) -> None:
    """One line, that says this, and is in the page."""
    status, _, err = answer
    assert status == 2
    assert err.startswith("error: ")
    assert message in err
    assert message in PAGE, f"docs/debug.md does not have {message!r}"


def test_dry_run_prints_the_plan_and_writes_nothing(dry_run: DryRun, tmp_path: Path) -> None:
    status, out, err = dry_run("rollout.max_turns=2")
    assert (status, err) == (0, "")
    assert not (tmp_path / "run").exists()
    for line in (
        r"data +.*rows.jsonl; 4 held-out tasks",
        r"a step +12 tasks x 8 = 96 rollouts, at most 12,288 sampled tokens",
        r"the run +3 steps, saved every 50",
        r"sandbox +zygote",
        r"device +CPU, \d+ cores, .* GiB free; float32",
        r"model +.*: (\d+,\d{3}) parameters, \1 of them trained",
        r"memory +weights .* \+ gradients .* \+ optimizer .* \+ KV cache 0.06 \+ libraries .* GiB",
        r"out_dir +.*/run: new",
    ):
        assert re.search(line, out), (line, out)
    assert "WARNING" not in out


def test_dry_run_rejects_rows_with_tests_that_always_pass(dry_run: DryRun, tmp_path: Path) -> None:
    """HumanEval's columns; of all rows, held out or not, those that are wrong are named."""
    form = "def check(candidate):\n    assert candidate(1) == {}\n"
    rows = [
        {"question": f"Add {i}.", "entry_point": f"add{i}", "test": form.format(1 + i)}
        for i in range(8)
    ]
    write_lines(tmp_path / "tested.jsonl", rows)
    settings = (
        "env.kind=unit_tests", "env.options.tests=test", "agent.kind=code",
        f"data.train={tmp_path / 'tested.jsonl'}",
    )  # fmt: skip
    status, out, err = dry_run(*settings)
    assert (status, err) == (0, "")
    assert "data.train: checked the tests of 4 of 4 tasks" in out
    write_lines(
        tmp_path / "tested.jsonl",
        [row | {"test": f"import absent\n{row['test']}"} for row in rows],
    )
    status, _, err = dry_run(*settings)
    assert status == 2
    assert "4 of 4 tasks cannot be graded" in err
    assert len(re.findall(r"task tested.jsonl:\d: .*: No module named 'absent'", err)) == 4, err


def test_dry_run_prints_the_remaining_steps(
    dry_run: DryRun, tmp_path: Path, tiny_model: Path
) -> None:
    saved = tmp_path / "run" / "checkpoints" / "step_000003"
    shutil.copytree(tiny_model, saved)
    (saved / checkpoint.STATE).write_text("of a learner")
    write_checksums(saved)
    _, out, _ = dry_run("steps=4")
    assert f"out_dir    {tmp_path / 'run'}: continues from checkpoints/step_000003" in out
    _, out, _ = dry_run("steps=3")
    assert "3 steps" in out
    assert "all are done: set a larger `steps` to continue" in out


def test_dry_run_warns_of_too_little_memory(
    dry_run: DryRun, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_rows = "learner.max_tokens=10000000"
    monkeypatch.setattr(hardware, "memory_bytes", lambda: (8 * GIB, 4 * GIB))
    _, out, _ = dry_run(long_rows)
    said = r"= \d\.\d GiB are needed, more than the \d+\.\d GiB that are free"
    assert re.search(rf"WARNING +memory: .* {said}; remedy: fewer learner\.trained_layers", out)
    for overrides, wrong in (([long_rows], ["memory"]), ([], [])):
        config = load_config(tmp_path / "c.toml", overrides)
        checks = list(room_checks(config, str(tiny_model), trained=True))
        assert [check.name for check in checks] == ["room for vLLM", "memory", "disk"]
        assert [check.name for check in checks if not check.ok] == wrong
    alone = [*room_checks(config, str(tiny_model), trained=True, sampled=False)]
    assert [check.name for check in alone] == ["memory", "disk"], "fine-tuning starts no engine"
    assert not any("engine." in check.remedy for check in alone)


@pytest.mark.parametrize("dry", [True, False])
def test_untrainable_model_is_found_before_vllm_starts(
    dry_run: DryRun, monkeypatch: pytest.MonkeyPatch, dry: bool
) -> None:
    def why_not_packed(model: Any) -> None:
        assert {p.device.type for p in model.parameters()} == {"meta"}
        raise ValueError("a model of type 'qwen3' cannot be trained")

    monkeypatch.setattr("agentgrpo.learn.forward_check.why_not_packed", why_not_packed)
    monkeypatch.setattr("agentgrpo.train.build.start_engine", None)
    status, _, err = dry_run(dry=dry)
    assert (status, err) == (2, "error: a model of type 'qwen3' cannot be trained\n")


@pytest.mark.parametrize("dry", [True, False])
def test_too_large_kv_cache_is_found_before_vllm_starts(
    dry_run: DryRun, monkeypatch: pytest.MonkeyPatch, dry: bool
) -> None:
    """Weights of 0.0004 GiB and the cache, where 3 of 8 GiB are free: in a container, say."""
    monkeypatch.setattr(hardware, "memory_bytes", lambda: (8 * GIB, 3 * GIB))
    answer = dry_run("engine.kv_cache_gib=3.5", dry=dry)
    refused(answer, "room for vLLM")
    weights = sum(p.numel() for p in tiny.make_model().parameters()) * 4 / GIB
    assert answer[2] == (
        f"error: room for vLLM: weights {weights:.2f} + KV cache 3.50 = 3.50 GiB are needed to "
        "start it, and 3.00 of 8.00 GiB are free; remedy: a lower engine.kv_cache_gib (it is "
        "3.5), or a smaller model\n"
    )
    assert "starting vLLM" not in answer[1]
    assert dry_run("engine.kv_cache_gib=2.99")[0] == 0


def test_missing_tracker_is_an_error(dry_run: DryRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(dry_run('trackers=["wandb"]'), "is not installed; remedy: pip install 'agentgrpo[")


def test_dry_run_warns_of_a_too_short_context(dry_run: DryRun) -> None:
    status, out, _ = dry_run("engine.max_model_len=256", "rollout.max_turn_tokens=100")
    assert status == 0
    cut = r"= 256 leaves \d+ tokens .*long rollouts are cut; remedy: set it to \d+"
    assert re.search(rf"WARNING    context: .* {cut}", out)
    assert "WARNING    context" in PAGE


@pytest.mark.parametrize(
    ("nsjail", "message"),
    [
        ("/nosuch/nsjail", "'/nosuch/nsjail' is not an executable file; remedy: "),
        ("/bin/false", "the jail did not start"),
    ],
)
def test_missing_nsjail_is_an_error(
    dry_run: DryRun, monkeypatch: pytest.MonkeyPatch, nsjail: str, message: str
) -> None:
    monkeypatch.setenv("NSJAIL", nsjail)
    answer = dry_run()
    refused(answer, "this machine cannot isolate untrusted code")
    assert message in answer[2]


def test_cuda_build_without_a_gpu_raises(dry_run: DryRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda: {"torch": "2.11.0", "vllm": "0.22.0"})
    monkeypatch.setattr(hardware, "has_nvidia_gpu", lambda: False)
    refused(dry_run(), "is the CUDA build, and this machine shows no NVIDIA GPU")

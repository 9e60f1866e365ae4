"""`make quickstart` uses the CPU set, or the GPU set if requested and possible.

A fake nvidia-smi describes the machine; nothing is installed (make -n).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CARD = "#!/bin/sh\necho '{}'\n"


def make(tmp_path: Path, *arguments: str, smi: str | None) -> subprocess.CompletedProcess[str]:
    """Run make in a new venv; `smi` is the script of nvidia-smi, None: there is none."""
    if smi is None and shutil.which("nvidia-smi", path="/usr/bin:/bin"):
        pytest.skip("this machine has an nvidia-smi")
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    if smi is not None:
        (tools / "nvidia-smi").write_text(smi)
        (tools / "nvidia-smi").chmod(0o755)
    return subprocess.run(
        ["make", f"VENV={tmp_path / 'venv'}", *arguments],
        cwd=ROOT,
        env={"PATH": f"{tools}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("target", ["quickstart", "fast", "test", "recipe-demo"])
@pytest.mark.parametrize(
    ("arguments", "expected"), [([], "venv cpu"), (["SET=gpu"], "venv-gpu gpu")]
)
def test_each_set_has_its_own_folder(
    tmp_path: Path, target: str, arguments: list[str], expected: str
) -> None:
    output = make(tmp_path, "-n", target, *arguments, smi=CARD.format("590.44.01, 9.0"))
    assert output.returncode == 0, output.stderr
    sets = set(re.findall(r"install\.py \S+?(venv\S* (?:gpu|cpu))", output.stdout))
    assert sets == {expected}
    if target == "quickstart":  # one code path: the same command after either set
        assert "-m agentgrpo train quickstart" in output.stdout


def test_unused_gpu_is_named(tmp_path: Path) -> None:
    output = make(tmp_path, "-n", "quickstart", smi=CARD.format("GPU 0: NVIDIA H200"))
    assert "make quickstart SET=gpu" in output.stdout


def test_failed_gpu_set_falls_back_to_cpu_set(tmp_path: Path) -> None:
    """With a fake Python that prints its arguments and can install only the CPU set."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$0 $@"\ncase "$*" in *"install.py"*gpu) exit 1;; *"venv cpu")'
        f" mkdir -p {tmp_path}/venv/bin; cp $0 {tmp_path}/venv/bin/python;; esac\n"
    )
    python.chmod(0o755)
    output = make(tmp_path, f"PYTHON={python}", "quickstart", "SET=gpu", smi=None)
    assert output.returncode == 0, output.stderr
    *_, fell_back, _, _, trained = output.stdout.splitlines()
    assert "the CPU set instead" in output.stdout
    assert trained.endswith("-m agentgrpo train quickstart"), fell_back
    assert f"{tmp_path}/venv/bin/python" in trained

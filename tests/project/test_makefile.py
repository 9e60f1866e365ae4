"""`make quickstart` takes the CPU set, and the GPU set where it is asked for and can be used.

A stand-in for nvidia-smi tells what the machine has; nothing is installed (make -n).
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
    """`make -n ARGUMENTS` in a new venv, on a machine whose nvidia-smi is this script, or none."""
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
@pytest.mark.parametrize(("arguments", "wanted"), [([], "venv cpu"), (["SET=gpu"], "venv-gpu gpu")])
def test_each_set_has_a_folder_of_its_own(
    tmp_path: Path, target: str, arguments: list[str], wanted: str
) -> None:
    said = make(tmp_path, "-n", target, *arguments, smi=CARD.format("590.44.01, 9.0"))
    assert said.returncode == 0, said.stderr
    sets = set(re.findall(r"install\.py \S+?(venv\S* (?:gpu|cpu))", said.stdout))
    assert sets == {wanted}
    if target == "quickstart":  # one code path: the same command after either set
        assert "-m agentgrpo train quickstart" in said.stdout


def test_a_gpu_that_is_not_asked_for_is_named(tmp_path: Path) -> None:
    said = make(tmp_path, "-n", "quickstart", smi=CARD.format("GPU 0: NVIDIA H200"))
    assert "make quickstart SET=gpu" in said.stdout


def test_where_the_gpu_set_fails_the_cpu_set_trains(tmp_path: Path) -> None:
    """Python is a stand-in: it says what it is asked, and installs the CPU set alone."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$0 $@"\ncase "$*" in *"install.py"*gpu) exit 1;; *"venv cpu")'
        f" mkdir -p {tmp_path}/venv/bin; cp $0 {tmp_path}/venv/bin/python;; esac\n"
    )
    python.chmod(0o755)
    said = make(tmp_path, f"PYTHON={python}", "quickstart", "SET=gpu", smi=None)
    assert said.returncode == 0, said.stderr
    *_, fell_back, _, _, trained = said.stdout.splitlines()
    assert "the CPU set instead" in said.stdout
    assert trained.endswith("-m agentgrpo train quickstart"), fell_back
    assert f"{tmp_path}/venv/bin/python" in trained

"""`make quickstart` installs the set of packages for the machine it runs on, and only that.

A stand-in for nvidia-smi tells make what the machine has; nothing is installed (make -n).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOUND = "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n"
BROKEN = "#!/bin/sh\necho 'NVIDIA-SMI has failed: it cannot talk to the driver'\nexit 9\n"


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


@pytest.mark.parametrize(
    ("smi", "arguments", "wanted"),
    [
        (FOUND, [], "gpu"),
        (BROKEN, [], "cpu"),
        (None, [], "cpu"),
        (FOUND, ["SET=cpu"], "cpu"),
        (None, ["SET=gpu"], "gpu"),
    ],
)
@pytest.mark.parametrize("target", ["quickstart", "fast", "test", "recipe-demo"])
def test_the_set_of_the_machine_is_installed(
    tmp_path: Path, target: str, smi: str | None, arguments: list[str], wanted: str
) -> None:
    said = make(tmp_path, "-n", target, *arguments, smi=smi)
    assert said.returncode == 0, said.stderr
    sets = set(re.findall(r"install\.py \S+ (gpu|cpu)", said.stdout))
    assert sets == {wanted}
    if target == "quickstart":  # one code path: the same command after either set
        assert "-m agentgrpo train quickstart" in said.stdout


@pytest.mark.parametrize(("there", "smi"), [("gpu", BROKEN), ("cpu", FOUND)])
def test_one_set_is_not_installed_over_the_other(tmp_path: Path, there: str, smi: str) -> None:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").touch()
    (tmp_path / "venv" / f".installed-{there}").touch()
    said = make(tmp_path, "quickstart", smi=smi)
    assert said.returncode != 0
    assert f"holds the {there.upper()} set; remove it, or name another folder" in said.stdout
    assert "pip" not in said.stdout

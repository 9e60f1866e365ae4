"""install.py: the choice of torch, messages of failed steps, and continuing after a failure.

A fake Python stands in for pip; nothing is installed.
"""

from __future__ import annotations

import os
import platform
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import install

ROOT = Path(__file__).parents[2]
CPU, CUDA = "torch==2.13.0+cpu", "torch===2.13.0"
ABSENT = f"ERROR: No matching distribution found for {CPU}"
OFFLINE = "WARNING: Retrying (Retry(total=4)) ... NewConnectionError\n" + ABSENT
STAND_IN = """#!/bin/sh
cd "${{0%/bin/python}}"
{{ printf '%s\\t' "$@"; echo; }} >> calls
case "$*" in
{fails}
*m.requires*) cat says ;;
esac
"""
"""A shell script, since Python starts ten times slower."""


class Venv:
    """An environment whose Python records its calls and fails for chosen arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        (folder / "says").touch()
        self.fails()
        (folder / "bin" / "python").chmod(0o755)

    def fails(self, **fails: str) -> None:
        """Calls with these words print the given text and fail; all others succeed."""
        quoted = [(shlex.quote(words), shlex.quote(output)) for words, output in fails.items()]
        arms = [f"*{words}*) printf '%s\\n' {output}; exit 1 ;;" for words, output in quoted]
        script = STAND_IN.format(fails="\n".join(arms))
        (self.folder / "bin" / "python").write_text(script)

    def install(self, what: str = "cpu", **fails: str) -> tuple[int, list[list[str]]]:
        """The exit status and pip's arguments."""
        self.fails(**fails)
        (self.folder / "calls").write_text("")
        status = install.main(str(self.folder), what)
        lines = (self.folder / "calls").read_text().splitlines()
        calls = [line.removesuffix("\t").split("\t") for line in lines]
        return status, [call[6:] for call in calls if call[:3] == ["-m", "pip", "install"]]


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """A fake nvidia-smi that reports a usable GPU."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '590.44.01, 9.0'\n")
    smi.chmod(0o755)
    return smi


@pytest.fixture
def venv(tmp_path: Path, card: Path, monkeypatch: pytest.MonkeyPatch) -> Venv:
    monkeypatch.setenv("CC", "true")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Venv(tmp_path / "venv")


def test_cpu_wheel_is_preferred(venv: Venv, capsys: Any) -> None:
    status, calls = venv.install()
    assert status == 0
    parts = calls[2:-1]
    assert calls[1] == ["--no-deps", CPU]
    assert calls[-1] == ["--no-deps", "--no-build-isolation", "--editable", "."]
    pins = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    assert [pin for part in parts for pin in part[1:]] == [p for p in pins if p[0] != "#"]
    assert {part[0] for part in parts} == {"--no-deps"}
    assert 5 < len(parts) < 10
    assert "CUDA" not in capsys.readouterr().out


def test_fallback_is_pypi_torch_with_a_note_on_size(venv: Venv, capsys: Any) -> None:
    asks = 'nvidia-cudnn-cu13==9; platform_system == "Linux"'
    (venv.folder / "says").write_text(f'{asks}\npyyaml; extra == "pyyaml"\n')
    status, calls = venv.install(**{CPU: ABSENT})
    assert status == 0
    held = ["--constraint", "requirements-cpu.txt"]
    assert calls[2:5] == [["--no-deps", CUDA], [*held, asks], [*held, CUDA]]
    assert calls[5][:2] == ["--no-deps", "accelerate==1.15.0"]
    output = capsys.readouterr().out
    assert "taking PyPI's CUDA build and its libraries" in output
    assert f"PIP_EXTRA_INDEX_URL={install.CPU_INDEX}" in output
    assert "ERROR" not in output


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ({CPU: OFFLINE}, "error: installing torch: see above. A network: "),
        ({"numpy==": OFFLINE}, "error: installing the packages: see above. A network: "),
        ({"-c import torch": "ImportError"}, "this torch does not import"),
    ],
)
def test_failed_step_ends_the_installation_with_a_remedy(
    venv: Venv, capsys: Any, fails: dict[str, str], message: str
) -> None:
    """Without the larger wheel of CUDA in place of one that the network did not bring."""
    status, calls = venv.install(**fails)
    words = {word for call in calls for word in call}
    assert (status, words & {CUDA, "--editable"}) == (1, set())
    out, err = capsys.readouterr()
    assert OFFLINE not in fails.values() or (ABSENT in out and len(err.splitlines()) == 1)
    assert message in err


def test_gpu_set_has_one_torch(venv: Venv) -> None:
    _, calls = venv.install("gpu")
    asked = [word for call in calls for word in call if word.startswith("torch=")]
    assert asked == ["torch===2.11.0"]


def test_missing_compiler_is_reported_before_download(
    venv: Venv, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for compiler in ("/no/such/cc", "false"):
        monkeypatch.setenv("CC", compiler)
        status, calls = venv.install()
        assert (status, calls) == (1, [])
        assert "build-essential" in capsys.readouterr().err


def test_read_only_clone_is_refused_before_download(
    venv: Venv, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert venv.install() == (1, [])
    assert "cannot be written to, and the C extension is built in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64"), ("darwin", "x86_64")]
)
def test_unsupported_system_is_reported_before_download(
    venv: Venv, capsys: Any, monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert venv.install() == (1, [])
    output = capsys.readouterr().err
    assert "these packages are for Linux on x86-64, and this is " in output
    assert f" on {machine}: docs/install.md" in output


def test_environment_without_pip_is_recreated(tmp_path: Path, monkeypatch: Any) -> None:
    """Such as after a killed `python -m venv`, or without Debian's python3-venv."""
    installer = install.Installer(tmp_path / "venv")
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(installer, "need", lambda what, *command, **_: made.append(command[1:]))
    for there in (False, True):
        if there:
            venv = Venv(installer.venv)
            venv.fails(**{"pip -V": "No module named pip"})
        installer.make()
        assert made == [("-m", "venv", installer.venv)] * (1 + there)
    venv.fails()
    installer.make()
    assert len(made) == 2


def test_ctrl_c_prints_one_line(venv: Venv) -> None:
    slow = venv.folder / "bin" / "python"
    slow.write_text("#!/bin/sh\ncase $* in *-V) ;; *) exec sleep 60 ;; esac\n")
    with subprocess.Popen(
        [sys.executable, "install.py", venv.folder, "dev"], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as ran:  # fmt: skip
        assert ran.stdout is not None
        assert ran.stdout.readline() == "== installing what the tests need\n"
        os.killpg(ran.pid, signal.SIGINT)  # as a terminal does
        assert ran.communicate()[1] == "interrupted: the same command goes on from here\n"
        assert ran.returncode == 130


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ("", "there is no nvidia-smi"),
        ("NVIDIA-SMI has failed", "shows no GPU that can be used: NVIDIA-SMI has failed"),
        ("570.86.10, 9.0", "driver 570 and capability 9.0"),
        ("590.44.01, 7.5", "driver 590 and capability 7.5"),
        ("590.44.01, 9.0\n590.44.01, 9.0", ""),
    ],
)
def test_gpu_is_checked_before_its_set_is_downloaded(
    venv: Venv, card: Path, capsys: Any, reported: str, expected: str
) -> None:
    card.write_text(f"#!/bin/sh\necho '{reported}'\n")
    if not reported:
        card.unlink()
    status, calls = venv.install("gpu")
    assert (status == 0) == (expected == "")
    assert bool(calls) == (expected == "")
    assert expected in capsys.readouterr().err


def test_failed_gpu_step_prints_a_report(venv: Venv, capsys: Any) -> None:
    status, _ = venv.install("gpu", **{"train quickstart": "InductorError: no more shared memory"})
    output = capsys.readouterr()
    assert status == 1
    assert "InductorError" in output.out
    assert "the step failed (status 1)" in output.err
    report = (venv.folder / "gpu-report.txt").read_text()
    assert "InductorError" in report
    assert "590.44.01" in report

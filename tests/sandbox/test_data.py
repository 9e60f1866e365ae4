"""The template that E2B's users expect: numpy, pandas and matplotlib, plots and tables."""

import base64
from collections.abc import Iterator

import pytest

from agentgrpo.sandbox import Limits, Sandbox, SandboxPool, Template
from agentgrpo.sandbox.api import close_shared_pools
from agentgrpo.sandbox.templates import DATA, find_template

pytestmark = pytest.mark.nsjail


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    for name in DATA:
        pytest.importorskip(name)
    with Sandbox() as made:
        yield made
    close_shared_pools()


def test_it_is_the_default(sandbox: Sandbox) -> None:
    assert sandbox.get_info().template_id == "data"
    loaded = sandbox.run_code("import sys; [n in sys.modules for n in ('numpy', 'pandas')]")
    assert loaded.text == "[True, True]"


def test_tables_are_html(sandbox: Sandbox) -> None:
    execution = sandbox.run_code("import pandas as pd; pd.DataFrame({'a': [1, 2]})")
    (result,) = execution.results
    assert result.html is not None
    assert "<table" in result.html
    assert execution.text is not None
    assert "a" in execution.text


def test_plots_are_png(sandbox: Sandbox) -> None:
    setup = "import matplotlib.pyplot as plt\n"
    for code, count, text in (
        ("plt.plot([1, 2])\nplt.show()", 1, None),
        ("plt.plot([1, 2])\n7", 1, "7"),
        ("plt.figure(); plt.figure()", 2, "<Figure size 640x480 with 0 Axes>"),
        ("8", 0, "8"),
        ("for _ in range(30): plt.figure()", 16, None),
    ):
        execution = sandbox.run_code(setup + code)
        assert execution.error is None
        assert execution.text == text
        assert ("left out" in "".join(execution.logs.stderr)) == (count == 16)
        pngs = [result.png for result in execution.results if not result.is_main_result]
        assert len(pngs) == count
        assert all(base64.b64decode(png or "").startswith(b"\x89PNG") for png in pngs)


def test_a_missing_module_names_what_has_it() -> None:
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


def test_without_numpy_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgrpo.sandbox.templates.home_of", lambda name: None)
    with pytest.raises(Exception, match="pip install numpy"):
        find_template("data")
    with Sandbox.create() as made:
        assert made.get_info().template_id == "python"
    close_shared_pools()

"""The API reference can be made from the docstrings, and leaves no wing and nothing public out."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agentgrpo import sandbox
from tests.test_imports import TOP, WINGS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def test_all_pages_can_be_made(reference: ModuleType) -> None:
    made = reference.pages()
    assert made.keys() == {f"{name}.md" for name in reference.PAGES} | {"README.md"}
    assert all(text.count("\n") > 20 for name, text in made.items() if name != "README.md")


def test_every_wing_has_its_page(reference: ModuleType) -> None:
    """But for settings, which have docs/config.md, the viewer, a command, and what others use."""
    shown = {wing for _, wings in reference.WINGS.values() for wing in wings.split()}
    assert {*WINGS} - shown == {"sandbox", "config", "view", "files", "extras", "usercode", "cli"}
    assert shown <= {*WINGS, *TOP}


def test_every_name_of_the_sandbox_is_described(reference: ModuleType) -> None:
    text = reference.page(*reference.PAGES["sandbox"])
    for name in set(sandbox.__all__) - {
        "Status",
        "ExecutionError",
    }:  # a union, and E2B's name of StepError
        assert f"### {name}\n" in text, name


@pytest.mark.parametrize(
    "module", ["agentgrpo.types", "agentgrpo.rewards.rewards", "agentgrpo.agents.base"]
)
def test_what_is_defined_is_described(reference: ModuleType, module: str) -> None:
    """Compared with the imported module, which the generator never sees."""
    real = importlib.import_module(module)
    public = {
        name
        for name, value in vars(real).items()
        if getattr(value, "__module__", None) == module
        and not name.startswith("_")
        and (isinstance(value, type) or callable(value))
    }
    assert public == {definition.name for _, definition in reference.Module.read(module).public()}


def test_a_docstring_becomes_markdown(reference: ModuleType) -> None:
    text = "What.\n\nArgs:\n    a, b: first\n        and on.\n    c: x.\n\n"
    text += "Raises:\n    ValueError: y.\n\nEnd."
    assert reference.prose(text).splitlines() == [
        *("What.", "", "**Args**", "", "* `a, b`: first", "  and on.", "* `c`: x.", ""),
        *("**Raises**", "", "* `ValueError`: y.", "", "End."),
    ]


def test_a_definition_is_shown_without_its_body(reference: ModuleType) -> None:
    (made,) = ast.parse("@cache\nasync def f(a: int, *, b: str='') -> None:\n    return a").body
    assert reference.signature(made) == "@cache\nasync def f(a: int, *, b: str='') -> None"

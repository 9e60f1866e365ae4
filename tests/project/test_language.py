"""What `make lint` checks of pages and names: tests/language.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import language

WIDE = "word " * 30


@pytest.mark.parametrize(
    ("page", "lines"),
    [
        (f"# Title\n\n{WIDE}\n", [3]),
        (f"* item\n  {WIDE}\n", [2]),
        (f"| a |\n|---|\n| {WIDE} |\n", []),
        (f"```sh\n{WIDE}\n```\n{WIDE}\n", [4]),
        (f"text\n\n    {WIDE}\n", []),
        ("x" * 100, []),
        ("x" * 101, [1]),
    ],
)
def test_wide_lines_outside_tables_and_code(page: str, lines: list[int]) -> None:
    assert list(language.wide_lines(page)) == lines


@pytest.mark.parametrize(
    "source",
    [
        "said = 1", "said: int = 1", "said += 1", "a, (said, b) = x", "(said := 1)",
        "for said in x: pass", "[0 for said in x]", "with x as said: pass", "import x as said",
        "def f(said): pass", "def f(*, said=1): pass", "lambda said: 0",
        "try: pass\nexcept E as said: pass",
    ],
)  # fmt: skip
def test_every_way_to_assign_a_name_is_counted(source: str) -> None:
    assert "said" in dict(language.assigned_names(source))


@pytest.mark.parametrize("source", ["x.said", "f(said=1)", "x.said = 1", "print(said)", "'said'"])
def test_a_name_that_is_only_read_is_not_counted(source: str) -> None:
    assert "said" not in dict(language.assigned_names(source))


def test_faults_name_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(f"{WIDE}\n")
    (tmp_path / "agentgrpo").mkdir()
    (tmp_path / "agentgrpo" / "module.py").write_text("reply = 1\nsaid = 2\n")
    wide, fault = language.faults(tmp_path)
    assert wide == "docs/page.md:1: wider than 100 columns"
    assert fault.startswith("agentgrpo/module.py:2: a variable is called 'said'")

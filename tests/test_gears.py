"""The gears: what runs before each commit has a part of every wing, and mutants are of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import FAST
from tests.mutation import ROOT, listed


def test_every_folder_of_tests_has_a_part_that_starts_no_engine(
    pytestconfig: pytest.Config,
) -> None:
    if pytestconfig.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        pytest.skip("a part of the tests was asked for")
    folders = {path.parent for path in ROOT.glob("tests/**/test_*.py")}
    assert {path.parent for path in pytestconfig.stash[FAST]} == folders


def test_every_mutant_has_its_piece_and_its_tests() -> None:
    lists = set()
    for name, file, tests, mutant in listed():
        lists.add(name)
        assert mutant.apply((ROOT / file).read_text()) != (ROOT / file).read_text(), mutant
        assert tests, file
        for path in tests:
            assert (ROOT / path).exists(), path
    assert lists == {path.parent.name for path in Path(ROOT, "tests").glob("*/mutants.py")}

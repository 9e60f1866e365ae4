"""README's numbers are those of the rows."""

from __future__ import annotations

import pytest

from bench.table import BEGIN, END, LINES, README, newest, quantity, with_table


def test_readmes_table_is_made_from_the_newest_rows() -> None:
    text = README.read_text()
    assert with_table(text) == text, "python -m bench.table --write"
    written = text[text.index(BEGIN) : text.index(END)]
    assert all(line.what in written for line in LINES)


def test_the_newest_row_of_a_shape_is_taken() -> None:
    row = newest("packing", "tree", {"prompt": 3072})
    assert row["shape"]["prompt"] == 3072
    assert row["name"] == "packing"


def test_a_row_that_is_not_there_is_an_error() -> None:
    with pytest.raises(LookupError, match="no row 'tree' of shape"):
        newest("packing", "tree", {"prompt": 7})


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.796, "share", "0.80"), (9013.0, "ms", "9.01 s"), (0.0543, "ms", "0.0543 ms"),
     (2558.0, "1/s", "2,558 1/s"), (41.5, "us", "41.5 us")],
)  # fmt: skip
def test_quantities_read_well(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text

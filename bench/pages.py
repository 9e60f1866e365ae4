"""Replaces generated parts of pages, each between two marks."""

from __future__ import annotations

END = "<!-- end -->"


def with_made(page: str, module: str, made: str) -> str:
    """The page with a new part of `python -m MODULE --write`.

    Raises:
        ValueError: a mark is missing.
    """
    begin = f"<!-- begin: python -m {module} --write -->"
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(END)
    if not (first and last):
        raise ValueError(f"the page needs the lines {begin} and {END}")
    return f"{before}{begin}\n{made}\n{END}{after}"

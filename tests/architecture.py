"""Generates the diagram in docs/architecture.md from the table in project/test_imports.py.

    python -m tests.architecture            print it
    python -m tests.architecture --write    put it into docs/architecture.md, between the two marks

The description of a package is the first line of its docstring.
"""

from __future__ import annotations

import ast
import sys

from bench.pages import with_made
from tests.project.test_imports import PACKAGE, ROOMS, ROOT

PAGE = ROOT / "docs" / "architecture.md"
WITHOUT_A_DOCSTRING = {
    "kernels": "Triton loss kernels and their PyTorch references.",
    "sandbox/inside": "What runs in the jail: the interpreter, shells, the judge of tests.",
}
"""Folders that have no `__init__.py`."""


def floors() -> list[list[str]]:
    """Packages by level, lowest first: each is one level above the highest that it imports."""
    floor: dict[str, int] = {}
    for room, others in ROOMS.items():
        floor[room] = 1 + max((floor[below] for below in others.split()), default=-1)
    return [[r for r in ROOMS if floor[r] == n] for n in range(max(floor.values()) + 1)]


def purpose(name: str) -> str:
    """The first line of a package's docstring."""
    if name in WITHOUT_A_DOCSTRING:
        return WITHOUT_A_DOCSTRING[name]
    path = PACKAGE / name / "__init__.py"
    tree = ast.parse((path if path.exists() else PACKAGE / f"{name}.py").read_text())
    return (ast.get_docstring(tree) or "").splitlines()[0]


def label(name: str) -> str:
    """The name, with a slash if it is a folder."""
    return f"{name}/" if (PACKAGE / name).is_dir() else name


def picture() -> str:
    """The levels as text, then a table of descriptions and allowed imports."""
    arrows = sum(len(others.split()) for others in ROOMS.values())
    lines = [f"{len(ROOMS)} rooms on {len(floors())} floors, {arrows} arrows between them:", ""]
    lines.append("```text")
    for number, rooms in reversed(list(enumerate(floors()))):
        lines.append(f"{number:>3}  {'  '.join(map(label, rooms))}")
    lines += ["```", "", "| room | what is in it | imports |", "|---|---|---|"]
    for room, others in reversed(ROOMS.items()):
        lines.append(
            f"| `{label(room)}` | {purpose(room)} | {others.replace(' ', ', ') or 'nothing'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(with_made(PAGE.read_text(), "tests.architecture", picture()))
    else:
        sys.stdout.write(picture() + "\n")

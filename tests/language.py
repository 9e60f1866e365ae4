# ruff: noqa: T201 - a program
"""Two rules of CONTRIBUTING.md's "Style" that no tool checks: python -m tests.language (make lint).

Lines of pages are at most 100 columns wide, except in tables and code. Names of local variables and
parameters of the package are nouns: those in REFUSED are refused.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 100
REFUSED = ("said", "told", "asked", "shown", "wanted")
"""Names that say nothing about what they hold; none is assigned in agentgrpo/."""
PAGES = (
    "*.md",
    "docs/*.md",
    "agentgrpo/examples/*/README.md",
    "bench/results/*.md",
    ".github/*.md",
)


def wide_lines(text: str) -> Iterator[int]:
    """Numbers of the lines that are too wide, outside tables and code blocks."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        fenced ^= line.lstrip().startswith("```")
        if len(line) > WIDTH and not fenced and not line.startswith(("|", "    ")):
            yield number


def assigned_names(source: str) -> Iterator[tuple[str, int]]:
    """Each name that is assigned, bound by a loop or import, or a parameter; with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.alias):
            yield node.asname or node.name, node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno


def faults(root: Path = ROOT) -> Iterator[str]:
    """What breaks the two rules, as file:line."""
    for page in sorted(page for pattern in PAGES for page in root.glob(pattern)):
        for number in wide_lines(page.read_text()):
            yield f"{page.relative_to(root)}:{number}: wider than {WIDTH} columns"
    for path in sorted((root / "agentgrpo").rglob("*.py")):
        for name, number in assigned_names(path.read_text()):
            if name in REFUSED:
                yield (
                    f"{path.relative_to(root)}:{number}: a variable is called {name!r}: name what "
                    "it holds (message, reply, expected)"
                )


def main() -> int:
    """Print all faults. Returns the exit status."""
    lines = list(faults())
    print(*lines, sep="\n", end="\n" if lines else "")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())

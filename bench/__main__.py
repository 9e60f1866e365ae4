"""List the benchmarks: `python -m bench`."""

from __future__ import annotations

import ast
from pathlib import Path

HELPERS = {"__main__", "cached", "harness", "pages", "peers"}
"""Helper modules, not listed."""


def scripts() -> dict[str, str]:
    """Module name and first docstring line of each script."""
    root = Path(__file__).parent
    paths = [path for path in sorted(root.rglob("*.py")) if path.stem not in HELPERS]
    names = [".".join(path.relative_to(root.parent).with_suffix("").parts) for path in paths]
    docs = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in paths]
    return {name: doc.partition("\n")[0] for name, doc in zip(names, docs, strict=True)}


if __name__ == "__main__":
    for name, purpose in scripts().items():
        print(f"python -m {name:22}  {purpose}")

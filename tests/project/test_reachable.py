"""Dead code check: every function, class and constant is named outside its definition.

Searches whole words in the package, its configs, the docs and the build files, not in tests.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from agentgrpo import _C
from tests.project.test_docs import PAGES
from tests.project.test_imports import ROOT, python_files

PYTHON = python_files("agentgrpo", "agentgrpo/kernels")  # a link, which is not followed by itself
OTHERS = [*PAGES, ROOT / "Makefile", ROOT / "setup.py", *ROOT.glob("agentgrpo/examples/*/*.toml")]
ASKED_BY_OTHERS = {"__getattr__", "__all__"}


def bound(tree: ast.Module) -> Iterator[str]:
    """Top-level names of a file, except decorated ones, which a decorator may register."""
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(decorator_list=[_, *_]):
                pass
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def test_every_name_is_used() -> None:
    texts = {path: path.read_text() for path in (*PYTHON, *OTHERS)}
    counts = Counter(word for text in texts.values() for word in re.findall(r"\w+", text))
    names = [(path, name) for path in PYTHON for name in bound(ast.parse(texts[path]))]
    twice = Counter(name for _, name in names)
    unused = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, name in names
        if counts[name] <= twice[name] and name not in ASKED_BY_OTHERS
    ]
    unused += [f"_C.{name}" for name in vars(_C) if name[0] != "_" and not counts[name]]
    assert not unused

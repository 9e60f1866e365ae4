"""Whether a release of vLLM has the names that this tree takes from it, by its source alone.

Standard library only.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any


def absent_names(source: Path, folder: Path) -> list[str]:
    """What the Python files of a folder take from vLLM that its source does not have.

    Names that are imported, attributes of its modules, also by vars(module)["name"], and words of
    the file of a class, for the class's. What hangs on instances only a run shows.
    """
    found = []
    for path in sorted(folder.rglob("*.py")):
        if "vllm" not in (text := path.read_text()):
            continue
        tree, seen = ast.parse(text), dict[str, tuple[str, str]]()
        wanted: list[tuple[str, str, str]] = []
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(module=str(origin), names=aliases, level=0) if _of_vllm(origin):
                    for alias in aliases:
                        seen[alias.asname or alias.name] = origin, alias.name
                        wanted.append((origin, alias.name, ""))
                case ast.Import(names=aliases):
                    for alias in aliases:
                        if _of_vllm(alias.name):
                            above, _, last = alias.name.rpartition(".")
                            wanted.append((above, last, ""))
                            if alias.asname or not above:
                                seen[alias.asname or last] = above, last
        for node in ast.walk(tree):
            match node:
                case (
                    ast.Attribute(value=ast.Name(id=holder), attr=name)
                    | ast.Subscript(
                        value=ast.Call(func=ast.Name(id="vars"), args=[ast.Name(id=holder)]),
                        slice=ast.Constant(value=str(name)),
                    )
                ) if holder in seen and not name.startswith("__"):
                    wanted.append((*seen[holder], name))
        for module, name, attribute in wanted:
            if not _has(source, module, name, attribute):
                found.append(f"{path}: {'.'.join(filter(None, (module, name, attribute)))}")
    return found


def _of_vllm(module: str) -> bool:
    return module.partition(".")[0] == "vllm"


def _has(source: Path, module: str, name: str, attribute: str = "") -> bool:
    """Whether a module has a name; and the name, a module or another thing, the attribute."""
    if _file(source, inside := f"{module}.{name}".lstrip(".")):
        return not attribute or _has(source, inside, attribute)
    if not (path := _file(source, module)):
        return False
    if name not in (names := _names(source, path)):
        return any(_has(source, origin, name, attribute) for origin in names["*"])
    if not attribute:
        return True
    if names[name]:
        module, name = names[name]
        return _has(source, module, name, attribute)
    return bool(re.search(rf"\b{attribute}\b", path.read_text()))


def _file(source: Path, module: str) -> Path | None:
    path = source.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.exists()), None)


@cache
def _names(source: Path, path: Path) -> dict[str, Any]:
    """What a module defines, each with what it was imported as; "*": modules taken whole."""
    package = path.parent.relative_to(source).parts
    names: dict[str, Any] = {"*": []}
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                names[name] = None
                continue  # what is within is its own
            case ast.Name(id=name, ctx=ast.Store()):
                names[name] = None
            case ast.Import(names=aliases):
                names |= {(x.asname or x.name).partition(".")[0]: None for x in aliases}
            case ast.ImportFrom(module=module, names=aliases, level=level):
                base = package[: len(package) - level + 1] if level else []
                origin = ".".join([*base, *filter(None, [module])])
                for alias in aliases:
                    if alias.name == "*":
                        names["*"].append(origin)
                    else:
                        where = (origin, alias.name) if _of_vllm(origin) else None
                        names[alias.asname or alias.name] = where
            case _:
                pass
        nodes.extend(ast.iter_child_nodes(node))
    return names

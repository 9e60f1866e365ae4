"""What nothing reaches goes: a walk by names from what users start and import.

From the commands, the sandbox's public names, the examples and the code of the documents, along
imports and names, through every function and class of ours. It is static: a name in a reached
body reaches what it is bound to, a string "package.module:name" too.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from agentgrpo import _C, cli, sandbox
from tests.test_docs import PAGES, blocks
from tests.test_imports import ROOT, parsed, python_files

Node = tuple[str, str]
"""A module and a name bound at its top level; "" is what importing it runs, MAIN what -m does."""
MAIN = "__main__"


REGISTERS = re.compile(r"atexit\.register|on_pool|on_session")
"""Decorators that keep what they are given: importing the module is enough to reach it."""


class Module:
    """What a file binds at its top level, and what else it runs."""

    def __init__(self, tree: ast.Module) -> None:
        self.bodies: dict[str, list[ast.stmt]] = {"": []}
        self.imported: dict[str, str] = {}
        self.registered = [""]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    whole = alias.name if alias.asname or origin else alias.name.split(".")[0]
                    self.imported[alias.asname or whole] = origin + whole
        for statement in tree.body:
            name = ""
            match statement:
                case ast.FunctionDef() | ast.ClassDef():
                    name = statement.name
                    if any(REGISTERS.match(ast.unparse(d)) for d in statement.decorator_list):
                        self.registered.append(name)
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    pass
                case ast.If() if "__name__" in ast.unparse(statement.test):
                    name = MAIN
            self.bodies.setdefault(name, []).append(statement)


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = python_files("agentgrpo", "agentgrpo/kernels")  # a link, which is not followed by itself
MODULES = {dotted(path): Module(parsed(path)) for path in FILES}


@cache
def find(name: str) -> Node | None:
    """What a dotted name is bound to, through modules that only import it."""
    if name in MODULES:
        return name, ""
    module, _, last = name.rpartition(".")
    if module not in MODULES:
        return find(module) if module else None  # an attribute of a class
    if last in MODULES[module].bodies:
        return module, last
    return find(MODULES[module].imported.get(last, ""))


def said(text: str) -> set[Node]:
    """The nodes that a text names: modules to run, "module:name", "module.name"."""
    found = {(name, MAIN) for name in re.findall(r"-m ([\w.]+)", text) if name in MODULES}
    names = re.findall(r"agentgrpo(?:\.\w+)+(?::\w+)?", text)
    return found | {node for name in names if (node := find(name.replace(":", ".")))}


def uses(module: Module, own: str, tree: ast.AST) -> tuple[set[Node], set[str]]:
    """The nodes that code names, and every name and attribute in it."""
    nodes, names = set[Node | None](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                nodes |= said(text)
            case ast.Import(names=aliases):
                nodes |= {find(alias.name) for alias in aliases}
            case ast.ImportFrom(module=str(name), names=aliases):
                there = [name, *(f"{name}.{alias.name}" for alias in aliases)]
                nodes |= {find(name) for name in there if name in MODULES}
            case ast.Name(id="__file__"):
                nodes.add((own, MAIN))  # it runs itself in another process
            case ast.Name(id=name):
                names.add(name)
                nodes.add(find(f"{own}.{name}") if own else find(module.imported.get(name, "")))
            case ast.Attribute(attr=attribute):
                names.add(attribute)
                first, *rest = ast.unparse(node).split(".")
                if first in module.imported:
                    nodes.add(find(".".join([module.imported[first], *rest])))
    return {node for node in nodes if node}, names


def reached() -> tuple[set[Node], set[str]]:
    """Everything from where users start, and every name in it."""
    texts = [path.read_text() for path in (*PAGES, ROOT / "Makefile", ROOT / "setup.py")]
    texts += [path.read_text() for path in ROOT.glob("agentgrpo/configs/*.toml")]
    todo = set().union(*map(said, texts))
    todo |= {(module, "main") for module, _ in cli.COMMANDS.values()}
    todo |= {("agentgrpo.cli", "main"), ("agentgrpo.__main__", "")}
    todo |= {node for name in sandbox.__all__ if (node := find(f"agentgrpo.sandbox.{name}"))}
    todo |= {(name, of) for name in MODULES if ".examples" in name for of in MODULES[name].bodies}
    todo |= {(n, of) for n in MODULES if ".sandbox.guest." in n for of in MODULES[n].bodies}
    names = set[str]()
    for page in PAGES:
        for text in blocks(page, "python"):
            tree = ast.parse(text.replace("agentgrpo_kernels", "agentgrpo.kernels"))
            imported = {node for name in Module(tree).imported.values() if (node := find(name))}
            new, more = uses(Module(tree), "", tree)
            todo, names = todo | new | imported, names | more
    done = set[Node]()
    while todo:
        module, name = node = todo.pop()
        done.add(node)
        todo |= {(module, of) for of in MODULES[module].registered} - done
        for statement in MODULES[module].bodies.get(name, []):
            new, more = uses(MODULES[module], module, statement)
            todo, names = todo | new - done, names | more
    return done, names


def test_everything_is_reached_from_where_users_start() -> None:
    done, names = reached()
    lost = {f"agentgrpo._C.{name}" for name in vars(_C) if name[0] != "_" and name not in names}
    for module, held in MODULES.items():
        left = {name for name in held.bodies if name and (module, name) not in done}
        whole = left == set(held.bodies) - {""}
        left -= {MAIN, "__all__", "__getattr__"}  # Python asks for the last
        lost |= {module} if left and whole else {f"{module}.{name}" for name in left}
    assert not lost

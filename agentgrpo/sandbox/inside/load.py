"""Loads what runs inside: Python whose builtins user code cannot pull from under it, and C."""

import builtins
import os
from typing import Any


def isolated(name: str) -> dict[str, Any]:
    """The globals of inside/NAME.py, run with a private copy of the builtins, in no module table.

    Functions remember the builtins of the globals they were defined in, so that code which assigns
    to ``builtins.len`` or clears ``sys.modules`` changes nothing for them.
    """
    path = os.path.join(os.path.dirname(__file__), f"{name}.py")
    with open(path, encoding="utf-8") as file:
        code = compile(file.read(), path, "exec")
    module = {"__name__": name, "__file__": path, "__builtins__": dict(vars(builtins))}
    exec(code, module)
    return module


def extension(path: str) -> Any:
    """The project's C extension, by its path."""
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_loader

    loader = ExtensionFileLoader("_C", path)
    spec = spec_from_loader("_C", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module

"""Loads our code inside a session: Python with private builtins, and the C extension."""

import builtins
import os
from typing import Any


def isolated(name: str) -> dict[str, Any]:
    """Run inside/NAME.py with a private copy of the builtins, outside of sys.modules. Returns its
    globals.

    Functions use the builtins of the globals in which they were defined. So code that assigns to
    ``builtins.len`` or clears ``sys.modules`` does not affect them.
    """
    path = os.path.join(os.path.dirname(__file__), f"{name}.py")
    with open(path, encoding="utf-8") as file:
        code = compile(file.read(), path, "exec")
    module = {"__name__": name, "__file__": path, "__builtins__": dict(vars(builtins))}
    exec(code, module)
    return module


def extension(path: str) -> Any:
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_loader

    loader = ExtensionFileLoader("_C", path)
    spec = spec_from_loader("_C", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module

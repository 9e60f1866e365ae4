"""Loads the interpreter loop so that user code cannot pull its builtins from under it."""

import builtins
import os
from typing import Any


def isolated(name: str) -> dict[str, Any]:
    """The globals of guest/NAME.py, run with a private copy of the builtins, in no module table.

    Functions remember the builtins of the globals they were defined in, so that code which assigns
    to ``builtins.len`` or clears ``sys.modules`` changes nothing for them.
    """
    path = os.path.join(os.path.dirname(__file__), f"{name}.py")
    with open(path, encoding="utf-8") as file:
        code = compile(file.read(), path, "exec")
    module = {"__name__": name, "__file__": path, "__builtins__": dict(vars(builtins))}
    exec(code, module)
    return module

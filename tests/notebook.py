"""Run a notebook's cells in a fresh process, like Jupyter but without its kernel.

    python -m tests.notebook docs/notebook.ipynb [--write]

The cells run in `__main__`, in order, in the current folder. --write stores their output and
figures in the notebook, as Jupyter would. No Jupyter package is needed.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

Output = dict[str, Any]


def run_cells(notebook: dict[str, Any]) -> None:
    """Run the code cells and store their output in `outputs`."""
    import __main__

    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        number += 1
        stdout = io.StringIO()
        code = compile("".join(cell["source"]), f"<cell {number}>", "exec")
        with contextlib.redirect_stdout(stdout):
            exec(code, vars(__main__))
        sys.stdout.write(stdout.getvalue())
        sys.stdout.flush()
        text = stdout.getvalue().splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [*_stream(text), *_figures()]


def _stream(lines: list[str]) -> list[Output]:
    return [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []


def _figures() -> list[Output]:
    """The figures that matplotlib would show below a cell."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    figures = []
    for number in pyplot.get_fignums():
        png = io.BytesIO()
        pyplot.figure(number).savefig(png, dpi=72, bbox_inches="tight")
        data = {"image/png": base64.b64encode(png.getvalue()).decode() + "\n"}
        figures.append({"output_type": "display_data", "metadata": {}, "data": data})
    pyplot.close("all")
    return figures


def main(arguments: list[str]) -> None:
    """Run the notebook; with --write, store its outputs."""
    path = Path(arguments[0]).resolve()
    notebook = json.loads(path.read_text())
    run_cells(notebook)
    if "--write" in arguments:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

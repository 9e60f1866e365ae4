"""Run a notebook's cells in a fresh process, as Jupyter does but for its kernel.

    python -m tests.notebook docs/notebook.ipynb [--write]

The cells run in `__main__`, in order, in the current folder. --write stores what they print and
the figures that they show in the notebook, as Jupyter would. No package of Jupyter's is needed.
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
    """Run the code cells and put what they say in their `outputs`."""
    import __main__

    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        number += 1
        said = io.StringIO()
        code = compile("".join(cell["source"]), f"<cell {number}>", "exec")
        with contextlib.redirect_stdout(said):
            exec(code, vars(__main__))
        sys.stdout.write(said.getvalue())
        sys.stdout.flush()
        text = said.getvalue().splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [*_stream(text), *_figures()]


def _stream(lines: list[str]) -> list[Output]:
    return [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []


def _figures() -> list[Output]:
    """What matplotlib would show below a cell."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    made = []
    for number in pyplot.get_fignums():
        png = io.BytesIO()
        pyplot.figure(number).savefig(png, dpi=72, bbox_inches="tight")
        data = {"image/png": base64.b64encode(png.getvalue()).decode() + "\n"}
        made.append({"output_type": "display_data", "metadata": {}, "data": data})
    pyplot.close("all")
    return made


def main(arguments: list[str]) -> None:
    """Run the notebook; with --write, store its outputs."""
    path = Path(arguments[0]).resolve()
    notebook = json.loads(path.read_text())
    run_cells(notebook)
    if "--write" in arguments:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Notebook cells, for templates with IPython: magics, ``!``, await, displays.

Displays are JSON: ``[{"main": whether it is the cell's value, "data": {MIME type: ...}}]``, with
bytes in base64.
"""

import base64
import contextlib
import importlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.formatters import BaseFormatter
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from IPython.display import display
from traitlets import ObjectName, Type, Unicode
from traitlets.config import Config


class ValueHook(DisplayHook):
    """Adds the value of a cell to its displays."""

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        self.shell.display_pub.outputs.append({"main": True, "data": format_dict})


class Notebook(InteractiveShell):
    """Runs cells. ``cell_error`` is the exception of the last one."""

    displayhook_class = Type(ValueHook)
    display_pub_class = Type(CapturingDisplayPublisher)
    system = InteractiveShell.system_raw  # the default needs a terminal
    cell_error: BaseException | None = None

    def enable_gui(self, gui: Any = None) -> None:
        pass

    def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:
        """Store the cell's first exception, instead of printing it."""
        self.cell_error = self.cell_error or (exc_tuple or sys.exc_info())[1]

    showsyntaxerror = showtraceback

    def run(
        self, source: str, most: int, clip: Callable[[str], str]
    ) -> tuple[BaseException | None, list[bytes]]:
        """Run a cell. Returns its exception and its displays as JSON, at most `most` bytes."""
        self.cell_error, outputs = None, self.display_pub.outputs
        outputs.clear()
        self.run_cell(source, store_history=True)
        results = []
        for output in outputs:
            bundle = {"main": "main" in output, "data": (data := output["data"])}
            if "text/plain" in data:
                data["text/plain"] = clip(data["text/plain"])
            text = json.dumps(bundle, default=to_json).encode()
            most -= len(text)
            if most < 0:
                sys.stderr.write("a result is left out: too many, or larger than fits\n")
                break
            results.append(text)
        return self.cell_error, results


def to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    for way in ("isoformat", "item", "tolist"):
        if hasattr(value, way):
            return getattr(value, way)()
    return str(value)


class Structured(BaseFormatter):
    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = dict


def make_notebook(module: ModuleType) -> Notebook:
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "NoColor"
    warnings.filterwarnings("ignore", "To exit: use 'exit'")
    with tempfile.TemporaryDirectory() as home:
        shell: Notebook = Notebook.instance(
            config=config, user_module=module, user_ns=vars(module), ipython_dir=home,
            profile_dir=ProfileDir(location=home),
        )  # fmt: skip
    formatters = shell.display_formatter.formatters
    formatters["e2b/data"] = table = Structured(parent=shell.display_formatter)
    for home_of in ("pandas", "pandas.core.frame"):
        table.for_type_by_name(home_of, "DataFrame", lambda frame: frame.to_dict(orient="list"))
    with contextlib.suppress(ImportError):
        charts = importlib.import_module("e2b_charts")
        formatters["e2b/chart"] = chart = Structured(
            parent=shell.display_formatter, format_type="e2b/chart"
        )
        figure = "matplotlib.figure", "FigureBase"  # the inline backend resets that of "Figure"
        chart.for_type_by_name(*figure, charts.chart_figure_to_dict)
    if "matplotlib.pyplot" in sys.modules:
        shell.enable_matplotlib("inline")
    with contextlib.suppress(ImportError):
        show_images()
    return shell


def show_images() -> None:
    """Display images of PIL when they are saved, as in E2B's sandboxes."""
    image = importlib.import_module("PIL.Image").Image
    importlib.import_module("PIL.ImageShow")
    save = image.save

    def save_and_display(self: Any, fp: Any, format: Any = None, **params: Any) -> None:
        if isinstance(fp, str):
            display(self)
        save(self, fp, format, **params)

    image.save = save_and_display

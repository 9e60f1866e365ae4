"""Cells as a notebook runs them, for templates with IPython: magics, ``!``, await, displays.

What is displayed is JSON: ``[{"main": whether it is the cell's value, "data": {MIME type: ...}}]``,
with bytes in base64.
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


class Hook(DisplayHook):
    """Keeps the value of a cell."""

    def write_output_prompt(self) -> None:
        """None."""

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        """Beside what is displayed."""
        self.shell.display_pub.outputs.append({"main": True, "data": format_dict})


class Notebook(InteractiveShell):
    """An interpreter of cells. ``failed`` is what the last one raised."""

    displayhook_class = Type(Hook)
    display_pub_class = Type(CapturingDisplayPublisher)
    system = InteractiveShell.system_raw  # not by a terminal, of which there is none
    failed: BaseException | None = None

    def enable_gui(self, gui: Any = None) -> None:
        """None."""

    def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:
        """The first thing that went wrong; who asked for the cell shows it."""
        self.failed = self.failed or (exc_tuple or sys.exc_info())[1]

    showsyntaxerror = showtraceback

    def run(
        self, source: str, most: int, clip: Callable[[str], str]
    ) -> tuple[BaseException | None, list[bytes]]:
        """Run a cell: what it raised, what it displayed (at most so many bytes), each as JSON.
        clip: shortens a long text.
        """
        self.failed, outputs = None, self.display_pub.outputs
        outputs.clear()
        self.run_cell(source, store_history=True)
        found = []
        for shown in outputs:
            bundle = {"main": "main" in shown, "data": (data := shown["data"])}
            if "text/plain" in data:
                data["text/plain"] = clip(data["text/plain"])
            told = json.dumps(bundle, default=plain).encode()
            most -= len(told)
            if most < 0:
                sys.stderr.write("a result is left out: too many, or larger than fits\n")
                break
            found.append(told)
        return self.failed, found


def plain(value: Any) -> Any:
    """What JSON has instead of a value."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    for way in ("isoformat", "item", "tolist"):
        if hasattr(value, way):
            return getattr(value, way)()
    return str(value)


class Structured(BaseFormatter):
    """E2B's form of a table or a chart."""

    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = dict


def made(module: ModuleType) -> Notebook:
    """A notebook whose cells run in a module."""
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
        figure = "matplotlib.figure", "FigureBase"  # of "Figure" the inline backend forgets it
        chart.for_type_by_name(*figure, charts.chart_figure_to_dict)
    if "matplotlib.pyplot" in sys.modules:
        shell.enable_matplotlib("inline")
    with contextlib.suppress(ImportError):
        show_images()
    return shell


def show_images() -> None:
    """Images of PIL are shown when they are saved, as in E2B's sandboxes."""
    image = importlib.import_module("PIL.Image").Image
    importlib.import_module("PIL.ImageShow")
    save = image.save

    def shown(self: Any, fp: Any, format: Any = None, **params: Any) -> None:
        if isinstance(fp, str):
            display(self)
        save(self, fp, format, **params)

    image.save = shown

"""Results of ``Sandbox.run_code()`` and ``commands.run()``, with the fields of E2B's SDK."""

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agentgrpo.sandbox.isolation.errors import SandboxException
from agentgrpo.sandbox.isolation.template import DATA, INSTALL, has_data
from agentgrpo.sandbox.session.step_result import StepError, StepResult, StepStatus

FORMS = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown", "text/latex": "latex",
    "image/svg+xml": "svg", "image/png": "png", "image/jpeg": "jpeg", "application/pdf": "pdf",
    "application/javascript": "javascript", "application/json": "json", "e2b/data": "data",
    "e2b/chart": "chart",
}  # fmt: skip
"""MIME types and their fields of Result."""
STRUCTURED = ("json", "data", "chart")
RESTARTS = "variables are lost, files are kept, and the next cell starts a new interpreter"


@dataclass(frozen=True, slots=True)
class OutputMessage:
    """A piece of output."""

    line: str
    timestamp: int
    """Nanoseconds since the epoch."""
    error: bool = False
    """Whether it is from standard error."""


ExecutionError = StepError
"""E2B's name for an exception that reached the top of a cell."""


@dataclass(frozen=True, slots=True)
class Result:
    """A display of a cell, or the value of its last expression. Images are base64."""

    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    svg: str | None = None
    png: str | None = None
    jpeg: str | None = None
    pdf: str | None = None
    latex: str | None = None
    json: Any = None
    javascript: str | None = None
    data: dict[str, Any] | None = None
    """The columns of a data frame."""
    chart: Any = None
    """The content of a figure, as a chart of the package e2b-charts if that is installed."""
    is_main_result: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other MIME types."""

    def formats(self) -> list[str]:
        return [name for name in FORMS.values() if getattr(self, name)] + [*self.extra]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __str__(self) -> str:
        return f"Result({self.text})" if self.text else f"Result(formats: {self.formats()})"


@dataclass(slots=True)
class Logs:
    """Printed output, in the pieces in which it arrived."""

    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Execution:
    """Result of a cell. ``step`` has what E2B lacks: status, cost, truncation."""

    step: StepResult
    results: list[Result] = field(default_factory=list)
    logs: Logs = field(default_factory=Logs)
    error: ExecutionError | None = None
    execution_count: int | None = None

    @property
    def status(self) -> StepStatus:
        return self.step.status

    @property
    def text(self) -> str | None:
        """The text of the main result."""
        return next((result.text for result in self.results if result.is_main_result), None)

    def to_json(self) -> str:
        """JSON in E2B's format."""
        results = [{name: result[name] for name in result.formats()} for result in self.results]
        logs, error = json.dumps(asdict(self.logs)), self.error and json.dumps(asdict(self.error))
        fields = {"results": results, "logs": logs, "error": error}
        return json.dumps(fields, default=lambda chart: chart.model_dump())


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Output and exit code of a command."""

    stdout: str
    stderr: str
    exit_code: int
    error: str | None = None


class CommandExitException(SandboxException):
    """A command ended with an exit code other than 0."""

    def __init__(self, result: CommandResult) -> None:
        super().__init__(f"exit code {result.exit_code}: {result.error or result.stderr[-2000:]}")
        self.stdout, self.stderr = result.stdout, result.stderr
        self.exit_code, self.error = result.exit_code, result.error


def results_of(step: StepResult) -> list[Result]:
    """Parse the displays of a step and the value of its last expression."""
    if not step.results:
        return [] if step.value is None else [_result({"text/plain": step.value}, True)]
    try:
        return [_result(display["data"], display["main"]) for display in json.loads(step.results)]
    except Exception as error:  # the session's code can write anything
        message = f"{type(error).__name__}: {error}"[:200]
        return [Result(is_main_result=False, extra={"unreadable": message})]


def _result(data: dict[str, Any], main: bool) -> Result:
    forms = {FORMS[mime]: data.pop(mime) for mime in list(data) if mime in FORMS}
    if not all(isinstance(value, str) or name in STRUCTURED for name, value in forms.items()):
        raise TypeError("a format that is not text")
    text = forms.get("text") or ""
    if text[:1] == text[-1:] and text[:1] in ("'", '"'):  # a str without its quotes, as in E2B
        forms["text"] = text[1:-1]
    if forms.get("chart"):
        forms["chart"] = _chart(forms["chart"])
    return Result(**forms, is_main_result=main is True, extra=data)


def _chart(fields: dict[str, Any]) -> Any:
    charts: Any = importlib.import_module("e2b_charts.main")
    name = "".join(map(str.title, fields["type"].split("_"))) + "Chart"
    if fields["type"] == "superchart":
        elements = [_chart(element) for element in fields["elements"]]
        return charts.SuperChart.model_construct(**fields | {"elements": elements})
    return getattr(charts, name, charts.Chart)(**fields)


def hint_of(message: str) -> str:
    """The remedy for "No module named ...": a template that has it."""
    match = re.match(r"No module named '(\w{1,99})", message, re.ASCII)
    if match is None:
        return ""
    if match[1] in DATA:
        return '; remedy: Sandbox.create("data")' + f", after {INSTALL}" * (not has_data())
    build = "agentgrpo sandbox template build NAME -r REQUIREMENTS"
    return f'; remedy: {build}, then Sandbox.create("NAME")'


def execution_of(step: StepResult, count: int, restarts: bool = False) -> Execution:
    """Convert a step to E2B's Execution.

    The end of the interpreter becomes an error: E2B's "ContextRestarting" if the sandbox goes on
    (restarts), otherwise with the status as its name.
    """
    error = None
    if step.error is not None:
        hint = hint_of(step.error.value) if step.error.name == "ModuleNotFoundError" else ""
        value, trace = f"{step.error.value}{hint}", f"{step.error.traceback}{hint.lstrip('; ')}"
        error = ExecutionError(step.error.name, value, trace)
    elif step.status is not StepStatus.OK:
        name = "SystemExit" if step.status is StepStatus.EXIT else str(step.status)
        error = ExecutionError(name, step.detail, "")
        if restarts:
            error = ExecutionError("ContextRestarting", f"{step.detail}; {RESTARTS}", "")
    logs = Logs([step.stdout] if step.stdout else [], [step.stderr] if step.stderr else [])
    return Execution(step, results_of(step), logs, error, count)

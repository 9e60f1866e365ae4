"""What ``Sandbox.run_code()`` and ``commands.run()`` return, in the shapes of E2B's SDK."""

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agentgrpo.sandbox.isolation.errors import SandboxException
from agentgrpo.sandbox.isolation.templates import DATA, INSTALL, has_data
from agentgrpo.sandbox.session.result import StepError, StepResult, StepStatus

FORMS = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown", "text/latex": "latex",
    "image/svg+xml": "svg", "image/png": "png", "image/jpeg": "jpeg", "application/pdf": "pdf",
    "application/javascript": "javascript", "application/json": "json", "e2b/data": "data",
    "e2b/chart": "chart",
}  # fmt: skip
"""MIME type to the field of Result."""
STRUCTURED = ("json", "data", "chart")
RESTARTS = "variables are lost, files are kept, and the next cell starts a new interpreter"


@dataclass(frozen=True, slots=True)
class OutputMessage:
    """A piece of output as it arrived."""

    line: str
    timestamp: int
    """Nanoseconds since the epoch."""
    error: bool = False
    """Whether it came from standard error."""


ExecutionError = StepError
"""E2B's name of an exception that reached the top of a cell."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a cell displayed, or the value of its last expression, in the forms that it has. Images
    are base64.
    """

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
    """What a figure plots, where the package e2b-charts is installed: a chart of that package."""
    is_main_result: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """MIME types that are no field."""

    def formats(self) -> list[str]:
        """The names of the forms that are there."""
        return [name for name in FORMS.values() if getattr(self, name)] + [*self.extra]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __str__(self) -> str:
        return f"Result({self.text})" if self.text else f"Result(formats: {self.formats()})"


@dataclass(slots=True)
class Logs:
    """What was printed, in the pieces in which it arrived."""

    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Execution:
    """One run of code. ``step`` has what E2B does not tell: status, cost, truncation."""

    step: StepResult
    results: list[Result] = field(default_factory=list)
    logs: Logs = field(default_factory=Logs)
    error: ExecutionError | None = None
    execution_count: int | None = None

    @property
    def status(self) -> StepStatus:
        """How it ended."""
        return self.step.status

    @property
    def text(self) -> str | None:
        """The text of the main result."""
        return next((result.text for result in self.results if result.is_main_result), None)

    def to_json(self) -> str:
        """As E2B writes it."""
        results = [{name: one[name] for name in one.formats()} for one in self.results]
        logs, error = json.dumps(asdict(self.logs)), self.error and json.dumps(asdict(self.error))
        told = {"results": results, "logs": logs, "error": error}
        return json.dumps(told, default=lambda chart: chart.model_dump())


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A command that has ended."""

    stdout: str
    stderr: str
    exit_code: int
    error: str | None = None


class CommandExitException(SandboxException):
    """A command ended with another exit code than 0."""

    def __init__(self, result: CommandResult) -> None:
        super().__init__(f"exit code {result.exit_code}: {result.error or result.stderr[-2000:]}")
        self.stdout, self.stderr = result.stdout, result.stderr
        self.exit_code, self.error = result.exit_code, result.error


def results_of(step: StepResult) -> list[Result]:
    """The results in a step: what was displayed, and the value of its last expression."""
    if not step.results:
        return [] if step.value is None else [_result({"text/plain": step.value}, True)]
    try:
        return [_result(shown["data"], shown["main"]) for shown in json.loads(step.results)]
    except Exception as error:  # the session's code has written it
        told = {"unreadable": f"{type(error).__name__}: {error}"[:200]}
        return [Result(is_main_result=False, extra=told)]


def _result(data: dict[str, Any], main: bool) -> Result:
    forms = {FORMS[mime]: data.pop(mime) for mime in list(data) if mime in FORMS}
    if not all(isinstance(told, str) or name in STRUCTURED for name, told in forms.items()):
        raise TypeError("a form that is no text")
    text = forms.get("text") or ""
    if text[:1] == text[-1:] and text[:1] in ("'", '"'):  # of a str its text, as in E2B
        forms["text"] = text[1:-1]
    if forms.get("chart"):
        forms["chart"] = _chart(forms["chart"])
    return Result(**forms, is_main_result=main is True, extra=data)


def _chart(told: dict[str, Any]) -> Any:
    kinds: Any = importlib.import_module("e2b_charts.main")
    name = "".join(map(str.title, told["type"].split("_"))) + "Chart"
    if told["type"] == "superchart":
        elements = [_chart(element) for element in told["elements"]]
        return kinds.SuperChart.model_construct(**told | {"elements": elements})
    return getattr(kinds, name, kinds.Chart)(**told)


def hint_of(message: str) -> str:
    """After "No module named ...": which template has it."""
    named = re.match(r"No module named '(\w{1,99})", message, re.ASCII)
    if named is None:
        return ""
    if named[1] in DATA:
        return '; remedy: Sandbox.create("data")' + f", after {INSTALL}" * (not has_data())
    build = "agentgrpo sandbox template build NAME -r REQUIREMENTS"
    return f'; remedy: {build}, then Sandbox.create("NAME")'


def execution_of(step: StepResult, count: int, restarts: bool = False) -> Execution:
    """A step in E2B's shape. An interpreter that died shows as an error: E2B's "ContextRestarting"
    where the sandbox goes on (restarts), else named after its status.
    """
    error = None
    if step.error is not None:
        told = hint_of(step.error.value) if step.error.name == "ModuleNotFoundError" else ""
        value, trace = f"{step.error.value}{told}", f"{step.error.traceback}{told.lstrip('; ')}"
        error = ExecutionError(step.error.name, value, trace)
    elif step.status is not StepStatus.OK:
        name = "SystemExit" if step.status is StepStatus.EXIT else str(step.status)
        error = ExecutionError(name, step.detail, "")
        if restarts:
            error = ExecutionError("ContextRestarting", f"{step.detail}; {RESTARTS}", "")
    logs = Logs([step.stdout] if step.stdout else [], [step.stderr] if step.stderr else [])
    return Execution(step, results_of(step), logs, error, count)

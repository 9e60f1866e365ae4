"""What ``Sandbox.run_code()`` and ``commands.run()`` return, in the shapes of E2B's SDK."""

import base64
import re
from dataclasses import dataclass, field
from typing import Any

from agentgrpo.sandbox.errors import SandboxException
from agentgrpo.sandbox.result import StepError, StepResult, StepStatus
from agentgrpo.sandbox.templates import DATA, has_data

TEXT_FORMS = {
    "text/html": "html",
    "text/markdown": "markdown",
    "text/latex": "latex",
    "image/svg+xml": "svg",
}
BINARY_FORMS = {"image/png": "png", "image/jpeg": "jpeg"}


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
    """The value of a cell's last expression, in the forms that it has. Images are base64."""

    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    latex: str | None = None
    svg: str | None = None
    png: str | None = None
    jpeg: str | None = None
    is_main_result: bool = True

    def formats(self) -> list[str]:
        """The names of the forms that are there."""
        names = ("text", *TEXT_FORMS.values(), *BINARY_FORMS.values())
        return [name for name in names if getattr(self, name) is not None]

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
    """The results in a step: the figures that were drawn, and the value of its last expression."""
    figures = [
        Result(png=base64.b64encode(data).decode(), is_main_result=False)
        for mime, data in step.rich.items()
        if mime.startswith("figure/")
    ]
    return figures if step.value is None else [*figures, _main(step, step.value)]


def _main(step: StepResult, text: str) -> Result:
    forms: dict[str, Any] = {"text": text}
    for mime, name in TEXT_FORMS.items():
        if mime in step.rich:
            forms[name] = step.rich[mime].decode("utf-8", "replace")
    for mime, name in BINARY_FORMS.items():
        if mime in step.rich:
            forms[name] = base64.b64encode(step.rich[mime]).decode()
    return Result(**forms)


def hint_of(message: str) -> str:
    """After "No module named ...": which template has it."""
    named = re.match(r"No module named '(\w{1,99})", message, re.ASCII)
    if named is None:
        return ""
    if named[1] in DATA and has_data():
        return '; remedy: Sandbox.create("data")'
    build = "agentgrpo sandbox template build NAME -r REQUIREMENTS"
    return f'; remedy: {build}, then Sandbox.create("NAME")'


def execution_of(step: StepResult, count: int) -> Execution:
    """A step in E2B's shape. A session that died shows as an error named after its status."""
    error = None
    if step.error is not None:
        told = hint_of(step.error.value) if step.error.name == "ModuleNotFoundError" else ""
        value, trace = f"{step.error.value}{told}", f"{step.error.traceback}{told.lstrip('; ')}"
        error = ExecutionError(step.error.name, value, trace)
    elif step.status is not StepStatus.OK:
        name = "SystemExit" if step.status is StepStatus.EXIT else str(step.status)
        error = ExecutionError(name, step.detail, "")
    logs = Logs([step.stdout] if step.stdout else [], [step.stderr] if step.stderr else [])
    return Execution(step, results_of(step), logs, error, count)

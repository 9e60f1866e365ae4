"""What ``Sandbox.run_code()`` and ``commands.run()`` return, in the shapes of E2B's SDK."""

import base64
from dataclasses import dataclass, field
from typing import Any

from agentgrpo.sandbox.errors import SandboxException
from agentgrpo.sandbox.result import StepResult, StepStatus

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


@dataclass(frozen=True, slots=True)
class ExecutionError:
    """An exception that reached the top of a cell."""

    name: str
    value: str
    traceback: str


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


def result_of(step: StepResult) -> Result | None:
    """The result in a step, None if its last expression had no value."""
    if step.value is None:
        return None
    forms: dict[str, Any] = {"text": step.value}
    for mime, name in TEXT_FORMS.items():
        if mime in step.rich:
            forms[name] = step.rich[mime].decode("utf-8", "replace")
    for mime, name in BINARY_FORMS.items():
        if mime in step.rich:
            forms[name] = base64.b64encode(step.rich[mime]).decode()
    return Result(**forms)


def execution_of(step: StepResult, count: int) -> Execution:
    """A step in E2B's shape. A session that died shows as an error named after its status."""
    result = result_of(step)
    error = None
    if step.error is not None:
        error = ExecutionError(step.error.name, step.error.value, step.error.traceback)
    elif step.status is not StepStatus.OK:
        name = "SystemExit" if step.status is StepStatus.EXIT else str(step.status)
        error = ExecutionError(name, step.detail, "")
    logs = Logs([step.stdout] if step.stdout else [], [step.stderr] if step.stderr else [])
    return Execution(step, [result] if result else [], logs, error, count)

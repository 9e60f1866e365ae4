"""Python's interactive console (``>>> ``) in a session."""

from dataclasses import dataclass

from agentgrpo.sandbox.isolation.guards import ProcessBound, wraps_os_errors
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.step_result import StepResult, StepStatus

FIRST, MORE = ">>> ", "... "


@dataclass(frozen=True, slots=True)
class ConsoleLine:
    """A typed line and the terminal's output."""

    prompt: str
    line: str
    output: str
    step: StepResult

    @property
    def failed(self) -> bool:
        """Whether the line caused an exception, a timeout or the end of the session."""
        return self.step.status is not StepStatus.OK


@wraps_os_errors
class Console(ProcessBound):
    """The interactive prompt of a new session. stdout and stderr are joined, as on a terminal.

    The session compiles each statement with Python's own console (module ``code``), so echoed
    expressions, ``_``, multi-line blocks and tracebacks are exactly Python's.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.prompt = FIRST
        """The prompt of the next line."""
        self.transcript = ""
        """The whole terminal session so far."""
        session.make_console()

    def type(self, line: str, timeout_s: float | None = None) -> ConsoleLine:
        """Type one line (without its newline). Returns the output up to the next prompt.

        Raises:
            ValueError: line has a newline.
        """
        if "\n" in line:
            raise ValueError(f"line: expected one line, got {line!r}")
        step = self._session.push(line, timeout_s)
        typed = ConsoleLine(self.prompt, line, step.stdout, step)
        self.transcript += f"{self.prompt}{line}\n{step.stdout}"
        self.prompt = MORE if step.more else FIRST
        return typed

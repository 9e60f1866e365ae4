"""Python's interactive console over a session: what an agent sees that types at ``>>> ``."""

from dataclasses import dataclass

from agentgrpo.sandbox.isolation.guards import ProcessBound, public
from agentgrpo.sandbox.session.result import StepResult, StepStatus
from agentgrpo.sandbox.session.session import Session

FIRST, MORE = ">>> ", "... "


@dataclass(frozen=True, slots=True)
class ConsoleLine:
    """One line that was typed, and what the terminal showed."""

    prompt: str
    line: str
    shown: str
    step: StepResult

    @property
    def failed(self) -> bool:
        """Whether the line ended in an exception, a timeout or the end of the session."""
        return self.step.status is not StepStatus.OK


@public
class Console(ProcessBound):
    """The interactive prompt of a fresh session. Both streams are one, as on a terminal.

    Echoed expressions, ``_``, blocks that need more lines and tracebacks are Python's own: the
    session compiles each statement as its console does.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.prompt = FIRST
        """What the terminal shows before the next line."""
        self.transcript = ""
        """Everything that the terminal has shown so far."""
        session.make_console()

    def type(self, line: str, timeout_s: float | None = None) -> ConsoleLine:
        """Type one line (without its newline) and say what was shown until the next prompt.

        Raises:
            ValueError: line is more than one line.
        """
        if "\n" in line:
            raise ValueError(f"type() takes one line, got {line!r}")
        step = self._session.push(line, timeout_s)
        typed = ConsoleLine(self.prompt, line, step.stdout, step)
        self.transcript += f"{self.prompt}{line}\n{step.stdout}"
        self.prompt = MORE if step.more else FIRST
        return typed

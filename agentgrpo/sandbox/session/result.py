"""What a step of untrusted code came to."""

from dataclasses import dataclass
from enum import StrEnum

from agentgrpo.sandbox.session.host_tools import HostCall

CLOSED = "the session was closed"
"""The detail of a step that ran when it was."""


class StepStatus(StrEnum):
    """How a step ended.

    ``ok``, ``error`` and ``exit`` are what the interpreter inside showed; every other one is
    established by the host, the kernel or the session's init, and cannot be forged from inside.
    """

    OK = "ok"
    ERROR = "error"
    """The code raised; ``StepResult.error`` has it. State is kept."""
    EXIT = "exit"
    """The code asked to exit: state is kept after ``sys.exit()``, lost after ``os._exit()``."""
    TIMEOUT = "timeout"
    """Interrupted at the deadline. State is kept."""
    TIMEOUT_KILLED = "timeout_killed"
    """The code ignored the interrupt, or the session's own time was over."""
    OOM = "oom"
    """Killed by the memory limit."""
    SIGNAL = "signal"
    """The interpreter died of a signal, or with the session's PID 1; ``StepResult.signal`` has its
    number."""
    OUTPUT_LIMIT = "output_limit"
    PROTOCOL_ERROR = "protocol_error"
    """The session broke the protocol (forged, extra or malformed answers) and was killed."""
    INFRA_ERROR = "infra_error"
    """The machine's fault, on evidence from outside of the session: retry, or drop the sample.
    Never a reward of 0."""


@dataclass(frozen=True, slots=True)
class StepError:
    """An exception that reached the top of a step, as its interpreter described it."""

    name: str
    value: str
    traceback: str


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Everything one step showed, and what it cost.

    Not to be changed, but not frozen: that would take four times as long to make.
    """

    status: StepStatus
    stdout: str = ""
    """What was written to descriptor 1, by any process of the session. Undecodable bytes are
    replaced; if it was long, the middle is replaced by a line that says how much is missing."""
    stderr: str = ""
    value: str | None = None
    """``repr()`` of the last expression; None if there is none or it is None."""
    results: bytes = b""
    """What a notebook's cell displayed (inside/notebook.py)."""
    piece: bytes = b""
    """Of an answer (Session.ask)."""
    error: StepError | None = None
    exit_code: int | None = None
    """The process's exit code, if the interpreter itself ended."""
    signal: int | None = None
    """The signal the interpreter died of."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of the interpreter during the step, that of its children not included."""
    processes_left: int | None = None
    """Processes and threads that the code left running; None without a cgroup."""
    oom_kills: int = 0
    """Processes of the session that the memory limit killed during the step."""
    truncated: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    background: str = ""
    """Output that arrived between the last step and this one (at most 4 KiB are kept)."""
    more: bool = False
    """A console's statement is not complete yet."""
    degraded: bool = False
    """The session was not isolated by namespaces: ``allow_degraded=True`` and no better rung."""
    state_lost: bool = False
    """The session is over: variables and files are gone."""
    host_calls: tuple[HostCall, ...] = ()
    """The calls of functions of the host that were made, in order."""
    host_refused: int = 0
    """Those that were not, as the budget was used up."""
    detail: str = ""
    """For statuses other than ok: one sentence for a human or a log."""

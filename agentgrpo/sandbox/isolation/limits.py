"""All limits of a session.

Where each is enforced:

- time and output of a step: csrc/sandbox_step.c
- session_s, steps, code_kib: session/session.py; session_s between steps: session/pool.py
- memory, processes, cpus: cgroup.py; without a control group session/watchdog.py and
  csrc/sandbox_spawn.c
- cpu_s, open_files: csrc/sandbox_init.c; size of a file, niceness: csrc/sandbox_spawn.c
- directories and inodes: the size of their tmpfs (jail.py)
- value_kib, traceback_kib: the interpreter (inside/)
"""

from dataclasses import dataclass, fields
from typing import Any

from agentgrpo.sandbox.isolation.guards import wraps_os_errors

TOO_MUCH = 1e12
LEAST_CPUS = 0.01
MOST_PROCESSES = 1 << 22
"""The kernel's maximum for a control group."""


def require_positive(section: str, settings: Any) -> None:
    """Raise ValueError unless every field is a positive number, an int where declared as int."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        kinds: Any = (int,) if field.type in (int, "int") else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < TOO_MUCH:
            raise ValueError(
                f"{section}.{field.name}: expected a positive {kinds[-1].__name__} below "
                f"{TOO_MUCH:g}, got {value!r:.40}"
            )


@wraps_os_errors
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one session. All must be positive and below 1e12.

    Raises:
        ValueError: a limit is out of range.
    """

    timeout_s: float = 10.0
    """Wall time of one step. At its end the code is interrupted (SIGINT); state is kept."""

    grace_s: float = 0.3
    """Time to react to the interrupt before the session is killed."""

    session_s: float = 1800.0
    """Wall time of a session, including the pauses between steps."""

    cpu_s: int = 600
    """CPU time of any one process of the session (RLIMIT_CPU)."""

    cpus: float = 2.0
    """Processors that the session may keep busy. Enforced only with a control group."""

    memory_mib: int = 256
    """Memory of the session (with a control group) or of each of its processes (without)."""

    processes: int = 64
    """Processes and threads, including the interpreter and its init."""

    open_files: int = 256
    """Open file descriptors of each process."""

    home_mib: int = 64
    """Size of /home/user (tmpfs, charged to memory)."""

    tmp_mib: int = 64
    """Size of /tmp (tmpfs, charged to memory)."""

    shm_mib: int = 16
    """Size of /dev/shm (tmpfs, charged to memory)."""

    inodes: int = 8192
    """Files and directories in /home/user, and the same number in /tmp."""

    output_kib: int = 64
    """Output kept per stream and step: half from the start, half from the end."""

    output_max_mib: int = 4
    """Output of one step. The session is killed when a step exceeds it."""

    code_kib: int = 1024
    """Size of the code of one step."""

    value_kib: int = 64
    """Size of the last expression's value as text."""

    traceback_kib: int = 8
    """Size of a traceback as text."""

    steps: int = 1000
    """Steps of one session."""

    niceness: int = 5
    """Niceness of the session's processes, 1 to 19 (lowest priority)."""

    @property
    def private_mib(self) -> tuple[int, int, int]:
        """Sizes of the private directories home, tmp and shm, at most memory_mib each."""
        home, tmp, shm = (
            min(mib, self.memory_mib) for mib in (self.home_mib, self.tmp_mib, self.shm_mib)
        )
        return home, tmp, shm

    def __post_init__(self) -> None:
        require_positive("limits", self)
        if self.open_files < 32:
            raise ValueError(f"limits.open_files must be at least 32, got {self.open_files}")
        if self.niceness > 19:
            raise ValueError(f"limits.niceness must be in 1..19, got {self.niceness}")
        if self.cpus < LEAST_CPUS:
            raise ValueError(f"limits.cpus must be at least {LEAST_CPUS}, got {self.cpus}")
        if not 3 <= self.processes <= MOST_PROCESSES:
            raise ValueError(
                "limits.processes must be at least 3 (init, interpreter, one of the code's) and at "
                f"most {MOST_PROCESSES}, got {self.processes}"
            )

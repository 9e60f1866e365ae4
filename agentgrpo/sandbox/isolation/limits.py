"""Every bound on what a session may use, in one place.

What enforces it: time and output of a step csrc/sandbox_step.c; session_s, steps and code_kib
session.py; memory, processes and cpus cgroup.py or, without a control group, watchdog.py and
csrc/sandbox_spawn.c; cpu_s and open_files csrc/sandbox_init.c; directories and inodes the size of
their tmpfs (jail.py); value_kib and traceback_kib the interpreter (inside/).
"""

from dataclasses import dataclass, fields
from typing import Any

from agentgrpo.sandbox.isolation.guards import public

TOO_MUCH = 1e12
LEAST_CPUS = 0.01
MOST_PROCESSES = 1 << 22
"""What the kernel takes for a control group."""


def require_positive(section: str, settings: Any) -> None:
    """Raise ValueError unless every field is a number above 0, whole where it is declared so."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        kinds: Any = (int,) if field.type in (int, "int") else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < TOO_MUCH:
            raise ValueError(
                f"{section}.{field.name}: expected a positive {kinds[-1].__name__} below "
                f"{TOO_MUCH:g}, got {value!r:.40}"
            )


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one session. All must be positive and below TOO_MUCH.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """

    timeout_s: float = 10.0
    """Wall time of one step. At its end the code is interrupted (SIGINT); state is kept."""

    grace_s: float = 0.3
    """Time to react to that interrupt, before the session is killed."""

    session_s: float = 1800.0
    """Wall time of a session, all steps and pauses together."""

    cpu_s: int = 600
    """CPU time of any one process of the session (RLIMIT_CPU)."""

    cpus: float = 2.0
    """Processors that the session may keep busy at once, where a control group can bound it."""

    memory_mib: int = 256
    """Memory of the session (cgroup) or, where no cgroup can be made, of each of its processes."""

    processes: int = 64
    """Processes and threads, including the interpreter and its init."""

    open_files: int = 256
    """Open descriptors of each process."""

    home_mib: int = 64
    """Size of /home/user (tmpfs, charged to memory)."""

    tmp_mib: int = 64
    """Size of /tmp (tmpfs, charged to memory)."""

    shm_mib: int = 16
    """Size of /dev/shm (tmpfs, charged to memory)."""

    inodes: int = 8192
    """Files and directories in /home/user and in /tmp each."""

    output_kib: int = 64
    """Output kept per stream and step: half of it from the start, half from the end."""

    output_max_mib: int = 4
    """Output of one step after which the session is killed."""

    code_kib: int = 1024
    """Size of the code of one step."""

    value_kib: int = 64
    """Size of the text of the last expression's value."""

    traceback_kib: int = 8
    """Size of the text of a traceback."""

    steps: int = 1000
    """Steps of one session."""

    niceness: int = 5
    """Scheduling priority of the session, 1 (eager) to 19 (polite)."""

    @property
    def private_mib(self) -> tuple[int, int, int]:
        """Sizes of the private directories: home, tmp, shm. None is larger than the memory."""
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

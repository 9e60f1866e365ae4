"""What a hostile case is, and how one is run."""

from collections.abc import Callable
from dataclasses import dataclass

from agentgrpo.sandbox.limits import Limits
from agentgrpo.sandbox.pool import SandboxPool
from agentgrpo.sandbox.result import StepResult, StepStatus
from agentgrpo.sandbox.session import Session

LIMITS = Limits(
    timeout_s=10.0,
    grace_s=1.0,
    memory_mib=160,
    processes=40,
    home_mib=16,
    tmp_mib=16,
    shm_mib=8,
    inodes=512,
    output_max_mib=4,
)
"""The limits the suite is written for: small enough that running into them takes no time."""


class Skip(Exception):
    """The case does not apply to this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """One attack: a name that states the property, and the attack itself."""

    name: str
    group: str
    attack: Callable[[SandboxPool], None]


CASES: list[Case] = []


def _register(group: str, attack: Callable[[SandboxPool], None], doc: str | None) -> None:
    assert doc
    CASES.append(Case(doc.strip().splitlines()[0].rstrip("."), group, attack))


def on_session(attack: Callable[[Session], None]) -> Callable[[Session], None]:
    """A case that gets a fresh session."""

    def with_session(pool: SandboxPool) -> None:
        with pool.acquire() as session:
            attack(session)

    _register(attack.__module__.rpartition(".")[2], with_session, attack.__doc__)
    return attack


def on_pool(attack: Callable[[SandboxPool], None]) -> Callable[[SandboxPool], None]:
    """A case that makes its own sessions."""
    _register(attack.__module__.rpartition(".")[2], attack, attack.__doc__)
    return attack


def run_case(case: Case, pool: SandboxPool) -> None:
    """Run one case, and check that the pool serves the next session as if nothing had been."""
    case.attack(pool)
    with pool.acquire() as session:
        assert session.step("6 * 7").value == "42", "the pool is not usable after the attack"


def expect(result: StepResult, *statuses: StepStatus, lost: bool | None = None) -> StepResult:
    """The result, if its status is one of those."""
    assert result.status in statuses, f"expected {' or '.join(statuses)}, got {result}"
    assert lost is None or result.state_lost == lost, f"expected state_lost={lost}, got {result}"
    return result


def still_works(session: Session) -> None:
    """The session goes on, with its state."""
    result = session.step("__import__('math').factorial(5)")
    assert result.value == "120", f"the session did not go on: {result}"


def needs_proc(session: Session) -> None:
    """Skip the case where sessions have no /proc (spawner.NO_PROC)."""
    if value_of(session, "import os; os.path.exists('/proc/self')") == "False":
        raise Skip("sessions have no /proc on this machine")


def value_of(session: Session, code: str) -> str:
    """The value of the last expression of code that must succeed."""
    result = expect(session.step(code), StepStatus.OK)
    assert result.value is not None, f"no value: {result}"
    return result.value

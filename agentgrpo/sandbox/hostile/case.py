"""What a hostile case is, and how the cases are run.

Nearly all are rows: a name that states the property, then steps of one session, each code and what
may be seen of it. A case that needs several sessions, or the pool itself, is a function (on_pool).
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

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
AT_ONCE = 4
"""Cases that run at the same time, each in a session of its own."""
OK, ERROR, EXIT, OOM = StepStatus.OK, StepStatus.ERROR, StepStatus.EXIT, StepStatus.OOM
TIMEOUT, KILLED, SIGNAL = StepStatus.TIMEOUT, StepStatus.TIMEOUT_KILLED, StepStatus.SIGNAL

Test = Callable[[StepResult], object]
Sees = str | Test | tuple[str | Test, ...] | None


class Skip(Exception):
    """The case does not apply to this machine; the message says why."""


class Step(NamedTuple):
    """One step of a row's session."""

    code: str | Callable[[Session], str]
    sees: Sees = None
    """Statuses, of which one has to be the step's (ok if there are none); texts, of which one has
    to be the value; functions, which have to hold of the result. None: whatever it likes."""
    timeout_s: float | None = None
    env: dict[str, str] | None = None


GOES_ON = Step("__import__('math').factorial(5)", "120")
"""The session goes on."""


@dataclass(frozen=True, slots=True)
class Case:
    """One attack: a name that states the property, and the attack itself."""

    name: str
    group: str
    attack: Callable[[SandboxPool], None]
    alone: bool
    """Not beside other cases: it is about the pool as a whole, or takes the whole machine."""


CASES: list[Case] = []


def on_pool(attack: Callable[[SandboxPool], None]) -> Callable[[SandboxPool], None]:
    """A case that makes its own sessions; its docstring is its name."""
    assert attack.__doc__
    name = attack.__doc__.strip().splitlines()[0].rstrip(".")
    CASES.append(Case(name, attack.__module__.rpartition(".")[2], attack, alone=True))
    return attack


class Table:
    """The rows of one group."""

    def __init__(self, module: str) -> None:
        self._group = module.rpartition(".")[2]

    def row(
        self,
        name: str,
        *steps: tuple[object, ...] | Callable[[Session], object],
        needs: Callable[[Session], None] | None = None,
        alone: bool = False,
    ) -> None:
        """One case."""
        attack = partial(_play, steps, needs)
        CASES.append(Case(name, self._group, attack, alone))


def _play(
    steps: Sequence[tuple[object, ...] | Callable[[Session], object]],
    needs: Callable[[Session], None] | None,
    pool: SandboxPool,
) -> None:
    with pool.acquire() as session:
        if needs is not None:
            needs(session)
        play(session, *steps)


def play(session: Session, *steps: tuple[object, ...] | Callable[[Session], object]) -> None:
    """Take the steps of a row (Table.row) in a session."""
    for step in steps:
        if isinstance(step, tuple):
            _take(session, Step(*step))  # type: ignore[arg-type]
        else:
            assert step(session), "what the host sees is not as it should be"


def _take(session: Session, step: Step) -> None:
    code = step.code(session) if callable(step.code) else step.code
    code = textwrap.dedent(code).strip("\n")
    sees = step.sees if isinstance(step.sees, tuple) else (step.sees,)
    limits = session.limits
    if TIMEOUT in sees and KILLED not in sees:  # a busy machine takes longer to interrupt it
        session.limits = replace(limits, grace_s=30.0)
    result = session.step(code, step.timeout_s, env=step.env)
    session.limits = limits
    if step.sees is not None:
        expect(result, *sees)


def run_case(case: Case, pool: SandboxPool) -> None:
    """Run one case, and check that the pool serves the next session as if nothing had been."""
    case.attack(pool)
    with pool.acquire() as session:
        assert session.step("6 * 7").value == "42", "the pool is not usable after the attack"


def run_cases(
    cases: Sequence[Case], pool: SandboxPool
) -> Iterator[tuple[Case, BaseException | None]]:
    """Run cases, side by side where they are about their own session, and say how each ended: None
    if its property holds, Skip, or what else was raised.
    """

    def ending(case: Case) -> tuple[Case, BaseException | None]:
        try:
            run_case(case, pool)
        except Exception as error:
            return case, error
        return case, None

    with ThreadPoolExecutor(AT_ONCE) as workers:
        yield from workers.map(ending, [case for case in cases if not case.alone])
    yield from map(ending, [case for case in cases if case.alone])


def expect(result: StepResult, *sees: str | Test) -> StepResult:
    """The result, if that may be seen (Step.sees)."""
    statuses = [wanted for wanted in sees if isinstance(wanted, StepStatus)] or [OK]
    values = [w for w in sees if isinstance(w, str) and not isinstance(w, StepStatus)]
    assert result.status in statuses, f"expected {' or '.join(statuses)}, got {result}"
    assert not values or result.value in values, f"expected {' or '.join(values)}, got {result}"
    if result.status is not EXIT:  # which a session survives, or not
        lost = result.status not in (OK, ERROR, TIMEOUT)
        assert result.state_lost == lost, f"expected state_lost={lost}, got {result}"
    for test in sees:
        assert isinstance(test, str) or test(result), f"not as it should be: {result}"
    return result


def value_of(session: Session, code: str) -> str:
    """The value of the last expression of code that must succeed."""
    result = expect(session.step(code), OK)
    assert result.value is not None, f"no value: {result}"
    return result.value


def still_works(session: Session) -> None:
    """The session goes on, with its state."""
    _take(session, GOES_ON)


def a_proc(session: Session) -> None:
    """For rows that need it: sessions have a /proc (see spawner.NO_PROC)."""
    if value_of(session, "import os; os.path.exists('/proc/self')") == "False":
        raise Skip("sessions have no /proc on this machine")


def at_most(limit: int) -> Test:
    """The value, if there is one, is a number up to limit."""
    return lambda result: int(result.value or 0) <= limit


def refused(attempts: Sequence[str], before: str = "", errors: str = "OSError") -> tuple[str, str]:
    """A step: none of these expressions may have a value, all raise one of errors."""
    return (
        f"{before}\ngot = []\nfor attempt in {list(attempts)!r}:\n"
        f" try: got.append((attempt, eval(attempt)))\n except {errors}: pass\ngot",
        "[]",
    )

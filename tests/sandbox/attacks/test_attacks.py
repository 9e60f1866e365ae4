"""The attack suite: one test per case, on every rung that this user can have.

Every case is one attack on one property, and passes if the property holds. It gets a fresh session
(or the pool) and raises AssertionError if it got through. on_*.py has the cases that no machine
makes a difference to. A dozen cases are in the package, for `agentgrpo sandbox selftest`.
"""

import os
from typing import Any

import pytest

from agentgrpo import _C
from agentgrpo.sandbox import SandboxPool
from agentgrpo.sandbox.isolation.zygote import LADDER, Rung
from agentgrpo.sandbox.selftest import CASES, LIMITS, Case, Skip, run_cases
from tests.isolation import need_isolation
from tests.sandbox.attacks import (  # noqa: F401 - each registers its cases
    escape,
    kernel,
    on_calls,
    on_pools,
    on_protocol,
    on_steps,
    on_verdicts,
    resources,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:sandbox degraded")]
Endings = dict[str, BaseException | None]
NOT_BARE = (
    # cases that need a private root directory, /proc, signals or sockets
    "Code has no capabilities", "Files of the host are not visible", "Only the session's own proc",
    "Socket options cannot load", "Loopback is the only", "No other directory is writable",
    "File system ioctls on", "/dev has no GPUs, disks", "A directory descriptor and chdir",
    "The control group's path", "/proc shows only processes", "PID 1 cannot be killed",
    "No call with a process id", "Child programs do not get",
    "A subprocess cannot call", "No socket or process option", "Socket buffers are limited",
    "SIGSTOP to itself", "Orphans are reaped", "Another session's", "PID 1 outlives",
    # these do not hold on this rung: docs/sandbox.md
    "The times of the machine's devices", "Files in /dev/shm",
)  # fmt: skip


@pytest.fixture(scope="module", params=(*LADDER, Rung.BARE), ids=str)
def endings(request: pytest.FixtureRequest) -> Endings:
    """The errors of the selected cases on a rung. They run in parallel, before its first test."""
    rung: Rung = request.param
    if rung is Rung.ZYGOTE_ROOT and os.geteuid() != 0:
        pytest.skip("zygote-root needs root")
    if rung is Rung.BARE and os.geteuid() != 0 and _C.sandbox_landlock_version() == 0:
        pytest.skip("no root and no Landlock")
    if rung is not Rung.BARE:
        need_isolation(rung)
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    cases = [spec.params["case"] for spec in specs if spec and spec.params.get("endings") is rung]
    options: dict[str, Any] = {"rungs": [rung]}
    if rung is Rung.BARE:
        options = {"rungs": (), "allow_degraded": True}
        cases = [case for case in cases if not case.name.startswith(NOT_BARE)]
    with SandboxPool(limits=LIMITS, max_live=16, min_idle=2, **options) as pool:
        if rung is Rung.BARE and pool.describe()["memory_limit"].startswith("per process"):
            cases = [case for case in cases if not case.name.startswith("Buffers of unix sockets")]
        return {case.name: ending for case, ending in run_cases(cases, pool)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.group}: {case.name}")
def test_attack_is_contained(endings: Endings, case: Case) -> None:
    if case.name not in endings:
        pytest.skip("without namespaces")
    ending = endings[case.name]
    if isinstance(ending, Skip):
        pytest.skip(str(ending))
    if ending is not None:
        raise ending

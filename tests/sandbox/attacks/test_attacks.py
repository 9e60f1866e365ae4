"""The hostile suite, one test per case, on every rung that this user can have."""

import os
from typing import Any

import pytest

from agentgrpo import _C
from agentgrpo.sandbox import SandboxPool
from agentgrpo.sandbox.isolation.zygote import LADDER, Rung
from tests.isolation import need_isolation
from tests.sandbox.attacks import on_calls, on_pools, on_protocol, on_steps, on_verdicts  # noqa: F401
from tests.sandbox.attacks.suite import CASES, LIMITS, Case, Skip, run_cases

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:sandbox degraded")]
Endings = dict[str, BaseException | None]
NOT_BARE = (
    # they ask what a session's own root directory, /proc, signals and sockets show
    "There are no capabilities", "Files of the host are not there", "Only the session's own proc",
    "Options of sockets load", "Loopback is the only", "No other directory can be written",
    "The machine's file systems are", "GPUs, disks", "A directory held open",
    "The name of a control group", "/proc shows processes", "PID 1 cannot be killed",
    "No call that names a process", "Child programs do not get",
    "A process of its own finds", "No option of a socket", "What sockets buffer",
    "SIGSTOP to itself", "Orphans are reaped", "Another session's", "PID 1 outlives",
    # they do not hold: docs/sandbox.md
    "The times of the machine's devices", "Files in /dev/shm",
)  # fmt: skip


@pytest.fixture(scope="module", params=(*LADDER, Rung.BARE), ids=str)
def endings(request: pytest.FixtureRequest) -> Endings:
    """How the cases that were asked for ended on a rung: they run side by side, at its first."""
    rung: Rung = request.param
    if rung is Rung.ZYGOTE_ROOT and os.geteuid() != 0:
        pytest.skip("zygote-root needs root")
    if rung is Rung.BARE and os.geteuid() != 0 and _C.sandbox_landlock_version() == 0:
        pytest.skip("no root and no Landlock")
    if rung is not Rung.BARE:
        need_isolation(rung)
    asked = [getattr(item, "callspec", None) for item in request.session.items]
    cases = [spec.params["case"] for spec in asked if spec and spec.params.get("endings") is rung]
    chosen: dict[str, Any] = {"rungs": [rung]}
    if rung is Rung.BARE:
        chosen = {"rungs": (), "allow_degraded": True}
        cases = [case for case in cases if not case.name.startswith(NOT_BARE)]
    with SandboxPool(limits=LIMITS, max_live=16, min_idle=2, **chosen) as pool:
        if rung is Rung.BARE and pool.describe()["memory_limit"].startswith("per process"):
            cases = [case for case in cases if not case.name.startswith("What unix sockets")]
        return {case.name: ending for case, ending in run_cases(cases, pool)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.group}: {case.name}")
def test_hostile(endings: Endings, case: Case) -> None:
    if case.name not in endings:
        pytest.skip("without namespaces")
    ending = endings[case.name]
    if isinstance(ending, Skip):
        pytest.skip(str(ending))
    if ending is not None:
        raise ending

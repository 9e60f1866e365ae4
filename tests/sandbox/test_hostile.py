"""The hostile suite, one test per case, on every rung that this user can have."""

import os

import pytest

from agentgrpo.sandbox import SandboxPool
from agentgrpo.sandbox.hostile import CASES, LIMITS, Case, Skip, run_cases
from agentgrpo.sandbox.zygote import LADDER, Rung
from tests.isolation import need_isolation

pytestmark = [pytest.mark.nsjail, pytest.mark.slow]
Endings = dict[str, BaseException | None]


@pytest.fixture(scope="module", params=LADDER, ids=str)
def endings(request: pytest.FixtureRequest) -> Endings:
    """How the cases that were asked for ended on a rung: they run side by side, at its first."""
    rung: Rung = request.param
    if rung is Rung.ZYGOTE_ROOT and os.geteuid() != 0:
        pytest.skip("zygote-root needs root")
    need_isolation(rung)
    asked = [getattr(item, "callspec", None) for item in request.session.items]
    cases = [spec.params["case"] for spec in asked if spec and spec.params.get("endings") is rung]
    with SandboxPool(limits=LIMITS, max_live=16, min_idle=2, rungs=[rung]) as pool:
        return {case.name: ending for case, ending in run_cases(cases, pool)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.group}: {case.name}")
def test_hostile(endings: Endings, case: Case) -> None:
    ending = endings[case.name]
    if isinstance(ending, Skip):
        pytest.skip(str(ending))
    if ending is not None:
        raise ending

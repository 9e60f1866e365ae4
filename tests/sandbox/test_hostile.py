"""The hostile suite, one test per case, on every rung that this user can have."""

import os
from collections.abc import Iterator

import pytest

from agentgrpo.sandbox import SandboxPool
from agentgrpo.sandbox.hostile import CASES, LIMITS, Case, Skip, run_case
from agentgrpo.sandbox.zygote import LADDER, Rung
from tests.isolation import need_isolation

pytestmark = [pytest.mark.nsjail, pytest.mark.slow]


@pytest.fixture(scope="module", params=LADDER, ids=str)
def hostile_pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    rung: Rung = request.param
    if rung is Rung.ZYGOTE_ROOT and os.geteuid() != 0:
        pytest.skip("zygote-root needs root")
    need_isolation(rung)
    with SandboxPool(limits=LIMITS, max_live=8, min_idle=2, rungs=[rung]) as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.group}: {case.name}")
def test_hostile(hostile_pool: SandboxPool, case: Case) -> None:
    try:
        run_case(case, hostile_pool)
    except Skip as reason:
        pytest.skip(str(reason))

"""Checks of `agentgrpo sandbox doctor`: what this machine supports, and how to fix the rest.

Each rung is tested by starting a session on it. hints.py maps the usual failures to remedies.
"""

import platform
import resource
from collections.abc import Iterator

from agentgrpo import _C
from agentgrpo.sandbox.isolation import policy
from agentgrpo.sandbox.isolation.cgroup import Cgroups, CgroupsUnavailable
from agentgrpo.sandbox.isolation.errors import (
    SandboxException,
    SandboxInfraError,
    SandboxUnavailable,
)
from agentgrpo.sandbox.isolation.guards import wraps_os_errors
from agentgrpo.sandbox.isolation.hints import OTHERWISE, SYSTEM_PATHS, cgroup_remedy, masked_proc
from agentgrpo.sandbox.isolation.images import Image, hold, layer_name, new_layer, store_dir
from agentgrpo.sandbox.isolation.jail import find_nsjail
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.isolation.template import Template
from agentgrpo.sandbox.isolation.zygote import LADDER, Rung
from agentgrpo.sandbox.session.spawner import NO_PROC, Spawner
from agentgrpo.support.checks import Check

OLDEST_KERNEL = (5, 9)  # close_range; openat2 and subset=pid are a little older


def _machine() -> Iterator[Check]:
    release = platform.release()
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    needed = f"at least Linux {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]}"
    yield Check("kernel", version >= OLDEST_KERNEL, release, needed, essential=True)
    machine = platform.machine()
    yield Check(
        "architecture",
        machine in policy.AUDIT_ARCH,
        machine,
        f"one of {', '.join(policy.AUDIT_ARCH)}",
        essential=True,
    )
    try:
        yield Check("nsjail", True, find_nsjail(), essential=True)
    except SandboxUnavailable as error:
        yield Check("nsjail", False, error.reason, error.remedy, essential=True)


def _failed(name: str, rung: Rung, error: Exception) -> Check:
    if isinstance(error, SandboxUnavailable) and rung in error.failures:
        return Check(name, False, *error.failures[rung])
    return Check(name, False, str(error).splitlines()[0])


def _rungs() -> Iterator[Check]:
    for rung in (*LADDER, Rung.BARE):
        try:
            spawner = Spawner(Template(), Limits(), zygotes=1, rungs=[rung])
            spawner.close()
            without = "" if spawner.own_proc else f"; without /proc, as {NO_PROC}"
            text = f"a session was started and inspected from outside{without}"
            yield Check(str(rung), True, text)
        except (SandboxUnavailable, SandboxInfraError) as error:
            yield _failed(str(rung), rung, error)


def _images() -> Check:
    try:
        with hold(), new_layer(layer_name("empty")):
            layers = (str(store_dir() / "layers" / layer_name("empty")),)
        empty = Image("empty", layers, {}, "/", "", 0)
        Spawner(Template(image="empty"), Limits(), zygotes=1, rungs=LADDER[:1], image=empty).close()
        return Check("images", True, "a session of an empty image was started")
    except (SandboxException, OSError) as error:
        return _failed("images", LADDER[0], error)


def _optional() -> Iterator[Check]:
    try:
        groups = Cgroups(Limits())
        groups.close()
        without = f"; except processors: {groups.cpu_missing}" if groups.cpu_missing else ""
        yield Check("control groups", True, f"v{groups.version}: limits hold per session{without}")
    except CgroupsUnavailable as error:
        yield Check("control groups", False, str(error), cgroup_remedy())
    yield _images()
    if masked_paths := masked_proc():
        yield Check("/proc", False, f"covered: {' '.join(masked_paths[:4])} ...", SYSTEM_PATHS)
    landlock = _C.sandbox_landlock_version()
    yield Check(
        "landlock",
        landlock > 0,
        f"version {landlock}" if landlock else "not in this kernel (allow_degraded needs it)",
        "boot with lsm=landlock,...",
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Check(
        "open files",
        soft >= 4096,
        f"{soft} (hard limit {hard}): about {max(0, soft - 256) // 9} live sessions",
        "ulimit -n 65536",
    )


@wraps_os_errors
def examine() -> tuple[list[Check], Rung | None]:
    """Run every check. Returns them with the rung that a pool would use, or None."""
    checks = list(_machine())
    rung = None
    if all(check.ok for check in checks):
        rungs = list(_rungs())
        working = {check.name for check in rungs if check.ok}
        rung = next((rung for rung in LADDER if rung in working), None)
        checks += rungs
    return [*checks, *_optional()], rung


@wraps_os_errors
def report() -> tuple[str, bool]:
    """Run every check. Returns the report as text, and whether a pool can isolate code here."""
    checks, rung = examine()
    lines = [line for check in checks for line in check.lines()]
    if rung is None:
        lines.append(f"\nThis machine cannot isolate code, so nothing will be run. {OTHERWISE}")
    else:
        lines.append(f"\nSessions will be isolated by: {rung}")
    return "\n".join(lines), rung is not None

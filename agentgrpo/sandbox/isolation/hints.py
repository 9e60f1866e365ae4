"""Remedies for the usual reasons why a machine cannot isolate code."""

import os
import re
from pathlib import Path

from agentgrpo.sandbox.isolation.errors import SandboxUnavailable, printable
from agentgrpo.sandbox.isolation.jail import find_nsjail, has_own_ids
from agentgrpo.support.control_groups import lines_of

CONTAINER = (
    "this container forbids new namespaces; run it with --cap-add SYS_ADMIN, or with "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt "
    "systempaths=unconfined (Kubernetes: seccompProfile Unconfined, procMount Unmasked)"
)
APPARMOR = (
    "AppArmor restricts user namespaces. Allow them for nsjail and its children: echo 'abi "
    "<abi/4.0>, profile agentgrpo-nsjail {nsjail} flags=(unconfined) {{ userns, }}' > "
    "/etc/apparmor.d/agentgrpo-nsjail; apparmor_parser -r /etc/apparmor.d/agentgrpo-nsjail. Or for "
    "all programs: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0. Or run as root"
)
CGROUP = (
    "give this process its own control group: systemd-run --user --scope -p Delegate=yes ..., "
    "or run as root"
)
CGROUP_CONTAINER = (
    "give the container writable control groups: --cgroupns=host "
    "-v /sys/fs/cgroup:/sys/fs/cgroup:rw"
)
OTHERWISE = (
    "If you cannot change that: sandbox.allow_degraded=true (SandboxPool(allow_degraded=True)) "
    "runs code without namespaces.\nThe system call filter, the limits, and Landlock or one user "
    "id per session still hold: SECURITY.md lists what is guaranteed then."
)
MORE_FILES = "this process may open too few files; ulimit -n 65536"
OVERLAY = (
    "images need overlayfs in user namespaces: Linux 5.11 or newer, `modprobe overlay`, a cache "
    "directory ($XDG_CACHE_HOME) on ext4, xfs, btrfs or tmpfs, and no profile that denies mounts"
)
WITHOUT = "; until then a watchdog sums the memory of each session every 50 ms"
SYSTEM_PATHS = (
    "sessions have no /proc; to give them one, run the container with "
    "--security-opt systempaths=unconfined (Kubernetes: procMount: Unmasked)"
)


def _sysctl(name: str) -> str | None:
    try:
        return Path("/proc/sys", *name.split(".")).read_text().strip()
    except OSError:
        return None


def _nsjail() -> str:
    try:
        return find_nsjail()
    except SandboxUnavailable:
        return "/path/to/nsjail"


def _in_container() -> bool:
    filtered = "Seccomp:\t2" in lines_of("/proc/self/status")
    return filtered or any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))


def cgroup_remedy() -> str:
    """What to change so that this process can make control groups."""
    if os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"):
        return CGROUP_CONTAINER + WITHOUT
    return CGROUP + WITHOUT


def masked_proc() -> list[str]:
    """Mount points over parts of /proc. While there is one, the kernel refuses a new /proc."""
    points = [printable(line.split(" ")[4]) for line in lines_of("/proc/self/mountinfo")]
    return [p for p in points if p.startswith("/proc/") and p != "/proc/sys/fs/binfmt_misc"]


def remedy(reason: str) -> str:
    """What to change, from the reason why a rung failed; "" if unknown or if the reason has it."""
    if "remedy:" in reason or "needs root" in reason:
        return ""
    if "mounting its image" in reason:
        return OVERLAY
    if "Too many open files" in reason:
        return MORE_FILES
    if limit := re.search(r"setrlimit\(\d+, RLIMIT_(\w+)", reason):
        return f"raise the hard limit of this process for {limit[1]} (ulimit -H, see setrlimit(2))"
    if _sysctl("user.max_user_namespaces") == "0" or "No space left" in reason:
        return "sysctl -w user.max_user_namespaces=100000, or a lower max_live"
    if _sysctl("kernel.unprivileged_userns_clone") == "0" and os.geteuid() != 0:
        return "sysctl -w kernel.unprivileged_userns_clone=1, or run as root"
    if _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1" and os.geteuid() != 0:
        return APPARMOR.format(nsjail=_nsjail())
    if masked_proc() and "/proc" in reason:  # not "subproc.cc"
        return (
            f"{', '.join(masked_proc()[:3])} ... are covered, so no new /proc can be mounted; "
            "run the container with --security-opt systempaths=unconfined"
        )
    if _in_container() and ("not permitted" in reason or "Permission denied" in reason):
        return CONTAINER
    if "Invalid argument" in reason and os.geteuid() == 0 and not has_own_ids():
        return "run as another user, or in a container whose root has all user ids of the machine"
    if "Permission denied" in reason and os.geteuid() != 0:
        return "check that this user may read the interpreter and the template's directories"
    return ""

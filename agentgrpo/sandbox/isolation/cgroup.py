"""A control group per session: limits for all processes of a session together.

Both layouts are supported: v1 (a memory and a pids hierarchy) and v2 (one tree, which must be
delegated to this process: systemd's ``Delegate=yes``). v2 allows limits only below groups without
processes, so this process moves into a leaf. A session's init attaches itself through descriptors
that the host opened, so no process of a session ever runs outside of its group. Groups are reused,
because making one takes 0.3 ms. A directory ``OWNER.pid.starttime`` whose process has ended is
removed.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from agentgrpo.sandbox.isolation.errors import printable
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.support.control_groups import TCP_LIMIT, V1, V2, Layout, mounted_groups

OWNER = "agentgrpo-sandbox"
HOST_LEAF = "agentgrpo-host"
V2_CONTROLLERS = ("memory", "pids")
CPU_PERIOD_US = 100_000


class CgroupsUnavailable(Exception):
    """No control group can be made here; the message has the reason."""


def start_time(pid: int) -> str:
    """A process's start time, which a later one with its pid does not have; "" if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()  # the process name may have any bytes
    except OSError:
        return ""
    return stat.rpartition(b")")[2].split()[19].decode()


def owner_name(pid: int) -> str:
    """Prefix of a process's directories, unique across machines and pid namespaces."""
    return f"{_pid_scope()}.{pid}.{start_time(pid)}"


def _pid_scope() -> str:
    """OWNER, this boot of this machine, and this pid namespace: where a pid is meaningful. The
    directory may be shared with containers or other machines.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{OWNER}.{boot}-{os.stat('/proc/self/ns/pid').st_ino:x}"


class ControlGroup:
    """A control group, used by one session at a time. The files that each step reads stay open."""

    def __init__(self, directories: dict[str, Path], layout: Layout) -> None:
        self._directories, self._layout = directories, layout
        flags = os.O_RDONLY | os.O_CLOEXEC
        self._events = os.open(directories["memory"] / layout.oom_events, flags)
        try:
            self._count = os.open(directories["pids"] / layout.processes, flags)
        except OSError:
            os.close(self._events)
            raise

    @contextlib.contextmanager
    def attaching(self) -> Iterator[list[int]]:
        """Descriptors to which a process writes "0" to attach itself."""
        with contextlib.ExitStack() as opened:
            fds: list[int] = []
            for path in dict.fromkeys(self._directories.values()):
                fds.append(os.open(path / self._layout.attach, os.O_WRONLY | os.O_CLOEXEC))
                opened.callback(os.close, fds[-1])
            yield fds

    def counts(self) -> tuple[int, int]:
        """Kills by the memory limit so far, and current processes and threads, zombies included."""
        killed = os.pread(self._events, 512, 0).partition(b"\noom_kill ")[2].split(b"\n", 1)[0]
        return int(killed or 0), int(os.pread(self._count, 32, 0))

    def cpu_s(self) -> float | None:
        """CPU seconds of all processes that ever ran in it; None if the kernel has no count."""
        with contextlib.suppress(KeyError, OSError, ValueError):
            if self._layout is V1:
                return int((self._directories["cpu"] / "cpuacct.usage").read_text()) / 1e9
            stat = (self._directories["memory"] / "cpu.stat").read_text().split()
            return int(stat[stat.index("usage_usec") + 1]) / 1e6
        return None

    def set_limits(self, limits: Limits, all_cpus: float) -> None:
        memory, layout = self._directories["memory"], self._layout
        memory_bytes = limits.memory_mib << 20
        _write(memory / layout.memory_limit, memory_bytes)
        with contextlib.suppress(FileNotFoundError):  # a kernel without swap accounting
            _write(memory / layout.swap_limit, memory_bytes if layout.swap_is_total else 0)
        with contextlib.suppress(FileNotFoundError):  # v1 counts TCP buffers separately
            _write(memory / TCP_LIMIT, memory_bytes // 4)
        _write(self._directories["pids"] / "pids.max", limits.processes)
        if "cpu" in self._directories:
            _set_quota(self._directories["cpu"], layout, min(limits.cpus, all_cpus))

    def close(self) -> None:
        """Close its files; the group stays."""
        os.close(self._events)
        os.close(self._count)


class Cgroups:
    """The control groups of one pool, in a directory named after this process."""

    def __init__(self, limits: Limits, all_cpus: float | None = None) -> None:
        self.all_cpus = (os.cpu_count() or 1) / 2 if all_cpus is None else all_cpus
        self._limits = limits
        self._lock = threading.Lock()
        self._all: list[ControlGroup] = []
        self._used: list[ControlGroup] = []
        self._parents: dict[str, Path] = {}
        self.cpu_missing = ""
        """Why processors cannot be limited: the file and the kernel's reason; "" if they can."""
        mounted = mounted_groups()
        self.version = 1 if "memory" in mounted and "pids" in mounted else 2
        self._layout = V1 if self.version == 1 else V2
        if self.version == 2 and "" not in mounted:
            raise CgroupsUnavailable("no cgroup file system with memory and pids is mounted")
        if self.version == 2 and mounted[""].name == HOST_LEAF:  # an earlier pool moved us down
            mounted[""] = mounted[""].parent
        name = f"{owner_name(os.getpid())}.{id(self):x}"
        try:
            for key in ("memory", "pids") if self.version == 1 else ("",):
                remove_stale(mounted[key])
                (mounted[key] / name).mkdir()
                self._parents[key] = mounted[key] / name
            if self.version == 2:
                mounted["cpu"] = mounted[""]
                refused = [_delegate(path) for path in (mounted[""], self._parents[""])]
                self.cpu_missing = refused[0] or refused[1]
            elif "cpu" not in mounted:
                self.cpu_missing = "no cgroup file system with cpu is mounted"
            if not self.cpu_missing:
                self._limit_processors(mounted["cpu"] / name)
            self._used.append(self._make())
        except (OSError, CgroupsUnavailable) as error:
            self.close()
            reason = _reason(error) if isinstance(error, OSError) else str(error)
            raise CgroupsUnavailable(reason) from error

    def _limit_processors(self, path: Path) -> None:
        """Set the CPU quota of all sessions together, and their weight against other pools. If that
        fails, only their niceness and the limits of this process apply.
        """
        try:
            if self.version == 1:
                remove_stale(path.parent)
                path.mkdir()
            _set_quota(path, self._layout, self.all_cpus)
            name, default = ("cpu.shares", 1024) if self.version == 1 else ("cpu.weight", 100)
            _write(path / name, 5 * default // self._limits.niceness)
            self._parents["cpu"] = path
        except OSError as error:
            self.cpu_missing = _reason(error)
            if self.version == 1:
                _remove_tree(path)

    def _make(self) -> ControlGroup:
        name = str(len(self._all) + 1)
        directories = {key: path / name for key, path in self._parents.items()}
        for path in directories.values():
            path.mkdir(exist_ok=True)  # left by an attempt that failed
        if self.version == 2:
            directories |= dict.fromkeys(("memory", "pids"), directories.pop(""))
        group = ControlGroup(directories, self._layout)
        self._all.append(group)
        group.set_limits(self._limits, self.all_cpus)
        return group

    def take(self) -> ControlGroup:
        """Get a group without processes. Give it back when the session is killed."""
        with self._lock:
            for i, group in enumerate(self._used[:4]):  # oldest first: killed processes need time
                if group.counts()[1] == 0:
                    del self._used[i]
                    return group
            return self._make()

    def give_back(self, group: ControlGroup) -> None:
        with self._lock:
            self._used.append(group)

    def close(self) -> None:
        """Remove every group without processes."""
        with self._lock:
            while self._all:
                self._all.pop().close()
            for path in self._parents.values():
                _remove_tree(path)


def _delegate(group: Path) -> str:
    """Enable limits in the groups below (v2). Returns why processors cannot be limited, or ""."""
    controllers = (group / "cgroup.controllers").read_text().split()
    if missing := [name for name in V2_CONTROLLERS if name not in controllers]:
        raise CgroupsUnavailable(f"{group} does not have the controllers {' and '.join(missing)}")
    enabled = group / "cgroup.subtree_control"
    for _ in range(10):  # processes can fork while they are moved
        try:
            _write(enabled, " ".join(f"+{name}" for name in V2_CONTROLLERS))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            _move_to_leaf(group)
            continue
        try:
            _write(enabled, "+cpu")
        except OSError as error:  # for example because of a realtime process
            if "cpu" in controllers:
                return _reason(error)
            return f"{group} does not have the controller cpu"
        return ""
    raise CgroupsUnavailable(f"{group} still has processes after 10 attempts to move them")


def _move_to_leaf(group: Path) -> None:
    leaf = group / HOST_LEAF
    leaf.mkdir(exist_ok=True)
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            _write(leaf / "cgroup.procs", pid)


def _set_quota(group: Path, layout: Layout, cpus: float) -> None:
    quota = int(min(cpus, os.cpu_count() or 1) * CPU_PERIOD_US)
    if layout is V1:
        _write(group / "cpu.cfs_period_us", CPU_PERIOD_US)
        _write(group / "cpu.cfs_quota_us", quota)
    else:
        _write(group / "cpu.max", f"{quota} {CPU_PERIOD_US}")


def _write(path: Path, value: object) -> None:
    """Write a control file. An OSError has the file's name, which write() does not add.

    Without O_CREAT, so that a file which the kernel lacks is ENOENT instead of EACCES.
    """
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)


def _reason(error: OSError) -> str:
    return printable(f"{error.filename}: {error.strerror}")


def _remove_tree(path: Path) -> None:
    """Remove a group and the groups in it. A group with processes stays, for remove_stale()."""
    with contextlib.suppress(OSError):
        for child in path.iterdir():
            if child.is_dir():
                _remove_tree(child)
        path.rmdir()


def stale_of(parent: Path) -> Iterator[Path]:
    """Entries named owner_name().* of ended processes of this machine and pid namespace."""
    prefix = f"{_pid_scope()}."
    for path in parent.glob(f"{prefix}*"):
        pid, start = (*path.name.removeprefix(prefix).split("."), "")[:2]
        if pid.isdecimal() and start.isdecimal() and start_time(int(pid)) != start:
            yield path


def remove_stale(parent: Path) -> None:
    """Remove the groups of processes that have ended; their sessions have ended with them."""
    for path in stale_of(parent):
        _remove_tree(path)

"""Control groups of this process: where they are mounted, and their memory limits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TCP_LIMIT = "memory.kmem.tcp.limit_in_bytes"


@dataclass(frozen=True, slots=True)
class Layout:
    """File names of one cgroup version, by use."""

    memory_limit: str
    swap_limit: str
    oom_events: str
    processes: str
    attach: str
    swap_is_total: bool  # v1 limits memory + swap together, v2 swap alone
    memory_used: str
    file_pages: tuple[str, ...]  # lines of memory.stat: reclaimable pages


V1 = Layout(
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.oom_control",
    "pids.current",
    "tasks",  # one thread attaches itself; cgroup.procs waits up to 15 ms for all processors
    True,
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)

V2 = Layout(
    "memory.max",
    "memory.swap.max",
    "memory.events",
    "pids.current",
    "cgroup.procs",
    False,
    "memory.current",
    ("active_file", "inactive_file"),
)


def lines_of(path: str) -> list[str]:
    """The lines of a file in /proc. Names of files and processes in it may be any bytes."""
    text = Path(path).read_bytes().decode("utf-8", "surrogateescape")
    return text.removesuffix("\n").split("\n")


def mounted_groups() -> dict[str, Path]:
    """Map each controller ("" for v2) to this process's own directory in its hierarchy."""
    roots: dict[str, tuple[str, str]] = {}
    for line in lines_of("/proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, point = left.split(" ")[3:5]
        if kind == "cgroup2":
            roots[""] = (root, point)
        elif kind == "cgroup":
            for controller in options.split(","):
                roots[controller] = (root, point)
    groups = {}
    for line in lines_of("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in roots:
                root, point = roots[controller]
                inside = os.path.relpath(path, root) if path.startswith(root) else "."
                groups[controller] = Path(point, inside)
    return groups


def memory_bounds() -> Iterator[tuple[int, int]]:
    """Yield (limit, permanently used bytes) of each control group around this process with a limit.

    File pages are not counted, because the kernel can reclaim them.
    """
    mounted = mounted_groups()
    layout, group_dir = (V1, mounted["memory"]) if "memory" in mounted else (V2, mounted.get(""))
    for group in () if group_dir is None else (group_dir, *group_dir.parents):
        with contextlib.suppress(OSError):  # above the mount, v2's root, or not readable
            limit = (group / layout.memory_limit).read_text().strip()
            if limit != "max":
                stat = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
                pages = sum(int(stat.get(name, 0)) for name in layout.file_pages)
                yield int(limit), int((group / layout.memory_used).read_text()) - pages

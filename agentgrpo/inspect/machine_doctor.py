"""Check whether this machine can train: packages, device, memory and sandbox.

Exits with status 1 if something essential is missing. `agentgrpo doctor RUN` checks instead why a
run does not learn; RUN is its folder.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator

from agentgrpo.sandbox import doctor as sandbox_doctor
from agentgrpo.support import hardware, packages
from agentgrpo.support.checks import Check


def device_checks() -> Iterator[Check]:
    """Python, memory, cores and GPU."""
    python = platform.python_version()
    yield Check("python", sys.version_info >= (3, 11), python, "Python 3.11 or newer", True)
    total, free = (size / 2**30 for size in hardware.memory_bytes())
    yield Check("memory", free > 4, f"{free:.1f} of {total:.1f} GiB free", "at least 4 GiB free")
    yield Check("cores", True, str(hardware.cpu_count()))
    if hardware.has_nvidia_gpu():
        yield packages.gpu_check()
        return
    unused = hardware.shows_nvidia_gpu()
    gpu = "present, but the installed vLLM is the CPU build" if unused else "none"
    yield Check("gpu", True, f"{gpu}: everything runs on the CPU")


def main(arguments: list[str]) -> int:
    """Print the report; returns the exit status."""
    # not parser_of(): its module imports a package that may be missing
    parser = argparse.ArgumentParser(
        prog="agentgrpo doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="a run's folder (out_dir), to find out why it fails"
    )
    parser.parse_args(arguments)
    gpu = hardware.has_nvidia_gpu()
    checks = [*device_checks(), *packages.package_checks(packages.installed(), gpu=gpu)]
    print("\n".join(line for check in checks for line in check.lines()))
    report, isolated = sandbox_doctor.report()
    print(f"\n{report}")
    missing = [check.name for check in checks if check.essential and not check.ok]
    missing += [] if isolated else ["a way to isolate code"]
    verdict = "This machine can train. Missing items above, if any, are not essential."
    if missing:
        verdict = f"This machine cannot train. Fix first: {', '.join(missing)}."
    print(f"\n{verdict}")
    return 1 if missing else 0

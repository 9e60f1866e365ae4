"""Can this machine train, and what has to change if not: packages, device, memory, sandbox.

Ends with status 1 if something essential is missing. With a run's folder, `agentgrpo doctor RUN`
says what keeps that run from learning.
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
    """The machine itself."""
    python = platform.python_version()
    yield Check("python", sys.version_info >= (3, 11), python, "Python 3.11 or newer", True)
    total, free = (size / 2**30 for size in hardware.memory_bytes())
    yield Check("memory", free > 4, f"{free:.1f} of {total:.1f} GiB free", "4 GiB free at least")
    yield Check("cores", True, str(hardware.cpu_count()))
    gpu = hardware.has_nvidia_gpu()
    if not gpu:
        idle = ", but vLLM is its build for CPUs" if hardware.shows_nvidia_gpu() else ""
        found = f"there{idle}" if idle else "none"
        yield Check("gpu", True, f"{found}: everything runs on the CPU")
        return
    yield packages.gpu_check()


def main(arguments: list[str]) -> int:
    """Print the report. Returns the exit status."""
    # as parser_of() makes it, which needs a package that may be missing
    parser = argparse.ArgumentParser(
        prog="agentgrpo doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="a run's folder (out_dir): why does it not learn"
    )
    parser.parse_args(arguments)
    gpu = hardware.has_nvidia_gpu()
    checks = [*device_checks(), *packages.package_checks(packages.installed(), gpu=gpu)]
    print("\n".join(line for check in checks for line in check.lines()))  # noqa: T201
    report, isolated = sandbox_doctor.report()
    print(f"\n{report}")  # noqa: T201
    lacking = [check.name for check in checks if check.essential and not check.ok]
    lacking += [] if isolated else ["a way to isolate code"]
    verdict = "This machine can train. What is missing above, if anything, is not essential."
    if lacking:
        verdict = f"Nothing can be trained here before this is mended: {', '.join(lacking)}."
    print(f"\n{verdict}")  # noqa: T201
    return 1 if lacking else 0

"""Command line: ``python -m agentgrpo.sandbox doctor | selftest | bench | template ...``."""

import argparse
import sys
import time

from agentgrpo.sandbox import SandboxPool, SandboxUnavailable, doctor
from agentgrpo.sandbox.hostile import CASES, LIMITS, Skip, run_case


def selftest() -> int:
    """Run the hostile suite on the rung that this machine gets; the number of cases that failed."""
    failed = skipped = 0
    with SandboxPool(limits=LIMITS, max_live=8, min_idle=2) as pool:
        print(f"isolation: {pool.describe()['rung']}; {pool.describe()['memory_limit']}")
        for case in CASES:
            verdict, detail = "ok  ", ""
            try:
                run_case(case, pool)
            except Skip as reason:
                verdict, detail, skipped = "SKIP", f" ({reason})", skipped + 1
            except Exception as error:
                verdict, detail, failed = "FAIL", f"\n     {error!r}", failed + 1
            print(f"{verdict} {case.group:10} {case.name}{detail}", flush=True)
    print(f"\n{len(CASES)} cases, {failed} failed, {skipped} skipped")
    return failed


def bench(sessions: int) -> None:
    """A first impression of this machine; bench/sandbox.py measures properly."""
    with SandboxPool(min_idle=0) as pool:
        spans: dict[str, list[float]] = {"first result": [], "step": [], "close": []}
        for _ in range(sessions):
            marks = [time.perf_counter()]
            session = pool.acquire()
            session.step("1")
            marks.append(time.perf_counter())
            session.step("1")
            marks.append(time.perf_counter())
            session.close()
            marks.append(time.perf_counter())
            for name, start, end in zip(spans, marks, marks[1:], strict=False):
                spans[name].append((end - start) * 1e3)
    for name, values in spans.items():
        values.sort()
        print(f"{name:14} p50 {values[len(values) // 2]:7.3f} ms   max {values[-1]:7.3f} ms")


def main() -> int:
    """Run the command that was asked for; 0 if all is well."""
    parser = argparse.ArgumentParser(prog="python -m agentgrpo.sandbox", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what this machine allows, and what to change")
    commands.add_parser("selftest", help="attack the sandbox, before trusting this machine")
    commands.add_parser("bench", help="how fast sessions are here").add_argument(
        "--sessions", type=int, default=100
    )
    arguments = parser.parse_args()
    try:
        if arguments.command == "doctor":
            text, usable = doctor.report()
            print(text)
            return 0 if usable else 1
        if arguments.command == "selftest":
            return 1 if selftest() else 0
        bench(arguments.sessions)
    except SandboxUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

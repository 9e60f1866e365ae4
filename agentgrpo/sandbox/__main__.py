"""The sandbox alone: examine this machine, attack it, prepare environments."""

if __name__ == "__main__":  # before the imports: a package may be missing
    from agentgrpo import cli

    cli.run("sandbox")

import argparse
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from agentgrpo.sandbox import Limits, SandboxException, SandboxPool, doctor
from agentgrpo.sandbox.hostile import CASES, LIMITS, Skip, run_cases
from agentgrpo.sandbox.templates import build_template


def selftest() -> int:
    """Run the hostile suite on the rung that this machine gets; the number of cases that failed."""
    counts = {"ok  ": 0, "SKIP": 0, "FAIL": 0}
    with SandboxPool(limits=LIMITS, max_live=16, min_idle=2) as pool:
        print(f"isolation: {pool.describe()['rung']}; {pool.describe()['memory_limit']}")
        for case, ending in run_cases(CASES, pool):
            verdict, detail = "ok  ", ""
            if isinstance(ending, Skip):
                verdict, detail = "SKIP", f" ({ending})"
            elif ending is not None:
                verdict, detail = "FAIL", f"\n     {ending!r}"
            counts[verdict] += 1
            print(f"{verdict} {case.group:10} {case.name}{detail}", flush=True)
    print(f"\n{len(CASES)} cases, {counts['FAIL']} failed, {counts['SKIP']} skipped")
    return counts["FAIL"]


def _limit(text: str) -> tuple[str, Any]:
    """A bound of limits.Limits, as NAME=NUMBER."""
    name, _, number = text.partition("=")
    known = {field.name: field.type for field in fields(Limits)}
    if name not in known:
        raise ValueError(f"--limit: expected one of {', '.join(known)}, got {name!r}")
    try:
        return name, float(number) if known[name] is float else int(number)
    except ValueError:
        raise ValueError(f"--limit {name}: expected a number, got {number!r}") from None


def build(arguments: argparse.Namespace) -> None:
    """Build a template and prove that a session of it starts."""
    template, built = build_template(
        arguments.name,
        requirements=arguments.requirements,
        preload=arguments.preload,
        tools=arguments.tool,
        limits=Limits(**dict(map(_limit, arguments.limit))) if arguments.limit else None,
    )
    started = time.perf_counter()
    with SandboxPool(template=template, min_idle=0):
        span = time.perf_counter() - started
    print(
        f"{template.name}: {'built' if built else 'up to date'}; its zygotes start in {span:.2f} s"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command that was asked for (None: of the command line); 0 if all is well."""
    parser = argparse.ArgumentParser(prog="agentgrpo sandbox", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what this machine allows, and what to change")
    commands.add_parser("selftest", help="attack the sandbox, before trusting this machine")
    template = commands.add_parser("template", help="prepare an environment once, by name")
    maker = template.add_subparsers(dest="action", required=True).add_parser("build")
    maker.add_argument("name")
    maker.add_argument("-r", "--requirements", type=Path, help="a pip requirements file")
    maker.add_argument("--preload", action="append", default=[], help="module to import once")
    maker.add_argument("--tool", action="append", default=[], type=Path, help="script to run first")
    maker.add_argument("--limit", action="append", default=[], metavar="NAME=NUMBER")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "doctor":
            text, usable = doctor.report()
            print(text)
            return 0 if usable else 1
        if chosen.command == "selftest":
            return 1 if selftest() else 0
        build(chosen)
    except (SandboxException, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0

"""The sandbox alone: examine this machine, attack it, prepare environments and images."""

if __name__ == "__main__":  # before the imports: a package may be missing
    from agentgrpo import cli

    cli.exit_with("sandbox")

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from agentgrpo.sandbox import Limits, SandboxException, SandboxPool, doctor
from agentgrpo.sandbox.isolation.images import Progress, add_image, list_images, remove_image
from agentgrpo.sandbox.isolation.templates import build_template
from agentgrpo.sandbox.selftest import CASES, LIMITS, Skip, run_cases
from agentgrpo.sandbox.session.dockerfile import LIMITS as RUN_LIMITS
from agentgrpo.sandbox.session.dockerfile import Builder


def selftest() -> int:
    """Run the cases of selftest.py on the rung that this machine gets; the number of cases that
    failed.
    """
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


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)

        def report(label: str, done: int, total: int) -> None:
            bars.update(task, description=label, completed=done, total=total or None)

        yield report


def image(arguments: argparse.Namespace) -> None:
    """Add, build, list or remove images."""
    if arguments.action == "list":
        for known in list_images():
            size = f"{known.bytes / 1e6:,.1f} MB"
            print(f"{known.name:30} {len(known.layers):3} layers {size:>12}  {known.digest[:19]}")
    elif arguments.action == "remove":
        remove_image(arguments.name)
    else:
        with _progress() as report:
            if arguments.action == "add":
                added = add_image(arguments.name, arguments.source, progress=report)
            else:
                limits = replace(RUN_LIMITS, **dict(map(_limit, arguments.limit)))
                with Builder(network=arguments.network, limits=limits) as builder:
                    added = builder.build(arguments.name, arguments.folder, progress=report)
        print(f"{added.name}: {len(added.layers)} layers, {added.bytes / 1e6:,.1f} MB")


def _image_parser(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    add = actions.add_parser("add", help="unpack an image into the store")
    add.add_argument("name")
    add.add_argument(
        "source",
        help="OCI layout (folder or tar), tar of `docker save`, folder or tar of a root directory, "
        "or docker://[HOST/]NAME[:TAG][@DIGEST]",
    )
    maker = actions.add_parser(
        "build",
        help="build the Dockerfile of a folder, without Docker",
        description="Build the Dockerfile of a folder. Each step is a layer, and is not run again "
        "if it and the steps before it are the same. FROM names an image of the store.",
    )
    maker.add_argument("name")
    maker.add_argument("folder", type=Path)
    maker.add_argument(
        "--network",
        action="store_true",
        help="RUN steps use this machine's network, its loopback services included, and FROM may "
        "name an image of a registry. Only for a Dockerfile whose author you trust, and whose "
        "packages you would install",
    )
    maker.add_argument("--limit", action="append", default=[], metavar="NAME=NUMBER")
    actions.add_parser("list", help="name, layers, size and digest of each image")
    actions.add_parser("remove", help="remove an image and its unused layers").add_argument("name")


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
    _image_parser(commands.add_parser("image", help="container images as root directories"))
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "doctor":
            text, usable = doctor.report()
            print(text)
            return 0 if usable else 1
        if chosen.command == "selftest":
            return 1 if selftest() else 0
        (image if chosen.command == "image" else build)(chosen)
    except (SandboxException, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0

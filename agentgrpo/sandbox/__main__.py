"""Sandbox commands: check this machine, attack the sandbox, build templates and images."""

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
from agentgrpo.sandbox.isolation.template import build_template
from agentgrpo.sandbox.selftest import CASES, LIMITS, Skip, run_cases
from agentgrpo.sandbox.session.dockerfile import LIMITS as RUN_LIMITS
from agentgrpo.sandbox.session.dockerfile import Builder


def selftest() -> int:
    """Run the attack cases on the rung chosen for this machine. Returns the number of failures."""
    counts = {"ok  ": 0, "SKIP": 0, "FAIL": 0}
    with SandboxPool(limits=LIMITS, max_live=16, min_idle=2) as pool:
        print(f"isolation: {pool.describe()['rung']}; {pool.describe()['memory_limit']}")
        for case, error in run_cases(CASES, pool):
            verdict, detail = "ok  ", ""
            if isinstance(error, Skip):
                verdict, detail = "SKIP", f" ({error})"
            elif error is not None:
                verdict, detail = "FAIL", f"\n     {error!r}"
            counts[verdict] += 1
            print(f"{verdict} {case.group:10} {case.name}{detail}", flush=True)
    print(f"\n{len(CASES)} cases, {counts['FAIL']} failed, {counts['SKIP']} skipped")
    return counts["FAIL"]


def _parse_limit(text: str) -> tuple[str, Any]:
    """Parse NAME=NUMBER, where NAME is a field of Limits."""
    name, _, number = text.partition("=")
    types = {field.name: field.type for field in fields(Limits)}
    if name not in types:
        raise ValueError(f"--limit: expected one of {', '.join(types)}, got {name!r}")
    try:
        return name, float(number) if types[name] is float else int(number)
    except ValueError:
        raise ValueError(f"--limit {name}: expected a number, got {number!r}") from None


def build(args: argparse.Namespace) -> None:
    """Build a template and check that one of its sessions starts."""
    template, built = build_template(
        args.name,
        requirements=args.requirements,
        preload=args.preload,
        tools=args.tool,
        limits=Limits(**dict(map(_parse_limit, args.limit))) if args.limit else None,
    )
    started = time.perf_counter()
    with SandboxPool(template=template, min_idle=0):
        seconds = time.perf_counter() - started
    state = "built" if built else "up to date"
    print(f"{template.name}: {state}; its zygotes start in {seconds:.2f} s")


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """Show a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)

        def report(label: str, done: int, total: int) -> None:
            bars.update(task, description=label, completed=done, total=total or None)

        yield report


def image(args: argparse.Namespace) -> None:
    """Add, build, list or remove images."""
    if args.action == "list":
        for entry in list_images():
            size = f"{entry.bytes / 1e6:,.1f} MB"
            print(f"{entry.name:30} {len(entry.layers):3} layers {size:>12}  {entry.digest[:19]}")
    elif args.action == "remove":
        remove_image(args.name)
    else:
        with _progress() as report:
            if args.action == "add":
                added = add_image(args.name, args.source, progress=report)
            else:
                limits = replace(RUN_LIMITS, **dict(map(_parse_limit, args.limit)))
                with Builder(network=args.network, limits=limits) as builder:
                    added = builder.build(args.name, args.folder, progress=report)
        print(f"{added.name}: {len(added.layers)} layers, {added.bytes / 1e6:,.1f} MB")


def _image_parser(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    add = actions.add_parser("add", help="unpack an image into the store")
    add.add_argument("name")
    add.add_argument(
        "source",
        help="OCI layout (folder or tar), tar from `docker save`, folder or tar of a root "
        "directory, or docker://[HOST/]NAME[:TAG][@DIGEST]",
    )
    builder = actions.add_parser(
        "build",
        help="build the Dockerfile in a folder, without Docker",
        description="Build the Dockerfile in a folder. Each step makes a layer and runs again only "
        "if it or an earlier step has changed. FROM names an image in the store.",
    )
    builder.add_argument("name")
    builder.add_argument("folder", type=Path)
    builder.add_argument(
        "--network",
        action="store_true",
        help="RUN steps use this machine's network, including its loopback services, and FROM may "
        "name an image in a registry. Use it only if you trust the author of the Dockerfile and "
        "would install its packages yourself",
    )
    builder.add_argument("--limit", action="append", default=[], metavar="NAME=NUMBER")
    actions.add_parser("list", help="list the name, layers, size and digest of each image")
    actions.add_parser("remove", help="remove an image and its unused layers").add_argument("name")


def main(argv: list[str] | None = None) -> int:
    """Run a sandbox command (None: from sys.argv). Returns the exit code."""
    parser = argparse.ArgumentParser(prog="agentgrpo sandbox", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="check what this machine supports and how to fix it")
    commands.add_parser("selftest", help="attack the sandbox before you trust this machine")
    template = commands.add_parser("template", help="build a named environment")
    builder = template.add_subparsers(dest="action", required=True).add_parser("build")
    builder.add_argument("name")
    builder.add_argument("-r", "--requirements", type=Path, help="pip requirements file")
    builder.add_argument("--preload", action="append", default=[], help="module to import once")
    builder.add_argument("--tool", action="append", default=[], type=Path,
                         help="script that each session runs first")  # fmt: skip
    builder.add_argument("--limit", action="append", default=[], metavar="NAME=NUMBER")
    _image_parser(commands.add_parser("image", help="container images as root directories"))
    args = parser.parse_args(argv)
    try:
        if args.command == "doctor":
            text, usable = doctor.report()
            print(text)
            return 0 if usable else 1
        if args.command == "selftest":
            return 1 if selftest() else 0
        (image if args.command == "image" else build)(args)
    except (SandboxException, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0

"""See agentgrpo/examples/__init__.py."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports: a package may be missing
    from agentgrpo import cli

    cli.run("examples")

import sys
from pathlib import Path

from agentgrpo import examples
from agentgrpo.config.arguments import parser_of


def main(arguments: list[str]) -> int:
    """Parse the command line, write the files. Returns the exit status."""
    parser = parser_of("examples", examples.__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="default: this one")
    try:
        for path in examples.write(parser.parse_args(arguments).folder):
            print(path)  # noqa: T201
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0

"""See agentgrpo/examples/__init__.py."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agentgrpo import examples

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m agentgrpo.examples", description=examples.__doc__.splitlines()[0]
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="default: this one")
    try:
        for path in examples.write(parser.parse_args().folder):
            print(path)  # noqa: T201
    except FileExistsError as error:
        sys.exit(f"error: {error}")

"""Write one or several runs as one self-contained HTML file for any browser.

It has curves, steps, groups and every rollout token by token, and needs no server and no network.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports: a package may be missing
    from agentgrpo import cli

    cli.exit_with("view")

import sys
from pathlib import Path

from agentgrpo.config.arguments import parser_of
from agentgrpo.inspect.view.collect import read_run
from agentgrpo.inspect.view.page import make_page
from agentgrpo.records.diff import first_difference, setting_differences
from agentgrpo.support.files import not_found, require_output


def main(arguments: list[str]) -> int:
    """Write the page; returns the exit status."""
    parser = parser_of("view", __doc__)
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="a run's folder (out_dir); several runs share the graphs",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="default: view.html in the run's folder, compare.html in the first of several",
    )
    parser.add_argument(
        "--curves",
        action="store_true",
        help="omit rollouts: only graphs, steps and settings, for many or large runs",
    )
    args = parser.parse_args(arguments)
    first = args.runs[0] if args.runs[0].is_dir() else args.runs[0].parent
    output = args.output or first / ("view.html" if len(args.runs) == 1 else "compare.html")
    try:
        if missing := [path for path in args.runs if not path.exists()]:
            raise FileNotFoundError(not_found(missing[0]))
        require_output(output)
        several = len(args.runs) > 1
        runs = [
            read_run(path, name=str(path) if several else None, rollouts=not args.curves)
            for path in args.runs
        ]
        page = make_page(runs)
        output.write_text(page, encoding="utf-8", errors="backslashreplace")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    count = sum(len(run.index["rollouts"]) for run in runs)
    print(f"{output}: {count:,} rollouts, {len(page) / 2**20:.1f} MiB. Open it in a browser")
    if len(args.runs) == 2 and all((run / "run.json").is_file() for run in args.runs):
        for line in setting_differences(*args.runs):
            print(f"differs: {line}")
        difference = first_difference(*args.runs) or "none in the lines that both runs have"
        print(f"first difference: {difference}")
    return 0

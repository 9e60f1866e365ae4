"""Write a run as one HTML file: open it in any browser, send it to anyone.

Curves, steps, groups and every rollout token by token, of one run or of two side by side. The file
needs no server and no network, and holds everything it shows.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agentgrpo.config.arguments import parser_of
from agentgrpo.view.collect import read_foreign, read_run
from agentgrpo.view.page import make_page


def main(arguments: list[str]) -> int:
    """Parse the command line, write the page. Returns the exit status."""
    parser = parser_of("view", __doc__)
    parser.add_argument(
        "run",
        type=Path,
        help="a run's folder (out_dir), or another program's rollouts: file or folder",
    )
    parser.add_argument("other", type=Path, nargs="?", help="a second run to compare it with")
    parser.add_argument("-o", "--output", type=Path, help="default: view.html in the first folder")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="of another program's rollouts: a model's folder, no hub name",
    )
    args = parser.parse_args(arguments)
    folder = args.run if args.run.is_dir() else args.run.parent
    output = args.output or folder / ("view.html" if args.other is None else "compare.html")
    try:
        runs = [
            read_run(path)
            if (path / "metrics.jsonl").is_file()
            else read_foreign(path, args.tokenizer)
            for path in (args.run, args.other)
            if path is not None
        ]
        page = make_page(runs)
        output.write_text(page, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    played = " and ".join(f"{len(run.index['rollouts']):,}" for run in runs)
    print(  # noqa: T201
        f"{output}: {played} rollouts, {len(page) / 2**20:.1f} MiB. Open it in a browser"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

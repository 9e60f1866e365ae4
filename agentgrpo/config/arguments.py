"""Command-line parsers shared by the commands."""

from __future__ import annotations

import argparse

from agentgrpo.config.read import shipped_configs


def parser_of(command: str, description: str | None) -> argparse.ArgumentParser:
    """An empty parser for `agentgrpo COMMAND`; --help keeps the description's line breaks."""
    return argparse.ArgumentParser(
        prog=f"agentgrpo {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def config_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for a command that reads a config: `config` and `overrides`."""
    parser = parser_of(command, description)
    parser.add_argument("config", help="a TOML file, or the name of an example below")
    examples = [
        f"  {name:18} {path.read_text().partition(chr(10))[0].lstrip('# ')}"
        for name, path in shipped_configs().items()
    ]
    parser.epilog = "\n".join(["examples that come with the package:", *examples])
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # without it argparse lists the settings as required too
        metavar="section.key=value",
        help="settings that replace the file's; docs/config.md lists them all",
    )
    return parser

"""What the commands' command lines have in common, so that all `--help`s read alike."""

from __future__ import annotations

import argparse

from agentgrpo.config.read import shipped_configs


def parser_of(command: str, description: str | None) -> argparse.ArgumentParser:
    """An empty parser of `agentgrpo COMMAND`, whose help shows the description as it is written."""
    return argparse.ArgumentParser(
        prog=f"agentgrpo {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def config_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """The same of a command that reads a config, with `config` and `overrides`."""
    parser = parser_of(command, description)
    parser.add_argument("config", help="a TOML file, or the name of one of those below")
    firsts = {name: path.read_text().partition("\n")[0] for name, path in shipped_configs().items()}
    about = (f"  {name:18} {first.lstrip('# ')}" for name, first in firsts.items())
    parser.epilog = "\n".join(["examples that come with the package:", *about])
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # else argparse says that settings are required too
        metavar="section.key=value",
        help="settings that replace the file's; docs/config.md has them all",
    )
    return parser

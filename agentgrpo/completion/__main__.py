"""Print a script that lets a shell complete `agentgrpo` at the Tab key.

Commands, their options, shipped configs, run folders, and every setting with its values:
`agentgrpo train quickstart learner.de<Tab>`. The script holds all words, so that no Python is
started when a key is pressed; print it again after an upgrade.

  bash  agentgrpo completion bash > ~/.local/share/bash-completion/completions/agentgrpo
  zsh   agentgrpo completion zsh > "${fpath[1]}/_agentgrpo"
  fish  agentgrpo completion fish > ~/.config/fish/completions/agentgrpo.fish
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports: a package may be missing
    from agentgrpo import cli

    cli.run("completion")

import sys
from importlib import resources

from agentgrpo.config.arguments import parser_of

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """The script of a shell of SHELLS."""
    from agentgrpo.cli import COMMANDS
    from agentgrpo.completion.words import words_of

    known = {name: words_of(module) for name, (module, _) in COMMANDS.items()}
    lines = [_assigned(shell, "commands", [*known, "--help", "--version"])]
    for name, of in known.items():
        lines.append(_assigned(shell, f"words_{name}", of.words))
        lines.append(_assigned(shell, f"place_{name}", [of.place]))
        lines.append(_assigned(shell, f"value_{name}", of.takes_value))
    text = (resources.files("agentgrpo.completion") / f"complete.{shell}").read_text()
    before, mark, after = text.partition("# <words>\n")
    assert mark, f"complete.{shell} has no place for the words"
    return "\n".join([before.rstrip("\n"), *lines, after])


def _assigned(shell: str, name: str, words: list[str] | tuple[str, ...]) -> str:
    """A list of words, of letters that no shell reads as more than themselves."""
    plain = " ".join(f"'{word}'" for word in words if word)
    return (
        f"set -g _agentgrpo_{name} {plain}" if shell == "fish" else f"_agentgrpo_{name}=({plain})"
    )


def main(arguments: list[str]) -> int:
    """Parse the command line, print the script. Returns the exit status."""
    parser = parser_of("completion", __doc__)
    parser.add_argument("shell", choices=SHELLS)
    sys.stdout.write(script(parser.parse_args(arguments).shell))
    return 0

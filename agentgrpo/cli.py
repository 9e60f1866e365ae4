"""The `agentgrpo` command line: maps each command to the module that implements it."""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

COMMANDS = {
    "init": (
        "agentgrpo.train.init",
        "write a config for your model and your data, or copy the examples",
    ),
    "train": (
        "agentgrpo.train.__main__",
        "train a policy (--dry-run: run every check without training)",
    ),
    "sft": ("agentgrpo.recipe.sft", "fine-tune on examples first"),
    "flywheel": ("agentgrpo.recipe.flywheel", "make and repair trajectories to fine-tune on"),
    "curriculum": ("agentgrpo.recipe.curriculum", "train in stages on the tasks that teach most"),
    "recipe": (
        "agentgrpo.recipe.recipe",
        "flywheel, sft, curriculum and evaluations, in one command",
    ),
    "evaluate": ("agentgrpo.recipe.evaluate", "play the held-out tasks with a checkpoint"),
    "view": ("agentgrpo.inspect.view.__main__", "write a run, or several, as one HTML file"),
    "verify": (
        "agentgrpo.inspect.verify.verify",
        "check a run's records against what the engine reported",
    ),
    "push": (
        "agentgrpo.inspect.push",
        "publish a checkpoint on the Hugging Face Hub, with a model card",
    ),
    "sandbox": (
        "agentgrpo.sandbox.__main__",
        "the sandbox alone: doctor, selftest, bench, template",
    ),
    "harbor": ("agentgrpo.envs.harbor_check", "check task folders in Harbor's format"),
    "doctor": (
        "agentgrpo.inspect.machine_doctor",
        "check this machine; with a run's folder: find out why it does not learn",
    ),
}
"""Command: (module with `main(arguments) -> exit status`, help text)."""


def usage() -> str:
    """The text of `agentgrpo --help`."""
    lines = [f"  {command:10} {text}" for command, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "Train LLM agents with GRPO: vLLM, learner and sandbox in one process.",
            "",
            "usage: agentgrpo COMMAND ...        agentgrpo COMMAND --help for more",
            "",
            *lines,
            "",
            "First run:      agentgrpo train quickstart",
            "Your own task:  agentgrpo init MODEL DATA.jsonl, then agentgrpo train train.toml",
            "Settings:       section.key=value after the config; docs/config.md lists them all",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status: 130 after Ctrl-C, even during imports."""
    try:
        try:
            return _main(arguments)
        finally:
            if not isinstance(sys.exc_info()[1], Exception):
                sys.stdout.flush()  # raises BrokenPipeError here rather than at interpreter exit
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `agentgrpo doctor RUN | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python flushes as it ends
        return 141


def exit_with(command: str) -> NoReturn:
    """Run a command for `python -m MODULE` and exit with its status."""
    sys.exit(main([command, *sys.argv[1:]]))


def _main(arguments: list[str] | None) -> int:
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(usage(), flush=True)
        return 0
    if command == "--version":
        from importlib.metadata import version

        print(version("agentgrpo"))
        return 0
    if command not in COMMANDS:
        import difflib

        suggestions = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {suggestions[0]}?" if suggestions else ""
        print(f"error: unknown command {command!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    if "" not in sys.path and os.getcwd() not in sys.path:
        # as `python -m` does, so that `module:function` in a config finds the user's modules
        sys.path.insert(0, os.getcwd())
    module = COMMANDS[command][0]
    if command == "doctor" and any(not argument.startswith("-") for argument in rest):
        # two modules, since the machine's doctor must work without any package installed
        module = "agentgrpo.inspect.run_doctor"
    try:
        return int(importlib.import_module(module).main(rest))
    except ImportError as error:
        from agentgrpo.support.optional_deps import install_hint

        if error.name == "agentgrpo" and "_C" in str(error):
            message = (
                "agentgrpo's C extension is not built. Run: python setup.py build_ext --inplace"
            )
        elif isinstance(error, ModuleNotFoundError) and error.name:
            message = install_hint(error.name)
        else:
            raise
        print(f"error: agentgrpo {command}: {message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""The command `agentgrpo`: one word, then the module that does it."""

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
        "train a policy (--dry-run: check everything, train nothing)",
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
        "prove that a run's records hold what the engine saw",
    ),
    "push": (
        "agentgrpo.inspect.push",
        "publish a checkpoint on the Hugging Face Hub, with a model card",
    ),
    "sandbox": (
        "agentgrpo.sandbox.__main__",
        "the sandbox alone: doctor, selftest, bench, template",
    ),
    "harbor": ("agentgrpo.envs.harbor_check", "check task folders in Harbor's form"),
    "doctor": (
        "agentgrpo.inspect.machine_doctor",
        "can this machine train; with a run's folder: why does it not learn",
    ),
}
"""Word: module with main(arguments) -> exit status, and what it does."""


def usage() -> str:
    """What `agentgrpo --help` prints."""
    lines = [f"  {word:10} {text}" for word, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "Train LLM agents with GRPO: vLLM, learner and sandbox in one process.",
            "",
            "usage: agentgrpo COMMAND ...        agentgrpo COMMAND --help says more",
            "",
            *lines,
            "",
            "First run:      agentgrpo train quickstart",
            "Your own task:  agentgrpo init MODEL DATA.jsonl, then agentgrpo train train.toml",
            "Settings:       section.key=value after the config; docs/config.md has them all",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns its exit status: 130 after Ctrl-C, also while it is imported."""
    try:
        try:
            return _main(arguments)
        finally:
            if not isinstance(sys.exc_info()[1], Exception):
                sys.stdout.flush()  # a closed pipe is noticed here, and not as Python ends
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except BrokenPipeError:  # `agentgrpo doctor RUN | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python flushes as it ends
        return 141


def run(word: str) -> NoReturn:
    """What `python -m` of a command's module does: the same, from before its first import on."""
    sys.exit(main([word, *sys.argv[1:]]))


def _main(arguments: list[str] | None) -> int:
    word, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if word in ("-h", "--help", "help"):
        print(usage(), flush=True)  # noqa: T201
        return 0
    if word == "--version":
        from importlib.metadata import version

        print(version("agentgrpo"))  # noqa: T201
        return 0
    if word not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(word, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"error: no command {word!r}{hint}\n\n{usage()}", file=sys.stderr)  # noqa: T201
        return 2
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: `module:function` in a config
    module = COMMANDS[word][0]
    if word == "doctor" and any(not argument.startswith("-") for argument in rest):
        module = "agentgrpo.inspect.run_doctor"  # of a run; the other needs no package
    try:
        return int(importlib.import_module(module).main(rest))
    except ImportError as error:
        from agentgrpo.support.optional_deps import install_hint

        if error.name == "agentgrpo" and "_C" in str(error):
            said = (
                "agentgrpo's C extension is not built; remedy: python setup.py build_ext --inplace"
            )
        elif isinstance(error, ModuleNotFoundError) and error.name:
            said = install_hint(error.name)
        else:
            raise
        print(f"error: agentgrpo {word}: {said}", file=sys.stderr)  # noqa: T201
        return 2


if __name__ == "__main__":
    sys.exit(main())

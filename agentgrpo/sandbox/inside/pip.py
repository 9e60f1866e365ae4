"""``python -m pip`` in commands of a session, which has no network.

An installation fails with the remedy. All other commands run the pip of the template's packages.
"""

import importlib.metadata
import os
import runpy
import sys

REMEDY = """\
error: pip cannot install {names}: a sandbox has no network, and its packages are read-only.
Remedy, outside of the sandbox: list the packages in requirements.txt, run
    agentgrpo sandbox template build NAME -r requirements.txt
and use Sandbox.create("NAME"), or sandbox.template = "NAME" in the configuration of a run."""


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main(argv: list[str]) -> None:
    commands = [word for word in argv if not word.startswith("-")]
    if commands[:1] in (["install"], ["download"], ["wheel"]):
        names = commands[1:]
        if names and all(map(is_installed, names)):
            sys.stdout.writelines(f"Requirement already satisfied: {name}\n" for name in names)
            return
        sys.exit(REMEDY.format(names=" ".join(names) or "packages"))
    here = os.path.dirname(__file__)
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    try:
        runpy.run_module("pip", run_name="__main__", alter_sys=True)
    except ImportError:
        sys.exit("error: this sandbox has no pip")


if __name__ == "__main__":
    main(sys.argv[1:])

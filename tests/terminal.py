"""The oracle of the consoles: CPython's own, which this Python starts with -i."""

from __future__ import annotations

import re
import subprocess
import sys


def typed_into_python(lines: list[str]) -> str:
    """What a terminal shows when these lines are typed, up to the next prompt but for its space."""
    shown = subprocess.run(
        [sys.executable, "-i", "-q", "-u", "-E"],
        input="".join(f"{line}\n" for line in lines),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout
    end = 0
    for line in lines:  # typed from a pipe: nobody echoes it
        prompt = re.compile(r">>> |\.\.\. ").search(shown, end)
        assert prompt is not None
        end = prompt.end() + len(line) + 1
        shown = f"{shown[: prompt.end()]}{line}\n{shown[prompt.end() :]}"
    return shown.rstrip("\n").removesuffix(" ")

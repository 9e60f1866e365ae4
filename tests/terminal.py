"""CPython's own console (python -i), the oracle for the console environments."""

from __future__ import annotations

import re
import subprocess
import sys


def typed_into_python(lines: list[str]) -> str:
    """The terminal's content after typing these lines, up to the next prompt without its space."""
    screen = subprocess.run(
        [sys.executable, "-i", "-q", "-u", "-E"],
        input="".join(f"{line}\n" for line in lines),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout
    end = 0
    for line in lines:  # input from a pipe is not echoed
        prompt = re.compile(r">>> |\.\.\. ").search(screen, end)
        assert prompt is not None
        end = prompt.end() + len(line) + 1
        screen = f"{screen[: prompt.end()]}{line}\n{screen[prompt.end() :]}"
    return screen.rstrip("\n").removesuffix(" ")

"""Runs a program in a session of the sandbox: its source is the code of a step there.

A Python program is a fork of the session's interpreter: it has what that has imported, ends as
Python does (its threads, what it wanted done at exit), and whatever it dies of, its files can be
read.
"""

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from typing import Any


def main(command: list[str], programs: list[str], task: str, python: tuple[str, ...]) -> int:
    """Run a command, the task as its input; its exit code."""
    for name in programs:
        os.chmod(name, 0o755)
    told = os.open(task, os.O_RDONLY)
    os.dup2(told, 0)
    os.close(told)
    if command[0] not in python:
        return subprocess.run(command).returncode
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    os._exit(_as_python(command[1:]))


def _as_python(words: list[str]) -> int:
    code = 0
    sys.path.insert(0, "")
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
        code = 1
    shutdown: Any = (threading._shutdown, atexit._run_exitfuncs)  # type: ignore[attr-defined]
    for finish in (*shutdown, sys.stdout.flush, sys.stderr.flush):
        try:
            finish()
        except BaseException:
            traceback.print_exc()
    return code & 255

"""Run a program in a sandbox session. The source of this file is the code of a step there.

A Python program runs in a fork of the session's interpreter: it has the interpreter's imports, ends
like any Python process (threads, atexit), and its files can be read even if it crashes.
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
    """Run a command with the task file as its standard input. Returns its exit code."""
    for name in programs:
        os.chmod(name, 0o755)
    task_file = os.open(task, os.O_RDONLY)
    os.dup2(task_file, 0)
    os.close(task_file)
    if command[0] not in python:
        return subprocess.run(command).returncode
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    os._exit(_as_python(command[1:]))


def _as_python(args: list[str]) -> int:
    code = 0
    sys.path.insert(0, "")
    try:
        if args[0] == "-m":
            sys.argv = args[1:]
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = args
            sys.path[0] = os.path.dirname(os.path.abspath(args[0]))
            runpy.run_path(args[0], run_name="__main__")
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

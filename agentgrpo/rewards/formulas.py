r"""Whether two texts are the same mathematics, by the package math-verify, in a process of its own.

What a policy answers can keep a computer algebra system busy for ever (`$9^{9^{9^9}}$`, `$10^9!$`),
within one multiplication that no timer of Python interrupts. So the comparison runs in a child that
the kernel ends when one comparison has used CPU_SECONDS or MEMORY_BYTES: such an answer is equal to
nothing. A busy machine changes no verdict, since no wall clock is read.

This file, run as a program, is that child: [wanted, said] a line in, a Comparison a line out.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import resource
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Any, NamedTuple

from agentgrpo.support.optional_deps import require_installed

CPU_SECONDS = 3
MEMORY_BYTES = 2 << 30
READY = "ready"
BY_THE_TEXT = (signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT)
"""How the child ends where a text was too much for it."""


class Comparison(NamedTuple):
    """The result of comparing what was said with what was wanted."""

    wanted_read: bool
    """The wanted text holds a formula."""
    said_read: bool
    equal: bool


TOO_MUCH = Comparison(wanted_read=True, said_read=False, equal=False)
"""Of a comparison that did not come to its end."""


def compare(wanted: str, said: str) -> Comparison:
    r"""Compare two texts; formulas stand in dollars or `\boxed{}`, as math-verify reads them."""
    with _LOCK:
        return _CHILD.compare(wanted, said)


class Child:
    """The process, started when it is first needed and after it was ended."""

    def __init__(self, cpu_seconds: int = CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._process: subprocess.Popen[str] | None = None

    def compare(self, wanted: str, said: str) -> Comparison:
        try:
            return self._compare(wanted, said)
        except BaseException:  # what an interrupted one still says is no answer to the next
            if self._process is not None:
                self._process.kill()
                self.stop()
            raise

    def _compare(self, wanted: str, said: str) -> Comparison:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: so does its output
            process.stdin.write(json.dumps([wanted, said]) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if line:
            return Comparison(*json.loads(line))
        ended = self.stop()
        if -ended not in BY_THE_TEXT:
            raise RuntimeError(f"the comparison of formulas ended with {ended}")
        return TOO_MUCH

    def stop(self) -> int:
        """End the process, if it runs; its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(BrokenPipeError):
            process.communicate()
        return process.returncode

    def _start(self) -> subprocess.Popen[str]:
        self._process = process = subprocess.Popen(
            # -P: the modules beside this file stay out of sight
            [sys.executable, "-P", __file__, str(self._cpu_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the run
        )
        assert process.stdout is not None
        if process.stdout.readline().strip() != READY:
            self.stop()
            require_installed("math_verify", "reward.kind = 'math'")
            raise ValueError("reward.kind = 'math': the package math-verify does not import")
        return process


_CHILD, _LOCK = Child(), threading.Lock()
atexit.register(_CHILD.stop)


def _serve(cpu_seconds: int) -> None:
    """Answer comparisons until the parent closes the pipe."""
    from math_verify import parse, verify

    logging.disable()  # it warns of every comparison without a timeout
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    wanted_formula = lru_cache(1024)(lambda text: parse(text, parsing_timeout=None))
    print(READY, flush=True)  # noqa: T201
    for line in sys.stdin:
        _allow(cpu_seconds)
        wanted, said = json.loads(line)
        try:
            gold, found = wanted_formula(wanted), parse(said, parsing_timeout=None)
            equal = bool(gold and found) and verify(gold, found, timeout_seconds=None)
            told = Comparison(bool(gold), bool(found), bool(equal))
        except Exception:  # what a text makes of sympy: out of memory, of depth, of digits, ...
            told = TOO_MUCH
        print(json.dumps(told), flush=True)  # noqa: T201


def _allow(seconds: int) -> None:
    """Let the kernel end this process when it has used so much more of the CPU."""
    used: Any = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))

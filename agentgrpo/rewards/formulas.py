r"""Compare formulas with the package math-verify, in a separate process.

An answer can keep a computer algebra system busy for ever (`$9^{9^{9^9}}$`, `$10^9!$`), within one
multiplication that no Python timer can interrupt. The comparison therefore runs in a child process,
which the kernel kills when one comparison has used CPU_SECONDS or MEMORY_BYTES. Such an answer
equals nothing. The limit is CPU time, not wall-clock time, so a busy machine changes no result.

This file, run as a program, is the child. It reads lines of JSON [expected, answer] and writes one
Comparison per line.
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
SIGNALS_OF_LIMITS = (signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT)
"""Signals that end the child when a text exceeds its limits."""


class Comparison(NamedTuple):
    """The result of comparing an answer with the expected answer."""

    expected_parsed: bool
    """The expected answer contains a formula."""
    answer_parsed: bool
    """The answer contains a formula."""
    equal: bool


LIMIT_EXCEEDED = Comparison(expected_parsed=True, answer_parsed=False, equal=False)
"""The result of a comparison that was killed."""


class ComparisonProcess:
    """A child process, started at first use and again after it was killed."""

    def __init__(self, cpu_seconds: int = CPU_SECONDS) -> None:
        self._cpu_seconds, self._lock = cpu_seconds, threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def compare(self, expected: str, answer: str) -> Comparison:
        r"""Compare two texts. Formulas are between dollars or in `\boxed{}`, as in math-verify."""
        with self._lock:
            try:
                return self._compare(expected, answer)
            except BaseException:
                # After Ctrl-C the child may still write its result, which the next call would read.
                if self._process is not None:
                    self._process.kill()
                    self.stop()
                raise

    def _compare(self, expected: str, answer: str) -> Comparison:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the child has exited: readline() returns ""
            process.stdin.write(json.dumps([expected, answer]) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if line:
            return Comparison(*json.loads(line))
        exit_status = self.stop()
        if -exit_status not in SIGNALS_OF_LIMITS:
            raise RuntimeError(f"the comparison of formulas ended with {exit_status}")
        return LIMIT_EXCEEDED

    def stop(self) -> int:
        """End the process if it runs. Returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(BrokenPipeError):
            process.communicate()
        return process.returncode

    def _start(self) -> subprocess.Popen[str]:
        self._process = process = subprocess.Popen(
            # -P: keep this file's folder out of sys.path, where its modules could shadow others
            [sys.executable, "-P", __file__, str(self._cpu_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C must reach the run only
        )
        assert process.stdout is not None
        if process.stdout.readline().strip() != READY:
            self.stop()
            require_installed("math_verify", "reward.kind = 'math'")
            raise ValueError("reward.kind = 'math': the package math-verify cannot be imported")
        return process


_PROCESS = ComparisonProcess()
atexit.register(_PROCESS.stop)
compare = _PROCESS.compare


def _serve(cpu_seconds: int) -> None:
    from math_verify import parse, verify

    logging.disable()  # math-verify warns at every comparison without a timeout
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    parse_expected = lru_cache(1024)(lambda text: parse(text, parsing_timeout=None))
    print(READY, flush=True)  # noqa: T201
    for line in sys.stdin:
        _allow(cpu_seconds)
        expected, answer = json.loads(line)
        try:
            gold, parsed = (parse_expected(expected), parse(answer, parsing_timeout=None))
            equal = bool(gold and parsed) and verify(gold, parsed, timeout_seconds=None)
            result = Comparison(bool(gold), bool(parsed), bool(equal))
        except Exception:  # sympy can exceed memory, recursion depth, number of digits, ...
            result = LIMIT_EXCEEDED
        print(json.dumps(result), flush=True)  # noqa: T201


def _allow(seconds: int) -> None:
    """Let the kernel kill this process after that many more seconds of CPU time."""
    used: Any = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))

"""Attacks on verdicts, on the classification of failures, and on records."""

import time

from agentgrpo.sandbox.e2b.api import Sandbox
from agentgrpo.sandbox.grading.grade import check_tests
from agentgrpo.sandbox.session.pool import SandboxPool
from tests.sandbox.attacks.checks import on_pool

NEVER_ENDS = """
import os, signal, struct, sys, time
def f(x):
    frame = sys._getframe()
    while not hasattr(frame.f_locals.get("self"), "number"):
        frame = frame.f_back
    signal.signal(2, signal.SIG_IGN)
    head = struct.pack("<I", frame.f_locals["self"].number)
    while len(head) >= 4:
        body = head[-4:] + struct.pack("<II4sI5sI", 3, 4, b"more", 5, b"piece", SIZE)
        body += b" " * SIZE
        body = struct.pack("<I", len(body)) + body
        while body: body = body[os.write(4, body):]
        if PAUSE: time.sleep(PAUSE)
        head = os.read(3, 4096)[4:8]
    os._exit(0)"""
AGREES = (
    "__contains__ = lambda self, value: True",
    "__contains__ = lambda self, value: True\n __getitem__ = lambda self, key: 0",
    "__contains__ = lambda self, value: True\n __len__ = lambda self: 9",
    "__eq__ = __lt__ = __le__ = __gt__ = __ge__ = __ne__ = lambda self, other: True",
    "__bool__ = __hash__ = __index__ = __int__ = __float__ = __str__ = lambda self: True",
)
ASKS = (
    "assert 'the answer' in f(1)",
    "assert any(word in f(1) for word in ['the answer'])",
    "assert f(1) == 'the answer' or f(1) in ['the answer'] or 'the answer' in [f(1)]",
    "assert {'the answer'} <= f(1)",
    "assert str(f(1)) == 'True' or int(f(1)) == 1",
)
UNPRINTABLE = ("def f(x): raise ValueError('\\ud800')", "def f(x): return '\\udcff'")
SLACK_S = 30.0
"""For starting two sessions on a busy machine."""


@on_pool
def answers_are_not_asked_of_the_code(pool: SandboxPool) -> None:
    """Objects of the code cannot claim to equal or contain the expected value."""
    for says in AGREES:
        code = f"class Yes:\n {says}\ndef f(x): return Yes()"
        for tests in ASKS:
            verdict = check_tests(pool, code, tests)
            assert not verdict.passed, (says, tests)
            assert not verdict.infra_error, verdict


@on_pool
def answers_end(pool: SandboxPool) -> None:
    """An endless answer in pieces does not bypass the time limit of the tests."""
    for size, pause in ((0, 0.0), (pool.limits.value_kib << 10, 0.0), (1 << 16, 0.1), (7, 0.1)):
        code = NEVER_ENDS.replace("SIZE", str(size)).replace("PAUSE", str(pause))
        started = time.monotonic()
        limit = 1.0 if size >= 1 << 16 else 30.0  # the others end of themselves
        verdict = check_tests(pool, code, "assert f(1) == 2", timeout_s=limit)
        assert not verdict.passed
        assert not verdict.infra_error, verdict
        assert ("protocol_error" in verdict.reason) == (size < 1 << 16), verdict
        assert time.monotonic() - started < limit + pool.limits.grace_s + SLACK_S, (size, verdict)


@on_pool
def reasons_can_be_recorded(pool: SandboxPool) -> None:
    """Any output of code can be recorded: no record of a run fails."""
    for code in UNPRINTABLE:
        verdict = check_tests(pool, code, "assert f(1) == 2, f(1)")
        assert not verdict.passed
        assert verdict.reason.encode()


@on_pool
def depth_is_not_the_hosts(pool: SandboxPool) -> None:
    """Directories of any depth are listed and removed."""
    with Sandbox(pool=pool) as sandbox:
        deep = "import os\nfor _ in range(400): os.mkdir('d'); os.chdir('d')"
        assert sandbox.run_code(deep).error is None
        assert len(sandbox.files.list(".", depth=9999)) == 400
        sandbox.files.remove("d")
        assert not sandbox.files.exists("d")

"""Many sessions stepped by one thread."""

import signal
import threading
import time
from dataclasses import replace

import pytest

from agentgrpo.sandbox import SandboxPool, Session, StepLoop, StepResult, StepStatus

pytestmark = pytest.mark.nsjail


def drain(loop: StepLoop) -> list[tuple[int, StepResult]]:
    ended = []
    while len(loop):
        ended += loop.wait()
    return ended


def test_every_step_is_answered_once_with_its_own_result(pool: SandboxPool) -> None:
    sessions = [pool.acquire() for _ in range(12)]
    loop = StepLoop()
    try:
        for turn in range(5):
            tags = {
                loop.submit(session, f"x = {i} + {turn}; print(x); x"): i + turn
                for i, session in enumerate(sessions)
            }
            seen = dict(drain(loop))
            assert {tag: (r.value, r.stdout) for tag, r in seen.items()} == {
                tag: (str(x), f"{x}\n") for tag, x in tags.items()
            }
    finally:
        for session in sessions:
            session.close()


WAITS = "import signal; signal.pthread_sigmask(0, [10]); signal.sigwait([10])"


def test_results_come_in_the_order_in_which_steps_end(pool: SandboxPool) -> None:
    with pool.acquire() as a, pool.acquire() as b, pool.acquire() as c:
        loop = StepLoop()
        slow, middle, fast = (
            loop.submit(session, code) for session, code in ((a, WAITS), (b, WAITS), (c, "1"))
        )
        ended = [tag for tag, _ in loop.wait()]
        for session in (b, a):
            assert session.channels is not None
            signal.pidfd_send_signal(session.channels.interpreter, signal.SIGUSR1)
            ended += [tag for tag, _ in loop.wait()]
        assert ended == [fast, middle, slow]


def test_every_way_to_end_next_to_each_other(pool: SandboxPool) -> None:
    wanted = {
        "1": StepStatus.OK,
        "1 / 0": StepStatus.ERROR,
        "while True: pass": StepStatus.TIMEOUT,
        "from signal import *; signal(2, SIG_IGN)\nwhile True: pass": StepStatus.TIMEOUT_KILLED,
        "x = 'x' * 9_000_000\nprint(x)": StepStatus.OUTPUT_LIMIT,
        "import os; os._exit(3)": StepStatus.EXIT,
        "import os; os.abort()": StepStatus.SIGNAL,
        "import os; os.write(4, b'\\xff' * 4)": StepStatus.PROTOCOL_ERROR,
        "import os; os.closerange(0, 99)": StepStatus.PROTOCOL_ERROR,
        "#" * (2 << 20): StepStatus.ERROR,
    }
    loop = StepLoop()
    sessions = [pool.acquire() for _ in wanted]
    endless = sessions[[*wanted].index("while True: pass")]
    endless.limits = replace(endless.limits, grace_s=30.0)  # of a busy machine
    try:
        tags = {
            loop.submit(session, code, 0.5 if "while True" in code else 30.0): (code[:60], status)
            for session, (code, status) in zip(sessions, wanted.items(), strict=True)
        }
        for tag, result in drain(loop):
            code, status = tags[tag]
            if "closerange" in code:  # may also be seen as the exit that follows
                assert result.state_lost
            else:
                assert result.status is status, (code, result)
    finally:
        for session in sessions:
            session.close()


def test_wait_gives_up_after_its_time(session: Session) -> None:
    loop = StepLoop()
    assert loop.wait() == []
    loop.submit(session, "import time; time.sleep(0.1)")
    assert loop.wait(0.01) == []
    assert [r.status for _, r in drain(loop)] == [StepStatus.OK]


def test_a_signal_ends_no_waiting(session: Session) -> None:
    loop = StepLoop()
    tag = loop.submit(session, "import time; time.sleep(0.5); 42")
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        ended = loop.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [(each, result.value) for each, result in ended] == [(tag, "42")]


def test_a_session_has_one_step_at_a_time(session: Session) -> None:
    loop = StepLoop()
    loop.submit(session, "1")
    with pytest.raises(ValueError, match="already"):
        loop.submit(session, "2")
    drain(loop)


def test_ended_session_answers_in_the_loop_too(session: Session) -> None:
    session.close()
    loop = StepLoop()
    loop.submit(session, "1")
    assert [r.state_lost for _, r in drain(loop)] == [True]


def test_close_by_another_thread_ends_a_running_step(pool: SandboxPool) -> None:
    session = pool.acquire()
    threading.Timer(0.2, session.close).start()
    started = time.monotonic()
    result = session.step("while True: pass", 30)
    assert time.monotonic() - started < 20
    assert (result.status, result.state_lost) == (StepStatus.EXIT, True)
    assert "closed" in result.detail
    with pool.acquire() as other:
        assert other.step("1").value == "1"

"""Time the sandbox against alternatives (rows of bench/results/sandbox.jsonl).

    python -m bench.sandbox [--only WORD] [--heavy SITE_DIR]

Every variant does the same work: cold start to the value of ``1 + 1``; a step of a live session;
create, three steps, destroy. Each row has the load average during the measurement; only rows from
an idle machine count for the targets.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from agentgrpo.envs.graded import GradingPool
from agentgrpo.sandbox import Limits, SandboxPool, Session, Template
from agentgrpo.sandbox.grading.grade import check_tests
from agentgrpo.sandbox.isolation.jail import find_nsjail
from agentgrpo.sandbox.isolation.template import find_template
from bench.harness import append_row

PYTHON = "/usr/bin/python3"
CODE = "print(1 + 1)"


def span(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def note() -> str:
    """How busy the machine is, and whose sessions they are."""
    user = "" if os.geteuid() == 0 else ", without rights"
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores{user}"


def row(variant: str, values: list[float], unit: str = "ms", **shape: int) -> None:
    append_row("sandbox", variant, values, unit=unit, shape=shape, note=note())


def settle() -> None:
    """Let the kernel take apart the namespaces of the last variant: that slows the next one."""
    time.sleep(1.0)


def run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == "2\n", done


def first_result(pool: SandboxPool) -> None:
    with pool.acquire() as session:
        assert session.step("1 + 1").value == "2"


def first_cell(pool: SandboxPool) -> None:
    """What who uses Sandbox() waits for: of IPython's cells."""
    with pool.acquire() as session:
        assert b'"text/plain": "2"' in session.cell("1 + 1").results


def three_runs(argv: list[str]) -> None:
    for _ in range(3):
        run(*argv)


def three_steps(pool: SandboxPool) -> None:
    with pool.acquire() as session:
        for _ in range(3):
            session.step("x = 1")


def jailed() -> list[str]:
    return [find_nsjail(), "-Mo", "--really_quiet", "--user", "65534:65534:1", "--group",
            "65534:65534:1", "-R", "/usr", "-R", "/lib", "-R", "/lib64", "-R", "/bin",
            "--rlimit_as", "inf", "--", PYTHON, "-I", "-S", "-c", CODE]  # fmt: skip


def bench_cold(repeats: int) -> None:
    """From nothing to the first result."""
    row("cold: nsjail per call", [span(lambda: run(*jailed())) for _ in range(repeats)])
    with SandboxPool(min_idle=0) as pool:
        first_result(pool)
        settle()
        row("cold: session", [span(lambda: first_result(pool)) for _ in range(repeats)])
    data = find_template("data")
    with SandboxPool(template=data, limits=Limits(memory_mib=512), min_idle=0) as pool:
        first_cell(pool)
        settle()
        values = [span(lambda: first_cell(pool)) for _ in range(repeats)]
        row("cold: session + template data", values)


def bench_heavy(site: str, repeats: int) -> None:
    template = Template(site_dirs=(site,), preload=("numpy", "sympy", "pandas"))
    environment = {**os.environ, "PYTHONPATH": site}
    plain = [sys.executable, "-s", "-c", f"import numpy, sympy, pandas; {CODE}"]
    values = [
        span(lambda: subprocess.run(plain, env=environment, capture_output=True, check=True))
        for _ in range(5)
    ]
    row("cold: subprocess python + numpy, sympy, pandas", values)
    with SandboxPool(template=template, limits=Limits(memory_mib=512), min_idle=0) as pool:
        first_result(pool)
        settle()
        row("cold: session + numpy, sympy, pandas",
            [span(lambda: first_result(pool)) for _ in range(repeats)])  # fmt: skip


def bench_steps(repeats: int) -> None:
    limits = Limits(steps=repeats + 22)
    with SandboxPool(min_idle=0, limits=limits) as pool, pool.acquire() as session:
        session.step("x = 0")
        step = partial(session.step, "x += 1")
        values = [span(step) for _ in range(20 + repeats)]
        row("step: x += 1", values[20:])
        assert session.step("x").value == str(20 + repeats), "all of them were run"


def bench_acquire(repeats: int) -> None:
    with SandboxPool(min_idle=8) as pool:
        values = []
        for _ in range(repeats):
            while pool.metrics()["idle"] < 8:
                time.sleep(0.002)
            held: list[Session] = []
            values.append(span(lambda h=held: h.append(pool.acquire())))  # type: ignore[misc]
            held[0].close()
        row("acquire from the pool", values)


@contextmanager
def live(pool: SandboxPool, count: int) -> Iterator[list[Session]]:
    sessions: list[Session] = []
    try:
        for _ in range(count):
            sessions.append(pool.acquire())
            sessions[-1].step("x = 0")
        yield sessions
    finally:
        for session in sessions:
            session.close()


def pss_mib(session: Session) -> float:
    total = 0
    for pid in (session.init_pid, session.pid):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])
    return total / 1024


def bench_live(counts: list[int]) -> None:
    for count in counts:
        live_at_once(count)


def live_at_once(count: int) -> None:
    with SandboxPool(min_idle=0, max_live=count) as pool, live(pool, count) as sessions:
        settle()
        values = [span(lambda s=s: s.step("x += 1")) for _ in range(5) for s in sessions]  # type: ignore[misc]
        row("step round trip", values, live=count)
        row("memory of a session (PSS)", [pss_mib(s) for s in sessions[:50]], "MiB", live=count)
        answers = [s.step("x").value for s in sessions]
        assert answers == ["5"] * count, "every one of them is alive and has its state"


def per_second(work: Callable[[], object], seconds: float, threads: int) -> float:
    """How often several threads together get work done."""
    done = [0] * threads
    stop = time.monotonic() + seconds

    def turn(i: int) -> None:
        while time.monotonic() < stop:
            work()
            done[i] += 1

    workers = [threading.Thread(target=turn, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / seconds


def bench_throughput(seconds: float, threads: int) -> None:
    """Create, three steps, destroy, from several threads of one process."""
    with SandboxPool(min_idle=0) as pool:
        grouped = "" if pool.describe()["memory_limit"].startswith("control") else ", no cgroups"
        three_steps(pool)
        settle()
        rates = [per_second(lambda: three_steps(pool), seconds, threads) for _ in range(3)]
        row(f"sessions (create, 3 steps, destroy){grouped}", rates, "1/s", threads=threads)


def bench_throughput_of_nsjail(seconds: float, threads: int) -> None:
    """Without state each of the three steps is a jail of its own."""
    rate = per_second(partial(three_runs, jailed()), seconds, threads)
    row("sessions (3 runs): nsjail per call", [rate], "1/s", threads=threads)


def bench_verdicts(count: int) -> None:
    """Of right code, graded in sandboxes apart as a run's: alone, and beside fork storms."""
    storm = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
    code, tests = "def f(n): return sum(range(n))", "assert f(1_000) == 499_500"

    def timed(beside: str) -> None:
        spans = [span(lambda: passes.append(check_tests(grading.pool(), code, tests).passed))
                 for _ in range(count)]  # fmt: skip
        row(f"verdict apart, {beside}", spans)
        row(f"verdict apart, {beside}: the 99th of 100", [sorted(spans)[int(0.99 * len(spans))]])

    passes: list[bool] = []
    with SandboxPool(limits=Limits(timeout_s=600.0), max_live=16, min_idle=2) as pool:
        grading = GradingPool(pool)
        timed("alone")
        storms = [pool.acquire() for _ in range(8)]
        threads = [threading.Thread(target=one.step, args=(storm,)) for one in storms]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        timed("beside eight fork storms")
        for one in storms:
            one.close()
        for thread in threads:
            thread.join()
        grading.close()
    assert all(passes), f"{passes.count(False)} of {len(passes)} were graded wrong"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--live", type=int, nargs="*", default=[200, 1000])
    parser.add_argument("--heavy", help="a site directory with numpy, sympy and pandas")
    given = parser.parse_args()
    n = given.repeats
    benches: dict[str, Callable[[], object]] = {
        "cold": lambda: bench_cold(n),
        "steps": lambda: bench_steps(5 * n),
        "acquire": lambda: bench_acquire(n),
        "throughput": lambda: bench_throughput(3.0, 4),
        "peers": lambda: bench_throughput_of_nsjail(3.0, 4),
        "live": lambda: bench_live(given.live),
        "verdicts": lambda: bench_verdicts(2 * n),
    }
    if given.heavy:
        benches["heavy"] = lambda: bench_heavy(given.heavy, n)
    else:
        print("sandbox heavy: absent, name it with --heavy")
    for name, bench in benches.items():
        if given.only in name:
            bench()


if __name__ == "__main__":
    main()

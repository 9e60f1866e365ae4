"""How fast the sandbox is, beside what people use instead. Appends to bench/results/sandbox.jsonl.

    python -m bench.sandbox [--only WORD] [--heavy SITE_DIR]

Every variant runs the same work: cold start to the value of ``1 + 1``; a step of a live session;
create, three steps, destroy. Each row notes the load average it was measured under, and the value
of a bar counts only from an idle machine.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from agentgrpo.sandbox import Limits, SandboxPool, Session, StepLoop, StepStatus, Template
from agentgrpo.sandbox.hostile.lifecycle import pids
from agentgrpo.sandbox.jail import find_nsjail
from agentgrpo.sandbox.templates import find_template
from bench.harness import append_row

PYTHON = "/usr/bin/python3"
CODE = "print(1 + 1)"


def span(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def row(variant: str, values: list[float], unit: str = "ms", **shape: int) -> None:
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    append_row("sandbox", variant, values, unit=unit, shape=shape, note=load)


def settle() -> None:
    """Let the kernel take apart the namespaces of the last variant: that slows the next one."""
    time.sleep(1.0)


def run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == "2\n", done


def first_result(pool: SandboxPool) -> None:
    with pool.acquire() as session:
        assert session.step("1 + 1").value == "2"


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
    python = [PYTHON, "-I", "-S", "-c", CODE]
    row(
        "cold: subprocess python, no isolation",
        [span(lambda: run(*python)) for _ in range(repeats)],
    )
    row("cold: nsjail per call", [span(lambda: run(*jailed())) for _ in range(repeats)])
    with SandboxPool(min_idle=0) as pool:
        first_result(pool)
        settle()
        row("cold: session", [span(lambda: first_result(pool)) for _ in range(repeats)])


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


def bench_data(repeats: int) -> None:
    """What Sandbox.create() takes where the environment has numpy."""
    limits = Limits(memory_mib=512)
    with SandboxPool(template=find_template("data"), limits=limits, min_idle=0) as pool:
        first_result(pool)
        settle()
        values = []
        for _ in range(repeats):
            values.append(span(lambda: first_result(pool)))
            time.sleep(0.02)  # for the end of the one before, which the next would wait for
        row("cold: session + template data", values)


def bench_steps(repeats: int) -> None:
    limits = Limits(steps=5 * (repeats + 21))
    with SandboxPool(min_idle=0, limits=limits) as pool, pool.acquire() as session:
        cells = {
            "x += 1": "x += 1",
            "print": "print('hello')",
            "exception": "1 / 0",
            "60 kB print": "print('x' * 60_000)",
        }
        for name, code in cells.items():
            session.step("x = 0")
            for _ in range(20):
                session.step(code)
            step = partial(session.step, code)
            row(f"step: {name}", [span(step) for _ in range(repeats)])
            assert session.step("1").value == "1", "all of them were run"


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
    for pid in pids(session):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])
    return total / 1024


def bench_live(count: int) -> None:
    with SandboxPool(min_idle=0, max_live=count) as pool, live(pool, count) as sessions:
        settle()
        values = [span(lambda s=s: s.step("x += 1")) for _ in range(5) for s in sessions]  # type: ignore[misc]
        row("step round trip", values, live=count)
        values.sort()
        row("step round trip, 99th percentile", [values[int(len(values) * 0.99)]], live=count)
        row("memory of a session (PSS)", [pss_mib(s) for s in sessions[:50]], "MiB", live=count)
        answers = [s.step("x").value for s in sessions]
        assert answers == ["5"] * count, "every one of them is alive and has its state"
        row("live at once, all with their state", [float(len(sessions))], "sessions")


def bench_loop(count: int, seconds: float = 3.0) -> None:
    """Steps of many live sessions, all kept busy by one host thread."""
    limits = Limits(steps=1_000_000)
    with (
        SandboxPool(limits=limits, min_idle=0, max_live=count) as pool,
        live(pool, count) as sessions,
    ):
        loop = StepLoop()
        owner = {loop.submit(session, "x += 1"): session for session in sessions}
        done, stop = 0, time.monotonic() + seconds
        while time.monotonic() < stop:
            for tag, result in loop.wait():
                assert result.status is StepStatus.OK, result
                session = owner.pop(tag)
                owner[loop.submit(session, "x += 1")] = session
                done += 1
        row("steps, one host thread", [done / seconds], "1/s", live=count)
        while len(loop):
            loop.wait()


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


def bench_throughput_of_peers(seconds: float, threads: int) -> None:
    """Without state each of the three steps is a process, or a jail, of its own."""
    for name, argv in (("subprocess python", [PYTHON, "-I", "-S", "-c", CODE]),
                       ("nsjail per call", jailed())):  # fmt: skip
        rate = per_second(partial(three_runs, argv), seconds, threads)
        row(f"sessions (3 runs): {name}", [rate], "1/s", threads=threads)


def each(bench: Callable[[int], None], values: Iterable[int]) -> None:
    for value in values:
        bench(value)


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
        "data": lambda: bench_data(n),
        "steps": lambda: bench_steps(5 * n),
        "acquire": lambda: bench_acquire(n),
        "throughput": lambda: each(lambda t: bench_throughput(3.0, t), (1, 2, 4)),
        "peers": lambda: bench_throughput_of_peers(3.0, 4),
        "live": lambda: each(bench_live, given.live),
        "loop": lambda: each(bench_loop, given.live),
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

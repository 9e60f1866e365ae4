"""Compare sessions of container images with the plain template (results/images.jsonl).

    python -m bench.images SOURCE [--only WORD]

SOURCE is as for `agentgrpo sandbox image add`, with bash and python3. The committed rows are of
Debian 13 (`mmdebstrap --include=python3 trixie root.tar`).
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from agentgrpo.sandbox import Limits, SandboxPool, Session, Template
from agentgrpo.sandbox.isolation.images import Image, add_image, layer_name, new_layer, set_bytes
from agentgrpo.sandbox.isolation.snapshots import remove
from agentgrpo.sandbox.session.forks import Fork, fork
from agentgrpo.sandbox.session.program import Program
from bench.harness import append_row
from bench.sandbox import note, span

LIMITS = Limits(
    memory_mib=512, home_mib=256, inodes=65536, processes=128, timeout_s=120.0, output_max_mib=64
)
FILES = "mkdir d; for i in $(seq {}); do echo {} > d/$i; done"


def row(variant: str, values: list[float], unit: str = "ms", **shape: int) -> None:
    append_row("images", variant, values, unit=unit, shape=shape, note=note())


def command(session: Session, text: str = "true") -> None:
    """Run a command beside the session's interpreter, as Sandbox.commands does."""
    assert session.channels is not None
    argv, env = ["/bin/bash", "-c", text], {"PATH": "/usr/bin:/bin"}
    program = Program(session.channels, argv, env=env, directory="/", output_max=1 << 20)
    program.close_stdin()
    assert program.wait(60.0)
    assert program.exit_code == 0, program.stderr


def bench_start(pool: SandboxPool, kind: str, step: str, repeats: int) -> None:
    parts: dict[str, list[float]] = {"acquire": [], "then bash -c true": [], "then a step": []}
    for _ in range(repeats):
        held: list[Session] = []
        parts["acquire"].append(span(lambda h=held: h.append(pool.acquire())))  # type: ignore[misc]
        parts["then bash -c true"].append(span(partial(command, held[0])))
        held[0].close()
        with pool.acquire() as session:
            parts["then a step"].append(span(lambda s=session: s.step(step)))  # type: ignore[misc]
    for part, values in parts.items():
        row(f"{kind}: {part}", values)


def available_mib() -> float:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / 1024


def bench_many(pool: SandboxPool, kind: str, count: int) -> None:
    before = available_mib()
    sessions: list[Session] = []
    values = [span(lambda: sessions.append(pool.acquire())) for _ in range(count)]
    row(f"{kind}: all of them", [sum(values)], at_once=count)
    row(f"{kind}: memory of each", [(before - available_mib()) / count], "MiB", at_once=count)
    for session in sessions:
        command(session, "echo mine > /tmp/f; [ $(cat /tmp/f) = mine ]")
        session.close()
    time.sleep(1.0)


def bench_files(pool: SandboxPool, repeats: int) -> None:
    for count in (0, 1000):
        values = []
        for _ in range(repeats):
            with pool.acquire() as session:
                values.append(span(lambda s=session, n=count: s.step(FILES.format(n, "x"))))  # type: ignore[misc]
        row("step: files of 2 bytes", values, files=count)


def deeper(image: Image, count: int) -> Image:
    """The image under so many layers of one file each."""
    layers = [*image.layers]
    for number in range(count):
        with new_layer(layer_name("bench", number)) as layer:
            if layer is not None:
                (layer / f"f{number}").touch()
                set_bytes(layer, 0)
        layers.append(str(Path(image.layers[0]).parent / layer_name("bench", number)))
    return image._replace(layers=tuple(layers))


def bench_depth(pool: SandboxPool, image: Image, repeats: int) -> None:
    for count in (1, 10, 100):
        deep = deeper(image, count - len(image.layers)) if count > 1 else image

        def first(of: Image = deep) -> None:
            with pool.acquire(of) as session:
                command(session)

        row("acquire and bash -c true", [span(first) for _ in range(repeats)], layers=count)


def bench_snapshots(pool: SandboxPool, repeats: int) -> None:
    for label, change in (
        ("3 files", FILES.format(3, "x")),
        ("1,000 files", FILES.format(1000, "x")),
        ("100 MiB", "head -c 104857600 /dev/zero > f"),
    ):
        with pool.acquire() as session:
            session.step(change)
            snapshots: list[Image] = []
            take = [span(lambda s=session, t=snapshots: t.append(s.snapshot())) for _ in range(9)]  # type: ignore[misc]
            row(f"snapshot of {label}", take)
        branches = []
        for _ in range(repeats):
            held: list[Session] = []
            branches.append(span(lambda h=held, t=snapshots: h.append(pool.acquire(t[0]))))  # type: ignore[misc]
            held[0].close()
        row(f"branch from a snapshot of {label}", branches)
        for snapshot in snapshots:
            remove(snapshot)


def bench_branches(pool: SandboxPool, repeats: int) -> None:
    """A branch behind so many commands: from a copy of the session, and by repeating them. The copy
    is exact, the repetition is not. Both alternate, as other programs may run.
    """
    show = "cat /root/f*; echo $x"
    for count in (1, 5, 20):
        commands = [f"x=$RANDOM; echo $x$RANDOM > /root/f{i}" for i in range(count)]
        copied, repeated = [], []
        for _ in range(repeats):
            held: list[Session] = []
            copies: list[Fork] = []

            def copy(h: list[Session] = held, c: list[Fork] = copies) -> None:
                made = fork(h[0], pool)
                assert made is not None
                c.append(made)
                h.append(pool.acquire(made.image))
                assert made.restore(h[-1])

            def repeat(h: list[Session] = held, texts: list[str] = commands) -> None:
                h.append(pool.acquire())
                for text in texts:
                    h[-1].step(text)

            repeat()
            copied.append(span(copy))
            repeated.append(span(repeat))
            parent, branch, other = (session.step(show).stdout for session in held)
            assert parent == branch != other
            for session in held:
                session.close()
            copies[0].close()
        row("branch from a copy of the session", copied, commands=count)
        row("branch by repeating the commands", repeated, commands=count)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("--only", default="")
    parser.add_argument("--repeats", type=int, default=60)
    given = parser.parse_args()
    unpacked: list[Image] = []
    row("add the image", [span(lambda: unpacked.append(add_image("bench", given.source)))])
    image, n = unpacked[0], given.repeats
    plain = SandboxPool(limits=LIMITS, min_idle=0)
    pool = SandboxPool(template=Template(image="bench"), limits=LIMITS, min_idle=0)
    benches: dict[str, Callable[[], object]] = {
        "start of template": lambda: bench_start(plain, "template", "1 + 1", n),
        "start": lambda: bench_start(pool, "image", "true", n),
        "many of template": lambda: bench_many(plain, "template", 200),
        "many": lambda: bench_many(pool, "image", 200),
        "files": lambda: bench_files(pool, n // 3),
        "depth": lambda: bench_depth(pool, image, n),
        "snapshots": lambda: bench_snapshots(pool, n),
        "branches": lambda: bench_branches(pool, n),
    }
    with plain, pool:
        for name, bench in benches.items():
            if given.only in name:
                bench()


if __name__ == "__main__":
    main()

"""Where the seconds of a training step go, on the thread that plays and learns.

    python -m bench.gpu.profile CONFIG [section.key=value ...]

Trains in this process, while another thread notes every few milliseconds what the main thread is
in. Rows: of each step after the second one, seconds by the innermost function of the project or of
vLLM, of those that take most; all stacks go to $BENCH_OUT/stacks.txt, a line each, for a flame
graph. What holds the interpreter's lock is noted late, once, and so counts too little.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from agentgrpo.support.runtime import prepare_environment
from bench.harness import append_row

NAME = "gpu_profile"
EVERY_S = 0.003
WARM = 2
"""Steps that are left out: they compile."""
MOST = 24
OURS = ("agentgrpo", "vllm")
LOOP = "agentgrpo.train.loop.train"
NOT_OF_A_STEP = ("agentgrpo.train.loop.evaluate_if_due", "agentgrpo.train.parts.save")


class Watch(threading.Thread):
    """Notes the main thread's stacks while steps are taken."""

    def __init__(self, metrics: Path) -> None:
        super().__init__(daemon=True)
        self._metrics, self._main = metrics, threading.main_thread().ident
        self.stacks: collections.Counter[tuple[str, ...]] = collections.Counter()
        """Seconds by stack, the outermost function first."""

    def run(self) -> None:
        last = time.perf_counter()
        while True:
            time.sleep(EVERY_S)
            now = time.perf_counter()
            frame = sys._current_frames().get(self._main or 0)
            if frame is not None and _steps(self._metrics) >= WARM:
                stack = stack_of(frame)
                if LOOP in stack and not any(name in stack for name in NOT_OF_A_STEP):
                    self.stacks[stack] += now - last  # type: ignore[assignment]
            last = now


def _steps(metrics: Path) -> int:
    try:
        return metrics.read_bytes().count(b'"learner/loss"')
    except FileNotFoundError:
        return 0


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """package.module.function of each frame, the outermost first."""
    names: list[str] = []
    while frame is not None:
        names.append(f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(names))


def innermost(stack: Sequence[str]) -> str:
    """The last function of the project or of vLLM, and the one in which it waits."""
    ours = [name for name in stack if name.split(".")[0] in OURS]
    return " > ".join(dict.fromkeys([*ours[-1:], stack[-1]]))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.parse_args(arguments)
    from agentgrpo.train import __main__ as train

    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run/metrics.jsonl"
        watch = Watch(metrics)
        watch.start()
        status = train.main([*arguments, f"out_dir={folder}/run"])
        steps = _steps(metrics) - WARM
    if status or steps < 1:
        raise SystemExit(f"the run ended with {status} after {steps + WARM} steps")
    if out := os.environ.get("BENCH_OUT"):
        lines = [f"{';'.join(stack)} {seconds:.3f}" for stack, seconds in watch.stacks.items()]
        (Path(out) / "stacks.txt").write_text("\n".join(lines) + "\n")
    spent: collections.Counter[str] = collections.Counter()
    for stack, seconds in watch.stacks.items():
        spent[innermost(stack)] += seconds
    note = " ".join(arguments)
    for name, seconds in [("all", sum(spent.values())), *spent.most_common(MOST)]:
        append_row(
            NAME, name, [seconds / steps], unit="s a step", shape={"steps": steps}, note=note
        )


if __name__ == "__main__":
    prepare_environment()
    main(sys.argv[1:])

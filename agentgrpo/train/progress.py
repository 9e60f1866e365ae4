"""What the person at the terminal sees: a line per event, and on a terminal what happens now."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from agentgrpo.support import parallel
from agentgrpo.types import Metrics

REFRESH_HZ = 4


class Stopwatch:
    """Time of named parts since the last lap, in seconds.

    A part inside another is its own and not the outer one's, so that nothing counts twice.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, rest: str = "other"
    ) -> None:
        self._clock, self._rest = clock, rest
        self._lap_began = self._since = clock()
        self._spent: dict[str, float] = {}
        self._open: list[str] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside under this name."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def lap(self) -> Metrics:
        """`NAME_s` of every part since the last lap, and `total_s`, which is their sum."""
        self._count()
        spent = {f"{name}_s": seconds for name, seconds in self._spent.items()}
        total = self._since - self._lap_began
        self._spent, self._lap_began, self._rest = {}, self._since, "other"
        return {**spent, "total_s": total}

    def _count(self) -> None:
        now = self._clock()
        name = self._open[-1] if self._open else self._rest
        self._spent[name] = self._spent.get(name, 0.0) + now - self._since
        self._since = now


class Progress:
    """Says what the run is doing, for how long it still will, and keeps the time.

    Lines stay. On a terminal the last lines are live: the phase, and the numbers of the last step.
    """

    def __init__(
        self, total_steps: int, console: Console | None = None, *, names_folder: bool = True
    ) -> None:
        self._total = total_steps
        self._names_folder = names_folder  # False: it is temporary
        self._console = console or Console(
            highlight=False, soft_wrap=True, quiet=parallel.rank() > 0
        )
        self._step_started: list[float] = []
        self._started = time.monotonic()
        self._solved: dict[int, float] = {}
        self._stopwatch = Stopwatch(rest="starting")
        self._phases: list[tuple[str, float]] = []
        self._spinner = Spinner("dots")
        self._gradientless = False
        self._numbers: dict[str, str] = {}
        self._gauges: dict[str, Callable[[], str]] = {"memory": _memory}

    def watch(self, name: str, read: Callable[[], str]) -> None:
        """Show a number on the live display; read() is called from another thread."""
        self._gauges[name] = read

    def say(self, line: str) -> None:
        """Print a line, with the seconds since the start before it."""
        self._console.print(f"{time.monotonic() - self._started:5.0f}s  {line}", markup=False)

    def say_path(self, line: str) -> None:
        """Print a line that names the run's folder or something in it."""
        if self._names_folder:
            self.say(line)

    def remember(self, solved: Mapping[int, float]) -> None:
        """Evaluations of before the run was resumed, by step: the end compares with the first."""
        self._solved.update(solved)

    def begin_step(self) -> None:
        """Note when a step starts: what the time left is computed from."""
        self._step_started.append(time.monotonic())

    def lap(self) -> Metrics:
        """Seconds since the last lap by phase, `other_s`, and `total_s`, their sum."""
        return self._stopwatch.lap()

    def step_done(
        self, step: int, rollout: Metrics, learner: Metrics, engine: Metrics, spent: Metrics
    ) -> None:
        """The line of a finished step; `spent` is its lap()."""
        agreement = max(engine["max_dlogp"], learner.get("sampler_gap_max", 0.0))
        left = self.time_left(step + 1)
        self._numbers = _numbers(rollout, learner, agreement, left)
        playing, learning = (spent.get(f"{part}_s", 0.0) for part in ("playing", "learning"))
        self.say(
            f"step {step + 1}/{self._total}  reward {rollout['reward']:.2f}  {_solved(rollout)}"
            f"play {playing:.0f}s  learn {learning:.0f}s  left {left}"
        )
        self._machine_failed(rollout)
        longest = max(spent, key=lambda name: spent[name] * (name != "total_s"))
        if longest not in ("playing_s", "learning_s"):
            of = f"{spent[longest]:.0f} of {spent['total_s']:.0f} s"
            self.say(f"  most of it was {longest.removesuffix('_s')}: {of}")
        told, self._gradientless = self._gradientless, rollout["live_groups"] == 0
        if not self._gradientless or told:
            return
        if rollout.get("dead_broken", 0.0) == rollout["groups"]:
            late = rollout.get("status_timed_out", 0.0)
            more = f" ({late:.0%} timed out)" if late else ""
            self.say(f"  it taught nothing: no group kept two rollouts that count{more}")
        else:
            self.say("  it taught nothing: in each group all rewards were equal")
            self.say("  (tasks that are sometimes solved teach: docs/debug.md)")

    def evaluated(self, step: int, metrics: Metrics) -> None:
        told = "solved" if "solved" in metrics else "reward"  # where nobody says what is solved
        if told == "solved":
            self._solved[step] = metrics["solved"]
        self.say(
            f"held-out after {step} steps: {told} {metrics[told]:.3f} of "
            f"{metrics['rollouts']:.0f} tasks ({metrics['answered']:.0%} answered)"
        )
        self._machine_failed(metrics)

    def finished(self, out_dir: Path) -> None:
        """What the run was for, and where everything is."""
        if len(self._solved) > 1:
            (first, before), *_, (last, after) = self._solved.items()
            self.say(f"held-out solved: {before:.3f} after {first} steps, {after:.3f} after {last}")
            if after <= before:
                self.say_path(
                    f"it did not rise; what the records say of that: {command()} doctor {out_dir}"
                )
        self.say_path(f"done. Everything is in {out_dir.resolve()}:")
        for name, what in {
            "run.json": "resolved config, what was chosen, versions",
            "metrics.jsonl": "one line a step",
            "rollouts.jsonl": "every rollout, token by token",
            "checkpoints/": "Hugging Face models, for transformers and vLLM",
        }.items():
            self.say_path(f"  {name:16s} {what}")
        self.say_path(f"look at it: {command()} view {out_dir}")

    def time_left(self, next_step: int) -> str:
        """Estimate from the mean of the steps so far; "?" before the first has ended."""
        steps = len(self._step_started)
        if steps == 0:
            return "?"
        each = (time.monotonic() - self._step_started[0]) / steps
        minutes, seconds = divmod(round(each * (self._total - next_step)), 60)
        hours, rest = divmod(minutes, 60)
        return f"{hours}h{rest:02d}m" if hours else f"{minutes}m{seconds:02d}s"

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Show what is being done now (on a terminal); its time goes by the first word."""
        self._phases.append((what, time.monotonic()))
        try:
            with self._stopwatch.part(what.split()[0].strip(":,")), self._live():
                yield
        finally:
            self._phases.pop()

    def _machine_failed(self, metrics: Metrics) -> None:
        if broken := metrics["infra_errors"]:
            self.say(
                f"  {broken:.0f} rollouts lost: not the policy, this machine or your code failed"
            )

    @contextlib.contextmanager
    def _live(self) -> Iterator[None]:
        if not self._console.is_terminal or len(self._phases) > 1:
            yield
            return
        with Live(
            console=self._console,
            get_renderable=self._now,
            refresh_per_second=REFRESH_HZ,
            transient=True,
        ):
            yield

    def _now(self) -> RenderableType:
        """The live lines: the phase, then the last step's numbers and the gauges."""
        what, since = self._phases[-1] if self._phases else ("", time.monotonic())
        step = f"step {len(self._step_started)}/{self._total}, " if self._step_started else ""
        self._spinner.update(text=f"{step}{what}, {time.monotonic() - since:.0f} s")
        shown = {**self._numbers, **{name: read() for name, read in self._gauges.items()}}
        table = Table.grid(padding=(0, 3))
        names = list(shown)
        for start in range(0, len(names), 5):
            row = names[start : start + 5]
            table.add_row(*(f"[dim]{name}[/dim] {shown[name]}" for name in row))
        return Group(self._spinner, table)


def command() -> str:
    """How this installation's `agentgrpo` is called from here."""
    mine = Path(sys.executable).parent / "agentgrpo"
    found = shutil.which("agentgrpo")
    if not mine.exists() or (found and Path(found).samefile(mine)):
        return "agentgrpo"
    return os.path.relpath(mine) if mine.is_relative_to(Path.cwd()) else str(mine)


def _numbers(rollout: Metrics, learner: Metrics, agreement: float, left: str) -> dict[str, str]:
    sampling_s = rollout["decode_s"] + rollout["idle_s"]
    return {
        "reward": f"{rollout['reward']:.3f}",
        **({"solved": f"{rollout['solved']:.0%}"} if "solved" in rollout else {}),
        "generation": _rate(rollout.get("total_sampled_tokens", 0.0), sampling_s),
        "learning": _rate(learner["packed_tokens"], learner["seconds"]),
        "engine idle": f"{rollout['idle_s'] / sampling_s:.0%}" if sampling_s else "-",
        "agreement": f"{agreement:.1e}",
        "left": left,
    }


def _rate(tokens: float, seconds: float) -> str:
    return f"{tokens / seconds:,.0f} tokens/s" if seconds else "-"


def _memory() -> str:
    """Resident memory of this process, and what torch holds on a GPU."""
    lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
    resident = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    shown = f"{resident / 2**20:.1f} GiB"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        shown += f", GPU {(total - free) / 2**30:.1f} of {total / 2**30:.0f}"
    return shown


def _solved(metrics: Metrics) -> str:
    return f"solved {metrics['solved']:.0%}  " if "solved" in metrics else ""

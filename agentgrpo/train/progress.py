"""Terminal output of a run: a line per event, and on a terminal a live display of the phase."""

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


class Progress:
    """Prints what the run does and how long it will take, and measures the time of each phase.

    On a terminal, a live display below these lines shows the phase and the last step's numbers.
    """

    def __init__(
        self, total_steps: int, console: Console | None = None, *, names_folder: bool = True
    ) -> None:
        self._total = total_steps
        self._names_folder = names_folder  # False for a temporary folder
        self._console = console or Console(
            highlight=False, soft_wrap=True, quiet=parallel.rank() > 0
        )
        self._step_started: list[float] = []
        self._started = time.monotonic()
        self._solved: dict[int, float] = {}
        self._lap_began = self._counted = self._started
        self._spent: dict[str, float] = {}  # seconds by phase since the last lap
        self._rest = "starting"  # the name of the time outside of all phases
        self._phases: list[tuple[str, float]] = []
        self._spinner = Spinner("dots")
        self._gradientless = False
        self._numbers: dict[str, str] = {}
        self._gauges: dict[str, Callable[[], str]] = {"memory": _memory}

    def watch(self, name: str, read: Callable[[], str]) -> None:
        """Show a value on the live display; read() is called from the display's thread."""
        self._gauges[name] = read

    def print(self, line: str) -> None:
        """Print a line, prefixed with the seconds since the start."""
        self._console.print(f"{time.monotonic() - self._started:5.0f}s  {line}", markup=False)

    def print_path(self, line: str) -> None:
        """Print a line that names the run's folder, unless that is temporary."""
        if self._names_folder:
            self.print(line)

    def remember(self, solved: Mapping[int, float]) -> None:
        """Add the evaluations that were made before the run was resumed, by step."""
        self._solved.update(solved)

    def begin_step(self) -> None:
        """Record the start of a step, from which the remaining time is estimated."""
        self._step_started.append(time.monotonic())

    def lap(self) -> Metrics:
        """Seconds since the last lap by phase, `other_s`, and `total_s`, their sum.

        The time of a nested phase is not counted for the outer one.
        """
        self._count()
        spent = {f"{name}_s": seconds for name, seconds in self._spent.items()}
        total = self._counted - self._lap_began
        self._spent, self._lap_began, self._rest = {}, self._counted, "other"
        return {**spent, "total_s": total}

    def _count(self) -> None:
        """Add the time since the last call to the innermost open phase."""
        now = time.monotonic()
        name = self._phases[-1][0].split()[0].strip(":,") if self._phases else self._rest
        self._spent[name] = self._spent.get(name, 0.0) + now - self._counted
        self._counted = now

    def step_done(
        self, step: int, rollout: Metrics, learner: Metrics, engine: Metrics, times: Metrics
    ) -> None:
        """Print the line of a finished step. `times` is what lap() returned."""
        agreement = max(engine["max_dlogp"], learner.get("sampler_gap_max", 0.0))
        time_left = self.time_left(step + 1)
        self._numbers = _numbers(rollout, learner, agreement, time_left)
        playing, learning = (times.get(f"{part}_s", 0.0) for part in ("playing", "learning"))
        self.print(
            f"step {step + 1}/{self._total}  reward {rollout['reward']:.2f}  {_solved(rollout)}"
            f"play {playing:.0f}s  learn {learning:.0f}s  left {time_left}"
        )
        self._print_infra_errors(rollout)
        longest = max(times, key=lambda name: times[name] * (name != "total_s"))
        if longest not in ("playing_s", "learning_s"):
            share = f"{times[longest]:.0f} of {times['total_s']:.0f} s"
            self.print(f"  most of it was {longest.removesuffix('_s')}: {share}")
        was_gradientless, self._gradientless = self._gradientless, rollout["live_groups"] == 0
        if not self._gradientless or was_gradientless:  # once, not after every such step
            return
        if rollout.get("dead_broken", 0.0) == rollout["groups"]:
            timed_out = rollout.get("status_timed_out", 0.0)
            more = f" ({timed_out:.0%} timed out)" if timed_out else ""
            self.print(f"  no gradient: no group has two rollouts that count{more}")
        else:
            self.print("  no gradient: in each group all rewards were equal")
            self.print("  (use tasks that are solved sometimes: docs/debug.md)")

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """Print the line of an evaluation."""
        name = "solved" if "solved" in metrics else "reward"
        if name == "solved":
            self._solved[step] = metrics["solved"]
        self.print(
            f"held-out after {step} steps: {name} {metrics[name]:.3f} of "
            f"{metrics['rollouts']:.0f} tasks ({metrics['answered']:.0%} answered)"
        )
        self._print_infra_errors(metrics)

    def finished(self, out_dir: Path) -> None:
        """Print the first and the last evaluation, and the files of the run."""
        if len(self._solved) > 1:
            (first, before), *_, (last, after) = self._solved.items()
            self.print(
                f"held-out solved: {before:.3f} after {first} steps, {after:.3f} after {last}"
            )
            if after <= before:
                self.print_path(f"it did not rise; find out why: {command_name()} doctor {out_dir}")
        self.print_path(f"done. Everything is in {out_dir.resolve()}:")
        for name, content in {
            "run.json": "resolved config, automatic choices, versions",
            "metrics.jsonl": "one line per step",
            "rollouts.jsonl": "every rollout, token by token",
            "checkpoints/": "Hugging Face models, for transformers and vLLM",
        }.items():
            self.print_path(f"  {name:16s} {content}")
        self.print_path(f"look at it: {command_name()} view {out_dir}")

    def time_left(self, next_step: int) -> str:
        """Estimate from the mean time of the steps so far; "?" before the first has ended."""
        steps = len(self._step_started)
        if steps == 0:
            return "?"
        each = (time.monotonic() - self._step_started[0]) / steps
        minutes, seconds = divmod(round(each * (self._total - next_step)), 60)
        hours, rest = divmod(minutes, 60)
        return f"{hours}h{rest:02d}m" if hours else f"{minutes}m{seconds:02d}s"

    @contextlib.contextmanager
    def phase(self, description: str) -> Iterator[None]:
        """Show the phase on a terminal and time it under the first word of its description."""
        self._count()
        self._phases.append((description, time.monotonic()))
        try:
            with self._live():
                yield
        finally:
            self._count()
            self._phases.pop()

    def _print_infra_errors(self, metrics: Metrics) -> None:
        if num_lost := metrics["infra_errors"]:
            self.print(
                f"  {num_lost:.0f} rollouts lost: this machine or your code failed, not the policy"
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
        description, since = self._phases[-1] if self._phases else ("", time.monotonic())
        step = f"step {len(self._step_started)}/{self._total}, " if self._step_started else ""
        self._spinner.update(text=f"{step}{description}, {time.monotonic() - since:.0f} s")
        values = {**self._numbers, **{name: read() for name, read in self._gauges.items()}}
        table = Table.grid(padding=(0, 3))
        names = list(values)
        for start in range(0, len(names), 5):
            row = names[start : start + 5]
            table.add_row(*(f"[dim]{name}[/dim] {values[name]}" for name in row))
        return Group(self._spinner, table)


def command_name() -> str:
    """What the user has to type to start this installation's `agentgrpo`."""
    script = Path(sys.executable).parent / "agentgrpo"
    on_path = shutil.which("agentgrpo")
    if not script.exists() or (on_path and Path(on_path).samefile(script)):
        return "agentgrpo"
    return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)


def _numbers(
    rollout: Metrics, learner: Metrics, agreement: float, time_left: str
) -> dict[str, str]:
    sampling_s = rollout["decode_s"] + rollout["idle_s"]
    return {
        "reward": f"{rollout['reward']:.3f}",
        **({"solved": f"{rollout['solved']:.0%}"} if "solved" in rollout else {}),
        "generation": _rate(rollout.get("total_sampled_tokens", 0.0), sampling_s),
        "learning": _rate(learner["packed_tokens"], learner["seconds"]),
        "engine idle": f"{rollout['idle_s'] / sampling_s:.0%}" if sampling_s else "-",
        "agreement": f"{agreement:.1e}",
        "left": time_left,
    }


def _rate(tokens: float, seconds: float) -> str:
    return f"{tokens / seconds:,.0f} tokens/s" if seconds else "-"


def _memory() -> str:
    """Resident memory of this process, and memory in use on the GPU."""
    lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
    resident = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    text = f"{resident / 2**20:.1f} GiB"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        text += f", GPU {(total - free) / 2**30:.1f} of {total / 2**30:.0f}"
    return text


def _solved(metrics: Metrics) -> str:
    return f"solved {metrics['solved']:.0%}  " if "solved" in metrics else ""

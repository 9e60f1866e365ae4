"""Progress says how far the run is, and in the end what it was for."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from agentgrpo.records.metrics import RunLog
from agentgrpo.train.interrupt import stop_after_step
from agentgrpo.train.progress import Progress


def silent() -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(12, Console(file=out, highlight=False, soft_wrap=True)), out


def lines_of(
    *evaluations: tuple[int, float], before: Mapping[int, float] = {}, told: str = "solved"
) -> str:
    """What a run of 12 steps says of its evaluations, after those of before it was resumed."""
    progress, out = silent()
    progress.remember(before)
    for step, value in evaluations:
        rest = {"rollouts": 64, "answered": 1, "tool_errors": 0, "infra_errors": 0}
        progress.evaluated(step, {told: value, **rest})
    progress.finished(Path("run"))
    return out.getvalue()


def test_evaluation_without_solved_prints_the_reward() -> None:
    said = lines_of((0, 0.5), (6, 0.5), told="reward")
    assert "held-out after 6 steps: reward 0.500 of 64 tasks (100% answered)" in said
    assert "held-out solved" not in said


def test_resumed_run_compares_with_its_first_evaluation(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write(0, eval={"solved": 0.25})
    log.write(0, rollout={"reward": 1.0})
    log.write(3, eval={"solved": 0.375})
    assert log.solved() == {0: 0.25, 3: 0.375}
    said = lines_of((12, 0.5), before=log.solved())
    assert "held-out solved: 0.250 after 0 steps, 0.500 after 12" in said


@pytest.mark.parametrize("where", ["in PATH", "below", "elsewhere"])
def test_last_line_is_a_working_command(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "agentgrpo").write_text("#!/bin/sh\n")
    (tools / "agentgrpo").chmod(0o755)
    (tmp_path / "other").mkdir()
    monkeypatch.setattr("sys.executable", str(tools / "python"))
    monkeypatch.setenv("PATH", str(tools) if where == "in PATH" else "/nosuch")
    monkeypatch.chdir(tmp_path / "other" if where == "elsewhere" else tmp_path)
    means = {
        "in PATH": "agentgrpo",
        "below": ".venv/bin/agentgrpo",
        "elsewhere": f"{tools}/agentgrpo",
    }
    assert f"look at it: {means[where]} view run" in lines_of()


STEP = (
    {
        "reward": 0.5, "solved": 0.25, "live_groups": 3, "groups": 4, "tool_calls": 1.5,
        "decode_s": 3.0, "idle_s": 1.0, "total_sampled_tokens": 800.0, "infra_errors": 0,
    },
    {"seconds": 2.0, "packed_tokens": 500.0, "sampler_gap_max": 2e-5},
    {"max_dlogp": 1e-5},
    {"playing_s": 4.2, "learning_s": 2.0, "total_s": 6.5},
)  # fmt: skip


def terminal(*, height: int = 40) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, height=height, highlight=False)
    return Progress(12, console), out


def test_live_lines_show_the_phase_and_the_last_step() -> None:
    progress, out = terminal()
    progress.watch("sandbox", lambda: "7 of 128 sessions")
    progress.begin_step()
    progress.step_done(0, *STEP)
    with progress.phase("playing 12 tasks x 8"):
        pass
    shown = Text.from_ansi(out.getvalue()).plain
    for number in (
        "step 1/12, playing 12 tasks x 8, 0 s",
        "reward 0.500",
        "solved 25%",
        "generation 200 tokens/s",
        "learning 250 tokens/s",
        "engine idle 25%",
        "agreement 2.0e-05",
        "sandbox 7 of 128 sessions",
    ):
        assert number in shown
    assert " GiB" in shown


def test_no_live_lines_without_a_terminal() -> None:
    progress, out = silent()
    progress.watch("sandbox", lambda: pytest.fail("nobody is shown this"))
    with progress.phase("playing 12 tasks x 8"):
        progress.print("a line")
    assert out.getvalue().split() == ["0s", "a", "line"]


def test_phases_and_the_rest_add_up_to_the_lap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each under its first word; nested time counts once; a phase that raises counts too."""
    now = 100.0
    monkeypatch.setattr("agentgrpo.train.progress.time", SimpleNamespace(monotonic=lambda: now))
    progress, _ = silent()
    now += 5
    with progress.phase("playing 12 tasks x 8"):
        now += 2
        with progress.phase("preflight: the largest pass"):
            now += 1
        now += 3
    assert progress.lap() == {"starting_s": 5, "playing_s": 5, "preflight_s": 1, "total_s": 11}
    now += 4
    with progress.phase("learning"):
        now += 2
        assert progress.lap() == {"other_s": 4, "learning_s": 2, "total_s": 6}
        now += 3
    with contextlib.suppress(OSError), progress.phase("saving"):
        now += 1
        raise OSError
    assert progress.lap() == {"learning_s": 3, "other_s": 0, "saving_s": 1, "total_s": 4}


class Interrupted(io.StringIO):
    """A terminal at which Ctrl-C is pressed in the middle of the first line."""

    pressed = False

    def write(self, text: str) -> int:
        if not self.pressed:
            self.pressed = True
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_signal_during_print_prints_each_line_once() -> None:
    terminal = Interrupted()
    progress = Progress(1, Console(file=terminal, soft_wrap=True))
    with stop_after_step(progress.print) as stopping:
        assert not stopping()
        progress.print("one")
        assert stopping()
    output, one = sorted(line.split("s  ")[1] for line in terminal.getvalue().splitlines())[::-1]
    assert output.startswith("stopping after this step, then saving;")
    assert one == "one"


def test_step_without_gradient_prints_a_hint() -> None:
    progress, out = silent()
    for step in range(3):
        progress.step_done(step, {**STEP[0], "live_groups": 0}, *STEP[1:])
    assert out.getvalue().count("no gradient: in each group") == 1, "once in a row of them"
    assert "docs/debug.md" in out.getvalue()


def test_step_without_valid_rollouts_prints_no_hint_about_tasks() -> None:
    for late, more in ((0.75, " (75% timed out)\n"), (0.0, "\n")):
        progress, out = silent()
        dead = {"live_groups": 0, "dead_broken": 4, "status_timed_out": late}
        progress.step_done(0, {**STEP[0], **dead}, *STEP[1:])
        assert f"no gradient: no group has two rollouts that count{more}" in out.getvalue()
        assert "rewards were equal" not in out.getvalue()
        assert "debug.md" not in out.getvalue()


def test_step_prints_the_longest_phase() -> None:
    progress, out = silent()
    progress.step_done(0, *STEP)
    assert "play 4s  learn 2s" in out.getvalue()
    assert "most of it was" not in out.getvalue()
    progress.step_done(1, *STEP[:-1], {"playing_s": 4.2, "scoring_s": 40.0, "total_s": 46.4})
    assert "most of it was scoring: 40 of 46 s" in out.getvalue()


def test_step_prints_the_number_of_lost_rollouts() -> None:
    progress, out = silent()
    progress.step_done(0, {**STEP[0], "infra_errors": 2}, *STEP[1:])
    said = "2 rollouts lost: this machine or your code failed, not the policy"
    assert said in out.getvalue()


WORKS = """
import sys, time
from agentgrpo.train.interrupt import stop_after_step
from agentgrpo.train.progress import Progress
progress = Progress(3)
with stop_after_step(progress.print) as stopping:
    progress.print("begun")
    with progress.phase("playing"):  # live lines
        while not stopping():
            time.sleep(0.01)
        for step in range(3):
            progress.print("a line for nobody")
    for stream in (sys.stdout, sys.stderr):
        print("a line of the user's code", file=stream, flush=True)
open(sys.argv[1], "w").write("saved")
"""


def test_run_whose_terminal_closes_saves_and_ends(tmp_path: Path) -> None:
    """The terminal of an ssh session: SIGHUP, and every line that is written fails from then on."""
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(sys.executable, [sys.executable, "-c", WORKS, str(tmp_path / "state")])
    said = b""
    while b"begun" not in said:
        said += os.read(terminal, 1000)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (tmp_path / "state").read_text() == "saved"


def test_sighup_is_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_after_step(lambda line: None) as stopping:
            signal.raise_signal(signal.SIGHUP)
            assert not stopping()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

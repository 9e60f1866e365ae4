"""User code that never comes back: said, ended at its limit, and by Ctrl-C twice, whatever hangs.

Processes of their own, as a terminal would have them; every deadline here is a hundred times what
is needed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.test_fault_table import line_of, write_user_module
from tests.warm import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PATIENCE_S = 200.0
NO_RETRIES = ["rollout.max_retries=0"]


class Run:
    """A command of tests/quick.py in a session of its own."""

    def __init__(self, folder: Path, model: Path, place: str, how: str, *overrides: str) -> None:
        config = str(write_user_module(folder, model))
        env = environment(FAULT=f"{place} {how}", PYTHONPATH=str(ROOT))
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.quick", "train", config, *NO_RETRIES, *overrides],
            cwd=folder, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def ended(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, err

    def wait_until_it_hangs(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not (self.folder / "hangs").exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*of: str) -> Run:
        runs.append(Run(tmp_path, tiny_model, *of))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.communicate()


@pytest.mark.parametrize(
    ("place", "how", "named"),
    [
        ("step", "hangs", "World.step"),
        ("async.step", "hangs", "Slow.step"),  # and keeps the loop
        ("reward", "hangs", "the reward reward"),
        ("parse", "hangs_on", "Agent.parse"),
    ],
)
def test_hanging_user_call_ends_the_run_with_its_name_and_line(
    start: Callable[..., Run], place: str, how: str, named: str
) -> None:
    status, err = start(place, how, "rollout.call_timeout_s=5.5").ended()
    where = rf"\(task '.*', rollout \d, at .*mine.py:{line_of(how)}\)"
    said = rf"{named} did not return within [\d.]+ s {where}"
    assert re.search(said, err), err
    assert status == 3
    assert re.search(rf"waiting for {named} \(task .*, at .*\).* for \d+ s\n", err), err


@pytest.mark.parametrize(
    ("place", "how"),
    [("parse", "hangs_on"), ("async.step", "hangs")],
)
def test_second_ctrl_c_ends_every_hanging_run(
    start: Callable[..., Run], place: str, how: str
) -> None:
    run = start(place, how)
    run.wait_until_it_hangs()
    run.interrupt()
    time.sleep(1.0)
    assert run.process.poll() is None, "the step is to be finished"
    run.interrupt()
    assert run.ended()[0] == -signal.SIGINT


FORKS = """
import multiprocessing, os, time
from agentgrpo.train.interrupt import interruptible, stop_after_step

with interruptible(), stop_after_step(print) as stopping:
    for step in range(2):  # its workers are ended by SIGTERM
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(abs, range(4))
    for number in range(50):  # ended before their first line
        child = os.fork()
        if not child:
            time.sleep(600)
        os.kill(child, 15)
        assert os.waitpid(child, 0)[1] == 15
    for number in range(2):  # no Pool, whose lock a worker may hold when Ctrl-C ends it
        multiprocessing.get_context("fork").Process(
            target=time.sleep, args=[600], daemon=True
        ).start()
    print("begun", stopping(), flush=True)
    while not stopping():
        time.sleep(0.1)
    print("saved", flush=True)
"""


def test_processes_forked_by_user_code_have_default_signal_handlers() -> None:
    """What ends them ends them, and asks nobody else to stop."""
    run = subprocess.Popen(
        [sys.executable, "-c", FORKS], env=environment(PYTHONPATH=str(ROOT)), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stdout.readline() == "begun False\n"
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, "saved" in out) == (0, True), (out, err)

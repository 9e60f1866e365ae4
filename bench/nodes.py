"""Kill one of two simulated machines at five moments of a run: `python -m bench.nodes`.

Needs root, iproute2 and util-linux. Each machine is a network namespace with a veth interface and
its own UTS, PID and mount namespaces, in which the other's folder is hidden. After each kill the
same torchrun command starts again and must continue the run. One row per kill: seconds until the
other machine's command has ended. `--processes=2`: two ranks per machine that share one engine.
`--no-rows`: print only.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from agentgrpo.inspect.verify import verify
from agentgrpo.support.atomic_files import read_lines
from bench.harness import append_row
from tests import tiny
from tests.end_to_end.test_run import write_config

SETTINGS = [
    "out_dir=run", "engine.weights=copy", "learner.max_tokens=256", "eval_every=0",
    "rollout.tasks_per_step=4", "teacher.weight=0", "learner.decay=constant", "save_every=1",
]  # fmt: skip
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PATIENCE_S = 600


def steps_in(run: Path, name: str) -> int:
    """Steps that metrics.jsonl or rollouts.jsonl has."""
    path = run / name
    rows = read_lines(path) if path.exists() else []
    return len({r["step"] for r in rows if "learner/loss" in r or r.get("split") == "train"})


def before_the_engine(run: Path, log: str, steps: int) -> bool:
    return "model: " in log


def during_rollouts(run: Path, log: str, steps: int) -> bool:
    return "learner:" in log


def during_the_update(run: Path, log: str, steps: int) -> bool:
    return steps_in(run, "rollouts.jsonl") > steps_in(run, "metrics.jsonl") >= steps


def during_the_checkpoint(run: Path, log: str, steps: int) -> bool:
    return any(run.glob("checkpoints/.partial-*")) and steps_in(run, "metrics.jsonl") > steps


def between_steps(run: Path, log: str, steps: int) -> bool:
    return steps_in(run, "metrics.jsonl") > steps and not any(run.glob("checkpoints/.partial-*"))


MOMENTS: list[tuple[str, Callable[[Path, str, int], bool], int, bool]] = [
    ("before the engine", before_the_engine, 1, False),
    ("during rollouts", during_rollouts, 0, False),
    ("during the update", during_the_update, 1, True),
    ("during the checkpoint", during_the_checkpoint, 0, False),
    ("between two steps", between_steps, 1, False),
]
"""When, how it is recognised, which machine dies, and whether its network goes first."""


def sh(*command: str) -> None:
    subprocess.run(command, check=True)


class Machines:
    """Two machines and their folders."""

    def __init__(self, base: Path, processes: int) -> None:
        self.homes, self.processes = [base / "node0", base / "node1"], processes
        self.config = write_config(base, tiny.make_agent_dir(base / "model"))
        for home in self.homes:
            home.mkdir()
        self.hosts = base / "hosts"
        lines = (f"{address} machine{i}\n" for i, address in enumerate(ADDRESSES))
        self.hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))

    def start(self, steps: int) -> list[subprocess.Popen[bytes]]:
        """Boot both and start the command on each; output goes to HOME.log."""
        self.remove()
        sh("ip", "link", "add", "an0", "type", "veth", "peer", "name", "an1")
        agents = []
        for i, home in enumerate(self.homes):
            name, address = f"agentgrpo{i}", ADDRESSES[i]
            sh("ip", "netns", "add", name)
            sh("ip", "link", "set", f"an{i}", "netns", name)
            for line in (
                f"addr add {address}/24 dev an{i}",
                f"link set an{i} up",
                "link set lo up",
            ):
                sh("ip", "-n", name, *line.split())
            torchrun = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                f"--nproc_per_node={self.processes}", "--rdzv-backend=c10d", "--rdzv-id=nodes",
                f"--rdzv-endpoint={ADDRESSES[0]}:29500", f"--local-addr={address}", "-m",
                "agentgrpo.train", str(self.config), *SETTINGS, f"steps={steps}",
                f"engine.tensor_parallel_size={self.processes}",
            ]  # fmt: skip
            boot = (
                f"hostname machine{i}; mount --bind {self.hosts} /etc/hosts; "
                f"mount -t tmpfs none {self.homes[1 - i]}; "
                'mount -t tmpfs none /dev/shm; exec "$@"'
            )
            agents.append(
                subprocess.Popen(
                    [
                        *("ip", "netns", "exec", name, "unshare", "--uts", "--ipc", "--mount"),
                        *("--pid", "--fork", "--kill-child", "--mount-proc"),
                        *("sh", "-c", boot, "sh", *torchrun),
                    ],
                    cwd=home,
                    env=os.environ | {"GLOO_SOCKET_IFNAME": f"an{i}", "OMP_NUM_THREADS": "1"},
                    stdout=home.with_suffix(".log").open("wb"),
                    stderr=subprocess.STDOUT,
                )
            )
        return agents

    def remove(self) -> None:
        for i in range(2):
            subprocess.run(["ip", "netns", "del", f"agentgrpo{i}"], capture_output=True)

    def log(self, i: int) -> str:
        return self.homes[i].with_suffix(".log").read_text(errors="replace")


def wait(condition: Callable[[], bool], what: str) -> float:
    """Seconds until the condition is true."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > PATIENCE_S:
            raise SystemExit(f"{what}: not after {PATIENCE_S} s")
        time.sleep(0.03)
    return time.monotonic() - begin


def kill(
    machines: Machines, name: str, reached: Callable[[Path, str, int], bool], dies: int, cut: bool
) -> float:
    """Start the command, kill one machine at the moment; seconds until the other has ended."""
    run = machines.homes[0] / "run"
    steps = steps_in(run, "metrics.jsonl")
    agents, other = machines.start(steps + 50), 1 - dies
    wait(
        lambda: reached(run, machines.log(0), steps) or agents[0].poll() is not None,
        f"{name}: the moment",
    )
    if agents[0].poll() is not None:
        raise SystemExit(f"{name}: ended before it\n{machines.log(0)}")
    if cut:
        sh("ip", "-n", f"agentgrpo{dies}", "link", "set", f"an{dies}", "down")
    agents[dies].send_signal(signal.SIGKILL)
    seconds = wait(lambda: agents[other].poll() is not None, f"{name}: the end of the other")
    lines = re.findall(r"^error: .*", machines.log(other), re.MULTILINE)
    print(f"{name}: machine {dies} died; the other: status {agents[other].returncode}, "
          f"{seconds:.1f} s, {lines}", flush=True)  # fmt: skip
    agents[dies].wait()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--no-rows", action="store_true")
    parser.add_argument("--moments", nargs="*", type=int, default=range(len(MOMENTS)))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        machines = Machines(Path(folder), args.processes)
        try:
            seconds = {MOMENTS[i][0]: kill(machines, *MOMENTS[i]) for i in args.moments}
            run = machines.homes[0] / "run"
            steps = steps_in(run, "metrics.jsonl") + 1
            agents = machines.start(steps)
            statuses = [agent.wait(PATIENCE_S) for agent in agents]
            print(f"whole run: statuses {statuses}, {steps_in(run, 'metrics.jsonl')} of {steps} "
                  f"steps, faults: {verify.verify_run(run).faults}")  # fmt: skip
            if any(statuses):
                raise SystemExit(machines.log(0)[-3000:] + machines.log(1)[-3000:])
        finally:
            machines.remove()
    shape = {"machines": 2, "processes": args.processes}
    for name, taken in seconds.items():
        if not args.no_rows:
            append_row("nodes", name, [taken], unit="s", shape=shape)


if __name__ == "__main__":
    main()

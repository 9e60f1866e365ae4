"""The configs for real models: strictly read, staged, planned, and their memory is what they say.

None of them was trained: there was no card. The models' weights are not needed for any of this,
only their shapes and a chat template.
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
    """The model's size, of the settings of a row."""
    return settings.split()[0].rpartition("-")[2].lower()


def test_every_size_has_its_cards() -> None:
    for name in NAMES:
        sizes = [size_of(what) for of, *_, what in CARDS if of == name]
        assert {*sizes} == {*qwen3.SIZES}
        assert min(map(sizes.count, sizes)) >= 3, "a plan for at least three cards"
        assert str(load_config(name).out_dir) == f"runs/{name}"


@pytest.mark.parametrize(("name", "card", "need", "overrides"), CARDS)
def test_the_memory_it_names_is_what_it_takes(
    name: str, card: int, need: float, overrides: str
) -> None:
    shapes = shapes_of(qwen3.config(size_of(overrides)))
    held = footprint(load_config(name, overrides.split()), shapes, cuda=True)
    assert round(held.peak / GIB, 1) == need
    assert need <= ALLOCATORS * card


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for each size: its real config.json, the tests' tokenizer, no weights."""
    folders = {}
    for size in qwen3.SIZES:
        folders[size] = tmp_path_factory.mktemp(size)
        tiny.make_tokenizer().save_pretrained(folders[size])
        qwen3.config(size).save_pretrained(folders[size])
    return folders


@pytest.mark.nsjail
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", qwen3.SIZES)
def test_its_stage_is_set_and_its_plan_made(
    name: str,
    size: str,
    model_of: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine with the second smallest card of the README's table."""
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
        said = format_plan(config, stage, playing_lines(config, stage, stage.heldout), trained=True)
        monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: (int(need * 1.01 * GIB),) * 2)
        small = format_plan(
            config, stage, playing_lines(config, stage, stage.heldout), trained=True
        )
    finally:
        stage.close()
    assert f"{card} GiB NVIDIA GPU" in said
    assert "never run on a GPU: torch 2.13.0+cpu instead of 2.11.0" in said
    assert f"{qwen3.PARAMETERS[size]:,} parameters" in said
    assert f"= {need} GiB, with the KV cache" in said
    assert "WARNING    memory" not in said
    assert re.search(
        r"WARNING +memory: .* are needed, more than 80% of the GPU's \d+ GiB; remedy: fewer", small
    )


@pytest.mark.nsjail
def test_harbor_folders_are_planned_with_the_settings_for_4b_and_8b(
    model_of: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the command of docs/environments.md, the settings of the card, and without weights."""
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

"""Everything a user gets wrong that a command can know at once: what is said, and the exit status.

A table: the case, the command, what it says. Each is refused in one line that names the file or the
key, with status 2, before a model is loaded; nothing is written and no hub is asked. What user code
does wrong while a run is on is in test_faults.py.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentgrpo import cli
from agentgrpo.records import checkpoint
from agentgrpo.support.atomic_files import write_json, write_lines
from tests import tiny
from tests.warm import ROOT

pytestmark = [pytest.mark.nsjail, pytest.mark.slow]

ROWS = [{"question": f"{a}+{b}", "answer": str(a + b)} for a in range(1, 5) for b in range(1, 5)]
LEVELS = [{"question": f"{a}+9", "answer": str(a + 9), "level": a} for a in range(1, 5)]
TALKS = [
    {"messages": [{"role": "user", "content": row["question"]},
                  {"role": "assistant", "content": f"Answer: {row['answer']}"}]}
    for row in ROWS
]  # fmt: skip


SYSTEM = "{% if m['role'] != 'system' %}{{ m['content'] }}{% else %}{SHOWN}{% endif %}"
TEMPLATES = {
    "no_template": None,
    "no_tools": tiny.CHATML.replace("{% if tools %}", "{% if false %}"),
    "no_system": tiny.CHATML.replace("{{ m['content'] }}", SYSTEM.replace("{SHOWN}", "")),
    "short_system": tiny.CHATML.replace(
        "{{ m['content'] }}", SYSTEM.replace("{SHOWN}", "{{ m['content'][:9] }}")
    ),
}
"""Chat templates that lack something, by the folder of their model."""


class Asked(Exception):
    """A hub was asked."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with all that works: configs, a model, an adapter, data, a checkpoint.

    It is the working directory. The hub may be asked, as by a user, and that is an error here.
    """
    folder = tmp_path_factory.mktemp("wrong")
    model = tiny.make_model_dir(folder / "model")
    shutil.copytree(model, folder / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    write_lines(folder / "rows.jsonl", ROWS)
    write_lines(folder / "talks.jsonl", TALKS)
    write_lines(folder / "levels.jsonl", LEVELS)
    write_lines(folder / "others.jsonl", [{"prompt": "1+1", "target": "2"}])
    (folder / "empty.jsonl").write_text("\n")
    (folder / "newcomers_tools.py").write_text('def add(a: int) -> int:\n    """Add 1."""\n')
    for name, template in TEMPLATES.items():
        tiny.make_tokenizer(template).save_pretrained(tiny.make_model_dir(folder / name))
        if template is None:
            (folder / name / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "c.toml").write_text(
        f'model = "{model}"\nout_dir = "{folder / "run"}"\n[data]\ntrain = "rows.jsonl"\n'
        "num_heldout = 4\n[engine]\nkv_cache_gib = 0.0625\n"
    )
    (folder / "recipe.toml").write_text(
        'extends = "c.toml"\n[data]\nheldout = "rows.jsonl"\n[sft]\ndata = "talks.jsonl"\n'
        "[curriculum]\nstages = 2\n[flywheel]\nconcurrency = 2\ntasks = 8\n"
    )

    def write(saved: Path) -> None:
        import torch

        shutil.copytree(model, saved, dirs_exist_ok=True)
        torch.save({"tasks": {}, "log_offsets": {}, "step": 3}, saved / checkpoint.STATE)

    (folder / "unmade.toml").write_text('extends = "c.toml"\n[sft]\nepochs = 1\n')
    (folder / "saved").mkdir()
    checkpoint.save(folder / "saved", 3, write, keep=1)
    with contextlib.chdir(folder):
        yield folder


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a name of another machine is an error."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def asked(host: Any, *_: object, **__: object) -> Any:
        raise Asked(f"a hub was asked: {host!r}")

    monkeypatch.setattr(socket, "getaddrinfo", asked)


Said = Callable[..., tuple[int, str]]


@pytest.fixture
def said(place: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs `agentgrpo` with these words; its status and what it said on stderr."""

    def run(line: str) -> tuple[int, str]:
        before = sorted(p for p in place.rglob("*") if "__pycache__" not in p.parts)
        status = cli.main(line.format(here=place).split(" "))
        assert sorted(p for p in place.rglob("*") if "__pycache__" not in p.parts) == before
        return status, capsys.readouterr().err

    return run


ALL = ("train c.toml", "sft recipe.toml", "flywheel recipe.toml", "curriculum recipe.toml",
       "recipe recipe.toml curriculum.start=sft", "evaluate recipe.toml")  # fmt: skip
"""What reads a config; all do the same before anything is loaded."""


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ('command=["no-such-program"]', "agent.options.command: program 'no-such-pr"),
        ("call=json:dumps", "agent.options.call: expected an async def function, got 'json:dumps'"),
        ("call=json:nosuch", "agent.options.call: "),
    ],
)
def test_dry_run_finds_programs_that_cannot_start(said: Said, option: str, wanted: str) -> None:
    sandbox = " agent.options.sandbox=none" if "command" in option else ""
    line = f"train c.toml agent.kind=program agent.options.{option}{sandbox} --dry-run"
    status, told = said(line)
    assert status == 2
    assert told.startswith(f"error: {wanted}"), told


@pytest.mark.parametrize("command", ALL)
def test_dry_run_of_every_command_writes_nothing(
    place: Path, command: str, capsys: pytest.CaptureFixture[str], said: Said
) -> None:
    status = cli.main([*command.split(), "--dry-run"])
    output = capsys.readouterr()
    assert (status, output.err) == (0, ""), output.err
    assert "dry run, nothing was " in output.out
    assert not (place / "run").exists()


def test_unused_options_of_extended_configs_are_no_errors(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "rollout.template_options.enable_thinking=false data.heldout=levels.jsonl"
    assert cli.main([*f'train c.toml {own} data.columns=["level"] --dry-run'.split()]) == 0
    output = capsys.readouterr().out
    assert "the model's chat template does not read ['enable_thinking']" in output


PATHS = {
    "train {c} --dry-run model=./nosuch": "model './nosuch': no such file",
    "train {c} --dry-run model={here}/model/config.json": "config.json': a file, expected a dir",
    "train {c} --dry-run model={here}": "the directory holds no config.json",
    "train {c} --dry-run model=some/--model": "its tokenizer cannot be read: Repo id",
    "train {c} --dry-run model=nobody/has-this-model": "its tokenizer cannot be read",
    "train {c} --dry-run model=package:nosuchpackage": "'nosuchpackage' is not installed; try: ",
    "train {c} --dry-run model=bare": "'bare'",
    "train ./nosuch.toml": "config './nosuch.toml' is neither a file nor",
    "train {here}": "{here}: is a directory",
    "train {c} --dry-run data.train=./nosuch.jsonl": "data.train: nosuch.jsonl: no such file",
    "train {c} --dry-run sandbox.tools=nosuch.py": "sandbox.tools: nosuch.py: no such file",
    "train {c} --dry-run sandbox.template=nosuch": "sandbox.template: ",
    "train {c} --dry-run out_dir={here}/rows.jsonl/run": "rows.jsonl: not a directory",
    "train {c} --dry-run out_dir=/proc/x": "out_dir '/proc/x': cannot make a folder in /proc: no ",
    "train {c} out_dir=/proc/x": "out_dir '/proc/x': cannot make a folder in /proc: no ",
    "sft {r} --dry-run model=./nosuch sft.data=./nosuch.jsonl": "sft.data: nosuch.jsonl: no such",
    "sft unmade.toml --dry-run": "sft.jsonl: no such file or directory"
    "; `agentgrpo flywheel CONFIG` writes it, or set sft.data=FILE",
    "init model rows.jsonl -o no/c.toml": "--output no/c.toml: expected a file in an existing",
    "evaluate {r} --dry-run --report x --compare nosuch.json": "nosuch.json: no such file",
    "curriculum {r} --dry-run curriculum.start=sft": "stage 0: expected a checkpoint in",
    "verify {here}/nosuch": "nosuch",
    "view {here}/nosuch": "nosuch",
}  # fmt: skip


@pytest.mark.parametrize("line", PATHS)
def test_missing_path_is_reported_as_a_path(place: Path, said: Said, line: str) -> None:
    given = line.replace("{c}", "c.toml").replace("{r}", "recipe.toml")
    status, told = said(given)
    assert status in (1, 2), told
    assert told.startswith("error: "), told
    assert PATHS[line].format(here=place) in told
    assert told.count("\n") == 1, told
    assert "[Errno" not in told


def gone(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def latin(path: Path) -> None:
    path.write_bytes(b'{"a": "\xe9"}\n')


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


FILES = {
    "c.toml": ("train wrong/c.toml --dry-run", "c.toml"),
    "rows.jsonl": ("train c.toml --dry-run data.train=wrong/rows.jsonl", "rows.jsonl"),
    "rows.parquet": ("train c.toml --dry-run data.train=wrong/rows.parquet", "rows.parquet"),
    "talks.jsonl": ("sft recipe.toml --dry-run sft.data=wrong/talks.jsonl", "talks.jsonl"),
    "tools.py": ("train c.toml --dry-run sandbox.tools=wrong/tools.py", "tools.py"),
    "model/config.json": ("train c.toml --dry-run model=wrong/model", "wrong/model"),
    "model/generation_config.json": (
        "train c.toml --dry-run model=wrong/model", "generation_config.json",
    ),
    "model/tokenizer.json": ("train c.toml --dry-run model=wrong/model", "wrong/model"),
    "model/tokenizer_config.json": ("train c.toml --dry-run model=wrong/model", "wrong/model"),
    "model/chat_template.jinja": ("train c.toml --dry-run model=wrong/model", "wrong/model"),
    "model/model.safetensors": ("train c.toml --dry-run model=wrong/model", "wrong/model"),
    "adapter/adapter_config.json": (
        "evaluate recipe.toml --dry-run model=wrong/adapter", "adapter",
    ),
    "report.json": (
        "evaluate recipe.toml --dry-run --report x --compare wrong/report.json", "report.json",
    ),
    "run/run.json": ("train c.toml --dry-run out_dir=wrong/run", "run.json"),
    "settings/recipe.json": (
        "recipe recipe.toml --dry-run curriculum.start=sft out_dir=wrong", "settings/recipe.json",
    ),
}  # fmt: skip
"""File: a command that reads it, and the name that it must say."""
HARMLESS = {
    ("model/tokenizer_config.json", "gone"), ("model/generation_config.json", "gone"),
    ("tools.py", "empty"), ("tools.py", "cut"),
}  # fmt: skip


@pytest.fixture
def wrong(place: Path) -> Iterator[Path]:
    """A folder of files, each to be spoilt."""
    made = place / "wrong"
    made.mkdir()
    for name in ("c.toml", "rows.jsonl", "talks.jsonl"):
        shutil.copy(place / name, made)
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist(ROWS), made / "rows.parquet")
    (made / "tools.py").write_text("def f():\n    return 1\n\n\ndef g():\n    return 2\n")
    shutil.copytree(place / "model", made / "model")
    (made / "adapter").mkdir()
    adapter = {"base_model_name_or_path": str(place / "model"), "r": 8, "lora_alpha": 16}
    write_json(made / "adapter" / "adapter_config.json", adapter)
    shutil.copy(place / "model" / "model.safetensors", made / "adapter/adapter_model.safetensors")
    write_json(made / "report.json", {"measures": {}})
    (made / "run").mkdir()
    write_json(made / "run" / "run.json", {"config": {}})
    (made / "run" / "metrics.jsonl").write_text("{}\n")
    (made / "settings").mkdir()
    write_json(made / "settings" / "recipe.json", {"seed": 0})
    write_json(made / "recipe.json", {})  # a part of it has ended
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("spoil", [gone, folder, empty, latin, cut])
@pytest.mark.parametrize("name", FILES)
def test_unreadable_file_is_named(
    wrong: Path, said: Said, name: str, spoil: Callable[[Path], None]
) -> None:
    if (name, spoil.__name__) in HARMLESS:
        return
    line, names = FILES[name]
    spoil(wrong / name)
    status, told = said(line)
    assert status == 2, (status, told)
    assert told.startswith("error: "), told
    assert names in told
    assert "[Errno" not in told


NEWCOMERS = {
    "train c.toml engine.max_model_len=128": "engine.max_model_len: expected more than the",
    "train c.toml rollout.groupsize=3": "unknown config key",
    "train c.toml reward.kind=nosuchmodule:f": "reward.kind: no module",
    "train c.toml data.train=empty.jsonl": "no rows",
    "train c.toml data.train=others.jsonl": "no column",
    "train c.toml model=no_template": "has no chat template",
    "train c.toml model=no_system": "does not render the system message",
    "train c.toml model=short_system": "does not render the system message",
    "train c.toml model=no_tools agent.kind=tools env.kind=tools "
    'env.options.tools=["newcomers_tools:add"]': "does not render tools",
}
"""Commands whose message is in docs/debug.md."""


@pytest.mark.parametrize("line", NEWCOMERS)
def test_error_of_a_newcomer_is_on_the_debug_page(
    place: Path, said: Said, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(place)
    status, told = said(f"{line} --dry-run")
    assert status == 2, told
    assert NEWCOMERS[line] in told
    assert NEWCOMERS[line] in (ROOT / "docs/debug.md").read_text()


LORA = "learner.lora.rank=4 learner.lora.target_modules="
LATE = {
    f'train c.toml {LORA}["nope"]': "learner.lora.target_modules: no linear layer has this name: "
    "'nope'; linear layers of this model: down_proj, gate_proj, k_proj",
    f'sft recipe.toml {LORA}["q_proj",".*attn.*"]': "no linear layer has this name: '.*attn.*'",
    f'train c.toml {LORA}["lm_head"]': "the head cannot have an adapter: 'lm_head'",
    "train c.toml engine.kv_cache_gib=0.0005": "engine.kv_cache_gib: engine.max_model_len = 1024 "
    "tokens need 0.000977 GiB, got 0.0005; remedy: engine.kv_cache_gib=0.01, or "
    "a lower engine.max_model_len",
    "evaluate recipe.toml engine.kv_cache_gib=0.0009": "remedy: engine.kv_cache_gib=0.01",
    "train c.toml engine.async_scheduling=true": "engine.async_scheduling: expected false on cpu",
    "train c.toml data.train=nosuch.jsonl": "nosuch.jsonl: no such file or directory in {here}",
    "train c.toml sandbox.tools=nosuch.py": "nosuch.py: no such file or directory in {here}",
    "train c.toml model=some/nosuch/model": "no such file or directory in {here}",
    'train c.toml agent.kind=program agent.options.command=["python","p.py"] '
    'agent.options.files=["p.py"]': "p.py: no such file or directory in {here}",
    'train c.toml agent.kind=program agent.options.command=["python","p.py"] '
    'agent.options.files=["/x/p.py"]': "files: /x/p.py: no such file or directory\n",
    'train c.toml agent.kind=program agent.options.call=a:b agent.options.command=["x"]': "exp"
    "ected either command or call, got ['x'] and 'a:b'. If an extended config sets a command, set "
    "command = [] and files = []",
    'train c.toml data.heldout=levels.jsonl data.columns=["level","levl"]': "no row has ['levl']",
    "train c.toml rollout.max_calls_of.pyton=3": "expected tools (bash, node, python), got 'pyton'",
}


@pytest.mark.parametrize("line", LATE)
def test_dry_run_finds_errors_of_vllm_and_the_learner(place: Path, said: Said, line: str) -> None:
    status, told = said(f"{line} --dry-run")
    assert (status, told.count("\n")) == (2, 1), told
    assert LATE[line].format(here=place) in told


def test_sft_needs_no_engine(place: Path, said: Said) -> None:
    text = (place / "recipe.toml").read_text() + "[engine]\nkv_cache_gib = 0.0005\n"
    (place / "small.toml").write_text(text)
    assert said("sft small.toml --dry-run") == (0, "")


UNREAD = {
    "sft recipe.toml steps=3": "steps: `agentgrpo sft` does not use it; used by `train`",
    "sft recipe.toml rollout.group_size=4": "rollout.group_size: `agentgrpo sft` does not use it",
    "evaluate recipe.toml learner.learning_rate=1e-3": "does not use it; used by `train`, `sft`, ",
    "evaluate recipe.toml evaluation.temperature=0.5": "does not use it, but measures.temperature",
    "flywheel recipe.toml loss={{beta=0.1}}": "loss.beta: `agentgrpo flywheel` does not use it",
    "recipe recipe.toml steps=3": "steps: `agentgrpo recipe` does not use it",
    "train c.toml sft.epochs=1": "[sft] is a section of a recipe",
}


@pytest.mark.parametrize("line", UNREAD)
def test_setting_that_the_command_does_not_use_is_an_error(
    place: Path, said: Said, line: str
) -> None:
    status, told = said(f"{line} --dry-run")
    assert status == 2
    assert UNREAD[line] in told


def test_recipe_passes_its_settings_to_all_parts(place: Path) -> None:
    parts = ["sft", "recipe.toml", "measures.quality=exact", "--of-recipe", "--dry-run"]
    assert cli.main(parts) == 0


UNSCORED = [
    ("train reward.kind=numeric", "blue", "no number in the answer 'blue'"),
    *(("train reward.kind=numeric", answer, f"more than a number in the answer {answer!r}")
      for answer in ('{"truth": "5", "level": 3}', "[1, 2]", r"2\sqrt{3}", r"\boxed{2\pi}")),
    ("train reward.kind=math", "$$", "the answer '$$' is empty"),
    ("train reward.kind=text", " ", "the answer ' ' is empty"),
    ("train reward.kind=text", ["x", None], "or a list of these, got None"),
    ("heldout reward.kind=text", [], "must hold an answer (text, a number, true or false, or a"),
    *(
        (f"{asked} reward.kind=none measures.quality=f1", None,
         "measures.quality = 'f1': task odd.jsonl:6: spec['answer'] must hold an answer")
        for asked in ("evaluate", "flywheel", "recipe")
    ),
    ("evaluate reward.kind=none measures.quality=f1", ["x", ""], "answer ['x', ''] is empty"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "answer", "wanted"), UNSCORED)
def test_unscorable_task_is_found_before_the_run(
    place: Path, said: Said, asked: str, answer: Any, wanted: str
) -> None:
    command, *settings = asked.split()
    write_lines(place / "odd.jsonl", [*ROWS[:5], {"question": "odd", "answer": answer}])
    key = "data.heldout" if command in ("evaluate", "heldout") else "data.train"
    config = "c.toml" if command in ("train", "heldout") else "recipe.toml"
    more = {"recipe": ["curriculum.start=sft"], "flywheel": ["flywheel.tasks=6"]}.get(command, [])
    line = ["train" if command == "heldout" else command, config, f"{key}=odd.jsonl", *settings]
    kept = "data.heldout=rows.jsonl" if key == "data.train" else "data.train=rows.jsonl"
    status, told = said(" ".join([*line, kept, "data.num_heldout=6", *more, "--dry-run"]))
    assert (status, told.count("\n")) == (2, 1), told
    assert "odd.jsonl:6: " in told
    assert wanted in told


ABSURD = {
    "train c.toml engine.kv_cache_gib=900000": "are needed to start it",
    "train c.toml engine.max_model_len=100000 learner.max_tokens=100000": "must be at most 1024",
    "train c.toml learner.trained_layers=3": "learner.trained_layers must be at most 2, got 3",
    "train c.toml engine.tensor_parallel_size=64": "Start with torchrun",
    "train c.toml learner.lora.rank=256": "learner.lora.rank must be at most 64",
    "train c.toml data.num_heldout=5000000": "data.num_heldout: expected below ",
    "flywheel recipe.toml flywheel.tasks=500": "different task ids in the data, 16, got 500",
}


@pytest.mark.parametrize("line", ABSURD)
def test_impossible_sizes_are_errors(said: Said, line: str) -> None:
    status, told = said(f"{line} --dry-run")
    assert status == 2
    assert ABSURD[line] in told

"""Subcommands map to their modules, and their help is complete."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentgrpo import cli
from agentgrpo.config.read import load_config, shipped_configs
from agentgrpo.inspect import machine_doctor
from agentgrpo.sandbox import doctor as sandbox_doctor
from agentgrpo.support import packages
from agentgrpo.support.checks import Check
from agentgrpo.train import init
from agentgrpo.train.resolve import resolve
from tests import tiny


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["-h"], []):
        assert cli.main(arguments) == 0
        output = capsys.readouterr().out
        assert "usage: agentgrpo COMMAND" in output
        for word in ("init", "train", "evaluate", "view", "sandbox", "doctor"):
            assert f"\n  {word}" in output
        assert max(map(len, output.splitlines())) <= 100


@pytest.mark.parametrize("word", sorted(cli.COMMANDS))
def test_every_command_has_main_and_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(cli.COMMANDS[word][0])
    assert callable(module.main)
    with pytest.raises(SystemExit) as ended:
        cli.main([word, "--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith("usage: ")


def test_train_help_lists_every_shipped_config(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    output = capsys.readouterr().out
    for name in shipped_configs():
        line = next(line for line in output.splitlines() if line.split()[:1] == [name])
        assert 30 < len(line) < 130, (
            f"{name}: expected a description in the first line of the config"
        )


def test_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    output = "error: unknown command 'trian'; did you mean train?"
    assert capsys.readouterr().err.startswith(output)
    command = [sys.executable, "-m", "agentgrpo.cli", "trian"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr.startswith(output)) == (2, True)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rows.jsonl"
    rows = [f'{{"q": "{row["question"]}", "a": "{row["answer"]}"}}\n' for row in tiny.sums(20)]
    path.write_text("".join(rows))
    return path


def test_init_writes_a_commented_config(data: Path, tmp_path: Path) -> None:
    columns = ["--question", "q", "--answer", "a"]
    assert init.main(["some/model", "rows.jsonl", *columns, "-o", "my.toml", "steps=7"]) == 0
    text = (tmp_path / "my.toml").read_text()
    config = load_config(tmp_path / "my.toml")
    assert (config.model, config.steps, str(config.out_dir)) == ("some/model", 7, "runs/my")
    assert config.data.train == str(data)
    assert (config.data.heldout, config.data.num_heldout) == ("split", 4)
    assert (config.data.question, config.data.answer) == ("q", "a")
    assert "agentgrpo train my.toml --dry-run" in text
    assert "# group_size = 8" in text
    assert "# Rollouts per task, at least 2" in text


def test_init_omits_settings_that_the_agent_does_not_read(data: Path) -> None:
    options = 'agent.options={command=["python", "a.py"]}'
    columns = ["--question", "q", "--answer", "a"]
    assert init.main(["m/m", "rows.jsonl", *columns, "agent.kind=program", options]) == 0
    resolve(load_config("train.toml"))


@pytest.mark.parametrize(
    ("question", "answer", "kind"),
    [
        ("What is 1+1?", "2", "auto"),
        ("Which?\nA) red\nB) blue", "B", "choice"),
        ("What is x?", r"\frac{\pi}{2}", "math"),
        ("Who?", "Ada Lovelace", "text"),
    ],
)
def test_init_chooses_a_reward_for_the_answers(
    data: Path, question: str, answer: str, kind: str
) -> None:
    data.write_text((json.dumps({"question": question, "answer": answer}) + "\n") * 3)
    assert init.main(["m/m", "rows.jsonl"]) == 0
    assert load_config("train.toml").reward.kind == kind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m/m", "nosuch.jsonl"], "nosuch.jsonl"),
        (["m/m", "rows.jsonl"], "no column 'question'; the row has ['a', 'q']"),
        (["rows.jsonl", "rows.jsonl"], "a file, expected a directory"),
        (["m/m", "rows.jsonl", "--question", "q", "--answer", "a", "-o", "taken.toml"], "exists"),
        (
            ["m/m", "rows.jsonl", "--question", "q", "--answer", "a", "stepps=3"],
            "did you mean step",
        ),
    ],
)
def test_init_error_is_one_line(
    data: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    Path("taken.toml").write_text("")
    assert init.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not Path("train.toml").exists()


class Judge:
    judges = True


class Mute:
    judges = False


@pytest.mark.parametrize(
    ("overrides", "required"),
    [
        ("", True),
        ("reward.kind=none", False),
        ("reward.kind=my:fn", False),
        ("env.kind=unit_tests", False),
        ("env.kind=unit_tests reward.kind=text", True),
        (f"env.kind={__name__}:Judge", False),
        (f"env.kind={__name__}:Mute", True),
        ("env.kind=not_written:Yet", False),
        ("agent.kind=not_written:Yet", False),
    ],
)
def test_init_requires_answers_only_if_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: str, required: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"question": "a", "tests": "t"}\n' * 2)
    assert init.main(["m/m", "rows.jsonl", *overrides.split()]) == (2 if required else 0)


def test_doctor_exits_with_1_if_an_essential_item_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sandbox_doctor, "report", lambda: ("isolated", True))
    assert machine_doctor.main([]) == 0
    assert "\nThis machine can train." in capsys.readouterr().out
    broken = Check("torch", False, "not installed", "install it", essential=True)
    monkeypatch.setattr(packages, "package_checks", lambda *_, **__: [broken])
    assert machine_doctor.main([]) == 1
    output = capsys.readouterr().out
    assert "MISS torch            not installed\n     remedy           install it" in output
    assert output.endswith("This machine cannot train. Fix first: torch.\n")
    monkeypatch.setattr(sandbox_doctor, "report", lambda: ("bare", False))
    assert machine_doctor.main([]) == 1
    assert "Fix first: torch, a way to isolate code." in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "."]])
def test_closed_pipe_is_not_an_error(arguments: list[str], tmp_path: Path) -> None:
    """`agentgrpo --help | head -0`."""
    (tmp_path / "run.json").write_text("{}")
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "agentgrpo", *arguments], stdout=writer, stderr=subprocess.PIPE,
        check=False, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_verify_sets_the_environment_before_torch_is_imported() -> None:
    code = "import os, agentgrpo.inspect.verify.verify, torch; print(os.environ['OMP_WAIT_POLICY'])"
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    ran = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == ("PASSIVE\n", "")


def test_doctor_help_mentions_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    assert "usage: agentgrpo doctor [-h] [RUN]" in capsys.readouterr().out


def test_ctrl_c_during_import_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert cli.main(["train", "quickstart"]) == 130
    assert capsys.readouterr().err == "interrupted\n"

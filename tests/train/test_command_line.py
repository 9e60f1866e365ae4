"""How every command that reads a config ends: its status, and what it says of the next time."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from agentgrpo import cli
from agentgrpo.actions import InfrastructureError
from agentgrpo.engine.agreement import Disagreement
from agentgrpo.recipe.processes import command
from agentgrpo.records.run_folder import lock_run_dir
from agentgrpo.sandbox import SandboxUnavailable
from agentgrpo.support.memory import OutOfMemory
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.train.command_line import Begin, ChildFailed

ANEW = "Nothing was saved: the same command starts from the beginning."


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (ValueError("no such"), (2, "error: no such"), (1, f"error: no such. {ANEW}")),
        (FileNotFoundError("gone"), (2, "error: gone"), (1, f"error: gone. {ANEW}")),
        (SandboxUnavailable("no cage"), (2, "error: no cage"), (1, f"error: no cage. {ANEW}")),
        (InfrastructureError("down"), (3, f"error: down. {ANEW}"), None),
        (Disagreement("they differ"), (3, f"error: they differ. {ANEW}"), None),
        (UserCodeError("f", "failed"), (2, "error: f failed"), (3, f"error: f failed. {ANEW}")),
        (FloatingPointError("nan"), (1, f"error: nan. {ANEW}"), None),
        (MemoryError(), (1, f"error: out of memory. {ANEW}"), None),
        (KeyboardInterrupt(), (130, f"interrupted. {ANEW}"), None),
        (ChildFailed("sft", 3), (3, f"error: sft ended with status 3. {ANEW}"), None),
        (ChildFailed("sft", 2), (2, f"error: sft ended with status 2. {ANEW}"), None),
        (ChildFailed("sft", -9), (137, f"error: sft ended with status -9. {ANEW}"), None),
    ],
)
def test_error_sets_exit_status_and_prints_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    before: tuple[int, str],
    after: tuple[int, str] | None,
) -> None:
    def run(begins: bool, begin: Begin) -> None:
        if begins:
            begin()
        raise error

    for begins, expected in ((False, before), (True, after or before)):
        given = ["quickstart", f"out_dir={tmp_path}"]
        assert command("sft", None, given, lambda *of: run(begins, of[2])) == expected[0]  # noqa: B023
        assert capsys.readouterr().err == f"{expected[1]}\n"


def test_sys_exit_in_user_code_exits_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward or an environment that exits with 0 looked like a run that was done."""

    def leaves(config: Any, args: Any, begin: Begin) -> None:
        begin()
        sys.exit(0)

    assert command("sft", None, ["quickstart", f"out_dir={tmp_path}"], leaves) == 3
    output = capsys.readouterr().err
    assert re.match(
        r"error: your code called sys\.exit\(0\) \(at \S*test_command_line\.py:\d+\)\. Noth",
        output,
    )


def test_exit_status_is_that_of_the_work() -> None:
    assert command("sft", None, ["quickstart"], lambda *_: 7) == 7
    assert command("sft", None, ["quickstart"], lambda *_: None) == 0


COMMANDS: dict[str, tuple[str, list[str], str, list[str]]] = {
    "train quickstart": ("train.__main__", ["build"], "Trainer.train", ["checkpoints/step_000003"]),
    "flywheel recipe": (
        "recipe.flywheel", ["prepare_run", "training_stream", "require_same_work", "start_engine"],
        "run_flywheel",
        ["flywheel/buffer.jsonl"],
    ),
    "sft recipe": (
        "recipe.sft", ["prepare_run", "whole_checkpoint", "room_checks", "require", "read_examples",
        "make_learner", "RunLog"], "learn",
        ["sft/checkpoints/step_000003"],
    ),
    "curriculum recipe curriculum.start=model": (
        "recipe.curriculum", ["prepare"], "run_parts",
        ["stage_0/pool.jsonl", "stage_0/rl/checkpoints/step_000003"],
    ),
    "curriculum recipe --part 0.select curriculum.start=model": (
        "recipe.curriculum", ["build_eval", "training_stream"], "play_candidates",
        ["stage_0/pool.jsonl"],
    ),
    "curriculum recipe --part 0.train curriculum.start=model": (
        "recipe.curriculum", ["build"], "train.Trainer.train",
        ["stage_0/rl/checkpoints/step_000003"],
    ),
    "recipe recipe": (
        "recipe.recipe", ["prepare", "flywheel.questions_of"], "run_parts",
        ["recipe.json", "flywheel/buffer.jsonl", "sft/checkpoints/step_000003"],
    ),
    "evaluate recipe": ("recipe.evaluate", ["build_eval"], "evaluate_recipe", []),
}  # fmt: skip
"""Arguments: module, what it makes before its work, the work, and what it continues from."""


@pytest.mark.parametrize("arguments", COMMANDS)
def test_exit_status_and_resume_hint_of_every_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
) -> None:
    name, makes, works, saved = COMMANDS[arguments]
    module = importlib.import_module(f"agentgrpo.{name}")
    settings = [f"sft.data={__file__}"] if name == "recipe.sft" else []  # any file

    def run() -> tuple[int, str]:
        status = module.main([*arguments.split()[1:], f"out_dir={tmp_path}", *settings])
        return status, capsys.readouterr().err.strip()

    def fails(with_: BaseException) -> Callable[..., Any]:
        return MagicMock(side_effect=with_)

    def put(attribute: str, value: Any) -> None:
        monkeypatch.setattr(f"{module.__name__}.{attribute}", value)

    put(makes[0], fails(ValueError("no room")))
    assert run() == (2, "error: no room")
    put(makes[0], fails(KeyboardInterrupt()))
    assert run() == (130, f"interrupted. {ANEW}")
    for made in makes:
        put(made, MagicMock())
    put(works, fails(OutOfMemory("out of memory while working")))
    if name == "recipe.sft":
        module.make_learner.return_value.step_count = 0
        module.whole_checkpoint.return_value = None
        module.read_examples.return_value = [MagicMock()]
    assert run() == (1, f"error: out of memory while working. {ANEW}")
    for path in saved:
        (tmp_path / path).mkdir(parents=True)
        put(makes[0], fails(KeyboardInterrupt()))
        said = f"interrupted. The same command continues from {tmp_path / path}."
        assert run() == (130, said)


ALONE = {
    "flywheel recipe": "flywheel",
    "sft recipe": "sft",
    "curriculum recipe curriculum.start=model": "",
    "curriculum recipe --part 0.select curriculum.start=model": "stage_0",
    "recipe recipe": "",
}
"""Arguments: the folder, below out_dir, in which they work."""


@pytest.mark.parametrize("arguments", ALONE)
def test_second_process_in_the_same_folder_is_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
) -> None:
    """Neither a second command nor a second rank of the same one, into the same files."""
    module = importlib.import_module(f"agentgrpo.{COMMANDS[arguments][0]}")
    data = [f"sft.data={__file__}"] if arguments.startswith("sft") else []
    given = [*arguments.split()[1:], f"out_dir={tmp_path}", *data]
    with lock_run_dir(tmp_path / ALONE[arguments]):
        assert module.main(given) == 2
        assert "is in use by another run" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert module.main(given) == 2
    assert "start it without torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "3"], "--steps: expected section.key=value, without dashes"),
        (
            ["--learner.learning-rate=1e-5"],
            "--learner.learning-rate=1e-5: expected",
        ),
    ],
)
def test_dashed_option_names_the_syntax_of_settings(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "quickstart", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err

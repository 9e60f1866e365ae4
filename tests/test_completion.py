"""What the Tab key offers: the words themselves, and real shells that complete with them."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentgrpo import cli
from agentgrpo.completion import __main__ as completion
from agentgrpo.completion.words import words_of
from agentgrpo.config import TrainConfig
from agentgrpo.config.read import load_config
from agentgrpo.config.readers import READS, reads, require_read
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.registry import KINDS
from agentgrpo.settings import options, settings
from tests.given import LEAST

TRAIN = words_of("agentgrpo.train").words


def test_every_setting_is_offered() -> None:
    """By what docs/config.md is made from, and the command reads."""
    for command in READS:
        kind = TrainConfig if command == "train" else RecipeConfig
        module = cli.COMMANDS[command][0]
        keys = {f"{s.section}.{s.key}=".lstrip(".") for s in settings(kind)}
        keys |= {f"{of}.options.{s.key}=" for of in KINDS for each in KINDS[of]
                 for s in options(of, each)}  # fmt: skip
        keys -= {f"{of}.options=" for of in KINDS}
        keys -= {key for key in keys if not reads(command, key[:-1])}
        offered = words_of(module).words
        assert {word for word in offered if word.endswith("=")} == keys
        require_read(command, {word.partition("=")[0] for word in offered if "=" in word})


def test_every_value_that_is_offered_is_taken() -> None:
    pairs = [w for w in TRAIN if w.partition("=")[2] and ".options." not in w]
    assert {"learner.decay=cosine", "agent.kind=tools", "reward.kind=math", "env.kind=auto",
            "loss.loss_type=grpo", "rollout.deterministic=cpu", "rollout.deterministic=true",
            "engine.enforce_eager=false"} <= {*pairs}  # fmt: skip
    values = re.compile("Input should be|expected|did you mean")  # of those that need another key
    assert not [(pair, said) for pair in pairs if values.search(said := refused(pair))]


def refused(pair: str) -> str:
    """What is said to a setting, if it is not taken."""
    try:
        load_config(LEAST, [pair])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("word", cli.COMMANDS)
def test_every_option_is_offered(word: str) -> None:
    """Those that the command's own --help names."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.main([word, "--help"])
    about = said.getvalue()
    named = set(re.findall(r"^ {2}(?:-\w(?: \w+)?, )?(--[\w-]+)", about, re.M))
    assert named >= {"--help"}
    offered = words_of(cli.COMMANDS[word][0])
    assert named <= {*offered.words}
    takes = {name for name in named if re.search(rf"{name} (?!\s)[A-Z\w]", about)}
    assert takes <= {*offered.takes_value}


@pytest.mark.slow
def test_a_script_is_made_without_torch() -> None:
    program = (
        "import sys; from agentgrpo.completion.__main__ import script; script('bash')\n"
        "print(*sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not {"torch", "vllm", "transformers", "triton"} & {*ran.stdout.split()}
    assert "agentgrpo.train" in ran.stdout.split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with scripts, a config of one's own and a run."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "runs" / "one").mkdir(parents=True)
    (folder / "runs" / "one" / "run.json").touch()
    for name in ("my.toml", "data.jsonl"):
        (folder / name).touch()
    for shell in completion.SHELLS:
        (folder / f"complete.{shell}").write_text(completion.script(shell))
    return folder


def found(shell: str) -> str:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"no {shell} here")
    return path


BASH = r"""
source complete.bash
compopt() { :; }
while read -r COMP_LINE; do
  COMP_LINE=${COMP_LINE%|} COMP_POINT=${#COMP_LINE}
  spread=${COMP_LINE//=/ = } # as readline parts them
  read -ra COMP_WORDS <<< "$spread"
  [[ $spread == *" " && $spread != *"= " ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _agentgrpo
  printf '%s\n' "${COMPREPLY[*]}"
done
"""


def offered_by_bash(place: Path, lines: Sequence[str]) -> list[set[str]]:
    """The candidates at the end of each line."""
    ran = subprocess.run(
        ["bash", "--norc", "-c", BASH], cwd=place, input="".join(f"{line}|\n" for line in lines),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stderr == ""
    return [set(line.split()) for line in ran.stdout.splitlines()]


def test_bash_offers_what_fits(place: Path) -> None:
    configs = {"quickstart", "recipe", "my.toml", "runs/"}
    offered = offered_by_bash(
        place,
        ["agentgrpo ", "agentgrpo train ", "agentgrpo train quickstart learner.",
         "agentgrpo train quickstart learner.decay=",
         "agentgrpo train quickstart steps=3 agent.kind=t",
         "agentgrpo push --", "agentgrpo view runs/", "agentgrpo view -o ", "agentgrpo nothing ",
         "agentgrpo train quickstart learner.lora.rank",
         "agentgrpo train quickstart data.train=da"],
    )  # fmt: skip
    assert offered[0] == {*cli.COMMANDS}
    assert configs | {"steps=", "learner.", "agent."} <= offered[1]
    assert not {word for word in offered[1] if word.startswith(("learner.d", "-", "data.j"))}
    assert {"learner.decay=", "learner.learning_rate=", "learner.lora."} <= offered[2]
    assert all(word.startswith("learner.") for word in offered[2])
    assert offered[3] == {"constant", "linear", "cosine"}
    assert offered[4] == {"tools", "tags"}
    assert offered[5] == {"--help", "--checkpoint", "--public", "--exist-ok", "--dry-run"}
    assert offered[6] == {"runs/one"}
    assert offered[7:9] == [set(), set()], "the shell's own files"
    assert offered[9] == {"learner.lora.rank="}
    assert offered[10] == set()


TYPED = {
    "agentgrpo tra": "agentgrpo train",
    "agentgrpo train quick": "agentgrpo train quickstart",
    "agentgrpo train my": "agentgrpo train my.toml",
    "agentgrpo train quickstart lear": "agentgrpo train quickstart learner.",
    "agentgrpo train quickstart learner.dec": "agentgrpo train quickstart learner.decay=",
    "agentgrpo train quickstart learner.decay=li": (
        "agentgrpo train quickstart learner.decay=linear"
    ),
    "agentgrpo train quickstart seed=1 agent.options.sy": (
        "agentgrpo train quickstart seed=1 agent.options.system_prompt="
    ),
    "agentgrpo train quickstart data.train=data": (
        "agentgrpo train quickstart data.train=data.jsonl"
    ),
    "agentgrpo view runs/o": "agentgrpo view runs/one",
    "agentgrpo push --checkp": "agentgrpo push --checkpoint",
    "agentgrpo sandbox doc": "agentgrpo sandbox doctor",
}  # fmt: skip
"""What is typed before Tab, and what then stands there."""


ECHO = "\x01echo 'G'ot, \"\x05|\" 'E'nd\n"
"""Keys that make a command that says its arguments of the line that stands there."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "options", "ready"),
    [
        ("bash", ["--norc", "--noprofile", "-i"], ""),
        ("zsh", ["-f", "-i"], "autoload -U compinit; compinit -D; "),
    ],
)
def test_the_tab_key_completes(shell: str, options: list[str], ready: str, place: Path) -> None:
    """In a real terminal: what is typed, Tab, then an echo of the line that stands there."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [found(shell), *options], stdin=slave, stdout=slave, stderr=slave, cwd=place,
        env={"PATH": os.environ["PATH"], "HOME": str(place), "TERM": "dumb", "PS1": "$ ",
             "INPUTRC": "/dev/null"},
        start_new_session=True,
    )  # fmt: skip
    os.close(slave)

    def types(keys: str, until: str) -> str:
        os.write(master, keys.encode())
        seen, deadline = "", time.monotonic() + 30
        while until not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([master], [], [], 0.1)[0]:
                seen += os.read(master, 65536).decode(errors="replace")
        return seen

    try:
        types(f"{ready}source complete.{shell}; echo rea''dy\n", "ready\r")
        stands = {
            line: re.findall(r"Got, (.*?)\| End", types(f"{line}\t{ECHO}", "End\r"))
            for line in TYPED
        }  # fmt: skip
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(master)
    space = " " if shell == "bash" else ""  # zsh takes back the one that it has added
    assert stands == {
        line: [done if done.endswith((".", "=")) else done + space] for line, done in TYPED.items()
    }


@pytest.mark.slow
def test_fish_completes(place: Path) -> None:
    asked = "; ".join(f"complete -C '{line}'; echo" for line in TYPED)
    ran = subprocess.run(
        [found("fish"), "--no-config", "-c", f"source complete.fish; {asked}"],
        cwd=place, capture_output=True, text=True, check=True,
        env={"PATH": os.environ["PATH"], "HOME": str(place)},
    )  # fmt: skip
    for (line, done), offered in zip(TYPED.items(), ran.stdout.split("\n\n"), strict=False):
        (word,) = {one.partition("\t")[0].rstrip("/") for one in offered.split("\n") if one}
        assert f"{line.rpartition(' ')[0]} {word}" == done

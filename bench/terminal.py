"""Write one-command terminal tasks in Harbor's format, for the task `terminal` of bench.curves.

    python -m bench.terminal FOLDER

Needs the image `debian:13` (docs/environments.md). Training and held-out tasks share the kinds
below, but no file names, words or contents. A task's tests compare /app with the result of its
solution.
"""

import json
import random
import sys
from pathlib import Path
from typing import NamedTuple

from agentgrpo.envs.harbor_tasks import make_row
from agentgrpo.sandbox.session.dockerfile import Builder
from agentgrpo.support.atomic_files import write_lines

CONFIG = Path(__file__).with_suffix(".toml")
COUNTS = {"train": 192, "heldout": 128}


class Kind(NamedTuple):
    """An instruction and its command."""

    instruction: str
    command: str


KINDS = {
    "copy": Kind("Copy {a} to {b}.", "cp {a} {b}"),
    "touch": Kind("Make the empty file {b}.", "touch {b}"),
    "sort": Kind("Sort {a} into {b}.", "sort {a} > {b}"),
    "rename": Kind("Rename {a} to {b}.", "mv {a} {b}"),
    "move": Kind("Move {a} into the folder {d}.", "mv {a} {d}"),
    "delete": Kind("Delete {a}.", "rm {a}"),
    "delete all": Kind("Delete all .{x} files.", "rm *.{x}"),
}
"""The first three are examples in the prompt of the config, with other names."""
WORDS = {
    "train": (
        "apples bolts dates eggs flags games hats items jars keys lamps maps nuts orders pens",
        "red green blue pink gold grey black white",
        "log csv dat lst",
    ),
    "heldout": (
        "rings songs tools users visits wines yards zones boats cards drums forks goats hills inks",
        "north south east west front back left right",
        "rec tab out raw",
    ),
}
"""Of each split: names of files, words in them, suffixes."""
TEST = """#!/bin/sh
# 1 if the directory is exactly as expected.
if diff -r /tests/expected /app; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
"""


def task(split: str, index: int) -> tuple[str, str, dict[str, str], dict[str, str]]:
    """Instruction, command, and the files before and after it, by name."""
    rng = random.Random(f"{split} {index}")
    stems, words, suffixes = (text.split() for text in WORDS[split])
    name, kind = list(KINDS.items())[index % len(KINDS)]
    (x, y), stem = rng.sample(suffixes, 2), rng.sample(stems, 6)
    values = {"a": f"{stem[0]}.{x}", "b": f"{stem[1]}.{y}", "d": stem[2], "x": x}
    a, b, own = values["a"], values["b"], [values["a"], f"{stem[3]}.{x}"]
    files = {
        file: "".join(f"{rng.choice(words)} {rng.randint(10, 99)}\n" for _ in range(6))
        for file in (*own, f"{stem[4]}.{y}", f"{stem[2]}/{stem[5]}.{y}")
    }
    text = "" if name == "touch" else files[a]
    if name == "sort":
        text = "".join(sorted(text.splitlines(keepends=True)))
    gone = {"rename": [a], "move": [a], "delete": [a], "delete all": own}.get(name, [])
    new = {"copy": b, "touch": b, "sort": b, "rename": b, "move": f"{stem[2]}/{a}"}.get(name, "")
    after = {file: text for file, text in files.items() if file not in gone}
    after |= {new: text} if new else {}
    return kind.instruction.format(**values), kind.command.format(**values), files, after


def write_folder(folder: Path, split: str, index: int) -> None:
    """A task folder in Harbor's form."""
    instruction, command, before, after = task(split, index)
    contents = {
        "instruction.md": instruction,
        "task.toml": 'version = "1.0"\nenvironment.memory_mb = 64\nverifier.timeout_sec = 30\n',
        "environment/Dockerfile": "FROM debian:13\nWORKDIR /app\nCOPY files /app\n",
        "solution/solve.sh": f"#!/bin/bash\ncd /app\n{command}\n",
        "tests/test.sh": TEST,
        **{f"environment/files/{name}": text for name, text in before.items()},
        **{f"tests/expected/{name}": text for name, text in after.items()},
    }
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def write(folder: Path) -> None:
    """Task folders of both splits, their images, and the rows that the config reads."""
    with Builder() as builder:
        for split, count in COUNTS.items():
            folders = [folder / "tasks" / f"{split}-{index}" for index in range(count)]
            for index, path in enumerate(folders):
                write_folder(path, split, index)
            rows = [make_row(path.resolve(), builder) for path in folders]
            questions = {json.dumps(row["question"]) for row in rows}
            print(f"{split}: {count} tasks, {len(questions)} different instructions", flush=True)
            write_lines(folder / f"terminal.{split}.jsonl", rows)


if __name__ == "__main__":
    write(Path(sys.argv[1]))

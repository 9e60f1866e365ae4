"""Terminal tasks of one command in Harbor's form, for the lesson `terminal` of bench.curves.

    python -m bench.terminal FOLDER

Needs the image `debian:13` (docs/images.md). Training and held-out tasks share the kinds below;
names of files, words and contents are disjoint. The tests of a task expect /app exactly as its
solution leaves it.
"""

import json
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agentgrpo.envs.harbor_tasks import make_row
from agentgrpo.run.atomic import write_lines
from agentgrpo.sandbox.dockerfile import Builder

CONFIG = Path(__file__).with_suffix(".toml")
COUNTS = {"train": 192, "heldout": 128}
Lines = list[str]


class Kind(NamedTuple):
    """An instruction, a command that carries it out, and the lines that it writes into {b}."""

    instruction: str
    command: str
    lines: Callable[[Lines, Mapping[str, Any]], Lines] | None = None


KINDS = {
    "count": Kind(
        "Count the lines with {w} in {a} and write the number into {b}.", "grep -c {w} {a} > {b}",
        lambda lines, v: [str(sum(v["w"] in line for line in lines))],
    ),
    "field": Kind(
        "Write column {n} of {a} into {b}.", "cut -d, -f{n} {a} > {b}",
        lambda lines, v: [line.split(",")[v["n"] - 1] for line in lines],
    ),
    "largest": Kind(
        "Write the name of the largest .{x} file into {b}.", "ls -S *.{x} | head -n 1 > {b}",
        lambda lines, v: [v["largest"]],
    ),
    "move": Kind("Move all .{x} files into the folder {d}.", "mv *.{x} {d}"),
    "first": Kind(
        "Write the first {n} lines of {a} into {b}.", "head -n {n} {a} > {b}",
        lambda lines, v: lines[: v["n"]],
    ),
    "sort": Kind(
        "Write the sorted lines of {a} into {b}.", "sort {a} > {b}",
        lambda lines, v: sorted(lines),
    ),
    "rename": Kind("Rename {a} to {b}.", "mv {a} {b}"),
    "delete": Kind("Delete all .{x} files.", "rm *.{x}"),
}  # fmt: skip
"""The first five are examples in the prompt of the config, with other names; the others are not."""
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
    values: dict[str, Any] = {"a": f"{stem[0]}.{x}", "b": f"{stem[1]}.{y}", "d": stem[2], "x": x}
    values |= {"n": rng.randint(2, 4), "w": rng.choice(words)}
    own = [values["a"], f"{stem[3]}.{x}", f"{stem[4]}.{x}"]
    files = {f"{values['d']}/{stem[5]}.{y}": ""}
    for file, count in zip([*own, f"{stem[5]}.{y}"], rng.sample(range(5, 12), 4), strict=True):
        rows = [
            [rng.choice(words), str(rng.randint(10, 99)), *rng.sample(words, 2)]
            for _ in range(count)
        ]
        files[file] = "".join(f"{','.join(row)}\n" for row in rows)
    values["largest"] = max(own, key=lambda file: len(files[file]))
    after = dict(files)
    if kind.lines is not None:
        lines = kind.lines(files[values["a"]].splitlines(), values)
        after[values["b"]] = "".join(f"{line}\n" for line in lines)
    else:
        for file in own if name != "rename" else own[:1]:
            to = {"move": f"{values['d']}/{file}", "rename": values["b"], "delete": ""}[name]
            text = after.pop(file)
            after |= {to: text} if to else {}
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

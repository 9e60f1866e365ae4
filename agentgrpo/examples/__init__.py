"""Files to try the configs with that expect files of yours.

`agentgrpo init --examples [FOLDER]` writes those of `search` and `code_search` (questions.jsonl,
texts.jsonl, web.py), `unit_tests` (tasks.jsonl), `mcp` (server.py), `verifiers` (my_env.py) and
`program` (program.py) into the folder you are in, or another, a sampler of one's own for any
config (sampler.py), and ten task folders for `agentgrpo init --harbor` (harbor/).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from agentgrpo.examples import functions
from agentgrpo.examples.recipe import search_demo

PROGRAMS = ("server.py", "my_env.py", "sampler.py", "web.py", "program.py")


def files() -> dict[str, str]:
    """The contents of every file, by name."""
    texts = ({"id": id, "title": title, "text": text} for id, title, text in search_demo.corpus())
    questions = (
        {"question": task.messages[-1]["content"], "answer": task.spec["answer"]}
        for task in search_demo.lookups("train")
        if task.id.endswith("/person")  # SmolLM2-135M does not tell which fact is asked for
    )
    here = Path(__file__).parent
    return {
        "texts.jsonl": _lines(texts),
        "questions.jsonl": _lines(questions),
        "tasks.jsonl": _lines(functions.rows()),
        **{name: (here / name).read_text() for name in PROGRAMS},
        **{
            str(path.relative_to(here)): path.read_text()
            for path in sorted(here.glob("harbor/**/*"))
            if path.is_file()
        },
    }


def write(folder: Path) -> list[Path]:
    """Write them all; the folder is made. What is in it then: files, and the folder of tasks."""
    paths = {folder / name: text for name, text in files().items()}
    there = [path for path in paths if path.exists()]
    if there:
        raise FileExistsError(f"{there[0]} is there already")
    for path, text in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(dict.fromkeys(folder / path.relative_to(folder).parts[0] for path in paths))


def _lines(rows: Iterable[Mapping[str, object]]) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)

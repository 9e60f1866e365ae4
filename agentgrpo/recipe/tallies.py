"""Tasks that one to five calls solve, for measuring what a policy does that it need not.

    [env]
    kind = "agentgrpo.recipe.tallies:TalliesEnv"
    [data]
    train = "env"
    heldout = "env"

Four kinds in turn: `sum`, a story whose numbers are all told (one program, or one for each of its
steps); `lookup`, a fact of the invented almanac (almanac.py; one search); `total`, one number of
each of two or three of its entries, added up (one search for all names or one for each, then one
program or two); and `known`, a total of which one, some or all of the numbers are told (searching
for these is needless). `spec` has what the fewest calls are: `search`, `python`, and their number,
`least`. Nobody here solves tasks for the policy: there is no critic.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from itertools import chain
from typing import Any, cast

from agentgrpo.data.word_problems import WORDS, Split
from agentgrpo.envs.tagged import TaggedEnv
from agentgrpo.recipe import almanac
from agentgrpo.sandbox import SandboxPool
from agentgrpo.types import Task

COUNTED = {
    "village": ("villages", "houses"),
    "ship": ("ships", "tons"),
    "bridge": ("bridges", "metres"),
    "school": ("schools", "pupils"),
}
"""Of a kind of entry: several of them, and what its number counts."""
ASKED = {
    "train": (
        "How many {unit} have the {kinds} {names} together?",
        "What do the {unit} of the {kinds} {names} add up to?",
    ),
    "heldout": ("The {kinds} {names} have how many {unit} in all?",),
}
"""How a total is asked for, by split."""
STORIES = {
    "train": (
        "{n} has {a} bags with {b} {t} each, {c} boxes with {d} {t} each and {e} more. "
        "How many {t} does {n} have?",
        "{n} buys {a} packs of {b} {t}, then {c} packs of {d} {t}, and finds {e}. "
        "How many {t} is that?",
    ),
    "heldout": (
        "There are {a} crates of {b} {t}, {c} crates of {d} {t} and {e} loose {t}. "
        "How many {t} has {n} got?",
    ),
}
"""Of a sum, by split."""


class TalliesEnv(TaggedEnv):
    """TaggedEnv over the almanac, with tasks of its own.

    Args:
        pool: as TaggedEnv.
        timeout_s: as TaggedEnv.
        max_calls: as TaggedEnv.
    """

    def __init__(self, pool: SandboxPool, timeout_s: float, *, max_calls: int = 6) -> None:
        super().__init__(
            pool, timeout_s, corpus=almanac.corpus(), max_calls=max_calls, top_k=3, max_chars=200
        )

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split, the four kinds in turn."""
        return tasks(cast(Split, split))


def tasks(split: Split) -> list[Task]:
    """See TalliesEnv.tasks()."""
    rows = (
        (_sum(split, index), _lookup(task), *(_total(split, index, k) for k in ("total", "known")))
        for index, task in enumerate(almanac.lookups(split))
    )
    return list(chain.from_iterable(rows))


def _sum(split: Split, index: int) -> Task:
    rng = random.Random(f"tallies/{split}/sum/{index}")
    a, b, c, d, e = (rng.randint(11, 49) for _ in range(5))
    name, thing = rng.choice(WORDS[split]["names"]), rng.choice(WORDS[split]["things"])
    question = rng.choice(STORIES[split]).format(n=name, t=thing, a=a, b=b, c=c, d=d, e=e)
    needed = _needed("", f"{a}*{b}+{c}*{d}+{e}")
    return _task(f"sum/{split}/{index}", question, a * b + c * d + e, "sum", needed)


def _lookup(task: Task) -> Task:
    needed = _needed(task.spec["name"], "")
    return dataclasses.replace(
        task, spec={"answer": task.spec["answer"], "kind": "lookup"} | needed
    )


def _total(split: Split, index: int, kind: str) -> Task:
    """Of two or three entries; of a `known` one, between one and all of their numbers are told."""
    rng = random.Random(f"tallies/{split}/{kind}/{index}")
    of = rng.choice(list(COUNTED))
    kinds, unit = COUNTED[of]
    pool = [entry for entry in almanac.entries_of(split) if entry.kind == of]
    entries = rng.sample(pool, rng.choice((2, 3)))
    told = rng.sample(entries, rng.randint(1, len(entries))) if kind == "known" else []
    *first, last = [entry.name for entry in entries]
    names = f"{', '.join(first)} and {last}"
    asked = rng.choice(ASKED[split]).format(unit=unit, kinds=kinds, names=names)
    facts = (f"{entry.name} has {entry.values['number']} {unit}." for entry in told)
    numbers = [entry.values["number"] for entry in entries]
    unknown = " ".join(entry.name for entry in entries if entry not in told)
    needed = _needed(unknown, "+".join(numbers))
    question = " ".join([*facts, asked])
    return _task(f"{kind}/{split}/{index}", question, sum(map(int, numbers)), kind, needed)


def _task(id: str, question: str, answer: int, kind: str, needed: Mapping[str, Any]) -> Task:
    message = {"role": "user", "content": question}
    return Task(id=id, messages=(message,), spec={"answer": str(answer), "kind": kind, **needed})


def _needed(search: str, python: str) -> dict[str, Any]:
    return {"search": search, "python": python, "least": bool(search) + bool(python)}

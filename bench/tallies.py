"""Tasks that need one to five calls, to measure needless calls of a policy.

    [env]
    kind = "bench.tallies:TalliesEnv"
    [data]
    train = "env"
    heldout = "env"

Four kinds in turn: `lookup`, a fact of the invented corpus (one search); `total`, the sum of a
number from each of two or three entries (one search for all names or one for each, then one or two
programs); `known`, a total with some numbers in the question (searching for these is needless); and
`told`, with all numbers in the question (any search is needless). `spec` has the smallest number of
calls: `search`, `python`, and their sum, `least`. No critic knows it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, cast

from agentgrpo.data.word_problems import Split
from agentgrpo.envs.python_and_search import TaggedEnv
from agentgrpo.examples.recipe import search_demo
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
TOLD: Mapping[str, Callable[[int], int]] = {
    "total": lambda count: 0,
    "known": lambda count: count - 1,
    "told": lambda count: count,
}
"""Of how many of its entries a total tells the number, by kind."""


class TalliesEnv(TaggedEnv):
    """TaggedEnv over the almanac, with tasks of its own.

    Args:
        pool: as TaggedEnv.
        timeout_s: as TaggedEnv.
    """

    def __init__(self, pool: SandboxPool, timeout_s: float) -> None:
        super().__init__(
            pool, timeout_s, search={"corpus": search_demo.corpus(), "top_k": 3, "max_chars": 200}
        )

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split, the four kinds in turn."""
        return tasks(cast(Split, split))


def tasks(split: Split) -> list[Task]:
    """See TalliesEnv.tasks()."""
    rows = (
        (_lookup(task), *(_total(split, index, kind) for kind in TOLD))
        for index, task in enumerate(search_demo.lookups(split))
    )
    return list(chain.from_iterable(rows))


def _lookup(task: Task) -> Task:
    needed = _needed(task.spec["name"], "")
    return dataclasses.replace(
        task, spec={"answer": task.spec["answer"], "kind": "lookup"} | needed
    )


def _total(split: Split, index: int, kind: str) -> Task:
    """Of two entries, or now and then of three."""
    rng = random.Random(f"tallies/{split}/{kind}/{index}")
    of = rng.choice(list(COUNTED))
    kinds, unit = COUNTED[of]
    pool = [entry for entry in search_demo.entries_of(split) if entry.kind == of]
    entries = rng.sample(pool, rng.choice((2, 2, 3)))
    told = rng.sample(entries, TOLD[kind](len(entries)))
    *first, last = [entry.name for entry in entries]
    names = f"{', '.join(first)} and {last}"
    asked = rng.choice(ASKED[split]).format(unit=unit, kinds=kinds, names=names)
    facts = (f"{entry.name} has {entry.values['number']} {unit}." for entry in told)
    numbers = [entry.values["number"] for entry in entries]
    unknown = " ".join(entry.name for entry in entries if entry not in told)
    answer = str(sum(map(int, numbers)))
    return Task(
        id=f"{kind}/{split}/{index}",
        messages=({"role": "user", "content": " ".join([*facts, asked])},),
        spec={"answer": answer, "kind": kind, **_needed(unknown, "+".join(numbers))},
    )


def _needed(search: str, python: str) -> dict[str, Any]:
    return {"search": search, "python": python, "least": bool(search) + bool(python)}

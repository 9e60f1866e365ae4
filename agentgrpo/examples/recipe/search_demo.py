"""A fictional corpus, and questions whose answers are only in it.

It describes villages, ships, bridges and schools that do not exist, so a model must search instead
of using its knowledge. Everything is a pure function of the tables here. Training and held-out
questions are about different entries and have different wordings.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import product

from agentgrpo.data.word_problems import Split
from agentgrpo.types import Task

SIZE = 160
"""Number of entries. The last quarter is held out."""

TABLE = """\
village
{name} is a village of {number} houses. Its mayor is {person}. It is known for its {thing}.
honey cheese baskets bells roses knives cider lace
Who is the mayor of {name}?
Name the mayor of the village {name}.
Which person is mayor in {name}?
What is {name} known for?
For what is the village {name} known?
What is the village of {name} known for?
How many houses has {name}?
How many houses are in {name}?
How many houses does the village {name} have?

ship
The {name} is a ship of {number} tons. Its captain is {person}. It carries {thing}.
coal salt timber grain wool copper tea bricks
Who is captain of the {name}?
Name the captain of the ship {name}.
Which person is the captain of the {name}?
What does the {name} carry?
What is carried by the ship {name}?
What does the ship called {name} carry?
How many tons has the {name}?
The ship {name} has how many tons?
How many tons does the ship {name} have?

bridge
The {name} bridge is {number} metres long. It was built by {person}. It is made of {thing}.
stone steel oak iron brick granite rope concrete
Who built the {name} bridge?
By whom was the {name} bridge built?
Which person built the {name} bridge?
What is the {name} bridge made of?
Of what is the {name} bridge made?
What was used to make the {name} bridge?
How many metres long is the {name} bridge?
How long is the {name} bridge in metres?
What length in metres has the {name} bridge?

school
The {name} school has {number} pupils. Its head is {person}. It teaches {thing}.
music law painting farming dance sailing cooking weaving
Who is head of the {name} school?
Name the head of the {name} school.
Which person is the head of the {name} school?
What does the {name} school teach?
What is taught at {name} school?
What can one learn at the {name} school?
How many pupils has the {name} school?
How many pupils are at {name}?
How many pupils does the school {name} have?
"""
"""Kinds of entries. For each: its text, the values of `thing`, and three questions each for person,
thing and number. The last of the three is held out."""
KINDS = {kind[0]: kind[1:] for kind in (part.splitlines() for part in TABLE.split("\n\n"))}
FIRST_NAMES = ("Ada", "Boris", "Clara", "Dario", "Elsa", "Felix", "Greta", "Hugo", "Irma", "Jonas")
LAST_NAMES = ("Brink", "Castel", "Dorn", "Falk", "Grimm", "Holt", "Kessel", "Lund", "Moor", "Stern")
HEADS = ("Al", "Bel", "Cor", "Dun", "Er", "Fal", "Gar", "Hol", "Kel", "Mar", "Nor", "Tor", "Vel")
MIDDLES = ("a", "e", "i", "o")
TAILS = ("bury", "dale", "ford", "lin", "mora", "ness", "stad", "ton", "wick")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of the corpus."""

    name: str
    kind: str
    values: dict[str, str]
    """Its facts: person, thing, number."""

    @property
    def text(self) -> str:
        return KINDS[self.kind][0].format(name=self.name, **self.values)


@cache
def entries() -> tuple[Entry, ...]:
    """All entries, with alternating kinds."""
    rng = random.Random("almanac")  # the seed decides names and numbers: do not change it
    names = rng.sample(["".join(parts) for parts in product(HEADS, MIDDLES, TAILS)], SIZE)
    all_entries = []
    for index, name in enumerate(names):
        kind = list(KINDS)[index % len(KINDS)]
        values = {
            "person": f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
            "thing": rng.choice(KINDS[kind][1].split()),
            "number": str(rng.randint(20, 990)),
        }
        all_entries.append(Entry(name=name, kind=kind, values=values))
    return tuple(all_entries)


def corpus() -> list[tuple[str, str, str]]:
    """(id, title, text) of every entry, as envs/search.py indexes them."""
    return [(str(i), entry.name, entry.text) for i, entry in enumerate(entries())]


def entries_of(split: Split) -> tuple[Entry, ...]:
    """The entries of a split's tasks."""
    bound = SIZE - SIZE // 4
    return entries()[:bound] if split == "train" else entries()[bound:]


def lookups(split: Split) -> list[Task]:
    """One question for every fact of the split's entries, in one of its wordings, shuffled.

    `spec` holds the `answer`, the entry's `name` and the `kind`, "lookup".
    """
    rng = random.Random(f"almanac/{split}")
    tasks = []
    for entry in entries_of(split):
        for number, name in enumerate(entry.values):
            *train, heldout = KINDS[entry.kind][2 + 3 * number : 5 + 3 * number]
            question = rng.choice(train if split == "train" else [heldout]).format(name=entry.name)
            tasks.append(
                Task(
                    id=f"lookup/{split}/{entry.name}/{name}",
                    messages=({"role": "user", "content": question},),
                    spec={"answer": entry.values[name], "name": entry.name, "kind": "lookup"},
                )
            )
    rng.shuffle(tasks)
    return tasks

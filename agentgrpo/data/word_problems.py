"""Word problems that require computation, generated without end.

Problem `index` is a pure function of (split, seed, index), so a position in the stream is one
integer. Training and held-out problems share only the kinds of computation: wordings, names and
things are disjoint (word_problems.toml).
"""

from __future__ import annotations

import hashlib
import random
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from agentgrpo.types import Task

Split = Literal["train", "heldout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One computation and its wordings; word_problems.toml explains the fields."""

    name: str
    expr: str
    train: tuple[str, ...]
    heldout: tuple[str, ...]
    ranges: dict[str, tuple[int, int]] = field(
        default_factory=lambda: dict.fromkeys("abc", (10, 99))
    )
    where: str = "True"


def _read(path: Path) -> tuple[dict[str, dict[str, tuple[str, ...]]], tuple[Kind, ...]]:
    table = _frozen(tomllib.loads(path.read_text(encoding="utf-8")))
    words = table.pop("words")
    return words, tuple(Kind(name=name, **fields) for name, fields in table.items())


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(inner) for key, inner in value.items()}
    return tuple(value) if isinstance(value, list) else value


WORDS, KINDS = _read(Path(__file__).with_name("word_problems.toml"))
"""WORDS: by split, the `names` and `things`."""


def task(split: Split, index: int, seed: int = 0) -> Task:
    """Problem number `index`, from 0.

    Each cycle of len(wordings(split)) problems uses each wording once. `spec` has the integer
    `answer`, its `expression` and the `kind`; the agent must not see them.
    """
    if index < 0:
        raise ValueError(f"index: expected at least 0, got {index}")
    choices = wordings(split)
    cycle, place = divmod(index, len(choices))
    order = list(range(len(choices)))
    random.Random(f"{seed}/{split}/1/cycle {cycle}").shuffle(order)
    kind, wording = choices[order[place]]
    rng = random.Random(f"{seed}/{split}/1/problem {index}")
    name, other_name = rng.sample(WORDS[split]["names"], 2)
    words = {"n": name, "m": other_name, "t": rng.choice(WORDS[split]["things"])}
    numbers = _draw_numbers(kind, rng)
    question = wording.format(**words, **numbers)
    expression = kind.expr.format(**numbers)
    return Task(
        id=f"word/{split}/seed{seed}/{index}",
        messages=({"role": "user", "content": question[0].upper() + question[1:]},),
        spec={"answer": _value(expression), "expression": expression, "kind": kind.name},
    )


def fingerprint() -> str:
    """A hash of the templates: if they change, a saved position means other problems."""
    tables = (KINDS, *(words for lists in WORDS.values() for words in lists.values()))
    return hashlib.sha256(repr(tables).encode()).hexdigest()[:16]


@cache
def wordings(split: Split) -> tuple[tuple[Kind, str], ...]:
    """All wordings of a split, each with its kind."""
    if split not in ("train", "heldout"):
        raise ValueError(f"split: expected 'train' or 'heldout', got {split!r}")
    return tuple(
        (kind, wording)
        for kind in KINDS
        for wording in (kind.train if split == "train" else kind.heldout)
    )


def _draw_numbers(kind: Kind, rng: random.Random) -> dict[str, int]:
    while True:
        numbers = {letter: rng.randint(*bounds) for letter, bounds in kind.ranges.items()}
        if _value(kind.where.format(**numbers)):
            return numbers


def _value(expression: str) -> Any:
    # evaluates only the expressions of word_problems.toml, filled with integers
    return eval(expression, {"__builtins__": {}})

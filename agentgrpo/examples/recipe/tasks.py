"""The recipe's task mix: sums for the interpreter, questions for the search, each needing one call.

    [env]
    kind = "agentgrpo.examples.recipe.tasks:ErrandsEnv"
    [data]
    train = "env"
    heldout = "env"

Sums are the word problems (data/word_problems.py), questions are of the invented
almanac (search_demo.py). `critic` and `reflector` stand in for a large model in the flywheel: they
know the solutions of the training tasks, and read and write what operators ask (operators.py).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, cast

from agentgrpo.data import word_problems
from agentgrpo.data.word_problems import Split
from agentgrpo.envs.python_and_search import TaggedEnv
from agentgrpo.examples.recipe import search_demo
from agentgrpo.sandbox import SandboxPool
from agentgrpo.types import Task


class ErrandsEnv(TaggedEnv):
    """TaggedEnv over the almanac, with tasks of its own."""

    def __init__(self, pool: SandboxPool, timeout_s: float) -> None:
        super().__init__(
            pool, timeout_s, search={"corpus": search_demo.corpus(), "top_k": 1, "max_chars": 200}
        )

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split, a sum and a question in turn."""
        return tasks(cast(Split, split))


def tasks(split: Split) -> list[Task]:
    """See ErrandsEnv.tasks()."""
    questions = search_demo.lookups(split)
    drawn = (word_problems.task(split, index) for index in range(len(questions)))
    sums = (dataclasses.replace(task, spec={**task.spec, "kind": "sum"}) for task in drawn)
    return list(chain.from_iterable(zip(sums, questions, strict=True)))


# -- a large model's place -------------------------------------------------------------------------

LOOK = "<think>Look it up.</think>"
COMPUTE = "<think>Compute it.</think>"
DONE = "<think>Done.</think>"


@cache
def _solutions() -> Mapping[str, tuple[str, str]]:
    """(the one call that is needed, the answer) by training question."""
    return {
        str(task.messages[-1]["content"]): (_call(task.spec), str(task.spec["answer"]))
        for task in tasks("train")
    }


def _call(spec: Mapping[str, Any]) -> str:
    if spec["kind"] == "sum":
        return f"{COMPUTE}<python>{spec['expression']}</python>"
    return f"{LOOK}<search>{spec['name']}</search>"


def critic(messages: Sequence[Mapping[str, Any]]) -> str:
    """Names the first redundant or flawed step, or rewrites thoughts, as the prompt asks."""
    asked = str(messages[-1]["content"])
    call, answer, steps = _read(asked)
    if "Rewrite only the thoughts" in asked:
        thoughts = (re.split("<(?:search|python|answer)>", text) for text in steps)
        return "\n".join(
            f"Thought {number}: {_thought(text)}"
            for number, (text, (thought, *_)) in enumerate(zip(steps, thoughts, strict=True), 1)
            if thought.strip()
        )
    behind = next((n for n, text in enumerate(steps, 1) if _told(text, answer)), 0)
    if "redundant or ineffective" not in asked:
        return f"Step: {min(behind + 1, len(steps))}\nAnalysis: not what was needed here."
    if behind > 1:
        return f"Step: 1\nAnalysis: it told nothing.\nCorrected step:\n{call}"
    if behind and behind + 1 < len(steps):
        end = f"<answer>{answer}</answer>"
        return f"Step: {behind + 1}\nAnalysis: the answer was told.\nCorrected step:\n{end}"
    return "Step: no"


def _thought(step: str) -> str:
    return LOOK if "<search>" in step else COMPUTE if "<python>" in step else DONE


def reflector(messages: Sequence[Mapping[str, Any]]) -> str:
    """Analyses, or rewrites the last step: the call that is needed, or the answer once told."""
    asked = str(messages[-1]["content"])
    call, answer, steps = _read(asked)
    told = any(_told(text, answer) for text in steps[:-1])
    if "Write a new last step" not in asked:
        return "Give the answer as it was told." if told else f"The tool is to be asked: {call}"
    return f"<answer>{answer}</answer>" if told else call


def _read(asked: str) -> tuple[str, str, list[str]]:
    """(the call that is needed, the answer, the steps) of a prompt."""
    question = re.search(r"^Question: (.*)$", asked, re.M)
    if question is None or question[1] not in _solutions():
        raise ValueError(f"errands: no training question in {asked[:120]!r}")
    _, *steps = re.split(r"^Step \d+:\n", asked, flags=re.M)
    return *_solutions()[question[1]], steps


def _told(step: str, answer: str) -> bool:
    """Whether the step's result has the answer as words of its own."""
    result = step.partition("\nResult: ")[2]
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", result) is not None

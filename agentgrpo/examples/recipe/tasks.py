"""The recipe's tasks: sums for the interpreter and questions for the search, each with one call.

    [env]
    kind = "agentgrpo.examples.recipe.tasks:ComputeAndSearchEnv"
    [data]
    train = "env"
    heldout = "env"

The sums are word problems (data/word_problems.py), the questions are about a fictional corpus
(search_demo.py). `critic` and `reflector` replace a large model in the flywheel: they know the
solutions of the training tasks, and reply in the format of the operators (recipe/operators.py).
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


class ComputeAndSearchEnv(TaggedEnv):
    """A TaggedEnv over the fictional corpus, with tasks."""

    def __init__(self, pool: SandboxPool, timeout_s: float) -> None:
        super().__init__(
            pool, timeout_s, search={"corpus": search_demo.corpus(), "top_k": 1, "max_chars": 200}
        )

    def tasks(self, split: str) -> list[Task]:
        return tasks(cast(Split, split))


def tasks(split: Split) -> list[Task]:
    """See ComputeAndSearchEnv.tasks()."""
    questions = search_demo.lookups(split)
    drawn = (word_problems.task(split, index) for index in range(len(questions)))
    sums = (dataclasses.replace(task, spec={**task.spec, "kind": "sum"}) for task in drawn)
    return list(chain.from_iterable(zip(sums, questions, strict=True)))


# -- in place of a large model ---------------------------------------------------------------------

LOOK = "<think>Look it up.</think>"
COMPUTE = "<think>Compute it.</think>"
DONE = "<think>Done.</think>"


@cache
def _solutions() -> Mapping[str, tuple[str, str]]:
    """(required call, answer) by training question."""
    return {
        str(task.messages[-1]["content"]): (_call(task.spec), str(task.spec["answer"]))
        for task in tasks("train")
    }


def _call(spec: Mapping[str, Any]) -> str:
    if spec["kind"] == "sum":
        return f"{COMPUTE}<python>{spec['expression']}</python>"
    return f"{LOOK}<search>{spec['name']}</search>"


def critic(messages: Sequence[Mapping[str, Any]]) -> str:
    """Find the first redundant or flawed step, or rewrite thoughts, depending on the prompt."""
    prompt = str(messages[-1]["content"])
    call, answer, steps = _parse_prompt(prompt)
    if "Rewrite only the thoughts" in prompt:
        thoughts = (re.split("<(?:search|python|answer)>", text) for text in steps)
        return "\n".join(
            f"Thought {number}: {_thought(text)}"
            for number, (text, (thought, *_)) in enumerate(zip(steps, thoughts, strict=True), 1)
            if thought.strip()
        )
    found_at = next((n for n, text in enumerate(steps, 1) if _has_answer(text, answer)), 0)
    if "redundant or ineffective" not in prompt:
        return f"Step: {min(found_at + 1, len(steps))}\nAnalysis: not what was needed here."
    if found_at > 1:
        return f"Step: 1\nAnalysis: it told nothing.\nCorrected step:\n{call}"
    if found_at and found_at + 1 < len(steps):
        end = f"<answer>{answer}</answer>"
        return f"Step: {found_at + 1}\nAnalysis: the answer was told.\nCorrected step:\n{end}"
    return "Step: no"


def _thought(step: str) -> str:
    return LOOK if "<search>" in step else COMPUTE if "<python>" in step else DONE


def reflector(messages: Sequence[Mapping[str, Any]]) -> str:
    """Analyse, or rewrite the last step: the required call, or the answer once a result has it."""
    prompt = str(messages[-1]["content"])
    call, answer, steps = _parse_prompt(prompt)
    is_known = any(_has_answer(text, answer) for text in steps[:-1])
    if "Write a new last step" not in prompt:
        return "Give the answer as it was told." if is_known else f"The tool is to be asked: {call}"
    return f"<answer>{answer}</answer>" if is_known else call


def _parse_prompt(prompt: str) -> tuple[str, str, list[str]]:
    """Parse a prompt: (required call, answer, steps)."""
    question = re.search(r"^Question: (.*)$", prompt, re.M)
    if question is None or question[1] not in _solutions():
        raise ValueError(f"expected a prompt with a training question, got {prompt[:120]!r}")
    _, *steps = re.split(r"^Step \d+:\n", prompt, flags=re.M)
    return *_solutions()[question[1]], steps


def _has_answer(step: str, answer: str) -> bool:
    """Whether the step's result contains the answer as separate words."""
    result = step.partition("\nResult: ")[2]
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", result) is not None

"""An environment of the package verifiers: word problems with a calculator as a tool."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import verifiers
from datasets import Dataset

from agentgrpo.data import word_problems
from agentgrpo.envs.calculator import calculate
from agentgrpo.rewards.answers import last_number

Messages = Sequence[Mapping[str, Any]]


def right(completion: Messages, answer: str) -> float:
    """Whether the last message is the policy's and its last number the right one."""
    if not completion or completion[-1]["role"] != "assistant":
        return 0.0
    return float(last_number(completion[-1]["content"] or "") == int(answer))


def called(completion: Messages) -> float:
    """Whether the tool was called."""
    return float(any(message["role"] == "tool" for message in completion))


def load_environment(size: int = 400) -> Any:
    """Questions, the tool, and what an answer is worth."""
    problems = islice(word_problems.generate("train", [1]), size)
    rows = [
        {"question": problem.messages[-1]["content"], "answer": str(problem.spec["answer"])}
        for problem in problems
    ]
    return verifiers.ToolEnv(
        dataset=Dataset.from_list(rows),
        tools=[calculate],
        rubric=verifiers.Rubric(funcs=[right, called], weights=[1.0, 0.1]),
        max_turns=3,
    )

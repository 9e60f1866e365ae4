r"""Thought, search, code and answer in tags, within one message (ToolStar, ARPO, ET-Agent).

    <think>...</think><search>who wrote it?</search> <result>
    ...
    </result><think>...</think><python>print(6 * 7)</python> <result>
    42
    </result><answer> The final answer is \[ \boxed{42} \] </answer>

Only text that the policy sampled in the current turn is parsed, so tags in a result, the task or
the prompt's example have no effect. The protocol's tags within a result are broken up, so that the
policy cannot confuse a document with its own text. The environment is envs/python_and_search.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentgrpo.actions import (
    Action,
    CallTools,
    Finish,
    Malformed,
    Message,
    Observation,
    RunCode,
    Say,
    ToolCall,
)
from agentgrpo.agents.tagged_text import TextAgent
from agentgrpo.types import Task

PROMPT = (
    "Solve the task step by step. Think between <think> and </think>. To search, write a query "
    "between <{search}> and </{search}>; to compute, write Python between <{python}> and "
    "</{python}>. The result follows between <result> and </result>. Give the final "
    "answer between <answer> and </answer>, as \\boxed{{...}}."
)


@dataclass(kw_only=True, eq=False)
class TagAgent(TextAgent):
    r"""See agents/base.py for the protocol.

    Args:
        search: name of the tag for queries; "": no search.
        python: name of the tag for code; "": no interpreter.
        boxed: an answer without \boxed{...} does not count.

    Raises:
        ValueError: a name is invalid or used twice.
    """

    acts = ("code", "search")
    home = "tagged"
    think: ClassVar[str] = "think"
    result: ClassVar[str] = "result"
    answer: ClassVar[str] = "answer"
    search: str = "search"
    python: str = "python"
    boxed: bool = True

    def __post_init__(self) -> None:
        names = [n for n in (self.think, self.search, self.python, self.result, self.answer) if n]
        invalid = [name for name in names if not re.fullmatch(r"[A-Za-z_]\w*", name)]
        if invalid or len(set(names)) < len(names):
            raise ValueError(
                f"tags: expected different names of letters, digits and _, got {names}"
            )
        self._acts = [name for name in (self.search, self.python) if name]
        self._tag = re.compile(rf"<(/?(?:{'|'.join(names)}))>")

    @property
    def stop(self) -> tuple[str, ...]:
        return tuple(f"</{name}>" for name in (*self._acts, self.answer))

    @property
    def marks(self) -> str:
        return f"<(?:{'|'.join((*self._acts, self.answer))})>"

    def prompt(self, task: Task) -> str:
        acts = (f"<{name}>" for name in (*self._acts, self.answer))
        return PROMPT.format(search=self.search, python=self.python) + self.talk(*acts)

    def read(self, text: str, task: Task) -> Action:
        r"""The action of the turn's last pair of tags; without one, a message or no answer.

        >>> agent, task = TagAgent(), Task(id="", messages=(), spec={})
        >>> agent.parse("<think>Hm.</think><python>6*7</python>", task)
        RunCode(code='6*7', language='python')
        >>> agent.parse(r"<answer> It is \[ \boxed{42} \] </answer>", task)
        Finish(answer='42')
        """
        for name in (*self._acts, self.answer):
            head, closed, _ = text.partition(f"</{name}>")
            if not closed:
                continue
            _, opened, body = head.rpartition(f"<{name}>")
            if not opened:
                return Malformed(f"Error: </{name}> without <{name}>")
            if name == self.answer:
                return Finish(self._answer_in(body))
            if not body.strip():
                return Malformed(f"Error: nothing between <{name}> and </{name}>")
            if name == self.search:
                return CallTools((ToolCall("search", {"query": body.strip()}),))
            return RunCode(body.strip("\n"))
        return self.say_or_finish(text)

    def observe(self, action: Action, observation: Observation) -> Sequence[Message] | str:
        """The result in its tags, as text of the policy's message; tags within it are broken up."""
        if isinstance(action, Say):
            return super().observe(action, observation)
        text = "\n".join(observation.outputs) or observation.text
        escaped = self._tag.sub(lambda tag: f"<\u200b{tag[1]}>", text)
        return f" <{self.result}>\n{escaped}\n</{self.result}>"

    def _answer_in(self, body: str) -> str | None:
        answer = boxed(body)
        return answer if self.boxed or answer is not None else body.strip()


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} with balanced braces; None if there is none.

    >>> boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for index in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin:index].strip()
    return None

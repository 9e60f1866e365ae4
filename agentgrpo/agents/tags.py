r"""Thought, search, code and answer in tags, within one message (ToolStar, ARPO, ET-Agent).

    <think>...</think><search>who wrote it?</search> <result>
    ...
    </result><think>...</think><python>print(6 * 7)</python> <result>
    42
    </result><answer> The final answer is \[ \boxed{42} \] </answer>

Only what the policy sampled in its present turn is parsed, so tags in a result, in the task or in
the prompt's example mean nothing; and tags of the protocol within a result are shown broken up,
so that the policy does not take a document's words for its own. envs/python_and_search.py answers
it.
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
        search: name of the tag of queries; "": there is no search.
        python: name of the tag of code; "": there is no interpreter.
        boxed: an answer without \boxed{...} is none.

    Raises:
        ValueError: a name that is no tag, or two of one name.
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
        bad = [name for name in names if not re.fullmatch(r"[A-Za-z_]\w*", name)]
        if bad or len(set(names)) < len(names):
            raise ValueError(
                f"tags: expected different names of letters, digits and _, got {names}"
            )
        self._acts = [name for name in (self.search, self.python) if name]
        self._tag = re.compile(rf"<(/?(?:{'|'.join(names)}))>")

    @property
    def stop(self) -> tuple[str, ...]:
        """The end tags of search, code and answer."""
        return tuple(f"</{name}>" for name in (*self._acts, self.answer))

    @property
    def marks(self) -> str:
        return f"<(?:{'|'.join((*self._acts, self.answer))})>"

    def prompt(self, task: Task) -> str:
        """What each tag is for."""
        acts = (f"<{name}>" for name in (*self._acts, self.answer))
        return PROMPT.format(search=self.search, python=self.python) + self.talk(*acts)

    def read(self, text: str, task: Task) -> Action:
        r"""What the turn's last pair of tags asks for; without one, what is said, or no answer.

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
        return self.said(text)

    def observe(self, action: Action, observation: Observation) -> Sequence[Message] | str:
        """The result between its tags, for the same message; tags within it broken up."""
        if isinstance(action, Say):
            return super().observe(action, observation)
        text = "\n".join(observation.outputs) or observation.text
        shown = self._tag.sub(lambda tag: f"<\u200b{tag[1]}>", text)
        return f" <{self.result}>\n{shown}\n</{self.result}>"

    def _answer_in(self, body: str) -> str | None:
        found = boxed(body)
        return found if self.boxed else (body.strip() if found is None else found)


def boxed(text: str) -> str | None:
    r"""What the last \boxed{...} holds, its braces balanced; None if there is none.

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

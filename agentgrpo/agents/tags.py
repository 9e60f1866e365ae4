r"""Thought, search, code and answer in tags, within one message (ToolStar, ARPO, ET-Agent).

    <think>...</think><search>who wrote it?</search> <result>
    ...
    </result><think>...</think><python>print(6 * 7)</python> <result>
    42
    </result><answer> The final answer is \[ \boxed{42} \] </answer>

Only what the policy sampled in its present turn is parsed, so tags in a result, in the task or in
the prompt's example mean nothing; and tags of the protocol within a result are shown broken up,
so that the policy does not take a document's words for its own. envs/tagged.py answers it.
"""

from __future__ import annotations

import re

from agentgrpo.actions import Action, CallTools, Finish, Observation, RunCode, ToolCall
from agentgrpo.agents.text import AfterMalformed, Shots, TextAgent

PROMPT = (
    "Solve the task step by step. Think between <{think}> and </{think}>. To search, write a query "
    "between <{search}> and </{search}>; to compute, write Python between <{python}> and "
    "</{python}>. What comes of it follows between <{result}> and </{result}>. Give the final "
    "answer between <{answer}> and </{answer}>, as \\boxed{{...}}."
)


class TagAgent(TextAgent):
    r"""See agents/base.py for the protocol.

    Args:
        think: name of the tag of thoughts.
        search: name of the tag of queries; "": there is no search.
        python: name of the tag of code; "": there is no interpreter.
        result: name of the tag of what comes of them.
        answer: name of the tag of the answer.
        system_prompt: None: PROMPT with the tags' names.
        shots: worked examples, each a list of messages, shown before the task.
        boxed: an answer without \boxed{...} is none.
        after_malformed: what becomes of a turn whose tags do not fit: the policy is told and goes
            on ("tell"), or the rollout ends there without an answer.

    Raises:
        ValueError: a name that is no tag, or two of one name.
    """

    acts = ("code", "search")
    home = "tagged"

    def __init__(
        self,
        *,
        think: str = "think",
        search: str = "search",
        python: str = "python",
        result: str = "result",
        answer: str = "answer",
        system_prompt: str | None = None,
        shots: Shots = (),
        boxed: bool = True,
        after_malformed: AfterMalformed = "tell",
    ) -> None:
        names = [name for name in (think, search, python, result, answer) if name]
        bad = [name for name in names if not re.fullmatch(r"[A-Za-z_]\w*", name)]
        if bad or len(set(names)) < len(names):
            raise ValueError(f"tags must be different names, got {names}")
        self._search, self._python, self._result, self._answer = search, python, result, answer
        self._boxed = boxed
        self._tools = [name for name in (search, python) if name]
        self._tag = re.compile(rf"<(/?(?:{'|'.join(names)}))>")
        if system_prompt is None:
            system_prompt = PROMPT.format(
                think=think, search=search, python=python, result=result, answer=answer
            )
        super().__init__(system_prompt, shots, after_malformed)
        self.stop = tuple(f"</{name}>" for name in (*self._tools, answer))

    def parse(self, text: str) -> Action:
        r"""What the turn's last pair of tags asks for; without one, no answer.

        >>> TagAgent().parse("<think>Hm.</think><python>6*7</python>")
        RunCode(code='6*7', language='python')
        >>> TagAgent().parse(r"<answer> It is \[ \boxed{42} \] </answer>")
        Finish(answer='42')
        """
        for name in (*self._tools, self._answer):
            head, closed, _ = text.partition(f"</{name}>")
            if not closed:
                continue
            _, opened, body = head.rpartition(f"<{name}>")
            if not opened:
                return self.malformed(f"Error: </{name}> without <{name}>")
            if name == self._answer:
                return Finish(self._answer_in(body))
            if not body.strip():
                return self.malformed(f"Error: nothing between <{name}> and </{name}>")
            if name == self._search:
                return CallTools((ToolCall("search", {"query": body.strip()}),))
            return RunCode(body.strip("\n"))
        return Finish(None)

    def observe(self, action: Action, observation: Observation) -> str:
        """The result between its tags, for the same message; tags within it broken up."""
        text = "\n".join(observation.outputs) or observation.text
        shown = self._tag.sub(lambda tag: f"<\u200b{tag[1]}>", text)
        return f" <{self._result}>\n{shown}\n</{self._result}>"

    def _answer_in(self, body: str) -> str | None:
        found = boxed(body)
        return found if self._boxed else (body.strip() if found is None else found)


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

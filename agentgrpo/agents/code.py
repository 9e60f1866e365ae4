"""Code as action: the policy writes code between two tags, sees what it prints, then answers.

The idea is CodeAct's (arXiv:2402.01030); tags, prompt, examples and answer form are the user's.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from agentgrpo.actions import (
    Action,
    Finish,
    Malformed,
    Message,
    Observation,
    RunCode,
    Schema,
    answer_in,
)
from agentgrpo.config import AgentConfig
from agentgrpo.types import Task

PROMPT = (
    "Solve the problem with {language}. Write code between {open} and {close}; you will see what "
    "it prints. Then reply with: {prefix} NUMBER"
)
TOOLS_PROMPT = "These functions are loaded already; call them without importing them:\n{tools}"


class CodeAgent:
    """See agents/base.py for the protocol and AgentConfig for the settings.

    Args:
        config: of the agent.
        tools: source of the script that the environment loads before the policy's first code; what
            config.show_tools says of it becomes part of the system prompt.
    """

    def __init__(self, config: AgentConfig, tools: str | None = None) -> None:
        self._config = config
        self._open = config.open_tag or "<code>"
        self._close = config.close_tag or "</code>"
        self._prefix = "Answer:" if config.answer_prefix is None else config.answer_prefix
        self._observation = config.observation or "{output}"
        self.stop = (self._close,)
        system = self._system_prompt(tools)
        self._head: list[Message] = [{"role": "system", "content": system}] if system else []
        self._head += [message.model_dump() for shot in config.shots for message in shot]

    def _system_prompt(self, tools: str | None) -> str:
        c = self._config
        prompt = c.system_prompt
        if prompt is None:
            language = {"python": "Python", "bash": "bash", "node": "JavaScript"}[c.language]
            prompt = PROMPT.format(
                language=language, open=self._open, close=self._close, prefix=self._prefix
            )
        if not tools or c.show_tools == "no":
            return prompt
        shown = tools if c.show_tools == "source" else signatures(tools)
        return f"{prompt}\n{TOOLS_PROMPT.format(tools=shown.strip())}".strip()

    def messages(self, task: Task) -> list[Message]:
        """System prompt, worked examples, then the task's own messages."""
        return [*self._head, *task.messages]

    def prefill(self, task: Task) -> str:
        """None: the policy begins its turn itself."""
        return ""

    def tools(self, task: Task) -> Sequence[Schema]:
        """None: code is the only tool."""
        return ()

    def parse(self, text: str) -> Action:
        """Code between the tags wins; else the text after the answer prefix; else no answer.

        >>> agent = CodeAgent(AgentConfig())
        >>> agent.parse("<code>print(6*7)</code>")
        RunCode(code='print(6*7)', language='python')
        >>> agent.parse("Answer: 42")
        Finish(answer='42')
        >>> agent.parse("forty-two")
        Finish(answer=None)
        """
        _, opened, rest = text.partition(self._open)
        if opened:
            code, closed, _ = rest.partition(self._close)
            if not closed:
                return self._malformed(f"Error: {self._open} without {self._close}")
            return RunCode(code.strip("\n"), self._config.language)
        if self._close in text:
            return self._malformed(f"Error: {self._close} without {self._open}")
        return Finish(answer_in(text, self._prefix))

    def _malformed(self, message: str) -> Action:
        return Finish(None) if self._config.after_malformed == "end" else Malformed(message)

    def observe(self, action: Action, observation: Observation) -> list[Message] | str:
        """The observation as one chat message, or as text of the policy's own message."""
        content = self._observation.replace("{output}", observation.text)
        if self._config.observation_role == "assistant":
            return content
        return [{"role": self._config.observation_role or "user", "content": content}]


def signatures(source: str) -> str:
    r'''The public functions of a script as def lines with their docstrings.

    >>> signatures("""def f(a: int, b=2) -> str:
    ...     'Says it.'
    ...     return str(a * b)""")
    'def f(a: int, b=2) -> str:\n    """Says it."""'
    '''
    shown = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            line = f"def {node.name}({ast.unparse(node.args)}){returns}:"
            doc = ast.get_docstring(node)
            shown.append(line + (f'\n    """{doc}"""' if doc else " ..."))
    return "\n".join(shown)

"""Code as action: the policy writes code between two tags, sees what it prints, then answers.

The idea is CodeAct's (arXiv:2402.01030); tags, prompt, examples and answer form are the user's.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentgrpo.actions import Action, Message, Observation, RunCode, Say
from agentgrpo.agents.tagged_text import PairAgent
from agentgrpo.types import Task

PROMPT = (
    "Solve the problem with {language}. Write code between {open} and {close}; you will see what "
    "it prints. Then reply with: {prefix} NUMBER"
)
TOOLS_PROMPT = "These functions are loaded already; call them without importing them:\n{tools}"
LANGUAGES = {"python": "Python", "bash": "bash", "node": "JavaScript"}


@dataclass(kw_only=True, eq=False)
class CodeAgent(PairAgent):
    """See agents/base.py for the protocol.

    Args:
        env: what runs the code; asked whether it runs the language, if it can say.
        tools_script: source of the script that the environment loads before the policy's first
            code; None: there is none.
        host_tools: def lines and docstrings of the functions of sandbox.host_tools; None: there are
            none.
        observation_role: role of the message that carries the output. assistant: no message, the
            text goes into the policy's own one, and its turn goes on.
        language: what the policy writes between the tags.
        show_tools: what of sandbox.tools the system prompt shows: all, or def lines and docstrings,
            which is all that it shows of sandbox.host_tools.

    Raises:
        ValueError: the environment cannot run the language, or the script is not in it; names
            the argument.
    """

    acts = ("code",)
    tools_script: str | None = None
    host_tools: str | None = None
    observation_role: Literal["user", "tool", "assistant"] = "user"
    language: Literal["python", "bash", "node"] = "python"
    show_tools: Literal["source", "signatures", "no"] = "source"

    def __post_init__(self) -> None:
        require_language = getattr(self.env, "require_language", None)
        if require_language is not None:
            require_language(self.language)
        script, hosted = self.tools_script, self.host_tools
        if self.show_tools == "no":
            script = hosted = None
        if (script or hosted) and self.language != "python":
            raise ValueError(
                "language: the functions of sandbox.tools and sandbox.host_tools are Python's, got "
                f"{self.language!r}; with show_tools = 'no' the script is run and not shown"
            )
        if self.system_prompt is None:
            self.system_prompt = PROMPT.format(
                language=LANGUAGES[self.language],
                open=self.open_tag,
                close=self.close_tag,
                prefix=self.answer_prefix,
            )
            self.system_prompt += self.talk(self.open_tag, self.answer_prefix)
        if script and self.show_tools == "signatures":
            script = signatures(script)
        self.system_prompt = with_functions(self.system_prompt, script, hosted)

    def act(self, body: str, task: Task) -> Action:
        """The code, without the newlines around it.

        >>> agent, task = CodeAgent(), Task(id="", messages=(), spec={})
        >>> agent.parse("<code>print(6*7)</code>", task)
        RunCode(code='print(6*7)', language='python')
        >>> agent.parse("Answer: 42", task)
        Finish(answer='42')
        >>> agent.parse("forty-two", task)
        Finish(answer=None)
        """
        return RunCode(body.strip("\n"), self.language)

    def observe(self, action: Action, observation: Observation) -> Sequence[Message] | str:
        """The observation as one chat message, or as text of the policy's own message."""
        if isinstance(action, Say):
            return super().observe(action, observation)
        content, role = self.shown(observation), self.observation_role
        return content if role == "assistant" else [{"role": role, "content": content}]


def with_functions(prompt: str, *shown: str | None) -> str:
    """A prompt, and after it the functions that code may call."""
    functions = "\n".join(text.strip() for text in shown if text)
    return f"{prompt}\n{TOOLS_PROMPT.format(tools=functions)}".strip() if functions else prompt


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

"""Code as action: the policy writes code between two tags, reads its output, then answers.

The idea is CodeAct's (arXiv:2402.01030); tags, prompt, examples and answer form are options.
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
        env: the environment. If it has a method require_language, that checks `language`.
        tools_script: source of the script that sessions run before the policy's first code, or
            None.
        host_tools: signatures and docstrings of the functions of sandbox.host_tools, or None.
        observation_role: role of the message with the output. assistant: no message; the output
            is appended to the policy's own message, which continues.
        language: language of the code between the tags.
        show_tools: whether the system prompt shows the source of sandbox.tools, its signatures and
            docstrings, or nothing. Of sandbox.host_tools it shows signatures and docstrings.

    Raises:
        ValueError: the environment cannot run the language, or sandbox.tools is in another one.
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
        script, host_tools = self.tools_script, self.host_tools
        if self.show_tools == "no":
            script = host_tools = None
        if (script or host_tools) and self.language != "python":
            raise ValueError(
                "language: expected 'python', the language of sandbox.tools and sandbox.host_tools,"
                f" got {self.language!r}. With show_tools = 'no' the script runs but is not shown"
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
        self.system_prompt = with_functions(self.system_prompt, script, host_tools)

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
        """The output as one chat message, or as text of the policy's own message."""
        if isinstance(action, Say):
            return super().observe(action, observation)
        content, role = self.format_output(observation), self.observation_role
        return content if role == "assistant" else [{"role": role, "content": content}]


def with_functions(prompt: str, *sources: str | None) -> str:
    """Append to a prompt the functions that code may call."""
    functions = "\n".join(text.strip() for text in sources if text)
    return f"{prompt}\n{TOOLS_PROMPT.format(tools=functions)}".strip() if functions else prompt


def signatures(source: str) -> str:
    r'''Signatures and docstrings of the public functions of a script.

    >>> signatures("""def f(a: int, b=2) -> str:
    ...     'Says it.'
    ...     return str(a * b)""")
    'def f(a: int, b=2) -> str:\n    """Says it."""'
    '''
    blocks = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            line = f"def {node.name}({ast.unparse(node.args)}){returns}:"
            doc = ast.get_docstring(node)
            blocks.append(line + (f'\n    """{doc}"""' if doc else " ..."))
    return "\n".join(blocks)

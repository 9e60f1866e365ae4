"""Code as action: the policy writes code between two tags, sees what it prints, then answers.

The idea is CodeAct's (arXiv:2402.01030); tags, prompt, examples and answer form are the user's.
"""

from __future__ import annotations

import ast
from typing import Any, Literal

from agentgrpo.actions import Action, Message, Observation, RunCode
from agentgrpo.agents.text import AfterMalformed, PairAgent, Shots, Tag, Template

PROMPT = (
    "Solve the problem with {language}. Write code between {open} and {close}; you will see what "
    "it prints. Then reply with: {prefix} NUMBER"
)
TOOLS_PROMPT = "These functions are loaded already; call them without importing them:\n{tools}"
LANGUAGES = {"python": "Python", "bash": "bash", "node": "JavaScript"}


class CodeAgent(PairAgent):
    """See agents/base.py for the protocol.

    Args:
        env: what runs the code; asked whether it runs the language, if it can say.
        tools_script: source of the script that the environment loads before the policy's first
            code; None: there is none.
        system_prompt: None: what the agent says of itself, and asks for a number; "" says nothing.
        shots: worked examples, each a list of messages, shown before the task.
        open_tag: begins the code.
        close_tag: ends the code, and the turn.
        observation: how the output is shown; {output} is replaced by it.
        observation_role: role of the message that carries the output. assistant: no message, the
            text goes into the policy's own one, and its turn goes on.
        answer_prefix: a reply that has this text and no code ends the rollout; what follows is the
            answer. "": the whole reply is.
        after_malformed: what becomes of a turn with one tag but not the other: the policy is told
            and goes on ("tell"), or the rollout ends there without an answer.
        language: what the policy writes between the tags.
        show_tools: what of sandbox.tools the system prompt shows: all, or def lines and docstrings.

    Raises:
        ValueError: the environment cannot run the language, or the script is not in it; names
            the argument.
    """

    acts = ("code",)

    def __init__(
        self,
        env: Any = None,
        tools_script: str | None = None,
        *,
        system_prompt: str | None = None,
        shots: Shots = (),
        open_tag: Tag = "<code>",
        close_tag: Tag = "</code>",
        observation: Template = "{output}",
        observation_role: Literal["user", "tool", "assistant"] = "user",
        answer_prefix: str = "Answer:",
        after_malformed: AfterMalformed = "tell",
        language: Literal["python", "bash", "node"] = "python",
        show_tools: Literal["source", "signatures", "no"] = "source",
    ) -> None:
        require_language = getattr(env, "require_language", None)
        if require_language is not None:
            require_language(language)
        if system_prompt is None:
            named = {"language": LANGUAGES[language], "prefix": answer_prefix}
            system_prompt = PROMPT.format(open=open_tag, close=close_tag, **named)
        if tools_script and show_tools != "no":
            if language != "python":
                raise ValueError(
                    f"language: the functions of sandbox.tools are Python's, got {language!r}; "
                    "with show_tools = 'no' the script is run and not shown"
                )
            shown = tools_script if show_tools == "source" else signatures(tools_script)
            tools = TOOLS_PROMPT.format(tools=shown.strip())
            system_prompt = f"{system_prompt}\n{tools}".strip()
        super().__init__(
            system_prompt,
            shots,
            after_malformed,
            open_tag=open_tag,
            close_tag=close_tag,
            answer_prefix=answer_prefix,
            observation=observation,
        )
        self._role, self._language = observation_role, language

    def act(self, body: str) -> Action:
        """The code, without the newlines around it.

        >>> agent = CodeAgent()
        >>> agent.parse("<code>print(6*7)</code>")
        RunCode(code='print(6*7)', language='python')
        >>> agent.parse("Answer: 42")
        Finish(answer='42')
        >>> agent.parse("forty-two")
        Finish(answer=None)
        """
        return RunCode(body.strip("\n"), self._language)

    def observe(self, action: Action, observation: Observation) -> list[Message] | str:
        """The observation as one chat message, or as text of the policy's own message."""
        content = self.told(observation)
        return content if self._role == "assistant" else [{"role": self._role, "content": content}]


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

"""A Python console at which the policy types: one line per turn, all in one assistant message.

The message starts with Python's banner and a prompt (not sampled). The policy samples up to a
newline; the terminal's output and the next prompt are appended to the same message. So the message
reads like a terminal session, and each line has its own tokens and reward (envs/console.py).

A line ends at its first newline: what a merged token contains after it stays in the message but is
not typed. The space at the end of a prompt is left to the policy and not typed either: tokenizers
merge it with the following word, so after a space given as a token of its own the policy could not
sample the words that it has seen after prompts.

If there is a user, `ask_user("...")` at a prompt closes the message. The user's reply follows as a
user message, and the policy's next message starts with a prompt again.
"""

from __future__ import annotations

import ast
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from agentgrpo.actions import (
    Action,
    Finish,
    Malformed,
    Message,
    Observation,
    RunCode,
    Say,
    is_submission,
)
from agentgrpo.agents.code import with_functions
from agentgrpo.agents.tagged_text import TextAgent
from agentgrpo.types import Task

PROMPT = (
    "You are now operating as a stateful Python REPL environment. You can use it as memory buffer "
    "and scratch pad as a goal-seeking agent. Write thoughts as # comments. When you know the "
    "answer, call submit_final_answer(answer)."
)
ASK = "ask_user"
TALK = f' To ask the user, type {ASK}("...").'
PROMPTS = (">>> ", "... ")
NOT_ASKED = f"TypeError: {ASK} takes one text in quotes, alone on its line\n{PROMPTS[0]}"


@dataclass(kw_only=True, eq=False)
class ReplAgent(TextAgent):
    """See agents/base.py for the protocol.

    Args:
        banner: the terminal's output before its first prompt. None: Python's own two lines.
        host_tools: signatures and docstrings of the functions of sandbox.host_tools, which the
            system prompt shows, or None.
    """

    acts = ("lines",)
    home = "console"
    banner: str | None = None
    host_tools: str | None = None

    def __post_init__(self) -> None:
        if self.system_prompt is None:
            self.system_prompt = PROMPT + TALK if self.has_user else PROMPT
        self.system_prompt = with_functions(self.system_prompt, self.host_tools)

    @property
    def stop(self) -> tuple[str, ...]:
        return ("\n",)

    def prefill(self, task: Task) -> str:
        banner = python_banner() if self.banner is None else self.banner
        return banner + PROMPTS[0].rstrip()

    def read(self, text: str, task: Task) -> Action:
        r"""The line up to its newline, or the whole text if the policy ended its message.

        >>> agent, task = ReplAgent(), Task(id="", messages=(), spec={})
        >>> agent.parse(" print(1)\n\n", task)
        RunCode(code='print(1)', language='python')
        >>> agent.parse("  ", task)
        Finish(answer=None)
        """
        line, newline, _ = text.removeprefix(" ").partition("\n")
        if self.has_user and line.startswith(f"{ASK}("):
            question = _question(line)
            return Malformed(NOT_ASKED) if question is None else Say(question)
        if not newline and not line.strip():
            return Finish(None)
        return RunCode(line, submits=is_submission(line))

    def observe(self, action: Action, observation: Observation) -> Sequence[Message] | str:
        """The terminal's output up to the next prompt, without the prompt's space.

        A prompt is added if the text does not end with one (it was cut, or the line was not typed).
        """
        if isinstance(action, Say):
            prompt = {"role": "assistant", "content": PROMPTS[0].rstrip()}
            return [{"role": "user", "content": observation.text}, prompt]
        text = observation.text
        if text.endswith(PROMPTS[0]) or text == PROMPTS[1]:  # only alone: "... " also marks a cut
            return text[:-1]
        return text + "\n" * bool(text and not text.endswith("\n")) + PROMPTS[0].rstrip()


def _question(line: str) -> str | None:
    """The argument of ask_user(); None if the line is not a call with one string literal."""
    try:
        text = ast.literal_eval(line.removeprefix(ASK))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return text if isinstance(text, str) else None


def python_banner() -> str:
    """The two lines that this Python prints when it starts interactively."""
    build = " ".join(sys.version.split())
    more = 'Type "help", "copyright", "credits" or "license" for more information.'
    return f"Python {build} on {platform.system().lower()}\n{more}\n"

"""A Python console that the policy types at: one line a turn, all in one assistant message.

The message begins with Python's banner and a prompt (given, not sampled); the policy samples up to
a newline; what the terminal shows then, and the next prompt, is put into the same message. So the
policy's message reads like a terminal session, and every line has its own tokens and reward
(envs/console.py). A line ends at its first newline: what a merged token holds behind it stays in
the message and is not typed. The space at the end of a prompt is left to the policy and not typed
either: tokenizers join it to the word behind it, so that a policy that was given the space alone
could not write the words that it has seen at prompts before.

Where there is a user, `ask_user("...")` at a prompt closes the message; the user's reply follows as
a message of theirs, and then the policy's next one, which begins with a prompt again.
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
        banner: what the terminal shows before its first prompt. None: Python's own two lines.
        host_tools: def lines and docstrings of the functions of sandbox.host_tools, shown after the
            prompt; None: there are none.
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
        """The end of a line."""
        return ("\n",)

    def prefill(self, task: Task) -> str:
        """The banner and the first prompt, but for its space."""
        banner = python_banner() if self.banner is None else self.banner
        return banner + PROMPTS[0].rstrip()

    def read(self, text: str, task: Task) -> Action:
        r"""The line up to its newline. Without one the policy ended its message: its last line.

        >>> agent, task = ReplAgent(), Task(id="", messages=(), spec={})
        >>> agent.parse(" print(1)\n\n", task)
        RunCode(code='print(1)', language='python')
        >>> agent.parse("  ", task)
        Finish(answer=None)
        """
        line, newline, _ = text.removeprefix(" ").partition("\n")
        if self.has_user and line.startswith(f"{ASK}("):
            asked = _asked(line)
            return Malformed(NOT_ASKED) if asked is None else Say(asked)
        if not newline and not line.strip():
            return Finish(None)
        return RunCode(line, submits=is_submission(line))

    def observe(self, action: Action, observation: Observation) -> Sequence[Message] | str:
        """What the terminal shows until it waits for the next line, but for the prompt's space.

        A text that does not end with a prompt (it was cut, or the line was not typed) gets one.
        """
        if isinstance(action, Say):
            prompt = {"role": "assistant", "content": PROMPTS[0].rstrip()}
            return [{"role": "user", "content": observation.text}, prompt]
        text = observation.text
        if text.endswith(PROMPTS[0]) or text == PROMPTS[1]:  # the mark of a cut ends so too
            return text[:-1]
        return text + "\n" * bool(text and not text.endswith("\n")) + PROMPTS[0].rstrip()


def _asked(line: str) -> str | None:
    """What a line says to the user; None: it is no call with one text in quotes."""
    try:
        text = ast.literal_eval(line.removeprefix(ASK))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return text if isinstance(text, str) else None


def python_banner() -> str:
    """What this Python shows when it starts interactively."""
    build = " ".join(sys.version.split())
    more = 'Type "help", "copyright", "credits" or "license" for more information.'
    return f"Python {build} on {platform.system().lower()}\n{more}\n"

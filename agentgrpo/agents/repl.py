"""A Python console that the policy types at: one line a turn, all in one assistant message.

The message begins with Python's banner and a prompt (given, not sampled); the policy samples up to
a newline; what the terminal shows then, and the next prompt, is put into the same message. So the
policy's message reads like a terminal session, and every line has its own tokens and reward
(envs/console.py). A line ends at its first newline: what a merged token holds behind it stays in
the message and is not typed. The space at the end of a prompt is left to the policy and not typed
either: tokenizers join it to the word behind it, so that a policy that was given the space alone
could not write the words that it has seen at prompts before.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass

from agentgrpo.actions import Action, Finish, Observation, RunCode
from agentgrpo.agents.code import with_functions
from agentgrpo.agents.text import TextAgent
from agentgrpo.types import Task

PROMPT = (
    "You are now operating as a stateful Python REPL environment. You can use it as memory buffer "
    "and scratch pad as a goal-seeking agent. Write thoughts as # comments. When you know the "
    "answer, call submit_final_answer(answer)."
)
PROMPTS = (">>> ", "... ")


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
        if self.host_tools:
            told = PROMPT if self.system_prompt is None else self.system_prompt
            self.system_prompt = with_functions(told, self.host_tools)

    @property
    def stop(self) -> tuple[str, ...]:
        """The end of a line."""
        return ("\n",)

    def prompt(self, task: Task) -> str:
        """What the console is for."""
        return PROMPT

    def prefill(self, task: Task) -> str:
        """The banner and the first prompt, but for its space."""
        banner = python_banner() if self.banner is None else self.banner
        return banner + PROMPTS[0].rstrip()

    def parse(self, text: str) -> Action:
        r"""The line up to its newline. Without one the policy ended its message: its last line.

        >>> agent = ReplAgent()
        >>> agent.parse(" print(1)\n\n")
        RunCode(code='print(1)', language='python')
        >>> agent.parse("  ")
        Finish(answer=None)
        """
        line, newline, _ = text.removeprefix(" ").partition("\n")
        return RunCode(line) if newline or line.strip() else Finish(None)

    def observe(self, action: Action, observation: Observation) -> str:
        """What the terminal shows until it waits for the next line, but for the prompt's space."""
        text = observation.text
        return text[:-1] if text.endswith(PROMPTS) else text


def python_banner() -> str:
    """What this Python shows when it starts interactively."""
    build = " ".join(sys.version.split())
    more = 'Type "help", "copyright", "credits" or "license" for more information.'
    return f"Python {build} on {platform.system().lower()}\n{more}\n"

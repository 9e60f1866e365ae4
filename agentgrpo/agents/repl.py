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
from collections.abc import Sequence

from agentgrpo.actions import Action, Finish, Message, Observation, RunCode, Schema
from agentgrpo.config import AgentConfig
from agentgrpo.types import Task

PROMPT = (
    "You are now operating as a stateful Python REPL environment. You can use it as memory buffer "
    "and scratch pad as a goal-seeking agent. Write thoughts as # comments. When you know the "
    "answer, call submit_final_answer(answer)."
)
PROMPTS = (">>> ", "... ")


class ReplAgent:
    """See agents/base.py for the protocol and AgentConfig for the settings."""

    stop = ("\n",)

    def __init__(self, config: AgentConfig) -> None:
        system = PROMPT if config.system_prompt is None else config.system_prompt
        self._head: list[Message] = [{"role": "system", "content": system}] if system else []
        self._head += [message.model_dump() for shot in config.shots for message in shot]
        self._banner = python_banner() if config.banner is None else config.banner

    def messages(self, task: Task) -> list[Message]:
        """System prompt, worked examples, then the task's own messages."""
        return [*self._head, *task.messages]

    def prefill(self, task: Task) -> str:
        """The banner and the first prompt, but for its space."""
        return self._banner + PROMPTS[0].rstrip()

    def tools(self, task: Task) -> Sequence[Schema]:
        """None: the console is the only tool."""
        return ()

    def parse(self, text: str) -> Action:
        r"""The line up to its newline. Without one the policy ended its message: its last line.

        >>> agent = ReplAgent(AgentConfig(kind="repl"))
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

"""Code as action: the policy writes Python between two tags, sees what it prints, then answers.

The idea is CodeAct's (arXiv:2402.01030); tags, prompt, examples and answer form are the user's.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentgrpo.agents.base import Action, Finish, Malformed, Message, RunCode, Schema
from agentgrpo.config import AgentConfig
from agentgrpo.envs.base import Observation
from agentgrpo.types import Task


class CodeAgent:
    """See agents/base.py for the protocol and AgentConfig for the settings."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self.stop = (config.close_tag,)
        self._head = [
            {"role": "system", "content": config.system_prompt},
            *(message.model_dump() for shot in config.shots for message in shot),
        ]

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
        RunCode(code='print(6*7)')
        >>> agent.parse("Answer: 42")
        Finish(answer='42')
        >>> agent.parse("forty-two")
        Finish(answer=None)
        """
        c = self._config
        _, opened, rest = text.partition(c.open_tag)
        if opened:
            code, closed, _ = rest.partition(c.close_tag)
            if not closed:
                return Malformed(f"Error: {c.open_tag} without {c.close_tag}")
            return RunCode(code.strip("\n"))
        if c.close_tag in text:
            return Malformed(f"Error: {c.close_tag} without {c.open_tag}")
        _, prefixed, answer = text.partition(c.answer_prefix)
        return Finish(answer.strip() if prefixed else None)

    def observe(self, action: Action, observation: Observation) -> list[Message]:
        """The observation as one chat message."""
        content = self._config.observation.replace("{output}", observation.text)
        return [{"role": self._config.observation_role, "content": content}]

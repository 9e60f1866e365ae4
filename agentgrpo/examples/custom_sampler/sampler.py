"""A custom sampler: the policy calls functions while it thinks.

    agentgrpo train CONFIG rollout.sampler=agentgrpo.examples.custom_sampler.sampler:ThinkingCalls

The policy writes <think>... <fn>weather("Seattle")</fn>, is stopped at the closing tag, reads
<fn_results> or <fn_error>, continues in the same message and ends with <answer>...</answer>. This
is the example of TRL's issue 2723. agent.kind = "inline" does the same with less custom code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentgrpo.agents.inline import read_python, signature
from agentgrpo.config import RolloutConfig
from agentgrpo.envs.calculator import calculate
from agentgrpo.envs.tools import Tool, Toolset
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rollout.custom import RolloutParams
from agentgrpo.rollout.stream import Stream, Streams
from agentgrpo.types import Rollout, Task

WEATHER = {"Seattle": "rain, 11 degrees", "Oslo": "snow, -4 degrees"}


def weather(city: str) -> str:
    """The weather in a city, now."""
    if city not in WEATHER:
        raise LookupError(f"no weather station in {city!r}")
    return WEATHER[city]


class ThinkingCalls:
    """A RolloutSampler (agentgrpo/rollout/custom.py)."""

    def __init__(self, chat: ChatTemplate, config: RolloutConfig) -> None:
        self.tools = Toolset([Tool(weather), Tool(calculate)])
        self.known = {schema["function"]["name"]: schema for schema in self.tools.schemas}
        self.streams = Streams(chat, config, tags=("</fn>", "</answer>"))

    def rollout(
        self, engine: Any, tasks: Sequence[Task], n: int, params: RolloutParams
    ) -> list[list[Rollout]]:
        return self.streams.play(engine, tasks, n, params, self.on_token, self.messages)

    def messages(self, task: Task) -> list[dict[str, Any]]:
        """A task's messages after a system message with the functions and the answer's format."""
        functions = "\n".join(map(signature, self.tools.schemas))
        system = (
            f"Think between <think> and </think>. While you think, you may call a function, as "
            f'in <fn>weather("Seattle")</fn>:\n{functions}\nEnd with <answer>...</answer>.'
        )
        return [{"role": "system", "content": system}, *map(dict, task.messages)]

    def on_token(self, stream: Stream, token: int) -> None:
        """Execute a call at its closing tag, and end the rollout at the answer's closing tag."""
        if stream.tag == "</answer>":
            _, start_tag, answer = stream.text.rpartition("<answer>")
            stream.finish(answer.partition("</answer>")[0].strip() if start_tag else None)
        elif stream.tag == "</fn>":
            tag, text = self.call(stream.text.rpartition("<fn>")[2].partition("</fn>")[0])
            stream.rollout.stats["tool_calls"] += 1
            stream.rollout.stats["tool_errors"] += tag == "fn_error"
            stream.inject(f"\n<{tag}>\n{text}\n</{tag}>\n")

    def call(self, text: str) -> tuple[str, str]:
        """Execute a call such as `weather("Oslo")`, whose arguments are literals."""
        try:
            result = self.tools.call(read_python(text.strip(), self.known))
        except ValueError as error:
            return "fn_error", str(error)
        return ("fn_error" if result.error else "fn_results"), result.text

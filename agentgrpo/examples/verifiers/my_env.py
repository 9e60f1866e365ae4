"""An environment of the package verifiers: word problems with a calculator as a tool."""

from collections.abc import Iterator

import verifiers.v1 as vf

from agentgrpo.data import word_problems
from agentgrpo.envs.calculator import calculate
from agentgrpo.rewards.answers import last_number

CALL = '<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{}"}}}}\n</tool_call>'
SHOTS = [  # needed since SmolLM2's template does not show tools; other models need none
    ("Sue has 12 bags with 31 pens each and finds 14 more. How many?", "12*31+14", "386"),
    ("What is 20 * 11 - 7?", "20*11-7", "213"),
]


class ProblemData(vf.TaskData):
    """Data of a task. `answer` is only for the rewards."""

    answer: str


class Problem(vf.Task[ProblemData]):
    """A task with its rewards."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 if the last message is the policy's and its last number is right."""
        last = trace.messages[-1]
        text = last.content if last.role == "assistant" and isinstance(last.content, str) else ""
        return float(last_number(text) == int(self.data.answer))

    @vf.reward(weight=0.1)
    async def called(self, trace: vf.Trace) -> float:
        return float(any(m.role == "assistant" and m.tool_calls for m in trace.messages))


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    """The tools, in a process that all rollouts share."""

    TOOL_PREFIX = None

    @vf.tool
    def calculate(self, expression: str) -> str:
        """Calculate an arithmetic expression, such as 12 * (31 + 14)."""
        return calculate(expression)


class ProblemsConfig(vf.TasksetConfig):
    """Settings: env.options.args, and env.options.heldout for the held-out tasks."""

    split: str = "train"
    size: int = 400


class Problems(vf.Taskset[Problem, ProblemsConfig]):
    """The tasks."""

    def load(self) -> Iterator[Problem]:
        """Yield questions after two worked examples."""
        shots: list[vf.Message] = []
        for question, expression, number in SHOTS:
            shots += [
                vf.UserMessage(content=question),
                vf.AssistantMessage(content=CALL.format(expression)),
                vf.ToolMessage(tool_call_id="", content=number),
                vf.AssistantMessage(content=number),
            ]
        for index in range(self.config.size):
            problem = word_problems.task(self.config.split, index)
            question_message = vf.UserMessage(content=problem.messages[-1]["content"])
            data = ProblemData(
                prompt=[*shots, question_message],
                system_prompt="Use the calculator. Then reply with the number alone.",
                answer=str(problem.spec["answer"]),
            )
            yield Problem(data, self.config.task)

    @classmethod
    def toolsets(cls, config: ProblemsConfig) -> list[vf.Toolset]:
        return [Calculator(vf.SharedToolsetConfig())]


__all__ = ["Problems"]

if __name__ == "__main__":  # verifiers starts the tool server with this
    Calculator.run()

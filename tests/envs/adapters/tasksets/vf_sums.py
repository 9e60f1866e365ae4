"""A taskset of verifiers: sums, with a tool if asked for; each is judged by itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumConfig(vf.TaskConfig):
    tools: bool = False
    broken: str = ""


class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class Sum(vf.Task[SumData, vf.State, SumConfig]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.config.broken == "machine":
            raise vf.SandboxError("no machine")

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        if self.config.broken == "reward":
            raise KeyError("gold")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def asked(self, trace: vf.Trace) -> float:
        return float(any(m.role == "tool" for m in trace.messages))

    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())] if config.tools else []


class SumsConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()
    first: int = 0
    size: int | None = 6


class Sums(vf.Taskset[Sum, SumsConfig]):
    def __init__(self, config: SumsConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.size is None

    def load(self) -> Iterator[Sum]:
        first, size = self.config.first, self.config.size
        for i in count(first) if size is None else range(first, first + size):
            asked = SumData(
                prompt=f"Add {i} and 4", system_prompt="Only the number.", answer=str(i + 4)
            )
            yield Sum(asked, self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()

"""A taskset with an environment of its own: it says higher or lower until a number is found."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class Guess(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    def load(self) -> Iterator[vf.Task]:
        yield vf.Task(vf.TaskData(name="a number", prompt=None), self.config.task)


class GuessingConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=5)
    judged_by: str = ""


class Guessing(vf.Env[GuessingConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.player.trainable = not self.config.judged_by

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as player:
            said, tries = await player.turn("Guess."), 1
            while not said.terminated and said.last_reply != "7":
                hint = "higher" if int(said.last_reply) < 7 else "lower"
                said, tries = await player.turn(hint), tries + 1
            player.trace.info["tries"] = 0 if said.terminated else tries

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        (trace,) = episode.traces
        tries = trace.info["tries"]
        trace.record_reward("few_tries", 1 / tries if tries else 0.0)


__all__ = ["Guess", "Guessing"]

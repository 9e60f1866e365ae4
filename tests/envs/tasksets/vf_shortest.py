"""An environment that compares attempts: the one that says least is paid more."""

from __future__ import annotations

import verifiers.v1 as vf
from verifiers.v1.envs.best_of_n import BestOfNEnv


class Shortest(BestOfNEnv):
    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        least = min(len(trace.last_reply) for trace in episode.traces)
        for trace in episode.traces:
            trace.record_reward("shortest", len(trace.last_reply) == least, weight=0.5)


__all__ = ["Shortest"]

"""mini-swe-agent, unmodified, at repair tasks: agent.kind = "program" (docs/environments.md).

Its commands run in a session of the sandbox; its answer is what they have changed.
"""

from __future__ import annotations

import asyncio
import os
from functools import cache
from pathlib import Path
from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

from agentgrpo.actions import RunCode
from agentgrpo.envs.repair import RepairEnv, RepairEpisode
from agentgrpo.sandbox import SandboxPool
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.types import Task


class Repository(LocalEnvironment):  # type: ignore[misc]
    """Where its commands run."""

    def __init__(self, episode: RepairEpisode) -> None:
        super().__init__()
        self.episode = episode

    def execute(self, action: Any, cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        told = self.episode.step(RunCode(action.get("command", ""), "bash"))
        output = {"output": told.text, "returncode": int(told.failed), "exception_info": ""}
        self._check_finished(output)
        return output


@cache
def repositories() -> tuple[RepairEnv, dict[str, Any]]:
    rows = [row for path in os.environ["REPAIR_TASKS"].split() for row in read_lines(Path(path))]
    return RepairEnv(SandboxPool(min_idle=0, zygotes=1), 60.0), {row["id"]: row for row in rows}


async def agent(task: Any, *, base_url: str, api_key: str, model: str) -> str:
    def work() -> str:
        env, rows = repositories()
        episode = env.reset(Task(id=task["id"], messages=(), spec=rows[task["id"]]))
        chat = LitellmModel(
            model_name=f"openai/{model}", cost_tracking="ignore_errors",
            model_kwargs={"api_base": base_url, "api_key": api_key, "drop_params": True},
        )  # fmt: skip
        asked = {"system_template": "You repair packages.", "instance_template": "{{task}}"}
        try:
            DefaultAgent(chat, Repository(episode), **asked, step_limit=30).run(task["question"])
            return str(episode.changed())
        finally:
            episode.close()

    return await asyncio.to_thread(work)

"""What a run is made of: one holder, filled in the order in which a run begins."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgrpo.actions import Model
from agentgrpo.agents.base import Agent
from agentgrpo.agents.program import ProgramAgent
from agentgrpo.config import TrainConfig
from agentgrpo.data.tasks import Tasks
from agentgrpo.engine.agreement import Probes
from agentgrpo.envs.base import Environment
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.models.models import SavedAdapter
from agentgrpo.programs.launch import Launcher
from agentgrpo.records import checkpoint
from agentgrpo.records.metrics import RunLog
from agentgrpo.rewards.scoring import Scoring
from agentgrpo.rollout.custom import RolloutSampler
from agentgrpo.rollout.sampler import AnySampler
from agentgrpo.sandbox import SandboxPool
from agentgrpo.support import parallel
from agentgrpo.train.progress import Progress
from agentgrpo.train.resolve import Resolved
from agentgrpo.types import Task

if TYPE_CHECKING:  # vLLM and torch: seconds, for after all that can fail quickly
    from agentgrpo.engine.engine import Engine
    from agentgrpo.learn.learner import Learner


@dataclass(kw_only=True, eq=False, repr=False)
class Parts:
    """The parts of a run. A part without a value in `__init__` is absent before its stage.

    Each stage registers in `undo` how to close what it has opened.
    """

    # prepare.prepare_run(): checked before a model is loaded
    undo: ExitStack
    resolved: Resolved
    """What the names in the config mean."""
    model: str
    """Its directory or hub name."""
    adapter: SavedAdapter | None
    """What the model is to be played with, or what training goes on from."""
    played: str
    """The directory or hub name of what plays: the model, or an adapter to it."""
    pool: SandboxPool | None
    """None where the environment asks for none: such a run needs no machine that isolates code."""
    env: Environment
    agent: Agent
    launcher: Launcher | None
    """Of an agent that is a program: what starts it, if its environment does not."""
    chat: ChatTemplate
    reward: Scoring
    heldout: list[Task]
    progress: Progress
    user_sampler: RolloutSampler | None
    """config.rollout.sampler, if one is named."""
    models: Mapping[str, Model]
    """Who may be asked to speak in a second role, or to judge."""
    teacher: str | None
    """The directory or hub name of another model that teaches."""
    # build.prepare(): what is trained on
    tasks: Tasks = field(init=False)
    resumed: Path | None = field(init=False)
    """The checkpoint that training continues from."""
    # build.start_engine(): what plays
    engine: Engine = field(init=False)
    sampler: AnySampler = field(init=False)
    # build.build(): what learns
    learner: Learner = field(init=False)
    probes: Probes = field(init=False)
    agreement_threshold: float = field(init=False)
    log: RunLog = field(init=False)

    @property
    def program(self) -> ProgramAgent | None:
        """The agent, if it is a program, which plays its own turns."""
        return self.agent if isinstance(self.agent, ProgramAgent) else None

    @property
    def jail(self) -> dict[str, Any] | None:
        """What code is isolated by, for a run's records; None: nothing needs it."""
        return None if self.pool is None else self.pool.describe()

    def close(self) -> None:
        """Close what was opened, the last first, each whatever the others raise. Hold nothing:
        vLLM keeps a traceback of its own imports, whose frames hold those that called it, and these
        hold this.
        """
        undo = self.undo
        vars(self).clear()
        undo.close()

    def save(self, config: TrainConfig) -> Path:
        """Write a checkpoint of everything as it stands; returns where."""

        def write(folder: Path) -> None:
            self.learner.policy.save(folder)
            if parallel.rank() == 0:
                self.chat.save(folder)
            self.learner.save_state(
                folder / checkpoint.STATE,
                tasks=self.tasks.state_dict(),
                log_offsets=self.log.offsets(),
            )

        step = self.learner.step_count
        if parallel.rank() == 0:
            return checkpoint.save(config.out_dir, step, write, keep=config.keep_checkpoints)
        write(config.out_dir)  # its part in gathering what rank 0 writes; nothing is written here
        return checkpoint.folder_of(config.out_dir, step)

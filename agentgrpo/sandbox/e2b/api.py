"""``Sandbox``: E2B's SDK over local sessions. Change the import and the code goes on.

    from agentgrpo.sandbox import Sandbox          # was: from e2b_code_interpreter import Sandbox

What a local jail does not have (internet access, pausing, a public host name, terminals) raises
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
from agentgrpo.sandbox.isolation.guards import ProcessBound, public
from agentgrpo.sandbox.isolation.images import Image, get_image
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.isolation.template import Template, check_environment
from agentgrpo.sandbox.isolation.templates import find_template, has_data
from agentgrpo.sandbox.session.host_tools import HostTools
from agentgrpo.sandbox.session.interpreters import NAMES, language_of, outlived, start_context
from agentgrpo.sandbox.session.pool import SandboxPool
from agentgrpo.sandbox.session.program import text_decoder
from agentgrpo.sandbox.session.result import StepStatus
from agentgrpo.sandbox.session.session import Session

DEFAULT_TIMEOUT_S = 300.0
MIB = 1 << 20
LIMITS = Limits(
    session_s=86_400.0, timeout_s=300.0, cpu_s=86_400, memory_mib=1024, home_mib=512, tmp_mib=256,
    inodes=65_536, processes=256, open_files=1024, output_kib=16 << 10, output_max_mib=64,
    value_kib=1024, traceback_kib=64, steps=1_000_000,
)  # fmt: skip
"""Of a sandbox whose template has none. Those of training sessions are smaller."""
OnOutput = Callable[[OutputMessage], object]

CLOUD = ("pause", "beta_pause", "resume", "get_host", "get_metrics", "pty",
         "upload_url", "download_url")  # fmt: skip
"""What a sandbox of E2B's has besides."""
DEFAULT_TEMPLATE = "code-interpreter-v1"
"""E2B's name of the one that Sandbox.create() takes."""
_live: "WeakValueDictionary[str, Sandbox]" = WeakValueDictionary()
_snapshots: dict[str, tuple[Image, SandboxPool]] = {}
_pools: dict[tuple[str, Limits], SandboxPool] = {}
_pools_lock = threading.Lock()


def shared_pool(template: Template, limits: Limits, name: str = "") -> SandboxPool:
    """The pool of this process for a template (or those of that name) and limits, started at its
    first use.
    """
    with _pools_lock:
        key = (name or repr(template), limits)
        if key not in _pools:
            _pools[key] = SandboxPool(template=template, limits=limits)
        return _pools[key]


def _forget_pools() -> None:
    """In a process that was forked off: the pools are its parent's, as is whoever has the lock."""
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
    """An interpreter of a sandbox with a state of its own."""

    id: str
    language: str
    cwd: str


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """What is known of a sandbox."""

    sandbox_id: str
    template_id: str
    metadata: Mapping[str, str]
    started_at: float
    end_at: float


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot, by what Sandbox.create() takes."""

    snapshot_id: str


class SandboxPaginator(builtins.list[SandboxInfo]):
    """What Sandbox.list() gives: a list, and E2B's pages, of which there is one."""

    has_next = True

    def next_items(self) -> builtins.list[SandboxInfo]:
        """The page."""
        self.has_next = False
        return self


def _pool_for(template: str | Template | None, limits: Limits | None) -> SandboxPool:
    """The shared pool of a template. The default one is "data" where that can be had."""
    if template in (None, DEFAULT_TEMPLATE) and has_data():
        try:
            return shared_pool(find_template("data"), limits or LIMITS)
        except TemplateUnavailable as reason:
            warnings.warn(f"no template 'data', so none has numpy: {reason}", stacklevel=4)
    found = template if isinstance(template, Template) else find_template(template)
    return shared_pool(found, limits or found.limits or LIMITS)


def _images(image: str | Image, limits: Limits | None) -> SandboxPool:
    """The shared pool of all images with these limits."""
    base = get_image(image.name.partition("+")[0] if isinstance(image, Image) else image)
    return shared_pool(Template(image=base.name), limits or LIMITS, "image")


def not_supported(what: str) -> NotSupportedException:
    """The refusal of something that only E2B's cloud has."""
    return NotSupportedException(f"{what} is not supported by a local sandbox")


@public
class Sandbox(ProcessBound):
    """One sandbox: a session, its file system and its commands. ``Sandbox.create()`` makes it."""

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
        """A new sandbox.

        Args:
            template: a Template, the name of one ("data", "python", or one that was built by
                ``template build``), or None: "data" if the environment that runs this has
                IPython, else "python", the interpreter that runs this without packages.
            timeout: seconds until it is killed; set_timeout() starts anew.
            metadata: kept for get_info().
            envs: environment variables of all that runs in it.
            secure: there is no other way; False is taken for E2B's code.
            allow_internet_access: must be False; sessions have no network.
            image: the name of an image, whose files are the root directory; or a snapshot, whose
                snapshot_id may be given as template as well.
            limits: bounds on what it may use; None: the template's, or LIMITS.
            pool: take the session from this pool; its template and limits hold.
            host_tools: functions of this process that code in the sandbox may call by their names
                (HostTools has budget and cache). Python only.
            cloud: what only E2B's cloud has (network=...), which is refused. Arguments that say
                how to reach that cloud (boundary.CONNECTION: api_key, domain, proxy ...) are
                ignored by this and all methods, with one warning per process.

        Raises:
            SandboxUnavailable: this machine cannot isolate.
            RateLimitException: too many are in use.
        """
        if allow_internet_access or cloud:
            raise not_supported(", ".join(cloud) or "allow_internet_access=True")
        check_environment("envs", envs or {})
        if isinstance(template, str) and template in _snapshots:
            image, pool = _snapshots[template]
        pool = pool or (_pool_for(template, limits) if image is None else _images(image, limits))
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
            own = "bash" if session.places.image else "python"
            first = session if session.places.image else outlived(session)
            self._contexts[own] = self._contexts[own][0], first
            session.end_contexts = None if first is session else self._end_contexts
            self.set_timeout(timeout)
        except BaseException:
            session.close()
            raise
        _live[self.sandbox_id] = self

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Self:
        """A new sandbox; arguments and errors are those of Sandbox()."""
        return cls(*args, **kwargs)

    @classmethod
    def list(cls, **_: object) -> "SandboxPaginator":
        """The sandboxes of this process that have not ended."""
        return SandboxPaginator(
            sandbox.get_info()
            for made in _live.valuerefs()  # whatever other threads make or drop meanwhile
            if (sandbox := made()) is not None and sandbox.is_running()
        )

    @classmethod
    def connect(cls, sandbox_id: str, timeout: float | None = None, **_: object) -> "Sandbox":
        """A sandbox of this process, by its id.

        Raises:
            SandboxNotFoundException: there is none, or it has ended.
        """
        found = _live.get(sandbox_id)
        if found is None or not found.is_running():
            raise SandboxNotFoundException(f"no sandbox {sandbox_id!r} in this process")
        if timeout is not None:
            found.set_timeout(timeout)
        return found

    def _channels(self) -> Channels:
        channels = self._session.channels
        if channels is None or not self._session.alive:
            raise SandboxNotFoundException(f"sandbox {self.sandbox_id} is over")
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
        _begun: Callable[[Session], object] | None = None,
    ) -> Execution:
        """Run a cell in the default context of a language, or in context. If its interpreter ends
        (memory, output, os._exit), the error is E2B's "ContextRestarting": files and commands
        stay, and the next cell has a new interpreter. With an image, an end of bash ends the
        sandbox.

        Raises:
            TimeoutException: it ran for timeout seconds (the limits' timeout_s if None). Variables
                are kept if the code let itself be interrupted, files in any case.
            SandboxNotFoundException: the sandbox is over.
            InvalidArgumentException: language and context are both given, or timeout is nonsense.
        """
        session = self._session_for(language, context)
        if _begun is not None:
            _begun(session)
        decoders = (text_decoder(), text_decoder())

        def listen(stream: int, data: bytes) -> None:
            text = decoders[stream].decode(data, not data)
            if text and (listener := on_stderr if stream else on_stdout):
                listener(OutputMessage(text, time.time_ns(), bool(stream)))

        wanted = listen if on_stdout or on_stderr else None
        step = session.cell(code, timeout or None, env=envs, listener=wanted)
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
            raise InvalidArgumentException("give language or context, not both")
        self._channels()
        with self._lock:
            made, session = self._made(language_of(language) if context is None else context)
            if session is None or not session.alive:
                session = self._start_context(made)
            return session

    def _made(self, context: Context | str) -> tuple[Context, Session | None]:
        key = context if isinstance(context, str) else context.id
        with self._lock:
            if key not in self._contexts:
                raise NotFoundException(f"no context {key!r}")
            return self._contexts[key]

    def _start_context(self, made: Context) -> Session:
        self._channels()
        session = start_context(
            self._session, made.language, self._template, env=self._env, directory=made.cwd
        )
        if self._template.setup and made.id == "python":
            done = session.step(self._template.setup)
            if done.status is not StepStatus.OK:
                session.close()
                shown = done.error.traceback if done.error else done.detail
                raise SandboxException(f"the setup of template {self._template.name!r}: {shown}")
        with self._lock:
            if not self._closed:
                self._contexts[made.id] = made, session
                return session
        session.close()  # kill() did not find it
        raise SandboxNotFoundException(f"sandbox {self.sandbox_id} is over")

    def create_code_context(
        self, cwd: str | None = None, language: str | None = None, **_: object
    ) -> Context:
        """A further interpreter with a state of its own."""
        cwd = cwd or self._session.places.home
        made = Context(uuid.uuid4().hex[:12], language_of(language), cwd)
        self._start_context(made)
        return made

    def list_code_contexts(self) -> builtins.list[Context]:
        """The contexts: the default one of each language, started when it is used, and those made
        so far.
        """
        with self._lock:
            return [context for context, _ in self._contexts.values()]

    def remove_code_context(self, context: Context | str) -> None:
        """End a context, given itself or its id. A default one is started again when it is used."""
        found, session = self._made(context)
        if session is self._session:
            raise not_supported("an end of an image's default bash before its sandbox's")
        with self._lock:
            self._contexts.pop(found.id, None)
            if found.id in NAMES:
                self._contexts[found.id] = found, None
        if session is not None:
            session.close()

    def restart_code_context(self, context: Context | str) -> None:
        """A fresh interpreter instead of a context's."""
        self.remove_code_context(found := self._made(context)[0])
        self._start_context(found)

    def create_snapshot(self, name: str | None = None) -> SnapshotInfo:
        """Copy the files that it has changed of its image: Sandbox.create(snapshot_id) starts from
        them. Kept until this process ends, or under a name in the store of images.

        Raises:
            NotSupportedException: it has no image.
        """
        image = self._session.snapshot(name)
        _snapshots[image.name] = image, self._pool
        return SnapshotInfo(image.name)

    def set_timeout(self, timeout: float) -> None:
        """Kill the sandbox after so many seconds from now."""
        if not isinstance(timeout, (int, float)) or not 0 < timeout < 1e6:
            raise InvalidArgumentException(f"timeout: expected seconds above 0, got {timeout!r}")
        with self._lock:
            if self._closed:
                raise SandboxNotFoundException(f"sandbox {self.sandbox_id} is over")
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(timeout, self.kill)
            self._timer.daemon = True
            self._end_at = time.time() + timeout
            self._timer.start()

    def is_running(self) -> bool:
        """Whether it has not been killed and has not ended."""
        return self._session.alive and self._session.healthy()

    def get_info(self) -> SandboxInfo:
        """Its id, template, metadata and times."""
        image = self._session.places.image
        return SandboxInfo(
            self.sandbox_id,
            image.name if image else self._template.name,
            self._metadata,
            self._started,
            self._end_at,
        )

    def kill(self) -> bool:
        """End it and all that runs in it. False if that was so already."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            sessions = [session for _, session in self._contexts.values() if session is not None]
        self.commands.close()  # without the lock: a listener of a cell that runs may wait for it
        for session in (*sessions, self._session):
            session.close()
        self.files.close()
        return True

    def _end_contexts(self, status: StepStatus, detail: str) -> bool:
        """For the watchdog, which waits for no lock: another thread may be starting a context."""
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

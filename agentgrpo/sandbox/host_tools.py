"""Functions of the host that sessions call: an allow-list, checked data, a budget and a cache.

A session knows names and texts of them, nothing more. What it sends is a name and data
(guest/data.py); a name that is not on the list, or data that is spelled otherwise, breaks the
protocol and ends it. The function runs in this process, on a thread or on an event loop of its own,
and what it returns or raises goes back as data or as text.
"""

import asyncio
import builtins
import inspect
import json
import keyword
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, NamedTuple

from agentgrpo.sandbox.boundary import public
from agentgrpo.sandbox.errors import InvalidArgumentException, SandboxInfraError, printable
from agentgrpo.sandbox.guest.data import NotData, read, spell
from agentgrpo.sandbox.guest.wire import Malformed
from agentgrpo.usercode import event_loop, waited

Function = Callable[..., Any]
Cached = Literal["no", "rollout", "run"]
LOOP = "host-tools"
MAX_TEXT = 2000
"""Characters of an exception's text."""
MAX_RUNNING = 1024
"""Calls under way at once, those included that nobody waits for any more."""
MAX_REFUSED = 1000
"""Calls over the budget in one step; the next one ends the session."""
LOOP_S = 1.0
"""How soon the event loop of the coroutines must answer; otherwise one of them blocks it."""
SECRET = re.compile(
    r"(key|token|secret|password|passwd|passphrase|pwd|credential|auth)s?$", re.IGNORECASE
)
"""How a word of a parameter's name ends that is likely to hold a secret."""
ADDRESS = re.compile(r"://[^/\s@]*:[^/\s@]+@")
"""An address with a password in it."""
CACHE_MIB = 256
SLICE_S = 0.05
"""How soon a wait for a function notices that its session was closed."""
LATE = "the host did not answer in time"

_serving: ContextVar[object] = ContextVar("serving", default=None)


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class HostBudget:
    """What calls of host functions may use. All must be positive.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """

    calls: int = 100
    """Of a rollout (or of a Sandbox)."""
    calls_per_step: int = 20
    """Of one step."""
    call_s: float = 10.0
    """Wall time of one call. The step's own limit goes on meanwhile, and ends it too."""
    seconds: float = 120.0
    """Wall time of all calls of a rollout."""
    argument_kib: int = 64
    """Size of the arguments of one call, as data."""
    answer_kib: int = 256
    """Size of what one call returns, as data."""
    total_kib: int = 8192
    """Size of arguments and answers of a rollout together."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds: Any = (int,) if field.type is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1e9:
                raise ValueError(
                    f"host_budget.{field.name}: expected a positive {kinds[-1].__name__}, "
                    f"got {value!r}"
                )


class HostCall(NamedTuple):
    """One call that was made: what a fork is told again without making it."""

    name: str
    arguments: bytes
    """As data: ``[positional, named]``."""
    kind: str
    """returned, raised, or refused: over the budget, and so not made (without its arguments)."""
    told: tuple[bytes, ...]
    """The data, or the exception's name and text."""
    seconds: float
    """How long the session waited for it."""

    @property
    def size(self) -> int:
        """Bytes that crossed."""
        return len(self.arguments) + sum(map(len, self.told))


class HostFailed(Exception):
    """The machine failed, says the function itself: an exception of HostTools.machine_errors."""


class HostTool:
    """A function of the host.

    Args:
        function: may be a coroutine function. Arguments are checked against its annotations. Of a
            functools.partial, what is bound is neither shown nor to be set.

    Raises:
        ValueError: it has no name that a session could call it by, an annotation cannot be
            checked, or a default is not for a policy to see.
    """

    def __init__(self, function: Function) -> None:
        try:
            import pydantic  # takes a while, and most sessions have no host tools
        except ModuleNotFoundError as error:
            raise InvalidArgumentException(
                "host_tools: the package pydantic, which checks their arguments, is not installed; "
                "remedy: pip install pydantic"
            ) from error
        own: Any = function
        while isinstance(own, partial):
            own = own.func
        name = getattr(function, "__name__", getattr(own, "__name__", None))
        if not callable(function) or not isinstance(name, str):
            raise InvalidArgumentException(f"host_tools: expected functions, got {function!r:.80}")
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
            raise InvalidArgumentException(f"host_tools: {name!r} is no name to call it by")
        if hasattr(builtins, name):
            raise InvalidArgumentException(f"host_tools: {name!r} is a name of Python's own")
        self.name = name
        self.is_async = self.awaits = inspect.iscoroutinefunction(function)
        try:
            signature = self._signature = _to_be_set(function, own)
            self.call = pydantic.validate_call(_with_signature(function, signature))
        except (NameError, TypeError, ValueError, pydantic.PydanticUserError) as error:
            raise InvalidArgumentException(f"host_tools: {name}: {error}") from error
        self.line = f"def {name}{signature}:"
        self.doc = inspect.getdoc(own) or ""

    def key(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[str, str]:
        """What the calls with the same arguments have in common, by position or by name. Nothing
        but data that was read is in it: a parameter that was left out is not.
        """
        try:
            given: Any = self._signature.bind(*args, **kwargs).arguments
        except TypeError:  # the function will say so
            given = [args, kwargs]
        return self.name, json.dumps(given, sort_keys=True)

    @property
    def shown(self) -> str:
        """The def line with the docstring, as a policy is shown it."""
        lines = f'"""{self.doc}"""' if self.doc else "..."
        return f"{self.line}\n" + "\n".join(f"    {x}".rstrip() for x in lines.split("\n"))


def _to_be_set(function: Function, own: Function) -> inspect.Signature:
    """The signature without what functools.partial has bound by name.

    Raises:
        ValueError: a default is no data, or looks like a secret.
    """
    signature = inspect.signature(function, eval_str=True)
    bound = function.keywords if isinstance(function, partial) else {}
    left = [one for one in signature.parameters.values() if one.name not in bound]
    for one in left:
        if one.default is one.empty:
            continue
        why = ""
        if _is_secret(one.name, one.default):
            why = "looks like a secret"
        else:
            try:
                spell(one.default, 1 << 20)
            except NotData:
                why = f"is no data (a {type(one.default).__name__})"
        if why:
            raise ValueError(
                f"the default of {one.name} {why}: every parameter and its default is shown to "
                "the policy, which can set it. Bind what is not for it: functools.partial("
                f"{own.__name__}, {one.name}=...); what is for it has data as its default"
            )
    return signature.replace(parameters=left)


def _is_secret(name: str, default: Any) -> bool:
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    holds = isinstance(default, (str, list, dict)) and bool(default)
    named = any(SECRET.search(word) for word in words)
    return holds and (named or ADDRESS.search(str(default)) is not None)


def _with_signature(function: Function, signature: inspect.Signature) -> Function:
    """It, or for a partial what takes only the parameters that are left."""
    if not isinstance(function, partial):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    given: Any = call
    given.__signature__ = signature
    given.__annotations__ = {
        one.name: one.annotation
        for one in signature.parameters.values()
        if one.annotation is not one.empty
    }
    return call


class HostTools:
    """The functions that sessions may call; shared by all rollouts of a run.

    Args:
        functions: each under its own name.
        budget: of each rollout.
        cached: whether the same arguments have the same answer, without another call: "no", within
            a "rollout", or within the "run" (this object's life; the oldest of CACHE_MIB are
            forgotten). Only what a function returned is kept, never what it raised. A call that
            the cache answers counts as any other, so that no count depends on who came first.
        machine_errors: exceptions of the functions that mean that the machine failed, not the code:
            the step ends with ``infra_error``.

    Raises:
        ValueError: there are none, two have the same name, or one cannot be called.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        *,
        budget: HostBudget | None = None,
        cached: Cached = "rollout",
        machine_errors: tuple[type[BaseException], ...] = (SandboxInfraError,),
    ) -> None:
        tools = [HostTool(function) for function in functions]
        self.by_name = {tool.name: tool for tool in tools}
        if not tools or len(self.by_name) != len(tools):
            names = [tool.name for tool in tools]
            raise InvalidArgumentException(f"host_tools: expected different names, got {names}")
        if cached not in ("no", "rollout", "run"):
            raise InvalidArgumentException(
                f"host_tools: cached: expected 'no', 'rollout' or 'run', got {cached!r}"
            )
        self.budget, self.cached = budget or HostBudget(), cached
        self.machine_errors = machine_errors
        self.cache = _Cache(self.budget.call_s)
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()

    def begin(self) -> "HostCalls":
        """The calls of a rollout that has made none."""
        return HostCalls(self)

    @property
    def shown(self) -> str:
        """What a policy is shown of them."""
        return "\n".join(tool.shown for tool in self.by_name.values())

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the arguments and of the answer of a call."""
        return self.budget.argument_kib << 10, self.budget.answer_kib << 10

    def start(self, tool: HostTool, arguments: Any, serves: object) -> "Future[tuple[str, Any]]":
        """Begin a call: ("returned", data), ("raised", (name, text)) or ("failed", text)."""
        future: Future[tuple[str, Any]] = Future()
        if full := self._admit(tool):
            future.set_result(("failed", full))
            return future

        def settle(produce: Callable[[], Any]) -> None:
            try:
                outcome = self._outcome(tool, produce)
            except BaseException:  # of a class that cannot even be named: somebody waits
                outcome = "failed", f"{tool.name}(): its exception cannot be read"
            self._leave(tool)
            future.set_result(outcome)

        args, kwargs = arguments

        async def wait() -> None:
            _serving.set(serves)
            try:
                async with asyncio.timeout(self.budget.call_s + 1.0):  # later than whoever waits
                    value = await tool.call(*args, **kwargs)
            except BaseException as error:  # the loop's as little as the thread's, see _outcome()
                raised = error
                settle(lambda: _raise(raised))
            else:
                settle(lambda: value)

        def work() -> None:
            _serving.set(serves)
            longest = self.budget.call_s + 1.0

            def produce() -> Any:
                value = tool.call(*args, **kwargs)
                tool.awaits = tool.awaits or inspect.isawaitable(value)
                return waited(value, LOOP, longest)

            settle(produce)

        if tool.is_async:
            asyncio.run_coroutine_threadsafe(wait(), _loop())
        else:
            try:
                threading.Thread(target=work, name=f"host-{tool.name}", daemon=True).start()
            except RuntimeError as error:  # no thread
                self._leave(tool)
                future.set_result(("failed", str(error)))
        return future

    def _admit(self, tool: HostTool) -> str:
        """Count a call as under way; if there are too many, which function's they are."""
        with self._lock:
            if self._running.total() < MAX_RUNNING:
                self._running[tool.name] += 1
                return ""
            (name, most), *_ = self._running.most_common(1)
        return (
            f"{tool.name}(): {MAX_RUNNING} calls of functions of the host are under way, {most} of "
            f"them of {name}(); those that nobody waits for have not come back"
        )

    def _leave(self, tool: HostTool) -> None:
        with self._lock:
            self._running[tool.name] -= 1

    def _outcome(self, tool: HostTool, produce: Callable[[], Any]) -> tuple[str, Any]:
        try:
            value = produce()
        except self.machine_errors as error:
            return "failed", f"{tool.name}(): {text_of(error)}"
        except BaseException as error:  # SystemExit too: it is the call's, and ends nothing here
            return "raised", (_name_of(error), text_of(error))
        try:
            return "returned", spell(value, self.sizes[1])
        except NotData as error:
            return "raised", ("TypeError", f"what {tool.name}() returned cannot be passed: {error}")


def _raise(error: BaseException) -> None:
    raise error


def _name_of(error: BaseException) -> str:
    """Of its class; an argument that does not fit its annotation is a TypeError, as in Python."""
    return "TypeError" if _of_pydantic(error) else printable(type(error).__name__)[:100]


def _of_pydantic(error: Any) -> bool:
    return type(error).__module__.startswith("pydantic") and hasattr(error, "errors")


def text_of(error: Any) -> str:
    """What an exception says, short; of pydantic's what is wrong with which argument."""
    try:
        if _of_pydantic(error):
            wrong = error.errors(include_url=False, include_input=False)
            told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in wrong)
        else:
            told = str(error)
        return printable(told[:MAX_TEXT])
    except BaseException:  # of its own making: SystemExit too ends nothing here
        return "<unprintable>"


def _loop() -> asyncio.AbstractEventLoop:
    return event_loop(LOOP)


def _loop_answers() -> bool:
    """Whether no coroutine keeps the event loop from running the others."""
    heard = threading.Event()
    _loop().call_soon_threadsafe(heard.set)
    return heard.wait(LOOP_S)


class _Cache:
    """Answers by name and arguments. Who asks while another asks the same waits for that answer.

    Args:
        patience_s: how old a call that has not come back may be for others to wait for it.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], Future[tuple[str, Any]]] = {}
        self._began: dict[tuple[str, str], float] = {}
        self._settled_keys: deque[tuple[str, str]] = deque()
        self._size = 0

    def get(
        self, key: tuple[str, str], start: Callable[[], "Future[tuple[str, Any]]"]
    ) -> "Future[tuple[str, Any]]":
        now = time.monotonic()
        with self._lock:
            if key in self._known:
                known = self._known[key]
                if known.done() or now - self._began[key] < self._patience_s:
                    return known
            made = self._known[key] = start()
            self._began[key] = now
        made.add_done_callback(lambda done: self._settled(key, done))
        return made

    def _settled(self, key: tuple[str, str], done: "Future[tuple[str, Any]]") -> None:
        kind, told = done.result()
        with self._lock:
            if self._known.get(key) is not done:  # it hung; another has been made since
                return
            self._began.pop(key, None)
            if kind != "returned":
                self._known.pop(key, None)
                return
            self._size += len(key[1]) + len(told)
            self._settled_keys.append(key)
            while self._size > CACHE_MIB << 20:
                old = self._settled_keys.popleft()
                self._size -= len(old[1]) + len(self._known.pop(old).result()[1])


class HostCalls:
    """The calls of one rollout: what they have used, and the answers that they got.

    Sessions of the rollout share it, one after another or at once.
    """

    def __init__(self, tools: HostTools) -> None:
        self.tools = tools
        self.calls = self.failures = self.size = 0
        self.seconds = 0.0
        self._held_s = self._held_size = 0.0
        """Of the budget, what calls that are under way may still use."""
        self._lock = threading.Lock()
        self._cache = tools.cache if tools.cached == "run" else _Cache(tools.budget.call_s)
        self._recalled: deque[HostCall] | None = None
        self._diverged = False
        self._counts_again = True
        self._before: Any = None

    def fork(self) -> "HostCalls":
        """Those of another rollout that goes on as this one could, with what it has left of its
        budget. Calls that are told to it by recall() have been counted.
        """
        other = HostCalls(self.tools)
        with self._lock:
            other._set(self._used())
        other._counts_again = False
        return other

    def _used(self) -> tuple[int, int, int, float]:
        return self.calls, self.failures, self.size, self.seconds

    def _set(self, used: tuple[int, int, int, float]) -> None:
        self.calls, self.failures, self.size, self.seconds = used

    def recall(self, calls: Iterable[HostCall] | None) -> bool:
        """From now on the session repeats steps in which these calls were made: it is told the
        answers that were told then, and no function runs. None: from now on they run.

        Returns:
            whether what was recalled before was asked for, all of it and nothing else.
        """
        with self._lock:
            whole = not (self._recalled or self._diverged)
            told = None if calls is None else tuple(calls)
            self._before = None if told is None else (told, self._used())
            self._recalled, self._diverged = None if told is None else deque(told), False
        return whole

    def recall_again(self) -> None:
        """Another session repeats the same steps from the start, if steps are being repeated."""
        if self._before is not None:
            told, used = self._before
            with self._lock:
                self._set(used)
            self.recall(told)

    def answer(
        self, name: str, data: bytes, made: int, left_s: float, serves: object,
        stopped: Callable[[], bool],
    ) -> tuple[HostCall, bool]:  # fmt: skip
        """What a call comes to, and whether it was made.

        Args:
            name: what the session sent,
            data: and with it.
            made: calls that the step has made before it.
            left_s: of the step.
            serves: the session, which the function cannot step meanwhile.
            stopped: asked every SLICE_S; true if nobody waits any more.

        Raises:
            Malformed: no session that is as it was sends this.
            HostFailed: the machine failed.
        """
        tool = self.tools.by_name.get(name)
        if tool is None:
            raise Malformed(f"a call of {name[:40]!r}, which is no function of the host's")
        if self._recalled is not None:
            return self._told_again(tool, data, made)
        budget = self.tools.budget
        with self._lock:
            spent = self._spent(made, len(data))
            if spent:  # before anything of it is read
                return self._refused(tool, spent), False
            self.calls += 1
            self.size += len(data)
            patience = min(budget.call_s, budget.seconds - self.seconds - self._held_s)
            room = (budget.total_kib << 10) - self.size - self._held_size
            held = patience, max(0.0, min(room, self.tools.sizes[1]))
            self._hold(*held)
        told = None
        try:
            arguments = self._read(data)
            told = self._ask(tool, data, arguments, min(patience, left_s), serves, stopped)
        finally:
            with self._lock:
                self._hold(-held[0], -held[1])
                if told is not None:
                    self.seconds += told.seconds
                    self.failures += told.kind == "raised"
                    self.size += told.size - len(data)
        return told, True

    def _read(self, data: bytes) -> Any:
        try:
            arguments = read(data, self.tools.sizes[0])
        except NotData as error:
            raise Malformed(f"arguments that are no data: {error}") from None
        match arguments:
            case [list(), dict()]:
                return arguments
            case _:
                raise Malformed("arguments of another form")

    def _hold(self, seconds: float, size: float) -> None:
        self._held_s += seconds
        self._held_size += size

    def _refused(self, tool: HostTool, why: str) -> HostCall:
        self.failures += 1
        return HostCall(tool.name, b"", "refused", (b"RuntimeError", why.encode()), 0.0)

    def _spent(self, made: int, size: int) -> str:
        """What of the budget is used up; "" if nothing is."""
        budget = self.tools.budget
        for of, what, used in (
            (budget.calls_per_step, "calls in one step", made),
            (budget.calls, "calls", self.calls),
            (budget.seconds, "seconds", self.seconds + self._held_s),
            (budget.total_kib, "KiB", (self.size + self._held_size + size) / 1024),
        ):
            if used >= of:
                return f"the budget of {of:g} {what} of functions of the host is used up"
        return ""

    def _told_again(self, tool: HostTool, data: bytes, made: int) -> tuple[HostCall, bool]:
        """The call that was made, or refused, at this place of the step that is repeated."""
        with self._lock:
            queue, anew = self._recalled or deque(), self._counts_again
            first = queue[0] if queue else None
            if first is not None and first.name == tool.name and first.kind == "refused":
                return queue.popleft(), False
            if first is None or (first.name, first.arguments) != (tool.name, data):
                if anew and (spent := self._spent(made, len(data))):
                    return self._refused(tool, spent), False
                self._diverged = True
                text = b"the step that is repeated made another call"
                return HostCall(tool.name, data, "raised", (b"RuntimeError", text), 0.0), True
            call = queue.popleft()
            if anew:
                self.calls += 1
                self.failures += call.kind == "raised"
                self.size += call.size
                self.seconds += call.seconds
        if self.tools.cached != "no" and call.kind == "returned":
            self._cache.get(tool.key(*self._read(data)), lambda: _known(call))
        return call, True

    def _ask(
        self, tool: HostTool, data: bytes, arguments: Any, patience: float, serves: object,
        stopped: Callable[[], bool],
    ) -> HostCall:  # fmt: skip
        began = time.monotonic()

        def start() -> "Future[tuple[str, Any]]":
            return self.tools.start(tool, arguments, serves)

        kind: str = "raised"
        told: Any = ("TimeoutError", f"{tool.name}(): {LATE}")
        future: Future[tuple[str, Any]]
        if patience <= 0:
            future = Future()
        elif self.tools.cached == "no":
            future = start()
        else:
            future = self._cache.get(tool.key(*arguments), start)
        while (left := began + patience - time.monotonic()) > 0 and not stopped():
            try:
                kind, told = future.result(min(left, SLICE_S))
                break
            except NotYet:  # what the function raises is not raised here, see _outcome()
                continue
        else:
            if tool.awaits and patience > 0 and not stopped() and not _loop_answers():
                kind, told = (
                    "failed",
                    (
                        f"{tool.name}(): the event loop of functions of the host is blocked; a "
                        "coroutine must await what takes time"
                    ),
                )
        if kind == "failed":
            raise HostFailed(told)
        fields = (told,) if kind == "returned" else tuple(one.encode() for one in told)
        return HostCall(tool.name, data, kind, fields, time.monotonic() - began)


def _known(call: HostCall) -> "Future[tuple[str, Any]]":
    """A call that has returned, for the cache."""
    future: Future[tuple[str, Any]] = Future()
    future.set_result(("returned", call.told[0]))
    return future


def within_a_call_of(session: object) -> bool:
    """Whether this runs in a function that the session has called."""
    return _serving.get() is session

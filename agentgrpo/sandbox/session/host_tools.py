"""Host functions that sessions can call: a table of names, checked JSON, a budget and a cache.

A session knows only the functions' names, signatures and docstrings. It sends a name and JSON
(inside/data.py); an unknown name or anything else breaks the protocol and ends the session. The
function runs in this process on its own thread, and its value or exception goes back as JSON or
text.
"""

import builtins
import inspect
import json
import keyword
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Literal

from agentgrpo.sandbox.inside import wire
from agentgrpo.sandbox.inside.data import EncodeError, decode, encode
from agentgrpo.sandbox.inside.wire import Malformed
from agentgrpo.sandbox.isolation.errors import (
    InvalidArgumentException,
    SandboxInfraError,
    printable,
)
from agentgrpo.sandbox.isolation.guards import wraps_os_errors
from agentgrpo.sandbox.isolation.limits import require_positive
from agentgrpo.sandbox.session.step_result import (
    CLOSED,
    MAX_FIELDS,
    HostCall,
    StepArguments,
    StepStatus,
)
from agentgrpo.support.user_calls import run_sync

Function = Callable[..., Any]
Cached = Literal["no", "rollout", "run"]
LOOP = "host-tools"
"""The event loop that coroutine functions share (support/user_calls.event_loop)."""
MAX_TEXT = 2000
"""Characters of an exception's text."""
MAX_REFUSED = 1000
"""Refused calls in one step; the next one ends the session."""
CACHE_MIB = 256
SLICE_S = 0.05
"""How soon a wait for a function notices that its session was closed."""
DIVERGED = b"the repeated step made a different call"

calling_session: ContextVar[object] = ContextVar("calling_session", default=None)
"""The session that waits for the host function which this thread runs."""


@wraps_os_errors
@dataclass(frozen=True, slots=True, kw_only=True)
class HostBudget:
    """Limits for calls of host functions. All must be positive.

    Raises:
        ValueError: a limit is out of range.
    """

    calls: int = 100
    """Calls of a rollout (or of a Sandbox)."""
    calls_per_step: int = 20
    """Calls of one step."""
    call_s: float = 10.0
    """Wall time of one call. The step's time limit also applies during a call."""
    seconds: float = 120.0
    """Wall time of all calls of a rollout."""
    argument_kib: int = 64
    """Size of the arguments of one call, as JSON."""
    answer_kib: int = 256
    """Size of the value of one call, as JSON."""
    total_kib: int = 8192
    """Size of all arguments and answers of a rollout."""

    def __post_init__(self) -> None:
        require_positive("host_budget", self)


class HostFailed(Exception):
    """A host function raised one of HostTools.machine_errors, or no thread could be started."""


class HostTool:
    """A host function.

    Args:
        function: may be a coroutine function. Arguments are checked against its annotations. The
            arguments that functools.partial has bound are hidden and cannot be set.

    Raises:
        ValueError: the function has no usable name, an annotation cannot be checked, or a default
            is not JSON.
    """

    def __init__(self, function: Function) -> None:
        import pydantic  # imported here: it is slow, and most sessions have no host tools

        inner: Any = function
        while isinstance(inner, partial):
            inner = inner.func
        name = getattr(inner, "__name__", None)
        if not callable(function) or not isinstance(name, str):
            raise InvalidArgumentException(f"host_tools: expected functions, got {function!r:.80}")
        is_name = name.isidentifier() and not keyword.iskeyword(name)
        if not is_name or name.startswith("_") or hasattr(builtins, name):
            raise InvalidArgumentException(
                "host_tools: expected functions with public names that are not Python builtins, "
                f"got {name!r}"
            )
        self.name, self.function, self._invalid = name, function, pydantic.ValidationError
        try:
            self._signature = _exposed_signature(function, name)
            self._adapters = {
                parameter.name: pydantic.TypeAdapter(_type_of(parameter))
                for parameter in self._signature.parameters.values()
            }
        except (NameError, TypeError, ValueError, pydantic.PydanticUserError) as error:
            raise InvalidArgumentException(f"host_tools: {name}: {error}") from error
        self.line = f"def {name}{self._signature}:"
        self.doc = inspect.getdoc(inner) or ""

    def check(
        self, args: list[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert JSON arguments to the annotated types (array to tuple, text to date)."""
        bound = self._signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            try:
                checked = self._adapters[name].validate_json(json.dumps(value), strict=True)
            except self._invalid as error:
                details: Any = error.errors(include_url=False, include_input=False)
                lines = (f"{'.'.join(map(str, (name, *e['loc'])))}: {e['msg']}" for e in details)
                raise TypeError("; ".join(lines)) from None
            bound.arguments[name] = checked
        return bound.args, bound.kwargs

    @property
    def signature(self) -> str:
        """The def line and the docstring, as the policy sees them."""
        lines = f'"""{self.doc}"""' if self.doc else "..."
        return f"{self.line}\n" + "\n".join(f"    {x}".rstrip() for x in lines.split("\n"))


def _exposed_signature(function: Function, name: str) -> inspect.Signature:
    """The signature without the names that functools.partial has bound. Defaults must be JSON."""
    signature = inspect.signature(function, eval_str=True)
    bound = function.keywords if isinstance(function, partial) else {}
    parameters = [p for p in signature.parameters.values() if p.name not in bound]
    for parameter in parameters:
        try:
            encode(None if parameter.default is parameter.empty else parameter.default, 1 << 20)
        except EncodeError as error:
            raise ValueError(
                f"the default of {parameter.name} is not JSON: {error}. The policy sees every "
                "parameter and can set it. Bind those that are not for the policy: "
                f"functools.partial({name}, {parameter.name}=...)"
            ) from None
    return signature.replace(parameters=parameters)


def _type_of(parameter: inspect.Parameter) -> Any:
    """The type of the values bound to a parameter (a tuple for *args, a dict for **kwargs)."""
    kind: Any = Any if parameter.annotation is parameter.empty else parameter.annotation
    if parameter.kind is parameter.VAR_POSITIONAL:
        return tuple[kind, ...]
    return dict[str, kind] if parameter.kind is parameter.VAR_KEYWORD else kind


class HostTools:
    """Host functions that sessions can call, shared by all rollouts of a run.

    Args:
        functions: sessions call each by its ``__name__``.
        budget: the limits of each rollout.
        cached: where calls with equal arguments get the same answer: "no", within a "rollout", or
            within the "run" (the life of this object; above 256 MiB the oldest are dropped). Values
            are cached, exceptions are not. A call answered by the cache counts like any other, so
            that no count depends on which rollout called first.
        machine_errors: exceptions of the functions which mean that the machine failed, not the
            code: the step ends with ``infra_error``.

    Raises:
        ValueError: no function, two with the same name, or one that cannot be called.
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
        self.answers = _AnswerCache()

    def begin(self) -> "HostCalls":
        return HostCalls(self)

    @property
    def signatures(self) -> str:
        """The def lines and docstrings, as the policy sees them."""
        return "\n".join(tool.signature for tool in self.by_name.values())

    @property
    def max_sizes(self) -> tuple[int, int]:
        """Maximum bytes of the arguments and of the answer of a call."""
        return self.budget.argument_kib << 10, self.budget.answer_kib << 10

    def call(
        self, tool: HostTool, arguments: Any, timeout_s: float, session: object,
        stopped: Callable[[], bool],
    ) -> tuple[str, tuple[bytes, ...]]:  # fmt: skip
        """Call a function. Returns "returned" with JSON, or "raised" with an exception's name and
        text. After timeout_s the function runs on, and its value is dropped.

        Raises:
            HostFailed: the machine failed.
        """
        outcomes: SimpleQueue[tuple[str, tuple[str | bytes, ...]]] = SimpleQueue()

        def work() -> None:
            calling_session.set(session)
            try:
                outcomes.put(self._outcome(tool, arguments))
            except BaseException as error:  # str(error) may raise too, and the session waits
                outcomes.put(("failed", (f"{tool.name}(): {type(error).__name__}",)))

        deadline = time.monotonic() + timeout_s
        if timeout_s > 0:
            try:
                threading.Thread(target=work, name=f"host-{tool.name}", daemon=True).start()
            except RuntimeError as error:  # no thread could be started
                raise HostFailed(str(error)) from error
        while (remaining := deadline - time.monotonic()) > 0 and not stopped():
            try:
                kind, parts = outcomes.get(timeout=min(remaining, SLICE_S))
            except Empty:
                continue
            if kind == "failed":
                raise HostFailed(*parts)
            return kind, tuple(part.encode() if isinstance(part, str) else part for part in parts)
        message = f"{tool.name}(): the host did not answer in time"
        return "raised", (b"TimeoutError", message.encode())

    def _outcome(self, tool: HostTool, arguments: Any) -> tuple[str, tuple[str | bytes, ...]]:
        try:
            args, kwargs = tool.check(*arguments)
            value = run_sync(tool.function(*args, **kwargs), LOOP, self.budget.call_s + 1.0)
        except self.machine_errors as error:
            return "failed", (f"{tool.name}(): {printable(str(error)[:MAX_TEXT])}",)
        except BaseException as error:  # SystemExit too: it must not end this process
            return "raised", (type(error).__name__, printable(str(error)[:MAX_TEXT]))
        try:
            return "returned", (encode(value, self.max_sizes[1]),)
        except EncodeError as error:
            return "raised", ("TypeError", f"the value of {tool.name}() cannot be passed: {error}")


class _AnswerCache:
    """Answers by name and arguments; above CACHE_MIB the oldest are dropped."""

    def __init__(self) -> None:
        self._lock, self._size = threading.Lock(), 0
        self._answers: dict[tuple[str, bytes], bytes] = {}

    def get(self, key: tuple[str, bytes]) -> bytes | None:
        return self._answers.get(key)

    def put(self, key: tuple[str, bytes], answer: bytes) -> bytes:
        """Store an answer. Returns the first one where two calls ran at the same time."""
        with self._lock:
            if key not in self._answers:
                self._size += len(key[1]) + len(answer)
            first = self._answers.setdefault(key, answer)
            while self._size > CACHE_MIB << 20:
                oldest = next(iter(self._answers))
                self._size -= len(oldest[1]) + len(self._answers.pop(oldest))
            return first


class HostCalls:
    """The calls of one rollout, shared by its sessions: the used budget and the answers."""

    def __init__(self, tools: HostTools) -> None:
        self.tools = tools
        self.calls = self.failures = self.size = 0
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._answers = tools.answers if tools.cached == "run" else _AnswerCache()
        self._replayed: deque[HostCall] | None = None
        self._diverged = False

    def replay_answers(self, calls: Iterable[HostCall] | None) -> bool:
        """Answer the next calls from these, which the repeated step made before, without calling
        the functions. None: call the functions again.

        Returns:
            whether the session made exactly the calls of the previous replay.
        """
        with self._lock:
            exact = not (self._replayed or self._diverged)
            self._replayed, self._diverged = None if calls is None else deque(calls), False
        return exact

    def answer(
        self, name: str, data: bytes, num_calls: int, timeout_s: float, session: object,
        stopped: Callable[[], bool],
    ) -> HostCall:  # fmt: skip
        """Make a call with arguments as JSON, or answer it from the replay or the cache.

        The step has made num_calls before and has timeout_s left. stopped() ends the wait.

        Raises:
            Malformed: the call is invalid; the session's own code does not send it.
            HostFailed: the machine failed.
        """
        tool = self.tools.by_name.get(name)
        if tool is None:
            raise Malformed(f"a call of {name[:40]!r}, which is not a host function")
        with self._lock:
            calls = self._replayed
            call = calls.popleft() if calls and calls[0][:2] == (name, data) else None
            if call is None and (refusal := self._refusal(num_calls, len(data))):
                self.failures += 1
                return HostCall(name, b"", "refused", (b"RuntimeError", refusal.encode()), 0.0)
            self.calls += 1
        if call is None and self._replayed is not None:
            self._diverged = True
            call = HostCall(name, data, "raised", (b"RuntimeError", DIVERGED), 0.0)
        call = self._call(tool, data, timeout_s, session, stopped, call)
        with self._lock:
            self.failures += call.kind == "raised"
            self.size += call.size
            self.seconds += call.seconds
        return call

    def _refusal(self, num_calls: int, size: int) -> str:
        """Which part of the budget is used up; "" if none is."""
        budget = self.tools.budget
        for limit, unit, used in (
            (budget.calls_per_step, "calls in one step", num_calls),
            (budget.calls, "calls", self.calls),
            (budget.seconds, "seconds", self.seconds),
            (budget.total_kib, "KiB", (self.size + size) / 1024),
        ):
            if used >= limit:
                return f"the budget of {limit:g} {unit} for host functions is used up"
        return ""

    def _call(
        self, tool: HostTool, data: bytes, timeout_s: float, session: object,
        stopped: Callable[[], bool], replayed: HostCall | None,
    ) -> HostCall:  # fmt: skip
        """Answer a call from the replay, the cache or the function, and cache its value."""
        began, key, budget = time.monotonic(), (tool.name, data), self.tools.budget
        try:
            match decode(data, self.tools.max_sizes[0]):
                case [list(args), dict(kwargs)]:
                    pass
                case _:
                    raise Malformed("arguments of another form")
        except EncodeError as error:
            raise Malformed(f"arguments that are not JSON: {error}") from None
        cached = None if self.tools.cached == "no" else self._answers.get(key)
        if replayed is not None:
            kind, answer = replayed.kind, replayed.answer
        elif cached is not None:
            kind, answer = "returned", (cached,)
        else:
            timeout = min(budget.call_s, budget.seconds - self.seconds, timeout_s)
            kind, answer = self.tools.call(tool, (args, kwargs), timeout, session, stopped)
        if kind == "returned" and self.tools.cached != "no":
            answer = (self._answers.put(key, answer[0]),)
        return replayed or HostCall(tool.name, data, kind, answer, time.monotonic() - began)


class HostCallStep:
    """Answers the calls of one step. The step's limits include the time of its calls."""

    def __init__(self, session: Any, host: HostCalls, arguments: StepArguments) -> None:
        self._session, self._host = session, host
        self._deadline = time.monotonic() + arguments.timeout_s
        self.number = arguments.number
        """Number of the last request that was sent."""
        self.calls: list[HostCall] = []
        self.refused = 0
        """Calls that the budget did not allow."""
        self.failure: tuple[StepStatus, str] | None = None
        """Ends the session: the machine failed, too many calls were refused, or it was closed."""

    def answer(self, message: bytes, interrupted: bool) -> bytes | None:
        """Make the call in a message of the session. Returns the next request of the step, or None
        if the message is not a call or the step has ended.
        """
        name_and_data = _parse_call(message)
        if name_and_data is None:
            return None
        timeout_s = 0.0 if interrupted else self._deadline - time.monotonic()
        try:
            call = self._host.answer(
                *name_and_data, len(self.calls), timeout_s,
                self._session, lambda: not self._session.alive or self._session.closing,
            )  # fmt: skip
        except Malformed:  # then it is parsed as the answer that ends the step, and fails there
            return None
        except HostFailed as error:
            self.failure = StepStatus.INFRA_ERROR, str(error)
            return None
        if call.kind == "refused":
            self.refused += 1
        else:
            self.calls.append(call)
        if self._session.closing:  # close() may not have killed the interpreter yet
            self.failure = StepStatus.EXIT, CLOSED
        elif self.refused > MAX_REFUSED:
            status = StepStatus.TIMEOUT_KILLED if interrupted else StepStatus.PROTOCOL_ERROR
            self.failure = status, f"more than {MAX_REFUSED} calls over the budget"
        if self.failure is not None:
            return None
        self.number += 1
        kind = b"returned" if call.kind == "returned" else b"raised"
        return wire.encode(self.number, [kind, *call.answer])


def _parse_call(message: bytes) -> tuple[str, bytes] | None:
    """The name and the arguments, if the message is a call."""
    try:
        _, fields = wire.decode(message, most=MAX_FIELDS)
        if len(fields) == 3 and fields[0] == b"call":
            return fields[1].decode(), fields[2]
    except (Malformed, UnicodeDecodeError):  # reported when the message is parsed as an answer
        pass
    return None

"""Functions of the host that sessions call: a table of names, checked data, a budget and a cache.

A session knows names and texts of them, nothing more. What it sends is a name and data
(inside/data.py); a name that is not in the table, or what is no data, breaks the protocol and
ends it. The function runs in this process, on a thread of its own, and what it returns
or raises goes back as data or as text.
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
from typing import Any, Literal, NamedTuple

from agentgrpo.sandbox.inside.data import EncodeError, decode, encode
from agentgrpo.sandbox.inside.wire import Malformed
from agentgrpo.sandbox.isolation.errors import (
    InvalidArgumentException,
    SandboxInfraError,
    printable,
)
from agentgrpo.sandbox.isolation.guards import public
from agentgrpo.sandbox.isolation.limits import require_positive
from agentgrpo.support.user_calls import run_sync

Function = Callable[..., Any]
Cached = Literal["no", "rollout", "run"]
LOOP = "host-tools"
"""The event loop that coroutines share (usercode.event_loop)."""
MAX_TEXT = 2000
"""Characters of an exception's text."""
MAX_REFUSED = 1000
"""Calls over the budget in one step; the next one ends the session."""
CACHE_MIB = 256
SLICE_S = 0.05
"""How soon a wait for a function notices that its session was closed."""
OTHERWISE = b"the step that is repeated made another call"

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
        require_positive("host_budget", self)


class HostCall(NamedTuple):
    """One call: what a branch is told again without making it."""

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
            checked, or a default is no data.
    """

    def __init__(self, function: Function) -> None:
        import pydantic  # takes a while, and most sessions have no host tools

        own: Any = function
        while isinstance(own, partial):
            own = own.func
        name = getattr(own, "__name__", None)
        if not callable(function) or not isinstance(name, str):
            raise InvalidArgumentException(f"host_tools: expected functions, got {function!r:.80}")
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
            raise InvalidArgumentException(f"host_tools: {name!r} is no name to call it by")
        if hasattr(builtins, name):
            raise InvalidArgumentException(f"host_tools: {name!r} is a name of Python's own")
        self.name, self.function, self._invalid = name, function, pydantic.ValidationError
        try:
            self._signature = _exposed_signature(function, name)
            self._adapters = {
                one.name: pydantic.TypeAdapter(_type_of(one))
                for one in self._signature.parameters.values()
            }
        except (NameError, TypeError, ValueError, pydantic.PydanticUserError) as error:
            raise InvalidArgumentException(f"host_tools: {name}: {error}") from error
        self.line = f"def {name}{self._signature}:"
        self.doc = inspect.getdoc(own) or ""

    def check(
        self, args: list[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the annotations want them: an array may be a tuple, a text a date; a
        text is no number.

        Raises:
            TypeError: they are others.
        """
        bound = self._signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            try:
                checked = self._adapters[name].validate_json(json.dumps(value), strict=True)
            except self._invalid as error:
                wrong: Any = error.errors(include_url=False, include_input=False)
                told = (f"{'.'.join(map(str, (name, *e['loc'])))}: {e['msg']}" for e in wrong)
                raise TypeError("; ".join(told)) from None
            bound.arguments[name] = checked
        return bound.args, bound.kwargs

    @property
    def shown(self) -> str:
        """The def line with the docstring, as a policy is shown it."""
        lines = f'"""{self.doc}"""' if self.doc else "..."
        return f"{self.line}\n" + "\n".join(f"    {x}".rstrip() for x in lines.split("\n"))


def _exposed_signature(function: Function, name: str) -> inspect.Signature:
    """The signature without what functools.partial has bound by name; defaults must be data."""
    signature = inspect.signature(function, eval_str=True)
    bound = function.keywords if isinstance(function, partial) else {}
    left = [one for one in signature.parameters.values() if one.name not in bound]
    for one in left:
        try:
            encode(None if one.default is one.empty else one.default, 1 << 20)
        except EncodeError as error:
            raise ValueError(
                f"the default of {one.name} is no data: {error}. Every parameter is shown to the "
                f"policy, which can set it; bind what is not for it: functools.partial({name}, "
                f"{one.name}=...)"
            ) from None
    return signature.replace(parameters=left)


def _type_of(parameter: inspect.Parameter) -> Any:
    """What all that a parameter takes is together."""
    kind: Any = Any if parameter.annotation is parameter.empty else parameter.annotation
    if parameter.kind is parameter.VAR_POSITIONAL:
        return tuple[kind, ...]
    return dict[str, kind] if parameter.kind is parameter.VAR_KEYWORD else kind


class HostTools:
    """The functions that sessions may call; shared by all rollouts of a run.

    Args:
        functions: each under its own name.
        budget: of each rollout.
        cached: whether the same arguments have the same answer: "no", within a "rollout", or within
            the "run" (this object's life; the oldest of CACHE_MIB are forgotten). Only what a
            function returned is kept, never what it raised. A call that the cache answers counts
            as any other, so that no count depends on who came first.
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
        self.answers = _Answers()

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

    def call(
        self, tool: HostTool, arguments: Any, patience_s: float, serves: object,
        stopped: Callable[[], bool],
    ) -> tuple[str, tuple[bytes, ...]]:  # fmt: skip
        """Call it: "returned" with data, or "raised" with name and text of an exception. One that
        takes longer than patience_s goes on by itself, and what it says is nobody's.

        Raises:
            HostFailed: the machine failed.
        """
        outcomes: SimpleQueue[tuple[str, tuple[str | bytes, ...]]] = SimpleQueue()

        def work() -> None:
            _serving.set(serves)
            try:
                outcomes.put(self._outcome(tool, arguments))
            except BaseException as error:  # its text, too, may raise: somebody waits
                outcomes.put(("failed", (f"{tool.name}(): {type(error).__name__}",)))

        ends = time.monotonic() + patience_s
        if patience_s > 0:
            try:
                threading.Thread(target=work, name=f"host-{tool.name}", daemon=True).start()
            except RuntimeError as error:  # no thread
                raise HostFailed(str(error)) from error
        while (left := ends - time.monotonic()) > 0 and not stopped():
            try:
                kind, told = outcomes.get(timeout=min(left, SLICE_S))
            except Empty:
                continue
            if kind == "failed":
                raise HostFailed(*told)
            return kind, tuple(one.encode() if isinstance(one, str) else one for one in told)
        late = f"{tool.name}(): the host did not answer in time"
        return "raised", (b"TimeoutError", late.encode())

    def _outcome(self, tool: HostTool, arguments: Any) -> tuple[str, tuple[str | bytes, ...]]:
        try:
            args, kwargs = tool.check(*arguments)
            value = run_sync(tool.function(*args, **kwargs), LOOP, self.budget.call_s + 1.0)
        except self.machine_errors as error:
            return "failed", (f"{tool.name}(): {printable(str(error)[:MAX_TEXT])}",)
        except BaseException as error:  # SystemExit too: it is the call's, and ends nothing here
            return "raised", (type(error).__name__, printable(str(error)[:MAX_TEXT]))
        try:
            return "returned", (encode(value, self.sizes[1]),)
        except EncodeError as error:
            return "raised", ("TypeError", f"what {tool.name}() returned cannot be passed: {error}")


class _Answers:
    """Answers by name and arguments; the oldest go when there are more than CACHE_MIB of them."""

    def __init__(self) -> None:
        self._lock, self._size = threading.Lock(), 0
        self._kept: dict[tuple[str, bytes], bytes] = {}

    def get(self, key: tuple[str, bytes]) -> bytes | None:
        return self._kept.get(key)

    def put(self, key: tuple[str, bytes], answer: bytes) -> bytes:
        """The answer that is kept: where two have asked at once, the first."""
        with self._lock:
            if key not in self._kept:
                self._size += len(key[1]) + len(answer)
            kept = self._kept.setdefault(key, answer)
            while self._size > CACHE_MIB << 20:
                oldest = next(iter(self._kept))
                self._size -= len(oldest[1]) + len(self._kept.pop(oldest))
            return kept


class HostCalls:
    """The calls of one rollout: what they have used, and the answers that they got.

    Sessions of the rollout share it, one after another or at once.
    """

    def __init__(self, tools: HostTools) -> None:
        self.tools = tools
        self.calls = self.failures = self.size = 0
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._answers = tools.answers if tools.cached == "run" else _Answers()
        self._recalled: deque[HostCall] | None = None
        self._diverged = False

    def replay_answers(self, calls: Iterable[HostCall] | None) -> bool:
        """From now on the session repeats a step in which these calls were made: it is told the
        answers that were told then, and no function runs. None: from now on they run.

        Returns:
            whether what was recalled before was asked for, all of it and nothing else.
        """
        with self._lock:
            whole = not (self._recalled or self._diverged)
            self._recalled, self._diverged = None if calls is None else deque(calls), False
        return whole

    def answer(
        self, name: str, data: bytes, made: int, left_s: float, serves: object,
        stopped: Callable[[], bool],
    ) -> HostCall:  # fmt: skip
        """What a call comes to, of a step that has made some before, with time left. serves is the
        session, which the function cannot step meanwhile; nobody waits any more once stopped().

        Raises:
            Malformed: no session that is as it was sends this.
            HostFailed: the machine failed.
        """
        tool = self.tools.by_name.get(name)
        if tool is None:
            raise Malformed(f"a call of {name[:40]!r}, which is no function of the host's")
        with self._lock:
            call = self._next_recalled(name, data)
            if call is None and (spent := self._spent(made, len(data))):
                self.failures += 1
                return HostCall(name, b"", "refused", (b"RuntimeError", spent.encode()), 0.0)
            self.calls += 1
        if call is None and self._recalled is not None:
            self._diverged = True
            call = HostCall(name, data, "raised", (b"RuntimeError", OTHERWISE), 0.0)
        call = self._ask(tool, data, left_s, serves, stopped, call)
        with self._lock:
            self.failures += call.kind == "raised"
            self.size += call.size
            self.seconds += call.seconds
        return call

    def _next_recalled(self, name: str, data: bytes) -> HostCall | None:
        told = self._recalled
        return told.popleft() if told and told[0][:2] == (name, data) else None

    def _spent(self, made: int, size: int) -> str:
        """What of the budget is used up; "" if nothing is."""
        budget = self.tools.budget
        for of, what, used in (
            (budget.calls_per_step, "calls in one step", made),
            (budget.calls, "calls", self.calls),
            (budget.seconds, "seconds", self.seconds),
            (budget.total_kib, "KiB", (self.size + size) / 1024),
        ):
            if used >= of:
                return f"the budget of {of:g} {what} of functions of the host is used up"
        return ""

    def _ask(
        self, tool: HostTool, data: bytes, left_s: float, serves: object,
        stopped: Callable[[], bool], recalled: HostCall | None,
    ) -> HostCall:  # fmt: skip
        """By the function, the cache, or what is recalled, which the cache has from then on."""
        began, key, budget = time.monotonic(), (tool.name, data), self.tools.budget
        try:
            match decode(data, self.tools.sizes[0]):
                case [list(args), dict(kwargs)]:
                    pass
                case _:
                    raise Malformed("arguments of another form")
        except EncodeError as error:
            raise Malformed(f"arguments that are no data: {error}") from None
        known = None if self.tools.cached == "no" else self._answers.get(key)
        if recalled is not None:
            kind, told = recalled.kind, recalled.told
        elif known is not None:
            kind, told = "returned", (known,)
        else:
            patience = min(budget.call_s, budget.seconds - self.seconds, left_s)
            kind, told = self.tools.call(tool, (args, kwargs), patience, serves, stopped)
        if kind == "returned" and self.tools.cached != "no":
            told = (self._answers.put(key, told[0]),)
        return recalled or HostCall(tool.name, data, kind, told, time.monotonic() - began)


def within_a_call_of(session: object) -> bool:
    """Whether this runs in a function that the session has called."""
    return _serving.get() is session

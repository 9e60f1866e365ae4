"""The line that every public call crosses: what the machine refuses is SandboxInfraError behind it,
and what belongs to another process is not touched.
"""

import functools
import os
import warnings
from collections.abc import Callable
from inspect import isfunction
from typing import Any, Self, TypeVar

from agentgrpo.sandbox.isolation.errors import (
    InvalidArgumentException,
    SandboxException,
    SandboxInfraError,
)

Made = TypeVar("Made", bound=Callable[..., Any])
_SPECIAL = ("__init__", "__post_init__", "__enter__", "__exit__")
_ENDS = {"close": None, "kill": False, "__exit__": None}
CONNECTION = {
    "access_token", "api_headers", "api_key", "api_url", "debug", "domain",
    "extra_sandbox_headers", "headers", "http_version", "idempotency_key", "logger", "proxy",
    "request_timeout", "retries", "sandbox_url", "validate_api_key",
}  # fmt: skip
"""Arguments by which E2B's SDK reaches its service (ApiParams and ConnectionConfig of e2b 2.63)."""
_warned: list[str] = []


class ProcessBound:
    """What belongs to the process that made it. In one that was forked off, its public methods end
    nothing and refuse everything else, before they take a lock: whoever had it is not there.
    """

    _owner_pid: int

    def __new__(cls, *_: object, **__: object) -> Self:
        """An object of this process."""
        made = super().__new__(cls)
        made._owner_pid = os.getpid()
        return made


def public(made: Made) -> Made:
    """A function that raises SandboxInfraError for what the machine refuses (OSError, MemoryError,
    no thread); or a class whose public methods are such functions.
    """
    if not isinstance(made, type):
        guarded: Made = _guarded(made)
        return guarded
    for name, member in list(vars(made).items()):
        if name.startswith("_") and name not in _SPECIAL:
            continue
        if isfunction(member):
            setattr(made, name, _guarded(member))
        elif isinstance(member, classmethod):
            setattr(made, name, classmethod(_guarded(member.__func__)))
    return made


def _guarded(function: Any) -> Any:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], ProcessBound) and args[0]._owner_pid != os.getpid():
            if function.__name__ in _ENDS:
                return _ENDS[function.__name__]
            raise SandboxException(
                f"{function.__qualname__}(): it belongs to process {args[0]._owner_pid}, which "
                "made it"
            )
        if not CONNECTION.isdisjoint(kwargs):
            kwargs = _without_connection(kwargs)
        try:
            return function(*args, **kwargs)
        except OverflowError as error:
            raise InvalidArgumentException(_told(function, error)) from error
        except (OSError, MemoryError) as error:
            raise SandboxInfraError(_told(function, error)) from error
        except RuntimeError as error:
            if "new thread" not in str(error):
                raise
            raise SandboxInfraError(_told(function, error)) from error

    return guarded


def _without_connection(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop CONNECTION, with one warning per process."""
    ignored = sorted(name for name in CONNECTION & kwargs.keys() if kwargs[name] is not None)
    if ignored and not _warned:
        _warned.extend(ignored)
        warnings.warn(
            f"{', '.join(ignored)}: ignored, as sandboxes run on this machine without E2B's "
            "service. Other arguments of this kind are ignored without another warning",
            stacklevel=3,
        )
    return {name: value for name, value in kwargs.items() if name not in CONNECTION}


def _told(function: Any, error: Exception) -> str:
    return f"{function.__qualname__}(): {type(error).__name__}: {error}"


def as_bytes(text: str) -> bytes:
    """Text as the kernel and other programs take it, whatever is in it: lone surrogates are the
    bytes that Python's file names stand for, or else as UTF-8 would spell them.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")

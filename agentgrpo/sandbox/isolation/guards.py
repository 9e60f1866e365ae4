"""Wraps public calls: OSError and MemoryError become SandboxInfraError.

Objects of another process are refused (ProcessBound), and E2B's connection arguments are ignored.
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

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
_SPECIAL = ("__init__", "__post_init__", "__enter__", "__exit__")
_CLOSING = {"close": None, "kill": False, "__exit__": None}
"""Methods that do nothing in a forked process, and what they return there."""
CONNECTION = {
    "access_token", "api_headers", "api_key", "api_url", "debug", "domain",
    "extra_sandbox_headers", "headers", "http_version", "idempotency_key", "logger", "proxy",
    "request_timeout", "retries", "sandbox_url", "validate_api_key",
}  # fmt: skip
"""Arguments for the connection to E2B's service (ApiParams and ConnectionConfig of e2b 2.63)."""
_warned: list[str] = []


class ProcessBound:
    """An object that only the process that made it may use.

    In a forked child its methods that close do nothing and all others raise. This is checked before
    any lock is taken: the thread that held the lock at the fork does not exist in the child.
    """

    _owner_pid: int

    def __new__(cls, *_: object, **__: object) -> Self:
        instance = super().__new__(cls)
        instance._owner_pid = os.getpid()
        return instance


def wraps_os_errors(target: Decorated) -> Decorated:
    """Decorator: raise SandboxInfraError for OSError, MemoryError and a failed thread start.

    For a class: in all its public methods.
    """
    if not isinstance(target, type):
        guarded: Decorated = _guarded(target)
        return guarded
    for name, member in list(vars(target).items()):
        if name.startswith("_") and name not in _SPECIAL:
            continue
        if isfunction(member):
            setattr(target, name, _guarded(member))
        elif isinstance(member, classmethod):
            setattr(target, name, classmethod(_guarded(member.__func__)))
    return target


def _guarded(function: Any) -> Any:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], ProcessBound) and args[0]._owner_pid != os.getpid():
            if function.__name__ in _CLOSING:
                return _CLOSING[function.__name__]
            raise SandboxException(
                f"{function.__qualname__}(): the object belongs to process {args[0]._owner_pid}, "
                "which made it"
            )
        if not CONNECTION.isdisjoint(kwargs):
            kwargs = _without_connection(kwargs)
        try:
            return function(*args, **kwargs)
        except OverflowError as error:
            raise InvalidArgumentException(_message(function, error)) from error
        except (OSError, MemoryError) as error:
            raise SandboxInfraError(_message(function, error)) from error
        except RuntimeError as error:
            if "new thread" not in str(error):
                raise
            raise SandboxInfraError(_message(function, error)) from error

    return guarded


def _without_connection(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop CONNECTION, with one warning per process."""
    ignored = sorted(name for name in CONNECTION & kwargs.keys() if kwargs[name] is not None)
    if ignored and not _warned:
        _warned.extend(ignored)
        warnings.warn(
            f"{', '.join(ignored)}: ignored, because sandboxes run on this machine without E2B's "
            "service. Other connection arguments are ignored without another warning",
            stacklevel=3,
        )
    return {name: value for name, value in kwargs.items() if name not in CONNECTION}


def _message(function: Any, error: Exception) -> str:
    return f"{function.__qualname__}(): {type(error).__name__}: {error}"


def as_bytes(text: str) -> bytes:
    """Encode any text: lone surrogates as os.fsencode() does, others as UTF-8 would."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")

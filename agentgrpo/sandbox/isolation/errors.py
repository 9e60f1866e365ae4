"""Exceptions of the sandbox. ``Session.step()`` never raises for what untrusted code does.

The names that end in Exception are those of E2B's SDK, so that ``except`` clauses need no change.
"""

from collections.abc import Mapping
from typing import NamedTuple


def printable(text: str) -> str:
    """Escape what UTF-8 cannot encode (lone surrogates in file names and in text from code)."""
    return text.encode("utf-8", "backslashreplace").decode()


class SandboxException(Exception):
    """Base of all exceptions of the sandbox."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class RungFailure(NamedTuple):
    """Why a rung does not work on this machine."""

    reason: str
    remedy: str
    """What to change; "" if unknown, or if the reason has it."""


class SandboxUnavailable(SandboxException):
    """This machine cannot isolate untrusted code, so none is run. The message has the remedy.

    Args:
        reason: why.
        remedy: what to change; "" if the reason has it.
        failures: the failure of each rung that was tried.
    """

    def __init__(
        self, reason: str, remedy: str = "", failures: Mapping[str, RungFailure] | None = None
    ) -> None:
        super().__init__(f"{reason}; remedy: {remedy}" if remedy else reason)
        self.reason, self.remedy, self.failures = printable(reason), remedy, failures or {}


class TemplateUnavailable(SandboxUnavailable):
    """A template cannot be loaded: a module in its ``preload`` fails or starts threads."""


class SandboxInfraError(SandboxException):
    """The sandbox itself failed (a zygote died, no descriptor was left), not the code."""


class RateLimitException(SandboxException):
    """Too many sessions are in use."""


class SandboxBusy(RateLimitException):
    """``max_live`` sessions were in use until the timeout of ``acquire()``."""


class TimeoutException(SandboxException):
    """Code or a command exceeded its time limit."""


class InvalidArgumentException(SandboxException, ValueError):
    """An invalid argument: E2B's name for ValueError."""


class NotSupportedException(SandboxException):
    """E2B's cloud supports this, a local sandbox does not. It is an error, not ignored."""


class NotEnoughSpaceException(SandboxException):
    """A file does not fit into the session's file system."""


class NotFoundException(SandboxException):
    """Something named in a call does not exist."""


class FileNotFoundException(NotFoundException):
    """The session has no such file."""


class SandboxNotFoundException(NotFoundException):
    """The session has ended."""

"""What the sandbox raises. What untrusted code causes is never raised by ``Session.step()``.

The names ending in Exception are those of E2B's SDK, so that ``except`` clauses move over.
"""


def printable(text: str) -> str:
    """A text as any stream takes it: what cannot be encoded (names of files, text that code made)
    is spelled out.
    """
    return text.encode("utf-8", "backslashreplace").decode()


class SandboxException(Exception):
    """Base of everything raised here."""

    def __init__(self, *told: object) -> None:
        super().__init__(*(printable(one) if isinstance(one, str) else one for one in told))


class SandboxUnavailable(SandboxException):
    """This machine cannot isolate untrusted code, so none is run. The message names the remedy."""


class TemplateUnavailable(SandboxUnavailable):
    """A template cannot be loaded: a module of its ``preload`` fails or starts threads."""


class SandboxInfraError(SandboxException):
    """The sandbox itself failed (a zygote died, descriptors ran out): not the code's doing."""


class RateLimitException(SandboxException):
    """Too many sessions at once."""


class SandboxBusy(RateLimitException):
    """``max_live`` sessions stayed in use until the deadline of ``acquire()`` passed."""


class TimeoutException(SandboxException):
    """Code or a command ran out of time."""


class InvalidArgumentException(SandboxException, ValueError):
    """An argument cannot mean anything. E2B's name for ValueError, which it is as well."""


class NotSupportedException(SandboxException):
    """E2B's cloud has this, a local jail does not; it is refused rather than ignored."""


class NotEnoughSpaceException(SandboxException):
    """A file does not fit into the session's file system."""


class NotFoundException(SandboxException):
    """What was named is not there."""


class FileNotFoundException(NotFoundException):
    """No such file in the session."""


class SandboxNotFoundException(NotFoundException):
    """The session is over."""

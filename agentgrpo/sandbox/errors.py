"""What the sandbox raises. What untrusted code causes is never raised by ``Session.step()``."""


class SandboxException(Exception):
    """Base of everything raised here."""


class SandboxUnavailable(SandboxException):
    """This machine cannot isolate untrusted code, so none is run. The message names the remedy."""


class SandboxInfraError(SandboxException):
    """The sandbox itself failed (a zygote died, descriptors ran out): not the code's doing."""


class SandboxBusy(SandboxException):
    """``max_live`` sessions stayed in use until the deadline of ``acquire()`` passed."""

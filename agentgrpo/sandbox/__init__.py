"""A local sandbox for untrusted code: stateful, isolated by the kernel, milliseconds to start."""

from agentgrpo.sandbox.errors import (
    SandboxBusy,
    SandboxException,
    SandboxInfraError,
    SandboxUnavailable,
)
from agentgrpo.sandbox.limits import Limits
from agentgrpo.sandbox.pool import SandboxPool
from agentgrpo.sandbox.result import Status, StepError, StepResult
from agentgrpo.sandbox.session import Session
from agentgrpo.sandbox.template import Template

__all__ = [
    "Limits",
    "SandboxBusy",
    "SandboxException",
    "SandboxInfraError",
    "SandboxPool",
    "SandboxUnavailable",
    "Session",
    "Status",
    "StepError",
    "StepResult",
    "Template",
]

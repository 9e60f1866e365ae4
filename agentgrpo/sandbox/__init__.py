"""A local sandbox for untrusted code: stateful, isolated by the kernel, started in milliseconds."""

from agentgrpo.sandbox.e2b.api import Context, Sandbox
from agentgrpo.sandbox.e2b.async_api import AsyncSandbox
from agentgrpo.sandbox.e2b.execution import (
    CommandExitException,
    CommandResult,
    Execution,
    ExecutionError,
    Logs,
    OutputMessage,
    Result,
)
from agentgrpo.sandbox.isolation.errors import (
    FileNotFoundException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    NotFoundException,
    NotSupportedException,
    RateLimitException,
    SandboxBusy,
    SandboxException,
    SandboxInfraError,
    SandboxNotFoundException,
    SandboxUnavailable,
    TimeoutException,
)
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.isolation.template import Template, build_template, find_template
from agentgrpo.sandbox.session.console import Console
from agentgrpo.sandbox.session.host_tools import HostBudget, HostTools
from agentgrpo.sandbox.session.pool import SandboxPool
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.step_result import HostCall, StepError, StepResult, StepStatus

__all__ = [
    "AsyncSandbox", "CommandExitException", "CommandResult", "Console", "Context", "Execution",
    "ExecutionError", "FileNotFoundException", "HostBudget", "HostCall", "HostTools",
    "InvalidArgumentException", "Limits", "Logs", "NotEnoughSpaceException", "NotFoundException",
    "NotSupportedException", "OutputMessage", "RateLimitException", "Result", "Sandbox",
    "SandboxBusy", "SandboxException", "SandboxInfraError", "SandboxNotFoundException",
    "SandboxPool", "SandboxUnavailable", "Session", "StepError", "StepResult", "StepStatus",
    "Template", "TimeoutException", "build_template", "find_template",
]  # fmt: skip

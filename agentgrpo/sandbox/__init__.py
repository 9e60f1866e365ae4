"""A local sandbox for untrusted code: stateful, isolated by the kernel, milliseconds to start."""

from agentgrpo.sandbox.api import Context, Sandbox
from agentgrpo.sandbox.async_api import AsyncSandbox
from agentgrpo.sandbox.console import Console
from agentgrpo.sandbox.errors import (
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
from agentgrpo.sandbox.execution import (
    CommandExitException,
    CommandResult,
    Execution,
    ExecutionError,
    Logs,
    OutputMessage,
    Result,
)
from agentgrpo.sandbox.host_tools import HostBudget, HostCall, HostTools
from agentgrpo.sandbox.limits import Limits
from agentgrpo.sandbox.pool import SandboxPool
from agentgrpo.sandbox.result import StepError, StepResult, StepStatus
from agentgrpo.sandbox.session import Session
from agentgrpo.sandbox.template import Template
from agentgrpo.sandbox.templates import build_template, find_template

__all__ = [
    "AsyncSandbox", "CommandExitException", "CommandResult", "Console", "Context", "Execution",
    "ExecutionError", "FileNotFoundException", "HostBudget", "HostCall", "HostTools",
    "InvalidArgumentException", "Limits", "Logs", "NotEnoughSpaceException", "NotFoundException",
    "NotSupportedException", "OutputMessage", "RateLimitException", "Result", "Sandbox",
    "SandboxBusy", "SandboxException", "SandboxInfraError", "SandboxNotFoundException",
    "SandboxPool", "SandboxUnavailable", "Session", "StepError", "StepResult", "StepStatus",
    "Template", "TimeoutException", "build_template", "find_template",
]  # fmt: skip

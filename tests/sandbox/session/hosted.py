"""Host functions for the tests, and a list of their calls."""

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

from agentgrpo.sandbox import (
    HostBudget,
    HostCall,
    HostTools,
    SandboxInfraError,
    StepResult,
)
from agentgrpo.sandbox.session.host_tools import HostCalls

LATE = 10.0
"""Seconds that a busy machine may add to a limit; far below what a hang would take."""
seen: list[Any] = []
"""What the functions below were called with."""


def add(a: int, b: int = 1) -> int:
    """The sum."""
    seen.append((a, b))
    return a + b


async def later(seconds: float, value: str = "late") -> str:
    """A text, after a while."""
    seen.append(value)
    await asyncio.sleep(seconds)
    return value


def fail(kind: str) -> Any:
    """Does what it should not."""
    seen.append(kind)
    if kind == "object":
        return object()
    if kind == "print":
        sys.stdout.write("to the host's own stdout")
        return "printed"
    if kind == "large":
        return "x" * 10_000
    if kind == "unprintable":

        class Unprintable(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        raise Unprintable
    raised: dict[str, BaseException] = {
        "value": ValueError("a bad value"), "exit": SystemExit(3), "key": KeyError("k"),
        "own": Own("mine"), "machine": SandboxInfraError("the index is down"),
        "long": ValueError("y" * 9999),
    }  # fmt: skip
    raise raised[kind]


class Own(Exception):
    """Of the host's."""


release = threading.Event()


def hang() -> str:
    """Until it is let go."""
    seen.append("hang")
    release.wait(60)
    return "too late"


def tools(*functions: Callable[..., Any], cached: Any = "no", **budget: Any) -> HostTools:
    return HostTools(functions or (add, later, fail, hang), budget=HostBudget(**budget),
                     cached=cached)  # fmt: skip


def answer(calls: HostCalls, name: str, data: bytes = b"[[],{}]") -> HostCall:
    return calls.answer(name, data, 0, 9.0, None, lambda: False)


def error_of(result: StepResult) -> tuple[str, str]:
    assert result.error is not None, result
    return result.error.name, result.error.value

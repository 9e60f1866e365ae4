"""Tools of a Model Context Protocol server over stdio, with the official client (package mcp).

Each rollout has its own server process, started at the first call, so rollouts share no state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agentgrpo.actions import Action, InfrastructureError, Observation, Schema, ToolCall
from agentgrpo.envs.base import AsyncEpisode
from agentgrpo.envs.tools import (
    ToolResult,
    calls_of,
    observation_of,
    show,
    tool_schema,
    unknown_tool,
)
from agentgrpo.support.optional_deps import import_optional
from agentgrpo.types import Task


class McpEnv:
    """Episodes of one MCP server.

    Args:
        command: the server's executable.
        args: its arguments.
        env: additional environment variables.

    Raises:
        ValueError: the server does not start, or the package mcp is missing.
    """

    answers = ("tools",)
    timeout_s = 30.0
    """Limit of one call, after which the policy gets an error, and of the server's start."""

    def __init__(
        self, command: str, args: Sequence[str] = (), *, env: Mapping[str, str] | None = None
    ) -> None:
        variables = dict(env) if env is not None else None
        self.parameters = import_optional("mcp", "env.kind = 'mcp'").StdioServerParameters(
            command=command, args=list(args), env=variables
        )
        try:
            tools = asyncio.run(self._list_tools())
        except Exception as error:  # a program that is not an MCP server can fail in any way
            raise ValueError(f"command {command!r}: no MCP server answered: {error!r}") from error
        schemas = {
            tool.name: tool_schema(tool.name, tool.description or "", tool.input_schema)
            for tool in tools
        }
        self.schemas: tuple[Schema, ...] = tuple(schemas.values())

    async def _list_tools(self) -> list[Any]:
        from mcp import Client

        async with asyncio.timeout(self.timeout_s), Client(self.parameters) as client:
            page = await client.list_tools()
            tools = list(page.tools)
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                tools += page.tools
            return tools

    def tools(self, task: Task) -> Sequence[Schema]:
        return self.schemas

    def reset(self, task: Task) -> McpEpisode:
        return McpEpisode(self)


class McpEpisode(AsyncEpisode):
    """One server process. Its client runs in one asyncio task, as the library requires."""

    def __init__(self, env: McpEnv) -> None:
        self._env = env
        self._names = {schema["function"]["name"] for schema in env.schemas}
        self._client: asyncio.Future[Any] | None = None
        self._server: asyncio.Task[None] | None = None

    async def step(self, action: Action) -> Observation:
        calls = calls_of(action)
        client = await self._connected()
        return observation_of(await asyncio.gather(*(self._call(client, call) for call in calls)))

    async def _connected(self) -> Any:
        if self._client is None:
            self._client = asyncio.get_running_loop().create_future()
            self._server = asyncio.create_task(self._serve(self._client))
        try:
            return await self._client
        except Exception as error:  # as in __init__: a program may fail in any way
            raise InfrastructureError(f"the MCP server did not start: {error!r}") from error

    async def _serve(self, ready: asyncio.Future[Any]) -> None:
        from mcp import Client

        try:
            async with (
                asyncio.timeout(self._env.timeout_s) as start,
                Client(self._env.parameters) as client,
            ):
                start.reschedule(None)
                ready.set_result(client)
                await asyncio.Event().wait()  # until close() cancels it
        except Exception as error:  # _connected() raises it if the server has not started
            if not ready.done():
                ready.set_exception(error)

    async def _call(self, client: Any, call: ToolCall) -> ToolResult:
        if call.name not in self._names:
            return ToolResult(unknown_tool(call, sorted(self._names)), "unknown_tool")
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS

        try:
            async with asyncio.timeout(self._env.timeout_s):
                result = await client.call_tool(call.name, dict(call.arguments))
        except TimeoutError:
            return ToolResult(f"TimeoutError: over {self._env.timeout_s:g} s", "tool_exception")
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise InfrastructureError(f"the MCP server ended in {call.name}") from error
            if error.code == INVALID_PARAMS:
                return ToolResult(f"BadArguments: {error}", "bad_arguments")
            return ToolResult(f"MCPError: {error}", "tool_exception")
        except (RuntimeError, ValueError) as error:  # the client's error for an invalid schema
            message = f"{call.name}: the server's answer is not valid: {error}"
            return ToolResult(message, "tool_exception")
        return ToolResult(_result_text(result), "tool_exception" if result.is_error else "")

    async def close(self) -> None:
        if self._server is not None:
            self._server.cancel()  # the client then terminates or kills the process
            await asyncio.wait([self._server])


def _result_text(result: Any) -> str:
    """A result's blocks, one per line. Without blocks, its structured content as JSON."""
    if not result.content and result.structured_content is not None:
        return show(result.structured_content)
    return "\n".join(map(_block_text, result.content))


def _block_text(block: Any) -> str:
    if block.type == "resource_link":
        return f"{block.name}: {block.uri}"
    text = getattr(getattr(block, "resource", block), "text", None)
    return f"({block.type}: not shown)" if text is None else str(text)

"""Tools of a Model Context Protocol server, over its standard streams, by the official client.

Every rollout has a server process of its own, started at its first call, so that members of a group
share nothing. The package mcp is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agentgrpo.actions import Action, InfrastructureError, Observation, Schema, ToolCall
from agentgrpo.envs.base import AsyncEpisode
from agentgrpo.envs.tools import Answer, calls_of, observed, show, tool_schema, unknown_tool
from agentgrpo.support.optional_deps import import_optional
from agentgrpo.types import Task


class McpEnv:
    """Episodes of one server program.

    Args:
        command: the executable that starts it.
        args: its arguments.
        env: further environment variables.

    Raises:
        ValueError: the server does not start, or the package is missing.
    """

    answers = ("tools",)
    timeout_s = 30.0
    """Of one call, where an answer that takes longer is an error for the policy; and of the
    server's start."""

    def __init__(
        self,
        command: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        given = dict(env) if env is not None else None
        self.parameters = import_optional("mcp", "env.kind = 'mcp'").StdioServerParameters(
            command=command, args=list(args), env=given
        )
        try:
            found = asyncio.run(self._list())
        except Exception as error:  # whatever a program may do that is no such server
            raise ValueError(f"command {command!r}: no MCP server answered: {error!r}") from error
        schemas = {
            tool.name: tool_schema(tool.name, tool.description or "", tool.input_schema)
            for tool in found
        }
        self.schemas: tuple[Schema, ...] = tuple(schemas.values())

    async def _list(self) -> list[Any]:
        from mcp import Client

        async with asyncio.timeout(self.timeout_s), Client(self.parameters) as client:
            page = await client.list_tools()
            found = list(page.tools)
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                found += page.tools
            return found

    def tools(self, task: Task) -> Sequence[Schema]:
        return self.schemas

    def reset(self, task: Task) -> McpEpisode:
        """An episode whose server is not started yet."""
        return McpEpisode(self)


class McpEpisode(AsyncEpisode):
    """One server process, whose client lives in a task of its own, as its library wants."""

    def __init__(self, env: McpEnv) -> None:
        self._env = env
        self._names = {schema["function"]["name"] for schema in env.schemas}
        self._client: asyncio.Future[Any] | None = None
        self._server: asyncio.Task[None] | None = None

    async def step(self, action: Action) -> Observation:
        """Make the calls of a turn at once; answers keep their order."""
        calls = calls_of(action)
        client = await self._connected()
        return observed(await asyncio.gather(*(self._call(client, call) for call in calls)))

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
        except Exception as error:  # handed to who waits for the client, if it had not begun
            if not ready.done():
                ready.set_exception(error)

    async def _call(self, client: Any, call: ToolCall) -> Answer:
        if call.name not in self._names:
            return Answer(unknown_tool(call, sorted(self._names)), "unknown_tool")
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS

        try:
            async with asyncio.timeout(self._env.timeout_s):
                result = await client.call_tool(call.name, dict(call.arguments))
        except TimeoutError:
            return Answer(f"TimeoutError: over {self._env.timeout_s:g} s", "tool_exception")
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise InfrastructureError(f"the MCP server ended in {call.name}") from error
            if error.code == INVALID_PARAMS:
                return Answer(f"BadArguments: {error}", "bad_arguments")
            return Answer(f"MCPError: {error}", "tool_exception")
        except (RuntimeError, ValueError) as error:  # as its client tells of what breaks a schema
            said = f"{call.name}: the server's answer is not valid: {error}"
            return Answer(said, "tool_exception")
        return Answer(_text_of(result), "tool_exception" if result.is_error else "")

    async def close(self) -> None:
        """End the server, if it was started or is about to."""
        if self._server is not None:
            self._server.cancel()  # its client then ends the process, whatever that does
            await asyncio.wait([self._server])


def _text_of(result: Any) -> str:
    """An answer's blocks, line by line; without any, what it holds as JSON."""
    if not result.content and result.structured_content is not None:
        return show(result.structured_content)
    return "\n".join(map(_shown, result.content))


def _shown(block: Any) -> str:
    if block.type == "resource_link":
        return f"{block.name}: {block.uri}"
    text = getattr(getattr(block, "resource", block), "text", None)
    return f"({block.type}: not shown)" if text is None else str(text)

"""Servers of the Model Context Protocol: what they answer, and what they break."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from agentgrpo.actions import MAX_DEPTH, CallTools, InfrastructureError, ToolCall
from agentgrpo.envs.adapters.mcp import McpEnv
from agentgrpo.envs.runner import EpisodeRunner
from tests.playing import call, task

pytest.importorskip("mcp", reason="mcp is in requirements-cpu.txt")

SERVER = '''
from mcp.server.mcpserver import MCPServer
server = MCPServer("test")
seen = []

@server.tool()
def remember(word: str) -> str:
    """Remember a word."""
    seen.append(word)
    return ",".join(seen)

@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no")

@server.tool()
def end() -> str:
    """End the server."""
    import os
    os._exit(3)

server.run("stdio")
'''


@pytest.fixture(scope="module")
def mcp(tmp_path_factory: pytest.TempPathFactory) -> McpEnv:
    script = tmp_path_factory.mktemp("mcp") / "server.py"
    script.write_text(SERVER)
    return McpEnv(sys.executable, [str(script)])


@pytest.mark.slow
def test_mcp_server_per_rollout(mcp: McpEnv) -> None:
    names = [schema["function"]["name"] for schema in mcp.tools(task())]
    assert names == ["remember", "fail", "end"]
    runner = EpisodeRunner(1)
    one, two = mcp.reset(task()), mcp.reset(task())
    assert runner.step(one, call("remember", word="a")).result(60).text == "a"
    assert runner.step(two, call("remember", word="b")).result(60).text == "b"
    assert runner.step(one, call("remember", word="c")).result(60).text == "a,c"
    told = runner.step(one, CallTools((ToolCall("fail", {}), ToolCall("nowhere", {})))).result(60)
    assert "Error executing tool fail" in told.outputs[0]
    assert told.counts == {"tool_exception": 1.0, "unknown_tool": 1.0}
    deep: Any = "d"
    for _ in range(MAX_DEPTH - 1):  # of lists in an object
        deep = [deep]
    said = runner.step(two, call("remember", word=deep)).result(60)
    assert "Input should be a valid string" in said.text
    with pytest.raises(InfrastructureError, match="the MCP server ended in end"):
        runner.step(one, call("end")).result(60)
    assert runner.finish(one, None).result(60) == {}
    runner.close(two).result(60)


@pytest.mark.slow
def test_program_that_is_not_an_mcp_server_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"command .*: no MCP server answered"):
        McpEnv(sys.executable, ["-c", "print('hello')"])


RAW_SERVER = """
import json, sys

NAMES = ["wrong", "text", "link", "both", "image", "data", "null", "internal", "params"]
BLOCKS = {
    "text": [{"type": "resource", "resource": {"uri": "file:///a", "text": "the file"}}],
    "link": [{"type": "resource_link", "uri": "file:///a.txt", "name": "a.txt"}],
    "both": [{"type": "text", "text": "see"}, {"type": "image", "data": "aGk=", "mimeType": "i/p"}],
    "image": [{"type": "image", "data": "aGk=", "mimeType": "i/p"}],
    "null": None,
}
def listed(cursor):
    start = int(cursor or 0)
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in NAMES[start : start + 4]]
    for tool in tools:
        if tool["name"] == "wrong":
            tool["outputSchema"] = {"type": "object", "required": ["n"]}
    end = {} if start + 4 >= len(NAMES) else {"nextCursor": str(start + 4)}
    return {"tools": tools, **end}

def called(name):
    if name in ("internal", "params"):
        return {"error": {"code": {"internal": -32603, "params": -32602}[name], "message": "no"}}
    data = {"data": {"n": 1}, "wrong": {}}
    told = {"structuredContent": data[name]} if name in data else {}
    return {"result": {"content": BLOCKS.get(name, []), **told}}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    given, method = asked.get("params", {}), asked["method"]
    told = {"error": {"code": -32601, "message": "no such method"}}
    if method == "initialize":
        server = {"capabilities": {"tools": {}}, "serverInfo": {"name": "raw", "version": "1"}}
        told = {"result": {"protocolVersion": given["protocolVersion"], **server}}
    elif method == "tools/list":
        told = {"result": listed(given.get("cursor"))}
    elif method == "tools/call":
        told = called(given["name"])
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **told}), flush=True)
"""


def test_mcp_errors_are_results_for_the_policy() -> None:
    env = McpEnv(sys.executable, ["-c", RAW_SERVER])
    names = [schema["function"]["name"] for schema in env.tools(task())]
    assert names == ["wrong", "text", "link", "both", "image", "data", "null", "internal", "params"]
    runner, episode = EpisodeRunner(1), env.reset(task())
    told = runner.step(episode, CallTools(tuple(ToolCall(n, {}) for n in names))).result(60)
    runner.close(episode).result(60)
    shown = dict(zip(names, told.outputs, strict=True))
    assert shown["text"] == "the file"
    assert shown["link"] == "a.txt: file:///a.txt"
    assert shown["both"] == "see\n(image: not shown)"
    assert shown["image"] == "(image: not shown)"
    assert shown["data"] == '{"n": 1}'
    assert shown["wrong"].startswith("wrong: the server's answer is not valid: Invalid structured")
    assert shown["null"].startswith("null: the server's answer is not valid: ")
    assert shown["internal"].startswith("MCPError: ")
    assert shown["params"].startswith("BadArguments: ")
    assert told.counts == {"tool_exception": 3.0, "bad_arguments": 1.0}

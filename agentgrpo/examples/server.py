"""A server of the Model Context Protocol, on its standard streams, with one tool."""

from mcp.server.mcpserver import MCPServer

from agentgrpo.envs.calculator import calculate

server = MCPServer("calculator")
server.tool()(calculate)

if __name__ == "__main__":
    server.run("stdio")

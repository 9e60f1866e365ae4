"""A server of the Model Context Protocol, on its standard streams, with one tool."""

from mcp.server.mcpserver import MCPServer

from agentgrpo.envs.calculator import calculate

# a tool's exception is the policy's answer: no traceback of it on the terminal
server = MCPServer("calculator", log_level="CRITICAL")
server.tool()(calculate)

if __name__ == "__main__":
    server.run("stdio")

"""A server of the Model Context Protocol over stdio with one tool."""

from mcp.server.mcpserver import MCPServer

from agentgrpo.envs.calculator import calculate

# an exception of the tool is a result for the policy, so its traceback is not logged
server = MCPServer("calculator", log_level="CRITICAL")
server.tool()(calculate)

if __name__ == "__main__":
    server.run("stdio")

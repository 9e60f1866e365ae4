"""User programs that call the policy over HTTP (agent.kind = "program")."""

"""Programs of the user's that ask the policy over HTTP: agent.kind = "program"."""

"""What the environment answers to an action."""

"""What the world answers to an action."""

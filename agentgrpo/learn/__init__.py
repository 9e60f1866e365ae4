"""The trained side: what a step learns from its rollouts."""

"""Playing groups of rollouts, and what each turn adds in tokens."""

from agentgrpo.rollout.batch import generate

__all__ = ["generate"]

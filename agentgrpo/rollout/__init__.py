"""Playing groups of rollouts, and what each turn adds in tokens."""

from agentgrpo.rollout.sampler import generate

__all__ = ["generate"]

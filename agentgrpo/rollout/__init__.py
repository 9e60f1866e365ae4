"""Plays groups of rollouts and records their tokens."""

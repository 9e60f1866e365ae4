"""Agents: turn tasks into messages, sampled text into actions, observations into text."""

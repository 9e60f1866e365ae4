"""agentgrpo: train LLM agents with GRPO in one process. Imports nothing, so a kernel is cheap to reach."""

__version__ = "0.1.0"

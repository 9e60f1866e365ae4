"""agentgrpo: train LLM agents with GRPO in one process. This file imports nothing."""

__version__ = "0.1.0"

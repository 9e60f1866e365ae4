"""The engine: vLLM in this process, weights shared with the learner, and the agreement check."""

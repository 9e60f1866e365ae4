"""The engine: vLLM in this process, the weights it shares, the proof that both sides agree."""

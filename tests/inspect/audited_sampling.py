"""A sampler without vLLM: a Hugging Face model, token by token, with vLLM's order of filters.

It shares no code with agentgrpo.inspect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Ids = list[list[int]]


@torch.no_grad()
def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    num_tokens: int = 12,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> tuple[Ids, list[list[float]]]:
    """Completions of prompts of equal length, with the log-probabilities after the filters."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([list(prompt) for prompt in prompts])
    logprobs = []
    for _ in range(num_tokens):
        logits = model(ids).logits[:, -1].double() / temperature
        probs = logits.softmax(-1)
        logits[probs < min_p * probs.max(-1, keepdim=True).values] = -torch.inf
        if top_k:
            logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
        probs, order = logits.softmax(-1).sort(descending=True)
        dropped = probs.cumsum(-1) - probs >= top_p
        logits[dropped.scatter(1, order, dropped)] = -torch.inf
        logp = logits.log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=generator)
        logprobs.append(logp.gather(1, token))
        ids = torch.cat([ids, token], 1)
    return ids[:, -num_tokens:].tolist(), torch.cat(logprobs, 1).tolist()

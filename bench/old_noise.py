"""Train on a CPU with the random numbers of vLLM 0.24, to compare a newer vLLM with it.

    python -m bench.old_noise CONFIG [section.key=value ...]

With vLLM 0.24 each token's noise is torch's exponential noise from the request's generator; vLLM
0.32 has its own kernel for it. With the same noise both train on the same rollouts.
"""

from __future__ import annotations

import sys
from typing import Any

from agentgrpo.support.runtime import prepare_environment


def draw(self: Any, logits: Any, generators: dict[int, Any], k: Any, p: Any) -> tuple[Any, Any]:
    """VLLM 0.24's TopKTopPSampler.forward_cpu, where each row has a generator."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, k, p)
    modes = {
        "processed_logits": lambda: logits,
        "processed_logprobs": lambda: logits.log_softmax(-1),
    }
    shown = modes.get(self.logprobs_mode, lambda: None)()
    if len(generators) != len(logits):
        raise ValueError("a request has no seed: expected rollout.deterministic = true")
    probs = logits.softmax(-1)
    noise = probs.clone()
    for row, generator in generators.items():
        noise[row].exponential_(generator=generator)
    return probs.div_(noise).argmax(-1), shown


if __name__ == "__main__":
    prepare_environment()
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from agentgrpo.train.__main__ import main

    setattr(TopKTopPSampler, "forward_cpu", draw)  # noqa: B010
    raise SystemExit(main(sys.argv[1:]))

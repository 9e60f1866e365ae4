"""What vLLM's core says of a request, step by step, until it is a Completion.

vLLM's own processing of outputs builds for each token of each request what a server would send: a
rank, text, a probability by name. Here a token is its id and one float, kept until the turn ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgrpo.models.encoding import ids_from_list
from agentgrpo.types import Completion, Float32, Turn


@dataclass(slots=True, eq=False)
class Request:
    """One that is in flight.

    `core_id` is vLLM's, another each time the caller uses one again: what was scheduled ahead for a
    request that has ended is never taken for that of the next. `text` is vLLM's detokenizer, which
    finds stop strings.
    """

    request_id: str
    core_id: str
    prompt_ids: list[int]
    text: Any
    top_logprobs: int
    on_token: Callable[[int], bool] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    num_cached_tokens: int | None = None
    finish_reason: str = ""
    """Once it has ended, and why."""
    stop_reason: int | str | None = None
    _top: list[tuple[NDArray[np.int32], Float32]] = field(default_factory=list)

    def take(self, output: Any) -> bool:
        """Add what one step gave, an EngineCoreOutput of vLLM; returns whether it has ended."""
        self.token_ids += output.new_token_ids
        said = output.new_logprobs
        if said is not None:
            for row in said.logprobs:
                self.logprobs.append(row[0])
            if self.top_logprobs:
                width = 1 + self.top_logprobs
                self._top.append(
                    (said.logprob_token_ids[:, :width].copy(), said.logprobs[:, :width].copy())
                )
        if self.num_cached_tokens is None and output.prefill_stats is not None:
            self.num_cached_tokens = output.prefill_stats.num_cached_tokens
        reason = output.finish_reason
        if reason is not None:
            self.finish_reason, self.stop_reason = str(reason), output.stop_reason
        if self.text is not None:
            found = self.text.update(output.new_token_ids, self.finish_reason == "stop")
            if found is not None:
                self.finish_reason, self.stop_reason = "stop", found
        if self.on_token is not None and any(map(self.on_token, output.new_token_ids)):
            self.finish_reason, self.stop_reason = "stop", None
        return bool(self.finish_reason)

    def completion(self) -> Completion:
        """What it came to."""
        logprobs = np.frombuffer(self.logprobs, np.float32)
        if not np.isfinite(logprobs).all():
            at = int(np.flatnonzero(~np.isfinite(logprobs))[0])
            raise FloatingPointError(
                f"request {self.request_id!r}: the sampler gave its token {at} the log-probability "
                f"{logprobs[at]}; the weights or an activation are no longer finite"
            )
        token_ids = ids_from_list(self.token_ids)
        ids, top = zip(*self._top, strict=True) if self._top else ((), ())
        return Completion(
            request_id=self.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_cached_tokens=self.num_cached_tokens or 0,
            account=Turn.of(ids_from_list(self.prompt_ids), token_ids, self.finish_reason),
            entropies=token_entropies(np.concatenate(ids), np.concatenate(top))
            if ids
            else np.zeros(0, np.float32),
        )


def token_entropies(token_ids: NDArray[np.int32], logprobs: Float32) -> Float32:
    """[T]: entropy in nats of each position's distribution, from the log-probabilities of the
    likeliest.

    Whatever they leave of the probability counts as one further outcome, so the value is a lower
    bound, exact if all tokens are given. Both are [T, K]: the sampled one and then the likeliest,
    among which it may stand again.
    """
    logp = logprobs.astype(np.float64)
    p = np.exp(logp)
    p[:, 1:][token_ids[:, 1:] == token_ids[:, :1]] = 0.0
    # rounding may take the sum past 1; p log p is 0 where p is, and not 0 * -inf
    rest = np.maximum(0.0, 1.0 - p.sum(-1))
    known = p * np.where(p > 0, logp, 0.0)
    left = rest * np.log(np.where(rest > 0, rest, 1.0))
    entropies: Float32 = (-known.sum(-1) - left).astype(np.float32)
    return entropies

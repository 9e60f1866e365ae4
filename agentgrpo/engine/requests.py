"""A request's tokens and log-probabilities, accumulated from vLLM's core outputs until it finishes.

vLLM's own output processing builds for each token of each request what a server would send: a rank,
text, a probability by name. Here a token is its id and one float until the turn ends.
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
    """A request in flight.

    `core_id` is vLLM's id, a new one each time the caller reuses a request_id: outputs scheduled
    ahead for a finished request are never taken for those of the next. `text` is vLLM's
    detokenizer, which finds stop strings.
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
    """Empty until the request has ended."""
    stop_reason: int | str | None = None
    _top: list[tuple[NDArray[np.int32], Float32]] = field(default_factory=list)

    def append(self, output: Any) -> bool:
        """Add an EngineCoreOutput of vLLM; returns whether the request has ended."""
        self.token_ids += output.new_token_ids
        new = output.new_logprobs
        if new is not None:
            for row in new.logprobs:
                self.logprobs.append(row[0])
            if self.top_logprobs:
                width = 1 + self.top_logprobs
                self._top.append(
                    (new.logprob_token_ids[:, :width].copy(), new.logprobs[:, :width].copy())
                )
        if self.num_cached_tokens is None and output.prefill_stats is not None:
            self.num_cached_tokens = output.prefill_stats.num_cached_tokens
        reason = output.finish_reason
        if reason is not None:
            self.finish_reason, self.stop_reason = str(reason), output.stop_reason
        if self.text is not None:
            stop_string = self.text.update(output.new_token_ids, self.finish_reason == "stop")
            if stop_string is not None:
                self.finish_reason, self.stop_reason = "stop", stop_string
        if self.on_token is not None and any(map(self.on_token, output.new_token_ids)):
            self.finish_reason, self.stop_reason = "stop", None
        return bool(self.finish_reason)

    def completion(self) -> Completion:
        logprobs = np.frombuffer(self.logprobs, np.float32)
        if not np.isfinite(logprobs).all():
            index = int(np.flatnonzero(~np.isfinite(logprobs))[0])
            raise FloatingPointError(
                f"request {self.request_id!r}: the sampler gave its token {index} the "
                f"log-probability {logprobs[index]}; the weights or an activation are not finite"
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
    """Entropy in nats of each position [T]: a lower bound from the likeliest log-probabilities.

    The remaining probability counts as one further outcome, so the bound is exact if all tokens are
    given. Both arguments are [T, K]: the sampled token, then the likeliest, which may include it
    again.
    """
    logp = logprobs.astype(np.float64)
    p = np.exp(logp)
    p[:, 1:][token_ids[:, 1:] == token_ids[:, :1]] = 0.0
    # rounding may push the sum above 1; p log p is 0 where p is 0, not 0 * -inf
    rest = np.maximum(0.0, 1.0 - p.sum(-1))
    listed = p * np.where(p > 0, logp, 0.0)
    unlisted = rest * np.log(np.where(rest > 0, rest, 1.0))
    entropies: Float32 = (-listed.sum(-1) - unlisted).astype(np.float32)
    return entropies

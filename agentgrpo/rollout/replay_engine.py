"""A decoder without a model: a script returns the policy's turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentgrpo.types import Completion, Int32, Turn

Script = Callable[[int, int, Int32], tuple[Sequence[int], str]]
"""script(rollout index, turn, prompt ids) -> (sampled ids, finish reason). Turns count from 0; -1:
a turn of the second role."""


@dataclass(slots=True)
class Scripted:
    """A Decoder for rollouts that are played once each."""

    script: Script
    max_model_len: int
    _turns: Counter[str] = field(default_factory=Counter)
    _queue: dict[str, Completion] = field(default_factory=dict)

    def add_request(self, request_id: str, prompt_ids: Int32, *, max_tokens: int, **_: Any) -> None:
        index, *rest = request_id.split(".")
        is_policy = len(rest) < 3  # Play._request_reply() adds a fourth number
        turn = self._turns[index] if is_policy else -1
        ids, finish_reason = self.script(int(index), turn, prompt_ids)
        self._turns[index] += is_policy
        token_ids = np.array(ids[:max_tokens], np.int32)
        self._queue[request_id] = Completion(
            request_id=request_id, token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), np.float32),
            finish_reason=finish_reason, stop_reason=None, num_cached_tokens=0,
            account=Turn.of(prompt_ids, token_ids, finish_reason),
        )  # fmt: skip

    def step(self) -> list[Completion]:
        completions, self._queue = list(self._queue.values()), {}
        return completions

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._queue.pop(request_id, None)

"""An engine without a model: it replays the turns of a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentgrpo.types import Completion, Int32, Turn

Script = Callable[[int, int, Int32], tuple[Sequence[int], str]]
"""Of a rollout's index, the turn (from 0; -1: it is somebody else's, whom an engine plays too) and
the prompt's ids: the ids that are said, and the finish reason."""


@dataclass(slots=True)
class Scripted:
    """A decoder.Decoder of rollouts that are played once each."""

    says: Script
    max_model_len: int
    _turns: Counter[str] = field(default_factory=Counter)
    _queue: dict[str, Completion] = field(default_factory=dict)

    def add_request(self, request_id: str, prompt_ids: Int32, *, max_tokens: int, **_: Any) -> None:
        index, *rest = request_id.split(".")
        own = len(rest) < 3
        ids, why = self.says(int(index), self._turns[index] if own else -1, prompt_ids)
        self._turns[index] += own
        said = np.array(ids[:max_tokens], np.int32)
        self._queue[request_id] = Completion(
            request_id=request_id, token_ids=said, logprobs=np.zeros(len(said), np.float32),
            finish_reason=why, stop_reason=None, num_cached_tokens=0,
            account=Turn.of(prompt_ids, said, why),
        )  # fmt: skip

    def step(self) -> list[Completion]:
        done, self._queue = list(self._queue.values()), {}
        return done

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._queue.pop(request_id, None)

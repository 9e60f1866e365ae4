"""Shares one engine between tests: vLLM starts once and gets its initial weights back each time."""

from __future__ import annotations

from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.support.hardware import has_nvidia_gpu
from agentgrpo.train.build import build, open_engine, play_on, start_engine
from agentgrpo.train.parts import Parts


class Engines:
    """Keeps the last started engine for the next run with the same model and engine settings."""

    _key: tuple[Any, ...] = ()
    _engine: Any = None
    _initial_weights: Any = None

    def build(self, config: TrainConfig) -> Parts:
        """Replacement for agentgrpo.train.build.build()."""
        return build(config, start=self._start)

    def _start(self, config: TrainConfig, parts: Parts, *, trained: bool) -> None:
        if config.engine.tensor_parallel_size > 1 or config.learner.lora.rank or parts.adapter:
            self.close()  # a process can hold only one engine
            start_engine(config, parts, trained=trained)
            return
        device = "cuda" if has_nvidia_gpu() else "cpu"
        key = (parts.model, config.on(device).engine, config.seed)
        if key != self._key:
            self.close()
            self._engine = open_engine(config, parts, trained=trained)
            self._initial_weights = {
                k: v.clone() for k, v in self._engine.model.state_dict().items()
            }
            self._key = key
        engine = self._engine
        engine.wake()
        engine.abort_all()
        engine.model.load_state_dict(self._initial_weights)
        play_on(engine, config, parts)

    def close(self) -> None:
        engine = self._engine
        vars(self).clear()
        if engine is not None:
            engine.shutdown()


SHARED: list[Engines] = []
"""The session's engine (plugin.py); empty: each test starts its own."""

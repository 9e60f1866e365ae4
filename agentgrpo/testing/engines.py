"""One engine for several tests: vLLM starts once, and gets its first weights back each time."""

from __future__ import annotations

from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.support.hardware import has_nvidia_gpu
from agentgrpo.train.build import EvalParts, TrainParts, build, sampler_on, start_engine
from agentgrpo.train.prepare import RunSetup


class Engines:
    """Keeps the last engine that was started, for the next run of the same model and settings."""

    _key: tuple[Any, ...] = ()
    _engine: Any = None
    _first: Any = None  # its weights as they were read

    def build(self, config: TrainConfig) -> TrainParts:
        """As agentgrpo.train.build.build()."""
        return build(config, start=self._start)

    def _start(self, config: TrainConfig, setup: RunSetup, *, trained: bool) -> EvalParts:
        if config.engine.tensor_parallel_size > 1 or config.learner.lora.rank or setup.adapter:
            self.close()  # two engines in one process disturb each other
            return start_engine(config, setup, trained=trained)
        device = "cuda" if has_nvidia_gpu() else "cpu"
        key = (setup.model, config.on(device).engine, config.seed)
        if key != self._key:
            self.close()
            self._engine = start_engine(config, setup, trained=trained).engine
            self._first = {k: v.clone() for k, v in self._engine.model.state_dict().items()}
            self._key = key
        engine = self._engine
        engine.wake()
        engine.abort_all()
        engine.model.load_state_dict(self._first)
        parts = {"setup": setup, "model": setup.model, "engine": engine}
        return EvalParts(**parts, sampler=sampler_on(engine, config, setup), borrowed=True)

    def close(self) -> None:
        """End the engine."""
        engine = self._engine
        vars(self).clear()
        if engine is not None:
            engine.shutdown()


SHARED: list[Engines] = []
"""The one that all tests of a session use (plugin.py); empty: each has its own."""

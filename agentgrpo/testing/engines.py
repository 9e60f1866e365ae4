"""One engine for several tests: vLLM starts once, and gets its first weights back each time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentgrpo.config import TrainConfig
from agentgrpo.machine.hardware import has_nvidia_gpu
from agentgrpo.setup.build import EvalParts, TrainParts, build, sampler_on, start_engine
from agentgrpo.setup.stage import RunSetup

if TYPE_CHECKING:
    import torch


@dataclass
class Engines:
    """Keeps the last engine that was started, for the next run of the same model and settings.

    Two engines in one process disturb each other, so another one ends it first.
    """

    _key: tuple[Any, ...] = ()
    _player: EvalParts | None = None
    _first: dict[str, torch.Tensor] = field(default_factory=dict)
    """Its weights as they were read."""

    def build(self, config: TrainConfig) -> TrainParts:
        """As agentgrpo.setup.build.build()."""
        return build(config, start=self._start)

    def _start(self, config: TrainConfig, setup: RunSetup, *, trained: bool) -> EvalParts:
        lora = config.learner.lora.rank
        if config.engine.tensor_parallel_size > 1 or lora or setup.adapter is not None:
            self.close()
            return start_engine(config, setup, trained=trained)
        device = "cuda" if has_nvidia_gpu() else "cpu"
        key = (setup.model, config.on(device).engine, config.seed)
        if self._player is None or key != self._key:
            self.close()
            self._player = start_engine(config, setup, trained=trained)
            self._key = key
            weights = self._player.engine.model.state_dict()
            self._first = {name: tensor.detach().clone() for name, tensor in weights.items()}
        engine = self._player.engine
        engine.wake()
        engine.abort_all()
        for name, tensor in engine.model.state_dict().items():
            tensor.copy_(self._first[name])
        return EvalParts(
            setup=setup, model=setup.model, engine=engine,
            sampler=sampler_on(engine, config, setup), borrowed=True,
        )  # fmt: skip

    def close(self) -> None:
        """End the engine."""
        player, self._player, self._first = self._player, None, {}
        if player is not None:
            player.engine.shutdown()


SHARED: list[Engines] = []
"""The one that all tests of a session use (plugin.py); empty: each has its own."""

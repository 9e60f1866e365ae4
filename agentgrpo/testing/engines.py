"""One engine for several tests: vLLM starts once, and gets its first weights back each time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentgrpo.config import TrainConfig
from agentgrpo.machine.hardware import has_nvidia_gpu
from agentgrpo.setup.build import EvalParts, TrainParts, build, sampler_on, start_engine
from agentgrpo.setup.stage import RunSetup

if TYPE_CHECKING:
    import torch


class Engines:
    """Keeps the last engine that was started, for the next run of the same model and settings.

    Two engines in one process disturb each other, so another one ends it first.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._player: EvalParts | None = None
        self._first: dict[str, torch.Tensor] = {}
        """Its weights as they were read."""

    def build(self, config: TrainConfig) -> TrainParts:
        """As agentgrpo.setup.build.build()."""
        return build(config, start=self._start)

    def _start(self, config: TrainConfig, setup: RunSetup, *, trained: bool) -> EvalParts:
        own = config.engine.tensor_parallel_size > 1 or config.learner.lora.rank or setup.adapter
        device = "cuda" if has_nvidia_gpu() else "cpu"
        key = (setup.model, config.on(device).engine, config.seed)
        if own or key != self._key:
            self.close()
            player = start_engine(config, setup, trained=trained)
            if own:
                return player
            self._key, self._player = key, player
            weights = player.engine.model.state_dict()
            self._first = {name: tensor.detach().clone() for name, tensor in weights.items()}
        assert self._player is not None
        engine = self._player.engine
        engine.wake()
        engine.abort_all()
        for name, tensor in engine.model.state_dict().items():
            tensor.copy_(self._first[name])
        sampler = sampler_on(engine, config, setup)
        return EvalParts(
            setup=setup, model=setup.model, engine=engine, sampler=sampler, borrowed=True
        )

    def close(self) -> None:
        """End the engine."""
        player, self._player, self._key, self._first = self._player, None, (), {}
        if player is not None:
            player.engine.shutdown()


SHARED: list[Engines] = []
"""The one that all tests of a session use (plugin.py); empty: each has its own."""

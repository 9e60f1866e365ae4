"""Does a run repeat bit by bit, its tools and its sandbox included?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.config.read import config_of
from agentgrpo.run.parting import parting, weights
from agentgrpo.testing.engines import SHARED
from agentgrpo.trainer import Trainer

HELDOUT = 8
"""Tasks that are enough to hold evaluations to it."""


def assert_repeats(config: str | Path | TrainConfig, *, steps: int = 2, **settings: Any) -> None:
    """Train twice from the same weights and fail at the first bit that differs.

    Every token, log-probability, observation, reward and advantage, the numbers of every step and
    the trained weights are compared; times are not. rollout.deterministic is switched on, which on
    CUDA costs the overlap of tools with decoding.

    Args:
        config: a file, a shipped config's name or a TrainConfig.
        steps: of training.
        settings: what is to differ from the config, by section.

    Raises:
        AssertionError: names the step, rollout, turn and token where the second run differs.
        As Trainer.
    """
    made = config_of(config, settings)
    given = {
        "steps": steps,
        "save_every": steps,
        "rollout": {"deterministic": True},
        "data": {"num_heldout": min(made.data.num_heldout, HELDOUT)},
    }
    with tempfile.TemporaryDirectory(prefix="agentgrpo-repeats-") as folder:
        runs = [Path(folder) / name for name in ("first", "second")]
        shared = SHARED[-1].build if SHARED else None
        for run in runs:
            with Trainer(config_of(made, {**given, "out_dir": str(run)}), make=shared) as trainer:
                trainer.train()
        parted = parting(*runs, until=steps + 1)
        assert parted is None, f"the second run is another one from here on: {parted}"
        hashes = [weights(run) for run in runs]
        assert hashes[0] == hashes[1], "the trained weights differ, and what was played does not"

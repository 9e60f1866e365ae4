"""Does a run repeat bit by bit, its tools and its sandbox included?"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.config.read import config_of
from agentgrpo.run.atomic import read_lines
from agentgrpo.run.checkpoint import newest
from agentgrpo.testing.engines import trainer_of

CLOCKS = ("_s", "seconds", "timings", "_asleep", "_awake", "_before_sleep")
"""How names end of what no two runs agree on: times, and the memory of the machine."""
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
        AssertionError: names the file, the row and the key where the second run differs.
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
        for run in runs:
            with trainer_of(config_of(made, {**given, "out_dir": str(run)})) as trainer:
                trainer.train()
        for name in ("rollouts.jsonl", "metrics.jsonl"):
            first, second = (read_lines(run / name) for run in runs)
            assert len(first) == len(second), f"{name}: {len(first)} rows, then {len(second)}"
            for number, pair in enumerate(zip(first, second, strict=True), start=1):
                where = next(_different(*pair, ""), None)
                assert where is None, f"{name}, line {number}: {where}"
        hashes = [_weights(run) for run in runs]
        assert hashes[0] == hashes[1], "the trained weights differ, and what was played does not"


def _different(a: Any, b: Any, key: str) -> Iterator[str]:
    """Where two values of JSON differ, the first first."""
    if key.endswith(CLOCKS) or key.endswith("_hash"):
        return
    if isinstance(a, dict) and isinstance(b, dict):
        for name in dict.fromkeys([*a, *b]):
            yield from _different(a.get(name), b.get(name), f"{key}.{name}".lstrip("."))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for place, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _different(x, y, f"{key}[{place}]")
    elif a != b and not (a != a and b != b):
        yield f"{key} is {a!r:.200}, then {b!r:.200}"


def _weights(run: Path) -> str:
    folder = newest(run)
    assert folder is not None
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()

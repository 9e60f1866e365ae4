"""A run's folder: one run at a time, and never another run's."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

from agentgrpo.config import TrainConfig
from agentgrpo.records import checkpoint
from agentgrpo.support import parallel
from agentgrpo.support.atomic_files import write_json
from agentgrpo.support.files import format_os_error, read_table


def lock_run_dir(out_dir: Path, *, ranks: bool = False) -> IO[str]:
    """Make out_dir this run's, until the file is closed.

    `ranks`: the work is divided among them; those but 0 get a file that locks nothing.
    """
    if parallel.world_size() > 1 and not ranks:
        raise ValueError(
            f"this command works in one process, got {parallel.world_size()}: start it without "
            "torchrun"
        )
    if parallel.rank() > 0:
        return Path(os.devnull).open("w")
    require_folder(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    file = (out_dir / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"out_dir {str(out_dir)!r} is in use by another run") from None
    return file


MAY_CHANGE = {
    "out_dir", "preflight", "steps", "save_every", "eval_every", "keep_checkpoints", "trackers",
    "engine.tensor_parallel_size",
    # what a run that ran out of memory is told to lower, and what else changes rounding at most
    "engine.kv_cache_gib", "engine.max_num_seqs", "engine.enforce_eager", "learner.max_tokens",
    "learner.gradient_checkpointing", "learner.offload_optimizer", "learner.use_liger_kernel",
}  # fmt: skip
"""Settings that a resumed run may have otherwise than it was started with."""


def require_folder(out_dir: Path, key: str = "out_dir") -> None:
    """That out_dir, or what `key` names, can be written to: a folder is made, and goes again."""
    there = next(p for p in (out_dir, *out_dir.absolute().parents) if p.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".probe-", dir=there))
    except OSError as error:
        said = format_os_error(error, there)
        raise ValueError(f"{key} {str(out_dir)!r}: no folder can be made in {said}") from None


def newest_saved(out_dir: Path, saved: Collection[str]) -> Path | None:
    """The newest of what these patterns, below out_dir, find; None: there is nothing."""
    found = [path for pattern in saved for path in out_dir.glob(pattern)]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def require_same_run(config: TrainConfig) -> None:
    """Refuse to continue a run under other settings, or to write over somebody's records."""
    require_folder(config.out_dir)
    records, described = config.out_dir / "metrics.jsonl", config.out_dir / "run.json"
    if not records.exists():
        return
    if not described.exists():
        raise ValueError(
            f"{records} was not written by agentgrpo (no run.json): choose another out_dir"
        )
    about = read_table(described)
    if not isinstance(about.get("config"), dict):
        raise ValueError(f"{described}: not that of a training run: no config")
    # what it knew no setting of was as it is by default
    least = TrainConfig(model=config.model, out_dir=config.out_dir)
    then = flatten(least.model_dump(mode="json")) | flatten(about["config"])
    now = flatten(config.model_dump(mode="json", include={*TrainConfig.model_fields}))
    _require_same(f"out_dir {str(config.out_dir)!r} holds a run with", then, now, MAY_CHANGE)


def require_same_settings(
    path: Path, now: Mapping[str, Any], may_change: Collection[str], *, begun: bool, write: bool
) -> None:
    """Write the settings that a folder's work is done with; later, refuse others."""
    if begun and path.exists():
        _require_same(f"{path} was written with", read_table(path), now, may_change)
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dict(now))


def _require_same(
    what: str, then: Mapping[str, Any], now: Mapping[str, Any], may_change: Collection[str]
) -> None:
    for key in sorted((then.keys() | now.keys()).difference(may_change)):
        if then.get(key) != now.get(key):
            raise ValueError(
                f"{what} {key} = {then.get(key)!r}, now it is {now.get(key)!r}: set it back "
                "to continue, or choose another out_dir"
            )


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    settings: dict[str, Any] = {}
    for key, value in table.items():
        nested = isinstance(value, dict)
        settings |= flatten(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return settings


def whole_checkpoint(config: TrainConfig) -> Path | None:
    """What the run continues from."""
    newest = checkpoint.newest(config.out_dir)
    if newest is not None:
        checkpoint.require_whole(newest, adapter=config.learner.lora.rank > 0)
    return newest

"""Guards a run's folder: one process at a time, and no mixing of different runs."""

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
    """Lock out_dir for this run until the returned file is closed.

    `ranks`: the command supports several ranks; those other than 0 get a file without a lock.
    """
    if parallel.world_size() > 1 and not ranks:
        raise ValueError(
            f"this command expects one process, got {parallel.world_size()}: start it without "
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
    # settings that an out-of-memory error suggests to lower; they change rounding at most
    "engine.kv_cache_gib", "engine.max_num_seqs", "engine.enforce_eager", "learner.max_tokens",
    "learner.gradient_checkpointing", "learner.offload_optimizer", "learner.use_liger_kernel",
}  # fmt: skip
"""Settings that may change when a run is resumed."""


def require_folder(out_dir: Path, key: str = "out_dir") -> None:
    """Raise ValueError unless a folder can be made in out_dir; `key` is the setting to name."""
    existing = next(p for p in (out_dir, *out_dir.absolute().parents) if p.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".probe-", dir=existing))
    except OSError as error:
        reason = format_os_error(error, existing)
        raise ValueError(f"{key} {str(out_dir)!r}: cannot make a folder in {reason}") from None


def newest_saved(out_dir: Path, saved: Collection[str]) -> Path | None:
    """The newest path below out_dir that matches one of the patterns."""
    paths = [path for pattern in saved for path in out_dir.glob(pattern)]
    return max(paths, key=lambda path: path.stat().st_mtime_ns, default=None)


def require_same_run(config: TrainConfig) -> None:
    """Raise ValueError if out_dir holds a run with other settings, or other records."""
    require_folder(config.out_dir)
    records, run_json = config.out_dir / "metrics.jsonl", config.out_dir / "run.json"
    if not records.exists():
        return
    if not run_json.exists():
        raise ValueError(
            f"{records}: expected run.json next to it, so agentgrpo did not write it: choose "
            "another out_dir"
        )
    table = read_table(run_json)
    if not isinstance(table.get("config"), dict):
        raise ValueError(f"{run_json}: not the run.json of a training run: no config")
    # settings that an older version did not have were in effect at their defaults
    default = TrainConfig(model=config.model, out_dir=config.out_dir)
    before = flatten(default.model_dump(mode="json")) | flatten(table["config"])
    now = flatten(config.model_dump(mode="json", include={*TrainConfig.model_fields}))
    _require_same(f"out_dir {str(config.out_dir)!r} holds a run with", before, now, MAY_CHANGE)


def require_same_settings(
    path: Path, now: Mapping[str, Any], may_change: Collection[str], *, begun: bool, write: bool
) -> None:
    """Write the settings of a folder's work; once `begun`, raise ValueError for others."""
    if begun and path.exists():
        _require_same(f"{path} was written with", read_table(path), now, may_change)
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dict(now))


def _require_same(
    prefix: str, before: Mapping[str, Any], now: Mapping[str, Any], may_change: Collection[str]
) -> None:
    for key in sorted((before.keys() | now.keys()).difference(may_change)):
        if before.get(key) != now.get(key):
            raise ValueError(
                f"{prefix} {key} = {before.get(key)!r}, now it is {now.get(key)!r}: set it back "
                "to continue, or choose another out_dir"
            )


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten {"a": {"b": 1}} to {"a.b": 1}."""
    settings: dict[str, Any] = {}
    for key, value in table.items():
        nested = isinstance(value, dict)
        settings |= flatten(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return settings


def whole_checkpoint(config: TrainConfig) -> Path | None:
    """The newest checkpoint to resume from, checked; None: there is none."""
    newest = checkpoint.newest(config.out_dir)
    if newest is not None:
        checkpoint.require_whole(newest, adapter=config.learner.lora.rank > 0)
    return newest

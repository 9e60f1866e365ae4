"""What all ranks of a run must share before the engine starts: settings, files, the checkpoint."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
from pathlib import Path
from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.data.tasks import digest_of
from agentgrpo.records import checkpoint
from agentgrpo.records.run_folder import flatten, whole_checkpoint
from agentgrpo.support import parallel
from agentgrpo.support.files import CHECKSUMS, sha256_of
from agentgrpo.support.packages import installed
from agentgrpo.train.parts import Parts


def common_checkpoint(config: TrainConfig) -> Path | None:
    """Rank 0's newest checkpoint, copied to nodes that lack it; None: rank 0 has none."""
    if not (names := parallel.names):  # one process, or a dry run
        return whole_checkpoint(config)
    newest = whole_checkpoint(config) if parallel.rank() == 0 else None
    has_records = parallel.gather((config.out_dir / "metrics.jsonl").exists())
    if any(has_records) and not has_records[0]:
        raise parallel.RanksDiffer(
            f"out_dir {str(config.out_dir)!r}: {names[has_records.index(True)]} has the records of "
            f"a run, {names[0]} has none. Start rank 0 where they are, or move them away"
        )
    sums = (newest / CHECKSUMS).read_bytes() if newest else b""
    step, sums = parallel.broadcast((checkpoint.step_of(newest) if newest else 0, sums))
    if not sums:
        return None
    folder = checkpoint.folder_of(config.out_dir, step)
    is_same = folder.is_dir() and (folder / CHECKSUMS).read_bytes() == sums
    if not all(parallel.gather(is_same)):
        if is_same or not parallel.is_first_of_node():
            _send(folder if parallel.rank() == 0 else None)
        else:
            config.out_dir.mkdir(parents=True, exist_ok=True)
            checkpoint.save(config.out_dir, step, _send, keep=config.keep_checkpoints)
        parallel.gather(None)  # all copies are complete
    checkpoint.require_whole(folder, adapter=config.learner.lora.rank > 0)
    return folder


def _send(folder: Path | None) -> None:
    """Rank 0 sends the files of its folder; the others write them to theirs, or nowhere."""
    sends, paths = parallel.rank() == 0, folder.rglob("*") if folder else ()
    names = [str(path.relative_to(folder)) for path in paths if folder and path.is_file()]
    for name in parallel.broadcast([name for name in names if name != CHECKSUMS]):
        path = folder / name if folder else Path(os.devnull)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb" if sends else "wb") as file:
            while chunk := parallel.broadcast(file.read(1 << 25) if sends else b""):
                if not sends:
                    file.write(chunk)


def require_equal_ranks(config: TrainConfig, parts: Parts) -> None:
    """Raise RanksDiffer if a node has other settings, packages, tasks or files than the first."""
    is_first = parallel.is_first_of_node()
    if sum(parallel.gather(is_first)) == 1:
        return
    expected, *_ = every = parallel.gather(_facts(config, parts) if is_first else {})
    for name, facts in zip(parallel.names, every, strict=True):
        for key in [*expected, *facts] if facts else ():
            value, first = facts.get(key, "missing"), expected.get(key, "missing")
            if value != first:
                raise parallel.RanksDiffer(
                    f"{name} differs from {parallel.names[0]}: {key}: {value!r}, there {first!r}. "
                    "Start all ranks with the same command, packages and files"
                )


def _facts(config: TrainConfig, parts: Parts) -> dict[str, Any]:
    """What must be equal on all nodes."""
    settings = config.model_dump(mode="json", exclude={"out_dir"})
    state = parts.tasks.state_dict()
    facts = flatten(settings) | installed() | {"python": platform.python_version()}
    facts |= {"data.train": state["source"], "data.heldout": digest_of(parts.heldout)}
    facts["first tasks of data.train"] = digest_of(parts.tasks.next(config.rollout.tasks_per_step))
    parts.tasks.load_state_dict(state)
    files = [*Path(parts.model).glob("*")]
    for module in re.findall(r"\b([A-Za-z_][\w.]*):[A-Za-z_]", str(settings)):
        with contextlib.suppress(ImportError, ValueError):  # not every such text is a module
            spec = importlib.util.find_spec(module)
            files += [Path(spec.origin)] if spec and spec.has_location and spec.origin else []
    return facts | {f"SHA-256 of {p.name}": sha256_of(p)[:16] for p in files if p.is_file()}

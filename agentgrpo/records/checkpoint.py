"""Checkpoints on disk: Hugging Face model directories with the run's state inside, all or nothing.

A checkpoint is written under another name and renamed when it is complete and on disk, so that
every `checkpoints/step_000010` is whole, whenever the process was killed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from agentgrpo.support.files import (
    CHECKSUMS,
    flush_folder,
    opened,
    verify_checksums,
    write_checksums,
)

STATE = "agentgrpo_state.pt"
"""Optimizer, data position, log offsets: what a model directory does not hold."""
SAVED = "checkpoints/step_*[0-9]"
"""The pattern of whole checkpoints below out_dir."""
REMEDY = "move the checkpoint away to continue from an older one"


def newest(out_dir: Path) -> Path | None:
    """The checkpoint of the highest step, or None."""
    found = _complete(out_dir)
    return found[-1] if found else None


def require_whole(checkpoint: Path, *, adapter: bool, remedy: str = REMEDY) -> None:
    """Refuse what is named like a checkpoint and is none, before anything is loaded from it.

    All of it is read, and held against the checksums that it was saved with. ValueError names the
    files that are missing, empty or changed, and what can be done.
    """
    wanted = ("adapter_config.json", "adapter_model.safetensors") if adapter else ("config.json",)
    missing = [
        name
        for name in (STATE, CHECKSUMS, *wanted)
        if not (checkpoint / name).is_file() or not (checkpoint / name).stat().st_size
    ]
    if not adapter and not any(checkpoint.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ValueError(
            f"{checkpoint} is no whole checkpoint: {', '.join(missing)} missing or empty; {remedy}"
        )
    try:
        verify_checksums(checkpoint)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; {remedy}") from None


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a safetensors file, from its header; no tensor is read."""
    try:
        with opened(path), safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from None


def read_state(path: Path, *keys: str, mmap: bool = False) -> dict[str, Any]:
    """What a run's state file holds, on the CPU."""
    import torch

    try:
        state: Any = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except Exception as error:  # of what is not a state, unpickling makes anything
        raise ValueError(f"{path} cannot be read as the state of a run: {error}") from error
    held: dict[str, Any] = state if isinstance(state, dict) else {}
    if missing := [key for key in keys if key not in held]:
        raise ValueError(f"{path} cannot be read as the state of a run: no {', '.join(missing)}")
    return held


def step_of(checkpoint: Path) -> int:
    """Optimizer steps taken when the checkpoint was written."""
    return int(checkpoint.name.removeprefix("step_"))


def folder_of(out_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or will be."""
    return out_dir / "checkpoints" / f"step_{step:06d}"


def save(out_dir: Path, step: int, write: Callable[[Path], None], *, keep: int) -> Path:
    """Write a checkpoint through write(folder) and drop all but the newest `keep`.

    OSError: it could not be written; older checkpoints are untouched.
    """
    final = folder_of(out_dir, step)
    partial = final.with_name(f".partial-{final.name}")
    if not out_dir.is_dir():
        raise OSError(f"{out_dir} is gone: it was removed while the run was writing there")
    for rest in (*final.parent.glob(".partial-*"), *final.parent.glob(".removed-*")):
        shutil.rmtree(rest)  # of a process that was killed
    partial.mkdir(parents=True)
    try:
        write(partial)
        write_checksums(partial)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # safetensors and torch have errors of their own for a full disk
        if isinstance(error, OSError | RuntimeError) or type(error).__name__ == "SafetensorError":
            raise OSError(
                f"checkpoint {final} could not be written: {error}; older ones are whole"
            ) from error
        raise
    _remove(final)
    partial.rename(final)
    flush_folder(final.parent)
    for old in _complete(out_dir)[:-keep]:
        _remove(old)
    return final


def _complete(out_dir: Path) -> list[Path]:
    folder = out_dir / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(
        (p for p in folder.iterdir() if re.fullmatch(r"step_\d{6,}", p.name)), key=step_of
    )


def _remove(checkpoint: Path) -> None:
    """Rename first: a kill halfway must not leave half a checkpoint under its name."""
    if checkpoint.exists():
        doomed = checkpoint.with_name(f".removed-{checkpoint.name}")
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)

"""Checkpoints: Hugging Face model directories that also hold the run's state, written atomically.

A checkpoint is written under another name and renamed once it is complete and on disk, so every
`checkpoints/step_000010` is complete whenever the process was killed.
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
"""File with the optimizer, data position and log offsets."""
SAVED = "checkpoints/step_*[0-9]"
"""Pattern of complete checkpoints below out_dir."""
REMEDY = "move the checkpoint away to continue from an older one"


def newest(out_dir: Path) -> Path | None:
    """The checkpoint of the highest step, or None."""
    checkpoints = _complete(out_dir)
    return checkpoints[-1] if checkpoints else None


def require_whole(checkpoint: Path, *, adapter: bool, remedy: str = REMEDY) -> None:
    """Check a checkpoint before anything is loaded from it.

    Reads all files and compares them with their checksums.

    Raises:
        ValueError: names the missing, empty or changed files and the remedy.
    """
    model = ("adapter_config.json", "adapter_model.safetensors") if adapter else ("config.json",)
    missing = [
        name
        for name in (STATE, CHECKSUMS, *model)
        if not (checkpoint / name).is_file() or not (checkpoint / name).stat().st_size
    ]
    if not adapter and not any(checkpoint.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ValueError(
            f"{checkpoint}: not a complete checkpoint: {', '.join(missing)} missing or empty; "
            f"{remedy}"
        )
    try:
        verify_checksums(checkpoint)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; {remedy}") from None


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a safetensors file; reads only its header."""
    try:
        with opened(path), safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: not a complete safetensors file: {error}") from None


def read_state(path: Path, *keys: str, mmap: bool = False) -> dict[str, Any]:
    """Read a run's state file to the CPU; ValueError if one of `keys` is missing."""
    import torch

    try:
        state: Any = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except Exception as error:  # unpickling of other files can raise anything
        raise ValueError(f"{path}: cannot be read as the state of a run: {error}") from error
    table: dict[str, Any] = state if isinstance(state, dict) else {}
    if missing := [key for key in keys if key not in table]:
        raise ValueError(f"{path}: cannot be read as the state of a run: no {', '.join(missing)}")
    return table


def step_of(checkpoint: Path) -> int:
    """The number of optimizer steps before the checkpoint."""
    return int(checkpoint.name.removeprefix("step_"))


def folder_of(out_dir: Path, step: int) -> Path:
    """The path of a step's checkpoint."""
    return out_dir / "checkpoints" / f"step_{step:06d}"


def save(out_dir: Path, step: int, write: Callable[[Path], None], *, keep: int) -> Path:
    """Write a checkpoint with write(folder) and delete all but the newest `keep`.

    Raises:
        OSError: it could not be written; older checkpoints are unchanged.
    """
    final = folder_of(out_dir, step)
    partial = final.with_name(f".partial-{final.name}")
    if not out_dir.is_dir():
        raise OSError(f"{out_dir}: the folder was removed during the run")
    for leftover in (*final.parent.glob(".partial-*"), *final.parent.glob(".removed-*")):
        shutil.rmtree(leftover)  # a process was killed while it saved or removed
    partial.mkdir(parents=True)
    try:
        write(partial)
        write_checksums(partial)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # on a full disk torch raises RuntimeError and safetensors SafetensorError
        if isinstance(error, OSError | RuntimeError | SafetensorError):
            raise OSError(
                f"{final}: checkpoint could not be written: {error}; older ones are unchanged"
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
    if checkpoint.exists():  # rename first: a kill must not leave half a checkpoint under its name
        doomed = checkpoint.with_name(f".removed-{checkpoint.name}")
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)

"""Sends a run's metrics to TensorBoard, trackio or wandb.

A tracker gets the numbers of each line of metrics.jsonl. A resumed run continues its curves.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentgrpo.support import optional_deps, parallel
from agentgrpo.support.user_calls import describe_error, print_stderr
from agentgrpo.types import Metrics

PROJECT = "agentgrpo"


class TensorBoard:
    """Event files in OUT_DIR/tensorboard: `tensorboard --logdir OUT_DIR`."""

    def __init__(self, out_dir: Path, config: dict[str, Any], *, step: int) -> None:
        _library("tensorboard")
        from torch.utils import tensorboard

        writer_cls: Any = tensorboard.SummaryWriter
        self._writer = writer_cls(str(out_dir / "tensorboard"), purge_step=step)
        self._writer.add_text("config", "\n".join(f"    {k} = {v}" for k, v in config.items()))

    def write(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Service:
    """Wandb or trackio, which has wandb's functions.

    The run's id is stored in its folder, so a resumed run continues its curves.
    """

    def __init__(self, library: str, out_dir: Path, config: dict[str, Any]) -> None:
        self._module = _library(library)
        id_file = out_dir / "tracker_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(6))
        name = f"{out_dir.resolve().name}-{id_file.read_text()}"
        options: dict[str, Any] = {"project": PROJECT, "name": name, "config": config}
        if library == "wandb":  # trackio identifies a run by its name
            options |= {"id": id_file.read_text(), "dir": str(out_dir)}
        self._module.init(resume="allow", **options)

    def write(self, step: int, metrics: Metrics) -> None:
        self._module.log({**metrics, "step": step}, step=step)

    def close(self) -> None:
        self._module.finish()


class Tracker:
    """Wraps a tracker so that its failure does not stop the run: metrics.jsonl has the numbers.

    The first of consecutive errors is printed.
    """

    def __init__(self, name: str, tracker: TensorBoard | Service) -> None:
        self._name, self._tracker, self._fails = name, tracker, False

    def write(self, step: int, metrics: Metrics) -> None:
        """Send numbers by `area/name`, after `step` optimizer steps."""
        self._try(f"at step {step}", partial(self._tracker.write, step, metrics))

    def close(self) -> None:
        self._try("at the end", self._tracker.close)

    def _try(self, when: str, call: Callable[[], None]) -> None:
        failed, self._fails = self._fails, False
        try:
            call()
        except Exception as error:
            self._fails = True
            if not failed:
                print_stderr(
                    f"trackers: {self._name!r} {describe_error(error)} ({when}); the run "
                    "continues, metrics.jsonl has its numbers"
                )


def require(names: Sequence[str]) -> None:
    """Raise ValueError unless the trackers' libraries are installed."""
    for name in names:
        _library(name)


def open_trackers(
    names: Sequence[str], out_dir: Path, config: dict[str, Any], step: int
) -> list[Tracker]:
    """Open trackers by name ("tensorboard", "trackio", "wandb"); none on ranks other than 0."""
    if parallel.rank() > 0:
        return []
    out_dir.mkdir(parents=True, exist_ok=True)
    return [
        Tracker(name, TensorBoard(out_dir, config, step=step) if name == "tensorboard"
                else Service(name, out_dir, config))
        for name in names
    ]  # fmt: skip


def _library(name: str) -> Any:
    return optional_deps.import_optional(name, f"trackers: {name!r}")

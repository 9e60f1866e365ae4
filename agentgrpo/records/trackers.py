"""Where a run's numbers go besides metrics.jsonl: TensorBoard, trackio, wandb, each by its library.

A tracker is given what metrics.jsonl is given, line by line. A resumed run goes on in the same
place.
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

        made: Any = tensorboard.SummaryWriter
        self._writer = made(str(out_dir / "tensorboard"), purge_step=step)
        self._writer.add_text("config", "\n".join(f"    {k} = {v}" for k, v in config.items()))

    def write(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Service:
    """What wandb and trackio have in common: trackio has wandb's functions.

    A run keeps the id that its folder got when it began, so that a resumed one goes on in the same
    curves.
    """

    def __init__(self, library: str, out_dir: Path, config: dict[str, Any]) -> None:
        self._module = _library(library)
        kept = out_dir / "tracker_id"
        if not kept.exists():
            kept.write_text(secrets.token_hex(6))
        name = f"{out_dir.resolve().name}-{kept.read_text()}"
        options: dict[str, Any] = {"project": PROJECT, "name": name, "config": config}
        if library == "wandb":  # trackio goes by the name
            options |= {"id": kept.read_text(), "dir": str(out_dir)}
        self._module.init(resume="allow", **options)

    def write(self, step: int, metrics: Metrics) -> None:
        self._module.log({**metrics, "step": step}, step=step)

    def close(self) -> None:
        self._module.finish()


class Tracker:
    """One whose failure ends nothing: the numbers are in metrics.jsonl.

    What it raises is said when it begins to fail, and again only after it has worked.
    """

    def __init__(self, name: str, tracker: TensorBoard | Service) -> None:
        self._name, self._tracker, self._fails = name, tracker, False

    def write(self, step: int, metrics: Metrics) -> None:
        """Numbers by `area/name`, after `step` optimizer steps."""
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
                    f"trackers: {self._name!r} {describe_error(error)} ({when}); the run goes on, "
                    "its numbers are in metrics.jsonl"
                )


def require(names: Sequence[str]) -> None:
    """See that the libraries of these trackers are there."""
    for name in names:
        _library(name)


def open_trackers(
    names: Sequence[str], out_dir: Path, config: dict[str, Any], step: int
) -> list[Tracker]:
    """The trackers of these names ("tensorboard", "trackio", "wandb"); of the first rank alone."""
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

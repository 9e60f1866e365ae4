"""`agentgrpo verify RUN --again`: steps of a run played and learned again, to the bit.

They start from the run's own checkpoint, or from the beginning, in a folder that goes when it is
done. Every line that is recorded and the weights that are saved are then held against the run's: a
record that was changed fails also where all hashes were made anew.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.config.read import validate
from agentgrpo.files import read_table
from agentgrpo.run import checkpoint
from agentgrpo.run.atomic import numbered_rows
from agentgrpo.run.callbacks import Callback
from agentgrpo.run.metrics import FILES
from agentgrpo.run.parting import described, parting, weights


class _Until(Callback):
    """Ends a run after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        if step >= self._step:
            trainer.stop()


def span_of(run: Path, steps: str) -> tuple[int, int, Path | None]:
    """Which steps are played again, [start, end) from 0, and the checkpoint that they begin at.

    `steps`: "7-9" or "7", counted from 1 as a run prints them, begun at the newest checkpoint
    before; "": all that is recorded behind the newest checkpoint, or from the beginning.
    """
    rows = numbered_rows(run / "metrics.jsonl", growing=True)
    recorded = sum("learner/loss" in row for _, row in rows)
    low, _, high = steps.partition("-")
    if steps and not (low.isdigit() and (high or low).isdigit()):
        raise ValueError(f"--again {steps}: expected steps as 7 or 7-9")
    first, end = (int(low) - 1, int(high or low)) if steps else (recorded - 1, recorded)
    if not 0 <= first < end <= recorded:
        raise ValueError(f"--again {steps}: the run has recorded steps 1 to {recorded}")
    saved = {checkpoint.step_of(path): path for path in run.glob(checkpoint.SAVED)}
    start = max((step for step in saved if step <= first), default=0)
    return start, end, saved.get(start)


def play_again(run: Path, steps: str) -> int:
    """Do it and print what came out; the exit status."""
    from agentgrpo.trainer import Trainer

    start, end, saved = span_of(run, steps)
    about = read_table(run / "run.json")
    config = validate(TrainConfig, about["config"], str(run / "run.json"))
    if not config.on(about["engine"]["device"]).rollout.deterministic:
        print("rollout.deterministic was not set: what differs may be rounding")  # noqa: T201
    with tempfile.TemporaryDirectory(prefix=".again-", dir=run) as folder:
        other = Path(folder)
        if saved is not None:
            (other / "checkpoints").mkdir()
            for name in (*FILES, "run.json"):  # cut back to where the checkpoint was saved
                shutil.copy(run / name, other)
            (other / "checkpoints" / saved.name).symlink_to(saved.resolve())
        changed = {"out_dir": other, "keep_checkpoints": 10_000_000, "trackers": ()}
        with Trainer(config.model_copy(update=changed), callbacks=_Until(end)) as trainer:
            trainer.train()
        found = [f"differs: {line}" for line in described(run, other)]
        parted = parting(run, other, since=start, until=end + (end == config.steps))
        ours, theirs = weights(run), weights(other)
    both = sorted(step for step in ours.keys() & theirs.keys() if step > start)
    wrong = [parted] if parted else []
    wrong += [f"step {step}: other weights" for step in both if ours[step] != theirs[step]]
    rows = numbered_rows(run / "rollouts.jsonl", growing=True)
    played = sum(start <= row["step"] < end for _, row in rows)
    print(*found, *wrong, sep="\n", end="\n" if found or wrong else "")  # noqa: T201
    print(  # noqa: T201
        f"steps {start + 1} to {end} again: {played} rollouts, {len(both)} checkpoints, "
        f"{'NOT the same' if wrong else 'bit-equal'}"
    )
    return 1 if wrong else 0

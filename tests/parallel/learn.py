"""Steps of the learner on given groups, then a checkpoint: the program that test_parallel.py runs.

    torchrun --nproc_per_node=2 tests/parallel/learn.py JOBS.json

JOBS.json is a list of keyword arguments of learn().
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from agentgrpo.support.runtime import prepare_environment

if __name__ == "__main__":
    prepare_environment()

from agentgrpo.config import EngineConfig, LearnerConfig, LossConfig, TrainConfig
from agentgrpo.learn.forward_check import layers_of
from agentgrpo.learn.minibatches import plan_updates
from agentgrpo.support import parallel
from tests.learn.given import Holder, learner_on


def learn(
    folder: str, name: str, loss: dict[str, Any], learner: dict[str, Any],
    source: str | None = None, rows: str | None = None,
) -> None:  # fmt: skip
    """Two steps on FOLDER/groups.pickle from FOLDER/model, or from the checkpoint `source`.

    Leaves FOLDER/NAME.json and the checkpoint FOLDER/NAME. `rows`: why it sees each rollout alone.
    """
    here, base = Path(folder), Path(folder) / "model"
    options = LearnerConfig(**{"learning_rate": 1e-3, "max_tokens": 128} | learner)
    config = TrainConfig(
        model="m", out_dir=here, loss=LossConfig(**loss), learner=options,
        engine=EngineConfig(max_model_len=128),
    )  # fmt: skip
    saved = None if source is None else here / source
    adapter = saved if options.lora.rank else None
    engine = Holder()
    # an adapter's last layer is sharded as what is no layer's, which some models adapt too
    layers = slice(-1) if options.lora.rank else slice(None)
    with (
        patch("agentgrpo.learn.policy.why_not_packed", lambda model: rows),
        patch("agentgrpo.learn.policy.layers_of", lambda model: layers_of(model)[layers]),
    ):
        trained = learner_on(
            engine, base if saved is None or adapter else saved, options, config.loss,
            total_steps=8, weights="copy", dlogp_limit=9.0, reference=base, adapter=adapter,
        )  # fmt: skip
    if saved is not None:
        trained.load_state(saved / "state.pt")
    to_allocate = parallel.total(trained._optimizer.bytes_to_allocate)
    trained.dry_pass(64)
    groups = pickle.loads((here / "groups.pickle").read_bytes())
    steps, batches = [], []
    for number in range(trained.step_count, trained.step_count + 2):
        updates = plan_updates(groups, config, step=number, share_prefixes=rows is None)
        batches += [len(update.batches) for update in updates]
        steps.append(trained.step(updates))
    trained.publish()
    record = {
        "steps": steps, "batches": batches, "to_allocate": to_allocate,
        "ranks": trained.describe()["ranks"],
        "score": trained.score(groups[0].rollouts[0].token_ids).tolist(),
        "norms": {k: v.norm().item() for k, v in sorted(engine.weights.items())},
    }  # fmt: skip
    if parallel.rank() == 0:
        (here / name).mkdir()
    trained.policy.save(here / name)
    trained.save_state(here / name / "state.pt")
    if parallel.rank() == 0:
        (here / f"{name}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    parallel.start()
    for job in json.loads(Path(sys.argv[1]).read_text()):
        learn(**job)
    parallel.stop()

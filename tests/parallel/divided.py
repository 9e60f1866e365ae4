"""One engine on two ranks, and its learner: the program that test_divided.py runs on four ranks.

    torchrun --nproc_per_node=4 tests/parallel/divided.py FOLDER

FOLDER/model is a model; every rank writes its results to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from agentgrpo.support.runtime import prepare_environment
from tests.learn.given import learner_on

if __name__ == "__main__":
    prepare_environment()

import numpy as np
import torch
from torch import Tensor

from agentgrpo.config import EngineConfig
from agentgrpo.engine.agreement import Disagreement, check_agreement, probe_prompts
from agentgrpo.engine.engine import Engine
from agentgrpo.learn.learner import Learner
from agentgrpo.rollout.tensor_parallel import Leader, follow
from agentgrpo.support import parallel
from tests import tiny

TEAM = 2


def part_of(model: Any, name: str, place: int) -> Tensor:
    """What a rank of two must hold of vLLM's tensor: written out by hand for Qwen3."""
    state = {n: parallel.full_tensor(p) for n, p in model.named_parameters()}

    def rows(*names: str) -> Tensor:
        halves = [state[n].chunk(TEAM, dim=0)[place] for n in names]
        return torch.cat(halves)

    if "qkv_proj" in name:
        return rows(*(name.replace("qkv", x) for x in "qkv"))
    if "gate_up_proj" in name:
        return rows(*(name.replace("gate_up", x) for x in ("gate", "up")))
    if "o_proj" in name or "down_proj" in name:
        return state[name].chunk(TEAM, dim=1)[place]
    if "embed_tokens" in name:
        half = 160  # 259 ids are padded to 320
        return state[name][place * half : (place + 1) * half]
    return state[name]


def wrong_parts(engine: Engine, model: Any, place: int) -> list[str]:
    """VLLM's tensors that are not this rank's part of the learner's; all ranks must call it."""
    wrong = []
    for name, held in engine.model.named_parameters():
        part = part_of(model, name, place)
        if not torch.equal(held[: len(part)], part) or held[0].shape != part[0].shape:
            wrong.append(name)
    return wrong


def agreement(engine: Engine, learner: Learner) -> float | str:
    try:
        probes = probe_prompts(tiny.VOCAB)
        return check_agreement(engine, learner, probes, threshold=1e-4)["max_dlogp"]
    except Disagreement as error:
        return str(error)


def sampled(engine: Engine, team: parallel.Team) -> dict[str, list[int]]:
    """Requests that begin and end at different steps, asked of the leader."""
    recorded: dict[str, list[int]] = {}
    if team.place:
        follow(engine, team)
        return recorded
    leader = Leader(engine, team)
    prompts = probe_prompts(tiny.VOCAB)
    for index in range(6):
        leader.add_request(
            str(index), prompts[index % 2][: 20 + index], max_tokens=4 + 3 * index,
            temperature=1.0, seed=index,
        )  # fmt: skip
        for done in leader.step():
            recorded[done.request_id] = done.token_ids.tolist()
    while leader.num_in_flight:
        for done in leader.step():
            recorded[done.request_id] = done.token_ids.tolist()
    leader.finish()
    return recorded


def work(folder: Path) -> dict[str, Any]:
    config = EngineConfig(max_model_len=256, kv_cache_gib=1 / 16, tensor_parallel_size=TEAM)
    engine = Engine(folder / "model", config)
    team = parallel.team_of(TEAM)
    learner = learner_on(engine, folder / "model", weights="auto", dlogp_limit=1e-4)
    where = {name: p.data_ptr() for name, p in engine.model.named_parameters()}
    learner.publish()
    recorded: dict[str, Any] = {
        "weights": learner.policy.weights, "place": team.place, "first": agreement(engine, learner),
        "sampled": sampled(engine, team),
    }  # fmt: skip
    recorded["score"] = learner.score(probe_prompts(tiny.VOCAB)[0]).tolist()
    shards: Any = learner._scorer
    shards.reshard()  # scoring alone leaves the head whole
    with torch.no_grad():  # as an optimizer would: every rank its own shards
        for number, parameter in enumerate(learner.model.parameters()):
            local = parameter.to_local()
            local.mul_(1 + 0.01 * number).add_(0.003)
    engine.reset_prefix_cache()
    recorded["stale"] = agreement(engine, learner)
    recorded["stale_parts"] = wrong_parts(engine, learner.model, team.place)
    learner.publish()
    recorded["moved"] = agreement(engine, learner)
    recorded["wrong_parts"] = wrong_parts(engine, learner.model, team.place)
    recorded["tensors"] = len(where)
    recorded["in_place"] = where == {n: p.data_ptr() for n, p in engine.model.named_parameters()}
    recorded["numbers"] = int(sum(p.numel() for p in engine.model.parameters()))
    engine.shutdown()
    return recorded


if __name__ == "__main__":
    parallel.start()
    np.seterr(all="raise")
    here = Path(sys.argv[1])
    (here / f"{parallel.rank()}.json").write_text(json.dumps(work(here)))
    parallel.stop()

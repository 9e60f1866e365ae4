"""Time the packing of a step against TRL's TreeRow on the same rollouts.

python -m bench.packing [--trl PATH]   PATH: trl/experimental/async_grpo/packing.py of TRL 1.16.0

Rollouts are a shared prompt, an answer, a tool's observation and an answer; 64 groups of 8. Every
variant's result is checked before it is timed. All run on one thread; CPU time is measured. As in a
learner, each batch and mask is allocated and freed after the next one is made, so malloc reuses
warm memory.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask

from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.packing import flex_blocks, pack_tree
from agentgrpo.types import Float32, Group, Int32, Rollout, Segment, Status, Task
from bench.harness import append_row, cpu_seconds

NUM_GROUPS, GROUP_SIZE, NUM_TOKENS = 64, 8, 4096
TASK = Task(id="", messages=(), spec={})


def make_groups(prompt: int, rng: np.random.Generator) -> list[Group]:
    """Groups whose rollouts share nothing but their group's prompt, in one Segment."""
    own = NUM_TOKENS - prompt
    answer = own // 3

    def ids(n: int) -> Int32:
        return rng.integers(0, 150_000, n, dtype=np.int32)

    def logp(n: int) -> Float32:
        return -rng.random(n, dtype=np.float32)

    groups = []
    for _ in range(NUM_GROUPS):
        shared = Segment(ids(prompt))
        rollouts = []
        for _ in range(GROUP_SIZE):
            segments = [
                shared,
                Segment(ids(answer), logp(answer)),
                Segment(ids(own - 2 * answer)),
                Segment(ids(answer), logp(answer)),
            ]
            status = Status.COMPLETED
            advantage = float(np.float32(rng.normal()))
            rollouts.append(
                Rollout(task=TASK, segments=segments, status=status, advantage=advantage)
            )
        groups.append(Group(task=TASK, rollouts=rollouts))
    return groups


def all_rollouts(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def step(groups: list[Group], budget: int) -> int:
    """All that a learner needs: trees, loss terms and FlexAttention's block masks, one by one."""
    terms = 0
    for batch in pack_tree(groups, max_tokens=budget):
        flex_blocks(batch.tout_T, batch.positions_T, 128)
        terms += len(batch.row_N)
    return terms


def bench_tree(prompt: int, groups: list[Group], tree_row: type[Any] | None) -> None:
    shape = {"rollouts": len(all_rollouts(groups)), "tokens": NUM_TOKENS, "prompt": prompt}
    budget = prompt + GROUP_SIZE * (NUM_TOKENS - prompt)
    note = "a group a batch"
    if tree_row is not None:
        samples = [trl_sample(rollout) for rollout in all_rollouts(groups)]
        batches = pack_tree(groups, max_tokens=budget)
        check_same_terms(batches, trl_pack(tree_row, samples, budget))
        times = cpu_seconds(lambda: trl_pack(tree_row, samples, budget), repeats=3, warmup=0)
        append_row("packing", "tree_trl", ms(times), unit="ms", shape=shape, note=note)
    times = cpu_seconds(lambda: step(groups, budget), repeats=31)
    append_row("packing", "tree", ms(times), unit="ms", shape=shape, note=f"{note}, with masks")


def bench_masks(groups: list[Group]) -> None:
    tout = pack_tree(groups[:1], max_tokens=2**20)[0].tout_T[:8192]
    tout = np.minimum(tout, len(tout))
    tensor = torch.from_numpy(tout)

    def torch_blocks() -> torch.Tensor:
        mask = create_block_mask(
            lambda b, h, q, k: (k <= q) & (q < tensor[k]),
            None, None, len(tout), len(tout), device="cpu",
        )  # fmt: skip
        return mask.kv_indices

    blocks = functools.partial(flex_blocks, tout, np.zeros_like(tout), 128)
    np.testing.assert_array_equal(blocks()["kv_indices"], torch_blocks()[0, 0].numpy())
    shape = {"tokens": len(tout), "block": 128}
    times = cpu_seconds(blocks, repeats=31)
    append_row("packing", "blocks", ms(times), unit="ms", shape=shape)
    times = cpu_seconds(torch_blocks, repeats=3, warmup=0)
    append_row("packing", "blocks_torch", ms(times), unit="ms", shape=shape)


def ms(times: list[float]) -> list[float]:
    return [1e3 * t for t in times]


# --- TRL ---


def load_tree_row(path: Path) -> type[Any]:
    spec = importlib.util.spec_from_file_location("trl_packing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TreeRow  # type: ignore[no-any-return]


def trl_sample(rollout: Rollout) -> dict[str, Any]:
    masks = [np.full(len(s.token_ids), s.sampled) for s in rollout.segments]
    logps = [
        np.zeros(len(s.token_ids), np.float32) if s.logprobs is None else s.logprobs
        for s in rollout.segments
    ]
    return {
        "input_ids": torch.from_numpy(rollout.token_ids),
        "completion_mask": torch.from_numpy(np.concatenate(masks)),
        "old_log_probs": torch.from_numpy(np.concatenate(logps)),
        "advantage": rollout.advantage,
        "group_id": 0,
    }


def trl_pack(tree_row: type[Any], samples: list[dict[str, Any]], budget: int) -> list[Any]:
    """TRL's own loop, rollouts in order: a row takes what fits, then the next row begins."""
    rows = [tree_row()]
    for sample in samples:
        # TRL lays out last tokens and one token more per branch, which the budget does not have
        if not rows[-1].fits(sample, budget + 2 * GROUP_SIZE):
            rows.append(tree_row())
        rows[-1].add(sample)
    return [row.pack() for row in rows]


def check_same_terms(batches: Sequence[PackedBatch], rows: list[Any]) -> None:
    ours = Counter(
        term
        for batch in batches
        for term in zip(
            batch.target_N.tolist(), batch.old_logp_N.tolist(), batch.advantage_N.tolist(),
            batch.positions_T[batch.row_N].tolist(), strict=True,
        )
    )  # fmt: skip
    theirs = Counter(
        term
        for row in rows
        for term in zip(
            row["shift_labels"][row["token_index"]].tolist(), row["old_log_probs"].tolist(),
            row["advantages"].tolist(), row["position_ids"][row["token_index"]].tolist(),
            strict=True,
        )
    )  # fmt: skip
    assert len(batches) == len(rows), (len(batches), len(rows))
    assert ours == theirs
    assert sum(len(batch.tout_T) for batch in batches) <= sum(len(r["input_ids"]) for r in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", type=Path, help="TRL's packing.py, for the comparison")
    tree_row = None if (path := parser.parse_args().trl) is None else load_tree_row(path)
    torch.set_num_threads(1)  # all variants on one thread, whose CPU time is what counts
    rng = np.random.default_rng(0)
    for prompt in (1024, 3072):
        groups = make_groups(prompt, rng)
        bench_tree(prompt, groups, tree_row)
    bench_masks(groups)


if __name__ == "__main__":
    main()

"""What a learner step costs by layout: prefixes shared in a tree, unshared rows, a padded batch.

    python -m bench.step --model FOLDER [--group 8] [--length 256] [--groups 1] [--repeats 3]

Rollouts are of agentic shape: a group's prompt, then turns of sampled tokens and tool output in
equal parts. `share` is the prompt's part of a rollout. Tokens per second count the rollouts' tokens
as the sampler made them, whatever the layout computes. Every variant runs in a process of its own,
so that its peak memory is its own, does the same forward and backward pass with the same loss, and
is held to the same loss value.

padded   transformers as it is: [G, longest] with right padding, its own causal sdpa
rows     unshared, padding-free: every rollout's attention is its own
tree     the learner's layout
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentgrpo.runtime import prepare_environment

prepare_environment()

import numpy as np
import torch
from torch import Tensor

from agentgrpo.kernels.linear_logp import linear_logp
from agentgrpo.packing import pack_tree
from agentgrpo.policy import Scorer
from agentgrpo.types import Group, Rollout, Segment, Status, Task
from bench.harness import append_row

VARIANTS = ("padded", "rows", "tree")


def make_groups(arguments: argparse.Namespace, vocab: int) -> list[Group]:
    """Lengths after the prompt differ by up to a quarter either way."""
    rng = np.random.default_rng(0)
    task = Task(id="t", messages=(), spec={})
    prompt_length = round(arguments.share * arguments.length)

    def piece(count: int, *, sampled: bool = False) -> Segment:
        ids = rng.integers(vocab, size=count, dtype=np.int32)
        return Segment(ids, np.full(count, -8, np.float32) if sampled else None)

    groups = []
    for _ in range(arguments.groups):
        prompt, rollouts = piece(prompt_length), []
        for _ in range(arguments.group):
            rest = arguments.length - prompt_length
            quarter = max(2, round(rest * rng.uniform(0.75, 1.25)) // 4)
            turns = [piece(quarter, sampled=k % 2 == 0) for k in range(3)]
            segments = [prompt, *turns, piece(1), piece(quarter, sampled=True)]
            rollouts.append(
                Rollout(task=task, segments=segments, status=Status.COMPLETED, advantage=1.0)
            )
        groups.append(Group(task=task, rollouts=rollouts))
    return groups


def packed_pass(model: Any, groups: list[Group], *, share: bool) -> Callable[[], Tensor]:
    scorer = Scorer(model)
    batches = pack_tree(groups, max_tokens=1 << 20, share_prefixes=share)

    def run() -> Tensor:
        loss = torch.zeros(())
        for batch in batches:
            logp_N, _ = scorer(batch, 1.0)
            part = -logp_N.mean()
            part.backward()
            loss = loss + part.detach()
        return loss

    return run


def padded_pass(model: Any, groups: list[Group]) -> Callable[[], Tensor]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ids = [torch.from_numpy(r.token_ids.astype(np.int64)) for r in rollouts]
    masks = [
        torch.cat([torch.full((len(s.token_ids),), s.sampled) for s in r.segments])
        for r in rollouts
    ]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    inside = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
    sampled = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    rows = sampled[:, 1:].reshape(-1).nonzero()[:, 0]
    targets = padded[:, 1:].reshape(-1)[rows]

    def run() -> Tensor:
        hidden = model.get_decoder()(
            input_ids=padded, attention_mask=inside, use_cache=False
        ).last_hidden_state[:, :-1]
        head = model.get_output_embeddings().weight
        logp_N, _ = linear_logp(hidden.reshape(-1, hidden.shape[-1]), head, rows, targets)
        loss = -logp_N.mean()
        loss.backward()
        return loss.detach()

    return run


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One variant, in this process."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # then this thread's CPU time is the wall time of an idle machine
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    groups = make_groups(arguments, model.config.vocab_size)
    if arguments.variant == "padded":
        run = padded_pass(model, groups)
    else:
        run = packed_pass(model, groups, share=arguments.variant == "tree")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, loss = [], 0.0
    for _ in range(arguments.repeats + 1):
        model.zero_grad()
        start = time.thread_time()
        loss = run().item()
        seconds.append(time.thread_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokens = sum(len(r.token_ids) for group in groups for r in group.rollouts)
    rates = [tokens / s for s in seconds[1:]]
    return {"rates": rates, "peak_mib": (peak - before) / 1024, "loss": loss, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--share", type=float, default=2 / 3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--dry", action="store_true", help="write no row")
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(arguments)))
        return
    found = {variant: in_a_process(variant, sys.argv[1:]) for variant in VARIANTS}
    losses = [result["loss"] for result in found.values()]
    if max(losses) - min(losses) > 1e-3:
        raise RuntimeError(f"the variants compute different losses: {losses}")
    shape = {name: getattr(arguments, name) for name in ("groups", "group", "length")}
    shape["share_percent"] = round(100 * arguments.share)
    base = found["rows"]
    for variant, result in found.items():
        ratio = np.median(result["rates"]) / np.median(base["rates"])
        note = f"{arguments.model.name}, CPU time of one thread; {ratio:.2f} x rows"
        if arguments.dry:
            print(variant, note, f"{result['peak_mib']:.0f} MiB", np.median(result["rates"]))
            continue
        append_row("step", variant, result["rates"], unit="tok/s", shape=shape, note=note)
        append_row("step", f"{variant} peak", [result["peak_mib"]], unit="MiB", shape=shape)


def in_a_process(variant: str, arguments: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.step", *arguments, "--variant", variant]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{variant}: {ran.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()

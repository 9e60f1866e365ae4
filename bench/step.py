"""Measure a learner step by layout: shared prefixes as a tree, unshared rows, a padded batch.

    python -m bench.step --model FOLDER [--group 8] [--length 256] [--groups 1] [--share 0.667]

Synthetic rollouts resemble an agent's: a group's prompt, then turns of sampled tokens and tool
output in equal parts. `share` is the prompt's part of a rollout. Tokens per second count the
rollouts' tokens, whatever the layout computes. A step is forward, backward and AdamW. Each variant
runs in its own process: first its gradient is compared with that of transformers' padded batch,
then memory and time are measured. Memory is the peak of a step without weights, gradients and
moments, which exist before.

padded   plain transformers: [rollouts, longest], right padding, its own causal sdpa
rows     unshared, padding-free: separate attention for every rollout
tree     the learner's layout

FOLDER may be `qwen3`: a random model of Qwen3 0.6B's shape at half its width and depth and a
quarter of its vocabulary, so that layers and head have the same share of the work.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentgrpo.support.runtime import prepare_environment

prepare_environment()

import numpy as np
import torch
from torch import Tensor

from agentgrpo.kernels.linear_logp import linear_logp
from agentgrpo.learn.packing import pack_tree
from agentgrpo.learn.policy import Scorer
from agentgrpo.types import Group, Rollout, Segment, Status, Task
from bench.harness import append_row

VARIANTS = ("padded", "rows", "tree")
GRADIENT_ERROR = 1e-3
"""Of float32, relative to the whole gradient's norm; a wrong mask makes it 0.1 and more."""
TASK = Task(id="t", messages=(), spec={})


def make_groups(arguments: argparse.Namespace, vocab: int) -> list[Group]:
    """Lengths after the prompt differ by up to a quarter either way."""
    rng = np.random.default_rng(0)
    prompt_length = round(arguments.share * arguments.length)

    def piece(count: int, *, sampled: bool = False) -> Segment:
        ids = rng.integers(vocab, size=count, dtype=np.int32)
        return Segment(ids, np.full(count, -8, np.float32) if sampled else None)

    groups = []
    for _ in range(arguments.groups):
        prompt, rollouts = piece(prompt_length), []
        for _ in range(arguments.group):
            rest = arguments.length - prompt_length
            fifth = max(2, round(rest * rng.uniform(0.75, 1.25)) // 5)
            segments = [prompt, *(piece(fifth, sampled=k % 2 == 0) for k in range(5))]
            rollouts.append(
                Rollout(task=TASK, segments=segments, status=Status.COMPLETED, advantage=1.0)
            )
        groups.append(Group(task=TASK, rollouts=rollouts))
    return groups


def shape_of(groups: Sequence[Group]) -> dict[str, int]:
    """Of the groups as they are."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = sum(len(r.token_ids) for r in rollouts)
    shared = sum(len(r.segments[0].token_ids) for r in rollouts)
    return {
        "groups": len(groups), "group": len(groups[0].rollouts), "tokens": tokens,
        "prompt_percent": round(100 * shared / tokens),
        "trained": sum(r.num_sampled for r in rollouts),
    }  # fmt: skip


def packed_pass(model: Any, groups: list[Group], *, share: bool) -> Callable[[], Tensor]:
    scorer = Scorer(model)
    (batch,) = pack_tree(groups, max_tokens=1 << 20, share_prefixes=share)

    def run() -> Tensor:
        logp_N = scorer(batch, 1.0).logp_N
        loss: Tensor = -logp_N.mean()
        loss.backward()
        return loss.detach()

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


def load(name: str) -> Any:
    if name != "qwen3":
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        return loaded.eval()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=37_984, hidden_size=512, intermediate_size=1536, num_hidden_layers=14,
        num_attention_heads=8, num_key_value_heads=4, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float().eval()


def gradient_error(model: Any, groups: list[Group], run: Callable[[], Tensor]) -> float:
    """|gradient - that of the padded batch| / |that|, over all parameters together."""
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    padded_pass(model, groups)()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.set_attn_implementation(attention)
    run()
    gaps = [(p.grad - w).norm() for p, w in zip(model.parameters(), wanted, strict=True)]
    norms = [w.norm() for w in wanted]
    return float(torch.stack(gaps).norm() / torch.stack(norms).norm())


def resident(kind: str) -> int:
    """VmRSS (now) or VmHWM (at its height) of this process, in bytes."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak_of(run: Callable[[], object]) -> float:
    """MiB that a call holds at its height beyond what is held before it."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the height so far
    before = resident("VmRSS")
    run()
    return (resident("VmHWM") - before) / 2**20


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One variant, in this process."""
    model = load(arguments.model)
    groups = make_groups(arguments, model.config.vocab_size)
    if arguments.variant == "padded":
        run = padded_pass(model, groups)
    else:
        run = packed_pass(model, groups, share=arguments.variant == "tree")
    error = gradient_error(model, groups, run)
    if not error <= GRADIENT_ERROR:
        raise RuntimeError(f"{arguments.variant}: the gradient is off by {error:.1e} of its norm")
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-9)

    def step() -> None:
        run()
        adamw.step()
        adamw.zero_grad(set_to_none=False)

    step()  # moments
    peak = peak_of(step)
    shape = shape_of(groups)
    rates = []
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        step()
        rates.append(shape["tokens"] / (time.perf_counter() - start))
    return {"rates": rates, "peak_mib": peak, "error": error, "shape": shape}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
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
    base = np.median(found["rows"]["rates"])
    for variant, result in found.items():
        ratio = np.median(result["rates"]) / base
        note = (
            f"{Path(arguments.model).name}, made; {ratio:.2f} x rows; "
            f"gradient off by {result['error']:.0e}"
        )
        shape, peak = result["shape"], result["peak_mib"]
        if arguments.dry:
            print(f"{variant:7}{np.median(result['rates']):8.1f} tok/s {peak:7.0f} MiB  {note}")
            continue
        append_row("step", variant, result["rates"], unit="tok/s", shape=shape, note=note)
        append_row("step", f"{variant} memory", [peak], unit="MiB", shape=shape, note=note)


def in_a_process(variant: str, arguments: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.step", *arguments, "--variant", variant]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{variant}: {ran.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()

"""Time the learner's forward and backward pass on a GPU by layout, at real shapes of models.

python -m bench.gpu.step [--cases 4B/full/coder ...] [--no-rows] [--repeats N] [--dry-run]
python -m bench.gpu.step --list          the cases; run.sh gives each a process of its own

0.6B/full/tools takes two minutes on an H100; the longest 6 on paper.

Weights are random, of Qwen3's shapes, in bfloat16. One step is `GROUPS` groups of `GROUP` rollouts
of agentic shape (bench.step.make_groups), in passes of at most `max_tokens` packed tokens. Tokens
per second count the rollouts' tokens as the sampler made them, whatever a layout computes. Before
anything is timed, loss and gradient of every layout are held to those of the padded one, and the
error is a row. A layout that computes something else is timed all the same, marked as WRONG, and
its case fails; a case that fails, or does not fit, ends alone.

padded       transformers as it is: right padding, its own sdpa
rows varlen  unshared, padding-free, FlashAttention's variable-length kernel
rows flex    the same tokens through FlexAttention with the intervals' block mask
tree         the learner's layout: a shared prefix once, FlexAttention
tree, Liger  the same with Liger's kernels in the layers, of models trained in full
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

from agentgrpo.support.runtime import prepare_environment

prepare_environment()

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen3Config

from agentgrpo.config import LoraConfig
from agentgrpo.kernels.linear_logp import linear_logp
from agentgrpo.learn.attention import Tree
from agentgrpo.learn.lora import Adapter
from agentgrpo.learn.packing import pack_tree
from agentgrpo.learn.policy import Scorer, checkpoint_layers
from agentgrpo.models.liger import fuse_layers
from agentgrpo.types import Group, Rollout
from bench.harness import append_row
from bench.step import make_groups
from tests.learn.interpreted import let_liger_be_interpreted

GROUP, GROUPS = 16, 2
ENOUGH = 45.0
"""Seconds of repeats of one layout, after which two do."""
LAYOUTS = ("padded", "rows varlen", "rows flex", "tree")
LIGER = "tree, Liger"

SHAPES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "4B": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}  # fmt: skip
"""Of Qwen3's config.json, beside what they have in common."""

COMMON = {
    "vocab_size": 151_936, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True,
}  # fmt: skip

TINY = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


class Mix(NamedTuple):
    """Rollouts of `length` tokens, of which `share` is the group's prompt."""

    name: str
    what: str
    length: int
    share: float


MIXES = (
    Mix("tools", "tool user: long prompt", 3072, 2 / 3),
    Mix("coder", "coder: short prompt, long turns", 4096, 1 / 8),
    Mix("documents", "long documents in the prompt", 8192, 7 / 8),
)


class Case(NamedTuple):
    """One model, one way to train it, one mix of lengths."""

    model: str
    option: str
    mix: Mix

    def __str__(self) -> str:
        return f"{self.model}/{self.option}/{self.mix.name}"


class Wrong(Exception):
    """A layout computes something else."""


def cases_of(models: Sequence[str], mixes: Sequence[Mix]) -> list[Case]:
    """Every model trained in full on every mix, in the other ways on the first."""
    return [
        Case(model, option, mix)
        for model in models
        for option in ("full", "checkpointing", "lora")
        for mix in (mixes if option == "full" else mixes[:1])
    ]


@dataclass
class Setting:
    """What is run: real shapes on a GPU, or the same code on a CPU to see that it works."""

    device: str
    dtype: torch.dtype
    models: dict[str, dict[str, Any]]
    max_tokens: int
    tolerance: float
    """Of the loss, relative."""
    gradient: float
    """And of the gradient: a wrong mask is tenths, and bfloat16 through 28 random layers is not."""
    repeats: int
    write: bool
    groups: tuple[int, int] = (GROUPS, GROUP)
    """And rollouts of each."""

    def record(self, variant: str, values: list[float], unit: str, shape: dict[str, int]) -> float:
        if self.write:
            return append_row("gpu_step", variant, values, unit=unit, shape=shape)
        return statistics.median(values)


def make_model(setting: Setting, shape: dict[str, Any], option: str) -> Any:
    """A model of random weights; `option` is "full", "checkpointing" or "lora"."""
    torch.manual_seed(0)
    config = Qwen3Config(**COMMON | shape)
    with torch.device(setting.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=setting.dtype)
    model.eval()
    if option == "lora":
        adapter = Adapter(model, LoraConfig(rank=16))
        with torch.no_grad():  # B starts at zero, and then A has no gradient to compare
            for parameter in adapter.parameters:
                parameter.normal_(std=0.02)
    if option == "checkpointing":
        checkpoint_layers(model)
    return model


def passes_of(model: Any, groups: list[Group], layout: str, max_tokens: int) -> Callable[[], float]:
    """One forward and backward over all groups; returns the mean loss over sampled tokens."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    terms = sum(rollout.num_sampled for rollout in rollouts)

    def run(losses: Iterator[Tensor]) -> float:
        total = 0.0
        for logp_N in losses:
            loss = -logp_N.sum() / terms
            loss.backward()
            total += loss.item()
        return total

    if layout == "padded":
        model.set_attn_implementation("sdpa")
        chunks = padded_chunks(rollouts, max_tokens)
        return lambda: run(padded_logp(model, chunk) for chunk in chunks)
    scorer = Scorer(model)
    batches = list(pack_tree(groups, max_tokens=max_tokens, share_prefixes="tree" in layout))
    shared = layout != "rows varlen"

    def packed() -> float:
        with mock.patch.object(Tree, "shared", shared):  # which kernel, whatever the batch
            return run(scorer(batch, 1.0).logp_N for batch in batches)

    return packed


def padded_chunks(rollouts: list[Rollout], max_tokens: int) -> list[list[Rollout]]:
    """Rows in order of length, as many at once as the padded tokens allow."""
    chunks: list[list[Rollout]] = [[]]
    for rollout in sorted(rollouts, key=lambda r: -len(r.token_ids)):
        widest = len((chunks[-1] or [rollout])[0].token_ids)
        if widest * (len(chunks[-1]) + 1) > max_tokens:
            chunks.append([])
        chunks[-1].append(rollout)
    return chunks


def padded_logp(model: Any, rollouts: list[Rollout]) -> Tensor:
    ids = pad_sequence([torch.from_numpy(r.token_ids).long() for r in rollouts], True)
    inside = pad_sequence([torch.ones(len(r.token_ids)) for r in rollouts], True).long()
    mask = pad_sequence([sampled_mask(r) for r in rollouts], True)
    ids, inside, mask = (x.to(model.device) for x in (ids, inside, mask))
    hidden = model.get_decoder()(input_ids=ids, attention_mask=inside, use_cache=False)
    before = hidden.last_hidden_state[:, :-1].flatten(0, 1)
    rows = mask[:, 1:].flatten().nonzero()[:, 0]
    head = model.get_output_embeddings().weight
    logp_N, _ = linear_logp(before, head, rows, ids[:, 1:].flatten()[rows])
    return logp_N


def sampled_mask(rollout: Rollout) -> Tensor:
    """[T], True where the model sampled the token."""
    return torch.cat([torch.full((len(s.token_ids),), s.sampled) for s in rollout.segments])


def gradient_of(model: Any, run: Callable[[], float]) -> tuple[float, Tensor]:
    """(loss, gradients of the first layer's matrices, one vector in fp32)."""
    model.zero_grad()
    loss = run()
    layer = model.get_decoder().layers[0]
    grads = [p.grad.float().flatten() for p in layer.parameters() if p.grad is not None]
    return loss, torch.cat(grads)


def check(
    setting: Setting, model: Any, groups: list[Group], layouts: Sequence[str]
) -> dict[str, tuple[float, bool]]:
    """(its gradient's error, does it compute loss and gradient of the first) of all others."""
    first, *others = layouts
    seen = {}
    want_loss, want = gradient_of(model, passes_of(model, groups, first, setting.max_tokens))
    for layout in others:
        if layout == LIGER:
            print(f"  {fuse_layers(model)}")
        loss, got = gradient_of(model, passes_of(model, groups, layout, setting.max_tokens))
        error = ((got - want).norm() / want.norm()).item()
        print(f"  check {layout}: loss {loss:.5f} ({want_loss:.5f}), gradient off by {error:.1e}")
        alike = abs(loss - want_loss) <= setting.tolerance * abs(want_loss)
        seen[layout] = error, alike and error <= setting.gradient  # nan is not alike
    return seen


def time_layout(
    setting: Setting, model: Any, groups: list[Group], layout: str
) -> tuple[list[float], float]:
    """(seconds of each step, MiB beyond what was held before, gradients included)."""
    run = passes_of(model, groups, layout, setting.max_tokens)
    on_gpu = setting.device == "cuda"
    model.zero_grad()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    run()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    while len(seconds) < setting.repeats and (len(seconds) < 2 or sum(seconds) < ENOUGH):
        model.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()  # ends in .item(), which waits for the forward; the last backward is waited for here
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20 if on_gpu else float("nan")
    return seconds, peak


def compare(setting: Setting, case: Case) -> None:
    """Check, then time.

    Raises:
        Wrong: a layout failed the check; its rows say so.
    """
    name, option, mix = case
    count, group = setting.groups
    print(f"== {name} {option}, {mix.what}: {count} x {group} rollouts of {mix.length} tokens")
    model = make_model(setting, setting.models[name], option)
    wanted = argparse.Namespace(groups=count, group=group, length=mix.length, share=mix.share)
    groups = make_groups(wanted, model.config.vocab_size)
    tokens = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    checked = check(setting, model, groups, LAYOUTS)
    rates = {}
    for layout in (*LAYOUTS, *([LIGER] if option == "full" else [])):
        if layout == LIGER:
            checked |= check(setting, model, groups, ("padded", LIGER))
        error, right = checked.get(layout, (0.0, True))
        label = f"{name} {option}, {layout}{'' if right else ', WRONG'}"
        facts = {"length": mix.length, "share_percent": round(100 * mix.share)}
        facts |= {"groups": count, "group": group, "max_tokens": setting.max_tokens}
        if layout in checked:
            setting.record(f"{label}, gradient's error", [error], "relative", facts)
        seconds, peak = time_layout(setting, model, groups, layout)
        speeds = [tokens / s for s in seconds]
        rates[layout] = setting.record(label, speeds, "tok/s", facts)
        if setting.device == "cuda":
            setting.record(f"{label}, peak memory", [peak], "MiB", facts)
        print(f"  {layout:12s} {rates[layout]:10.0f} tok/s {peak:8.0f} MiB")
    print(f"  -> tree is {rates['tree'] / rates['rows varlen']:.2f} x rows; target >= 2.5")
    if LIGER in rates:
        print(f"  -> Liger's kernels make it {rates[LIGER] / rates['tree']:.2f} x as fast")
    if wrong := [layout for layout, (_, right) in checked.items() if not right]:
        raise Wrong(f"{', '.join(wrong)}: loss or gradient is not that of padded rows")


def every(setting: Setting, cases: Sequence[Case]) -> list[str]:
    """Each alone, whatever becomes of the others; returns those that failed, with the reason."""
    failed = []
    for case in cases:
        try:
            compare(setting, case)
        except Exception as error:
            failed.append(f"{case}: {type(error).__name__}: {error}"[:300])
            print(f"  failed, nothing more of this case: {failed[-1]}")
        if setting.device == "cuda":  # here and not above: the error's frames hold tensors
            torch.cuda.empty_cache()
    return failed


def main() -> None:
    known = {str(case): case for case in cases_of(list(SHAPES), MIXES)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=known, default=list(known), metavar="CASE")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--no-rows", action="store_true", help="print only")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.list:
        print(*known, sep="\n")
        return
    if arguments.dry_run:  # the same ways to train, of another model and lengths
        options = {known[name].option for name in arguments.cases}
        cases = cases_of(["tiny"], [Mix("tiny", "tiny", 48, 2 / 3)])
        cases = [case for case in cases if case.option in options]
        write = "BENCH_OUT" in os.environ
        setting = Setting("cpu", torch.float32, {"tiny": TINY}, 512, 1e-4, 1e-4, 1, write, (1, 2))
        let_liger_be_interpreted(pytest.MonkeyPatch())
        print("a dry run, attention by sdpa: that it ends and agrees is all that it says")
    elif torch.cuda.is_available():
        cases = [known[name] for name in arguments.cases]
        setting = Setting(
            "cuda", torch.bfloat16, SHAPES, 16_384, 5e-2, 0.12, arguments.repeats,
            not arguments.no_rows,
        )  # fmt: skip
    else:
        raise SystemExit("no CUDA device: --dry-run shows on a CPU that the script works")
    if failed := every(setting, cases):
        raise SystemExit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()

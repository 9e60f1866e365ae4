"""One process, one card: vLLM and the learner take turns, and nothing may grow.

    python -m bench.gpu.colocated [section.key=value ...] [--weights copy] [--model DIR]
    python -m bench.gpu.colocated --dry-run        tiny, on the CPU: does the script work?

Every cycle is the loop's own (train.generating): wake, publish, prove agreement, sleep; then one
optimizer step on two rollouts with advantages +1 and -1, at a learning rate that moves many weights
by more than bfloat16 rounds, so that a stale cache or a skipped sync would show. Rows: times of
each part, |delta logp|, and the device memory in use awake, asleep and after the update, and how
much of it grew from the first cycles to the last. With --weights copy: what a second replica costs,
in memory and in time. A map of the memory of the first cycles, part by part, is printed and goes
to $BENCH_OUT/memory.jsonl.
Without --model a Qwen3 with random weights is made, of the shapes of --size or else of what the
card has room for, its tokens bytes: the quickstart's model is not needed. The task calls a
calculator, and no sandbox is opened.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgrpo.support.runtime import prepare_environment

if TYPE_CHECKING:
    from agentgrpo.config import TrainConfig
    from agentgrpo.train.parts import Parts

NAME = "gpu_colocated"
MAPPED = 3
"""Cycles whose memory is mapped."""
SHAPES = {  # layers, hidden, intermediate, heads, key/value heads: Qwen3's, and a toy's
    "0.6B": (28, 1024, 3072, 16, 8),
    "1.7B": (28, 2048, 6144, 16, 8),
    "tiny": (2, 64, 128, 4, 2),
}


@dataclass
class Seen:
    """What was measured, by name; one value a cycle."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def map(self, when: str) -> None:
        """Say who holds the card's memory now; a line of memory.jsonl in $BENCH_OUT."""
        held = {"device_mib": memory_mib()} | of_torch()
        line = json.dumps({"when": when} | {name: round(mib) for name, mib in held.items()})
        print(f"  {line}")
        if folder := os.environ.get("BENCH_OUT"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            with (Path(folder) / "memory.jsonl").open("a") as file:
                file.write(f"{line}\n")

    def timed(self, name: str, part: Callable[[], Any]) -> Any:
        _synchronize()
        started = time.perf_counter()
        result = part()
        _synchronize()
        self.add(name, time.perf_counter() - started)
        return result


def largest() -> str:
    """What the card can train whole: beside activations and cache 1.7B takes 26 GiB, 0.6B 9."""
    import torch

    return "1.7B" if torch.cuda.get_device_properties(0).total_memory >= 40 << 30 else "0.6B"


def make_model(folder: Path, size: str) -> Path:
    """A Qwen3 with random weights and a tokenizer of bytes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    layers, hidden, intermediate, heads, kv_heads = SHAPES[size]
    config = Qwen3Config(
        vocab_size=len(tokenizer) if size == "tiny" else 151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=32 if size == "tiny" else 128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    on_gpu = torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):  # random numbers by the billion
        model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16 if on_gpu else torch.float32).save_pretrained(folder)
    del model
    if on_gpu:
        torch.cuda.empty_cache()
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer() -> Any:
    """Three special tokens and the 256 bytes, with ChatML's template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return made


def cycle(config: TrainConfig, parts: Parts, seen: Seen, step: int) -> None:
    """Wake, publish, agree, sample, sleep, update: as train.py does, each part timed."""
    from agentgrpo.engine.agreement import check_agreement
    from agentgrpo.learn.minibatches import plan_updates

    note = seen.map if step < MAPPED else lambda what: None
    note(f"{step} asleep")
    seen.timed("wake_s", parts.engine.wake)
    note(f"{step} awake")
    seen.timed("publish_s", parts.learner.publish)
    agreed = check_agreement(
        parts.engine, parts.learner, parts.probes, threshold=parts.agreement_threshold
    )
    seen.add("max_dlogp", agreed["max_dlogp"])
    groups, _ = parts.sampler.play(parts.tasks.next(1), 2, seed=step)
    seen.add("awake_mib", memory_mib())
    note(f"{step} played")
    seen.timed("sleep_s", parts.engine.sleep)
    seen.add("asleep_mib", memory_mib())
    for rollout, advantage in zip(groups[0].rollouts, (1.0, -1.0), strict=True):
        rollout.advantage = advantage
    updates = plan_updates(groups, config, step=step)
    seen.timed("learn_s", lambda: parts.learner.step(updates))
    seen.add("learned_mib", memory_mib())
    note(f"{step} learned")


def measure(config: TrainConfig, cycles: int, record: Callable[..., None]) -> None:
    """Build the parts once and run the cycles."""
    from agentgrpo.train.build import build

    parts = build(config)
    try:
        weights = parts.learner.policy.weights
        print(f"weights {weights}, {parts.engine.device}, {parts.engine.dtype}")
        seen = Seen()
        for step in range(cycles):
            cycle(config, parts, seen, step)
        count = sum(p.numel() for p in parts.learner.model.parameters())
    finally:
        parts.close()  # of the learner too
    shape = {"cycles": cycles, "parameters": count}
    engine = config.engine
    label = engine.weights if engine.weights == "shared" else f"copy {engine.sleep_level}"
    label += ", eager" if engine.enforce_eager else ""
    label += ", optimizer offloaded" if config.learner.offload_optimizer else ""
    label += ", LoRA" if config.learner.lora.rank else ""
    for name, values in seen.values.items():
        unit = {"s": "s", "mib": "MiB"}.get(name.rsplit("_", 1)[-1], "nats")
        record(f"{label}: {name}", values, unit, shape)
    fifth = max(1, cycles // 5)
    for name in ("awake_mib", "asleep_mib", "learned_mib"):
        values = seen.values[name]
        early, late = values[fifth : 2 * fifth] or values, values[-fifth:]
        growth = sum(late) / len(late) - sum(early) / len(early)
        record(f"{label}: growth of {name}", [growth], "MiB", shape)


def memory_mib() -> float:
    """Of the whole card, vLLM's own mappings included; of this process on a CPU."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def of_torch() -> dict[str, float]:
    """MiB in torch's own allocator: in use, held, and held in pieces too small for one GiB."""
    import torch

    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    names = {"in_use": "allocated_bytes", "held": "reserved_bytes", "split": "inactive_split_bytes"}
    return {f"{name}_mib": stats[f"{key}.all.current"] / 2**20 for name, key in names.items()}


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def config_for(model: Path, out_dir: Path, weights: str, overrides: Sequence[str]) -> TrainConfig:
    """Word problems with a calculator in the text, on another model, everything trained."""
    from agentgrpo.config.read import load_config

    return load_config(
        "inline",
        [
            f'model="{model}"', f'out_dir="{out_dir}"', "learner.learning_rate=1e-4",
            f"learner.trained_layers={1 if 'tiny' in model.name else 28}",
            f"engine.weights={weights}", "engine.max_model_len=1024",  # its tokens are bytes
            *overrides,
        ],
    )  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Make the model, run the cycles, write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--model", type=Path, help="a model directory; default: random weights")
    parser.add_argument("--size", choices=list(SHAPES), help="default: what the card has room for")
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--weights", choices=["shared", "copy"], default="shared")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    args = parser.parse_args(arguments)
    prepare_environment()
    import torch

    from bench.harness import append_row

    if not args.dry_run and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --dry-run shows on a CPU that the script works")

    def record(variant: str, values: list[float], unit: str, shape: dict[str, int]) -> None:
        if args.dry_run and not os.environ.get("BENCH_OUT"):
            print(f"  {variant:32s} {sorted(values)[len(values) // 2]:10.4g} {unit}")
        else:
            append_row(NAME, variant, values, unit=unit, shape=shape)

    with tempfile.TemporaryDirectory() as folder:
        size = "tiny" if args.dry_run else args.size or largest()
        model = args.model or make_model(Path(folder) / size, size)
        config = config_for(model, Path(folder) / "run", args.weights, args.overrides)
        measure(config, 3 if args.dry_run else args.cycles, record)


if __name__ == "__main__":
    main(sys.argv[1:])

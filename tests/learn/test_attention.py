"""Packed trees through unmodified transformers models: gradients of the unrolled batch."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from agentgrpo.learn import flex, recurrent
from agentgrpo.learn.attention import TREE, Tree, _attend_cuda, runs_of, tree_attention
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.forward_check import why_not_packed
from agentgrpo.learn.packing import pack_tree
from agentgrpo.learn.policy import Scorer, checkpoint_layers, freeze_all_but
from agentgrpo.types import Group, Segment
from tests.learn.given import group_of, rollout_of, sampled

VOCAB = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "initializer_range": 0.2, "attention_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
DENSE = {
    "num_local_experts": 0, "shared_intermediate_size": 48, "logits_scaling": 3.0,
    "mamba_n_heads": 8, "mamba_d_state": 6, "mamba_d_head": 8, "mamba_chunk_size": 4,
}  # fmt: skip
DELTA = ["linear_attention", "full_attention", "linear_attention"]
DELTA_NET = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2 with windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": SLIDING},
    ),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "llama": ("Llama", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "gemma": ("Gemma", {}),
    "gemma2 with soft caps": (
        "Gemma2",
        {
            "sliding_window": 5, "layer_types": SLIDING, "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "Gemma3Text", {"sliding_window": 5, "layer_types": SLIDING, "query_pre_attn_scalar": 8},
    ),
    "phi3": ("Phi3", {"sliding_window": None}),
    "granite": ("Granite", {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "hyperclovax, which multiplies": ("HyperCLOVAX", {"logits_scaling": 3.0}),
    "minicpm3, whose values are narrow": (
        "MiniCPM3",
        {
            "q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
            "v_head_dim": 6, "dim_model_base": 16, "num_key_value_heads": 4,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "phi, whose head has a bias": ("Phi", {}),
    "phi4": ("Phi3", {"sliding_window": None, "partial_rotary_factor": 0.75}),
    "olmo3": ("Olmo3", {"sliding_window": 5, "layer_types": SLIDING}),
    "ministral": ("Ministral", {"sliding_window": 5, "layer_types": SLIDING}),
    "gemma4": (
        "Gemma4Text",
        {
            "sliding_window": 5, "layer_types": [*SLIDING, "full_attention"],
            "num_kv_shared_layers": 1, "num_hidden_layers": 4, "global_head_dim": 16,
            "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB,
            "final_logit_softcapping": 4.0,
        },
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {"layer_types": ["attention"] * 3, "position_embedding_type": "rope", **DENSE},
    ),
    "granite4 with mamba": (
        "GraniteMoeHybrid",
        {"layer_types": ["mamba", "attention", "mamba"], **DENSE},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3.5": ("Qwen3_5Text", {"layer_types": DELTA, **DELTA_NET}),
    "qwen3 next": (
        "Qwen3Next",
        {"layer_types": DELTA, **DELTA_NET, "num_experts": 0, "mlp_only_layers": [0, 1, 2]},
    ),
}  # fmt: skip


class Float64(TorchFunctionMode):
    """transformers computes norms, rotations and softmaxes in float32; here in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if func is torch.Tensor.view:  # by a dtype: bits
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


@pytest.fixture
def _float64() -> Iterator[None]:
    with Float64():
        yield


ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "falcon h1": (
        "FalconH1",
        {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "lm_head_multiplier": 0.3},
        "hybrid layers cannot tell the branches",
    ),
    "recurrent gemma": (
        "RecurrentGemma", {"logits_soft_cap": 2.0, "lru_width": 32}, "carries a state from token",
    ),
    "bloom": ("Bloom", {"n_head": 4}, "does not take attention from transformers' registry"),
    "nemotron": ("Nemotron", {}, "NemotronAttention does not pass keyword arguments to attention"),
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {}),
    "gpt oss": ("GptOss", {"layer_types": ["full_attention"] * 3, "num_local_experts": 2}),
    "llama4": ("Llama4Text", {}),
}
STATEFUL = ("qwen3.5", "lfm2", "granite4 with mamba")


def made(name: str) -> Any:
    """A model of these as its class begins."""
    listed: dict[str, Any] = {**MODELS, **ROWS, **OTHERS}
    family, options, *_ = listed[name]
    config = getattr(transformers, f"{family}Config")(**SMALL | options)
    return getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)


def make(name: str) -> Any:
    torch.manual_seed(0)
    model = made(name).double().eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped kernel takes no float64
    for parameter in model.parameters():  # norms that are all one hide what they do
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def segment(rng: np.random.Generator, length: int, *, sampled: bool = False) -> Segment:
    ids = rng.integers(3, VOCAB, size=length, dtype=np.int32)
    return Segment(ids, rng.normal(-2, 1, length).astype(np.float32) if sampled else None)


def branching_groups() -> list[Group]:
    """Two groups with a common system prompt, several turns each, and a rollout forked twice."""
    rng = np.random.default_rng(0)
    system = segment(rng, 4)
    groups = []
    for size in (3, 2):
        question = segment(rng, 5)
        rollouts = []
        for _ in range(size):
            turns = [x for k in (3, 5) for x in (segment(rng, k, sampled=True), segment(rng, 2))]
            rollouts.append([system, question, *turns, segment(rng, 4, sampled=True)])
        first = rollouts[0]
        rollouts.append([*first[:4], segment(rng, 6, sampled=True)])
        rollouts.append([*first[:6], segment(rng, 3, sampled=True)])
        groups.append(group_of(*(rollout_of(*s, advantage=float(rng.normal())) for s in rollouts)))
    return groups


def loss_of(scorer: Scorer, batches: Sequence[PackedBatch]) -> torch.Tensor:
    """The on-policy objective at temperature 0.8, plus an entropy term."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        logp, entropy, *_ = scorer(batch, 0.8)
        weight = torch.from_numpy(batch.advantage_N).double()
        total = total - (weight * logp).sum() + 0.1 * (weight * entropy).sum()
    return total


def unrolled_loss(model: Any, groups: list[Group]) -> torch.Tensor:
    """The same loss, each rollout alone through the model's own attention and logits."""
    total = torch.zeros((), dtype=torch.float64)
    model.set_attn_implementation("eager")  # transformers' sdpa leaves soft caps out
    for played in (r for group in groups for r in group.rollouts):
        ids = torch.from_numpy(played.token_ids.astype(np.int64))
        logits = model(ids[None], use_cache=False).logits[0, :-1] / 0.8
        every = torch.log_softmax(logits, -1)
        logp = every.gather(1, ids[1:, None])[:, 0]
        entropy = -(every.exp() * every).sum(-1)
        sampled = np.concatenate([np.full(len(s.token_ids), s.sampled) for s in played.segments])
        mask = torch.from_numpy(sampled[1:])
        # advantages travel as float32
        advantage = float(np.float32(played.advantage))
        total = total - advantage * (logp - 0.1 * entropy)[mask].sum()
    return total


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def assert_same_gradients(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    scale = max(x.abs().max().item() for x in b.values())
    for name, expected in b.items():
        assert (a[name] - expected).abs().max().item() <= 1e-9 * max(1.0, scale), name


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_tokens", [1000, 60])
def test_tree_gradients_equal_the_unrolled_batch(name: str, max_tokens: int) -> None:
    groups = branching_groups()
    model = make(name)
    want_loss = unrolled_loss(model, groups)
    expected = gradients(model, want_loss)
    scorer = Scorer(model)
    assert scorer.unpacked_reason is None
    batches = pack_tree(groups, max_tokens=max_tokens)
    assert (len(batches) == 1) == (max_tokens == 1000)
    loss = loss_of(scorer, batches)
    assert loss.item() == pytest.approx(want_loss.item(), abs=1e-9)
    assert_same_gradients(gradients(model, loss), expected)


def lone_tokens() -> list[Group]:
    """Forks directly after one another: runs of a single token, with and without a prior state."""
    rng = np.random.default_rng(3)
    start, ids = segment(rng, 1), rng.integers(3, VOCAB, size=6, dtype=np.int32)
    rollouts = []
    for length in range(1, 6):  # of the common tokens, then two of its own
        sampled = np.concatenate([ids[:length], np.array([3 + length, 20], np.int32)])
        logprobs = rng.normal(-2, 1, len(sampled)).astype(np.float32)
        turn = Segment(sampled, logprobs)
        rollouts.append(rollout_of(start, turn, advantage=float(rng.normal())))
    return [group_of(*rollouts)]


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("name", STATEFUL)
def test_single_token_branches_get_the_right_state(name: str) -> None:
    model, groups = make(name), lone_tokens()
    want_loss = unrolled_loss(model, groups)
    expected = gradients(model, want_loss)
    (batch,) = pack_tree(groups, max_tokens=1000)
    lengths = [run.end - run.start for run in runs_of(batch.tout_T)]
    assert lengths.count(1) == 7
    loss = loss_of(Scorer(model), [batch])
    assert loss.item() == pytest.approx(want_loss.item(), abs=1e-9)
    assert_same_gradients(gradients(model, loss), expected)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gemma4", "qwen3.5", "lfm2"])
def test_checkpointed_layers_have_equal_gradients(name: str) -> None:
    model = make(name)
    batches = pack_tree(branching_groups(), max_tokens=1000)
    scorer = Scorer(model)
    expected = gradients(model, loss_of(scorer, batches))
    calls = []
    layer = model.get_decoder().layers[0]
    block = layer.feed_forward if name == "lfm2" else layer.mlp
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpoint_layers(model)
    assert_same_gradients(gradients(model, loss_of(scorer, batches)), expected)
    assert len(calls) == 2, "once forward, once again for the backward pass"


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_unshared_batch_equals_the_tree(name: str) -> None:
    model, groups = make(name), branching_groups()
    expected = gradients(model, unrolled_loss(model, groups))
    batches = pack_tree(groups, max_tokens=1000, share_prefixes=False)
    assert not any(run.path for run in runs_of(batches[0].tout_T))
    assert_same_gradients(gradients(model, loss_of(Scorer(model), batches)), expected)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, r"no part of its (conv|linear_attention) layers \(") for name in STATEFUL),
        *((name, reason) for name, (*_, reason) in ROWS.items()),
    ],
)
def test_unsupported_models_use_independent_rows(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "MIXERS", set())
    model = make(name)
    attention = model.config._attn_implementation
    scorer = Scorer(model)
    assert re.search(reason, scorer.unpacked_reason or "")
    assert model.config._attn_implementation == attention
    groups = branching_groups()
    with pytest.raises(ValueError, match="share_prefixes: expected False"):
        scorer(pack_tree(groups, max_tokens=1000)[0], 0.8)
    batches = pack_tree(groups, max_tokens=1000, share_prefixes=False)
    want_loss = unrolled_loss(model, groups)
    expected = gradients(model, want_loss)
    loss = loss_of(scorer, batches)
    assert loss.item() == pytest.approx(want_loss.item(), abs=1e-9)
    assert_same_gradients(gradients(model, loss), expected)


@pytest.mark.parametrize("lengths", [[1980] + 95 * [50], [*range(1, 200, 7)], [900, 300, 100, 33]])
def test_padding_is_at_most_a_third_of_the_tokens(lengths: list[int]) -> None:
    """Regression: one long row among short ones was padded to twenty times their tokens."""
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=8, n_head=1, n_layer=1)
    scorer = Scorer(transformers.BloomForCausalLM(config).eval())
    rng = np.random.default_rng(0)
    rollouts = [
        rollout_of(segment(rng, 1), segment(rng, length, sampled=True)) for length in lengths
    ]
    sizes: list[int] = []
    scorer.model.transformer.register_forward_pre_hook(
        lambda _, args, given: sizes.append(given["input_ids"].numel()), with_kwargs=True
    )
    (batch,) = pack_tree([group_of(*rollouts)], max_tokens=9000, share_prefixes=False)
    scorer(batch, 1.0)
    assert batch.num_tokens <= sum(sizes) <= 4 / 3 * batch.num_tokens


def test_recurrent_layer_without_tree_support_fails() -> None:
    """Otherwise the state of one branch would run into the next."""
    model = make("qwen3.5")
    scorer = Scorer(model)
    for layer in model.get_decoder().layers:
        for mixer in recurrent.mixers_in(layer):
            del mixer.forward
    with pytest.raises(TypeError, match="Tree"):
        scorer(pack_tree(branching_groups(), max_tokens=1000)[0], 0.8)


@pytest.mark.parametrize("name", [*ROWS, "mamba", "gpt oss", "qwen3", "qwen3.5"])
def test_unsupported_models_are_known_without_weights(name: str) -> None:
    with torch.device("meta"):
        model = made(name)
    reason = {
        "mamba": r"no part of its linear_attention layers \(MambaMixer, MambaRMSNorm\)",
        "gpt oss": "sinks",
        **{name: reason for name, (*_, reason) in ROWS.items() if name != "nemotron"},
    }.get(name)  # fmt: skip
    why = why_not_packed(model)
    assert (why is None) == (reason is None)
    assert re.search(reason or "", why or "")


@pytest.mark.parametrize("name", ["lfm2", "qwen3"])
def test_wrong_branch_visibility_falls_back_to_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a family whose states nobody has said anything about; without what is before a branch."""
    alone = lambda tout_T: [run._replace(path=()) for run in runs_of(tout_T)]  # noqa: E731
    monkeypatch.setattr("agentgrpo.learn.policy.why_not_packed", lambda model: None)
    monkeypatch.setattr(recurrent, "LAYER_TYPES", set())
    monkeypatch.setattr("agentgrpo.learn.attention.runs_of", alone if name == "qwen3" else runs_of)
    model = make(name)
    scorer = Scorer(model)
    assert re.match("half of its log-probabilities are .* off", scorer.unpacked_reason or "")
    assert model.config._attn_implementation != TREE


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_unknown_logit_scale_is_refused(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    for name in ("granite", "gemma2 with soft caps"):  # the other's are not in transformers' sdpa
        assert Scorer(make(name).to(dtype)).unpacked_reason is None
    monkeypatch.setattr("agentgrpo.learn.policy.SCALES", {})
    with pytest.raises(ValueError, match="type 'granite' cannot be trained, since here half of"):
        Scorer(make("granite").to(dtype))


def test_model_without_separable_head_is_refused() -> None:
    with torch.device("meta"):
        model = made("llama4")
    with pytest.raises(ValueError, match="type 'llama4_text' cannot be trained: transformers does"):
        why_not_packed(model)


@pytest.mark.parametrize("name", ["qwen3", "bloom"])
def test_layers_are_found_under_any_attribute_name(name: str) -> None:
    model = make(name)
    trained = {id(p) for p in freeze_all_but(model, 2)}
    names = {n for n, p in model.named_parameters() if id(p) in trained}
    assert {re.findall(r"\d+", n)[0] for n in names} == {"1", "2"}


def dense(batch: PackedBatch, window: int | None = None) -> torch.Tensor:
    """The definition: q sees k iff k <= q < tout[k], within the window of positions."""
    at = torch.arange(len(batch.tout_T))
    tout, position = torch.from_numpy(batch.tout_T), torch.from_numpy(batch.positions_T)
    visible = (at[None] <= at[:, None]) & (at[:, None] < tout[None])
    if window is not None:
        visible &= position[:, None] - position[None] < window
    return visible


@pytest.mark.parametrize("window", [None, 7, 1])
def test_runs_and_masks_match_the_definition(window: int | None) -> None:
    (batch,) = pack_tree(branching_groups(), max_tokens=1000)
    tree = Tree(batch, "cpu")
    visible = torch.zeros(len(batch.tout_T), len(batch.tout_T), dtype=torch.bool)
    for run in tree.runs:
        columns = [k for a, b in (*run.path, (run.start, run.end)) for k in range(a, b)]
        mask = tree.run_mask(run, window)
        if mask is None:
            mask = torch.ones(len(columns), len(columns)).tril().bool()
        visible[run.start : run.end, columns] = mask
    assert torch.equal(visible, dense(batch, window))


def large_batch(lengths: tuple[int, ...] = (300, 90, 170), *, share: bool = True) -> PackedBatch:
    rng = np.random.default_rng(1)
    prompt = segment(rng, lengths[0])
    rollouts = [rollout_of(prompt, segment(rng, n, sampled=True)) for n in lengths[1:]]
    return pack_tree([group_of(*rollouts)], max_tokens=2000, share_prefixes=share)[0]


# What CUDA runs, as far as a CPU can: FlexAttention not compiled, the variable-length kernel
# replaced by its documented meaning.


def varlen_by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
    max_q: int, max_k: int, *, scale: float | None, enable_gqa: bool, window_size: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """Torch's varlen_attn: [T, heads, D]; a window is (left, right), -1 is no bound."""
    # TORCH_CHECK and CHECK_SHAPE of mha_varlen_fwd (flash_api.cpp)
    assert q.dtype == k.dtype == v.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[2] == k.shape[2] == v.shape[2] <= 256
    assert q.shape[2] % 8 == 0
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert torch.equal(cu_q, cu_k)
    assert cu_q.dtype == torch.int32
    assert max_q == max_k == int(cu_q.diff().max())
    assert window_size[1] == 0, "causal"
    parts = []
    for start, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        at = torch.arange(end - start)
        far = at[:, None] - at[None]
        visible = (far >= 0) & ((far <= window_size[0]) | (window_size[0] < 0))
        one_q, one_k, one_v = (x[start:end].transpose(0, 1)[None].float() for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            one_q, one_k, one_v, attn_mask=visible, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(out[0].transpose(0, 1).to(q.dtype))
    return torch.cat(parts)


def test_kernel_without_gqa_gets_repeated_key_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch 2.11's kernel has no argument for grouped queries."""

    def of_2_11(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
        scale: float | None, window_size: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        assert q.shape[1] == k.shape[1] == v.shape[1]
        return varlen_by_definition(
            q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, enable_gqa=False,
            window_size=window_size,
        )  # fmt: skip

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_2_11)
    batch = large_batch(share=False)
    tree = Tree(batch, "cpu")
    torch.manual_seed(0)
    query = torch.randn(1, 6, len(batch.tout_T), 16).bfloat16()
    key, value = torch.randn(2, 1, 2, len(batch.tout_T), 16).bfloat16()
    cuda = _attend_cuda(query, key, value, None, None, None, tree)
    cpu, _ = tree_attention(torch.nn.Module(), query, key, value, None, tree=tree)
    torch.testing.assert_close(cuda, cpu, rtol=3e-2, atol=3e-2)


FLASHED = {(16, 16), (256, 256)}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("window", "softcap", "scaling", "heads", "widths"),
    [
        (None, None, None, 4, (16, 16)),
        (50, None, 0.3, 6, (16, 16)),
        (None, 2.0, None, 4, (16, 16)),
        (None, None, None, 4, (24, 16)),
        (None, None, None, 4, (264, 264)),
        (None, None, None, 4, (20, 20)),
        (None, None, None, 4, (256, 256)),
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_cuda_path_equals_the_cpu_path(
    monkeypatch: pytest.MonkeyPatch, share: bool, dtype: torch.dtype, window: int | None,
    softcap: float | None, scaling: float | None, heads: int, widths: tuple[int, int],
) -> None:  # fmt: skip
    calls: list[str] = []

    def noted_flex() -> Any:
        calls.append("flex")
        return flex._attend

    @functools.wraps(varlen_by_definition)
    def noted_varlen(*args: Any, **kwargs: Any) -> Tensor:
        calls.append("varlen")
        return varlen_by_definition(*args, **kwargs)

    monkeypatch.setattr(flex, "compiled_attend", noted_flex)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", noted_varlen)
    batch = large_batch(share=share)
    tree = Tree(batch, "cpu")
    assert tree.shared == share
    torch.manual_seed(0)
    total = len(batch.tout_T)
    shapes = ((heads, widths[0]), (2, widths[0]), (2, widths[1]))
    query, key, value = (torch.randn(1, n, total, width).to(dtype) for n, width in shapes)
    args = (query, key, value)
    cuda = _attend_cuda(*args, scaling, window, softcap, tree)
    cpu, _ = tree_attention(
        torch.nn.Module(),
        *args,
        None,
        scaling=scaling,
        sliding_window=window,
        softcap=softcap,
        tree=tree,
    )
    assert cuda.shape == cpu.shape == (1, total, heads, widths[1])
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(cuda, cpu, rtol=tolerance, atol=tolerance)
    wants_flash = not share and softcap is None and dtype is torch.bfloat16 and widths in FLASHED
    assert calls == ["varlen" if wants_flash else "flex"]


def test_bfloat16_differs_by_rounding_only() -> None:
    groups = branching_groups()
    model = make("qwen3")
    expected = gradients(model, unrolled_loss(model, groups))
    coarse = make("qwen3").bfloat16()
    per_row = gradients(coarse, unrolled_loss(coarse, groups))
    batches = pack_tree(groups, max_tokens=1000)
    tree = gradients(coarse, loss_of(Scorer(coarse), batches))
    for name in expected:
        bound = (per_row[name].double() - expected[name]).norm()
        assert (tree[name].double() - expected[name]).norm() <= 2 * bound + 1e-3, name


@pytest.mark.parametrize("exact", [False, True])
def test_logits_dtype_follows_weights_unless_float32(exact: bool) -> None:
    model, (batch,) = make("qwen3").bfloat16(), pack_tree(branching_groups(), max_tokens=1000)
    scorer = Scorer(model, exact=exact)
    with torch.no_grad():
        hidden = scorer._hidden(batch)
        logits = hidden.double() @ model.get_output_embeddings().weight.double().T
        expected = torch.log_softmax(logits, -1)[batch.row_N, batch.target_N]
        gap = (scorer(batch, 1.0).logp_N - expected).abs().max()
    assert (gap < 1e-5) == exact


def test_unknown_token_id_is_refused() -> None:
    """Also for a token that is only a target, which is never embedded."""
    played = rollout_of(segment(np.random.default_rng(0), 4), sampled(VOCAB))
    (batch,) = pack_tree([group_of(played)], max_tokens=9)
    with pytest.raises(ValueError, match=f"token id {VOCAB}: the model has {VOCAB}"):
        Scorer(make("qwen3").float())(batch, 1.0)


def test_backward_allocates_no_tensor_per_slice() -> None:
    """On a CPU each would have the size of the whole batch and be filled with zeros."""
    model = make("qwen3").float()
    (batch,) = pack_tree(branching_groups(), max_tokens=1000)
    assert len(runs_of(batch.tout_T)) > 5
    loss = loss_of(Scorer(model), [batch])
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as recorded:
        loss.backward()
    counts = {event.key: event.count for event in recorded.key_averages()}
    layers = len(model.model.layers)
    # of each layer: the halves of q and k that the rotation turns, and of each norm none
    assert counts.get("aten::slice_backward", 0) <= 4 * layers, counts
    assert counts.get("CatBackward0", 0) <= 2 * layers, counts
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    assert counts[kernel] > 5 * layers


def test_cpu_attention_is_independent_of_input_layout() -> None:
    """Mainly the last stride: slices of a fused projection, and a transposed tensor."""
    batch = large_batch(share=True)
    tree = Tree(batch, "cpu")
    total = len(batch.tout_T)
    torch.manual_seed(0)
    fused = torch.randn(1, total, 4, 16, 3).transpose(1, 2)
    turned = torch.randn(1, 4, 16, total).transpose(2, 3)
    for options in (fused.unbind(-1), (turned, turned * 2, turned.flip(1))):
        results = []
        for layout in (Tensor.detach, Tensor.contiguous):
            leaves = q, k, v = [layout(x).detach().requires_grad_() for x in options]
            assert (q.stride(-1) == 1) == (layout is Tensor.contiguous)
            out, _ = tree_attention(torch.nn.Module(), q, k, v, None, tree=tree)
            grads = torch.autograd.grad(out.transpose(1, 3).pow(2).sum(), leaves)
            results.append((out, *grads))
        assert all(torch.equal(strided, plain) for strided, plain in zip(*results, strict=True))


def test_failing_tree_gradient_falls_back_to_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr("agentgrpo.learn.attention._BACKWARD", fails)
    assert Scorer(make("qwen3")).unpacked_reason == "RuntimeError: out of resource: shared memory"

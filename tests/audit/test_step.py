"""Each fault that a sampler can have is found at the step in which it is there, and named."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from agentgrpo.audit.fit import Distributions, Processing
from agentgrpo.audit.step import Audit, Auditor, audit_step, snapshot
from tests.audit.sampling import sample
from tests.tiny import make_model, make_tokenizer

PROMPTS = [[5, 6, 7, 8 + index] for index in range(6)]


@pytest.fixture(scope="module")
def model() -> Any:
    made = make_model(seed=3)
    made.generation_config.top_k = None
    return made


def moved(model: Any, by: float, seed: int = 0) -> Any:
    """The model after an update of about this size."""
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight += by * torch.randn_like(weight)
    return other


def audit(model: Any, sampled: tuple[Any, Any], **options: Any) -> Audit:
    return audit_step(model, make_tokenizer(), PROMPTS, *sampled, **options)


def test_both_sides_agree(model: Any) -> None:
    found = audit(model, sample(model, PROMPTS))
    assert found.ok
    assert found.num_tokens == 72
    assert found.max_gap < 1e-5
    assert str(found).startswith("sampler and model agree: 72 sampled tokens")
    assert found.metrics["audit/faults"] == 0
    assert model.training is False


@pytest.mark.parametrize(
    ("sampler", "trainer", "cause", "says"),
    [
        ({"temperature": 0.7}, 1.0, "temperature", "fits temperature 0.7, the trainer computes"),
        ({}, 0.7, "temperature", "logprobs_mode"),
        ({"top_p": 0.9}, 1.0, "filter", "fits temperature 1, top-p 0.9;"),
        ({"top_k": 20}, 1.0, "filter", "fits temperature 1, top-k 20;"),
        ({"min_p": 0.05}, 1.0, "filter", "fits temperature 1, min-p 0.05;"),
        ({"temperature": 0.6, "top_p": 0.9}, 0.6, "filter", "fits temperature 0.6, top-p 0.9;"),
        (
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, 1.0, "filter",
            "fits temperature 0.7, top-k 20, top-p 0.8;",
        ),
    ],
)  # fmt: skip
def test_what_was_left_on_is_named(
    model: Any, sampler: dict[str, Any], trainer: float, cause: str, says: str
) -> None:
    found = audit(model, sample(model, PROMPTS, **sampler), temperature=trainer)
    assert [f.cause for f in found.findings] == [cause]
    assert says in str(found)


def test_what_the_generation_config_says_is_tried(model: Any) -> None:
    """Settings that no grid has, as vLLM takes them from the model's own file."""
    own = copy.deepcopy(model)
    own.generation_config.update(temperature=0.63, top_p=0.8125, top_k=37)
    sampled = sample(own, PROMPTS, temperature=0.63, top_p=0.8125, top_k=37)
    assert "temperature 0.63, top-k 37, top-p 0.8125;" in str(audit(own, sampled))
    hint = Processing(0.63, 37, 0.8125)
    assert str(hint) in str(audit(model, sampled, hints=[hint]))


def test_a_filter_that_is_off_is_off_however_it_is_written(model: Any) -> None:
    """With vLLM top_k=-1 is off; None and what is out of range are too."""
    assert str(Processing(1.0, -1, 1.5, -0.5)) == "temperature 1"
    assert Processing(0.5, -1, 0.0, 7.0) == Processing(0.5)
    own = copy.deepcopy(model)
    own.generation_config.update(temperature=None, top_k=-1, top_p=None, min_p=None)
    assert audit(own, sample(own, PROMPTS)).ok
    sampled = sample(own, PROMPTS, temperature=0.7)
    assert audit(own, sampled, hints=[Processing(1.0, -1)]).cause == "temperature"
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        Processing(0.0)


@pytest.mark.parametrize("by", [0.01, 1e-6])
def test_weights_of_an_update_ago_are_found_whatever_its_size(model: Any, by: float) -> None:
    """The second moves no token by as much as the threshold, so no threshold can find it."""
    auditor = Auditor(model := copy.deepcopy(model), threshold=1e-3)
    engine = copy.deepcopy(model)
    first = auditor.step(PROMPTS, *sample(engine, PROMPTS))
    assert first.ok
    model.load_state_dict(moved(model, by).state_dict())
    found = auditor.step(PROMPTS, *sample(engine, PROMPTS, seed=1))
    assert found.cause == "stale_weights"
    assert "is what the weights of 1 update ago or the weights of the start say" in str(found)
    assert (found.max_gap > 1e-3) == (by > 1e-3)
    engine.load_state_dict(model.state_dict())
    assert auditor.step(PROMPTS, *sample(engine, PROMPTS, seed=2)).ok


@pytest.mark.parametrize(("engine", "cause"), [("late", "stale_weights"), ("rounded", "none")])
def test_one_sampler_of_two_is_told_from_rounding(model: Any, engine: str, cause: str) -> None:
    """All in float32: over all sequences late weights may look like bfloat16's noise."""
    trained = moved(model, 0.001)
    other = model if engine == "late" else copy.deepcopy(trained).bfloat16()
    both = sample(trained, PROMPTS[:3]), sample(other, PROMPTS[3:], seed=1)
    sampled = both[0][0] + both[1][0], both[0][1] + both[1][1]
    found = audit(trained, sampled, weights={"the start": snapshot(model)})
    assert found.cause == cause, str(found)
    mask = [[1] * 12] * 5 + [[0] * 12]  # the world spoke all of a row
    assert audit(trained, sampled, env_mask=mask).num_tokens == 60
    if engine == "late":
        assert "of 6 sequences 3 agree; of the others: stale weights: what" in str(found)


def test_a_sampler_that_never_moves_is_told_from_one_that_lags(model: Any) -> None:
    model = copy.deepcopy(model)
    auditor = Auditor(model)
    start, late = copy.deepcopy(model), copy.deepcopy(model)
    said = []
    for step in range(3):
        for engine, name in ((start, "the start"), (late, "1 update ago")):
            found = audit(
                model, sample(engine, PROMPTS, seed=step),
                weights={"the start": snapshot(start), "1 update ago": snapshot(late)},
            )  # fmt: skip
            said.append((found.ok, name in str(found), "or the weights" in str(found)))
        late.load_state_dict(model.state_dict())
        model.load_state_dict(moved(model, 0.01, step).state_dict())
    assert said[:2] == [(True, False, False)] * 2
    assert said[2:4] == [(False, True, True)] * 2, "the start is the update before"
    assert said[4:] == [(False, True, False)] * 2
    assert auditor.step(PROMPTS, *sample(model, PROMPTS)).ok


def test_an_adapter_that_never_arrived_is_told_from_old_weights(model: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    policy = peft.get_peft_model(copy.deepcopy(model), config)
    assert audit(policy, sample(policy.eval(), PROMPTS)).ok
    found = audit(policy, sample(model, PROMPTS))
    assert found.cause == "adapter"
    assert "the model without its adapter says" in str(found)


def test_two_faults_at_once_are_both_named(model: Any) -> None:
    late = moved(model, 0.01)
    sampled = sample(model, PROMPTS, temperature=0.7)
    found = audit(late, sampled, weights={"the start": snapshot(model)})
    assert [f.cause for f in found.findings] == ["stale_weights", "temperature"]


def test_bfloat16_is_told_from_a_fault(model: Any) -> None:
    half = copy.deepcopy(model).bfloat16()
    sampled = sample(half, PROMPTS)
    found = audit(model, sampled)
    assert found.ok, str(found)
    assert found.max_gap > 1e-3
    assert "bfloat16 noise" in str(found)
    assert not audit(model, sampled, threshold=1e-3).ok, "whoever sets a threshold means it"
    late = moved(model, 0.02)
    stale = audit(late, sampled, weights={"the start": snapshot(model)})
    assert stale.cause == "stale_weights"


def test_autocast_is_the_dtype_of_what_it_computes(model: Any) -> None:
    """Its passes are in bfloat16 though the weights are float32; so is its noise, and no more."""
    sampled = sample(copy.deepcopy(model).bfloat16(), PROMPTS, 40)
    with torch.autocast("cpu", torch.bfloat16):
        found = audit(model, sampled)
        assert found.ok, str(found)
        assert "bfloat16 noise" in str(found)
        off = [row[-1:] + row[:-1] for row in sampled[1]]
        assert audit(model, (sampled[0], off)).cause == "shift"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_faults_of_a_half_precision_model_are_found(model: Any, dtype: torch.dtype) -> None:
    half = copy.deepcopy(model).to(dtype)
    ids, said = sample(half, PROMPTS, 40)
    weights = snapshot(half)
    found = audit(half, (ids, said))
    assert found.ok, str(found)
    assert audit(half, (ids, [row[-1:] + row[:-1] for row in said])).cause == "shift"
    assert audit(half, sample(make_model(seed=4).to(dtype), PROMPTS, 40)).cause == "unknown"
    assert all(torch.equal(weight, weights[n]) for n, weight in half.named_parameters())
    assert {weight.dtype for weight in half.parameters()} == {dtype}


def test_an_update_below_the_noise_is_found_in_enough_tokens(model: Any) -> None:
    """The sampler rounds to bfloat16, which moves its numbers further than the update does."""
    late = moved(model, 2e-4)
    weights = {"the start": snapshot(model)}
    sampled = sample(copy.deepcopy(model).bfloat16(), PROMPTS, 160)
    found = audit(late, sampled, weights=weights)
    assert found.cause == "stale_weights"
    fresh = audit(model, sampled, weights={"1 update ago": snapshot(late)})
    assert fresh.ok, str(fresh)
    assert fresh.mean_gap > 2 * (found.mean_gap - fresh.mean_gap), "most of the gap is noise"


def test_noise_is_no_excuse_for_what_has_no_cause(model: Any) -> None:
    found = audit(model, sample(moved(model, 0.05), PROMPTS))
    assert [f.cause for f in found.findings] == ["unknown"]
    assert "Tried: temperature, top-k, top-p and min-p" in str(found)
    near = audit(model, sample(moved(model, 0.01), PROMPTS))
    assert near.cause == "unknown"
    assert near.max_gap < 1, "no wider than bfloat16 may be, but wider than it is here"


@pytest.mark.parametrize("by", [1, -1])
def test_a_list_that_is_one_place_off_is_found(model: Any, by: int) -> None:
    ids, said = sample(model, PROMPTS)
    off = [row[-by:] + row[:-by] for row in said]
    found = audit(model, (ids, off))
    assert found.cause == "shift"
    assert f"one token {'later' if by > 0 else 'earlier'}" in str(found)


def test_the_worlds_tokens_are_not_compared(model: Any) -> None:
    ids, said = sample(model, PROMPTS)
    mask = [[1, 0, 0] + [1] * 9] * 6
    said = [[x if own else -30.0 for x, own in zip(row, mask[0], strict=True)] for row in said]
    found = audit(model, (ids, said), env_mask=mask)
    assert found.ok
    assert found.num_tokens == 60
    assert not audit(model, (ids, said)).ok


@pytest.mark.parametrize(
    ("change", "cause", "says"),
    [
        (
            "said[2].pop()",
            "tokens",
            "1 of 6 completions have another number of ids",
        ),
        ("ids[2][0] = 9999", "tokenizer", "ids from 0 to 9999, but the model has 259"),
        ("said[2][0] = 0.5", "logprobs", "0 have none, 1 have one above 0, 0.5"),
        ("said[2][0] = None", "logprobs", "of 72 sampled tokens 1 have none"),
        ("said[2][0] = -math.inf", "logprobs", "0 have one above 0, 1 have -inf"),
        ("said[2][0] = math.inf", "logprobs", "1 have one above 0, inf"),
        ("said[:] = [[0.0] * 12] * 6", "logprobs", "all 72 log-probabilities are 0"),
    ],
)
def test_what_needs_no_model_is_told_without_one(
    model: Any, change: str, cause: str, says: str
) -> None:
    ids, said = sample(model, PROMPTS)
    ids[0][0] = 0
    exec(change, {"ids": ids, "said": said, "math": math})
    found = audit(model, (ids, said))
    assert [f.cause for f in found.findings] == [cause]
    assert says in str(found)


def reencode(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    found: list[int] = tokenizer.encode(tokenizer.decode(list(ids)), add_special_tokens=False)
    return found


def test_ids_that_were_encoded_again_are_found(model: Any) -> None:
    """Two tokens in the other order, in one of six: as many ids, and not those that were sampled.

    What the tokenizer makes of their text are the trained ids, in all six.
    """
    tokenizer = make_tokenizer()
    letters = tokenizer.encode("abcdefghijkl", add_special_tokens=False)
    ids = [[*letters[i:], *letters[:i]] for i in range(6)]
    rows = torch.tensor([p + c for p, c in zip(PROMPTS, ids, strict=True)])
    with torch.no_grad():
        logp = model(rows).logits.log_softmax(-1)[:, 3:-1].gather(2, rows[:, 4:, None])[..., 0]
    trained = [list(row) for row in ids]
    trained[4][7:9] = trained[4][8], trained[4][7]
    assert all(reencode(tokenizer, row) == row for row in trained)
    found = audit(model, (trained, logp.tolist()))
    assert found.cause == "tokens"
    assert (
        "of 6 sequences 1 agree up to a token and not from it on (sequence 4 from token 7)"
        in str(found)
    )
    assert "they may have been re-encoded" in str(found)


def sharp(model: Any) -> Any:
    """The model with opinions; of what is wrong with it a lower temperature explains a part."""
    made = copy.deepcopy(model)
    made.lm_head.weight = torch.nn.Parameter(3 * made.lm_head.weight.detach())
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", [4, 12])
def test_tails_are_named_by_sequence_and_token(
    model: Any, changed: int, dtype: torch.dtype
) -> None:
    """Whatever share of the sequences it is, and in any order: those that agree are not named."""
    policy = sharp(model).to(dtype)
    prompts = [[5, 6, 7, 8 + index] for index in range(16)]
    ids, said = sample(policy, prompts, 24)
    torch.manual_seed(0)
    for row in range(changed):
        ids[row][12:] = torch.randint(3, 259, (12,)).tolist()
    found = audit_step(policy, None, prompts, ids, said)
    assert [f.cause for f in found.findings] == ["tokens"]
    shown = ", ".join(f"{row} from token 12" for row in range(min(changed, 8)))
    assert f"of 16 sequences {changed} agree up to a token" in str(found)
    assert f"(sequence {shown}" in str(found)
    assert f"{16 - changed} agree: " in str(found)


def test_a_cause_that_explains_a_part_is_not_named(model: Any) -> None:
    policy = sharp(model)
    ids, said = sample(policy, PROMPTS, 24)
    assert audit(policy, (ids, [row[-1:] + row[:-1] for row in said])).cause == "shift"
    other = audit_step(policy, None, [[9, 9]] * 6, ids, said)
    assert other.cause == "unknown", str(other)
    weights = {"1 update ago": snapshot(moved(policy, 0.005))}
    far = audit(moved(policy, 0.05), (ids, said), weights=weights)
    assert far.cause == "unknown"
    assert "Closest: the weights of 1 update ago, which leave a gap of" in str(far)


def test_settings_are_not_looked_for_in_noise(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search sorts whole vocabularies; a sound step does without, one with a filter not."""
    half, looked = copy.deepcopy(model).bfloat16(), list[bool]()
    search = Distributions.explained

    def explained(*args: Any) -> Any:
        looked.append(True)
        return search(*args)

    monkeypatch.setattr(Distributions, "explained", explained)
    for policy in (model, half):
        assert audit(policy, sample(half, PROMPTS, 40)).ok
    assert not looked
    sampled = sample(half, PROMPTS, 40, top_p=0.9)
    assert [audit(policy, sampled).cause for policy in (model, half)] == ["filter"] * 2


@pytest.mark.parametrize("lora", [False, True])
def test_logits_are_made_of_a_part_at_a_time(
    model: Any, monkeypatch: pytest.MonkeyPatch, *, lora: bool
) -> None:
    """By one pass of what is below the head, whatever weights are put in its place."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, final_logit_softcapping=0.5,
    )  # fmt: skip
    policy = base = Gemma2ForCausalLM(config).eval()
    if lora:
        peft = pytest.importorskip("peft")
        targets = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        policy = peft.get_peft_model(base, targets)
    prompts = [[5, 6, 7], [5, 6, 7]]
    ids, said = sample(policy, prompts, 11)
    late = moved(policy, 0.05)
    options: dict[str, Any] = {"weights": {"the start": snapshot(policy)}}
    options["env_mask"] = [[1, 0] * 5 + [1]] * 2
    wanted = audit_step(late, None, prompts, ids, said, **options)
    monkeypatch.setattr("agentgrpo.audit.score.CHUNK", 4)
    heads, passes = list[int](), list[int]()
    base = late.get_base_model() if lora else late
    base.lm_head.register_forward_hook(lambda _, __, out: heads.append(out.shape[1]))
    base.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    found = audit_step(late, None, prompts, ids, said, **options)
    assert (found.cause, found.num_tokens) == (wanted.cause, 12)
    assert found.max_gap == pytest.approx(wanted.max_gap, abs=1e-5)
    assert set(heads) == {4, 3}
    assert len(heads) == 3 * len(passes)
    assert audit_step(late, None, [[], []], ids, said, **options).num_tokens == 10


def test_a_model_that_names_no_trunk_is_scored_in_parts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Llama4ForCausalLM's base_model_prefix is no attribute of it: its base_model is itself."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, head_dim=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, num_local_experts=2,
        attention_chunk_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    policy = Llama4ForCausalLM(config).float().eval()
    assert policy.base_model is policy
    prompts = [[5, 6, 7], [5, 6, 7]]
    sampled = sample(policy, prompts, 11)
    monkeypatch.setattr("agentgrpo.audit.score.CHUNK", 4)
    found = audit_step(policy, None, prompts, *sampled)
    assert (found.cause, found.num_tokens) == ("none", 22)
    assert found.max_gap < 1e-4


def test_a_few_tokens_name_weights_and_nothing_else(model: Any) -> None:
    sampled = sample(model, PROMPTS, 4, temperature=0.5)
    found = audit(model, sampled)
    assert found.cause == "unknown"
    assert "Tried: nothing (the rest needs 32 sampled tokens)" in str(found)
    late = moved(model, 0.01)
    weights = {"the start": snapshot(model)}
    assert audit(late, sample(model, PROMPTS, 5), weights=weights).cause == "stale_weights"


def test_what_is_no_number_is_left_out_and_counted(model: Any) -> None:
    """As TRL does with a nan of vLLM's."""
    ids, said = sample(model, PROMPTS)
    said[2][0] = said[3][1] = math.nan
    mask = [[1, 1] + [1] * 10] * 3 + [[1, 0] + [1] * 10] * 3
    found = audit(model, (ids, said), env_mask=mask)
    assert found.ok
    assert (found.num_tokens, found.num_nan) == (68, 1)
    assert "1 tokens left out whose log-probability is nan" in str(found)
    assert found.metrics["audit/nan"] == 1
    with pytest.raises(ValueError, match="nothing was sampled that the model can score"):
        audit(model, (ids, [[math.nan] * 12] * 6))


def test_sequences_that_are_not_each_others_are_refused(model: Any) -> None:
    ids, said = sample(model, PROMPTS)
    with pytest.raises(ValueError, match="nothing was sampled that the model can score"):
        audit_step(model, None, [[]], [[5]], [[-0.3]])
    with pytest.raises(ValueError, match="must be of the same sequences"):
        audit(model, (ids[:-1], said))
    with pytest.raises(ValueError, match="at least one of which has a completion"):
        audit(model, ([[]] * 6, [[]] * 6))


def test_filters_are_those_of_the_definition() -> None:
    """Against filters written one token after another."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(20, 30)
    settings: list[tuple[Any, ...]] = [
        (0.7,),
        (1.3, 5),
        (1, 0, 0.6),
        (1, 0, 1, 0.2),
        (0.8, 7, 0.5, 0.1),
    ]
    for how in [Processing(*each) for each in settings]:
        for token in (0, 17):
            wanted = []
            for row in logits.double() / how.temperature:
                p = row.softmax(0)
                kept = [
                    i for i in p.argsort(descending=True).tolist() if p[i] >= how.min_p * p.max()
                ]
                kept = kept[: how.top_k or None]
                total, nucleus = float(p[kept].sum()), list[int]()
                for i in kept:
                    if float(p[nucleus].sum()) < how.top_p * total - 1e-12:
                        nucleus.append(i)
                inside = token in nucleus
                wanted.append(float((p[token] / p[nucleus].sum()).log()) if inside else -math.inf)
            tokens = torch.full((20,), token)
            gaps = Distributions(logits, tokens, torch.zeros(20)).gaps(how)
            torch.testing.assert_close(gaps, -torch.tensor(wanted).clamp(min=-10).double())

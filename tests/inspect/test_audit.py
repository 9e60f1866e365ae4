"""The auditor detects and names each sampler fault in the step where it occurs."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from agentgrpo.inspect.audit import Audit, Auditor, audit_step, snapshot
from tests.inspect.audited_sampling import sample
from tests.tiny import make_model

PROMPTS = [[5, 6, 7, 8 + index] for index in range(6)]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(seed=3)


def moved(model: Any, by: float, seed: int = 0) -> Any:
    """The model after an update of about the size `by`."""
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight += by * torch.randn_like(weight)
    return other


def sharp(model: Any) -> Any:
    """The model with larger logits; a lower temperature explains a part of its gaps."""
    copied = copy.deepcopy(model)
    copied.lm_head.weight = torch.nn.Parameter(3 * copied.lm_head.weight.detach())
    return copied


def audit(model: Any, sampled: tuple[Any, Any], **options: Any) -> Audit:
    return audit_step(model, PROMPTS, *sampled, **options)


def test_same_weights_agree(model: Any) -> None:
    result = audit(model, sample(model, PROMPTS))
    assert result.ok
    assert result.num_tokens == 72
    assert result.max_gap < 1e-5
    assert str(result).startswith("sampler and model agree: 72 sampled tokens")
    assert model.training is False


@pytest.mark.parametrize(
    ("sampler", "trainer", "cause", "message"),
    [
        ({"temperature": 0.7}, 1.0, "temperature", "fit temperature 0.7, the trainer uses 1"),
        ({}, 0.7, "temperature", "logprobs_mode"),
        ({"top_p": 0.9}, 1.0, "filter", "sampling filter left on"),
        ({"top_k": 20}, 1.0, "filter", "sampling filter left on"),
        ({"min_p": 0.05}, 1.0, "filter", "sampling filter left on"),
        ({"temperature": 0.6, "top_p": 0.9}, 0.6, "filter", "generation_config.json"),
    ],
)
def test_sampling_setting_is_named(
    model: Any, sampler: dict[str, Any], trainer: float, cause: str, message: str
) -> None:
    result = audit(model, sample(model, PROMPTS, **sampler), temperature=trainer)
    assert [f.cause for f in result.findings] == [cause]
    assert message in str(result)


@pytest.mark.parametrize("by", [0.01, 1e-6])
def test_weights_one_update_old_are_detected(model: Any, by: float) -> None:
    """An update of 1e-6 moves no token by the threshold, so no threshold can detect it."""
    auditor = Auditor(model := copy.deepcopy(model))
    engine = copy.deepcopy(model)
    assert auditor.step(PROMPTS, *sample(engine, PROMPTS)).ok
    model.load_state_dict(moved(model, by).state_dict())
    result = auditor.step(PROMPTS, *sample(engine, PROMPTS, seed=1))
    assert result.cause == "stale_weights"
    assert "are those of the weights of 1 update ago or the weights of the start (" in str(result)
    assert (result.max_gap > 1e-3) == (by > 1e-3)
    engine.load_state_dict(model.state_dict())
    assert auditor.step(PROMPTS, *sample(engine, PROMPTS, seed=2)).ok
    model.load_state_dict(moved(model, by, 1).state_dict())
    lagging = auditor.step(PROMPTS, *sample(engine, PROMPTS, seed=3))
    assert "those of the weights of 1 update ago (" in str(lagging), "not those of the start"


def test_update_below_rounding_noise_is_detected_over_many_tokens(model: Any) -> None:
    """Rounding to bfloat16 moves the sampler's log-probabilities further than the update does."""
    late = moved(model, 2e-4)
    sampled = sample(copy.deepcopy(model).bfloat16(), PROMPTS, 160)
    result = audit(late, sampled, weights={"the start": snapshot(model)}, threshold=1.0)
    assert result.cause == "stale_weights"
    fresh = audit(model, sampled, weights={"1 update ago": snapshot(late)}, threshold=1.0)
    assert fresh.ok, str(fresh)
    assert fresh.mean_gap > 2 * (result.mean_gap - fresh.mean_gap), "most of the gap is noise"


def test_missing_adapter_is_distinguished_from_stale_weights(model: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    policy = peft.get_peft_model(copy.deepcopy(model), config)
    assert audit(policy, sample(policy.eval(), PROMPTS)).ok
    result = audit(policy, sample(model, PROMPTS))
    assert result.cause == "adapter"
    assert "those of the model without its adapter" in str(result)


def test_simultaneous_faults_are_all_named(model: Any) -> None:
    late = moved(model, 0.05)
    sampled = sample(model, PROMPTS, temperature=0.7)
    result = audit(late, sampled, weights={"the start": snapshot(model)})
    assert [f.cause for f in result.findings] == ["stale_weights", "temperature"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_default_threshold_follows_forward_dtype(model: Any, dtype: torch.dtype) -> None:
    """Also under autocast; an explicit threshold is not widened."""
    half = copy.deepcopy(model).to(dtype)
    ids, logprobs = sample(half, PROMPTS, 40)
    weights = snapshot(half)
    assert audit(half, (ids, logprobs)).ok
    assert all(torch.equal(weight, weights[n]) for n, weight in half.named_parameters())
    with torch.autocast("cpu", dtype):
        assert audit(model, (ids, logprobs)).ok
        assert not audit(model, (ids, logprobs), threshold=1e-5).ok
        off = [row[-1:] + row[:-1] for row in logprobs]
        assert audit(model, (ids, off)).cause == "shift"
    mixed = audit(model, (ids, logprobs))  # the sampler in half precision, the model in float32
    assert mixed.ok, str(mixed)
    assert mixed.max_gap > 1e-3
    near = audit(model, sample(moved(model, 0.01), PROMPTS))
    assert near.cause == "unknown", "within the bfloat16 limit, but above the measured rounding"


@pytest.mark.parametrize("by", [1, -1])
def test_shift_by_one_is_detected(model: Any, by: int) -> None:
    for policy in (model, sharp(model)):
        ids, logprobs = sample(policy, PROMPTS, 24)
        result = audit(policy, (ids, [row[-by:] + row[:-by] for row in logprobs]))
        assert [f.cause for f in result.findings] == ["shift"]
        assert f"one token {'after' if by > 0 else 'before'}" in str(result)


def test_partial_explanation_is_reported_as_unknown(model: Any) -> None:
    policy = sharp(model)
    other = audit_step(policy, [[9, 9]] * 6, *sample(policy, PROMPTS, 24))
    assert other.cause == "unknown", str(other)
    assert "Excluded: temperature, shift by one" in str(other)


def test_environment_tokens_are_not_compared(model: Any) -> None:
    ids, logprobs = sample(model, PROMPTS)
    mask = [[1, 0, 0] + [1] * 9] * 6
    logprobs = [
        [x if own else -30.0 for x, own in zip(row, mask[0], strict=True)] for row in logprobs
    ]
    result = audit(model, (ids, logprobs), env_mask=mask)
    assert result.ok
    assert result.num_tokens == 60
    assert not audit(model, (ids, logprobs)).ok
    with pytest.raises(ValueError, match="env_mask: expected at least one sampled token"):
        audit(model, (ids, logprobs), env_mask=[[0] * 12] * 6)


@pytest.mark.parametrize(
    ("change", "cause", "message"),
    [
        ("logprobs[2].pop()", "tokens", "in 1 of 6 completions the number of ids (12) is not"),
        ("ids[2][0] = 9999", "tokenizer", "ids from 0 to 9999, but the model has 259"),
        ("logprobs[2][0] = 0.5", "logprobs", "1 of 72, such as 0.5"),
        ("logprobs[2][0] = None", "logprobs", "1 of 72, such as None"),
        ("logprobs[2][0] = -math.inf", "logprobs", "1 of 72, such as -inf"),
        ("logprobs[2][0] = math.inf", "logprobs", "1 of 72, such as inf"),
        ("logprobs[:] = [[0.0] * 12] * 6", "logprobs", "all are 0"),
    ],
)
def test_invalid_input_is_named_without_forward_pass(
    model: Any, change: str, cause: str, message: str
) -> None:
    ids, logprobs = sample(model, PROMPTS)
    ids[0][0] = 0
    exec(change, {"ids": ids, "logprobs": logprobs, "math": math})
    result = audit(model, (ids, logprobs))
    assert [f.cause for f in result.findings] == [cause]
    assert message in str(result)


def test_max_tokens_keeps_whole_sequences(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgrpo.inspect.audit.CHUNK", 5)
    result = audit(model, sample(model, PROMPTS), max_tokens=13)
    assert (result.num_tokens, result.cause) == (24, "none"), "the last sequence too"


def test_nan_logprobs_are_excluded_and_counted(model: Any) -> None:
    """TRL handles a nan from vLLM in the same way."""
    ids, logprobs = sample(model, PROMPTS)
    logprobs[2][0] = logprobs[3][1] = math.nan
    mask = [[1, 1] + [1] * 10] * 3 + [[1, 0] + [1] * 10] * 3
    result = audit(model, (ids, logprobs), env_mask=mask)
    assert result.ok
    assert (result.num_tokens, result.num_nan) == (68, 1)
    assert "1 tokens left out whose log-probability is nan" in str(result)
    with pytest.raises(ValueError, match="logprobs: expected finite numbers, got 72 nan"):
        audit(model, (ids, [[math.nan] * 12] * 6))


def test_lists_of_different_lengths_are_refused(model: Any) -> None:
    ids, logprobs = sample(model, PROMPTS)
    for prompts, completions in ([[]] * 6, ids), (PROMPTS, ids[:-1]), (PROMPTS, [[]] * 6):
        with pytest.raises(ValueError, match="expected one entry per sequence each, with a token"):
            audit_step(model, prompts, completions, logprobs)

"""Each fault that a sampler can have is found at the step in which it is there, and named."""

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
    """The model after an update of about this size."""
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight += by * torch.randn_like(weight)
    return other


def sharp(model: Any) -> Any:
    """The model with opinions; of what is wrong with it a lower temperature explains a part."""
    made = copy.deepcopy(model)
    made.lm_head.weight = torch.nn.Parameter(3 * made.lm_head.weight.detach())
    return made


def audit(model: Any, sampled: tuple[Any, Any], **options: Any) -> Audit:
    return audit_step(model, PROMPTS, *sampled, **options)


def test_both_sides_agree(model: Any) -> None:
    found = audit(model, sample(model, PROMPTS))
    assert found.ok
    assert found.num_tokens == 72
    assert found.max_gap < 1e-5
    assert str(found).startswith("sampler and model agree: 72 sampled tokens")
    assert model.training is False


@pytest.mark.parametrize(
    ("sampler", "trainer", "cause", "says"),
    [
        ({"temperature": 0.7}, 1.0, "temperature", "fits temperature 0.7, the trainer computes 1"),
        ({}, 0.7, "temperature", "logprobs_mode"),
        ({"top_p": 0.9}, 1.0, "filter", "a filter left on"),
        ({"top_k": 20}, 1.0, "filter", "a filter left on"),
        ({"min_p": 0.05}, 1.0, "filter", "a filter left on"),
        ({"temperature": 0.6, "top_p": 0.9}, 0.6, "filter", "generation_config.json"),
    ],
)
def test_what_was_left_on_is_named(
    model: Any, sampler: dict[str, Any], trainer: float, cause: str, says: str
) -> None:
    found = audit(model, sample(model, PROMPTS, **sampler), temperature=trainer)
    assert [f.cause for f in found.findings] == [cause]
    assert says in str(found)


@pytest.mark.parametrize("by", [0.01, 1e-6])
def test_weights_of_an_update_ago_are_found_whatever_its_size(model: Any, by: float) -> None:
    """The second moves no token by as much as the threshold, so no threshold can find it."""
    auditor = Auditor(model := copy.deepcopy(model))
    engine = copy.deepcopy(model)
    assert auditor.step(PROMPTS, *sample(engine, PROMPTS)).ok
    model.load_state_dict(moved(model, by).state_dict())
    found = auditor.step(PROMPTS, *sample(engine, PROMPTS, seed=1))
    assert found.cause == "stale_weights"
    assert "is what the weights of 1 update ago or the weights of the start say" in str(found)
    assert (found.max_gap > 1e-3) == (by > 1e-3)
    engine.load_state_dict(model.state_dict())
    assert auditor.step(PROMPTS, *sample(engine, PROMPTS, seed=2)).ok
    model.load_state_dict(moved(model, by, 1).state_dict())
    lagging = auditor.step(PROMPTS, *sample(engine, PROMPTS, seed=3))
    assert "what the weights of 1 update ago say" in str(lagging), "and not those of the start"


def test_an_update_below_the_noise_is_found_in_enough_tokens(model: Any) -> None:
    """The sampler rounds to bfloat16, which moves its numbers further than the update does."""
    late = moved(model, 2e-4)
    sampled = sample(copy.deepcopy(model).bfloat16(), PROMPTS, 160)
    found = audit(late, sampled, weights={"the start": snapshot(model)}, threshold=1.0)
    assert found.cause == "stale_weights"
    fresh = audit(model, sampled, weights={"1 update ago": snapshot(late)}, threshold=1.0)
    assert fresh.ok, str(fresh)
    assert fresh.mean_gap > 2 * (found.mean_gap - fresh.mean_gap), "most of the gap is noise"


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
    late = moved(model, 0.05)
    sampled = sample(model, PROMPTS, temperature=0.7)
    found = audit(late, sampled, weights={"the start": snapshot(model)})
    assert [f.cause for f in found.findings] == ["stale_weights", "temperature"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_threshold_is_that_of_the_passes_dtype(model: Any, dtype: torch.dtype) -> None:
    """Under autocast too; whoever sets a threshold means it."""
    half = copy.deepcopy(model).to(dtype)
    ids, said = sample(half, PROMPTS, 40)
    weights = snapshot(half)
    assert audit(half, (ids, said)).ok
    assert all(torch.equal(weight, weights[n]) for n, weight in half.named_parameters())
    with torch.autocast("cpu", dtype):
        assert audit(model, (ids, said)).ok
        assert not audit(model, (ids, said), threshold=1e-5).ok
        off = [row[-1:] + row[:-1] for row in said]
        assert audit(model, (ids, off)).cause == "shift"
    beside = audit(model, (ids, said))  # a sampler in half precision beside a model in float32
    assert beside.ok, str(beside)
    assert beside.max_gap > 1e-3
    near = audit(model, sample(moved(model, 0.01), PROMPTS))
    assert near.cause == "unknown", "no wider than bfloat16 may be, but wider than it is here"


@pytest.mark.parametrize("by", [1, -1])
def test_a_list_that_is_one_place_off_is_found(model: Any, by: int) -> None:
    for policy in (model, sharp(model)):
        ids, said = sample(policy, PROMPTS, 24)
        found = audit(policy, (ids, [row[-by:] + row[:-by] for row in said]))
        assert [f.cause for f in found.findings] == ["shift"]
        assert f"one token {'later' if by > 0 else 'earlier'}" in str(found)


def test_a_cause_that_explains_a_part_is_not_named(model: Any) -> None:
    policy = sharp(model)
    other = audit_step(policy, [[9, 9]] * 6, *sample(policy, PROMPTS, 24))
    assert other.cause == "unknown", str(other)
    assert "Tried: temperature, a place off" in str(other)


def test_the_environments_tokens_are_not_compared(model: Any) -> None:
    ids, said = sample(model, PROMPTS)
    mask = [[1, 0, 0] + [1] * 9] * 6
    said = [[x if own else -30.0 for x, own in zip(row, mask[0], strict=True)] for row in said]
    found = audit(model, (ids, said), env_mask=mask)
    assert found.ok
    assert found.num_tokens == 60
    assert not audit(model, (ids, said)).ok
    with pytest.raises(ValueError, match="nothing was sampled by the policy"):
        audit(model, (ids, said), env_mask=[[0] * 12] * 6)


@pytest.mark.parametrize(
    ("change", "cause", "says"),
    [
        ("said[2].pop()", "tokens", "1 of 6 completions have another number of ids"),
        ("ids[2][0] = 9999", "tokenizer", "ids from 0 to 9999, but the model has 259"),
        ("said[2][0] = 0.5", "logprobs", "1 of 72, such as 0.5"),
        ("said[2][0] = None", "logprobs", "1 of 72, such as None"),
        ("said[2][0] = -math.inf", "logprobs", "1 of 72, such as -inf"),
        ("said[2][0] = math.inf", "logprobs", "1 of 72, such as inf"),
        ("said[:] = [[0.0] * 12] * 6", "logprobs", "all are 0"),
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


def test_no_more_tokens_than_asked_for_are_scored_in_parts(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentgrpo.inspect.audit.CHUNK", 5)
    found = audit(model, sample(model, PROMPTS), max_tokens=13)
    assert (found.num_tokens, found.cause) == (24, "none"), "whole sequences, the last one too"


def test_what_is_no_number_is_left_out_and_counted(model: Any) -> None:
    """As TRL does with a nan of vLLM's."""
    ids, said = sample(model, PROMPTS)
    said[2][0] = said[3][1] = math.nan
    mask = [[1, 1] + [1] * 10] * 3 + [[1, 0] + [1] * 10] * 3
    found = audit(model, (ids, said), env_mask=mask)
    assert found.ok
    assert (found.num_tokens, found.num_nan) == (68, 1)
    assert "1 tokens left out whose log-probability is nan" in str(found)
    with pytest.raises(ValueError, match="all 72 log-probabilities of the sampler's are nan"):
        audit(model, (ids, [[math.nan] * 12] * 6))


def test_sequences_that_are_not_each_others_are_refused(model: Any) -> None:
    ids, said = sample(model, PROMPTS)
    for prompts, given in ([[]] * 6, ids), (PROMPTS, ids[:-1]), (PROMPTS, [[]] * 6):
        with pytest.raises(ValueError, match="must be of the same sequences, with a token in each"):
            audit_step(model, prompts, given, said)

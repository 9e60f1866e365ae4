"""A LoRA adapter passed to vLLM in memory: the adapted policy samples, on one base model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from agentgrpo.config import EngineConfig, LearnerConfig, LossConfig
from agentgrpo.engine.agreement import Disagreement, check_agreement, probe_prompts
from agentgrpo.engine.engine import Engine
from agentgrpo.learn.learner import Learner
from agentgrpo.models.models import SavedAdapter, base_of, saved_adapter
from tests.learn.given import distributions, learner_on, oracle_model
from tests.tiny import VOCAB

RANK, ALPHA = 4, 8.0
IDS = np.arange(40, dtype=np.int32)


@pytest.fixture(scope="module")
def served(slow_setup: None, tiny_model: Path) -> Iterator[Engine]:
    """An engine with room for adapters."""
    other = Engine(tiny_model, EngineConfig(max_model_len=256, kv_cache_gib=1 / 16), lora_rank=RANK)
    yield other
    other.shutdown()


@pytest.fixture
def make_learner(served: Engine, tiny_model: Path) -> Callable[..., Learner]:
    def make(weights: str = "auto", loss: LossConfig | None = None, **lora: Any) -> Learner:
        config = LearnerConfig(lora={"rank": RANK, "alpha": ALPHA, **lora})  # type: ignore[arg-type]
        return learner_on(served, tiny_model, config, loss, weights=weights)

    served.wake()
    return make


def move(learner: Learner, seed: int) -> None:
    """An update of the adapter that is larger than an optimizer's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for matrix in learner.policy.trained:
            matrix += 0.1 * torch.randn(matrix.shape, generator=generator)


def agree(engine: Engine, learner: Learner) -> float:
    metrics = check_agreement(engine, learner, probe_prompts(VOCAB), threshold=1e-3)
    return metrics["max_dlogp"]


def base_logp(tiny_model: Path, ids: Any) -> Any:
    """Log-probabilities of ids[1:] under the model without an adapter, by plain transformers."""
    with torch.no_grad():
        logp = distributions(oracle_model(tiny_model), ids, 1.0)
    return logp.float().numpy()[np.arange(len(ids) - 1), ids[1:]]


def sampled(engine: Engine) -> Any:
    """The greedy completion of IDS with its prompt, and the sampler's log-probabilities."""
    (turn,) = engine.probe([IDS], 6)
    return np.concatenate([IDS, turn.token_ids]), turn.logprobs


def test_sampler_follows_the_adapter_over_many_steps(
    make_learner: Callable[..., Learner], served: Engine, tiny_model: Path
) -> None:
    learner = make_learner()
    learner.publish()
    ids, logprobs = sampled(served)
    np.testing.assert_allclose(logprobs, base_logp(tiny_model, ids)[-6:], atol=1e-5)
    for seed in range(4):
        move(learner, seed)
        served.sleep()
        served.wake()
        learner.publish()
        assert agree(served, learner) < 1e-5
    ids, logprobs = sampled(served)
    assert np.abs(logprobs - base_logp(tiny_model, ids)[-6:]).max() > 0.1
    np.testing.assert_allclose(logprobs, learner.score(ids)[-6:], atol=1e-5)


def test_reference_is_the_model_without_adapter(
    make_learner: Callable[..., Learner], served: Engine, engine: Engine, tiny_model: Path
) -> None:
    """In one batch with the policy, for any adapter; it is refused if there is no adapter."""
    learner = make_learner()
    for seed in range(2):
        move(learner, seed)
        learner.publish()
        for name in ("policy", "reference"):
            served.add_request(
                name, IDS, max_tokens=6, temperature=0.0, reference=name == "reference"
            )
        message: dict[str, Any] = {}
        while served.num_in_flight:
            message |= {turn.request_id: turn for turn in served.step()}
        for name, turn in message.items():
            ids = np.concatenate([IDS, turn.token_ids])
            base, own = base_logp(tiny_model, ids)[-6:], learner.score(ids)[-6:]
            expected, other = (base, own) if name == "reference" else (own, base)
            np.testing.assert_allclose(turn.logprobs, expected, atol=1e-5)
            assert np.abs(turn.logprobs - other).max() > 0.1
    with pytest.raises(ValueError, match=r"'reference' is .* requires learner\.lora\.rank"):
        engine.add_request("a", IDS, max_tokens=1, temperature=0.0, reference=True)


def test_only_the_adapter_is_published_unchanged(
    make_learner: Callable[..., Learner], served: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner()
    move(learner, 0)
    matrices = [p.detach().clone() for p in learner.policy.trained]
    base = [p.detach().clone() for p in served.model.parameters()]
    monkeypatch.setattr(served, "load_weights", None)
    for _ in range(3):
        learner.publish()
    assert all(torch.equal(a, b) for a, b in zip(matrices, learner.policy.trained, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(base, served.model.parameters(), strict=True))


def test_base_model_is_shared_with_9_packed_layers(
    make_learner: Callable[..., Learner], served: Engine
) -> None:
    """Without the embedding, which vLLM wraps separately from the tied head."""
    learner = make_learner()
    assert learner.describe()["weights"] == "shared"
    assert learner.describe()["adapter"] == "served as it is"
    theirs = {p.untyped_storage().data_ptr() for p in served.model.parameters()}
    frozen = [p for p in learner.model.parameters() if not p.requires_grad]
    assert {p.untyped_storage().data_ptr() for p in frozen} == theirs
    assert learner.describe()["prepacked_layers"] == 9, (
        "qkv, o, gate_up and down of two layers, and the head"
    )


def test_copied_base_model_agrees_too(make_learner: Callable[..., Learner], served: Engine) -> None:
    learner = make_learner("copy")
    assert learner.describe()["weights"] == "copy"
    move(learner, 1)
    learner.publish()
    assert agree(served, learner) < 1e-5


def test_skipped_publish_is_found(make_learner: Callable[..., Learner], served: Engine) -> None:
    learner = make_learner()
    learner.publish()
    move(learner, 0)
    served.reset_prefix_cache()
    with pytest.raises(Disagreement):
        agree(served, learner)


def test_single_layers_can_be_adapted(make_learner: Callable[..., Learner], served: Engine) -> None:
    """Including a part of a fused tensor (q of q, k, v); the previous adapter is dropped."""
    everything = make_learner()
    move(everything, 3)
    everything.publish()
    learner = make_learner(target_modules=("q_proj", "down_proj"))
    move(learner, 0)
    learner.publish()
    assert agree(served, learner) < 1e-5


def test_layer_that_vllm_cannot_adapt_is_named(
    make_learner: Callable[..., Learner], served: Engine
) -> None:
    learner = make_learner()
    tensors = {
        name.replace("mlp.up_proj", "mlp.odd"): t
        for name, t in (learner.policy.adapter.tensors() if learner.policy.adapter else {}).items()
    }
    config = learner.policy.adapter.config if learner.policy.adapter else {}
    with pytest.raises(ValueError, match=r"no adapters for model.layers.0.mlp.odd, .* Leave"):
        served.set_adapter(tensors, config)


def test_saved_adapter_can_be_evaluated(
    make_learner: Callable[..., Learner], served: Engine, tiny_model: Path, tmp_path: Path
) -> None:
    learner = make_learner()
    move(learner, 7)
    learner.policy.save(tmp_path)
    adapter = saved_adapter(str(tmp_path))
    assert adapter is not None
    assert (adapter.rank, base_of(adapter)) == (RANK, str(tiny_model))
    served.reset_prefix_cache()
    served.set_adapter(adapter.tensors(), adapter.config)
    ids, logprobs = sampled(served)
    np.testing.assert_allclose(logprobs, learner.score(ids)[-6:], atol=1e-5)
    assert np.abs(logprobs - base_logp(tiny_model, ids)[-6:]).max() > 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model_name_or_path": None}, r"adapter_config\.json: base_model_name_or_path is"),
        ({"r": 0}, r"adapter_config\.json: r is missing"),
        (None, r"adapter_config\.json: not JSON"),
        (
            {"base_model_name_or_path": "./gone"},
            r"'\./gone': no such file or directory in .*; it is the base",
        ),
    ],
)
def test_invalid_saved_adapter_is_named(
    tmp_path: Path, changes: dict[str, Any] | None, message: str
) -> None:
    described = {"base_model_name_or_path": "m", "r": 4, "lora_alpha": 8.0, **(changes or {})}
    text = "{" if changes is None else json.dumps(described)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"the adapter's adapter_model\.safetensors is missing"):
        saved_adapter(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ValueError, match=message):
        base_of(cast(SavedAdapter, saved_adapter(str(tmp_path))))


def test_vllm_llm_object_can_sample_the_policy(
    make_learner: Callable[..., Learner], served: Engine
) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    learner = make_learner()
    move(learner, 5)
    learner.publish()
    ids, _ = sampled(served)
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, detokenize=False)
    (response,) = served.llm.generate(
        TokensPrompt(prompt_token_ids=IDS.tolist()),
        params,
        lora_request=served.adapter,
        use_tqdm=False,
    )
    assert list(response.outputs[0].token_ids) == ids[-6:].tolist()


def test_too_large_lora_rank_is_refused_before_the_start(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"learner\.lora\.rank: expected at most 512, .* got 513"):
        Engine(tiny_model, EngineConfig(max_model_len=256), lora_rank=513)

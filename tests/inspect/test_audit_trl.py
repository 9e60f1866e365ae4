"""Audits of TRL's trainer: two published faults, each detected before its first update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import tiny, warm
from tests.inspect.audited_loops import correct_sync, make_trainer, merged, trl_5312, verl_7495

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL's, about versions
trl = pytest.importorskip("trl")


def train(folder: Path, sync: Any, *, stop: bool = True, **how: Any) -> tuple[Any, Any]:
    """Train; returns the callback and the trainer."""
    from agentgrpo.inspect.audit_trl import AuditCallback

    trainer = make_trainer(folder, sync, **how)
    callback = AuditCallback(trainer, stop=stop)
    trainer.add_callback(callback)
    loss = trainer.compute_loss
    try:
        trainer.train()
    finally:
        callback.on_train_end(None, None, None)
        assert trainer.compute_loss == loss
    return callback, trainer


@pytest.mark.parametrize(("sync", "lora"), [(correct_sync, False), (merged, True)])
def test_correct_run_is_not_stopped(tmp_path: Path, sync: Any, lora: bool) -> None:
    callback, trainer = train(tmp_path, sync, lora=lora)
    assert [audit.ok for audit in callback.audits] == [True] * 3
    assert callback.audits[2].num_tokens == 32
    assert callback.audits[2].max_gap < 1e-4
    assert trainer.state.global_step == 3


def test_colocated_vllm_is_audited(tmp_path: Path) -> None:
    """The policy's first update reaches vLLM, its second does not."""
    done = warm.run("-m", "tests.inspect.audited_loops", str(tmp_path), VLLM_CPU_KVCACHE_SPACE="1")
    causes = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("AUDIT ")]
    assert causes == ["none", "none", "stale_weights"], done.stdout + done.stderr


def test_trl_mixed_precision_passes(tmp_path: Path) -> None:
    """TRL's default: float32 weights, with accelerate's forward passes in bfloat16."""
    options = {"bf16": True, "max_steps": 2}
    callback, _ = train(tmp_path, correct_sync, options=options)
    assert [audit.ok for audit in callback.audits] == [True] * 2
    assert callback.audits[1].max_gap > 1e-3


@pytest.mark.parametrize(
    ("sync", "lora", "cause", "message"),
    [
        (trl_5312, False, "stale_weights", "or the weights of the start"),
        (verl_7495, True, "adapter", "those of the model without its adapter"),
    ],
)
def test_published_fault_is_detected_before_its_first_update(
    tmp_path: Path, sync: Any, lora: bool, cause: str, message: str
) -> None:
    """At step 0 sampler and policy both have the initial weights, so there is no fault yet."""
    from agentgrpo.inspect.audit_trl import AuditError

    with pytest.raises(AuditError, match=f"^step 1: .*\n.*{message}"):
        train(tmp_path, sync, lora=lora)
    callback, trainer = train(tmp_path, sync, lora=lora, stop=False)
    assert [audit.cause for audit in callback.audits] == ["none", cause, cause]
    assert trainer.state.global_step == 3


def test_reused_tokens_are_audited_once(tmp_path: Path) -> None:
    """After an update the policy rightly disagrees with tokens sampled before it."""
    options = {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    callback, trainer = train(tmp_path, correct_sync, options=options)
    assert trainer.state.global_step == 4
    assert [(audit.ok, audit.num_tokens) for audit in callback.audits] == [(True, 64)] * 2


@pytest.mark.parametrize(("accumulated", "generated"), [(2, 3), (3, 2)])
def test_each_generation_is_audited_with_any_accumulation(
    tmp_path: Path, accumulated: int, generated: int
) -> None:
    """Neither number divides the other; tokens from before an update are left out."""
    options = {
        "gradient_accumulation_steps": accumulated,
        "steps_per_generation": generated,
        "max_steps": 4,
    }
    callback, _ = train(tmp_path, every_other(), stop=False, options=options, num_prompts=24)
    causes = [(audit.cause, audit.num_tokens) for audit in callback.audits]
    assert causes == EVERY_OTHER[accumulated]


def every_other() -> Any:
    """A sync that updates the sampler in every second generation, starting with the first."""
    count = iter(range(1000))
    syncs = correct_sync, lambda engine, policy: None
    return lambda engine, policy: syncs[next(count) % 2](engine, policy)


EVERY_OTHER = {
    2: [("none", 64), ("stale_weights", 32), ("none", 64)],
    3: [("none", 96), ("none", 64), ("stale_weights", 96), ("stale_weights", 64)],
}


def test_batch_without_sampled_tokens_is_not_audited(tmp_path: Path) -> None:
    from agentgrpo.inspect.audit_trl import AuditCallback

    trainer = make_trainer(tmp_path, correct_sync, options={"max_steps": 2})
    sampled = trainer.rollout_func
    trainer.rollout_func = lambda *args: {
        **(out := sampled(*args)), "env_mask": [[0] * len(ids) for ids in out["completion_ids"]]
    }  # fmt: skip
    callback = AuditCallback(trainer)
    trainer.add_callback(callback)
    trainer.train()
    assert trainer.state.global_step == 2
    assert not callback.audits


def test_missing_sampler_logprobs_are_refused(tmp_path: Path) -> None:
    from datasets import Dataset

    from agentgrpo.inspect.audit_trl import AuditCallback

    tiny.make_model_dir(tmp_path / "model")
    settings = trl.GRPOConfig(
        output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, max_steps=1, report_to=[],
        per_device_train_batch_size=2, num_generations=2, max_completion_length=4,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=str(tmp_path / "model"), reward_funcs=lambda completions, **_: [0.0, 1.0],
        args=settings, train_dataset=Dataset.from_dict({"prompt": ["a"]}),
    )  # fmt: skip
    trainer.add_callback(AuditCallback(trainer))
    with pytest.raises(ValueError, match="the trainer has no log-probabilities of the sampler"):
        trainer.train()

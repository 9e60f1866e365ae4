"""A setting that would do nothing where it stands is refused, with what it needs."""

from __future__ import annotations

import pytest

from tests.given import a_config

BRANCH = "rollout.branching."


@pytest.mark.parametrize(
    ("override", "need", "then"),
    [
        ("learner.lora.alpha=8", "learner.lora.rank above 0", "learner.lora.rank=4"),
        (
            'learner.lora.target_modules=["q_proj"]',
            "learner.lora.rank above 0",
            "learner.lora.rank=4",
        ),
        ("rollout.max_refills=2", "rollout.refill_below above 0", "rollout.refill_below=2"),
        *(
            (f"{BRANCH}{other}", f"{BRANCH}initial above 0", f"{BRANCH}initial=2")
            for other in (
                *("probability=0.9", "beam_size=3", "entropy_weight=1", "entropy_tokens=9"),
                *("top_logprobs=9", "consecutive_penalty=0.5", "budget=aepo"),
            )
        ),
        ("loss.branch_credit=hard", f"{BRANCH}initial above 0", f"{BRANCH}initial=2"),
        (
            f"{BRANCH}aepo_beta=2 {BRANCH}initial=2",
            f'{BRANCH}budget = "aepo"',
            f"{BRANCH}budget=aepo",
        ),
        *(
            (f"evaluation.{one}", "evaluation.temperature above 0", "evaluation.temperature=0.5")
            for one in ("top_p=0.9", "top_k=3")
        ),
        *(
            (f"data.{one}", "a file as data.train or data.heldout", "data.train=a.jsonl")
            for one in ("question=q", "answer=a", "id=i", 'columns=["c"]')
        ),
        ("reward.on_error=raise", "reward.functions", 'reward.functions=["brevity"]'),
        ("loss.kl_estimator=k2", "loss.beta above 0", "loss.beta=0.1"),
        ("loss.use_bias_correction_kl=false", "loss.beta above 0", "loss.beta=0.1"),
        ("teacher.decay=0.5", "teacher.feedback", "teacher.feedback=errors"),
        ("teacher.clip=1 teacher.model=m teacher.topk=2", "teacher.topk = 0", "teacher.topk=0"),
        *(
            (
                f"loss.vllm_importance_sampling_clip_{end}=1.5 loss.loss_type=gmpo",
                "loss.vllm_importance_sampling_correction",
                "loss.vllm_importance_sampling_correction=true",
            )
            for end in ("min", "max")
        ),
    ],
)
def test_setting_without_effect_is_an_error(override: str, need: str, then: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ValueError, match=rf"^{key}: .* does nothing without {need}"):
        a_config(*override.split())
    a_config(*override.split(), *then.split())

"""TRL's trainer with a separate sampler: synchronised, or out of sync as in two published issues.

huggingface/trl issue 5312: with vllm_enable_sleep_mode=True generate() reloaded the checkpoint from
disk after the weights had been synchronised, so vLLM always sampled from the initial model.
verl-project/verl issue 7495: only the base layers' weights were pushed to the sampler, so its LoRA
slot stayed empty and it sampled from the initial policy. tests/inspect/audited_sampling.py stands
in for vLLM and gets the same calls in the same order as in the issues.

main() uses vLLM itself, in TRL's process; the second update never reaches it.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import tiny
from tests.inspect.audited_sampling import sample


class Engine:
    """A sampler with its own copy of the weights, in place of vLLM."""

    def __init__(self, model: Any, **how: Any) -> None:
        self._model, self._how = copy.deepcopy(model).eval(), how
        self._disk = copy.deepcopy(self._model.state_dict())

    def load(self, weights: Mapping[str, Any]) -> None:
        missing = self._model.load_state_dict(dict(weights), strict=False)
        assert not missing.unexpected_keys

    def reload_weights(self) -> None:
        self._model.load_state_dict(self._disk)

    def generate(self, prompts: list[list[int]], seed: int) -> tuple[Any, Any]:
        return sample(self._model, prompts, 8, seed=seed, **self._how)


def correct_sync(engine: Engine, policy: Any) -> None:
    engine.load(policy.state_dict())


def trl_5312(engine: Engine, policy: Any) -> None:
    """sync_weights(), then generate() wakes the engine and collective_rpc("reload_weights")."""
    engine.load(policy.state_dict())
    engine.reload_weights()


def merged(engine: Engine, policy: Any) -> None:
    policy.merge_adapter()
    engine.load(base_layers(policy))
    policy.unmerge_adapter()


def verl_7495(engine: Engine, policy: Any) -> None:
    """Push PEFT's base layers and no tensor with lora_ in its name."""
    engine.load(base_layers(policy))


def base_layers(policy: Any) -> dict[str, Any]:
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): weight.clone()
        for name, weight in policy.state_dict().items()
        if "lora_" not in name
    }


def make_trainer(
    folder: Path, sync: Any, *, lora: bool = False,
    options: Mapping[str, Any] | None = None, num_prompts: int = 4, **how: Any,
) -> Any:  # fmt: skip
    """A GRPOTrainer of the tiny model, with an engine that `sync` updates.

    Args:
        folder: for the model and TRL's output.
        sync: called with the engine and the policy before each generation. None: TRL generates.
        lora: train an adapter.
        options: of GRPOConfig.
        num_prompts: a multiple of 4.
        **how: the engine's sampling settings.
    """
    from datasets import Dataset
    from peft import LoraConfig

    trl: Any = importlib.import_module("trl")
    if not (folder / "model").exists():
        tiny.make_model_dir(folder / "model")
    engine = Engine(tiny.make_model(), **how)

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        sync(engine, trainer.model)
        encode = trainer.processing_class.encode
        ids = [encode(prompt, add_special_tokens=False) for prompt in prompts]
        completion_ids, logprobs = engine.generate(ids, trainer.state.global_step)
        return {"prompt_ids": ids, "completion_ids": completion_ids, "logprobs": logprobs}

    defaults: dict[str, Any] = {
        "output_dir": str(folder / "out"), "use_cpu": True, "bf16": False, "max_steps": 3,
        "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8,
        "learning_rate": 1e-3, "report_to": [], "save_strategy": "no", "logging_steps": 1,
    }  # fmt: skip
    targets = ["q_proj", "v_proj"]
    return trl.GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completion_ids, **_: [sum(ids) % 7 for ids in completion_ids],
        args=trl.GRPOConfig(**(defaults | dict(options or {}))),
        train_dataset=Dataset.from_dict({"prompt": ["ab", "cd", "ef", "gh"] * (num_prompts // 4)}),
        peft_config=LoraConfig(target_modules=targets) if lora else None,
        rollout_func=sync and rollout_func,
    )


def main(arguments: list[str]) -> int:
    """Train in a folder with vLLM in TRL's process; print each step's audit."""
    from agentgrpo.engine.start import plain_cpu_weights
    from agentgrpo.inspect.audit_trl import AuditCallback

    options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}
    with plain_cpu_weights():  # else vLLM packs them away on a CPU, and TRL cannot update them
        trainer = make_trainer(Path(arguments[0]), None, options=options)
    vllm, sync = trainer.vllm_generation, trainer.vllm_generation.sync_weights
    vllm.sync_weights = lambda: sync() if trainer.state.global_step < 2 else None
    callback = AuditCallback(trainer, stop=False)
    trainer.add_callback(callback)
    trainer.train()
    for audit in callback.audits:
        sys.stdout.write(f"AUDIT {audit.cause} {audit}\n")
    return 0

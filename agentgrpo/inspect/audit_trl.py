"""Audits each step of TRL's GRPOTrainer, before its update.

    trainer = GRPOTrainer(...)
    trainer.add_callback(AuditCallback(trainer))
    trainer.train()

The callback reads the inputs of `trainer.compute_loss(model, inputs)`: prompt_ids, completion_ids,
their masks, tool_mask, and the sampler's log-probabilities (sampling_per_token_logps). TRL provides
the latter only with `use_vllm=True` (and `vllm_importance_sampling_correction`, the default) or
with a `rollout_func`. Written for TRL 1.16 and one process, not for FSDP or DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback

from agentgrpo.inspect.audit import Audit, Auditor


class AuditError(RuntimeError):
    """The sampled policy is not the trained one; the update was not made."""


class AuditCallback(TrainerCallback):
    """Compares the sampled tokens of each generation with the model before its update.

    Args:
        trainer: a GRPOTrainer; pass the callback to its add_callback().
        stop: raise AuditError before the update if the audit fails; False: only store the audit.
        **options: for Auditor: history, threshold, max_tokens.
    """

    def __init__(self, trainer: Any, *, stop: bool = True, **options: Any) -> None:
        self._trainer, self._stop, self._options = trainer, stop, options
        self._auditor: Auditor | None = None
        self._compute_loss: Any = None
        self._batches: list[tuple[int, Mapping[str, Any]]] = []
        self.audits: list[Audit] = []
        """One per step that trains on tokens sampled since the update before."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wrap trainer.compute_loss to collect its inputs."""
        trainer = self._trainer
        self._batches.clear()
        self._auditor = Auditor(trainer.model, temperature=args.temperature, **self._options)
        if self._compute_loss is not None:  # the previous training was stopped without on_train_end
            return
        original = self._compute_loss = trainer.compute_loss

        def compute_loss(model: Any, inputs: Mapping[str, Any], *more: Any, **named: Any) -> Any:
            if trainer.model.training:
                self._batches.append((trainer._step, inputs))
            return original(model, inputs, *more, **named)

        trainer.compute_loss = compute_loss

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Audit the tokens of this update that were sampled since the update before."""
        batches, self._batches = self._batches, []
        every = args.steps_per_generation * args.num_iterations
        # TRL samples when its count of micro-batches, over all trainings, is a multiple of `every`
        fresh = [batch for step, batch in batches if step - step % every >= batches[0][0]]
        if self._auditor is None or not any(_policy_mask(batch).any() for batch in fresh):
            return  # the policy has moved since they were sampled, or nothing is trained on
        with self._trainer.accelerator.autocast():
            audit = self._auditor.step(*_lists(fresh))
        self.audits.append(audit)
        if self._stop and not audit.ok:
            raise AuditError(f"step {state.global_step}: {audit}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore trainer.compute_loss."""
        if self._compute_loss is not None:
            self._trainer.compute_loss, self._compute_loss = self._compute_loss, None
        self._batches.clear()


def _policy_mask(batch: Mapping[str, Any]) -> Any:
    """[B, C]: 1 for tokens that the policy sampled and the loss reads."""
    mask = batch["completion_mask"]
    return mask * batch.get("tool_mask", mask)


def _lists(
    batches: Sequence[Mapping[str, Any]],
) -> tuple[list[list[int]], list[list[int]], list[list[float]], list[list[int]]]:
    """Convert padded tensors to prompt_ids, completion_ids, logprobs and env_mask per sequence."""
    prompts, completions, logprobs, masks = [], [], [], []
    for batch in batches:
        if "sampling_per_token_logps" not in batch:
            raise ValueError(
                "the trainer has no log-probabilities of the sampler to audit; expected "
                "use_vllm=True with vllm_importance_sampling_correction=True, or a rollout_func"
            )
        tool_mask = batch.get("tool_mask", batch["completion_mask"])
        for row in range(len(batch["prompt_ids"])):
            prompt = batch["prompt_mask"][row].bool()
            completion = batch["completion_mask"][row].bool()
            prompts.append(batch["prompt_ids"][row][prompt].tolist())
            completions.append(batch["completion_ids"][row][completion].tolist())
            logprobs.append(batch["sampling_per_token_logps"][row][completion].tolist())
            masks.append(tool_mask[row][completion].tolist())
    return prompts, completions, logprobs, masks

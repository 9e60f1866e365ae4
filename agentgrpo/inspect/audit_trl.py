"""Audits each step of TRL's GRPOTrainer, before its update.

    trainer = GRPOTrainer(...)
    trainer.add_callback(AuditCallback(trainer))
    trainer.train()

The callback sees what `trainer.compute_loss(model, inputs)` is given, which is all that TRL learns
from: prompt_ids, completion_ids, their masks, tool_mask, and the sampler's log-probabilities as
sampling_per_token_logps. These are there with `use_vllm=True` (and
`vllm_importance_sampling_correction`, the default) or with a `rollout_func`, and with nothing else.
Written against TRL 1.16; run on one process, not under FSDP or DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback

from agentgrpo.inspect.audit import Audit, Auditor


class AuditError(RuntimeError):
    """What was sampled is not what would be trained; the update was not made."""


class AuditCallback(TrainerCallback):
    """Compares at each generation what was sampled with the model that is about to be updated.

    Args:
        trainer: a GRPOTrainer; the callback is added to it by add_callback().
        stop: raise AuditError before the update if something is wrong; else it is kept only.
        **options: of Auditor: history, threshold, max_tokens.
    """

    def __init__(self, trainer: Any, *, stop: bool = True, **options: Any) -> None:
        self._trainer, self._stop, self._options = trainer, stop, options
        self._auditor: Auditor | None = None
        self._compute_loss: Any = None
        self._seen: list[tuple[int, Mapping[str, Any]]] = []
        self.audits: list[Audit] = []
        """One for each step whose tokens were sampled for it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take note of what the loss is computed of."""
        trainer = self._trainer
        self._seen.clear()
        self._auditor = Auditor(trainer.model, temperature=args.temperature, **self._options)
        if self._compute_loss is not None:  # the training before was stopped, and did not end
            return
        original = self._compute_loss = trainer.compute_loss

        def compute_loss(model: Any, inputs: Mapping[str, Any], *more: Any, **named: Any) -> Any:
            if trainer.model.training:
                self._seen.append((trainer._step, inputs))
            return original(model, inputs, *more, **named)

        trainer.compute_loss = compute_loss

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Audit those of this update's tokens that were sampled since the update before."""
        taken, self._seen = self._seen, []
        every = args.steps_per_generation * args.num_iterations
        # TRL samples where its count of micro-batches, over all trainings, is a multiple of `every`
        seen = [batch for at, batch in taken if at - at % every >= taken[0][0]]
        if self._auditor is None or not any(_own(batch).any() for batch in seen):
            return  # the policy has moved since they were sampled, or nothing is trained on
        with self._trainer.accelerator.autocast():
            audit = self._auditor.step(*_lists(seen))
        self.audits.append(audit)
        if self._stop and not audit.ok:
            raise AuditError(f"step {state.global_step}: {audit}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the trainer as it was."""
        if self._compute_loss is not None:
            self._trainer.compute_loss, self._compute_loss = self._compute_loss, None
        self._seen.clear()


def _own(batch: Mapping[str, Any]) -> Any:
    """[B, C]: 1 where the policy sampled and the loss reads."""
    mask = batch["completion_mask"]
    return mask * batch.get("tool_mask", mask)


def _lists(
    batches: Sequence[Mapping[str, Any]],
) -> tuple[list[list[int]], list[list[int]], list[list[float]], list[list[int]]]:
    """Padded tensors as prompt_ids, completion_ids, logprobs and env_mask of each sequence."""
    prompts, completions, logprobs, masks = [], [], [], []
    for batch in batches:
        if "sampling_per_token_logps" not in batch:
            raise ValueError(
                "the trainer was not given the sampler's log-probabilities, so nothing can be "
                "audited; expected use_vllm=True with vllm_importance_sampling_correction=True, "
                "or a rollout_func"
            )
        tool_mask = batch.get("tool_mask", batch["completion_mask"])
        for row in range(len(batch["prompt_ids"])):
            given, own = batch["prompt_mask"][row].bool(), batch["completion_mask"][row].bool()
            prompts.append(batch["prompt_ids"][row][given].tolist())
            completions.append(batch["completion_ids"][row][own].tolist())
            logprobs.append(batch["sampling_per_token_logps"][row][own].tolist())
            masks.append(tool_mask[row][own].tolist())
    return prompts, completions, logprobs, masks

"""The learner: optimizer updates on packed rollouts.

It knows no algorithm by name. Per loss term it sees a row, a target, an advantage, a weight and the
sampler's log-probability.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentgrpo.config import LearnerConfig, LossConfig
from agentgrpo.engine.agreement import outliers_of, require_agreement, widest_gap
from agentgrpo.kernels.checks import backend_for
from agentgrpo.kernels.grpo_loss import grpo_loss
from agentgrpo.kernels.reduce import Metrics as TermMetrics
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.minibatches import Update
from agentgrpo.learn.optimizer import MasterAdamW
from agentgrpo.learn.policy import Policy, PolicyOutput
from agentgrpo.learn.preflight import dry_pass, one_row, oom_hint_learner
from agentgrpo.learn.reference import Reference
from agentgrpo.learn.step_record import OldLogps, ScoredBatch, StepRecord
from agentgrpo.learn.teacher import Teacher
from agentgrpo.learn.token_weights import objective_of
from agentgrpo.learn.weight_sync import Publisher
from agentgrpo.records import checkpoint
from agentgrpo.support import parallel
from agentgrpo.support.memory import explain_out_of_memory, trim
from agentgrpo.types import Float32, Int32, Metrics


class Learner:
    """Trains the policy on rollouts sampled from it.

    `temperature`: sampling temperature of the rollouts, at which log-probabilities are taken.
    `dlogp_limit`: largest |delta logp| in nats between sampler and learner on a sampled token,
    except for agreement.outliers_of() tokens; above it step() refuses to update. `reference`:
    directory or name of the model for the KL penalty, if loss.beta is set; ignored with a LoRA
    adapter, whose base model is the reference. `teacher`: keyword arguments of Teacher.
    """

    def __init__(
        self,
        policy: Policy,
        publisher: Publisher,
        config: LearnerConfig,
        loss: LossConfig,
        *,
        total_steps: int,
        temperature: float,
        dlogp_limit: float,
        reference: str | Path | None = None,
        teacher: Mapping[str, Any] | None = None,
    ) -> None:
        self.policy, self._publisher, self._config, self._loss = policy, publisher, config, loss
        self.model, self.device, self._scorer = policy.model, policy.device, policy.scorer
        self._total_steps, self._temperature = total_steps, temperature
        self._dlogp_limit = dlogp_limit
        self._objective = objective_of(loss)
        source = None if policy.adapter is not None else reference
        self._reference = Reference(policy, source) if loss.beta else None
        limits = temperature, config.max_tokens
        self._teacher = None if teacher is None else Teacher(policy, *limits, **teacher)
        self._references = {"reference": self._reference}
        """By the names of their entries in a checkpoint."""
        if self._teacher is not None:
            self._references["teacher"] = self._teacher.reference
        self._optimizer = MasterAdamW(
            policy.trained,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            offload=config.offload_optimizer,
        )
        self.step_count = 0

    def describe(self) -> dict[str, Any]:
        return {
            **self.policy.describe(),
            **self._publisher.about,
            "ranks": parallel.world_size(),
            "kernels": backend_for(torch.device(self.device)),
        }

    @property
    def shares_prefixes(self) -> bool:
        """Whether batches may be prefix trees; otherwise every rollout is laid out alone."""
        return self._scorer.unpacked_reason is None

    def publish(self) -> Metrics:
        return self._publisher.publish()

    def dry_pass(self, num_tokens: int) -> None:
        dry_pass(self.policy, self._optimizer, num_tokens, self._temperature)

    def checkpoint_if_auto(self) -> bool:
        """Enable gradient checkpointing if the setting is "auto"; True if it did."""
        if self._config.gradient_checkpointing != "auto" or self.policy.checkpointed:
            return False
        self.policy.checkpoint_layers()
        return True

    @torch.no_grad()
    def score(self, token_ids: Int32) -> Float32:
        """Log-probability [T-1] fp32 of token_ids[1:] at temperature 1."""
        scored = self._scorer(one_row(token_ids), 1.0)
        logp: Float32 = scored.logp_N.float().cpu().numpy()
        return logp

    def save_state(self, path: Path, **more: Any) -> None:
        """Write what a resumed run needs in addition to the weights: optimizer, step count, and
        `more`.

        On several ranks all must call it; the first one writes.
        """
        state = {
            "optimizer": self._optimizer.state_dict(),
            "step": self.step_count,
            **{name: model.state() if model else [] for name, model in self._references.items()},
            **more,
        }
        if parallel.rank() == 0:
            torch.save(state, path)

    def load_state(self, path: Path) -> dict[str, Any]:
        """Restore what save_state() wrote (the engine loads the weights); returns all entries."""
        state = checkpoint.read_state(path, "optimizer", "step", "reference")
        try:
            self._optimizer.load_state_dict(state["optimizer"])
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{path} is of a run with other trained parameters: {error}"
            ) from error
        self.step_count = state["step"]
        for name, model in self._references.items():
            if model is not None:
                model.load(state.get(name, []))
        return state

    def step(self, updates: Sequence[Update]) -> Metrics:
        """Run the optimizer updates of one step, each on all of its batches.

        Every rank receives all updates and computes its share of the batches. Without batches (no
        group had a gradient) the weights stay and the step still counts.

        The learner's per-token results are stored in the rollouts of the updates. Returns means
        over the updates (`loss`, `grad_norm`) and over the loss terms (all others).

        Raises:
            Disagreement: The sampler used other weights; nothing was updated.
            FloatingPointError: A gradient is not finite; that update was not made.
        """
        hint = partial(oom_hint_learner, self, self._config.max_tokens)
        with explain_out_of_memory("learning", hint):
            return self._step(updates)

    def _step(self, updates: Sequence[Update]) -> Metrics:
        started = time.perf_counter()
        self._optimizer.set_lr(self.learning_rate)
        record = StepRecord()
        teacher_metrics = {} if self._teacher is None else self._teacher.score(updates)
        self._score_before_updates(updates, record)
        for epoch in range(self._loss.num_iterations):
            for index, update in enumerate(updates):
                if update.batches:
                    self._update(record, index, update, first_pass=epoch == 0)
                for model in filter(None, self._references.values()):
                    model.update_average()
        self.step_count += 1
        self._optimizer.zero_grad()  # frees memory for the engine's KV cache
        trim()
        metrics = {"learning_rate": self._optimizer.lr, "updates": float(len(record.losses))}
        metrics |= record.metrics(self._objective) | teacher_metrics
        for index, sample_N, turn_N, fields in record.gather_fields():
            updates[index].store_fields(sample_N, turn_N, **fields)
        tokens = sum(batch.num_tokens for update in updates for batch in update.batches)
        metrics["packed_tokens"] = float(tokens)
        metrics["seconds"] = time.perf_counter() - started
        return metrics

    @property
    def learning_rate(self) -> float:
        return self._config.learning_rate_at(self.step_count, self._total_steps)

    @torch.no_grad()
    def _score_before_updates(self, updates: Sequence[Update], record: StepRecord) -> None:
        """Score every batch while the weights are still those that sampled it.

        The first update changes the weights, so these values cannot be computed later: the old
        log-probabilities of later updates, the reference's, and the quantile over all entropies.
        """
        num_live = sum(bool(update.batches) for update in updates)
        if not num_live:
            return
        # with a single update its own forward pass gives the old log-probabilities
        several_updates = num_live * self._loss.num_iterations > 1
        needs_old = several_updates and self._loss.old_logps == "recomputed"
        needs_entropy = self._loss.top_entropy_quantile < 1
        scored_batches = []
        for index, update in enumerate(updates):
            for number, batch, counts in parallel.share(update.batches):
                old = ref = None
                if needs_old or needs_entropy:
                    scored = self._scorer(batch, self._temperature)
                    if counts:  # else this rank only takes part in the others' all-gathers
                        scored_batches.append(ScoredBatch.of(index, batch, scored))
                    old = scored.logp_N
                if self._reference is not None:
                    ref = self._reference(batch, self._temperature).logp_N
                record.old_logps[index, number] = OldLogps(old if needs_old else None, ref)
        if needs_old or needs_entropy:
            # copied to the host after the loop: a copy waits, and the device would idle meanwhile
            for scored_batch in scored_batches:
                record.add_scores(scored_batch)
            self._require_agreement(record)
            record.scored_ahead = True
        if needs_entropy:
            # over the terms of all ranks: a quantile per rank would give each a different threshold
            entropies = [(i, fields["entropies"]) for i, _, _, fields in record.gather_fields()]
            all_N = np.concatenate([entropy_N for _, entropy_N in entropies])
            threshold = float(np.quantile(all_N, 1 - self._loss.top_entropy_quantile))
            record.entropy_threshold = threshold
            for index, entropy_N in entropies:
                record.above_threshold[index] += int((entropy_N >= threshold).sum())

    def _update(self, record: StepRecord, index: int, update: Update, *, first_pass: bool) -> None:
        self._optimizer.zero_grad()
        losses, scored_batches = [], []
        num_terms = sum(batch.num_terms for batch in update.batches)
        if record.entropy_threshold is not None:
            num_terms = record.above_threshold[index]
        needs_check = first_pass and not record.scored_ahead
        # always in this order: float sums depend on it, and a resumed run must get the same bits
        for number, batch, counts in parallel.share(update.batches):
            old_logps = record.old_logps[index, number]
            loss, metrics, scored, fields = self._loss_of(
                batch, record, old_logps, update, max(num_terms, 1)
            )
            # FSDP averages gradients over the ranks; the weights already contain the normaliser
            (loss * (parallel.world_size() if counts else 0.0)).backward()
            self._optimizer.collect()
            if counts:
                losses.append(loss.detach())
                record.kernel_metrics.append(metrics)
                if first_pass and fields:
                    arrays = {name: x.detach().float().cpu().numpy() for name, x in fields.items()}
                    record.fields.append((index, *batch.labels, arrays))
                if needs_check:
                    scored_batches.append(ScoredBatch.of(index, batch, scored))
        # item() waits for the device; within the loop the device would idle until the next batch
        loss_sum = sum(loss.item() for loss in losses)
        for scored_batch in scored_batches:
            record.add_scores(scored_batch)
        # the gradients exist and no weight has changed: the last moment to refuse the update
        if needs_check and not record.losses:
            self._require_agreement(record)
        record.losses.append(parallel.total(loss_sum))
        record.norms.append(self._optimizer.step(max_grad_norm=self._config.max_grad_norm))

    def _require_agreement(self, record: StepRecord) -> None:
        widest = parallel.largest(widest_gap(record.gaps, outliers_of(self.policy.dtype)))
        require_agreement(widest, self._dlogp_limit, where="on the sampled tokens")

    def _loss_of(
        self,
        batch: PackedBatch,
        record: StepRecord,
        old_logps: OldLogps,
        update: Update,
        entropy_tokens: int,
    ) -> tuple[Tensor, TermMetrics, PolicyOutput, dict[str, Tensor]]:
        """The loss, the kernel's metrics, the policy's scores, and a teacher's fields to store."""
        taught = None
        if self._teacher is not None:
            taught = self._teacher.scores_of(update, batch, self.device)
        scored = self._scorer(batch, self._temperature, 0 if taught is None else taught.ids_NK)
        logp_N, entropy_N = scored.logp_N, scored.entropy_N

        terms = batch.terms(logp_N.device)
        # float32 for any weight dtype: a ratio is the exponential of a difference of two of these
        sampler, advantage, weight = (
            x.to(logp_N.dtype) for x in (terms.old_logp_N, terms.advantage_N, terms.weight_N)
        )
        detached = logp_N.detach()
        if self._loss.old_logps == "sampler":
            old = sampler
        else:
            # in the first update the policy is the old policy: a ratio of exactly 1, with gradient
            old = detached if old_logps.old_logp is None else old_logps.old_logp
        fields = {}
        if taught is not None:
            fields["token_advantages"] = advantage = taught.combined_advantage(advantage, old)
        loss, metrics = grpo_loss(
            logp_N,
            old,
            advantage,
            weight,
            self._objective,
            ref_logp_N=old_logps.ref_logp,
            sampler_logp_N=sampler,
            entropy_N=entropy_N,
            entropy_tokens=entropy_tokens,
            entropy_threshold=record.entropy_threshold,
            sequence_N=terms.sample_N,
            num_sequences=update.num_samples,
        )
        if taught is not None and taught.config.topk:
            kl_N = taught.reverse_kl(scored.candidate_logp_NK)
            loss = loss + taught.config.weight * (weight * kl_N).sum()
            metrics["teacher_kl"] = kl_N.detach().mean()
            topk = scored.candidate_logp_NK.where(taught.is_scored_N1, torch.nan)
            fields["learner_topk_logprobs"] = topk
        return loss, metrics, scored, fields

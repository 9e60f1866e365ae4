"""The trained side of the one policy: optimizer updates on packed rollouts, and what they leave.

It knows no algorithm by name: it sees, per loss term, a row, a target, an advantage, a weight and
the sampler's log-probability.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
from agentgrpo.support.memory import explained, trim
from agentgrpo.types import Float32, Int32, Metrics


class Learner:
    """Trains a policy on what was sampled from it.

    `temperature` is the rollouts', which log-probabilities are taken at. `dlogp_limit`: largest
    |delta logp| in nats between the sampler's and the learner's view of a sampled token, but for
    agreement.outliers_of(); above it step() refuses to update. `reference`: what the KL penalty is
    taken to, if loss.beta is set: the directory or name that training began with; not read where an
    adapter is trained.
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
        own = None if policy.adapter is not None else reference
        self._reference = Reference(policy, own) if loss.beta else None
        limits = temperature, config.max_tokens
        self._teacher = None if teacher is None else Teacher(policy, *limits, **teacher)
        self._beside = {"reference": self._reference}
        """Other models, by the names of what a resumed run needs of them."""
        if self._teacher is not None:
            self._beside["teacher"] = self._teacher.beside
        self._optimizer = MasterAdamW(
            policy.trained,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            offload=config.offload_optimizer,
        )
        self.step_count = 0

    def describe(self) -> dict[str, Any]:
        """What was chosen, for the record."""
        return {
            **self.policy.describe(),
            **self._publisher.about,
            "ranks": parallel.world_size(),
            "kernels": backend_for(torch.device(self.device)),
        }

    @property
    def shares_prefixes(self) -> bool:
        """Whether batches may be trees; otherwise every rollout must be laid out alone."""
        return self._scorer.unpacked_reason is None

    def publish(self) -> Metrics:
        """Make the sampler's policy this one, then forget its cached keys."""
        return self._publisher.publish()

    def dry_pass(self, num_tokens: int) -> None:
        dry_pass(self.policy, self._optimizer, num_tokens, self._temperature)

    def checkpoint_if_auto(self) -> bool:
        """Checkpoint the layers if learner.gradient_checkpointing leaves it open; if so, True."""
        if self._config.gradient_checkpointing != "auto" or self.policy.checkpointed:
            return False
        self.policy.checkpoint_layers()
        return True

    @torch.no_grad()
    def score(self, token_ids: Int32) -> Float32:
        """Log-probability at temperature 1 of token_ids[1:], each given all before; [T-1] fp32."""
        scored = self._scorer(one_row(token_ids), 1.0)
        logp: Float32 = scored.logp_N.float().cpu().numpy()
        return logp

    def save_state(self, path: Path, **more: Any) -> None:
        """Write what a resumed run needs besides the weights: optimizer, step count, and `more`.

        On several ranks all must call it; the first one writes.
        """
        state = {
            "optimizer": self._optimizer.state_dict(),
            "step": self.step_count,
            **{name: model.state() if model else [] for name, model in self._beside.items()},
            **more,
        }
        if parallel.rank() == 0:
            torch.save(state, path)

    def load_state(self, path: Path) -> dict[str, Any]:
        """Restore what save_state() wrote (the weights came with the engine); returns `more`."""
        state = checkpoint.read_state(path, "optimizer", "step", "reference")
        try:
            self._optimizer.load_state_dict(state["optimizer"])
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{path} is of a run with other trained parameters: {error}"
            ) from error
        self.step_count = state["step"]
        for name, model in self._beside.items():
            if model is not None:
                model.load(state.get(name, []))
        return state

    def step(self, updates: Sequence[Update]) -> Metrics:
        """The optimizer updates of one step, each on all of its batches together.

        Every rank is given all updates and works on its share of the batches. Without batches (no
        group had a gradient) the weights stay and the step still counts.

        The rollouts of the updates are told what the learner made of their tokens. Returns means
        over the updates (`loss`, `grad_norm`) and over the loss terms (the rest). Disagreement: the
        sampler saw another policy; nothing was updated. FloatingPointError: a gradient is not
        finite; that update was not made.
        """
        with explained("learning", lambda: oom_hint_learner(self, self._config.max_tokens)):
            return self._step(updates)

    def _step(self, updates: Sequence[Update]) -> Metrics:
        started = time.perf_counter()
        self._optimizer.set_lr(self.learning_rate)
        run = StepRecord()
        taught = {} if self._teacher is None else self._teacher.score(updates)
        self._look_ahead(updates, run)
        for epoch in range(self._loss.num_iterations):
            for index, update in enumerate(updates):
                if update.batches:
                    self._update(run, index, update, first_pass=epoch == 0)
                for model in filter(None, self._beside.values()):
                    model.follow()
        self.step_count += 1
        self._optimizer.zero_grad()  # the engine's cache needs the room
        trim()
        metrics: Metrics = {"learning_rate": self._optimizer.lr, "updates": float(len(run.losses))}
        metrics |= run.metrics(self._objective) | taught
        for index, sample_N, turn_N, fields in run.told():
            updates[index].take(sample_N, turn_N, **fields)
        tokens = sum(batch.num_tokens for update in updates for batch in update.batches)
        metrics["packed_tokens"] = float(tokens)
        metrics["seconds"] = time.perf_counter() - started
        return metrics

    @property
    def learning_rate(self) -> float:
        return self._config.learning_rate_at(self.step_count, self._total_steps)

    @torch.no_grad()
    def _look_ahead(self, updates: Sequence[Update], run: StepRecord) -> None:
        """Score every batch with the policies that the updates are compared with."""
        live = sum(bool(update.batches) for update in updates)
        if not live:
            return
        more_than_one = live * self._loss.num_iterations > 1
        wants_old = more_than_one and self._loss.old_logps == "recomputed"
        wants_entropy = self._loss.top_entropy_quantile < 1
        found = []
        for index, update in enumerate(updates):
            for number, batch, counts in parallel.share(update.batches):
                old = ref = None
                if wants_old or wants_entropy:
                    scored = self._scorer(batch, self._temperature)
                    if counts:
                        found.append(ScoredBatch.at(index, batch, scored.logp_N, scored.entropy_N))
                    old = scored.logp_N
                if self._reference is not None:
                    ref = self._reference(batch, self._temperature).logp_N
                run.before[index, number] = OldLogps(old if wants_old else None, ref)
        if wants_old or wants_entropy:
            for mine in found:  # not before: the device would have nothing to do meanwhile
                run.saw(mine)
            self._require_agreement(run)
            run.looked = True
        if wants_entropy:
            # over the terms of all ranks, or each would train on a share of its own
            seen = [(index, fields["entropies"]) for index, _, _, fields in run.told()]
            together = np.concatenate([entropy_N for _, entropy_N in seen])
            threshold = float(np.quantile(together, 1 - self._loss.top_entropy_quantile))
            run.entropy_threshold = threshold
            for index, entropy_N in seen:
                run.above_threshold[index] += int((entropy_N >= threshold).sum())

    def _update(self, run: StepRecord, index: int, update: Update, *, first_pass: bool) -> None:
        self._optimizer.zero_grad()
        losses, found = [], []
        terms = sum(batch.num_terms for batch in update.batches)
        bonus_over = terms if run.entropy_threshold is None else run.above_threshold[index]
        unseen = first_pass and not run.looked
        # always in this order: float sums depend on it, and a resumed run comes to the same bits
        for number, batch, counts in parallel.share(update.batches):
            before = run.before[index, number]
            loss, measured, scored, made = self._loss_of(
                batch, run, before, update, max(bonus_over, 1)
            )
            # FSDP averages gradients over the ranks; the weights are a share of the whole
            (loss * (parallel.world_size() if counts else 0.0)).backward()
            self._optimizer.collect()
            if counts:
                losses.append(loss.detach())
                run.parts.append(measured)
                if first_pass and made:
                    arrays = {name: x.detach().float().cpu().numpy() for name, x in made.items()}
                    run.made.append((index, *batch.labels, arrays))
                if unseen:
                    found.append(ScoredBatch.at(index, batch, scored.logp_N, scored.entropy_N))
        # here and not above: a device that is waited for has nothing to do until the next batch
        loss_sum = sum(loss.item() for loss in losses)
        for mine in found:
            run.saw(mine)
        # gradients are there and nothing has moved yet: the last moment to refuse
        if unseen and not run.losses:
            self._require_agreement(run)
        run.losses.append(parallel.total(loss_sum))
        run.norms.append(self._optimizer.step(max_grad_norm=self._config.max_grad_norm))

    def _require_agreement(self, run: StepRecord) -> None:
        widest = parallel.largest(widest_gap(run.gaps, outliers_of(self.policy.dtype)))
        require_agreement(widest, self._dlogp_limit, where="on the sampled tokens")

    def _loss_of(
        self, batch: PackedBatch, run: StepRecord, before: OldLogps, update: Update, bonus_over: int
    ) -> tuple[Tensor, TermMetrics, PolicyOutput, dict[str, Tensor]]:
        """The loss, the kernel's metrics, what the policy made of the batch, and with a teacher
        what a rollout is told of it, by its fields.
        """
        said = None if self._teacher is None else self._teacher.said(update, batch, self.device)
        scored = self._scorer(batch, self._temperature, 0 if said is None else said.ids_NK)
        logp_N, entropy_N = scored.logp_N, scored.entropy_N

        terms = batch.terms(logp_N.device)
        # float32 whatever the weights are: a ratio is the exponent of a difference of two of these
        sampler, advantage, weight = (
            x.to(logp_N.dtype) for x in (terms.old_logp_N, terms.advantage_N, terms.weight_N)
        )
        detached = logp_N.detach()
        if self._loss.old_logps == "sampler":
            old = sampler
        else:
            # in the first update the policy is its own old one: a ratio of exactly 1, with gradient
            old = detached if before.old_logp is None else before.old_logp
        made = {}
        if said is not None:
            made["token_advantages"] = advantage = said.advantage(advantage, old)
        loss, metrics = grpo_loss(
            logp_N,
            old,
            advantage,
            weight,
            self._objective,
            ref_logp_N=before.ref_logp,
            sampler_logp_N=sampler,
            entropy_N=entropy_N,
            entropy_tokens=bonus_over,
            entropy_threshold=run.entropy_threshold,
            sequence_N=terms.sample_N,
            num_sequences=update.num_samples,
        )
        if said is not None and said.config.topk:
            apart_N = said.divergence(scored.beside_NK)
            loss = loss + said.config.weight * (weight * apart_N).sum()
            metrics["teacher_kl"] = apart_N.detach().mean()
            made["learner_topk_logprobs"] = scored.beside_NK.where(said.told_N1, torch.nan)
        return loss, metrics, scored, made

"""Compares a sampler's log-probabilities with those of the trained model and names the cause.

For any loop that has a Hugging Face model, the sampled ids and the sampler's log-probabilities:

    auditor = Auditor(model, temperature=0.7)
    ...                                                # sample
    audit = auditor.step(prompt_ids, completion_ids, logprobs)   # before the update
    if not audit.ok:
        raise RuntimeError(str(audit))

The model and the weights of earlier updates score the same tokens. Earlier weights are named as the
cause if they fit the sampler's log-probabilities significantly better. The test is paired over the
tokens, so rounding, which both sides share, cancels out. It finds weights that are one update old
even if the update moved them less than bfloat16 rounds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from agentgrpo.engine.agreement import outliers_of, widest_gap
from agentgrpo.inspect.verify.tokens import LOGP_TOLERANCE

CHUNK = 512
"""Tokens whose logits are converted to float32 at a time."""
FIT_TOKENS = 128
"""Tokens of a step to which a temperature is fitted."""
WORST = 10.0
"""Gaps are clipped at this many nats, so that one impossible token does not decide."""
SIGNIFICANT = 5.0
"""Standard errors over the tokens by which a cause must fit better."""
EXACT, HALF = 1e-3, 1.0
"""Largest gap in nats that passes, in float32 and in 16 bit; as engine.agreement_threshold."""
BASE = "the model without its adapter"

Snapshot = Mapping[str, Tensor]
"""Weights by name, as in named_parameters(); the model's own weights replace missing ones."""
Ids = Sequence[Sequence[int]]
Logprobs = Sequence[Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause of the disagreement, with its evidence."""

    cause: str
    """stale_weights, adapter, temperature, filter, shift, tokens, tokenizer, logprobs, unknown."""
    message: str


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of one step."""

    num_tokens: int = 0
    """Sampled tokens that the model scored."""
    num_nan: int = 0
    """Tokens left out, as TRL does, because the sampler's log-probability is nan."""
    max_gap: float = math.nan
    """Largest |sampler - model| in nats."""
    mean_gap: float = math.nan
    kl: float = math.nan
    """Estimate of KL(sampler || model) in nats a token, mean of exp(d) - 1 - d with d the model's
    log-probability minus the sampler's (Schulman's k3)."""
    findings: list[Finding] = field(default_factory=list)
    """The likeliest first; empty: both sides agree."""

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def cause(self) -> str:
        """The first finding's cause, or "none"."""
        return self.findings[0].cause if self.findings else "none"

    def __str__(self) -> str:
        gap = f"{self.num_tokens} sampled tokens, gap mean {self.mean_gap:.3g}"
        gap += f" and max {self.max_gap:.3g} nats, KL {self.kl:.3g}"
        gap += f", {self.num_nan} tokens left out whose log-probability is nan" * (self.num_nan > 0)
        verdict = "agree" if self.ok else "disagree"
        messages = [finding.message for finding in self.findings]
        return "\n".join([f"sampler and model {verdict}: {gap}", *messages])


class Auditor:
    """Audits the steps of a loop and keeps earlier weights to compare with.

    Args:
        model: a Hugging Face causal model, with or without PEFT; may be in train mode.
        history: number of earlier weights that are kept on the host, besides the initial ones. Only
            trained weights are copied. 0: keep none, not even the initial ones.
        temperature, threshold, max_tokens: as for audit_step().
    """

    def __init__(
        self, model: Any, *, history: int = 1, temperature: float = 1.0,
        threshold: float | None = None, max_tokens: int = 4096,
    ) -> None:  # fmt: skip
        self._model, self._history = model, history
        self._options: Any = {
            "temperature": temperature, "threshold": threshold, "max_tokens": max_tokens
        }  # fmt: skip
        self._initial = snapshot(model) if history else None
        self._earlier: list[Snapshot] = []

    def step(
        self, prompt_ids: Ids, completion_ids: Ids, logprobs: Logprobs, env_mask: Ids | None = None
    ) -> Audit:
        """Audit what the current weights should have sampled; call it before the update.

        The current weights become the next step's earlier weights.
        """
        weights: dict[str, Snapshot] = {}
        for age, earlier in enumerate(self._earlier, start=1):
            weights[f"{age} update{'s' * (age > 1)} ago"] = earlier
        if self._initial is not None:
            weights["the start"] = self._initial
        audit = audit_step(
            self._model, prompt_ids, completion_ids, logprobs, env_mask=env_mask,
            weights=weights, **self._options,
        )  # fmt: skip
        if self._history:
            self._earlier = [snapshot(self._model), *self._earlier][: self._history]
        return audit


def snapshot(model: Any) -> Snapshot:
    """Copy the trained weights to the host."""
    return {
        name: weight.detach().to("cpu", copy=True)
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


def audit_step(
    model: Any,
    prompt_ids: Ids,
    completion_ids: Ids,
    logprobs: Logprobs,
    *,
    env_mask: Ids | None = None,
    temperature: float = 1.0,
    weights: Mapping[str, Snapshot] | None = None,
    threshold: float | None = None,
    max_tokens: int = 4096,
) -> Audit:
    """Compare a sampler's log-probabilities of its tokens with the model's.

    Args:
        model: a Hugging Face causal model with the weights that the next update trains; PEFT too.
        prompt_ids: one list of ids per sequence, none of them empty.
        completion_ids: the tokens after each prompt, including those of the environment.
        logprobs: the sampler's log-probability in nats of each completion token.
        env_mask: 1 for sampled tokens, 0 for tokens of the environment; None: all are sampled.
        temperature: the trainer's, for its log-probabilities.
        weights: other weights that the sampler may have had, keyed by their age ("the start").
        threshold: largest gap in nats that passes, outliers excepted. None: 0.001 if the forward
            pass is float32, else 1; under autocast its dtype counts.
        max_tokens: number of sampled tokens to score; whole sequences, starting with the first.

    Raises:
        ValueError: nothing was sampled, a prompt is empty, or the lists differ in length.
    """
    masks = [[1] * len(ids) for ids in completion_ids] if env_mask is None else env_mask
    sizes = [len(column) for column in (prompt_ids, completion_ids, logprobs, masks)]
    if len(set(sizes)) != 1 or not any(map(len, completion_ids)) or not all(map(len, prompt_ids)):
        raise ValueError(
            "prompt_ids, completion_ids, logprobs, env_mask: expected one entry per sequence each, "
            f"with a token in each prompt and in at least one completion, got {sizes} entries"
        )
    findings = list(_impossible(model, prompt_ids, completion_ids, logprobs, masks))
    if findings:
        return Audit(findings=findings)
    rows, num_nan = _rows(model, prompt_ids, completion_ids, logprobs, masks, max_tokens)
    with _scoring(model):
        current = _score(model, rows, temperature)
        others = {
            f"the weights of {when}": _score(model, rows, temperature, state)
            for when, state in (weights or {}).items()
        }
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                others[BASE] = _score(model, rows, temperature)
        dtype = _dtype_of(model, rows[0].ids.device.type)
        limit = (HALF if dtype.itemsize == 2 else EXACT) if threshold is None else threshold
        findings = list(_causes(current, others, temperature))
        if not findings and not current.within(limit, dtype):
            excused = threshold is None and _is_rounding(model, rows, temperature, current)
            findings = [] if excused else [_unknown(current, others)]
    gaps_N = current.gaps_N
    kl = float((gaps_N.neg().clamp(max=30).exp() - 1 + gaps_N).mean())
    widest, mean = float(gaps_N.abs().max()), float(gaps_N.abs().mean())
    return Audit(len(gaps_N), num_nan, widest, mean, kl, findings)


def _impossible(
    model: Any, prompts: Ids, completions: Ids, logprobs: Logprobs, masks: Ids
) -> Iterator[Finding]:
    """Find faults that the lists alone show, without a forward pass."""
    pairs = list(zip(completions, logprobs, strict=True))
    if unequal := [(len(ids), len(values)) for ids, values in pairs if len(ids) != len(values)]:
        yield Finding(
            "tokens",
            f"re-encoded tokens: in {len(unequal)} of {len(pairs)} completions the number of ids "
            f"({unequal[0][0]}) is not the number of the sampler's log-probabilities "
            f"({unequal[0][1]}): these are not the ids that it sampled",
        )
        return
    size, ids = model.get_input_embeddings().num_embeddings, [*chain(*prompts, *completions)]
    if max(ids) >= size or min(ids) < 0:
        span = f"ids from {min(ids)} to {max(ids)}, but the model has {size}"
        yield Finding("tokenizer", f"another tokenizer: {span}")
    sampled = [x for (_, values), mask in zip(pairs, masks, strict=True)
               for x, own in zip(values, mask, strict=True) if own]  # fmt: skip
    if not sampled:
        raise ValueError("env_mask: expected at least one sampled token, got only zeros")
    wrong = [x for x in sampled if x is None or x > LOGP_TOLERANCE or x == -math.inf]
    if wrong or (len(sampled) > 1 and not any(sampled)):
        detail = f"{len(wrong)} of {len(sampled)}, such as {wrong[0]}" if wrong else "all are 0"
        yield Finding("logprobs", f"impossible log-probabilities: {detail}")


# --- scores of one set of weights ---


@dataclass(frozen=True, slots=True)
class _Row:
    """A prompt and its completion."""

    ids: Tensor
    first: int
    """Index of the first token after the prompt."""
    logprobs: Tensor
    """[C]: the sampler's, in nats, of each token after the prompt; nan where not sampled."""


@dataclass(frozen=True, slots=True)
class _Scores:
    """Gaps between the sampler's log-probabilities and those of one set of weights."""

    gaps_N: Tensor
    """Sampler - model, in nats."""
    shifted: Mapping[int, Tensor]
    """The gaps if the sampler's values belonged to the next token (1) or the previous one (-1)."""
    logits_FV: Tensor
    """Logits of the first F sampled tokens, with their ids and the sampler's log-probabilities."""
    ids_F: Tensor
    logprobs_F: Tensor

    @property
    def mean(self) -> float:
        return float(self.gaps_N.abs().clamp(max=WORST).mean())

    def within(self, limit: float, dtype: torch.dtype) -> bool:
        """Whether no gap exceeds the limit, except the outliers that a dtype may have."""
        outliers = outliers_of(str(dtype).removeprefix("torch."))
        return bool(widest_gap([self.gaps_N.numpy(force=True)], outliers) <= limit)

    def gaps_at(self, temperature: float) -> Tensor:
        """[F]: |sampler - model| with the model at this temperature."""
        logp_FV = torch.log_softmax(self.logits_FV / temperature, -1)
        gaps_F = self.logprobs_F - logp_FV.gather(1, self.ids_F[:, None])[:, 0]
        return gaps_F.abs().clamp(max=WORST)

    def best_temperature(self) -> float:
        """The temperature between 1/16 and 16 that fits the sampler best, to a thousandth."""
        best = 0.0
        for width in (4.0, 0.5, 0.0625, 0.008):  # in octaves
            octaves = [best + width * k / 8 for k in range(-8, 9)]
            best = min(octaves, key=lambda octave: float(self.gaps_at(math.exp2(octave)).mean()))
        return math.exp2(best)


def _rows(
    model: Any, prompts: Ids, completions: Ids, logprobs: Logprobs, masks: Ids, max_tokens: int
) -> tuple[list[_Row], int]:
    """Whole sequences with about max_tokens sampled tokens, and the number of nan tokens."""
    device = model.get_input_embeddings().weight.device
    rows: list[_Row] = []
    count = num_nan = 0
    for prompt, ids, values, mask in zip(prompts, completions, logprobs, masks, strict=True):
        sampled = torch.tensor(mask, device=device) != 0
        logp = torch.tensor(values, device=device)
        num_nan += int((sampled & logp.isnan()).sum())
        logp = torch.where(sampled, logp, math.nan)
        if count < max_tokens and not logp.isnan().all():
            rows.append(_Row(torch.tensor([*prompt, *ids], device=device), len(prompt), logp))
            count += int((~logp.isnan()).sum())
    if not rows:
        raise ValueError(f"logprobs: expected finite numbers, got {num_nan} nan and nothing else")
    return rows, num_nan


@contextmanager
def _scoring(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def _score(
    model: Any, rows: Sequence[_Row], temperature: float, state: Snapshot | None = None
) -> _Scores:
    """Score the rows with the model's weights, replaced by those in `state`."""
    weights = {name: weight.to(rows[0].ids.device) for name, weight in (state or {}).items()}
    gaps: dict[int, list[Tensor]] = {0: [], 1: [], -1: []}
    fit_logits: list[Tensor] = []
    for row in rows:
        logits_CV, sampler, ids = _logits(model, weights, row), row.logprobs, row.ids[row.first :]
        chunks = zip(logits_CV.split(CHUNK), ids[:, None].split(CHUNK), strict=True)
        logp = torch.cat(
            [
                (x.float() / temperature).log_softmax(-1).gather(1, target)[:, 0]
                for x, target in chunks
            ]
        )
        gaps[0].append(sampler - logp)
        gaps[1].append(sampler[:-1] - logp[1:])
        gaps[-1].append(sampler[1:] - logp[:-1])
        num_left = FIT_TOKENS - sum(map(len, fit_logits))
        fit_logits.append(logits_CV[~sampler.isnan()][:num_left].float())
    ids = torch.cat([row.ids[row.first :] for row in rows])
    sampler = torch.cat([row.logprobs for row in rows])
    logits_FV, sampled = torch.cat(fit_logits), ~sampler.isnan()
    shifted = {by: (column := torch.cat(parts))[~column.isnan()] for by, parts in gaps.items()}
    size = len(logits_FV)
    return _Scores(shifted[0], shifted, logits_FV, ids[sampled][:size], sampler[sampled][:size])


def _is_rounding(model: Any, rows: Sequence[_Row], temperature: float, current: _Scores) -> bool:
    """Whether rounding to bfloat16 explains the gaps: the sampler's dtype may be narrower."""
    with torch.autocast(rows[0].ids.device.type, torch.bfloat16):
        rounded = _score(model, rows, temperature)
    noise = float((rounded.gaps_N - current.gaps_N).abs().mean())
    return current.mean <= 3 * noise and current.within(HALF, torch.bfloat16)


def _logits(model: Any, weights: Mapping[str, Tensor], row: _Row) -> Tensor:
    """[C, V]: the logits that predict the tokens after the prompt."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kwargs: dict[str, Any] = {"input_ids": row.ids[None], "use_cache": False}
    num = len(row.ids) - row.first
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        kwargs["logits_to_keep"] = num + 1
    out = functional_call(model, dict(weights), (), kwargs) if weights else model(**kwargs)
    logits: Tensor = out.logits[0, -num - 1 : -1]
    return logits


def _dtype_of(model: Any, device: str) -> torch.dtype:
    """The dtype of the model's forward pass: autocast's if on, else that of the weights."""
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


# --- causes of the gap ---


def _causes(
    current: _Scores, others: Mapping[str, _Scores], temperature: float
) -> Iterator[Finding]:
    better = {n: s for n, s in others.items() if _is_better(s.gaps_N, current.gaps_N)}
    name = min(better, key=lambda n: better[n].mean, default="")
    if name:
        yield _wrong_weights(name, current, others)
    best = better.get(name, current)
    if best.mean <= EXACT:
        return
    now = best.gaps_N.abs().median()
    shifted = {by: best.shifted[by].abs() for by in (1, -1)}
    if by := next((b for b, x in shifted.items() if len(x) > 2 and x.median() < 0.1 * now), 0):
        yield Finding(
            "shift",
            "log-probabilities shifted by one: each is listed one token "
            f"{'before' if by > 0 else 'after'} its own token",
        )
        return
    fitted = best.best_temperature()
    now_F, fitted_F = best.gaps_at(temperature), best.gaps_at(fitted)
    if float(fitted_F.mean()) < 0.5 * float(now_F.mean()) and _is_better(fitted_F, now_F):
        raw = "; or it reports them before the temperature (vLLM: logprobs_mode=processed_logprobs)"
        yield Finding(
            "temperature",
            f"wrong temperature: the sampler's log-probabilities fit temperature {fitted:.3g}, "
            "the trainer uses "
            f"{temperature:.3g}{raw if math.isclose(fitted, 1.0, abs_tol=0.02) else ''}",
        )
    elif not name and len(current.gaps_N) > 1 and bool((current.gaps_N > -EXACT).all()):
        yield Finding(
            "filter",
            "sampling filter left on: the sampler's log-probabilities are higher and never lower, "
            "as top_k, top_p or min_p make them. vLLM also reads these from the model's "
            "generation_config.json. The trainer uses the whole vocabulary",
        )


def _is_better(gaps_N: Tensor, than_N: Tensor) -> bool:
    """Whether gaps are smaller by SIGNIFICANT standard errors, paired over the tokens."""
    gain_N = than_N.abs().clamp(max=WORST) - gaps_N.abs().clamp(max=WORST)
    error = float(gain_N.std()) / math.sqrt(len(gain_N)) if len(gain_N) > 1 else 0.0
    return float(gain_N.mean()) > SIGNIFICANT * error


def _wrong_weights(name: str, current: _Scores, others: Mapping[str, _Scores]) -> Finding:
    least = others[name].mean
    equal = [n for n, s in others.items() if s.mean <= 1.05 * least + 1e-6]
    source = BASE if BASE in equal else " or ".join(equal)
    evidence = (
        f"the sampler's log-probabilities are those of {source} (mean gap {least:.2g} nats), not "
        f"those of the current model ({current.mean:.2g})"
    )
    if BASE in equal:
        return Finding("adapter", f"LoRA not merged: {evidence}: the sampler never got the adapter")
    return Finding("stale_weights", f"stale weights: {evidence}: the sampler was not updated")


def _unknown(current: _Scores, others: Mapping[str, _Scores]) -> Finding:
    higher = float((current.gaps_N > 0).float().mean())
    return Finding(
        "unknown",
        f"no cause found: the sampler's log-probabilities are higher for {higher:.0%} of the "
        f"tokens. Excluded: {', '.join(['temperature', 'shift by one', *others])}. Still possible: "
        "a filter with a temperature, another prompt (a missing or extra BOS token), re-encoded "
        "ids, another model",
    )

"""Whether a sampler's log-probabilities are those of the model that is trained; if not, of what.

For any loop that has a Hugging Face model, the sampled ids and what the sampler said of them:

    auditor = Auditor(model, temperature=0.7)
    ...                                                # sample
    audit = auditor.step(prompt_ids, completion_ids, logprobs)   # before the update
    if not audit.ok:
        raise RuntimeError(str(audit))

The model scores the same tokens again, so do the weights of earlier updates. These are named if
they explain what the sampler said significantly better: a paired test over the tokens, in which
rounding, common to both, takes no part. So weights that are one update old are found though the
update moved them less than bfloat16 rounds.
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
"""Tokens whose logits are made float32 at a time."""
FIT_TOKENS = 128
"""Tokens of a step at which a temperature is fitted."""
WORST = 10.0
"""Nats at which a gap counts no more, so that one impossible token does not decide."""
SIGNIFICANT = 5.0
"""Standard errors over the tokens by which a cause must be better."""
EXACT, HALF = 1e-3, 1.0
"""Widest gap in nats that passes, in float32 and in 16 bit; as engine.agreement_threshold."""
BASE = "the model without its adapter"

Snapshot = Mapping[str, Tensor]
"""Weights by name, as named_parameters() has them; those that are not there are the model's own."""
Ids = Sequence[Sequence[int]]
Logprobs = Sequence[Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, and what is seen of it."""

    cause: str
    """stale_weights, adapter, temperature, filter, shift, tokens, tokenizer, logprobs, unknown."""
    says: str


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found at one step."""

    num_tokens: int = 0
    """Sampled tokens that were scored again."""
    num_nan: int = 0
    """Those left out, as TRL does, because the sampler's log-probability is nan."""
    max_gap: float = math.nan
    """Largest |sampler - model| in nats."""
    mean_gap: float = math.nan
    kl: float = math.nan
    """Estimate of KL(sampler || model) in nats a token, mean of exp(d) - 1 - d with d the model's
    log-probability minus the sampler's (Schulman's k3)."""
    findings: list[Finding] = field(default_factory=list)
    """The likeliest first; none: both sides agree."""

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def cause(self) -> str:
        """The word for the first finding; "none"."""
        return self.findings[0].cause if self.findings else "none"

    def __str__(self) -> str:
        gap = f"{self.num_tokens} sampled tokens, gap mean {self.mean_gap:.3g}"
        gap += f" and max {self.max_gap:.3g} nats, KL {self.kl:.3g}"
        gap += f", {self.num_nan} tokens left out whose log-probability is nan" * (self.num_nan > 0)
        said = "agree" if self.ok else "disagree"
        found = [finding.says for finding in self.findings]
        return "\n".join([f"sampler and model {said}: {gap}", *found])


class Auditor:
    """Audits the steps of a loop, and remembers weights to compare with.

    Args:
        model: a Hugging Face causal model, PEFT's too, which may be in train mode.
        history: how many earlier weights are kept on the host beside those of the start, of what is
            trained only; 0: none, and those of the start neither.
        temperature, threshold, max_tokens: of audit_step().
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
        """Audit what the current weights are said to have sampled; call it before the update.

        The current weights are the next step's earlier.
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
    """The weights that are trained, copied to the host."""
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
    """Compare what a sampler said of its tokens with what the model says of them.

    Args:
        model: a Hugging Face causal model with the weights that are trained next; PEFT's too.
        prompt_ids: one list of ids per sequence, none of them empty.
        completion_ids: what followed each prompt, tokens of the environment's too.
        logprobs: the sampler's log-probability in nats of each of the completion's tokens.
        env_mask: 1 where the policy sampled, 0 where the environment spoke; None: all is sampled.
        temperature: at which the trainer computes its log-probabilities.
        weights: other weights that the sampler may have had, by when that was ("the start").
        threshold: widest gap in nats that passes but for outliers; None: by the dtype of the
            model's passes, which is autocast's where that is on: 0.001 in float32, else 1.
        max_tokens: sampled tokens that are scored; whole sequences, from the first on.

    Raises:
        ValueError: nothing was sampled, a prompt is empty, or the lists are not of the same
            sequences.
    """
    masks = [[1] * len(ids) for ids in completion_ids] if env_mask is None else env_mask
    sizes = [len(each) for each in (prompt_ids, completion_ids, logprobs, masks)]
    if len(set(sizes)) != 1 or not any(map(len, completion_ids)) or not all(map(len, prompt_ids)):
        raise ValueError(
            "prompt_ids, completion_ids, logprobs and env_mask must be of the same sequences, with "
            f"a token in each prompt and in at least one completion; got {sizes} of them"
        )
    findings = list(_impossible(model, prompt_ids, completion_ids, logprobs, masks))
    if findings:
        return Audit(findings=findings)
    rows, num_nan = _rows(model, prompt_ids, completion_ids, logprobs, masks, max_tokens)
    with _scoring(model):
        own = _score(model, rows, temperature)
        others = {
            f"the weights of {when}": _score(model, rows, temperature, state)
            for when, state in (weights or {}).items()
        }
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                others[BASE] = _score(model, rows, temperature)
        dtype = _dtype_of(model, rows[0].ids.device.type)
        limit = (HALF if dtype.itemsize == 2 else EXACT) if threshold is None else threshold
        findings = list(_causes(own, others, temperature))
        if not findings and not own.within(limit, dtype):
            excused = threshold is None and _is_rounding(model, rows, temperature, own)
            findings = [] if excused else [_unknown(own, others)]
    gaps_N = own.gaps_N
    kl = float((gaps_N.neg().clamp(max=30).exp() - 1 + gaps_N).mean())
    widest, mean = float(gaps_N.abs().max()), float(gaps_N.abs().mean())
    return Audit(len(gaps_N), num_nan, widest, mean, kl, findings)


def _impossible(
    model: Any, prompts: Ids, completions: Ids, logprobs: Logprobs, masks: Ids
) -> Iterator[Finding]:
    """What needs no pass of the model."""
    pairs = list(zip(completions, logprobs, strict=True))
    if odd := [(len(ids), len(said)) for ids, said in pairs if len(ids) != len(said)]:
        yield Finding(
            "tokens",
            f"re-encoded tokens: {len(odd)} of {len(pairs)} completions have another number of ids "
            f"than the sampler has log-probabilities ({odd[0][0]} and {odd[0][1]}): they are not "
            "the ids that it sampled",
        )
        return
    size, ids = model.get_input_embeddings().num_embeddings, [*chain(*prompts, *completions)]
    if max(ids) >= size or min(ids) < 0:
        said = f"ids from {min(ids)} to {max(ids)}, but the model has {size}"
        yield Finding("tokenizer", f"another tokenizer: {said}")
    own = [x for (_, said), mask in zip(pairs, masks, strict=True)
           for x, sampled in zip(said, mask, strict=True) if sampled]  # fmt: skip
    if not own:
        raise ValueError("env_mask: nothing was sampled by the policy, so nothing can be audited")
    wrong = [x for x in own if x is None or x > LOGP_TOLERANCE or x == -math.inf]
    if wrong or (len(own) > 1 and not any(own)):
        found = f"{len(wrong)} of {len(own)}, such as {wrong[0]}" if wrong else "all are 0"
        yield Finding("logprobs", f"log-probabilities that nobody can have computed: {found}")


# --- what the model says ---


@dataclass(frozen=True, slots=True)
class _Row:
    """A prompt with what followed it."""

    ids: Tensor
    first: int
    """Place of the first token behind the prompt."""
    said: Tensor
    """[C] of each token behind the prompt, in nats; nan where nothing was sampled."""


@dataclass(frozen=True, slots=True)
class _Scores:
    """What one set of weights makes of the sampled tokens: sampler - model, in nats."""

    gaps_N: Tensor
    shifted: Mapping[int, Tensor]
    """The gaps if what the sampler said were of the token one place later (1), or earlier (-1)."""
    logits_FV: Tensor
    """Of some of the sampled tokens, from the first on; with their ids, and what was said."""
    ids_F: Tensor
    said_F: Tensor

    @property
    def mean(self) -> float:
        return float(self.gaps_N.abs().clamp(max=WORST).mean())

    def within(self, limit: float, dtype: torch.dtype) -> bool:
        """Whether no gap is over this, but for a dtype's outliers."""
        outliers = outliers_of(str(dtype).removeprefix("torch."))
        return bool(widest_gap([self.gaps_N.numpy(force=True)], outliers) <= limit)

    def gaps_at(self, temperature: float) -> Tensor:
        """[F]: |sampler - model| at a temperature of the model's."""
        logp_FV = torch.log_softmax(self.logits_FV / temperature, -1)
        return (self.said_F - logp_FV.gather(1, self.ids_F[:, None])[:, 0]).abs().clamp(max=WORST)

    def best_temperature(self) -> float:
        """That fits what the sampler said, between 1/16 and 16, to a thousandth."""
        best = 0.0
        for width in (4.0, 0.5, 0.0625, 0.008):  # in octaves
            tried = [best + width * k / 8 for k in range(-8, 9)]
            best = min(tried, key=lambda octave: float(self.gaps_at(math.exp2(octave)).mean()))
        return math.exp2(best)


def _rows(
    model: Any, prompts: Ids, completions: Ids, logprobs: Logprobs, masks: Ids, max_tokens: int
) -> tuple[list[_Row], int]:
    """Whole sequences with about max_tokens sampled tokens, and how many tokens are nan."""
    device = model.get_input_embeddings().weight.device
    rows: list[_Row] = []
    count = num_nan = 0
    for prompt, ids, said, mask in zip(prompts, completions, logprobs, masks, strict=True):
        own, numbers = torch.tensor(mask, device=device) != 0, torch.tensor(said, device=device)
        values = torch.where(own, numbers, math.nan)
        num_nan += int((own & numbers.isnan()).sum())
        if count < max_tokens and not values.isnan().all():
            every = torch.tensor([*prompt, *ids], device=device)
            rows.append(_Row(every, len(prompt), values))
            count += int((~values.isnan()).sum())
    if not rows:
        raise ValueError(f"all {num_nan} log-probabilities of the sampler's are nan")
    return rows, num_nan


@contextmanager
def _scoring(model: Any) -> Iterator[None]:
    """Without gradients and dropout."""
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
    """Score the rows with the model's weights, or with those of `state` in their place."""
    place = {name: weight.to(rows[0].ids.device) for name, weight in (state or {}).items()}
    gaps: dict[int, list[Tensor]] = {0: [], 1: [], -1: []}
    kept: list[Tensor] = []
    for row in rows:
        logits_CV, said, ids = _logits(model, place, row), row.said, row.ids[row.first :]
        parts = zip(logits_CV.split(CHUNK), ids[:, None].split(CHUNK), strict=True)
        logp = torch.cat(
            [(x.float() / temperature).log_softmax(-1).gather(1, of)[:, 0] for x, of in parts]
        )
        gaps[0].append(said - logp)
        gaps[1].append(said[:-1] - logp[1:])
        gaps[-1].append(said[1:] - logp[:-1])
        kept.append(logits_CV[~said.isnan()][: FIT_TOKENS - sum(map(len, kept))].float())
    ids, said = torch.cat([row.ids[row.first :] for row in rows]), torch.cat([r.said for r in rows])
    logits_FV, own = torch.cat(kept), ~said.isnan()
    found = {by: (every := torch.cat(some))[~every.isnan()] for by, some in gaps.items()}
    size = len(logits_FV)
    return _Scores(found[0], found, logits_FV, ids[own][:size], said[own][:size])


def _is_rounding(model: Any, rows: Sequence[_Row], temperature: float, own: _Scores) -> bool:
    """Whether the gaps are as wide as bfloat16 makes them: a sampler in it beside a wider model."""
    with torch.autocast(rows[0].ids.device.type, torch.bfloat16):
        rounded = _score(model, rows, temperature)
    noise = float((rounded.gaps_N - own.gaps_N).abs().mean())
    return own.mean <= 3 * noise and own.within(HALF, torch.bfloat16)


def _logits(model: Any, place: Mapping[str, Tensor], row: _Row) -> Tensor:
    """[C, V] of the tokens behind the prompt."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    given: dict[str, Any] = {"input_ids": row.ids[None], "use_cache": False}
    num = len(row.ids) - row.first
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        given["logits_to_keep"] = num + 1
    out = functional_call(model, dict(place), (), given) if place else model(**given)
    logits: Tensor = out.logits[0, -num - 1 : -1]
    return logits


def _dtype_of(model: Any, device: str) -> torch.dtype:
    """In which the model's passes are: of its weights, unless autocast is on."""
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


# --- what explains the gap ---


def _causes(own: _Scores, others: Mapping[str, _Scores], temperature: float) -> Iterator[Finding]:
    better = {n: s for n, s in others.items() if _is_better(s.gaps_N, own.gaps_N)}
    name = min(better, key=lambda n: better[n].mean, default="")
    if name:
        yield _of_weights(name, own, others)
    best = better.get(name, own)
    if best.mean <= EXACT:
        return
    now = best.gaps_N.abs().median()
    moved = {by: best.shifted[by].abs() for by in (1, -1)}
    if by := next((b for b, x in moved.items() if len(x) > 2 and x.median() < 0.1 * now), 0):
        yield Finding(
            "shift",
            "log-probabilities one place off: they are listed one token "
            f"{'earlier' if by > 0 else 'later'} than the tokens that they are of",
        )
        return
    fits = best.best_temperature()
    now_F, then_F = best.gaps_at(temperature), best.gaps_at(fits)
    if float(then_F.mean()) < 0.5 * float(now_F.mean()) and _is_better(then_F, now_F):
        raw = "; or it reports them before the temperature (vLLM: logprobs_mode=processed_logprobs)"
        yield Finding(
            "temperature",
            f"wrong temperature: what the sampler said fits temperature {fits:.3g}, the trainer "
            f"computes {temperature:.3g}{raw if math.isclose(fits, 1.0, abs_tol=0.02) else ''}",
        )
    elif not name and len(own.gaps_N) > 1 and bool((own.gaps_N > -EXACT).all()):
        yield Finding(
            "filter",
            "a filter left on: the sampler's log-probabilities are higher and never lower, as "
            "top_k, top_p or min_p make them, also those of the model's generation_config.json, "
            "which vLLM takes by itself. The trainer computes over the whole vocabulary",
        )


def _is_better(gaps_N: Tensor, than_N: Tensor) -> bool:
    """Whether gaps are smaller by SIGNIFICANT standard errors, token by token."""
    gain_N = than_N.abs().clamp(max=WORST) - gaps_N.abs().clamp(max=WORST)
    error = float(gain_N.std()) / math.sqrt(len(gain_N)) if len(gain_N) > 1 else 0.0
    return float(gain_N.mean()) > SIGNIFICANT * error


def _of_weights(name: str, own: _Scores, others: Mapping[str, _Scores]) -> Finding:
    least = others[name].mean
    alike = [n for n, s in others.items() if s.mean <= 1.05 * least + 1e-6]
    who = BASE if BASE in alike else " or ".join(alike)
    seen = (
        f"what the sampler said is what {who} say{'s' * (BASE in alike)} (gap mean {least:.2g} "
        f"nats), not what the model says now ({own.mean:.2g})"
    )
    if BASE in alike:
        return Finding("adapter", f"LoRA not merged: {seen}: the adapter never reached it")
    return Finding("stale_weights", f"stale weights: {seen}: its weights were not updated")


def _unknown(own: _Scores, others: Mapping[str, _Scores]) -> Finding:
    higher = float((own.gaps_N > 0).float().mean())
    return Finding(
        "unknown",
        f"no cause found: the sampler's are higher for {higher:.0%} of the tokens. Tried: "
        f"{', '.join(['temperature', 'a place off', *others])}. Left: a filter with a temperature, "
        "another prompt (a BOS token more or less), ids that were encoded again, another model",
    )

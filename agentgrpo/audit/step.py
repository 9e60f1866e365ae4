"""Whether a sampler's log-probabilities are those of the model that is trained; if not, of what.

For any loop that has a Hugging Face model, the sampled ids and what the sampler said of them:

    auditor = Auditor(model, tokenizer, temperature=0.7)
    ...                                                # sample
    audit = auditor.step(prompt_ids, completion_ids, logprobs)   # before the update
    if not audit.ok:
        raise RuntimeError(str(audit))

The model scores the same tokens again. Where the two differ, everything that could be the cause is
tried out, and a cause is named only if it explains what the sampler said significantly better than
the model as it is: a paired test over the tokens, in which noise common to both takes no part. So
weights that are one update old are found though the update moved them less than bfloat16 rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import Tensor

from agentgrpo.audit.fit import WORST, Processing
from agentgrpo.audit.score import (
    Row,
    Scores,
    Snapshot,
    dtype_of,
    in_float32,
    rows_of,
    sampled,
    score,
    scoring,
)
from agentgrpo.engine.agreement import outliers_of, widest_gap
from agentgrpo.proof.tokens import LOGP_TOLERANCE

ROUNDED = 512
"""Sampled tokens, in whole sequences, from which is seen what rounding does."""
SIGNIFICANT = 5.0
"""Standard errors over the tokens by which a cause must be better."""
MOST = 0.95
"""Share of the tokens that a cause must explain; a rounded logit may be across a filter's edge."""
ENOUGH = 32
"""Sampled tokens from which on more is named than weights and what no model is asked for."""
QUIET = 1e-4
"""Nats of mean gap below which sampling settings are not looked for."""
EXACT = 1e-3
"""Nats between two implementations in float32."""
THRESHOLDS = {torch.float32: EXACT, torch.float64: EXACT}
"""Widest gap in nats that passes, by the model's dtype; as engine.agreement_threshold."""
HALF = 1.0
"""The same in bfloat16 and float16."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, and what is seen of it."""

    cause: str
    """stale_weights, adapter, temperature, filter, shift, tokens, tokenizer, logprobs, unknown."""
    says: str

    def __str__(self) -> str:
        return self.says


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found at one step."""

    num_tokens: int
    """Sampled tokens that were scored again."""
    num_nan: int
    """Sampled tokens left out, because the sampler's log-probability is nan: TRL leaves them out
    too."""
    max_gap: float
    """Largest |sampler - model| in nats."""
    mean_gap: float
    kl: float
    """Estimate of KL(sampler || model) in nats a token, mean of exp(d) - 1 - d with d the model's
    log-probability minus the sampler's (Schulman's k3)."""
    findings: list[Finding] = field(default_factory=list)
    """The likeliest first; none: both sides agree."""
    noise: str = ""
    """What the gap is, where it is no fault."""

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def cause(self) -> str:
        """The word for the first finding; "none"."""
        return self.findings[0].cause if self.findings else "none"

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers for a log."""
        return {
            "audit/max_gap": self.max_gap,
            "audit/mean_gap": self.mean_gap,
            "audit/kl": self.kl,
            "audit/nan": float(self.num_nan),
            "audit/faults": float(len(self.findings)),
        }

    def __str__(self) -> str:
        gap = f"{self.num_tokens} sampled tokens, gap mean {self.mean_gap:.3g}"
        gap += f" and max {self.max_gap:.3g} nats, KL {self.kl:.3g}"
        gap += f", {self.num_nan} tokens left out whose log-probability is nan" * (self.num_nan > 0)
        if self.ok:
            return f"sampler and model agree: {gap}{self.noise and '; ' + self.noise}"
        return "\n".join([f"sampler and model disagree: {gap}", *map(str, self.findings)])


class Auditor:
    """Audits the steps of a loop, and remembers weights to compare with.

    Args:
        model: a Hugging Face causal model, PEFT's too, which may be in train mode.
        tokenizer: of the model; None: what only it can tell is not looked at.
        temperature: at which the trainer computes its log-probabilities.
        history: how many earlier weights are kept on the host, those that are trained only.
        initial: keep the initial weights too.
        hints: sampling settings that somebody may have left on, beside the model's own
            generation_config.
        threshold: see audit_step().
        max_tokens: sampled tokens that are scored at a step; more see less than noise.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        temperature: float = 1.0,
        history: int = 1,
        initial: bool = True,
        hints: Sequence[Processing] = (),
        threshold: float | None = None,
        max_tokens: int = 4096,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._options: dict[str, Any] = {
            "temperature": temperature, "hints": hints, "threshold": threshold,
            "max_tokens": max_tokens,
        }  # fmt: skip
        self._history = history
        self._initial = snapshot(model) if initial else None
        self._earlier: list[Snapshot] = []

    def step(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float | None]],
        env_mask: Sequence[Sequence[int]] | None = None,
    ) -> Audit:
        """Audit what the current weights are said to have sampled; call it before the update.

        The arguments are those of audit_step(). The current weights are the next step's earlier.
        """
        weights: dict[str, Snapshot] = {}
        for age, earlier in enumerate(self._earlier, start=1):
            weights[f"{age} update{'s' * (age > 1)} ago"] = earlier
        if self._initial is not None:
            weights["the start"] = self._initial
        audit = audit_step(
            self._model, self._tokenizer, prompt_ids, completion_ids, logprobs, env_mask=env_mask,
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
    tokenizer: Any,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float | None]],
    *,
    env_mask: Sequence[Sequence[int]] | None = None,
    temperature: float = 1.0,
    weights: Mapping[str, Snapshot] | None = None,
    hints: Sequence[Processing] = (),
    threshold: float | None = None,
    max_tokens: int = 4096,
) -> Audit:
    """Compare what a sampler said of its tokens with what the model says of them.

    Args:
        model: a Hugging Face causal model with the weights that are trained next; PEFT's too.
        tokenizer: of the model; None: what only it can tell is not looked at.
        prompt_ids: one list of ids per sequence.
        completion_ids: what followed each prompt, tokens of the world's too.
        logprobs: the sampler's log-probability in nats of each of the completion's tokens.
        env_mask: 1 where the policy sampled, 0 where the world spoke; None: all is sampled.
        temperature: at which the trainer computes its log-probabilities.
        weights: other weights that the sampler may have had, by when that was ("the start").
        hints: sampling settings that may have been left on.
        threshold: widest gap in nats that passes but for outliers; None: by the dtype of the
            model's passes, which is autocast's where that is on.
        max_tokens: sampled tokens that are scored; whole sequences, from the first on.

    Raises:
        ValueError: nothing was sampled that a model can score, or the lists are not of the same
            sequences.
    """
    findings = list(_token_findings(model, prompt_ids, completion_ids, logprobs, env_mask))
    if findings:
        return Audit(0, 0, math.nan, math.nan, math.nan, findings)
    rows = rows_of(model, prompt_ids, completion_ids, logprobs, env_mask, max_tokens)
    if not rows:
        raise ValueError(
            "nothing was sampled that the model can score: expected a token of the policy, "
            "with a log-probability and with a prompt or another token before it"
        )
    claimed = Processing(temperature)
    with scoring(model):
        own = score(model, rows, claimed)
        others = _by_other_weights(model, rows, claimed, weights or {})
        dtype = dtype_of(model, rows[0].ids.device.type)
        within = _within(own, dtype, threshold)
        noise = cache(lambda: max(EXACT, 3 * _rounding(model, rows, claimed, own, dtype)))
        findings, closest = _causes(own, others, claimed, [*hints, *_written_down(model)], noise)
        if not findings and (some := _apart(rows, own)):
            part, hinted = score(model, some, claimed), [*hints, *_written_down(model)]
            # chosen by their gap: of rounding alone other weights leave a smaller one too
            most = 0.1 * float(part.wide.mean())
            scored = _by_other_weights(model, some, claimed, weights or {})
            fitting = {n: each for n, each in scored.items() if float(each.wide.mean()) < most}
            found, closer = _causes(part, fitting, claimed, hinted, noise)
            told = f"of {len(rows)} sequences {len(rows) - len(some)} agree; of the others: "
            findings = [replace(each, says=told + each.says) for each in found]
            closest = closest or closer
        excuse = "" if findings or closest else _noise(own, noise)
        if not findings and (closest or not (within or (excuse and threshold is None))):
            if len(own.gaps_N) >= ENOUGH:
                findings = [*_shifts(own), *_rows_apart(own, noise(), tokenizer, completion_ids)]
            findings = findings[:1] or [_unknown(own, others, closest)]
    gaps, nan = own.gaps_N, _nan_among(logprobs, env_mask)
    kl = float((gaps.neg().clamp(max=30).exp() - 1 + gaps).mean())
    widest, mean = float(gaps.abs().max()), float(gaps.abs().mean())
    return Audit(len(gaps), nan, widest, mean, kl, findings, excuse)


def _apart(rows: Sequence[Row], own: Scores) -> list[Row]:
    """The sequences that disagree where others agree as in float32, as of one sampler of two."""
    parts: tuple[list[Row], list[Row]] = [], []
    sizes = [0, 0]
    for row, gaps_C in zip(rows, own.by_row, strict=True):
        gaps_N = sampled([gaps_C]).abs()
        apart = int(bool((gaps_N > EXACT).any()))
        parts[apart].append(row)
        sizes[apart] += len(gaps_N)
    return parts[1] if min(sizes) >= ENOUGH else []


def _within(own: Scores, dtype: torch.dtype, threshold: float | None) -> bool:
    """Whether the gaps are as small as a dtype's are where nothing is wrong."""
    limit = THRESHOLDS.get(dtype, HALF) if threshold is None else threshold
    outliers = outliers_of(str(dtype).removeprefix("torch."))
    return bool(widest_gap([own.gaps_N.numpy(force=True)], outliers) <= limit)


def _nan_among(
    logprobs: Sequence[Sequence[float | None]], env_mask: Sequence[Sequence[int]] | None
) -> int:
    return sum(
        bool(own) and x is not None and math.isnan(x)
        for index, of in enumerate(logprobs)
        for own, x in zip(env_mask[index] if env_mask else repeat(1), of, strict=False)
    )


BASE = "the model without its adapter"


def _by_other_weights(
    model: Any, rows: Sequence[Row], claimed: Processing, weights: Mapping[str, Snapshot]
) -> dict[str, Scores]:
    others = {
        f"the weights of {when}": score(model, rows, claimed, state)
        for when, state in weights.items()
    }
    if hasattr(model, "disable_adapter"):
        with model.disable_adapter():
            others[BASE] = score(model, rows, claimed)
    return others


def _token_findings(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float | None]],
    env_mask: Sequence[Sequence[int]] | None,
) -> Iterator[Finding]:
    """What is wrong before any model is asked."""
    lists = [prompt_ids, completion_ids, logprobs, *([] if env_mask is None else [env_mask])]
    if len({len(each) for each in lists}) != 1 or not any(map(len, completion_ids)):
        sizes = ", ".join(str(len(each)) for each in lists)
        raise ValueError(
            "prompt_ids, completion_ids, logprobs and env_mask must be of the same sequences, at "
            f"least one of which has a completion; got {sizes} of them"
        )
    pairs = list(zip(completion_ids, logprobs, strict=True))
    odd = [(len(ids), len(said)) for ids, said in pairs if len(ids) != len(said)]
    if odd:
        yield Finding(
            "tokens",
            f"re-encoded tokens: {len(odd)} of {len(pairs)} completions have another number of ids "
            f"than the sampler has log-probabilities ({odd[0][0]} and {odd[0][1]}): they are not "
            "the ids that it sampled",
        )
    size = model.get_input_embeddings().num_embeddings
    ids = [i for each in (*prompt_ids, *completion_ids) for i in each]
    if max(ids) >= size or min(ids) < 0:
        yield Finding(
            "tokenizer",
            f"another tokenizer: ids from {min(ids)} to {max(ids)}, but the model has {size}",
        )
    if odd:
        return
    masks = [[1] * len(ids) for ids in completion_ids] if env_mask is None else env_mask
    said = [x for (_, of), mask in zip(pairs, masks, strict=True)
            for x, own in zip(of, mask, strict=True) if own]  # fmt: skip
    missing = sum(x is None for x in said)
    above = [x for x in said if x is not None and x > LOGP_TOLERANCE]
    never = sum(x == -math.inf for x in said)
    if missing or above or never or not said:
        yield Finding(
            "logprobs",
            f"log-probabilities that cannot be: of {len(said)} sampled tokens {missing} have none, "
            f"{len(above)} have one above 0{f', {max(above):.3g}' if above else ''}, {never} have "
            "-inf",
        )
    elif len(said) > 1 and not any(said):
        yield Finding("logprobs", f"all {len(said)} log-probabilities are 0: nobody computed them")


def _evidence(worse_N: Tensor, better_N: Tensor) -> float:
    """Standard errors by which |better| is smaller than |worse|, token by token."""
    gain_N = worse_N.abs().clamp(max=WORST) - better_N.abs().clamp(max=WORST)
    mean, spread = float(gain_N.mean()), float(gain_N.std()) if len(gain_N) > 1 else 0.0
    if mean <= 0:
        return 0.0
    return mean / (spread / math.sqrt(len(gain_N))) if spread else math.inf


def _left(gaps_N: Tensor) -> float:
    """Mean gap in nats of most tokens."""
    wide_N = gaps_N.abs().clamp(max=WORST).sort().values
    return float(wide_N[: math.ceil(MOST * len(wide_N))].mean())


def _off_centre(gaps_N: Tensor) -> bool:
    """Whether one side says significantly more, as filters make it: noise does not."""
    gaps_N = gaps_N.clamp(-WORST, WORST)
    error = float(gaps_N.std()) / math.sqrt(len(gaps_N)) if len(gaps_N) > 1 else math.inf
    return abs(float(gaps_N.mean())) > SIGNIFICANT * error


def _causes(
    own: Scores,
    others: Mapping[str, Scores],
    claimed: Processing,
    hints: Sequence[Processing],
    noise: Callable[[], float],
) -> tuple[list[Finding], str]:
    """Other weights, other sampling settings, or both, if they explain what the sampler said.

    What they leave must be noise. Else nothing is found, and the second says which other weights
    are significantly better all the same.
    """

    def whole(left: float) -> bool:
        return left <= EXACT or left <= noise()

    better = {n: s for n, s in others.items() if _evidence(own.gaps_N, s.gaps_N) >= SIGNIFICANT}
    name = min(better, key=lambda n: float(better[n].wide.mean()), default="")
    single, how = (better[name] if name else own), claimed
    least = float(single.wide[single.chosen_N].mean())
    sought = name or _off_centre(own.gaps_N) or not whole(float(own.wide.mean()))
    if sought and least > QUIET and len(own.gaps_N) >= ENOUGH:
        settings = []
        for number, (label, scores) in enumerate({"": own, **others}.items()):
            held = scores.distributions()
            best = held.explained(claimed, hints)[0]
            settings.append((float(held.gaps(best).mean()), number, label, best, held.gaps(best)))
        loss, _, label, best, gaps = min(settings, key=lambda each: each[:2])
        alone = settings[0]
        if alone[0] <= 1.2 * loss + QUIET:  # other weights must be worth their while
            loss, _, label, best, gaps = alone
        sure = _evidence(single.gaps_N[single.chosen_N], gaps) >= SIGNIFICANT
        if sure and loss < 0.8 * least and whole(_left(gaps)):
            name, how = label, best
    if name and how == claimed and not whole(left := _left(others[name].gaps_N)):
        return [], f"{name}, which leave a gap of {left:.2g} nats in the mean"
    findings = []
    if name:
        findings.append(_of_weights(name, own, others))
    if how != claimed:
        findings.append(_of_settings(how, claimed))
    return findings, ""


def _of_weights(name: str, own: Scores, others: Mapping[str, Scores]) -> Finding:
    least, now = float(others[name].wide.mean()), float(own.wide.mean())
    alike = [n for n, s in others.items() if float(s.wide.mean()) <= 1.05 * least + 1e-6]
    if BASE in alike:
        return Finding(
            "adapter",
            f"LoRA not merged: what the sampler said is what {BASE} says (gap mean {least:.2g} "
            f"nats), not what the model says with it ({now:.2g}): the adapter never reached it",
        )
    return Finding(
        "stale_weights",
        f"stale weights: what the sampler said is what {' or '.join(alike)} say (gap mean "
        f"{least:.2g} nats), not what the model says now ({now:.2g}): its weights were not updated",
    )


def _of_settings(how: Processing, claimed: Processing) -> Finding:
    if how.filters:
        return Finding(
            "filter",
            f"a filter left on: what the sampler said fits {how}; the trainer computes {claimed}, "
            "over the whole vocabulary. What a filter takes away makes the rest likelier",
        )
    raw = "; or it reports them before the temperature (vLLM: logprobs_mode=processed_logprobs)"
    return Finding(
        "temperature",
        f"wrong temperature: what the sampler said fits {how}, the trainer computes {claimed}"
        + (raw if math.isclose(how.temperature, 1.0, abs_tol=0.02) else ""),
    )


def _written_down(model: Any) -> Iterator[Processing]:
    """The sampling settings that the model's generation config has, which vLLM takes by itself."""
    config = getattr(model, "generation_config", None)
    if config is not None:
        yield Processing.written(config)


def _rounding(
    model: Any, rows: Sequence[Row], claimed: Processing, own: Scores, dtype: torch.dtype
) -> float:
    """Nats by which bfloat16 moves the model's own log-probabilities, in the mean of some rows."""
    device = rows[0].ids.device.type
    sizes = accumulate(int((~row.said.isnan()).sum()) for row in rows)
    some = rows[: 1 + sum(size < ROUNDED for size in sizes)]
    exact = rounded = own.gaps_of(len(some))
    if dtype not in THRESHOLDS:
        with in_float32(model, device):
            exact = score(model, some, claimed).gaps_N
    if dtype != torch.bfloat16:
        with torch.autocast(device, torch.bfloat16):
            rounded = score(model, some, claimed).gaps_N
    return float((rounded - exact).abs().mean())


def _noise(own: Scores, noise: Callable[[], float]) -> str:
    """What the gap is if no cause explains it and it is not wider than bfloat16 makes it."""
    gaps = own.gaps_N.numpy(force=True)
    if widest_gap([gaps], 0.0) <= EXACT:
        return ""
    if not widest_gap([gaps], outliers_of("bfloat16")) <= HALF:
        return ""
    if own.gaps_N.abs().mean() > noise():
        return ""
    return (
        f"the gap is bfloat16 noise: {float(own.gaps_N.mean()):+.1g} nats with its sign; rounding "
        f"moves the model's own log-probabilities by {noise() / 3:.1g} in the mean"
    )


def _shifts(own: Scores) -> Iterator[Finding]:
    for by, word in ((1, "earlier"), (-1, "later")):
        gaps = own.shifted(by)
        if len(gaps) > 2 and gaps.abs().median() < 0.1 * own.gaps_N.abs().median():
            yield Finding(
                "shift",
                f"log-probabilities one place off: they are listed one token {word} than the "
                "tokens that they are of",
            )


def _rows_apart(
    own: Scores, noise: float, tokenizer: Any, completion_ids: Sequence[Sequence[int]]
) -> Iterator[Finding]:
    """Some sequences agree and others do not, or not behind some token."""
    splits = [_split(gaps, noise) for gaps in own.by_row]
    tails = [(row, at) for row, at in enumerate(splits) if at is not None and at > 0]
    whole = splits.count(0)
    if whole >= len(splits) - whole or not (whole or tails):
        return
    says = f"of {len(splits)} sequences "
    if tails:
        shown = ", ".join(f"{row} from token {at}" for row, at in tails[:8])
        says += f"{len(tails)} agree up to a token and not from it on (sequence {shown}"
        says += ", ...), " if len(tails) > 8 else "), "
    says += f"{whole} disagree from the first token on, " if whole else ""
    says += f"{len(splits) - len(tails) - whole} agree: other ids were sampled than these"
    if tokenizer is not None and all(_canonical(tokenizer, ids) for ids in completion_ids):
        says += ". All are what the tokenizer makes of their text: they may have been re-encoded"
    yield Finding("tokens", says)


def _split(gaps_C: Tensor, noise: float) -> int | None:
    """The token of a sequence from which on it disagrees, by medians; None: it agrees."""
    places = torch.nonzero(~gaps_C.isnan())[:, 0]
    gaps_N = gaps_C[places].abs().double()
    wide_N = gaps_N.clamp(noise, WORST).log()
    size = len(wide_N)
    before = torch.arange(1, size, device=wide_N.device)
    head = wide_N.cumsum(0)[:-1] / before
    tail = (wide_N.sum() - wide_N.cumsum(0)[:-1]) / (size - before)
    spread = before * (size - before) * (tail - head).clamp(min=0).square()
    if size > 1 and float(spread.max()) > 0:
        at = int(before[spread.argmax()])
        if gaps_N[:at].median() <= noise and gaps_N[at:].median() > 3 * noise:
            return int(places[at])
    return 0 if gaps_N.median() > noise else None


def _canonical(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether the tokenizer makes just these ids of their text."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    return bool(tokenizer.encode(text, add_special_tokens=False) == list(ids))


def _unknown(own: Scores, others: Mapping[str, Scores], closest: str) -> Finding:
    few = len(own.gaps_N) < ENOUGH
    tried = ["temperature, top-k, top-p and min-p", "a place off", "some sequences alone"]
    higher = float((own.gaps_N > 0).float().mean())
    return Finding(
        "unknown",
        f"no cause found: the sampler's are higher for {higher:.0%} of the tokens. Tried: "
        f"{', '.join([*([] if few else tried), *others]) or 'nothing'}"
        + (f" (the rest needs {ENOUGH} sampled tokens)" if few else "")
        + (f". Closest: {closest}" if closest else "")
        + ". Left: another prompt (a BOS token more or less), another model",
    )

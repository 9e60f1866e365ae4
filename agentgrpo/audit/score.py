"""What a Hugging Face model says of sampled tokens, whatever its weights and dtype."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from agentgrpo.audit.fit import WORST, Distributions, Processing

CHUNK = 512
"""Tokens of which logits are made at a time."""
FIT_TOKENS = 128
"""Tokens whose whole distributions are kept: some float64 of the vocabulary's size for each."""

HALVES = (torch.bfloat16, torch.float16)

Snapshot = Mapping[str, Tensor]
"""Weights by name, as named_parameters() has them; those that are not there are the model's own."""


def sampled(gaps: Sequence[Tensor]) -> Tensor:
    """The numbers of sampled tokens, row by row; nan stands at the others."""
    every = torch.cat(list(gaps))
    return every[~every.isnan()]


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt with what followed it."""

    ids: Tensor
    first: int
    """Place of the first token behind the prompt."""
    said: Tensor
    """[C] of each token behind the prompt, in nats; nan where nothing was sampled."""


class Scores:
    """What one set of weights makes of the tokens behind the prompts.

    Args:
        rows: that were scored.
        logp: [C] of each, in nats, as the trainer claims to compute them.
        kept_NV: logits of evenly chosen sampled tokens.
        chosen_N: places of these among all sampled tokens.
    """

    def __init__(
        self, rows: Sequence[Row], logp: list[Tensor], kept_NV: Tensor, chosen_N: Tensor
    ) -> None:
        self._said, self._logp = [row.said for row in rows], logp
        self.by_row = [said - model for said, model in zip(self._said, logp, strict=True)]
        self.gaps_N = sampled(self.by_row)
        """sampler - model at each sampled token."""
        self.chosen_N = chosen_N
        ids = torch.cat([row.ids[row.first :] for row in rows])
        said = torch.cat(self._said)
        own = ~said.isnan()
        self._fit = kept_NV, ids[own][chosen_N], said[own][chosen_N]

    @property
    def wide(self) -> Tensor:
        return self.gaps_N.abs().clamp(max=WORST)

    def gaps_of(self, num_rows: int) -> Tensor:
        """The gaps of the first rows alone."""
        return sampled(self.by_row[:num_rows])

    def distributions(self) -> Distributions:
        return Distributions(*self._fit)

    def shifted(self, by: int) -> Tensor:
        """The gaps if what the sampler said were of the token `by` places later."""
        ends = (
            (slice(None, -by), slice(by, None)) if by > 0 else (slice(-by, None), slice(None, by))
        )
        pairs = zip(self._said, self._logp, strict=True)
        return sampled([said[ends[0]] - logp[ends[1]] for said, logp in pairs])


def rows_of(
    model: Any,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float | None]],
    env_mask: Sequence[Sequence[int]] | None,
    max_tokens: int,
) -> list[Row]:
    """Whole sequences with about max_tokens sampled tokens in all, from the first on."""
    device = model.get_input_embeddings().weight.device
    rows: list[Row] = []
    count = 0
    for index, (prompt, ids, said) in enumerate(
        zip(prompt_ids, completion_ids, logprobs, strict=True)
    ):
        values = torch.tensor([math.nan if x is None else x for x in said], device=device)
        if env_mask is not None:
            own = torch.tensor(list(env_mask[index]), dtype=torch.bool, device=device)
            values = torch.where(own, values, math.nan)
        if not prompt:
            values[:1] = math.nan  # a first token has no distribution
        if count >= max_tokens or values.isnan().all():
            continue
        every = torch.tensor([*prompt, *ids], device=device)
        rows.append(Row(every, len(prompt), values))
        count += int((~values.isnan()).sum())
    return rows


@contextmanager
def scoring(model: Any) -> Iterator[None]:
    """Without gradients and dropout."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def score(
    model: Any, rows: Sequence[Row], claimed: Processing, state: Snapshot | None = None
) -> Scores:
    """Score the rows with the model's weights, or with those of `state` in their place."""
    device = rows[0].ids.device
    place = {name: weight.to(device) for name, weight in (state or {}).items()}
    total = int(sum((~row.said.isnan()).sum() for row in rows))
    chosen_N = torch.arange(0, total, math.ceil(total / FIT_TOKENS), device=device)
    logp, kept, before = [], [], 0
    for row in rows:
        found = torch.full_like(row.said, math.nan)
        own_N = torch.nonzero(~row.said.isnan())[:, 0]
        mine_N = own_N[chosen_N[(chosen_N >= before) & (chosen_N < before + len(own_N))] - before]
        at = int(not row.first)  # without a prompt the first token has no distribution
        for logits_CV in _logits(model, place, row):
            end = at + len(logits_CV)
            scores_CV = torch.log_softmax(logits_CV.float() / claimed.temperature, -1)
            targets_C = row.ids[row.first + at : row.first + end]
            found[at:end] = scores_CV.gather(1, targets_C[:, None])[:, 0]
            kept.append(logits_CV[mine_N[(mine_N >= at) & (mine_N < end)] - at].float())
            at = end
        logp.append(found)
        before += len(own_N)
    return Scores(rows, logp, torch.cat(kept), chosen_N)


def _logits(model: Any, place: Mapping[str, Tensor], row: Row) -> Iterator[Tensor]:
    """[<= CHUNK, V] each: logits of the tokens behind the prompt, in order, by one pass."""
    inputs: dict[str, Any] = {"input_ids": row.ids[None], "use_cache": False}

    def run(**more: Any) -> Tensor:
        given = inputs | more
        out = functional_call(model, dict(place), (), given) if place else model(**given)
        logits: Tensor = out.logits[0]
        return logits

    places = torch.arange(max(row.first - 1, 0), len(row.ids) - 1, device=row.ids.device)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    trunk = getattr(base, "base_model", base)
    keeps = "logits_to_keep" in inspect.signature(base.forward).parameters
    if not keeps or trunk is base:  # Llama4ForCausalLM's prefix names nothing in it
        yield from (run(logits_to_keep=places) if keeps else run()[places]).split(CHUNK)
        return
    with _once(trunk) if len(places) > CHUNK else nullcontext():
        for part in places.split(CHUNK):
            yield run(logits_to_keep=part)


@contextmanager
def _once(trunk: Any) -> Iterator[None]:
    """A module whose first output is that of every call; what is around it is not affected."""
    own, kept = trunk.forward, list[Any]()

    def forward(*args: Any, **named: Any) -> Any:
        if not kept:
            kept.append(own(*args, **named))
        return kept[0]

    before = vars(trunk).get("forward")
    trunk.forward = forward
    try:
        yield
    finally:
        del trunk.forward
        if before is not None:
            trunk.forward = before


def dtype_of(model: Any, device: str) -> torch.dtype:
    """In which the model's passes are: of its weights, unless autocast is on."""
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


@contextmanager
def in_float32(model: Any, device: str) -> Iterator[None]:
    """Passes in float32, without autocast; one module's weights at a time are held so."""
    kept: dict[Tensor, Tensor] = {}

    def widen(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for weight in module.parameters(recurse=False):
            if weight.dtype in HALVES:
                kept[weight], weight.data = weight.data, weight.data.float()
        return tuple(
            x.float() if isinstance(x, Tensor) and x.dtype in HALVES else x for x in inputs
        )

    def narrow(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        for weight in module.parameters(recurse=False):
            if weight in kept:
                weight.data = kept.pop(weight)

    with ExitStack() as stack:
        for module in model.modules():
            if any(weight.dtype in HALVES for weight in module.parameters(recurse=False)):
                for hook in (
                    module.register_forward_pre_hook(widen),
                    module.register_forward_hook(narrow, always_call=True),
                ):
                    stack.callback(hook.remove)
            if "_original_forward" in vars(module):  # accelerate's own autocast is around it
                stack.callback(setattr, module, "forward", module.forward)
                module.forward = module._original_forward
        stack.enter_context(torch.autocast(device, enabled=False))
        yield

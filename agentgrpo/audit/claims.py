"""Which claims of another trainer's rollouts hold, from their record and its tokenizer alone.

Each claim of CLAIMS holds of a rollout, or is contradicted, or is not recorded: a file that does
not say what was sampled proves nothing about it, and is not said to. No weights are read: whether
log-probabilities are those of the model is for agentgrpo.audit.step to say, while there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from agentgrpo.engine.agreement import widest_gap
from agentgrpo.files import read_table
from agentgrpo.foreign.trajectory import Piece, Trajectory, int32
from agentgrpo.proof.tokens import LOGP_TOLERANCE
from agentgrpo.types import Float32, Int32

CLAIMS: Mapping[str, str] = {
    "ids": "what was sampled is there as ids, as many as log-probabilities and engine say",
    "history": "each prompt begins with the very ids that were sampled before it",
    "text": "texts are what the ids say",
    "mask": "what is trained on was sampled: nothing of a prompt, a tool or a user",
    "logprobs": "the sampler's log-probabilities can be some",
    "learner": "the trainer's log-probabilities of the same tokens are the sampler's",
    "advantages": "they sum to 0 in each group, and are 0 where all rewards are equal",
}
WIDEST, OUTLIERS = 1.0, 1e-3
"""Nats between sampler and trainer that pass, and the share of tokens that may be further apart;
as engine.agreement_threshold in bfloat16."""
ALL_ZERO = 12
"""Tokens of a file from which on no model is so sure of all of them that each rounds to 0."""

Verdict = list[str] | str
"""Faults, none if the claim holds; or what is not recorded."""


@dataclass(slots=True)
class Tally:
    """What was found of one claim."""

    held: int = 0
    faults: list[str] = field(default_factory=list)
    missing: Counter[str] = field(default_factory=Counter)
    """Why nothing can be said, and of how many rollouts."""

    def __str__(self) -> str:
        said = [f"holds in {self.held}"] if self.held else []
        said += [f"{len(self.faults)} faults"] if self.faults else []
        said += [f"not recorded in {count}: {why}" for why, count in self.missing.items()]
        return "; ".join(said)


@dataclass(slots=True)
class Judgement:
    """What was found of all claims."""

    num_rollouts: int
    num_sampled: int
    """Sampled tokens that are recorded as ids."""
    tallies: dict[str, Tally]
    notes: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        return [fault for tally in self.tallies.values() for fault in tally.faults]

    @property
    def status(self) -> int:
        """Of a command: 0 something holds and nothing fails, 1 something fails, 3 all is unsaid."""
        if self.faults:
            return 1
        return 0 if any(tally.held for tally in self.tallies.values()) else 3


class Tokens:
    """A tokenizer's own words and ends.

    Args:
        folder: a model's, with tokenizer.json; and with generation_config.json or
            tokenizer_config.json, which name the tokens that end a turn.

    Raises:
        ValueError: it has no tokenizer.json.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder}: no tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._special = set(self._tokenizer.get_added_tokens_decoder())
        self.size = self._tokenizer.get_vocab_size()
        self.ends = set(self._ends(folder))

    def _ends(self, folder: Path) -> Iterator[int]:
        ends = _json(folder / "generation_config.json").get("eos_token_id")
        yield from [ends] if isinstance(ends, int) else ends or []
        eos = _json(folder / "tokenizer_config.json").get("eos_token")
        word = eos.get("content") if isinstance(eos, dict) else eos
        if word is not None and (found := self._tokenizer.token_to_id(word)) is not None:
            yield found

    def text(self, ids: Iterable[int], *, special: bool = True) -> str:
        said: str = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        return said

    def canonical(self, ids: Int32) -> bool:
        """Whether the tokenizer makes just these ids of their text, marks of the template apart."""
        runs = groupby(ids.tolist(), key=lambda token: token in self._special)
        for marks, run in runs:
            part = list(run)
            if not marks:
                again = self._tokenizer.encode(self.text(part), add_special_tokens=False).ids
                if again != part:
                    return False
        return True


def _json(path: Path) -> dict[str, Any]:
    return read_table(path) if path.is_file() else {}


def judge(trajectories: Sequence[Trajectory], tokens: Tokens | None = None) -> Judgement:
    """Look at every claim of every rollout.

    Args:
        trajectories: of foreign.read.read().
        tokens: of the model that sampled; None: what only they can tell is not recorded.
    """
    tallies = {claim: Tally() for claim in CLAIMS}
    for trajectory in trajectories:
        for claim, looked in LOOKED.items():
            own = [said for of, said in trajectory.faults if of == claim]
            verdict = looked(trajectory, tokens)
            tally = tallies[claim]
            if isinstance(verdict, str) and not own:
                tally.missing[verdict] += 1
                continue
            faults = [*own, *([] if isinstance(verdict, str) else verdict)]
            tally.faults += [f"{trajectory.where}: {claim}: {fault}" for fault in faults]
            tally.held += not faults
    for claim, name, whose in (
        ("logprobs", "logprobs", "the sampler's"),
        ("learner", "learner", "the trainer's"),
    ):
        _computed(trajectories, tallies[claim], claim, name, whose)
    _advantages(trajectories, tallies["advantages"])
    pieces = [p.ids for t in trajectories for p in t.sampled if p.ids is not None]
    judged = Judgement(len(trajectories), sum(map(len, pieces)), tallies)
    if tokens is not None and pieces:
        other = sum(not tokens.canonical(ids) for ids in pieces)
        judged.notes.append(
            f"{other} of {len(pieces)} sampled stretches are not what the tokenizer makes of their "
            "text, so they were not encoded again"
            if other
            else f"all {len(pieces)} sampled stretches are just what the tokenizer makes of their "
            "text: that they were not encoded again cannot be told from them"
        )
    return judged


def _ids(trajectory: Trajectory, tokens: Tokens | None) -> Verdict:
    pieces = [piece for piece in trajectory.sampled if piece.ids is not None]
    known = [call for call in trajectory.calls if call.completion_ids is not None]
    if not pieces and not known:
        return "text alone"
    counted = any(call.completion_tokens is not None for call in known)
    if not counted and all(piece.logprobs is None for piece in pieces):
        return "ids alone, with neither log-probabilities nor the engine's counts"
    faults = []
    for number, call in enumerate(trajectory.calls):
        sizes = [(call.completion_ids, call.completion_tokens, "sampled"),
                 (call.prompt_ids, call.prompt_tokens, "read a prompt of")]  # fmt: skip
        faults += [
            f"call {number}: {len(ids)} ids, but the engine {word} {count} tokens"
            for ids, count, word in sizes
            if ids is not None and count is not None and len(ids) != count
        ]
    ids = np.concatenate([piece.ids for piece in pieces if piece.ids is not None] or [int32([])])
    if tokens is not None and (ids.max(initial=0) >= tokens.size or ids.min(initial=0) < 0):
        faults.append(f"ids from {ids.min()} to {ids.max()}, but the tokenizer has {tokens.size}")
    return faults


def _history(trajectory: Trajectory, tokens: Tokens | None) -> Verdict:
    calls = [
        call
        for call in trajectory.calls
        if not call.derived and call.prompt_ids is not None and call.completion_ids is not None
    ]
    if len(calls) < 2:
        return "one turn" if calls else "prompts by themselves, beside the row"
    faults = []
    for number, (before, after) in enumerate(pairwise(calls), start=1):
        assert before.prompt_ids is not None
        assert before.completion_ids is not None
        assert after.prompt_ids is not None
        whole = np.concatenate([before.prompt_ids, before.completion_ids])
        there = after.prompt_ids[: len(whole)]
        if np.array_equal(there, whole):
            continue
        size = min(len(there), len(whole))
        at = int(np.flatnonzero(np.append(there[:size] != whole[:size], True))[0])
        how = "other ids"
        if tokens is not None:
            same = tokens.text(after.prompt_ids).startswith(tokens.text(whole))
            how = "the same text encoded again" if same else "another text (a template may do so)"
        where = "what was sampled" if at >= len(before.prompt_ids) else "its prompt"
        faults.append(f"call {number} does not begin with call {number - 1}: {how}, in {where}")
    return faults


def _text(trajectory: Trajectory, tokens: Tokens | None) -> Verdict:
    both = [(number, c) for number, c in enumerate(trajectory.calls)
            if c.completion_ids is not None and c.text is not None]  # fmt: skip
    if not both:
        return "ids and their text are not both there"
    if tokens is None:
        return "no tokenizer was given"
    faults = []
    for number, call in both:
        assert call.completion_ids is not None
        assert call.text is not None
        text, shown = call.text.strip(), tokens.text(call.completion_ids)
        if text not in shown and text not in tokens.text(call.completion_ids, special=False):
            faults.append(f"turn {number}: {text[:40]!r}, but its ids say {shown[:40]!r}")
    return faults


def _mask(trajectory: Trajectory, tokens: Tokens | None) -> Verdict:
    pieces = [piece for piece in trajectory.sampled if piece.ids is not None]
    if not pieces:
        return "which tokens are trained on"
    ends = None if tokens is None else tokens.ends
    if not trajectory.masked and not ends:
        return "no mask, and no tokenizer to see where turns end"
    faults = []
    for number, piece in enumerate(pieces):
        assert piece.ids is not None
        if piece.logprobs is not None and piece.learner is not None:
            filled = (piece.logprobs == 0) & (piece.learner < -WIDEST)
            if filled.any():
                faults.append(
                    f"stretch {number}: {int(filled.sum())} tokens are trained on whose sampler's "
                    f"log-probability is 0 and whose trainer's is {piece.learner[filled].min():.3g}"
                )
        inside = [at for at in range(len(piece.ids) - 1) if ends and int(piece.ids[at]) in ends]
        if inside:
            assert tokens is not None
            word = tokens.text(piece.ids[inside[:1]].tolist())
            faults.append(
                f"stretch {number}: {len(piece.ids) - 1 - inside[0]} tokens behind {word} are "
                "trained on, which ended the turn: they were not sampled"
            )
    return faults


def _logprobs(trajectory: Trajectory, tokens: Tokens | None) -> Verdict:
    found = [p.logprobs for p in trajectory.sampled if p.logprobs is not None]
    values = np.concatenate(found or [np.zeros(0, np.float32)])
    if not len(values) or np.isnan(values).all():
        return "no log-probabilities"
    return _impossible(values, "the sampler's")


def _impossible(values: Float32, whose: str) -> list[str]:
    faults = []
    if count := int((~np.isfinite(values)).sum()):
        faults.append(f"{count} of {len(values)} of {whose} are no numbers")
    if count := int((values > LOGP_TOLERANCE).sum()):
        faults.append(f"{count} of {whose} are above 0, up to {np.nanmax(values):.3g}")
    return faults


def _computed(
    trajectories: Sequence[Trajectory], tally: Tally, claim: str, name: str, whose: str
) -> None:
    """Of all rollouts together: a short one whose tokens are certain has nothing but zeros."""
    having = [t for t in trajectories if any(getattr(p, name) is not None for p in t.sampled)]
    values = _flat([p for t in having for p in t.sampled if getattr(p, name) is not None], name)
    if len(values) >= ALL_ZERO and not values.any():
        tally.held = 0
        tally.faults.append(
            f"{having[0].where}: {claim}: all {len(values)} of {whose}, in all {len(having)} "
            "rollouts that have any, are 0: nobody computed them"
        )


def _learner(trajectory: Trajectory, tokens: Tokens | None) -> Verdict:
    both = [p for p in trajectory.sampled if p.learner is not None and p.logprobs is not None]
    if not both:
        return "the trainer's log-probabilities"
    learner, sampler = _flat(both, "learner"), _flat(both, "logprobs")
    faults = _impossible(learner, "the trainer's")
    gap = widest_gap([learner - sampler], OUTLIERS)
    if not faults and not gap <= WIDEST:
        mean = float(np.abs(learner - sampler).mean())
        faults.append(f"up to {gap:.3g} nats from the sampler's, {mean:.3g} in the mean")
    return faults


def _flat(pieces: Iterable[Piece], name: str) -> Float32:
    found: Float32 = np.concatenate(
        [np.zeros(0, np.float32), *(getattr(piece, name) for piece in pieces)]
    )
    return found


LOOKED = {
    "ids": _ids,
    "history": _history,
    "text": _text,
    "mask": _mask,
    "logprobs": _logprobs,
    "learner": _learner,
}


def _advantages(trajectories: Sequence[Trajectory], tally: Tally) -> None:
    """Of groups: rollouts of one step and one task."""
    groups: dict[tuple[int, str, str], list[Trajectory]] = {}
    for trajectory in trajectories:
        key = trajectory.step, trajectory.split, trajectory.task.spec["key"]
        groups.setdefault(key, []).append(trajectory)
    sizes = {len(group) for group in groups.values()}
    for group in groups.values():
        known = [t.advantage for t in group if t.advantage is not None]
        if len(known) < len(group) or len(group) < 2 or not all(t.rewards for t in group):
            tally.missing["advantages and rewards of a whole group"] += len(group)
            continue
        faults = list(_of_group(known, flat=all(t.rewards == group[0].rewards for t in group)))
        if faults and len(sizes) > 1 and group[0].where.endswith(".parquet:1"):
            # TRL keeps the last generation_batch_size rows, those of evaluations too
            tally.missing["a whole group: the table may begin within it"] += len(group)
            continue
        tally.faults += [f"{group[0].where}: advantages: {fault}" for fault in faults]
        tally.held += 0 if faults else len(group)


def _of_group(advantages: Sequence[float], *, flat: bool) -> Iterator[str]:
    total, most = abs(sum(advantages)), max(map(abs, advantages))
    if not np.isfinite(total):
        yield f"one of its group is {total}"
    elif flat and most > 1e-4:
        yield f"all rewards are equal, and one is {most:.3g}"
    elif not flat and total > 1e-3 * len(advantages) * max(most, 1e-6):
        yield f"those of its group sum to {total:.3g}"

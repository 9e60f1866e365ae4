"""What is wrong with a rollout's tokens, from the rollout alone: its form, what the engine said.

The engine's account (types.Turn) has hashes of the prompt it used and of the ids it sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from agentgrpo.types import Float32, Rollout, Segment, Turn, token_hash

LOGP_TOLERANCE = 1e-5
"""Nats above 0 that float32 may make of a log-probability of 0."""


def rollout_faults(
    rollout: Rollout, *, accounted: bool = True, vocab_size: int | None = None
) -> Iterator[str]:
    """What is wrong with a rollout's tokens; nothing, if it is what the engine saw.

    `accounted`: it says what the engine saw; else that is not looked at.
    """
    turns: dict[int, list[tuple[int, Turn]]] = {i: [] for i in range(len(rollout.rows))}
    for number, turn in enumerate(rollout.turns):
        if turn.row not in turns:
            yield f"turn {number}: row {turn.row} of {len(turns)}"
            return
        turns[turn.row].append((number, turn))
    for index, row in enumerate(rollout.rows):
        name = f"row {index}: " if len(rollout.rows) > 1 else ""
        yield from (name + fault for fault in _segment_faults(row, vocab_size))
        if accounted:
            yield from (name + fault for fault in _turn_faults(row, turns[index]))
    yield from _view_faults(rollout, vocab_size)
    total = sum(len(segment.token_ids) for row in rollout.rows for segment in row)
    for span in rollout.span_rewards:
        if not 0 <= span.start < span.end <= total:
            yield f"reward {span.name!r}: tokens [{span.start}, {span.end}) of {total}"


def _segment_faults(row: Sequence[Segment], vocab_size: int | None) -> Iterator[str]:
    if not row or row[0].sampled:
        yield "does not begin with a prompt"
    for number, segment in enumerate(row):
        if len(segment.token_ids) and segment.token_ids.min() < 0:
            yield f"segment {number}: token_ids has {segment.token_ids.min()}, not an id"
        if len(segment.token_ids) and segment.token_ids.max() >= (vocab_size or np.inf):
            yield f"segment {number}: token_ids has {segment.token_ids.max()}, of {vocab_size} ids"
        if segment.logprobs is not None and not (segment.logprobs <= LOGP_TOLERANCE).all():
            yield f"segment {number}: logprobs has {segment.logprobs.max()}, not a log-probability"
        if number and not segment.sampled and not row[number - 1].sampled:
            yield f"segment {number}: given right after segment {number - 1}, with no turn between"


def _view_faults(rollout: Rollout, vocab_size: int | None) -> Iterator[str]:
    """What is wrong with the form of what the learner made of a rollout."""
    views = {"learner_logprobs": rollout.learner_logprobs, "entropies": rollout.entropies}
    known = [view is not None and [v is not None for v in view] for view in views.values()]
    views["teacher_logprobs"] = rollout.teacher_logprobs
    if known[0] != known[1]:
        yield "learner_logprobs and entropies: one is recorded without the other"
    sizes = [len(s.token_ids) if s.sampled else None for s in rollout.all_segments]
    for name, view in views.items():
        if view is None:
            continue
        found = [None if values is None else len(values) for values in view]
        if len(found) != len(sizes) or any(
            number not in (None, size) for number, size in zip(found, sizes, strict=True)
        ):
            yield f"{name}: not one number for each sampled token"
            continue
        least, most = (-1e-3, np.inf) if name == "entropies" else (-np.inf, LOGP_TOLERANCE)
        for values in view:
            fine = values is None or np.isfinite(values) & (values >= least) & (values <= most)
            if not np.all(fine):
                yield f"{name}: a number that can be none"
                return
    if vocab_size is None or False in known or known[0] != known[1]:
        return
    for logp, entropy in zip(rollout.learner_logprobs or (), rollout.entropies or (), strict=True):
        if logp is not None and entropy is not None and not _can_have(entropy, logp, vocab_size):
            yield "entropies: a distribution that gives its token so much has another entropy"


def _can_have(entropy: Float32, logp: Float32, vocab_size: int) -> bool:
    """Whether distributions over so many tokens can have these entropies, in nats.

    One that gives a token p has at least the entropy h(p) of that token against the rest, and at
    most h(p) + (1 - p) log(V - 1), where the rest is uniform.
    """
    own = np.minimum(logp.astype(np.float64), 0.0)
    rest = -np.expm1(own)
    least = -np.exp(own) * own - rest * np.log(np.maximum(rest, 1e-300))
    most = least + rest * np.log(max(vocab_size - 1, 1))
    slack = 1e-3 * (1 + most)
    return bool(((entropy >= least - slack) & (entropy <= most + slack)).all())


def gaps_of(rollout: Rollout) -> list[Float32]:
    """The learner's less the sampler's log-probabilities of each segment that was learned from."""
    pairs = zip(rollout.all_segments, rollout.learner_logprobs or (), strict=False)
    return [
        values - segment.logprobs
        for segment, values in pairs
        if segment.logprobs is not None and values is not None
        if len(values) == len(segment.logprobs)
    ]


def _turn_faults(row: Sequence[Segment], turns: Sequence[tuple[int, Turn]]) -> Iterator[str]:
    """Compare a row's sampled segments with the engine's account of its turns."""
    ids = np.concatenate([segment.token_ids for segment in row] or [np.empty(0, np.int32)])
    starts = np.cumsum([0, *(len(segment.token_ids) for segment in row)]).tolist()
    sampled = [number for number, segment in enumerate(row) if segment.sampled]
    if len(sampled) != len(turns):
        yield f"{len(sampled)} sampled segments, but the engine played {len(turns)} turns"
        return
    for at, (number, turn) in zip(sampled, turns, strict=True):
        if starts[at] != turn.prompt_tokens:
            yield (
                f"turn {number}: sampled from token {starts[at]} on, but the engine's prompt had "
                f"{turn.prompt_tokens} tokens"
            )
        elif token_hash(ids[: starts[at]]) != turn.prompt_hash:
            yield f"turn {number}: the engine's prompt is not the {starts[at]} tokens before it"
        whole = np.append(row[at].token_ids, np.array(turn.replaced, np.int32))
        if len(whole) != turn.sampled_tokens:
            yield (
                f"turn {number}: {len(whole)} tokens, but the engine sampled {turn.sampled_tokens}"
            )
        elif token_hash(whole) != turn.sampled_hash:
            yield f"turn {number}: its tokens are not those that the engine sampled"

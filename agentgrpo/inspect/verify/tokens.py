"""Checks a rollout's tokens: their form, and the engine's hashes of prompts and sampled ids.

The hashes are in types.Turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from agentgrpo.types import Float32, Rollout, Segment, Turn, token_hash

LOGP_TOLERANCE = 1e-5
"""Float32 rounding may raise a log-probability of 0 by this many nats."""


def rollout_faults(
    rollout: Rollout, *, accounted: bool = True, vocab_size: int | None = None
) -> Iterator[str]:
    """Yield the faults of a rollout's tokens.

    `accounted`: compare them with the engine's hashes; False: the rollout has none.
    """
    turns: dict[int, list[tuple[int, Turn]]] = {i: [] for i in range(len(rollout.rows))}
    for number, turn in enumerate(rollout.turns):
        if turn.row not in turns:
            yield f"turn {number}: row {turn.row}, but there are {len(turns)} rows"
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
            yield f"reward {span.name!r}: tokens [{span.start}, {span.end}), but there are {total}"


def _segment_faults(row: Sequence[Segment], vocab_size: int | None) -> Iterator[str]:
    if not row or row[0].sampled:
        yield "does not begin with a prompt"
    for number, segment in enumerate(row):
        if len(segment.token_ids) and segment.token_ids.min() < 0:
            yield f"segment {number}: token_ids has {segment.token_ids.min()}, which is no token id"
        if len(segment.token_ids) and segment.token_ids.max() >= (vocab_size or np.inf):
            most = segment.token_ids.max()
            yield f"segment {number}: token_ids has {most}, but the vocabulary has {vocab_size}"
        if segment.logprobs is not None and not (segment.logprobs <= LOGP_TOLERANCE).all():
            most = segment.logprobs.max()
            yield f"segment {number}: logprobs has {most}, which is no log-probability"
        if number and not segment.sampled and not row[number - 1].sampled:
            yield f"segment {number}: no turn between it and segment {number - 1}"


def _view_faults(rollout: Rollout, vocab_size: int | None) -> Iterator[str]:
    """Check shapes and values of the learner's and the teacher's columns."""
    views = {"learner_logprobs": rollout.learner_logprobs, "entropies": rollout.entropies}
    known = [view is not None and [v is not None for v in view] for view in views.values()]
    views["teacher_logprobs"] = rollout.teacher_logprobs
    if known[0] != known[1]:
        yield "learner_logprobs and entropies: one is recorded without the other"
    sizes = [len(s.token_ids) if s.sampled else None for s in rollout.all_segments]
    for name, view in views.items():
        if view is None:
            continue
        lengths = [None if values is None else len(values) for values in view]
        if len(lengths) != len(sizes) or any(
            length not in (None, size) for length, size in zip(lengths, sizes, strict=True)
        ):
            yield f"{name}: expected one number for each sampled token"
            continue
        least, most = (-1e-3, np.inf) if name == "entropies" else (-np.inf, LOGP_TOLERANCE)
        for values in view:
            valid = values is None or np.isfinite(values) & (values >= least) & (values <= most)
            if not np.all(valid):
                yield f"{name}: an impossible number"
                return
    if vocab_size is None or False in known or known[0] != known[1]:
        return
    for logp, entropy in zip(rollout.learner_logprobs or (), rollout.entropies or (), strict=True):
        if logp is not None and entropy is not None and not _can_have(entropy, logp, vocab_size):
            yield "entropies: impossible with the log-probability of the token"


def _can_have(entropy: Float32, logp: Float32, vocab_size: int) -> bool:
    """Whether distributions over V tokens can have these entropies, in nats.

    A distribution with probability p for one token has at least the binary entropy h(p), and at
    most h(p) + (1 - p) log(V - 1): the rest is uniform.
    """
    logp64 = np.minimum(logp.astype(np.float64), 0.0)
    rest = -np.expm1(logp64)
    least = -np.exp(logp64) * logp64 - rest * np.log(np.maximum(rest, 1e-300))
    most = least + rest * np.log(max(vocab_size - 1, 1))
    slack = 1e-3 * (1 + most)
    return bool(((entropy >= least - slack) & (entropy <= most + slack)).all())


def gaps_of(rollout: Rollout) -> list[Float32]:
    """Learner's minus sampler's log-probabilities, for each segment that was trained on."""
    pairs = zip(rollout.all_segments, rollout.learner_logprobs or (), strict=False)
    return [
        values - segment.logprobs
        for segment, values in pairs
        if segment.logprobs is not None and values is not None
        if len(values) == len(segment.logprobs)
    ]


def _turn_faults(row: Sequence[Segment], turns: Sequence[tuple[int, Turn]]) -> Iterator[str]:
    """Compare a row's sampled segments with the engine's hashes of its turns."""
    ids = np.concatenate([segment.token_ids for segment in row] or [np.empty(0, np.int32)])
    starts = np.cumsum([0, *(len(segment.token_ids) for segment in row)]).tolist()
    sampled = [number for number, segment in enumerate(row) if segment.sampled]
    if len(sampled) != len(turns):
        yield f"{len(sampled)} sampled segments, but {len(turns)} turns of the engine"
        return
    for at, (number, turn) in zip(sampled, turns, strict=True):
        if starts[at] != turn.prompt_tokens:
            yield (
                f"turn {number}: starts at token {starts[at]}, but the engine's prompt had "
                f"{turn.prompt_tokens} tokens"
            )
        elif token_hash(ids[: starts[at]]) != turn.prompt_hash:
            yield f"turn {number}: the engine's prompt is not the {starts[at]} tokens before it"
        sampled_ids = np.append(row[at].token_ids, np.array(turn.replaced, np.int32))
        if (num := len(sampled_ids)) != turn.sampled_tokens:
            yield f"turn {number}: {num} tokens, but the engine sampled {turn.sampled_tokens}"
        elif token_hash(sampled_ids) != turn.sampled_hash:
            yield f"turn {number}: its tokens are not those that the engine sampled"

"""Checks a rollout's status against its turns, tokens, counts and limits.

Written from the tables of docs/rollouts.md. A record lacks what only the environment knew (why an
episode was over, how long a tool took), so some statuses cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agentgrpo.config import TrainConfig
from agentgrpo.types import COUNTS, Rollout, Status, Treatment

TREATMENTS: Mapping[Status, Treatment] = {
    **dict.fromkeys(Status, Treatment.TRAIN),
    Status.TIMED_OUT: Treatment.DROP,
    Status.INFRA_ERROR: Treatment.RETRY,
}


def treatment_faults(rollout: Rollout, config: TrainConfig) -> Iterator[str]:
    """Whether the treatment follows from the status."""
    table = {**TREATMENTS, **config.rollout.treatment}
    if rollout.status is Status.INFRA_ERROR and config.reward.functions:
        return  # set when a reward function fails, after the treatment; never trained on anyway
    if rollout.treatment is not (expected := table[rollout.status]):
        yield f"treatment: expected {expected} for {rollout.status}, got {rollout.treatment}"


def status_faults(rollout: Rollout, config: TrainConfig) -> Iterator[str]:
    """Contradictions between status, counts and turns of a rollout of the shipped sampler."""
    status, stats, turns = rollout.status, rollout.stats, rollout.turns
    if missing := [name for name in COUNTS if not stats.get(name, -1.0) >= 0]:
        yield f"stats: no count of {', '.join(missing)}"
        return
    if (rollout.error is not None) != (status is Status.INFRA_ERROR):
        yield f"error is {rollout.error!r:.40}, but the status is {status}"
    if stats["turns"] != len(turns):
        yield f"stats: {stats['turns']:g} turns, but {len(turns)} turns of the engine"
    if len(turns) > config.rollout.max_turns:
        yield f"{len(turns)} turns, more than rollout.max_turns {config.rollout.max_turns}"
    yield from _length_faults(rollout, config)
    if not config.reward.functions:  # they may reward any span, and fail after the status is set
        yield from _span_faults(rollout, appended=config.rollout.history == "append")
        if status is Status.INFRA_ERROR and (rollout.rewards or rollout.span_rewards):
            yield "has rewards, but its status is infra_error"
    if status is not Status.INFRA_ERROR and (wrong := _wrong_end(rollout, config)):
        yield f"status {status}: {wrong}"


def _length_faults(rollout: Rollout, config: TrainConfig) -> Iterator[str]:
    """Every turn ends with "stop"; the last one may end at its token budget with "length"."""
    limit, response = config.engine.max_model_len, config.rollout.max_response_tokens
    if response is not None and rollout.rows[0]:
        limit = min(limit, len(rollout.rows[0][0].token_ids) + response)
    for index, row in enumerate(rollout.rows):
        if (length := sum(len(segment.token_ids) for segment in row)) > limit:
            yield f"row {index}: {length} tokens, more than {limit}"
    for number, turn in enumerate(rollout.turns):
        most = min(config.rollout.max_turn_tokens, limit - turn.prompt_tokens)
        budget = most if turn.asked_tokens is None else min(most, turn.asked_tokens)
        cut = turn.finish_reason == "length"
        later = rollout.turns[number + 1 :]
        if config.agent.kind == "program":  # it has several conversations and sets its own limits
            at_limit = cut and budget == most
            if at_limit and not later and rollout.status is Status.COMPLETED:
                yield f"turn {number}: cut at its budget, but the status is completed"
            later = [turn for turn in later if at_limit and turn.row == rollout.turns[number].row]
        if turn.finish_reason not in ("stop", "length") or (cut and later):
            yield f"turn {number}: not the end, but finish_reason is {turn.finish_reason!r}"
        if turn.sampled_tokens > budget or (cut and turn.sampled_tokens < budget):
            yield (
                f"turn {number}: {turn.sampled_tokens} tokens with finish_reason "
                f"{turn.finish_reason!r}, but the budget was {budget}"
            )


def _span_faults(rollout: Rollout, *, appended: bool) -> Iterator[str]:
    """An environment's reward covers exactly the turn before; a template may have cut that turn."""
    turns, start = {}, 0
    for segment in rollout.all_segments:
        end = start + len(segment.token_ids)
        if segment.sampled:
            turns[start] = end
        start = end
    for span in rollout.span_rewards:
        end = turns.get(span.start, -1)
        if not (span.end == end if appended else span.end <= max(end, span.start + 1)):
            yield f"reward {span.name!r}: tokens [{span.start}, {span.end}) are not one turn"


def _wrong_end(rollout: Rollout, config: TrainConfig) -> str:
    """Why the status contradicts turns and limits; empty: it does not. Not for infra_error."""
    status, stats, turns, limits = rollout.status, rollout.stats, rollout.turns, config.rollout
    if not turns and status is not Status.TIMED_OUT:
        return "it has no turn"
    if status is Status.TIMED_OUT and limits.max_seconds is None:
        return "rollout.max_seconds is not set"
    if config.agent.kind == "program":  # it decides itself when to end
        for kind in ("frozen", "probe"):
            excluded, tokens = (stats.get(f"{kind}_{unit}", 0.0) for unit in ("turns", "tokens"))
            if excluded > limits.max_turns or tokens > excluded * limits.max_turn_tokens:
                return f"{excluded:g} {kind} turns with {tokens:g} tokens, more than its limits"
        probes = len(rollout.extra.get("probes", ()))
        if excluded < probes or (excluded and not probes):
            return f"{excluded:g} probe turns in {probes} probe conversations"
        num_turns = len(turns) + stats.get("undelivered", 0.0)
        if status is Status.TRUNCATED_TURNS and num_turns < limits.max_turns:
            return f"{num_turns:g} turns, fewer than rollout.max_turns {limits.max_turns}"
        possible = status not in (Status.TRUNCATED_CALLS, Status.MALFORMED)
        return "" if possible else "a program cannot end with it"
    if rollout.answer is not None and status is not Status.COMPLETED:
        return "it has an answer, so expected completed"
    cut = bool(turns) and turns[-1].finish_reason == "length"
    if cut and status is not Status.TRUNCATED_LENGTH:
        return "its last turn was cut at its budget"
    observed = bool(rollout.segments) and not rollout.segments[-1].sampled
    if status is Status.COMPLETED and observed:
        return "an observation follows its last turn"
    if status is Status.TRUNCATED_TURNS and not (observed and len(turns) == limits.max_turns):
        return f"{len(turns)} turns, but rollout.max_turns is {limits.max_turns}"
    if status is Status.TRUNCATED_CALLS and limits.max_tool_calls is None:
        return "" if limits.max_calls_of else "calls have no limit"
    if status is Status.MALFORMED and not stats["malformed"] >= (limits.max_malformed or 1):
        return f"{stats['malformed']:g} malformed actions, fewer than {limits.max_malformed}"
    return ""

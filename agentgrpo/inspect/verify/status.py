"""How a rollout may have ended: its status against its turns, tokens, counts and limits.

Written from the tables of docs/rollouts.md. What only the environment knew (why it said that an
episode was over, how long a tool took) is not in a record, so some ends cannot be told from others.
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
    """Whether its treatment is that of its status."""
    table = {**TREATMENTS, **config.rollout.treatment}
    if rollout.status is Status.INFRA_ERROR and config.reward.functions:
        return  # it had ended otherwise before a function failed; never trained on all the same
    if rollout.treatment is not table[rollout.status]:
        yield f"treatment {rollout.treatment}, but {rollout.status} is {table[rollout.status]}"


def status_faults(rollout: Rollout, config: TrainConfig) -> Iterator[str]:
    """What its status, counts and turns say that cannot be true together; our sampler's only."""
    status, stats, turns = rollout.status, rollout.stats, rollout.turns
    if missing := [name for name in COUNTS if not stats.get(name, -1.0) >= 0]:
        yield f"stats: no count of {', '.join(missing)}"
        return
    if (rollout.error is not None) != (status is Status.INFRA_ERROR):
        yield f"error {rollout.error!r:.40}, and the status {status}"
    if stats["turns"] != len(turns):
        yield f"stats: {stats['turns']:g} turns, but the engine played {len(turns)}"
    if len(turns) > config.rollout.max_turns:
        yield f"{len(turns)} turns, of rollout.max_turns {config.rollout.max_turns}"
    yield from _length_faults(rollout, config)
    if not config.reward.functions:  # which reward what they like, and fail after an end
        yield from _span_faults(rollout, whole=config.rollout.history == "append")
        if status is Status.INFRA_ERROR and (rollout.rewards or rollout.span_rewards):
            yield "rewards of a rollout that the machine broke"
    if status is not Status.INFRA_ERROR and (wrong := _wrong_end(rollout, config)):
        yield f"status {status}: {wrong}"


def _length_faults(rollout: Rollout, config: TrainConfig) -> Iterator[str]:
    """Turns end with "stop", the last one perhaps at its budget with "length"."""
    limit, response = config.engine.max_model_len, config.rollout.max_response_tokens
    if response is not None and rollout.rows[0]:
        limit = min(limit, len(rollout.rows[0][0].token_ids) + response)
    for index, row in enumerate(rollout.rows):
        if (length := sum(len(segment.token_ids) for segment in row)) > limit:
            yield f"row {index}: {length} tokens, of {limit}"
    for number, turn in enumerate(rollout.turns):
        most = min(config.rollout.max_turn_tokens, limit - turn.prompt_tokens)
        budget = most if turn.asked_tokens is None else min(most, turn.asked_tokens)
        cut = turn.finish_reason == "length"
        later = rollout.turns[number + 1 :]
        if config.agent.kind == "program":  # it has several conversations, and limits of its own
            over = cut and budget == most
            if over and not later and rollout.status is Status.COMPLETED:
                yield f"turn {number}: it was cut at its budget, and the status is completed"
            later = [turn for turn in later if over and turn.row == rollout.turns[number].row]
        if turn.finish_reason not in ("stop", "length") or (cut and later):
            yield f"turn {number}: it went on after finish_reason {turn.finish_reason!r}"
        if turn.sampled_tokens > budget or (cut and turn.sampled_tokens < budget):
            yield (
                f"turn {number}: {turn.sampled_tokens} tokens, finish_reason "
                f"{turn.finish_reason!r}, but its budget was {budget}"
            )


def _span_faults(rollout: Rollout, *, whole: bool) -> Iterator[str]:
    """An environment rewards the turn before it: all of it, but where a template cut it."""
    turns, start = {}, 0
    for segment in rollout.all_segments:
        end = start + len(segment.token_ids)
        if segment.sampled:
            turns[start] = end
        start = end
    for span in rollout.span_rewards:
        end = turns.get(span.start, -1)
        if not (span.end == end if whole else span.end <= max(end, span.start + 1)):
            yield f"reward {span.name!r}: tokens [{span.start}, {span.end}) are no turn"


def _wrong_end(rollout: Rollout, config: TrainConfig) -> str:
    """Why a rollout that the machine did not break cannot have ended so; empty: it can."""
    status, stats, turns, limits = rollout.status, rollout.stats, rollout.turns, config.rollout
    if not turns and status is not Status.TIMED_OUT:
        return "no turn was played"
    if status is Status.TIMED_OUT and limits.max_seconds is None:
        return "rollout.max_seconds is not set"
    if config.agent.kind == "program":  # it ends when it likes
        for kind in ("frozen", "probe"):
            aside, tokens = (stats.get(f"{kind}_{of}", 0.0) for of in ("turns", "tokens"))
            if aside > limits.max_turns or tokens > aside * limits.max_turn_tokens:
                return f"{aside:g} turns of {tokens:g} tokens were kept out of it"
        probes = len(rollout.extra.get("probes", ()))
        if aside < probes or (aside and not probes):
            return f"{aside:g} turns without its task's text in {probes} conversations"
        asked = len(turns) + stats.get("undelivered", 0.0)
        if status is Status.TRUNCATED_TURNS and asked < limits.max_turns:
            return f"{asked:g} turns of {limits.max_turns}"
        ends = status not in (Status.TRUNCATED_CALLS, Status.MALFORMED)
        return "" if ends else "no program ends so"
    if rollout.answer is not None and status is not Status.COMPLETED:
        return "it answered, which completes it"
    cut = bool(turns) and turns[-1].finish_reason == "length"
    if cut and status is not Status.TRUNCATED_LENGTH:
        return "its last turn was cut at its budget"
    told = bool(rollout.segments) and not rollout.segments[-1].sampled
    if status is Status.COMPLETED and told:
        return "it was told something after its last turn"
    if status is Status.TRUNCATED_TURNS and not (told and len(turns) == limits.max_turns):
        return f"{len(turns)} turns of {limits.max_turns}"
    if status is Status.TRUNCATED_CALLS and limits.max_tool_calls is None:
        return "" if limits.max_calls_of else "calls have no limit"
    if status is Status.MALFORMED and not stats["malformed"] >= (limits.max_malformed or 1):
        return f"{stats['malformed']:g} malformed actions, of {limits.max_malformed}"
    return ""

"""How a rollout may have ended: its status against its turns, tokens, counts and limits.

Written from the tables of docs/rollouts.md. What only the world knew (why it said that an episode
was over, how long a tool took) is not in a record, so some ends cannot be told from others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from agentgrpo.config import TrainConfig
from agentgrpo.types import COUNTS, Rollout, Status, Treatment

TREATMENTS: Mapping[Status, Treatment] = {
    Status.COMPLETED: Treatment.TRAIN,
    Status.TRUNCATED_LENGTH: Treatment.TRAIN,
    Status.TRUNCATED_TURNS: Treatment.TRAIN,
    Status.TRUNCATED_CALLS: Treatment.TRAIN,
    Status.MALFORMED: Treatment.TRAIN,
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


def end_faults(rollout: Rollout, config: TrainConfig) -> Iterator[str]:
    """What its status, counts and turns say that cannot be true together; our sampler's only."""
    status, stats, turns = rollout.status, rollout.stats, rollout.turns
    if missing := [name for name in COUNTS if not stats.get(name, -1.0) >= 0]:
        yield f"stats: no count of {', '.join(missing)}"
        return
    broken = status is Status.INFRA_ERROR and not config.reward.functions
    if broken and (rollout.rewards or rollout.span_rewards):
        yield "rewards of a rollout that the machine broke"
    if (rollout.error is not None) != (status is Status.INFRA_ERROR):
        yield f"error {rollout.error!r:.40}, and the status {status}"
    if stats["turns"] != len(turns):
        yield f"stats: {stats['turns']:g} turns, but the engine played {len(turns)}"
    if len(turns) > config.rollout.max_turns:
        yield f"{len(turns)} turns, of rollout.max_turns {config.rollout.max_turns}"
    yield from _use_faults(rollout, config)
    yield from _length_faults(rollout, config)
    if not config.reward.functions:  # which reward what they like
        yield from _span_faults(rollout, whole=config.rollout.history == "append")
    if status is not Status.INFRA_ERROR:
        ends = _wrong_program_ends if config.agent.kind == "program" else _wrong_ends
        wrong = next(ends(rollout, config), None)
        if wrong:
            yield f"status {status}: {wrong}"


USED = ("sandbox_wall_s", "sandbox_cpu_s", "sandbox_bytes", "host_calls", "host_errors", "host_s")


def _use_faults(rollout: Rollout, config: TrainConfig) -> Iterator[str]:
    """What its code cannot have used of the sandbox and of the host's functions."""
    used = {name: rollout.stats[name] for name in USED if name in rollout.stats}
    if any(value < 0 for value in used.values()):
        yield f"stats: less than nothing was used, {used}"
    if used and not rollout.stats["tool_calls"]:
        yield f"stats: no code was run, and it used {', '.join(used)}"
    calls, most = used.get("host_calls"), config.sandbox.host_budget.calls
    if calls is not None and not config.sandbox.host_tools:
        yield "stats: calls of functions of the host, and sandbox.host_tools names none"
    elif calls is not None and calls > most:
        yield f"stats: {calls:g} calls, of sandbox.host_budget.calls {most}"


def max_length(rollout: Rollout, config: TrainConfig) -> int:
    """Tokens that its row may have."""
    response, limit = config.rollout.max_response_tokens, config.engine.max_model_len
    prompt = len(rollout.rows[0][0].token_ids) if rollout.rows[0] else 0
    return limit if response is None else min(limit, prompt + response)


def _length_faults(rollout: Rollout, config: TrainConfig) -> Iterator[str]:
    """Turns end with "stop", the last one perhaps at its budget with "length"."""
    longest, program = max_length(rollout, config), config.agent.kind == "program"
    for index, row in enumerate(rollout.rows):
        if (length := sum(len(segment.token_ids) for segment in row)) > longest:
            yield f"row {index}: {length} tokens, of {longest}"
    for number, turn in enumerate(rollout.turns):
        most = min(config.rollout.max_turn_tokens, longest - turn.prompt_tokens)
        budget = most if turn.asked_tokens is None else min(most, turn.asked_tokens)
        cut = turn.finish_reason == "length"
        last = program or turn is rollout.turns[-1]  # a program has several conversations
        if turn.finish_reason not in ("stop", "length") or (cut and not last):
            yield f"turn {number}: it went on after finish_reason {turn.finish_reason!r}"
        if turn.asked_tokens is not None and not program:
            yield f"turn {number}: nobody could ask for {turn.asked_tokens} tokens"
        if turn.replaced and program:
            yield f"turn {number}: a program's turns stay whole, and {len(turn.replaced)} are gone"
        if turn.sampled_tokens > budget or (cut and turn.sampled_tokens < budget):
            yield (
                f"turn {number}: {turn.sampled_tokens} tokens, finish_reason "
                f"{turn.finish_reason!r}, but its budget was {budget}"
            )


def _span_faults(rollout: Rollout, *, whole: bool) -> Iterator[str]:
    """What a world gives is for the turn before it: for all of it, but where a template cut it."""
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


def _wrong_ends(rollout: Rollout, config: TrainConfig) -> Iterator[str]:
    """Why a rollout that the machine did not break cannot have ended so."""
    status, stats, limits = rollout.status, rollout.stats, config.rollout
    last_row = rollout.rows[-1]
    told = bool(last_row) and not last_row[-1].sampled  # something was said after its last turn
    cut = bool(rollout.turns) and rollout.turns[-1].finish_reason == "length"
    said, user = stats.get("said", 0.0), config.env.user
    acted = stats["tool_calls"] + stats["malformed"] + stats["refused_calls"] + said
    if rollout.answer is not None and status is not Status.COMPLETED:
        yield "it answered, which completes it"
    if not rollout.turns and status is not Status.TIMED_OUT:
        yield "no turn was played"
    if cut and status is not Status.TRUNCATED_LENGTH:
        yield "its last turn was cut at its budget"
    if acted < len(rollout.turns) - 1:
        yield f"{acted:g} actions in {len(rollout.turns)} turns"
    if user.mode != "nobody" and said > user.max_replies + 1:
        yield f"{said:g} turns were said to the user, of env.user.max_replies {user.max_replies}"
    full = sum(len(s.token_ids) for s in last_row) >= max_length(rollout, config)
    if status is Status.COMPLETED and told:
        yield "it was told something after its last turn"
    if status is Status.TRUNCATED_TURNS and not (told and len(rollout.turns) == limits.max_turns):
        yield f"{len(rollout.turns)} turns of {limits.max_turns}"
    if status is Status.TRUNCATED_LENGTH and not cut:
        if told and not full:
            yield "neither its last turn was cut, nor is its row full"
        if not told and acted < len(rollout.turns):
            yield "its last turn was whole and asked for nothing"
    most = [m for m in (limits.max_tool_calls, limits.max_calls_of.get("python")) if m is not None]
    over = max(0.0, stats["tool_calls"] - min(most, default=math.inf))  # a console's submissions
    if status is Status.TRUNCATED_CALLS and stats["refused_calls"] + over < 2:
        yield f"{stats['refused_calls']:g} calls were refused"
    unlimited = limits.max_tool_calls is None and not limits.max_calls_of
    if status is Status.TRUNCATED_CALLS and unlimited:
        yield "calls have no limit"
    least = limits.max_malformed
    if status is Status.MALFORMED and (least is None or stats["malformed"] < least):
        yield f"{stats['malformed']:g} malformed actions, of rollout.max_malformed {least}"
    if status is Status.TIMED_OUT and limits.max_seconds is None:
        yield "rollout.max_seconds is not set"


def _wrong_program_ends(rollout: Rollout, config: TrainConfig) -> Iterator[str]:
    """The same of a program's, which ends when it likes: what the endpoint refused it is recorded
    in no token, but a budget that ended it was spent.
    """
    status, turns, limits = rollout.status, rollout.turns, config.rollout
    cut = any(
        turn.finish_reason == "length" and turn.sampled_tokens == limits.max_turn_tokens
        for turn in turns
    )
    if not turns and status is not Status.TIMED_OUT:
        yield "no turn was played"
    frozen, tokens = (rollout.stats.get(f"frozen_{of}", 0.0) for of in ("turns", "tokens"))
    if frozen > limits.max_turns or tokens > frozen * limits.max_turn_tokens:
        yield f"{frozen:g} turns of {tokens:g} tokens were kept out of it"
    ended = (Status.TRUNCATED_LENGTH, Status.TRUNCATED_TURNS, Status.TIMED_OUT)
    if cut and status not in ended:
        yield "a turn was cut at the run's budget"
    asked = len(turns) + rollout.stats.get("undelivered", 0.0)
    if status is Status.TRUNCATED_TURNS and asked < limits.max_turns:
        yield f"{asked:g} turns of {limits.max_turns}"
    if status in (Status.TRUNCATED_CALLS, Status.MALFORMED):
        yield "no program ends so"

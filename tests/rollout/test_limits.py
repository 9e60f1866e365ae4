"""Budgets of a rollout: exactly what fits, nothing that is one over, and zero is a budget."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from agentgrpo.actions import Action, CallTools, Malformed, RunCode, Say, ToolCall
from agentgrpo.agents.code import CodeAgent
from agentgrpo.config import RolloutConfig
from agentgrpo.rollout.limits import TREATMENTS, RolloutBudget, called_tools, treatment_of
from agentgrpo.types import Rollout, Status, Task, Treatment
from tests.playing import CHAT, EOT, TOKENIZER, sampled, says
from tests.rollout.stubs import StubEnv, Turn

AGENT = CodeAgent(system_prompt="S")
TASK = Task(id="t", messages=({"role": "user", "content": "Q"},), spec={})
PAGE = Path(__file__).parents[2] / "docs" / "rollouts.md"


def play(*turns: str | Turn, env: StubEnv | None = None, **config: Any) -> Rollout:
    groups, _ = sampled(says(*turns), AGENT, env or StubEnv(), [TASK], **config)
    return groups[0].rollouts[0]


def told(rollout: Rollout) -> list[str]:
    """What the policy was shown after its turns."""
    texts = [TOKENIZER.decode(s.token_ids) for s in rollout.segments[1:] if not s.sampled]
    return [
        text.partition("user\n")[2].removesuffix(f"{EOT}\n<|im_start|>assistant\n")
        for text in texts
    ]


CALL = "<code>1</code>"
DONE = f"Answer: 1{EOT}"


@pytest.mark.parametrize(
    ("limit", "status", "executed", "refused"),
    [
        (0, Status.TRUNCATED_CALLS, 0, 2),
        (1, Status.TRUNCATED_CALLS, 1, 2),
        (2, Status.COMPLETED, 2, 1),
        (3, Status.COMPLETED, 3, 0),
        (None, Status.COMPLETED, 3, 0),
    ],
)
@pytest.mark.parametrize("by_tool", [True, False])
def test_calls_over_the_limit_are_not_made_and_the_second_ends_the_rollout(
    limit: int | None, status: Status, executed: int, refused: int, by_tool: bool
) -> None:
    if by_tool:
        limits: dict[str, Any] = {"max_calls_of": {} if limit is None else {"python": limit}}
    else:
        limits = {"max_tool_calls": limit}
    env = StubEnv()
    played = play(CALL, CALL, CALL, DONE, env=env, **limits)
    assert played.status is status
    assert len(env.executed) == executed == played.stats["tool_calls"]
    assert played.stats["refused_calls"] == refused
    if refused:
        which = "python " if by_tool else ""
        assert told(played)[executed] == (
            f"Error: not run. 0 {which}calls left, 1 asked for. Answer with what you have."
        )


def test_the_calls_of_one_turn_are_made_all_or_none() -> None:
    budget = RolloutBudget(RolloutConfig(max_tool_calls=3, max_calls_of={"b": 1}), 0, 99)
    a, b = ToolCall("a", {}), ToolCall("b", {})
    assert budget.refuse(CallTools((a, b))) is None
    said = budget.refuse(CallTools((a, b)))
    assert said is not None
    assert said.startswith("Error: not run. 0 b calls left, 1 asked for")
    assert budget.end(0) is None
    two = budget.refuse(CallTools((a, a)))
    assert two is not None
    assert two.startswith("Error: not run. 1 call left, 2 asked for")
    assert budget.calls == {"a": 1, "b": 1}
    assert budget.end(0) is Status.TRUNCATED_CALLS


@pytest.mark.parametrize(
    ("action", "names"),
    [
        (RunCode("1"), ("python",)),
        (RunCode("ls", language="shell"), ("shell",)),
        (CallTools((ToolCall("a", {}), ToolCall("a", {}))), ("a", "a")),
        (Say("hello"), ()),
        (Malformed("x"), ()),
    ],
)
def test_message_to_the_user_is_no_call(action: Action, names: tuple[str, ...]) -> None:
    assert called_tools(action) == names
    if not names:
        assert RolloutBudget(RolloutConfig(max_tool_calls=0), 0, 99).refuse(action) is None


BAD = f"<code>1{EOT}"


@pytest.mark.parametrize(
    ("turns", "limit", "status"),
    [
        ([BAD], 1, Status.MALFORMED),
        ([BAD, DONE], 2, Status.COMPLETED),
        ([BAD, BAD], 2, Status.MALFORMED),
        ([BAD, CALL, BAD, DONE], 2, Status.COMPLETED),  # not in a row
        ([BAD] * 5 + [DONE], None, Status.COMPLETED),
    ],
)
def test_malformed_actions_in_a_row(turns: list[str], limit: int | None, status: Status) -> None:
    played = play(*turns, max_malformed=limit)
    assert played.status is status
    assert played.stats["turns"] == len(turns)


PROMPT = len(
    CHAT.prompt_ids([{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}])
)
AFTER_CALL = len(CALL) + len(
    CHAT.observation_ids([{"role": "user", "content": "out of 1"}], last_id=None)
)


@pytest.mark.parametrize(
    ("limit", "status", "length"),
    [
        (len(CALL) - 1, Status.TRUNCATED_LENGTH, len(CALL) - 1),  # the turn was cut
        (len(CALL), Status.TRUNCATED_LENGTH, len(CALL)),  # no room for the answer
        (AFTER_CALL - 1, Status.TRUNCATED_LENGTH, len(CALL)),  # the answer is one over: left out
        (AFTER_CALL, Status.TRUNCATED_LENGTH, AFTER_CALL),  # it fits exactly: kept
        (AFTER_CALL + 1, Status.TRUNCATED_LENGTH, AFTER_CALL + 1),
        (AFTER_CALL + 10, Status.COMPLETED, AFTER_CALL + 10),
        (AFTER_CALL + 11, Status.COMPLETED, AFTER_CALL + 10),
    ],
)
def test_the_response_never_exceeds_its_tokens(limit: int, status: Status, length: int) -> None:
    env = StubEnv()
    played = play(CALL, f"Answer: 1{EOT}", env=env, max_response_tokens=limit)
    assert played.status is status
    assert len(played.token_ids) == PROMPT + length
    assert len(env.executed) == (limit >= len(CALL))


TEXT = "".join(chr(ord("0") + i % 75) for i in range(200))


@pytest.mark.parametrize("limit", [0, 1, 30, 60, 115, 199, 200, 201])
@pytest.mark.parametrize("keep", ["ends", "head", "tail"])
def test_a_long_answer_is_cut_in_tokens_and_says_so(keep: Any, limit: int) -> None:
    cut = CHAT.clip(TEXT, limit, keep)
    assert len(CHAT.text_ids(cut)) <= limit
    if limit >= 200:
        assert cut == TEXT
        return
    note = re.search(r" \.\.\. \[\d+ tokens cut\] \.\.\. ", cut)
    if note is None:  # the note would have taken more than half of it
        assert limit < 60
        assert cut == (TEXT[200 - limit :] if keep == "tail" else TEXT[:limit])
        return
    head, tail = cut[: note.start()], cut[note.end() :]
    assert limit >= 60
    assert len(cut) == limit
    assert TEXT.startswith(head)
    assert TEXT.endswith(tail)
    assert f"[{200 - len(head) - len(tail)} tokens cut]" in note.group()
    assert bool(head) == (keep != "tail")
    assert bool(tail) == (keep != "head")
    if keep == "ends":
        assert 0 <= len(head) - len(tail) <= 1


@pytest.mark.parametrize("limit", range(9))
@pytest.mark.parametrize("keep", ["ends", "head", "tail"])
def test_no_character_is_shown_in_part(limit: int, keep: Any) -> None:
    """The tokens here are bytes, so that most cuts would split one of these characters."""
    cut = CHAT.clip("äöü€", limit, keep)
    assert "\ufffd" not in cut
    assert len(CHAT.text_ids(cut)) <= limit
    assert "äöü€".endswith(cut) if keep == "tail" else "äöü€".startswith(cut)


@pytest.mark.parametrize("keep", ["ends", "head", "tail"])
def test_the_config_says_what_is_kept(keep: str) -> None:
    played = play(
        f"<code>{TEXT}</code>",
        DONE,
        max_observation_tokens=80,
        keep_observation=keep,
        max_turn_tokens=999,
    )
    assert told(played) == [CHAT.clip(f"out of {TEXT}", 80, cast(Any, keep))]


def test_a_rollout_that_is_late_ends_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("agentgrpo.rollout.limits.time.monotonic", lambda: now)

    def passes(seconds: float) -> Callable[..., None]:
        def pass_time(*_: object) -> None:
            nonlocal now
            now += seconds

        return pass_time

    def late(limit: float, *turns: str | Turn, in_tool: float = 0, per_step: float = 0) -> Rollout:
        engine = says(*turns, on_step=passes(per_step))
        env = StubEnv(on_call=passes(in_tool))
        played = sampled(engine, AGENT, env, [TASK], max_seconds=limit)[0][0].rollouts[0]
        assert not engine.running
        env.assert_all_closed_once()
        return played

    decoding = late(3, Turn(DONE, steps=99), per_step=1)
    assert (decoding.status, decoding.stats["turns"]) == (Status.TIMED_OUT, 0)
    calling = late(3, CALL, DONE, in_tool=3)
    assert (calling.status, calling.stats["tool_calls"]) == (Status.TIMED_OUT, 1)
    assert calling.treatment is Treatment.DROP
    assert not calling.in_baseline
    assert late(3, CALL, DONE, in_tool=2.9).status is Status.COMPLETED


def test_S2_4_every_end_has_a_treatment_and_the_config_may_change_it() -> None:
    assert TREATMENTS.keys() == set(Status)
    config = RolloutConfig(treatment={Status.TRUNCATED_LENGTH: Treatment.MASK})
    assert treatment_of(Status.TRUNCATED_LENGTH, config) is Treatment.MASK
    assert treatment_of(Status.COMPLETED, config) is Treatment.TRAIN
    masked = play(Turn("x", cut=True), treatment={"truncated_length": "mask"})
    assert (masked.in_baseline, masked.trained) == (True, False)


BROKEN = "<code>broken machine</code>"
ENDS: dict[Status, tuple[list[str | Turn], dict[str, Any]]] = {
    Status.COMPLETED: ([CALL, DONE], {}),
    Status.TRUNCATED_LENGTH: ([Turn("<code>1", cut=True)], {}),
    Status.TRUNCATED_TURNS: ([CALL] * 2, {"max_turns": 2}),
    Status.TRUNCATED_CALLS: ([CALL] * 2, {"max_tool_calls": 0}),
    Status.MALFORMED: (["oh</code>"] * 2, {"max_malformed": 2}),
    Status.TIMED_OUT: ([Turn(CALL, steps=99)], {"max_seconds": 1e-6}),
    Status.INFRA_ERROR: ([BROKEN], {}),
}


@pytest.mark.parametrize("status", Status)
def test_S2_4_every_end_is_a_status_of_its_own_treated_as_the_page_says(status: Status) -> None:
    turns, config = ENDS[status]
    played = play(*turns, **config)
    assert played.status is status
    (row,) = re.findall(rf"^\| `{status}` \|.*\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert row.split(",")[0] == played.treatment == TREATMENTS[status]
    kept = played.treatment is Treatment.TRAIN
    assert (played.in_baseline, played.trained) == (kept, kept)


def test_broken_rollout_is_retried_then_dropped() -> None:
    env = StubEnv()
    played = play(BROKEN, CALL, DONE, env=env, max_retries=1)
    assert (played.status, played.stats["turns"], played.error) == (Status.COMPLETED, 2, None)
    env.assert_all_closed_once()
    assert len(env.episodes) == 2
    gone = play(BROKEN, BROKEN, BROKEN, max_retries=2)
    assert (gone.status, gone.in_baseline) == (Status.INFRA_ERROR, False)
    assert gone.error == "no session for broken machine"


def test_any_end_may_be_played_again() -> None:
    again = play(
        Turn("x", cut=True), DONE, treatment={Status.TRUNCATED_LENGTH: "retry"}, max_retries=1
    )
    assert again.status is Status.COMPLETED
    twice = play(
        *[Turn("x", cut=True)] * 2, treatment={Status.TRUNCATED_LENGTH: "retry"}, max_retries=1
    )
    assert (twice.status, twice.in_baseline) == (Status.TRUNCATED_LENGTH, False)


@pytest.mark.parametrize("reason", ["error", "abort", "repetition", "None"])
def test_a_request_that_the_engine_gave_up_is_the_machines_failure(reason: str) -> None:
    played = play(Turn(DONE, finish_reason=reason))
    assert played.status is Status.INFRA_ERROR
    assert played.error == f"the engine gave up a request: finish_reason {reason!r}"
    assert not any(s.sampled for s in played.segments)
    assert play(Turn(DONE, finish_reason=reason), DONE, max_retries=1).status is Status.COMPLETED


def test_retry_has_another_seed() -> None:
    engine = says(BROKEN, DONE)
    sampled(engine, AGENT, StubEnv(), [TASK], max_retries=1)
    first, second = engine.requests
    assert first.prompt.tolist() == second.prompt.tolist()
    assert first.options["seed"] != second.options["seed"]


def test_no_budget_of_tokens_reaches_beyond_the_context() -> None:
    budget = RolloutBudget(RolloutConfig(max_response_tokens=96), 5, 100)
    assert budget.max_length == 100
    assert RolloutBudget(RolloutConfig(max_response_tokens=94), 5, 100).max_length == 99
    assert budget.turn_tokens(99) == 1
    assert (budget.fits(100), budget.fits(101)) == (True, False)
    assert budget.end(100) is Status.TRUNCATED_LENGTH

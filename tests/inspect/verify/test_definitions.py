"""The proof's own definitions, at their edges: values worked out by hand, and small rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentgrpo.inspect.verify.advantages import NORMALISERS, advantage_faults
from agentgrpo.inspect.verify.status import status_faults
from agentgrpo.inspect.verify.tokens import rollout_faults
from agentgrpo.kernels.objective import LOSSES
from agentgrpo.learn.advantages import assign_advantages
from agentgrpo.types import COUNTS, Group, Rollout, SpanReward, Status, Turn
from tests.given import TASK, a_config, a_rollout

LOSS = a_config("loss.scale_rewards=none").loss


def faults_of(rollouts: Sequence[Rollout], **loss: Any) -> list[str]:
    group = Group(task=TASK, rollouts=list(rollouts))
    return [said for *_, said in advantage_faults([group], LOSS.model_copy(update=loss))]


def test_every_shipped_loss_has_its_normaliser_here_too() -> None:
    assert {name: loss.normaliser for name, loss in LOSSES.items()} == NORMALISERS


@pytest.mark.parametrize(("apart", "advantage"), [(0.9e-6, 0.0), (2e-6, 1e-6)])
def test_rewards_that_differ_by_rounding_teach_nothing(apart: float, advantage: float) -> None:
    rollouts = [
        a_rollout(rewards={"answer": 1.0 + sign * apart / 2}, advantage=sign * advantage)
        for sign in (-1, 1)
    ]
    assert faults_of(rollouts) == []
    for rollout in rollouts:
        rollout.advantage = rollout.advantage + 1e-7
    assert len(faults_of(rollouts)) == 2


def test_a_span_is_no_credit_to_the_turn_that_begins_where_it_ends() -> None:
    """Turns are tokens [2, 4) and [4, 6); the span is all of the first."""
    rollouts = [
        a_rollout([[-1.0, -1.0]] * 2, span_rewards=[SpanReward(2, 4, "ran", value)],
                  advantage=sign * 1.0, segment_advantages=[0.0, sign * 1.0, 0.0])
        for sign, value in ((-1, 0.0), (1, 2.0))
    ]  # fmt: skip
    assert faults_of(rollouts, span_credit="return_to_go") == []
    for rollout in rollouts:
        rollout.segment_advantages = [0.0, rollout.advantage, rollout.advantage]
    wrong = faults_of(rollouts, span_credit="return_to_go")
    assert wrong == ["segment_advantages are not those that its rewards give"] * 2


def test_a_turn_without_a_token_is_a_turn() -> None:
    """A sampler of one's own may record one; the learner has a number for it too."""
    rollouts = [
        a_rollout([[], [-1.0, -1.0]], span_rewards=[SpanReward(2, 4, "ran", value)])
        for value in (0.0, 2.0)
    ]
    for credit in ("turn", "return_to_go"):
        loss = LOSS.model_copy(update={"span_credit": credit})
        assign_advantages([Group(task=TASK, rollouts=rollouts)], loss)
        assert rollouts[1].segment_advantages is not None
        assert faults_of(rollouts, span_credit=credit) == []


def played(sampled: int, finish_reason: str, status: Status, prompt: int = 2) -> Rollout:
    rollout = a_rollout([[-1.0] * sampled], status=status)
    rollout.stats = dict.fromkeys(COUNTS, 0.0) | {"turns": 1.0}
    rollout.turns = [
        Turn(prompt_tokens=prompt, prompt_hash="", sampled_tokens=sampled, sampled_hash="",
             finish_reason=finish_reason)
    ]  # fmt: skip
    return rollout


@pytest.mark.parametrize(
    ("sampled", "finish_reason", "says"),
    [
        (8, "stop", ""),
        (9, "stop", "turn 0: 9 tokens, finish_reason 'stop', but its budget was 8"),
        (8, "length", ""),
        (7, "length", "turn 0: 7 tokens, finish_reason 'length', but its budget was 8"),
        (8, "abort", "turn 0: it went on after finish_reason 'abort'"),
    ],
)
def test_a_turn_keeps_to_its_budget(sampled: int, finish_reason: str, says: str) -> None:
    config = a_config("rollout.max_turn_tokens=8", "engine.max_model_len=128")
    status = Status.TRUNCATED_LENGTH if finish_reason == "length" else Status.COMPLETED
    found = list(status_faults(played(sampled, finish_reason, status), config))
    assert found == ([says] if says else [])


def test_a_turns_budget_is_what_is_left_of_the_row() -> None:
    config = a_config("rollout.max_turn_tokens=8", "rollout.max_response_tokens=6")
    assert list(status_faults(played(6, "length", Status.TRUNCATED_LENGTH), config)) == []
    (fault,) = status_faults(played(5, "length", Status.TRUNCATED_LENGTH), config)
    assert "but its budget was 6" in fault


def test_what_the_machine_broke_was_not_rewarded() -> None:
    config = a_config("rollout.max_turn_tokens=8")
    rollout = played(3, "stop", Status.INFRA_ERROR)
    rollout.error = "gone"
    assert list(status_faults(rollout, config)) == []
    rollout.rewards = {"answer": 1.0}
    assert list(status_faults(rollout, config)) == ["rewards of a rollout that the machine broke"]
    rollout.rewards, rollout.span_rewards = {}, [SpanReward(2, 5, "ran", 1.0)]
    assert "rewards of a rollout that the machine broke" in list(status_faults(rollout, config))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("r.span_rewards = [SpanReward(-1, 2, 'x', 1.0)]", "reward 'x': tokens [-1, 2) of 4"),
        ("r.span_rewards = [SpanReward(3, 5, 'x', 1.0)]", "reward 'x': tokens [3, 5) of 4"),
        ("r.span_rewards = [SpanReward(3, 3, 'x', 1.0)]", "reward 'x': tokens [3, 3) of 4"),
        ("del r.segments[0]", "does not begin with a prompt"),
        ("r.segments.clear()", "does not begin with a prompt"),
        ("r.segments[0].token_ids[0] = -1", "segment 0: token_ids has -1, not an id"),
        ("r.segments[0].token_ids[0] = 11", "segment 0: token_ids has 11, of 11 ids"),
        ("r.segments[1].logprobs[0] = 1.0", "segment 1: logprobs has 1.0, not a log-probability"),
        ("r.segments.insert(0, r.segments[0])", "segment 1: given right after segment 0"),
    ],
)
def test_the_form_of_a_rollouts_tokens(change: str, says: str) -> None:
    rollout = a_rollout([[-1.0, -1.0]])
    assert list(rollout_faults(rollout, accounted=False, vocab_size=11)) == []
    exec(change, {"r": rollout, "SpanReward": SpanReward})
    faults = list(rollout_faults(rollout, accounted=False, vocab_size=11))
    assert any(says in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("logp", "entropy", "fits"),
    [
        (-1.0, 0.66, True),  # h(e^-1) = 0.6579...
        (-1.0, 0.64, False),
        (-1.0, 2.11, True),  # 0.6579 + 0.6321 ln 10 = 2.1134
        (-1.0, 2.13, False),
        (0.0, 0.0, True),
        (0.0, 0.1, False),
    ],
)
def test_an_entropy_fits_the_probability_of_its_token(
    logp: float, entropy: float, fits: bool
) -> None:
    """Between h(p) and h(p) + (1 - p) ln(V - 1), worked out by hand for V = 11."""
    rollout = a_rollout([[logp]])
    rollout.learner_logprobs = [None, np.array([logp], np.float32)]
    rollout.entropies = [None, np.array([entropy], np.float32)]
    faults = list(rollout_faults(rollout, accounted=False, vocab_size=11))
    says = "entropies: a distribution that gives its token so much has another entropy"
    assert faults == ([] if fits else [says])
    assert not list(rollout_faults(rollout, accounted=False, vocab_size=None))


def accounted() -> Rollout:
    """Two turns of two tokens, with the engine's account and what a learner made of them."""
    rollout = a_rollout([[-1.0, -1.0]] * 2)
    ids, said = rollout.token_ids, np.full(2, -1.0, np.float32)
    rollout.turns = [Turn.of(ids[:at], ids[at : at + 2], "stop") for at in (2, 4)]
    rollout.learner_logprobs, rollout.entropies = [None, said, said], [None, said + 2, said + 2]
    return rollout


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("r.turns[1] = replace(t, row=1)", "turn 1: row 1 of 1"),
        ("r.turns.append(t)", "2 sampled segments, but the engine played 3 turns"),
        ("r.turns.pop()", "2 sampled segments, but the engine played 1 turns"),
        ("r.turns[1] = replace(t, prompt_tokens=3)", "sampled from token 4 on"),
        ("r.turns[1] = replace(t, prompt_tokens=5)", "sampled from token 4 on"),
        ("r.turns[1] = replace(t, prompt_hash='')", "turn 1: the engine's prompt is not the 4"),
        ("r.turns[1] = replace(t, sampled_tokens=3)", "2 tokens, but the engine sampled 3"),
        ("r.turns[1] = replace(t, sampled_hash='')", "turn 1: its tokens are not those that"),
        ("r.turns[1] = replace(t, replaced=[7])", "turn 1: 3 tokens, but the engine sampled 2"),
        ("r.entropies = None", "one is recorded without the other"),
        ("r.segments[1].logprobs[0] = nan", "logprobs has nan, not a log-probability"),
        ("r.learner_logprobs[1] = array([-1, nan], 'f')", "learner_logprobs: a number that can be"),
        ("r.learner_logprobs[1] = array([-1, -inf], 'f')", "learner_logprobs: a number that can"),
        ("r.learner_logprobs[1] = array([-1, 0.5], 'f')", "learner_logprobs: a number that can be"),
        ("r.entropies[1] = array([1, -0.5], 'f')", "entropies: a number that can be none"),
        ("r.entropies[1] = array([1, inf], 'f')", "entropies: a number that can be none"),
        ("r.entropies[1] = array([1], 'f')", "entropies: not one number for each sampled token"),
    ],
)
def test_tokens_against_what_the_engine_and_the_learner_said(change: str, says: str) -> None:
    rollout = accounted()
    assert list(rollout_faults(rollout, vocab_size=30)) == []
    names = {"replace": replace, "t": rollout.turns[1], "array": np.array}
    exec(change, names | {"r": rollout, "nan": np.nan, "inf": np.inf})
    faults = list(rollout_faults(rollout, vocab_size=30))
    assert any(says in fault for fault in faults), faults

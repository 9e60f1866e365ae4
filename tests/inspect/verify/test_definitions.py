"""Edge cases of verify's own definitions: hand-computed values and small rollouts."""

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
    return [fault for *_, fault in advantage_faults([group], LOSS.model_copy(update=loss))]


def test_normaliser_table_covers_every_shipped_loss() -> None:
    assert {name: loss.normaliser for name, loss in LOSSES.items()} == NORMALISERS


@pytest.mark.parametrize(("apart", "advantage"), [(0.9e-6, 0.0), (2e-6, 1e-6)])
def test_rewards_that_differ_by_rounding_give_no_advantage(apart: float, advantage: float) -> None:
    rollouts = [
        a_rollout(rewards={"answer": 1.0 + sign * apart / 2}, advantage=sign * advantage)
        for sign in (-1, 1)
    ]
    assert faults_of(rollouts) == []
    for rollout in rollouts:
        rollout.advantage = rollout.advantage + 1e-7
    assert len(faults_of(rollouts)) == 2


def test_span_gives_no_credit_to_next_turn() -> None:
    """Turns are tokens [2, 4) and [4, 6); the span covers the first."""
    rollouts = [
        a_rollout([[-1.0, -1.0]] * 2, span_rewards=[SpanReward(2, 4, "ran", value)],
                  advantage=sign * 1.0, segment_advantages=[0.0, sign * 1.0, 0.0])
        for sign, value in ((-1, 0.0), (1, 2.0))
    ]  # fmt: skip
    assert faults_of(rollouts, span_credit="return_to_go") == []
    for rollout in rollouts:
        rollout.segment_advantages = [0.0, rollout.advantage, rollout.advantage]
    wrong = faults_of(rollouts, span_credit="return_to_go")
    assert wrong == ["segment_advantages do not follow from its rewards"] * 2


def test_turn_without_tokens_counts_as_turn() -> None:
    """A user's own sampler may record one; the learner has an entry for it too."""
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


TURN, RESPONSE = "rollout.max_turn_tokens=8", "rollout.max_response_tokens=6"


@pytest.mark.parametrize(
    ("limits", "sampled", "finish_reason", "message"),
    [
        (TURN, 8, "stop", ""),
        (TURN, 9, "stop", "turn 0: 9 tokens with finish_reason 'stop', but the budget was 8"),
        (TURN, 8, "length", ""),
        (TURN, 7, "length", "turn 0: 7 tokens with finish_reason 'length', but the budget was 8"),
        (TURN, 8, "abort", "turn 0: not the end, but finish_reason is 'abort'"),
        (f"{TURN} {RESPONSE}", 6, "length", ""),
        (
            f"{TURN} {RESPONSE}", 5, "length",
            "turn 0: 5 tokens with finish_reason 'length', but the budget was 6",
        ),
    ],
)  # fmt: skip
def test_turn_budget_is_checked(
    limits: str, sampled: int, finish_reason: str, message: str
) -> None:
    config = a_config(*limits.split(), "engine.max_model_len=128")
    status = Status.TRUNCATED_LENGTH if finish_reason == "length" else Status.COMPLETED
    faults = list(status_faults(played(sampled, finish_reason, status), config))
    assert faults == ([message] if message else [])


def test_infra_error_with_rewards_is_a_fault() -> None:
    config = a_config("rollout.max_turn_tokens=8")
    rollout = played(3, "stop", Status.INFRA_ERROR)
    rollout.error = "gone"
    assert list(status_faults(rollout, config)) == []
    rollout.rewards = {"answer": 1.0}
    fault = "has rewards, but its status is infra_error"
    assert list(status_faults(rollout, config)) == [fault]
    rollout.rewards, rollout.span_rewards = {}, [SpanReward(2, 5, "ran", 1.0)]
    assert fault in list(status_faults(rollout, config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("r.span_rewards = [SpanReward(-1, 2, 'x', 1.0)]", "reward 'x': tokens [-1, 2), but"),
        ("r.span_rewards = [SpanReward(3, 5, 'x', 1.0)]", "reward 'x': tokens [3, 5), but"),
        ("r.span_rewards = [SpanReward(3, 3, 'x', 1.0)]", "reward 'x': tokens [3, 3), but"),
        ("del r.segments[0]", "does not begin with a prompt"),
        ("r.segments.clear()", "does not begin with a prompt"),
        ("r.segments[0].token_ids[0] = -1", "segment 0: token_ids has -1, which is no token id"),
        ("r.segments[0].token_ids[0] = 11", "token_ids has 11, but the vocabulary has 11"),
        ("r.segments[1].logprobs[0] = 1.0", "segment 1: logprobs has 1.0, which is no log-prob"),
        ("r.segments.insert(0, r.segments[0])", "segment 1: no turn between it and segment 0"),
    ],
)
def test_malformed_tokens_are_named(change: str, message: str) -> None:
    rollout = a_rollout([[-1.0, -1.0]])
    assert list(rollout_faults(rollout, accounted=False, vocab_size=11)) == []
    exec(change, {"r": rollout, "SpanReward": SpanReward})
    faults = list(rollout_faults(rollout, accounted=False, vocab_size=11))
    assert any(message in fault for fault in faults), faults


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
def test_entropy_is_bounded_by_token_probability(logp: float, entropy: float, fits: bool) -> None:
    """Between h(p) and h(p) + (1 - p) ln(V - 1), worked out by hand for V = 11."""
    rollout = a_rollout([[logp]])
    rollout.learner_logprobs = [None, np.array([logp], np.float32)]
    rollout.entropies = [None, np.array([entropy], np.float32)]
    faults = list(rollout_faults(rollout, accounted=False, vocab_size=11))
    message = "entropies: impossible with the log-probability of the token"
    assert faults == ([] if fits else [message])
    assert not list(rollout_faults(rollout, accounted=False, vocab_size=None))


def accounted() -> Rollout:
    """Two turns of two tokens, with the engine's hashes and the learner's columns."""
    rollout = a_rollout([[-1.0, -1.0]] * 2)
    ids, logp = rollout.token_ids, np.full(2, -1.0, np.float32)
    rollout.turns = [Turn.of(ids[:at], ids[at : at + 2], "stop") for at in (2, 4)]
    rollout.learner_logprobs, rollout.entropies = [None, logp, logp], [None, logp + 2, logp + 2]
    return rollout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("r.turns[1] = replace(t, row=1)", "turn 1: row 1, but there are 1 rows"),
        ("r.turns.append(t)", "2 sampled segments, but 3 turns of the engine"),
        ("r.turns.pop()", "2 sampled segments, but 1 turns of the engine"),
        ("r.turns[1] = replace(t, prompt_tokens=3)", "starts at token 4, but"),
        ("r.turns[1] = replace(t, prompt_tokens=5)", "starts at token 4, but"),
        ("r.turns[1] = replace(t, prompt_hash='')", "turn 1: the engine's prompt is not the 4"),
        ("r.turns[1] = replace(t, sampled_tokens=3)", "2 tokens, but the engine sampled 3"),
        ("r.turns[1] = replace(t, sampled_hash='')", "turn 1: its tokens are not those that"),
        ("r.turns[1] = replace(t, replaced=[7])", "turn 1: 3 tokens, but the engine sampled 2"),
        ("r.entropies = None", "one is recorded without the other"),
        ("r.segments[1].logprobs[0] = nan", "logprobs has nan, which is no log-probability"),
        ("r.learner_logprobs[1] = array([-1, nan], 'f')", "learner_logprobs: an impossible number"),
        ("r.learner_logprobs[1] = array([-1, -inf], 'f')", "learner_logprobs: an impossible"),
        ("r.learner_logprobs[1] = array([-1, 0.5], 'f')", "learner_logprobs: an impossible number"),
        ("r.entropies[1] = array([1, -0.5], 'f')", "entropies: an impossible number"),
        ("r.entropies[1] = array([1, inf], 'f')", "entropies: an impossible number"),
        ("r.entropies[1] = array([1], 'f')", "entropies: expected one number for each sampled"),
    ],
)
def test_tokens_are_compared_with_engine_and_learner(change: str, message: str) -> None:
    rollout = accounted()
    assert list(rollout_faults(rollout, vocab_size=30)) == []
    names = {"replace": replace, "t": rollout.turns[1], "array": np.array}
    exec(change, names | {"r": rollout, "nan": np.nan, "inf": np.inf})
    faults = list(rollout_faults(rollout, vocab_size=30))
    assert any(message in fault for fault in faults), faults

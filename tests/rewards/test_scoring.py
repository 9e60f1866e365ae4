"""User-defined reward functions: arguments, return values and errors."""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgrpo.config import LossConfig, RewardConfig, TrainConfig
from agentgrpo.learn.advantages import assign_advantages
from agentgrpo.rewards.rollout_view import RolloutView
from agentgrpo.rewards.scoring import Scoring, reward_function
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.train.plugins import make_reward
from agentgrpo.train.prepare import make_scoring
from agentgrpo.types import Group, Rollout, Segment, SpanReward, Status, Task
from tests.given import a_rollout
from tests.playing import CHAT

MODULE = """
import asyncio
from agentgrpo.types import SpanReward

def half(view): return 0.5
def named(view): return {"a": 1.0, "b": -2.0}
def lines(view):
    return [SpanReward(*span, "turn", 1.0 + i) for i, span in enumerate(view.turn_spans)]
def wrote(view):
    return {"policy": float("answer" in view.text), "tool": float("SEEN" in view.text)}
def nothing(view): return None
def crash(view): raise KeyError("price") if view.answer == "bad" else ValueError("never")
def picky(view):
    if view.answer == "bad": raise KeyError("price")
    return 1.0
def text(view): return "high"
def leaves(view): raise SystemExit(0)
async def later(view):
    await asyncio.sleep(0)
    raise SystemExit(0)
async def in_task(view): await asyncio.gather(later(view))
def endless(view): return float("inf")
def beyond(view): return [SpanReward(0, 10**6, "turn", 1.0)]
async def slow(view):
    waiting.append(view.rollout)
    await asyncio.sleep(0)
    while len(waiting) < 6: await asyncio.sleep(0)
    return 1.0
waiting = []
answer = half
made = []
async def connected(view):
    loop = asyncio.get_running_loop()
    made.append(loop)
    answered = loop.create_future()
    made[0].call_soon(answered.set_result, 1.0)
    return await answered
"""


LEAVES = {
    "leaves": r"called sys\.exit\(0\)",
    "later": r"called sys\.exit\(0\)",
    "in_task": r"called sys\.exit\(0\)",
}


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("mine", None)


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode()


def encode(text: str, *, sampled: bool = False) -> Segment:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return Segment(ids, np.zeros(len(ids), np.float32) if sampled else None)


def played(answer: str | None = "36", **stats: float) -> Rollout:
    return Rollout(
        task=Task(id="q7", messages=(), spec={"answer": "36"}),
        segments=[
            encode("prompt"),
            encode("<code>1+</code>", sampled=True),
            encode("SEEN SyntaxError"),
            encode("the answer", sampled=True),
        ],
        status=Status.COMPLETED,
        answer=answer,
        stats={"turns": 2.0, "tool_calls": 4.0, "tool_errors": 1.0} | stats,
    )


def base(rollout: Rollout) -> dict[str, float]:
    return {"answer": float(rollout.answer == "36")}


def scored(
    functions: dict[str, float], *rollouts: Rollout, on_error: Any = "drop"
) -> list[Rollout]:
    rollouts_or_default = list(rollouts or [played()])
    config = RewardConfig(functions=functions, on_error=on_error)
    group = Group(task=rollouts_or_default[0].task, rollouts=rollouts_or_default)
    Scoring(base, config, decode).score([group])
    return rollouts_or_default


@pytest.mark.parametrize(
    ("functions", "rewards"),
    [
        ({}, {}),
        ({"mine:half": 3.0}, {"half": 1.5}),
        ({"mine:named": 0.5}, {"a": 0.5, "b": -1.0}),
        ({"mine:half": 1.0, "mine:named": 1.0}, {"half": 0.5, "a": 1.0, "b": -2.0}),
        ({"mine:wrote": 1.0}, {"policy": 1.0, "tool": 0.0}),
        ({"length": 1.0}, {"length": -0.025}),
        ({"exact": 1.0}, {"exact": 1.0}),
    ],
)
def test_functions_return_named_weighted_parts(
    functions: dict[str, float], rewards: dict[str, float]
) -> None:
    (rollout,) = scored(functions)
    assert rollout.rewards == pytest.approx({"answer": 1.0, **rewards})
    assert rollout.status is Status.COMPLETED


@pytest.mark.parametrize("answer", [" 36\n", "37", None, ""])
def test_exact_accepts_only_the_expected_text(answer: str | None) -> None:
    (rollout,) = scored({"exact": 1.0}, played(answer))
    assert rollout.rewards["exact"] == float(answer == " 36\n")


@pytest.mark.parametrize("sigma", ["sigma_tool", "sigma_length"])
def test_sigmas_decay_to_zero_at_the_last_step(sigma: str) -> None:
    """At each of five steps, the reward is computed with the decayed sigma."""
    settings = {"kind": "text", sigma: 2.0}
    values = {"model": "m", "out_dir": "o", "steps": 5, "reward": settings}
    config = TrainConfig.model_validate(values)
    scoring = make_scoring(config, make_reward(config.reward), CHAT.tokenizer)
    task = Task(id="t", messages=({"role": "user", "content": "Q"},), spec={"answer": "right"})
    efficiencies = []
    for step, share in enumerate([1.0, 0.75, 0.5, 0.25, 0.0]):
        rollouts = [
            a_rollout([[-1.0] * n], task=task, answer="right", stats={"tool_calls": float(n)})
            for n in (1, 3)
        ]
        scoring.score([Group(task=task, rollouts=rollouts)], step=step)
        efficiencies.append([r.rewards["answer_efficiency"] for r in rollouts])
        factors = [2.0 / (1.0 + math.exp(2.0 * share * z)) - 1.0 for z in (-1.0, 1.0)]
        assert efficiencies[-1] == pytest.approx(factors), step
    alone = a_rollout([[-1.0]], task=task, answer="right")
    scoring.score([Group(task=task, rollouts=[alone])])
    assert "answer_efficiency" not in alone.rewards, "an evaluation compares nobody"


def test_view_separates_turns_from_observations() -> None:
    view = RolloutView(played(), decode)
    assert view.turns == ("<code>1+</code>", "the answer")
    assert view.observations == ("SEEN SyntaxError",)
    assert view.turn_spans == ((6, 21), (37, 47))
    assert view.text == "<code>1+</code>\nthe answer"


def test_user_reward_gets_a_view_with_all_fields_of_the_rollout() -> None:
    def own(view: RolloutView) -> dict[str, float]:
        return {"wrote": float(view.turns[-1] == "the answer"), "sampled": view.num_sampled}

    rollout = played()
    Scoring(own, RewardConfig(), decode).score([Group(task=rollout.task, rollouts=[rollout])])
    assert rollout.rewards == {"wrote": 1.0, "sampled": 25.0}
    assert not hasattr(RolloutView(rollout, decode), "nosuch")
    assert copy.copy(RolloutView(rollout, decode)).status is Status.COMPLETED


def test_view_includes_turns_of_closed_rows() -> None:
    rollout = played()
    rollout.closed_rows = [[encode("old prompt"), encode("first", sampled=True)]]
    view = RolloutView(rollout, decode)
    assert view.turns == ("first", "<code>1+</code>", "the answer")
    assert view.observations == ("SEEN SyntaxError",)
    assert view.turn_spans[:2] == ((10, 15), (21, 36)), "counted through all rows"


def test_span_rewards_are_added_to_the_reward() -> None:
    (rollout,) = scored({"mine:lines": 0.5})
    assert rollout.span_rewards == [SpanReward(6, 21, "turn", 0.5), SpanReward(37, 47, "turn", 1.0)]
    assert rollout.reward == 1.0 + 1.5


@pytest.mark.parametrize(("earned", "solved"), [(0.8, True), (0.79, False)])
def test_solved_at_compares_the_sum_of_all_parts(earned: float, solved: bool) -> None:
    """Parts of the environment, of its steps and of functions, whatever their names."""
    rollout = played()
    rollout.rewards = {"environment": earned, "answer": 0.0}
    rollout.span_rewards = [SpanReward(6, 19, "step", 0.2)]
    config = RewardConfig(functions={"mine:half": 1.0}, solved_at=1.5)
    Scoring(lambda _: {}, config, decode).score([Group(task=rollout.task, rollouts=[rollout])])
    assert rollout.solved is solved


def test_async_functions_run_concurrently() -> None:
    rollouts = scored({"mine:slow": 1.0}, *(played() for _ in range(6)))
    assert [r.rewards["slow"] for r in rollouts] == [1.0] * 6


def test_async_functions_keep_one_event_loop_across_steps() -> None:
    """A judge's client, created at the first step, holds connections of its event loop."""
    scoring = Scoring(base, RewardConfig(functions={"mine:connected": 1.0}), decode)
    for _ in range(2):
        rollout = played()
        scoring.score([Group(task=rollout.task, rollouts=[rollout])])
        assert rollout.rewards["connected"] == 1.0, rollout.error


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("crash", "raised KeyError: 'price'"),
        ("text", "gave a wrong result: expected a finite number as text, got 'high'"),
        ("endless", "gave a wrong result: expected a finite number as endless, got inf"),
        ("beyond", r"gave a wrong result: expected a finite value on tokens within \[0, 47\)"),
        ("answer", "gave a wrong result: the reward has a part 'answer' already"),
    ],
)
def test_error_names_task_rollout_and_function(function: str, message: str) -> None:
    where = (
        rf"the reward function {function} {message}.* \(task 'q7', rollout 1, at .*mine.py:\d+\)"
    )
    fine, bad = played(), played("bad")
    fine.status = Status.INFRA_ERROR  # not asked at all
    scored({f"mine:{function}": 1.0}, fine, bad)
    assert bad.status is Status.INFRA_ERROR
    assert bad.error is not None
    assert re.match(where, bad.error), bad.error
    assert fine.error is None
    again = played("bad")
    with pytest.raises(UserCodeError, match=where):
        scored({f"mine:{function}": 1.0}, fine, again, on_error="raise")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [True, False], ids=["kind", "function"])
@pytest.mark.parametrize("function", LEAVES)
def test_function_that_calls_sys_exit_stops_the_run_with_an_error(
    kind: bool, function: str
) -> None:
    """Regression: it stopped the event loop of all rewards, and the run waited for ever."""
    rollouts = [played(), played()]
    config = RewardConfig(functions={} if kind else {f"mine:{function}": 1.0})
    reward: Any = reward_function(f"mine:{function}") if kind else base
    scoring = Scoring(reward, config, decode)
    group = Group(task=rollouts[0].task, rollouts=rollouts)
    what = f"the reward {'' if kind else 'function '}{function}"
    named = rf"{what} {LEAVES[function]} \(task 'q7', rollout 0, at .*mine.py:\d+\)"
    with pytest.raises(UserCodeError, match=named):
        scoring.score([group])
    again = [played()]
    scoring = Scoring(base, RewardConfig(functions={"mine:half": 1.0}), decode)
    scoring.score([Group(task=again[0].task, rollouts=again)])
    assert again[0].rewards["half"] == 0.5, "others are scored as before"


def test_two_functions_with_the_same_name_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("half = print\n")
    with pytest.raises(ValueError, match=r"expected different names, got half, half"):
        Scoring(base, RewardConfig(functions={"mine:half": 1, "other:half": 1}), decode)
    sys.modules.pop("other", None)


@pytest.mark.parametrize("on_error", ["drop", "raise"])
def test_function_that_returns_none_marks_the_rollout_unscorable(on_error: str) -> None:
    """Also with on_error = "raise", since None is a valid result."""
    (rollout,) = scored({"mine:nothing": 1.0}, played(), on_error=on_error)
    assert rollout.status is Status.INFRA_ERROR
    message = "the reward function nothing returned None: this rollout cannot be scored"
    assert rollout.error == f"{message} (task 'q7', rollout 0)"


def test_unscorable_rollout_leaves_the_baseline() -> None:
    rollouts = scored({"mine:picky": 1.0}, played("36"), played("bad"), played("1"))
    group = Group(task=rollouts[0].task, rollouts=rollouts)
    assign_advantages([group], LossConfig(scale_rewards="none"))
    assert [r.advantage for r in rollouts] == [0.5, 0.0, -0.5]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"lenght": 1.0}, "expected length, .*:function', got 'lenght'; did you mean length.$"),
        ({"mine:nosuch": 1.0}, "reward.functions: module 'mine' has no 'nosuch'"),
        ({"mine:half": 1.0, "mine.half:half": 1.0}, "no module"),
        ({"mine:exact": 1.0}, "has no 'exact'"),
    ],
)
def test_missing_function_is_reported_at_start(functions: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scoring(base, RewardConfig(functions=functions), decode)

"""Shipped environments give no-skill policies no reward; a reward that does is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.testing import assert_no_cheat_pays
from tests import tiny

pytestmark = pytest.mark.nsjail
CODE = {"system_prompt": "Solve it."}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tiny model."""
    monkeypatch.setattr("agentgrpo.train.prepare.check_model", lambda config, model, **how: None)
    monkeypatch.chdir(tmp_path)
    return str(tiny.make_model_dir(tmp_path / "model"))


NOTHING_PAYS = (
    *("quickstart", "letters", "functions", "unit_tests", "console", "tools", "inline", "walk"),
    *("search", "code_search"),
)


@pytest.mark.parametrize("name", NOTHING_PAYS)
def test_shipped_environment_rewards_no_cheat(name: str, model: str) -> None:
    long: dict[str, Any] = {
        "engine": {"max_model_len": 100_000},
        "learner": {"max_tokens": 100_000},
    }
    overlap = 0.3 if name == "search" else 0.2  # words that what it found shares with the answer
    scores = assert_no_cheat_pays(name, tasks=6, reward_at_most=overlap, model=model, **long)
    assert len(scores) >= 18, sorted(scores)
    if name == "console":  # a line that is no Python costs 0.3 there
        assert scores["looks for the answer"].reward == scores["exits"].reward == 0.0


def anything(rollout: Any) -> dict[str, float]:
    """Pays every answer."""
    return {"answer": float(rollout.answer is not None)}


def words_of_the_question(rollout: Any) -> dict[str, float]:
    """Pays an answer that has the right number somewhere."""
    return {"answer": float(str(rollout.task.spec["answer"]) in (rollout.answer or ""))}


def having_run(rollout: Any) -> dict[str, float]:
    """Pays code, whatever it does."""
    return {"answer": 0.0, "ran": 0.5 * (rollout.stats["tool_calls"] > 0)}


def tells(text: str) -> str:
    """Tells more than it should.

    Args:
        text: anything.
    """
    return "marigold"


def flower(rollout: Any) -> dict[str, float]:
    """Pays what the tool tells."""
    return {"answer": float("marigold" in (rollout.answer or ""))}


@pytest.mark.parametrize(
    ("config", "reward", "how", "paid"),
    [
        ("quickstart", anything, {"reward_at_most": 9}, "echoes the question: solved 100%"),
        ("quickstart", words_of_the_question, {}, "recites all answers: solved 100%"),
        ("quickstart", having_run, {}, "never answers: solved 0%, reward 0.50"),
        ("tools", flower, {"env": {"options": {"tools": [f"{__name__}:tells"]}}},
         "answers what tells(question) returns: solved 100%"),
    ],
)  # fmt: skip
def test_rewarded_cheat_is_named(
    config: str, reward: Any, how: dict[str, Any], paid: str, model: str
) -> None:
    kind = f"{__name__}:{reward.__name__}"
    with pytest.raises(AssertionError, match=re.escape(paid)):
        assert_no_cheat_pays(config, tasks=8, model=model, reward={"kind": kind}, **how)


def test_constant_answer_may_be_right_by_luck(model: str) -> None:
    scores = assert_no_cheat_pays("letters", tasks=32, model=model)
    best = scores["most frequent answer"]
    assert 0.3 < best.solved == best.guessed < 0.7
    assert scores["echoes the question"].guessed == scores["never answers"].guessed == 0.0


def test_repeated_call_is_tried(model: str) -> None:
    scores = assert_no_cheat_pays("walk", tasks=8, model=model)
    assert {f"always act({way})" for way in ("left", "right", "up", "down")} < set(scores)
    lake = {"id": "FrozenLake-v1", "kwargs": {"desc": ["SFG", "HHH"], "is_slippery": False},
            "actions": ["left", "down", "right", "up"]}  # fmt: skip
    with pytest.raises(AssertionError, match=r"always act\(right\): solved 100%"):
        assert_no_cheat_pays("walk", tasks=4, model=model, env={"options": lake})

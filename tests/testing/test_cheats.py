"""What policies that know nothing are paid, and that what pays them is named."""

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
    """The tiny one."""
    monkeypatch.setattr("agentgrpo.train.prepare.check_model", lambda config, model, **how: None)
    monkeypatch.chdir(tmp_path)
    return str(tiny.make_model_dir(tmp_path / "model"))


NOTHING_PAYS = (
    *("quickstart", "letters", "functions", "unit_tests", "console", "tools", "inline", "walk"),
    *("search", "code_search"),
)


@pytest.mark.parametrize("name", NOTHING_PAYS)
def test_a_shipped_environment_pays_no_cheat(name: str, model: str) -> None:
    long: dict[str, Any] = {
        "engine": {"max_model_len": 100_000},
        "learner": {"max_tokens": 100_000},
    }
    overlap = 0.3 if name == "search" else 0.2  # words that what it found shares with the answer
    seen = assert_no_cheat_pays(name, tasks=6, reward_at_most=overlap, model=model, **long)
    assert len(seen) >= 18, sorted(seen)
    if name == "console":  # a line that is no Python costs 0.3 there
        assert seen["looks for the answer"].reward == seen["exits"].reward == 0.0


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
         "answers what tells(question) says: solved 100%"),
    ],
)  # fmt: skip
def test_a_reward_that_pays_a_cheat_is_named(
    config: str, reward: Any, how: dict[str, Any], paid: str, model: str
) -> None:
    kind = f"{__name__}:{reward.__name__}"
    with pytest.raises(AssertionError, match=re.escape(paid)):
        assert_no_cheat_pays(config, tasks=8, model=model, reward={"kind": kind}, **how)


def test_a_constant_may_be_right_as_often_as_its_answer_is(model: str) -> None:
    seen = assert_no_cheat_pays("letters", tasks=32, model=model)
    best = seen["most frequent answer"]
    assert 0.3 < best.solved == best.guessed < 0.7
    assert seen["echoes the question"].guessed == seen["never answers"].guessed == 0.0


def test_the_same_move_over_and_over_is_among_them(model: str) -> None:
    seen = assert_no_cheat_pays("walk", tasks=8, model=model)
    assert {f"always act({way})" for way in ("left", "right", "up", "down")} < set(seen)
    lake = {"id": "FrozenLake-v1", "kwargs": {"desc": ["SFG", "HHH"], "is_slippery": False},
            "actions": ["left", "down", "right", "up"]}  # fmt: skip
    with pytest.raises(AssertionError, match=r"always act\(right\): solved 100%"):
        assert_no_cheat_pays("walk", tasks=4, model=model, env={"options": lake})

"""The sections of a recipe: what fits together, and what is refused."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.config import TrainConfig
from agentgrpo.config.read import load_config_of
from agentgrpo.config.recipe import RecipeConfig

ROOT = Path(__file__).parents[2]


def make(**sections: Any) -> RecipeConfig:
    return RecipeConfig.model_validate({"model": "m", "out_dir": "o", **sections})


def test_recipe_of_the_docs_is_valid() -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/recipe.md").read_text(), re.M | re.S)
    recipe = RecipeConfig.model_validate(tomllib.loads(text))
    assert recipe.endpoints["critic"].kind == "http"
    assert recipe.of_run().reward.sigma_length == 0.5


def test_of_run_changes_only_the_given_settings() -> None:
    recipe = make(rollout={"group_size": 5}, learner={"learning_rate": 1e-3}, seed=4)
    run = recipe.of_run(out_dir="elsewhere", **{"rollout.max_turns": 9})
    assert type(run) is TrainConfig
    assert (run.rollout.group_size, run.rollout.max_turns, run.seed) == (5, 9, 4)
    assert str(run.out_dir) == "elsewhere"
    assert str(recipe.of_run().out_dir) == "o"
    with pytest.raises(ValueError, match="group_size"):
        recipe.of_run(**{"rollout.group_size": 1})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"flywheel": {"critic": "big"}},
            r"flywheel\.critic: expected an endpoint \(.*\), got 'big'",
        ),
        (
            {"measures": {"quality": "judge"}},
            r"measures\.judge: expected an endpoint if",
        ),
        (
            {"measures": {"judge": "policy"}},
            r"measures\.judge: expected an endpoint if",
        ),
        ({"measures": {"attempts": 3}}, r"measures\.temperature: expected above 0"),
        ({"measures": {"pass_k": [2]}}, r"pass_k: expected at most measures\.attempts = 1, got"),
        (
            {
                "endpoints": {"w": {"kind": "retriever", "url": "http://h/search"}},
                "flywheel": {"critic": "w"},
            },
            r"flywheel\.critic: expected a model, got the retriever 'w'",
        ),
        ({"endpoints": {"policy": {}}}, r"endpoints\.policy: the name is reserved"),
        ({"flywheel": {"critic": "reference"}}, r"flywheel\.critic: 'reference' is .*lora\.rank"),
        (
            {"engine": {"tensor_parallel_size": 2}, "measures": {"conciseness_judge": "policy"}},
            r"measures\.conciseness_judge: 'policy' would run on one rank",
        ),
        (
            {"curriculum": {"steps": [5, 7], "epochs": 2}},
            r"curriculum\.epochs: expected none with curriculum\.steps = \(5, 7\), got 2",
        ),
        ({"flywheel": {"concurrency": 99}}, r"at most a third of sandbox\.max_live"),
        (
            {"curriculum": {"selection": "random", "by_kind": True}},
            'by_kind: True does nothing without curriculum.selection = "pareto"',
        ),
        *(
            ({"endpoints": {"e": {key: value}}}, f"{key}: an endpoint of kind 'engine' does not")
            for key, value in {
                "url": "http://h/v1",
                "extra": {"a": 1},
            }.items()
        ),
    ],
)
def test_invalid_recipe_settings_name_their_key(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**sections)


def test_of_run_omits_filters_used_only_by_evaluate() -> None:
    whole = make(measures={"temperature": 0.6}, evaluation={"top_p": 0.9, "top_k": 5})
    assert whole.evaluation.filters == {"top_p": 0.9, "top_k": 5}
    assert whole.of_run().evaluation.filters == {}


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ("flywheel", ["flywheel.critic=reference"]),
        ("evaluate", ["measures.quality=judge", "measures.judge=reference"]),
    ],
)
def test_commands_that_use_the_reference_accept_lora_rank(command: str, asked: list[str]) -> None:
    lora = ["learner.lora.rank=8", "learner.trained_layers=none"]
    recipe = load_config_of(RecipeConfig, "recipe", [*asked, *lora], command)
    assert recipe.learner.lora.rank == 8

"""Every number has bounds and every choice its nearest: of all settings that there are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from agentgrpo.config.read import load_config_of
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.config.section import is_section, walk
from agentgrpo.data.sources import training_tasks
from agentgrpo.kernels.objective import Objective
from agentgrpo.learn.token_weights import objective_of
from agentgrpo.train.plugins import KINDS, checked_option, class_of, options_of
from agentgrpo.train.resolve import resolve
from tests.given import LEAST


def parts(kind: Any) -> Iterator[Any]:
    """A type and all types in it, but what stands in a Literal."""
    yield kind
    if get_origin(kind) is not Literal:
        for inner in get_args(kind):
            yield from parts(inner)


def refused(override: str) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        load_config_of(RecipeConfig, LEAST, [override])
    return str(error.value)


KEYS = {key: f.annotation for key, f in walk(RecipeConfig) if not is_section(f.annotation)}
NUMBERS = [key for key, kind in KEYS.items() if {int, float} & {*parts(kind)}]
assert len(NUMBERS) > 100
ABSURD = ("1000000000000", "-1000000000000", "1e30", "-1e30", "nan", "inf", "-inf", "9" * 5000)


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_out_of_bounds_are_errors(key: str) -> None:
    kind = KEYS[key]
    holder = {get_origin(part) for part in parts(kind)}
    form = "[{}]" if tuple in holder else "{{ a = {} }}" if dict in holder else "{}"
    for value in ABSURD:
        assert key.rpartition(".")[2] in refused(f"{key}={form.format(value)}"), (key, value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.tasks_per_step=100000", None),
        ("learner.learning_rate=30", "learning_rate"),
        ("engine.kv_cache_gib=0", "kv_cache_gib"),
        ("rollout.temperature=2.1", "temperature"),
        ('endpoints={ a = { kind = "http", model = "m", url = "http://h:99999/v1" } }', "Port out"),
        ('endpoints={ a = { kind = "http", model = "m", url = "http://h:-1/v1" } }', "Port"),
        ('endpoints={ a = { kind = "http", model = "m", url = "h:80/v1" } }', "expected http://"),
        (
            'endpoints={ a = { kind = "http", model = "m", url = "http:///v1" } }',
            "expected http://",
        ),
    ],
)
def test_bounds_of_single_settings(override: str, said: str | None) -> None:
    if said is None:
        load_config_of(RecipeConfig, LEAST, [override])
        together = [override, "rollout.group_size=100"]
        with pytest.raises(ValueError, match="expected at most 1,000,000 rollouts per step"):
            load_config_of(RecipeConfig, LEAST, together)
    else:
        assert said in refused(override)


NULLABLE = [key for key, kind in KEYS.items() if type(None) in get_args(kind)]


def test_none_unsets_an_optional_key(tmp_path: Path) -> None:
    """In a file over the one that sets it, on the command line, and among options."""
    assert {"rollout.call_timeout_s", "learner.trained_layers", "sft.data"} < {*NULLABLE}
    assert len(NULLABLE) > 25
    above = tmp_path / "above.toml"
    above.write_text(f"{LEAST.read_text()}learner.trained_layers = 4\nsft.data = 'a.jsonl'\n")
    below = tmp_path / "below.toml"
    below.write_text("\n".join(["extends = 'above.toml'", *(f"{k} = 'none'" for k in NULLABLE)]))
    overrides = [f"{key}=none" for key in NULLABLE]
    for config in (
        load_config_of(RecipeConfig, below),
        load_config_of(RecipeConfig, above, overrides),
    ):
        assert {key for key in NULLABLE if attrgetter(key)(config) is not None} == set()
    for key in (key for key, kind in KEYS.items() if key not in NULLABLE and int is kind):
        assert "got 'none'" in refused(f"{key}=none")
    config = load_config_of(RecipeConfig, LEAST, ["loss.scale_rewards=none", "reward.kind=none"])
    assert (config.loss.scale_rewards, config.reward.kind) == ("none", "none")


def test_none_unsets_an_optional_option() -> None:
    nullable = [
        option
        for section, kinds in KINDS.items()
        for kind in kinds
        for option in options_of(section, class_of(section, kind))
        if type(None) in get_args(option.annotation)
    ]
    assert len(nullable) > 20
    assert [
        option for option in nullable if checked_option("x", option.annotation, "none") is not None
    ] == []


def test_objective_has_bounds() -> None:
    for name, value in vars(Objective()).items():
        if isinstance(value, float):
            for wrong in (math.nan, math.inf, -math.inf, 1e30, -1e30):
                with pytest.raises(ValueError, match=name):
                    Objective(**{name: wrong})  # type: ignore[arg-type]


def choices(kind: Any) -> list[str]:
    """What a key may be, of those that are words of more than two letters."""
    named = [
        value for part in parts(kind) if get_origin(part) is Literal for value in get_args(part)
    ]
    return [word for word in named if isinstance(word, str) and len(word) > 2]


NAMED = {
    **{key: found for key, kind in KEYS.items() if (found := choices(kind))},
    "agent.kind": list(KINDS["agent"]),
    "env.kind": list(KINDS["env"]),
    "reward.kind": ["numeric", "math", "choice", "text", "none"],
    "data.train": ["word_problems"],
    "loss.loss_type": ["dapo", "grpo", "dr_grpo", "cispo"],
    "loss.importance_sampling_level": ["token", "sequence"],
    "loss.vllm_importance_sampling_mode": ["token_truncate", "sequence_mask"],
}


def misspelt(word: str) -> str:
    """Two letters changed places, as fingers do."""
    return word[:-2] + word[-1] + word[-2] if word[-1] != word[-2] else word[:-1]


@pytest.mark.parametrize("key", NAMED)
def test_misspelt_choice_suggests_the_nearest(key: str) -> None:
    def check(override: str) -> None:
        config = load_config_of(RecipeConfig, LEAST, [override])
        objective_of(config.loss)
        resolve(config)
        training_tasks(config.data, 0)

    for word in NAMED[key]:
        kind = KEYS[key]
        holder = {get_origin(part) for part in parts(kind)}
        form = '["{}"]' if tuple in holder else '"{}"'
        with pytest.raises(ValueError, match=rf"did you mean {word}\?") as error:
            check(f"{key}={form.format(misspelt(word))}")
        assert key.rpartition(".")[2] in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "agent.kind=agentgrpo.agents.code:CodeAgnet",
            "'CodeAgnet'; did you mean CodeAgent?",
        ),
        ("reward.kind=json:laods", "did you mean loads?"),
        ("rollout.sampler=json:laods", "did you mean loads?"),
    ],
)
def test_misspelt_own_name_suggests_the_nearest(override: str, message: str) -> None:
    config = load_config_of(RecipeConfig, LEAST, [override])
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(config)

"""What other trainers' settings are called here: complete, true of the defaults, and told."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from typing import Any

import pytest

from agentgrpo.config import LossConfig, TrainConfig
from agentgrpo.config.elsewhere import TABLES, TRL, Row, said_elsewhere
from agentgrpo.config.read import _all_keys, load_config
from bench.pages import with_made
from tests.elsewhere import PAGE, tables
from tests.given import LEAST

KEYS = set(_all_keys(TrainConfig))
EFFECTIVE = {
    "epsilon": LossConfig().clip_low,
    "use_bias_correction_kl": LossConfig().corrects_kl,
    "vllm_importance_sampling_correction": LossConfig().corrects,
}
"""Of keys whose default depends on the loss type."""


def default_of(key: str) -> Any:
    """Of a dotted key."""
    kind: Any = TrainConfig
    *sections, leaf = key.split(".")
    for name in sections:
        kind = kind.model_fields[name].annotation
    default = kind.model_fields[leaf].default
    return EFFECTIVE.get(leaf, default) if key.startswith("loss.") else default


@pytest.mark.filterwarnings("ignore")
def test_each_field_of_trls_config_is_here_once() -> None:
    trl = pytest.importorskip("trl", reason="trl is in requirements-dev.txt")
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    arguments = set(inspect.signature(trl.GRPOTrainer.__init__).parameters)
    named = Counter(name for row in TRL for name in row.theirs.split())
    assert fields - named.keys() == set()
    assert named.keys() - fields - arguments == set()
    assert max(named.values()) == 1


@pytest.mark.filterwarnings("ignore")
def test_a_default_is_trls_or_it_is_said_why_not() -> None:
    """Of those with TRL's name, and of those that are one key here."""
    trl = pytest.importorskip("trl", reason="trl is in requirements-dev.txt")
    given = trl.GRPOConfig(output_dir="o", use_cpu=True, bf16=False)
    compared = 0
    required = {"output_dir"}
    for row in TRL:
        names = [name for name in row.theirs.split() if hasattr(given, name)]
        one_to_one = row.ours.endswith("*") or len(names) == len(row.ours.split()) == 1
        if not one_to_one:
            assert row.remark or not names, f"{row.theirs}: how they come together"
            assert not row.default, f"{row.theirs}: nothing compares it"
            continue
        for name in {*names} - required:
            (key,) = row.keys(name)
            theirs, ours = getattr(given, name), default_of(key)
            ours = [*ours] if isinstance(ours, tuple) else ours
            same = getattr(theirs, "value", theirs) == ours
            assert same != bool(row.default), (name, theirs, ours)
            compared += 1
    assert compared > 55


@pytest.mark.parametrize("library", TABLES)
def test_what_is_said_to_be_here_is(library: str) -> None:
    for row in TABLES[library]:
        for name in row.theirs.split():
            assert KEYS.issuperset(row.keys(name)), name
        assert row.ours or row.remark, f"{row.theirs}: why not?"


def test_the_page_is_made_of_the_tables() -> None:
    page = PAGE.read_text()
    assert page == with_made(page, "tests.elsewhere", tables()), "python -m tests.elsewhere --write"
    assert "| `num_generations` | `rollout.group_size` |  |" in page
    assert "| `do_train`, `do_eval`, `do_predict` | not offered | commands: `agentg" in page


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.num_generations=8", "TRL's num_generations is rollout.group_size"),
        ("loss.num_generations=8", "TRL's num_generations is rollout.group_size"),
        ("temperature=0.5", "TRL's temperature is rollout.temperature"),
        ("ray_init.num_cpus=4", "key ray_init.num_cpus; verl's ray_init is not offered: one pr"),
        ("loss.use_adaptive_entropy=true", "use_adaptive_entropy is not offered: `loss.entropy_co"),
        ("data.train_files=x", "verl's data.train_files is data.train"),
        ("learner.loss_type=grpo", r"did you mean loss\.loss_type\?"),
    ],
)
def test_another_trainers_name_is_answered_with_ours(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(LEAST, [override])


@pytest.mark.parametrize(
    ("library", "name"),
    [
        (library, name)
        for library, rows in TABLES.items()
        for row in rows
        for name in row.theirs.split()
        if name not in KEYS
    ],
)
def test_each_of_their_names_is_answered_with_its_row(library: str, name: str) -> None:
    """As a user types it: verl's with all its sections, of which we know none or another."""
    (row,) = (row for row in TABLES[library] if name in row.theirs.split())
    with pytest.raises(ValueError, match=f"unknown config key {name};") as caught:
        load_config(LEAST, [f"{name}=4"])
    answer = " and ".join(row.keys(name)) or f"not offered: {row.remark}"
    assert str(caught.value) == f"unknown config key {name}; {library}'s {name} is {answer}"


def test_every_key_of_anothers_script_has_a_line() -> None:
    script = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=5", "data.n=3")
    with pytest.raises(ValueError, match="unknown") as caught:
        load_config(LEAST, [*script, "actor_rollout_ref.rollout.nosuch=1"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert "unknown config key actor_rollout_ref.rollout.nosuch" in lines


def test_a_star_is_the_same_name() -> None:
    assert Row("a b", "loss.*").keys("b") == ["loss.b"]
    assert said_elsewhere("beta") == "; TRL's beta is loss.beta"
    assert said_elsewhere("nobodys") == ""

"""The strict reader: what a config may say, and what it is told when it says something else."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.config import EngineConfig, RolloutConfig, TrainConfig
from agentgrpo.config.command_settings import RECIPE_SECTIONS
from agentgrpo.config.read import TRL_KEYS, load_config, load_config_of, shipped_configs
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.config.section import walk
from agentgrpo.train.config_docs import settings
from tests import given
from tests.given import a_config

LEAST = given.LEAST.read_text()


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(LEAST)
    return path


@pytest.mark.filterwarnings("ignore")
def test_trl_keys_exist_in_trl_and_map_to_our_keys() -> None:
    assert {*TRL_KEYS.values()} <= {*dict(walk(TrainConfig))}
    trl = pytest.importorskip("trl", reason="trl is in requirements-dev.txt")
    known = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    known |= inspect.signature(trl.GRPOTrainer.__init__).parameters.keys()
    assert {*TRL_KEYS} <= known | {"lr"}


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("steps=7", None, "steps", 7),
        ("rollout.deterministic=true", "rollout", "deterministic", True),
        ("learner.learning_rate=5e-5", "learner", "learning_rate", 5e-5),
        ('sandbox.preload=["a","b"]', "sandbox", "preload", ("a", "b")),
        ("model=some/plain-text", None, "model", "some/plain-text"),
        ('model="quoted"', None, "model", "quoted"),
        ("agent.kind=a = b", "agent", "kind", "a = b"),
        ("agent.kind=", "agent", "kind", ""),
    ],
)
def test_override_is_parsed_as_toml_or_text(
    override: str, section: str | None, key: str, value: Any
) -> None:
    config = a_config(override)
    assert getattr(getattr(config, section) if section else config, key) == value


def test_the_last_override_wins_over_the_file(toml: Path) -> None:
    toml.write_text(LEAST + "[loss]\nbeta = 0.1\n")
    assert load_config(toml, ["loss.beta=0.3", "loss.beta=0.4"]).loss.beta == 0.4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lerner.learning_rat=1", "key lerner.learning_rat; did you mean learner.learning_rate?"),
        ("learner.lr=1", "key learner.lr; did you mean learner.learning_rate?"),
        ("num_generations=8", "key num_generations; did you mean rollout.group_size?"),
        ("learner.lr_rate=1", "learner.lr_rate; did you mean learner.learning_rate?"),
        ("zzzzqqqq=1", "unknown config key zzzzqqqq; docs/coming-from"),
        ("group_size=3", "unknown config key group_size; did you mean rollout.group_size?"),
        ("learner.group_size=3", "key learner.group_size; did you mean rollout.group_size?"),
        ("learner.lora.rnk=1", "did you mean learner.lora.rank?"),
        ("agent.language=bash", "key agent.language; did you mean agent.options.language?"),
        ("loss.vllm_importance_sampling_clip_max=0", "clip_max: expected > 0.0, got 0"),
        ("steps=0", "config key steps: .*greater than or equal to 1, got 0"),
        ("steps=x", "config key steps: .*integer.*got 'x'"),
        ("rollout.group_size=1", "config key rollout.group_size: .*equal to 2, got 1"),
        ("engine.dtype=float16", "config key engine.dtype: .*'bfloat16'.*got 'float16'"),
        ("rollout.temperature=0.005", "key rollout.temperature: .*equal to 0.01, got 0.005"),
        ("sandbox.preload=[5]", r"config key sandbox.preload.0: .*valid string, got 5"),
        ("engine.max_model_len=127", "config key engine.max_model_len: .*equal to 128, got 127"),
        ("rollout.max_turn_tokens=1024", "max_turn_tokens: expected below .* 1024, got 1024"),
        ("learner.max_tokens=1023", "learner.max_tokens: expected at least .* 1024, .*got 1023"),
        ("steps", "override 'steps': expected section.key=value"),
        ("steps.more=1", "steps is not a section"),
        ("=3", "override '=3': .* got an empty name"),
        ("out_dir=", "config key out_dir: expected a path, got ''"),
        ("data.train=", "config key data.train: expected a path, got ''"),
        ("data.heldout=1000", "key data.heldout: Input should be a valid string, got 1000"),
    ],
)
def test_invalid_override_names_its_key(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        a_config("steps=3", override)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("number", "true", "number"),
        ("number", "'1'", "number"),
        ("whole number", "true", "integer"),
        ("whole number", "200.0", "integer"),
        ("whole number", "'200'", "integer"),
        ("true or false", "1", "boolean"),
        ("true or false", "yes", "boolean"),
    ],
)
def test_value_of_another_type_is_an_error(kind: str, value: str, expected: str) -> None:
    keys = [f"{s.section}.{s.key}".lstrip(".") for s in settings() if s.kind.startswith(kind)]
    assert len(keys) > 9
    with pytest.raises(ValueError, match="config key") as caught:
        a_config(*(f"{key}={value}" for key in keys))
    lines = str(caught.value).splitlines()
    assert {line.partition(": ")[0] for line in lines} == {f"config key {key}" for key in keys}
    assert all(f"a valid {expected}, got " in line for line in lines)


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="steps") as caught:
        a_config("steps=0", "seed=-1", "nosuch.key=2", "sandbox.preload=[1]")
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize("missing", ["model", "out_dir"])
def test_key_without_default_is_required(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text("".join(line for line in LEAST.splitlines(True) if missing not in line))
    with pytest.raises(ValueError, match=f"config key {missing} is required"):
        load_config(path)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nosuch.toml", "see `agentgrpo train --help`"),
        ("quickstrat", "did you mean quickstart?"),
        ("runs/quickstart.toml", "did you mean quickstart?"),
    ],
)
def test_missing_config_suggests_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=r"is neither a file nor the name of a") as caught:
        load_config(name)
    assert str(caught.value).startswith(f"config {name!r} ")
    assert str(caught.value).endswith(f"; {hint}")


def test_config_may_extend_a_file_or_a_shipped_config(tmp_path: Path) -> None:
    for name, text in {
        "a.toml": LEAST + "[loss]\nbeta = 0.1\n[env]\nkind = 'x:Y'\noptions = { a = 1, b = 2 }\n",
        "b.toml": "extends = 'a.toml'\nsteps = 3\nloss.epsilon_high = 0.4\nenv.options.b = 3\n",
        "in/c.toml": "extends = '../b.toml'\nenv.kind = 'z:Z'\nenv.options.c = 4\n",
        "d.toml": "extends = 'quickstart'\nout_dir = 'd'\n[rollout]\ngroup_size = 4\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    b, c = load_config(tmp_path / "b.toml"), load_config(tmp_path / "in/c.toml", ["loss.beta=0.2"])
    assert (b.model, b.steps, b.loss.beta, b.loss.epsilon_high) == ("m", 3, 0.1, 0.4)
    assert b.env.options == {"a": 1, "b": 3}
    assert (c.steps, c.loss.beta, c.loss.epsilon_high) == (3, 0.2, 0.4)
    assert c.env.options == {"c": 4}, "the options of another kind are not inherited"
    changes = ["out_dir=d", "rollout.group_size=4"]
    assert load_config(tmp_path / "d.toml") == load_config("quickstart", changes)


def test_override_of_kind_discards_the_files_options(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(LEAST + "[env]\nkind = 'x:Y'\noptions = { a = 1 }\n")
    for overrides, options in (
        (["env.kind=z:Z"], {}),
        (["env.kind=x:Y"], {"a": 1}),
        (["env.options.c=4", "env.kind=z:Z"], {"c": 4}),
        (["env.options.c=4"], {"a": 1, "c": 4}),
        (["env.options={}"], {}),
    ):
        assert load_config(tmp_path / "a.toml", overrides).env.options == options, overrides
    assert load_config("quickstart", ["agent.kind=repl"]).agent.options == {}
    assert load_config("quickstart", ["agent.kind=code"]) == load_config("quickstart")


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (
            "'nosuch.toml'",
            r"c\.toml: extends: config 'nosuch\.toml' is neither a file nor ",
        ),
        ("'quickstrat'", r"c\.toml: extends: config 'quickstrat' .*; did you mean quickstart\?"),
        ("3", r"c\.toml: extends: expected the name of a shipped config or a path, got 3"),
        ("'c.toml'", r"c\.toml: extends: 'c\.toml' is a circle: .*c\.toml -> .*c\.toml$"),
        ("'d.toml'", r"d\.toml: extends: 'c\.toml' is a circle: .*c\.toml -> .*d.* -> .*c\.toml$"),
        ("'f.toml'", r"f\.toml: not UTF-8 text"),
        ("'e.toml'", r"e\.toml: not valid TOML"),
    ],
)
def test_invalid_extends_is_an_error(toml: Path, base: str, message: str) -> None:
    toml.with_name("d.toml").write_text("extends = 'c.toml'\n")
    toml.with_name("e.toml").write_text("x = \n")
    toml.with_name("f.toml").write_bytes(b"x = '\xff'\n")
    toml.write_text(f"extends = {base}\n{LEAST}")
    with pytest.raises(ValueError, match=message):
        load_config(toml)


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_load_by_name(name: str) -> None:
    by_path = load_config_of(RecipeConfig, shipped_configs()[name])
    assert load_config_of(RecipeConfig, name) == by_path


def test_the_quickstart_is_deterministic_on_a_cpu() -> None:
    assert load_config("quickstart").on("cpu").rollout.deterministic is True


@pytest.mark.parametrize(
    ("dtype", "device", "meant", "threshold"),
    [
        ("auto", "cpu", "float32", 1e-3),
        ("auto", "cuda", "bfloat16", 1.0),
        ("bfloat16", "cpu", "bfloat16", 1.0),
        ("float32", "cuda", "float32", 1e-3),
    ],
)
def test_auto_depends_on_the_device(dtype: Any, device: str, meant: str, threshold: float) -> None:
    config = EngineConfig(dtype=dtype)
    assert config.dtype_on(device) == meant
    assert config.agreement_on(device) == threshold
    assert EngineConfig(dtype=dtype, agreement_threshold=0.5).agreement_on(device) == 0.5


def test_seeds_of_steps_refills_and_runs_all_differ() -> None:
    configs = [TrainConfig(model="m", out_dir=Path("o"), seed=seed) for seed in range(3)]
    seeds = {c.seed_of(step, refill) for c in configs for step in range(50) for refill in range(5)}
    assert len(seeds) == 3 * 50 * 5
    assert configs[1].seed_of(4, 1) == configs[1].seed_of(4, 1)


def test_max_sampled_tokens_covers_all_turns() -> None:
    assert RolloutConfig(max_turns=3, max_turn_tokens=10).max_sampled_tokens == 30


@pytest.mark.parametrize(
    "override",
    [
        "top_p=0.9",
        "top_k=5",
    ],
)
def test_sampling_filters_are_for_evaluation_only(override: str) -> None:
    name, _, value = override.partition("=")
    with pytest.raises(ValueError, match=rf"rollout\.{name} does not exist.*would be biased.*eval"):
        a_config(f"rollout.{override}")
    config = a_config(f"evaluation.{override}", "evaluation.temperature=1")
    assert config.evaluation.filters == {name: float(value)}


@pytest.mark.parametrize("value", ["3", '["top_p"]', '"top_p"'])
@pytest.mark.parametrize("section", ["rollout", "engine", "learner", "evaluation"])
def test_section_that_is_no_table_is_an_error(section: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"config key {section}: Input should be an object"):
        a_config(f"{section}={value}")


RANK, RENDER = "learner.lora.rank=4", "rollout.history=render"
GDPO = "loss.multi_objective_aggregation=normalize_then_sum"


@pytest.mark.parametrize(
    ("overrides", "message", "instead"),
    [
        ("engine.sleep_level=2", "engine.weights: expected 'copy' with", "engine.weights=copy"),
        (
            "engine.tensor_parallel_size=2 engine.weights=shared",
            "engine.weights: expected 'copy' with engine.tensor_parallel_size = 2, .* got 'shared'",
            "engine.weights=auto",
        ),
        (
            f"{RANK} engine.sleep_level=2 engine.weights=copy",
            r"sleep_level: expected 1 with learner\.lora\.rank.* got 2",
            "learner.lora.rank=0",
        ),
        *(
            (
                f'rollout.treatment={{infra_error="{treatment}"}}',
                f"infra_error: expected 'drop' or 'retry'.*the machine.* got '{treatment}'",
                'rollout.treatment={infra_error="drop",timed_out="mask"}',
            )
            for treatment in ("train", "mask")
        ),
        (
            f"{RENDER} rollout.branching.initial=2",
            "initial: expected 0 with .*'render'.* got 2",
            "rollout.history=append",
        ),
        (
            "rollout.branching.initial=8",
            r"branching\.initial: expected below .*group_size = 8, got 8",
            "rollout.branching.initial=7",
        ),
        (
            "rollout.call_timeout_s=5",
            r"rollout\.call_timeout_s: expected above sandbox\.timeout_s = 5, got 5",
            "sandbox.timeout_s=4.9",
        ),
        ("data.heldout=split", "data.heldout: expected another source", "data.heldout=auto"),
        *(
            (
                f"reward.cost_per_{clock}_s=1 rollout.deterministic=cpu",
                f"cost_per_{clock}_s: expected 0 with rollout.deterministic = 'cpu'",
                "rollout.deterministic=false",
            )
            for clock in ("wall", "cpu")
        ),
        (
            f"{RANK} learner.trained_layers=1",
            r"learner\.trained_layers=none unsets it.* got 1",
            "learner.trained_layers=none",
        ),
        (
            "loss.num_mini_batches=13",
            "num_mini_batches: expected at most rollout.tasks_per_step = 12, got 13",
            "rollout.tasks_per_step=13",
        ),
        (f"{GDPO} loss.span_credit=turn", "'rollout' with multi_", "loss.span_credit=auto"),
        (f"{GDPO} loss.scale_rewards=batch", "'group' with multi_", "loss.scale_rewards=group"),
        ("teacher.model=m teacher.feedback=errors", "expected none with", "teacher.feedback="),
    ],
)
def test_settings_that_exclude_each_other(overrides: str, message: str, instead: str) -> None:
    with pytest.raises(ValueError, match=message):
        a_config(*overrides.split())
    a_config(*overrides.split(), instead)


def test_recipe_section_in_a_run_names_the_recipe_command() -> None:
    assert (
        set(RECIPE_SECTIONS) == RecipeConfig.model_fields.keys() - TrainConfig.model_fields.keys()
    )
    with pytest.raises(ValueError, match=r"\[flywheel\] is a section of a recipe"):
        load_config("recipe")

"""Reward functions with TRL's signature: TRL's code and ours call them with the same results."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import re
import sys
import textwrap
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentgrpo.config import LossConfig, RewardConfig
from agentgrpo.inspect.verify.advantages import advantage_faults
from agentgrpo.learn.advantages import assign_advantages, reward_parts
from agentgrpo.rewards.rollout_view import RolloutView
from agentgrpo.rewards.scoring import Scoring
from agentgrpo.rewards.trl_functions import arguments_for, is_trl_form
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.train.plugins import decide_reward, load_reward, make_reward, needs_answers
from agentgrpo.types import Group, Rollout, Status, Task
from tests.given import a_config
from tests.rewards.test_scoring import decode, encode

MODULE = """
import asyncio, functools
from agentgrpo.types import SpanReward

def brevity(completions, **kwargs):
    return [-len(text_of(c)) / 10 for c in completions]
def text_of(c): return c if isinstance(c, str) else c[-1]["content"]
async def right(prompts, completions, solution, **kwargs):
    await asyncio.sleep(0)
    return [None if "?" in text_of(p) else float(s in text_of(c))
            for p, c, s in zip(prompts, completions, solution, strict=True)]
def tokens(completion_ids, solution, trainer_state, log_metric, log_extra, **kwargs):
    log_metric("mean", sum(map(len, completion_ids)) / len(completion_ids))
    log_extra("ids", [ids[:2] for ids in completion_ids])
    assert set(kwargs) >= {"prompts", "completions", "other"}, set(kwargs)
    assert not {"prompt", "completion"} & set(kwargs)
    return [len(ids) * (1 + trainer_state.global_step) / trainer_state.max_steps
            for ids in completion_ids]
def some(completions, **kwargs):
    none = {"b": None, "n": float("nan")}
    return [none.get(text_of(c)[0], 2) for c in completions]
def never(completions, **kwargs): return [None] * len(completions)
class Weighed:
    async def __call__(self, completions, **kwargs): return [0.25] * len(completions)
weighed = Weighed()
def checks(view): return {"style": len(view.text) % 5}
def lines(view): return [SpanReward(*span, "line", len(view.text)) for span in view.turn_spans]
def exact(completions, solution): return [1.0] * len(solution)
def short(completions, **kwargs): return [1.0]
def plain(view): return 0.5
def worlds(environments, **kwargs): return [e.worth for e in environments]
def nothing(completions, **kwargs): pass
def raises(completions, **kwargs): raise KeyError("mine")
async def waits(completions, **kwargs): await asyncio.sleep(60)
def mixed(completions, **kwargs): return [c if c == "b" else 1 for c in completions]
async def leaves(completions, **kwargs): raise SystemExit(0)
def clash(completions, environments=None, **kwargs): return [1.0] * len(completions)
"""
SOLUTIONS = ("4", "7")
ANSWERS = ("it is 4", "b", "n, 4", "no number at all")


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "trls.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("trls", None)


def groups_of(*, is_text: bool, question: str = "two and two") -> list[Group]:
    """One group for each solution, of one rollout for each answer."""
    return [
        Group(task=task, rollouts=[played(task, answer) for answer in ANSWERS])
        for number, solution in enumerate(SOLUTIONS)
        for task in [
            Task(
                id=f"q{number}",
                messages=({"role": "user", "content": question + "?" * number},),
                spec={"solution": solution, "other": 1, "prompt": "not passed on"},
                is_text=is_text,
            )
        ]
    ]


def played(task: Task, answer: str) -> Rollout:
    segments = [encode("prompt"), encode(answer, sampled=True)]
    return Rollout(task=task, segments=segments, status=Status.COMPLETED, answer=answer)


def scoring(functions: dict[str, float], *, limit_s: float | None = None, **more: Any) -> Scoring:
    config = RewardConfig(functions=functions, **more)
    result = Scoring(make_reward(config), config, decode, total_steps=8, limit_s=limit_s)
    result.steps_done = lambda: 3
    return result


def trls_rewards(functions: dict[str, float], groups: Sequence[Group]) -> tuple[Any, Any, Any]:
    """Rewards [rollout, function], extra columns and metrics, by GRPOTrainer's own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about versions of vLLM
        trl: Any = importlib.import_module("trl")
        from transformers import TrainerState

        trainer = trl.GRPOTrainer
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    module = importlib.import_module("trls")
    chosen = [getattr(module, name.partition(":")[2]) for name in functions]
    self = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        reward_funcs=chosen,
        reward_processing_classes=[None] * len(chosen),
        reward_func_names=list(functions),
        state=TrainerState(global_step=3, max_steps=8),
        environments=None,
        async_loop=loop,
        args=SimpleNamespace(report_to=[]),
        _pending_extra_logs=defaultdict(list),
        _pending_metrics=defaultdict(list),
    )
    for name in ("_log_completion_extra", "_log_metric"):
        setattr(self, name, getattr(trainer, name).__get__(self))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    texts = [decode(r.segments[1].token_ids.tolist()) for r in rollouts]
    is_text = rollouts[0].task.is_text
    inputs = [{**r.task.spec} for r in rollouts]
    prompts = [r.task.messages[0]["content"] if is_text else [*r.task.messages] for r in rollouts]
    completions = texts if is_text else [[{"role": "assistant", "content": t}] for t in texts]
    ids = [r.segments[1].token_ids.tolist() for r in rollouts]
    try:
        rewards = trainer._calculate_rewards(self, inputs, prompts, completions, ids)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    return rewards, self._pending_extra_logs, self._pending_metrics


FUNCTIONS = {
    "trls:brevity": 0.5, "trls:right": 2.0, "trls:tokens": 0.25, "trls:some": 1.0,
    "trls:weighed": 3.0,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_text", [True, False], ids=["text", "messages"])
@pytest.mark.parametrize(
    "functions",
    [FUNCTIONS, {"trls:some": 1.0, "trls:right": -1.0}, {"trls:never": 1.0}],
    ids=["all", "some apply", "none applies"],
)
def test_totals_equal_trl(functions: dict[str, float], is_text: bool) -> None:
    pytest.importorskip("trl", reason="trl is in requirements-dev.txt")
    groups = groups_of(is_text=is_text)
    table, extra, metrics = trls_rewards(functions, groups)
    unscorable = torch.isnan(table).all(dim=1)
    total = (table * torch.tensor(list(functions.values()))).nansum(dim=1)

    ours = scoring(functions)
    ours.score(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [not rollout.in_baseline for rollout in rollouts] == unscorable.tolist()
    scored = [r for r in rollouts if r.in_baseline]
    assert [r.reward for r in scored] == pytest.approx(total[~unscorable].tolist(), abs=1e-5)
    if "trls:tokens" in functions:
        assert [rollout.extra["ids"] for rollout in rollouts] == extra["ids"]
        mean = torch.tensor(metrics["mean"]).mean().item()
        logged = ours.take_logged()
        assert sum(logged["mean"]) / len(logged["mean"]) == pytest.approx(mean)
        assert ours.take_logged() == {}


WEIGHTS = {
    "trls:right": -2.0, "trls:some": 1.0, "trls:brevity": 0.01, "trls:checks": 0.1,
    "trls:lines": -0.3,
}  # fmt: skip
PARTS = {"right": -2.0, "some": 1.0, "brevity": 0.01, "style": 0.1, "line": -0.3, "tool_cost": 0.02}


@pytest.mark.filterwarnings("ignore")
def test_gdpo_equals_trl_for_any_weights() -> None:
    """Run TRL's lines on a table of unweighted parts (nan: does not apply) and compare.

    Parts of mappings, spans and costs have the weight of their function or setting.
    """
    pytest.importorskip("trl", reason="trl is in requirements-dev.txt")
    weighted, raw = groups_of(is_text=True), groups_of(is_text=True)
    for rollouts in ([r for g in groups for r in g.rollouts] for groups in (weighted, raw)):
        for number, rollout in enumerate(rollouts):
            rollout.stats["tool_calls"] = float(number % 3)
    scoring(WEIGHTS, tool_cost=PARTS["tool_cost"]).score(weighted)
    scoring(dict.fromkeys(WEIGHTS, 1.0), tool_cost=1.0).score(raw)
    loss = LossConfig(multi_objective_aggregation="normalize_then_sum")
    assign_advantages(weighted, loss)
    assert not list(advantage_faults(weighted, loss))

    rows = [
        [float("nan") if name in r.not_applicable else reward_parts(r)[name] for name in PARTS]
        for group in raw for r in group.rollouts
    ]  # fmt: skip
    expected = trls_gdpo(torch.tensor(rows, dtype=torch.float64), [*PARTS.values()])
    advantages = [rollout.advantage for group in weighted for rollout in group.rollouts]
    assert advantages == pytest.approx(expected.tolist(), rel=1e-6)


def trls_gdpo(table: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """Execute GRPOTrainer's branch for normalize_then_sum on a table."""
    grpo: Any = importlib.import_module("trl.trainer.grpo_trainer")
    method = inspect.getsource(grpo.GRPOTrainer._generate_and_score_completions)
    (branch,) = (
        node for node in ast.walk(ast.parse(textwrap.dedent(method)))
        if isinstance(node, ast.If) and "== 'normalize_then_sum'" in ast.unparse(node.test)
    )  # fmt: skip
    self = SimpleNamespace(reward_funcs=weights, reward_weights=torch.tensor(weights).double())
    names = {
        **vars(grpo), "self": self, "rewards_per_func": table, "num_generations": len(ANSWERS),
        "device": "cpu", "unscorable_mask": torch.isnan(table).all(dim=1),
    }  # fmt: skip
    exec("\n".join(map(ast.unparse, branch.body)), names)
    advantages: torch.Tensor = names["advantages"]
    return advantages


def turn_messages(messages: Any, *calls: tuple[str, dict[str, Any]]) -> tuple[Any, Any]:
    return list(calls), messages


def test_conversation_contains_turns_and_tool_messages() -> None:
    task = Task(id="q", messages=({"role": "user", "content": "?"},), spec={})
    segments = [
        encode("prompt"), encode("look", sampled=True), encode("~~"), encode("<a>", sampled=True),
        encode("[1]"), encode("end", sampled=True),
    ]  # fmt: skip
    tool = {"role": "tool", "content": "seen"}
    rollout = Rollout(
        task=task, segments=segments, status=Status.COMPLETED,
        tool_messages=[turn_messages([tool], ("find", {"x": 1})), turn_messages("[1]")],
    )  # fmt: skip
    arguments: dict[str, Any] = {}

    def function(completions: Any, completion_ids: Any) -> None: ...

    arguments = arguments_for(
        function, [RolloutView(rollout, decode)], None, lambda name, value: None
    )
    assert arguments == {
        "completions": [
            [
                {
                    "role": "assistant", "content": "look",
                    "tool_calls": [
                        {"type": "function", "function": {"name": "find", "arguments": {"x": 1}}}
                    ],
                },
                tool,
                {"role": "assistant", "content": "<a>[1]end"},
            ]
        ],
        "completion_ids": [list(b"look~~<a>[1]end")],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "is_trls"), [("brevity", True), ("tokens", True), ("plain", False), ("exact", True)]
)
def test_trl_signature_is_detected_by_parameter_names(name: str, is_trls: bool) -> None:
    assert is_trl_form(getattr(importlib.import_module("trls"), name)) is is_trls


def test_list_of_functions_has_weight_one_each() -> None:
    config = a_config('reward.functions=["trls:brevity", "trls:exact"]')
    assert config.reward.functions == {"trls:brevity": 1.0, "trls:exact": 1.0}
    with pytest.raises(ValueError, match=r"reward\.functions: expected different names"):
        a_config('reward.functions=["trls:exact", "trls:exact"]')


@pytest.mark.parametrize(("function", "answers"), [("trls:exact", False), ("trls:plain", True)])
def test_trl_functions_replace_the_numeric_reward(function: str, answers: bool) -> None:
    config = RewardConfig(functions={function: 1.0})
    assert needs_answers(decide_reward(config, judges=False)) is answers
    rollout = played(Task(id="q", messages=(), spec={"answer": "4"}), "4")
    assert bool(make_reward(config)(rollout)) is answers
    asked = RewardConfig(functions={function: 1.0}, format=0.2)
    assert "format" in make_reward(asked)(rollout)


def test_trl_function_is_rejected_as_reward_kind() -> None:
    with pytest.raises(ValueError, match=r"reward.kind: 'trls:exact' .* reward.functions = "):
        load_reward("trls:exact")


@pytest.mark.parametrize(
    ("function", "row", "message"),
    [
        ("exact", {"answer": "4"}, "'exact' needs the column 'solution', .* has answer"),
        ("brevity", {"prompts": 1}, "'prompts' is reserved"),
        ("worlds", {}, "'worlds' needs 'environments'"),
        ("brevity", {"completion": 1}, ""),
        ("exact", {"solution": "4"}, ""),
        ("clash", {}, ""),
    ],
)
def test_missing_columns_are_reported_before_the_run(
    function: str, row: dict[str, Any], message: str
) -> None:
    ours = scoring({f"trls:{function}": 1.0})
    task = Task(id="q", messages=(), spec=row)
    if not message:
        ours.require_columns(task, environments=False)
        return
    with pytest.raises(ValueError, match=f"reward.functions: (.*){message}"):
        ours.require_columns(task, environments=False)


def test_environments_are_the_instances_of_the_rollouts() -> None:
    (group, _) = groups_of(is_text=False)
    for number, rollout in enumerate(group.rollouts):
        rollout.environment = SimpleNamespace(worth=number)
    scoring({"trls:worlds": 1.0}).score([group])
    assert [rollout.rewards["worlds"] for rollout in group.rollouts] == [0.0, 1.0, 2.0, 3.0]
    assert all(rollout.environment is None for rollout in group.rollouts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "gave a wrong result: expected 4 values, one per completion, got 1"),
        ("nothing", "gave a wrong result: expected a list of 4 numbers or None, got None"),
        ("raises", "raised KeyError: 'mine'"),
        ("waits", "did not return within 0.05 s"),
    ],
)
def test_error_in_a_group_names_function_task_rollout_and_line(name: str, message: str) -> None:
    (group, _) = groups_of(is_text=True)
    scoring({f"trls:{name}": 1.0}, limit_s=0.05 if name == "waits" else 60.0).score([group])
    assert {rollout.status for rollout in group.rollouts} == {Status.INFRA_ERROR}
    for place, rollout in enumerate(group.rollouts):
        where = rf"\(task 'q0', rollout {place}, at .*trls.py:\d+\)"
        pattern = rf"the reward function {name} {message} {where}"
        assert re.fullmatch(pattern, str(rollout.error)), rollout.error


def test_invalid_value_drops_only_its_rollout() -> None:
    (group, _) = groups_of(is_text=True)
    scoring({"trls:mixed": 1.0}).score([group])
    assert [rollout.in_baseline for rollout in group.rollouts] == [True, False, True, True]
    assert "as mixed, got 'b' (task 'q0', rollout 1, at " in str(group.rollouts[1].error)


@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_trl_function_that_calls_sys_exit_stops_the_run(on_error: str) -> None:
    ours = scoring({"trls:leaves": 1.0}, on_error=on_error)
    for _ in range(2):
        with pytest.raises(
            UserCodeError, match=r"leaves called sys.exit\(0\) \(task 'q0', rollout"
        ):
            ours.score(groups_of(is_text=True)[:1])

"""Rows of the replaced systems that span several parts, from rollouts to training.

The tests of other rows are next to the part they test: `grep -r "def test_S[0123]_" tests`. A skip
for a missing package is a failure: tests/rows.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from agentgrpo.actions import Reading
from agentgrpo.agents.tools import ToolAgent
from agentgrpo.config import LossConfig, RolloutConfig
from agentgrpo.envs.calculator import calculate
from agentgrpo.envs.tools import ToolEnv
from agentgrpo.kernels.masked_grpo import masked_grpo_loss
from agentgrpo.kernels.objective import Objective
from agentgrpo.learn.advantages import assign_advantages
from agentgrpo.learn.packing import pack_tree
from agentgrpo.learn.token_weights import token_weights
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rollout.custom import CustomSampler, RolloutParams, rollout_from_tokens
from agentgrpo.train.plugins import load_sampler
from agentgrpo.types import Group, Rollout, SpanReward, Task
from tests import isolation, rows
from tests.playing import EOT, TOKENIZER, given_and_sampled, play_all, scripted, tasks
from tests.rollout.stubs import Turn

HERE = Path(__file__).parents[1]


def test_every_row_and_promise_has_tests() -> None:
    named = [name for path in HERE.rglob("test_*.py") for name in rows.tests_of(path)]
    assert {match[1] for name in named if (match := rows.ROW.match(name))} == set(rows.ROWS)
    missing = {what: {*tests} - {*named} for what, tests in rows.PROMISES.items()}
    assert {what: tests for what, tests in missing.items() if tests} == {}


@pytest.mark.parametrize(
    ("file", "why", "outcome"),
    [("test_x.py", "could not import", "failed"), (isolation.__file__, "no namespaces", "skipped")],
)
def test_row_skipped_for_missing_package_fails(file: str, why: str, outcome: str) -> None:
    report = SimpleNamespace(skipped=True, outcome="skipped", longrepr=(file, 1, why))
    rows.refuse_skip(report)
    assert report.outcome == outcome
    assert rows.holds("test_S2_8_x")
    assert not rows.holds("test_of_something_else")


# S1-8: a user's sampler


class Mine:
    """Returns its own masks and rewards: three of five tokens are trained, one has a reward."""

    def __init__(self, chat: ChatTemplate, config: RolloutConfig) -> None: ...

    def rollout(
        self, engine: Any, tasks: Sequence[Task], n: int, params: RolloutParams
    ) -> list[list[Rollout]]:
        return [[self._one(task, i) for i in range(n)] for task in tasks]

    def _one(self, task: Task, index: int) -> Rollout:
        rollout = rollout_from_tokens(
            task, [1, 5, 6], [7, 8, 9, 10, 11 + index], [-0.1] * 5, [1, 0, 0, 1, 1]
        )
        rollout.span_rewards = [SpanReward(6, 7, "praise", float(index))]
        return rollout


def test_S1_8_mask_and_rewards_of_custom_sampler_reach_the_loss() -> None:
    config = RolloutConfig(sampler=f"{__name__}:Mine")
    user = load_sampler(config)(ChatTemplate(TOKENIZER))
    engine: Any = scripted(lambda n, _: Turn(EOT))
    engine.num_in_flight = 0
    sampler = CustomSampler(user, engine, config, stop_token_ids=(2,))
    groups, _ = sampler.play(tasks(1), 2, seed=0)
    assert [r.reward for r in groups[0].rollouts] == [0.0, 1.0]
    loss = LossConfig()
    assign_advantages(groups, loss)
    weights = token_weights(groups, "dapo", config.max_sampled_tokens)
    (batch,) = pack_tree(groups, max_tokens=64, weights=weights)
    trained = Counter(batch.target_N.tolist())
    assert trained == {7: 2, 10: 2, 11: 1, 12: 1}, "tokens 8 and 9 are the environment's"
    sign = dict(zip(batch.target_N.tolist(), np.sign(batch.advantage_N).tolist(), strict=True))
    assert (sign[11], sign[12]) == (-1, 1)


# S1-9: what the environment said is in no term of the loss


@pytest.mark.parametrize("noise", [0.0, 3.0, float("nan")])
def test_S1_9_observation_tokens_do_not_change_kl_or_loss(noise: float) -> None:
    """Bit by bit, for any log-probabilities of the observation in either model."""
    rng = torch.Generator().manual_seed(0)
    mask = torch.tensor([[0, 0, 1, 1, 0, 0, 0, 1, 1, 0]], dtype=torch.bool)
    logits = torch.randn(1, 10, 17, generator=rng)
    target = torch.randint(17, (1, 10), generator=rng)
    given: dict[str, torch.Tensor] = {
        name: -torch.rand(1, 10, generator=rng) for name in ("old_logp", "ref_logp", "sampler_logp")
    }

    def loss(disturbed: bool) -> list[torch.Tensor]:
        x, extra, at = logits.clone(), {k: v.clone() for k, v in given.items()}, target.clone()
        if disturbed:
            x[~mask] += noise
            at[~mask] = (at[~mask] + 3) % 17
            for value in extra.values():
                value[~mask] += noise
        x.requires_grad_()
        objective = Objective(beta=0.5, loss_type="grpo")
        value, metrics = masked_grpo_loss(
            x, None, at, mask, torch.tensor([0.7]), objective, backend="torch", **cast(Any, extra)
        )
        (grad,) = torch.autograd.grad(value, x)
        return [value.detach(), grad[mask], *map(torch.as_tensor, metrics.values())]

    for clean, noisy in zip(loss(disturbed=False), loss(disturbed=True), strict=True):
        assert torch.equal(clean, noisy)
    silent = Objective(beta=0.0, loss_type="grpo")
    without, _ = masked_grpo_loss(
        logits, None, target, mask, torch.tensor([0.7]), silent, backend="torch", **cast(Any, given)
    )
    assert loss(disturbed=False)[0] != without, "the KL counts where it should"


# S2-1 and S2-2: what the engine saw is what is trained


def read(text: str, tools: Any) -> Reading:
    """A test agent: a turn that starts with a bracket is a call."""
    if not text.startswith("["):
        return Reading(text, (), attempted=False)
    calls = tuple(("calculate", f'{{"expression": "{e}"}}') for e in text[1:-1].split(","))
    return Reading("", calls, attempted=True)


def talk(tasks: Sequence[Task], n: int) -> tuple[Any, list[list[Rollout]]]:
    """Groups of rollouts with up to three turns, one of them with two calls."""
    env = ToolEnv([calculate])
    agent = ToolAgent(env=env, call_reader=lambda parser: read, parallel_calls=True)

    def policy(number: int, prompt: str) -> Turn:
        turns = prompt.count("<|im_start|>assistant") - 1
        text = ["[1+1,2*3]", "[7-2]", f"done {number}"][turns]
        return Turn(text + EOT, steps=1 + number % 3)

    engine = scripted(policy)
    return engine, play_all(agent, env, engine, tasks, n)


def test_S2_1_packed_rows_are_prompts_and_sampled_ids() -> None:
    """Every prompt of the engine starts a packed row, followed by its sampled, trained ids."""
    engine, groups = talk(tasks(2), 3)
    rollouts = [rollout for group in groups for rollout in group]
    rows = [rollout.token_ids for rollout in rollouts]
    owned: Counter[int] = Counter()
    for request in engine.requests:
        index = int(request.request_id.split(".")[0])
        row, start = rows[index], len(request.prompt)
        sampled = request.completion.token_ids
        assert (row[:start] == request.prompt).all()
        assert (row[start : start + len(sampled)] == sampled).all()
        owned[index] += len(sampled)
    assert [rollout.num_sampled for rollout in rollouts] == [owned[i] for i in range(6)]
    packed = [
        Group(task=task, rollouts=group) for task, group in zip(tasks(2), groups, strict=True)
    ]
    for i, rollout in enumerate(rollouts):
        rollout.rewards = {"answer": float(i % 2)}
    assign_advantages(packed, LossConfig())
    batches = pack_tree(packed, max_tokens=8192, weights=token_weights(packed, "dapo", 99))
    trained = Counter(int(token) for batch in batches for token in batch.target_N)
    expected = Counter(
        int(token) for request in engine.requests for token in request.completion.token_ids
    )
    assert trained == expected, "each as often as it was sampled"


def test_S2_2_every_turn_has_an_untrained_header() -> None:
    _, groups = talk(tasks(1), 2)
    header = "<|im_start|>assistant\n"
    for rollout in groups[0]:
        text = TOKENIZER.decode(rollout.token_ids)
        assert text.count(header) == rollout.stats["turns"] == 3
        sampled = "".join(text for mine, text in given_and_sampled(rollout) if mine)
        given = "".join(text for mine, text in given_and_sampled(rollout) if not mine)
        assert "<|im_start|>" not in sampled
        assert given.count(header) == 3
        assert text.count("<|im_start|>tool\n") == 3, "two answers in a row, each with its header"

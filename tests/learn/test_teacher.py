"""The teacher's part of the loss: equal to TRL's, and consistent with the records."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentgrpo.config import LossConfig, TeacherConfig
from agentgrpo.inspect.verify.advantages import divergences_of, teacher_faults
from agentgrpo.learn.advantages import assign_advantages
from agentgrpo.learn.learner import Learner
from agentgrpo.learn.minibatches import plan_updates
from agentgrpo.learn.reference import Reference
from agentgrpo.learn.teacher import FIELDS
from agentgrpo.types import Group, Int32, Rollout, Segment, Task
from tests.learn.given import (
    distributions,
    group_of,
    logp_of,
    mask_of,
    observed,
    oracle_model,
    rollout_of,
    run_config,
    sampled,
)
from tests.learn.test_trl import Recorder, Table, padded
from tests.learn.test_trl import played as played
from tests.tiny import VOCAB, make_model_dir

MakeLearner = Callable[..., Learner]
CRITIC = TeacherConfig(feedback="errors")
ALONE = LossConfig(loss_type="grpo", vllm_importance_sampling_correction=False)


def taught(config: TeacherConfig, **options: Any) -> dict[str, Any]:
    return {"config": config, **options}


class Other:
    """A reference model in place of the policy."""

    scorer = Table(7)

    def __call__(self, *asked: Any) -> Any:
        return self.scorer(*asked)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("topk", "weight"), [(0, 1.0), (0, 0.3), (300, 1.0), (1, 0.3)])
def test_teacher_loss_equals_trl(
    make_learner: MakeLearner, played: list[Group], masked: bool, topk: int, weight: float
) -> None:
    """Several turns, shared prefixes and batches, against TRL on one batch of padded rows.

    TRL's function takes the top-k tokens of its first argument. With the teacher there and the
    opposite direction of the divergence, it is what TRL does for a teacher behind a server.
    """
    pytest.importorskip("trl", reason="trl is in requirements-dev.txt")
    trl: Any = importlib.import_module("trl.experimental.sdpo.loss_utils")
    if masked:
        played[0].rollouts[1].treatment = played[0].rollouts[1].treatment.MASK
    teacher = TeacherConfig(model="t", topk=topk, weight=weight)
    assign_advantages(played, ALONE)
    learner: Any = make_learner(ALONE, teacher=taught(teacher), max_tokens=32)
    learner._scorer = table = Table(0)
    learner._teacher.reference = Other()
    learner._optimizer = recorder = Recorder(table)
    updates = plan_updates(played, run_config(ALONE, max_tokens=32, teacher=teacher), step=0)
    assert len(updates[0].batches) > 1
    metrics = learner.step(updates)
    assert metrics["teacher_terms"] == metrics["num_tokens"] > 0

    student, rollouts = Table(0), [r for g in played for r in g.rollouts]
    batch = padded(rollouts, student, student.logp.detach(), Table(7).logp.detach())
    mask = batch["mask"]
    if topk:
        each = trl.compute_topk_self_distillation_loss(
            Table(7).rows(batch["ids"]).detach(), student.rows(batch["ids"]),
            distillation_topk=topk, distillation_alpha=0.0, distillation_add_tail=True,
        )  # fmt: skip
        assert metrics["teacher_kl"] == pytest.approx(
            float((each * mask).sum() / mask.sum()), rel=1e-5
        )
    else:
        both = [
            torch.stack([logp, torch.log(-torch.expm1(logp))], -1)
            for logp in (batch["logp"], batch["ref"])
        ]
        first = torch.zeros_like(mask, dtype=torch.long)
        each = trl.compute_sampled_token_self_distillation_loss(
            *both, first, distillation_alpha=1.0
        )
    each = weight * each - (1 - weight) * batch["advantages"][:, None] * batch["logp"]
    loss = ((each * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    (expected,) = torch.autograd.grad(loss, student.logp)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(recorder.seen[0][0], expected, rtol=3e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("weight", "clip", "more"),
    [
        (0.3, 20.0, {}),
        (1.0, 0.2, {"num_mini_batches": 2, "num_iterations": 2}),
        (0.5, 20.0, {"old_logps": "sampler", "num_mini_batches": 2}),
        (0.0, 20.0, {}),
    ],
)
def test_recorded_advantages_are_the_trained_ones(
    make_learner: MakeLearner, groups: list[Group], tiny_model: Path, tmp_path: Path,
    weight: float, clip: float, more: dict[str, Any],
) -> None:  # fmt: skip
    """Recomputed in float64 from the models; verify agrees, and finds a changed value."""
    other = make_model_dir(tmp_path / "other", seed=5)
    loss = LossConfig.model_validate(more)
    teacher = TeacherConfig(model="t", weight=weight, clip=clip)
    config = run_config(loss, teacher=teacher)
    options = taught(teacher, source=str(other)) if teacher.teaches else None
    learner = make_learner(loss, teacher=options)
    learner.step(plan_updates(groups, config, step=0))
    theirs, ours = oracle_model(other), oracle_model(tiny_model)
    for rollout in (r for g in groups for r in g.rollouts):
        if not weight:
            assert rollout.teacher_logprobs is None is rollout.token_advantages
            continue
        sampled = [s.logprobs for s in rollout.segments if s.logprobs is not None]
        with torch.no_grad():
            old = logp_of(ours, rollout)
            if "old_logps" in more:
                old = torch.from_numpy(np.concatenate(sampled))
            gap = logp_of(theirs, rollout) - old
        expected = weight * gap.clamp(-clip, clip) + (1 - weight) * rollout.advantage
        actual = np.concatenate([a for a in rollout.token_advantages or () if a is not None])
        torch.testing.assert_close(
            torch.from_numpy(actual).double(), expected, rtol=1e-4, atol=1e-4
        )
    assert list(teacher_faults(groups, config)) == []
    if weight:
        changed = groups[1].rollouts[2].token_advantages
        assert changed is not None
        assert changed[1] is not None
        changed[1][0] += 0.01
        assert [fault[:2] for fault in teacher_faults(groups, config)] == [(1, 2)]
        forged = groups[0].rollouts[1]
        own = [None if x is None else np.zeros_like(x) for x in forged.token_advantages or ()]
        silent = replace(forged, advantage=0.0, teacher_logprobs=None, token_advantages=own)
        faults = list(teacher_faults([group_of(silent)], config))
        assert {fault[2].partition(": ")[2] for fault in faults} == {"no teacher_logprobs"}
        for rollout in (r for g in groups for r in g.rollouts):
            rollout.token_advantages = rollout.learner_logprobs = None
        assert list(teacher_faults(groups, config)) == []  # the learner refused the step


@pytest.mark.parametrize("kind", ["rows", "trees"])
def test_topk_tokens_are_compared_and_recorded(
    make_learner: MakeLearner, groups: list[Group], tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    """Recomputed in float64 from the models' full distributions; verify computes the same
    divergence.
    """
    other, weight, topk = make_model_dir(tmp_path / "other", seed=5), 0.4, 100
    teacher = TeacherConfig(model="t", weight=weight, topk=topk)
    config = run_config(ALONE, teacher=teacher)
    learner = make_learner(ALONE, teacher=taught(teacher, source=str(other)))
    updates = plan_updates(groups, config, step=0, share_prefixes=kind == "trees")
    metrics = learner.step(updates)
    apart = []
    for rollout in (r for g in groups for r in g.rollouts):
        mask = torch.from_numpy(mask_of(rollout)[1:])
        with torch.no_grad():
            theirs, ours = (
                distributions(oracle_model(f), rollout.token_ids)[mask] for f in (other, tiny_model)
            )
        ids, first, second, trained = (
            torch.from_numpy(np.concatenate([x for x in column or () if x is not None]))
            for column in (
                rollout.topk_ids, rollout.teacher_topk_logprobs, rollout.learner_topk_logprobs,
                rollout.token_advantages,
            )
        )  # fmt: skip
        expected = theirs.topk(topk)
        assert torch.equal(ids.view(-1, topk).long(), expected.indices)
        torch.testing.assert_close(
            first.view(-1, topk).double(), expected.values, rtol=1e-4, atol=1e-4
        )
        at = ours.gather(1, expected.indices)
        torch.testing.assert_close(second.view(-1, topk).double(), at, rtol=1e-4, atol=1e-4)
        assert np.allclose(trained, (1 - weight) * rollout.advantage)
        p, q = (torch.cat([x.exp(), 1 - x.exp().sum(1, True)], 1) for x in (at, expected.values))
        apart += (p * (p / q).log()).sum(1).tolist()
        np.testing.assert_allclose(divergences_of(rollout, topk), apart[-len(p) :], atol=1e-5)
    assert metrics["teacher_kl"] == pytest.approx(np.mean(apart), rel=1e-4)
    assert list(teacher_faults(groups, config)) == []
    changes: list[tuple[str, Any]] = [
        ("topk_ids", lambda x: x[:2].fill(7)),
        ("teacher_topk_logprobs", lambda x: x[:topk].fill(-0.1)),
        ("teacher_logprobs", lambda x: np.subtract(x, 0.01, out=x)),
        ("learner_topk_logprobs", lambda x: x.resize(topk, refcheck=False)),
    ]
    for name, change in changes:
        forged = copy.deepcopy(groups)
        change(getattr(forged[1].rollouts[2], name)[1])
        assert [fault[:2] for fault in teacher_faults(forged, config)] == [(1, 2)], name


PROMPT = np.array([5, 6, 7, 8], np.int32)
TEXTS = {"a\nc": [90, 91], "c": [92], "right": [93]}


def asked(task: Task, text: str) -> Int32:
    """The prompt with a text after the token 6."""
    return np.array([5, 6, *TEXTS[text], 7, 8], np.int32)


def two_rows() -> Rollout:
    """Three turns with feedback for the first and the last; the last is in another row."""
    first = [Segment(PROMPT), sampled(10, 11), observed(20, 21), sampled(12)]
    fields: Any = {"closed_rows": [first], "feedback": ["a", "", "c"], "advantage": 0.0}
    return rollout_of(observed(5, 6, 7, 8, 30), sampled(13, 14), **fields)


def test_feedback_read_by_the_policy_is_not_repeated(
    make_learner: MakeLearner, tiny_model: Path
) -> None:
    """Feedback on the first turn applies to that turn only; later rows also follow the text."""
    rollout, silent = two_rows(), replace(two_rows(), feedback=[])
    learner = make_learner(teacher=taught(CRITIC, prompt=asked))
    config = run_config(ALONE, max_tokens=32, teacher=CRITIC)
    learner.step(plan_updates([group_of(rollout, silent)], config, step=0))
    model = oracle_model(tiny_model)

    def scored(*ids: int, last: int) -> Any:
        with torch.no_grad():
            return logp_of(model, rollout_of(observed(*ids[:-last]), sampled(*ids[-last:])))

    expected = {
        1: (5, 6, 90, 91, 7, 8, 10, 11),
        3: (5, 6, 92, 7, 8, 10, 11, 20, 21, 12),
        5: (5, 6, 92, 7, 8, 30, 13, 14),
    }
    actual = rollout.teacher_logprobs
    assert actual is not None
    assert [i for i, values in enumerate(actual) if values is not None] == [*expected]
    for segment, ids in expected.items():
        values = actual[segment]
        assert values is not None
        torch.testing.assert_close(
            torch.from_numpy(values).double(),
            scored(*ids, last=len(values)),
            rtol=1e-4,
            atol=1e-4,
        )
    assert silent.teacher_logprobs is None
    assert list(teacher_faults([group_of(rollout, silent)], config)) == []
    rollout.feedback[2] = ""
    faults = teacher_faults([group_of(rollout)], config)
    message = "teacher_logprobs without feedback"
    assert [fault[2] for fault in faults] == [f"segment {n}: {message}" for n in (3, 5)]
    trained = [a for a in silent.token_advantages or () if a is not None]
    assert all((values == 0).all() for values in trained)


@pytest.mark.parametrize("topk", [0, 4])
def test_server_scores_equal_local_scores(
    make_learner: MakeLearner, groups: list[Group], tmp_path: Path, topk: int
) -> None:
    """For several turns and rows, one request each."""
    other = make_model_dir(tmp_path / "other", seed=5)
    model, teacher = oracle_model(other), TeacherConfig(model="t", topk=topk)

    def ask(ids: list[int], count: int) -> Any:
        with torch.no_grad():
            logp, ids_T = distributions(model, np.array(ids)), torch.tensor(ids)
        most = logp.topk(count)
        each = logp.gather(1, ids_T[1:, None])[:, 0], most.values, most.indices
        return tuple(x.numpy() for x in each)

    groups[1].rollouts.append(two_rows())
    actual = []
    for options in ({"source": str(other)}, {"source": ask}):
        played = copy.deepcopy(groups)
        learner = make_learner(ALONE, teacher=taught(teacher, **options))
        metrics = learner.step(
            plan_updates(played, run_config(ALONE, max_tokens=32, teacher=teacher), step=0)
        )
        rollouts = [r for g in played for r in g.rollouts]
        actual.append((metrics["teacher_terms"], rollouts, [*learner.policy.trained]))
    (terms, here, trained), (asked, there, from_there) = actual
    assert terms == asked > 0
    for ours, theirs in zip(here, there, strict=True):
        for name in FIELDS[: 3 if topk else 1]:
            columns = getattr(ours, name), getattr(theirs, name)
            for a, b in zip(*columns, strict=True):
                assert (a is None) == (b is None)
                assert a is None or np.allclose(a, b, rtol=1e-5, atol=1e-5)
    for p, q in zip(trained, from_there, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_solutions_come_from_other_rollouts(make_learner: MakeLearner) -> None:
    rollouts = [two_rows() for _ in range(3)]
    rollouts[1].rewards["solved"] = 1.0
    asks: list[tuple[int, list[int]]] = []

    def tell(rollout: Rollout, group: Sequence[Rollout]) -> str:
        asks.append((rollouts.index(rollout), [rollouts.index(r) for r in group]))
        return "right" if rollout is not rollouts[1] else ""

    teacher = TeacherConfig(feedback="solutions")
    learner = make_learner(teacher=taught(teacher, prompt=asked, feedback=tell))
    groups = [group_of(*rollouts)]
    metrics = learner.step(
        plan_updates(groups, run_config(ALONE, max_tokens=32, teacher=teacher), step=0)
    )
    assert asks == [(i, [0, 1, 2]) for i in range(3)]
    assert [r.teacher_logprobs is not None for r in rollouts] == [True, False, True]
    assert metrics["teacher_terms"] == 10
    assert metrics["teacher_tokens"] < 2 * 17, "two that read the same share it"


def test_bfloat16_average_converges_to_the_weights() -> None:
    """The average is float32: bfloat16 would round away steps of a hundredth of 2 %."""
    weights = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    policy: Any = SimpleNamespace(trained=[weights])
    average = Reference(policy, None, decay=0.99)
    weights.data.mul_(1.02)
    for _ in range(1000):
        average.update_average()
    (kept,) = average.state()
    assert kept is not None
    torch.testing.assert_close(kept, weights.float(), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(
    ("decay", "topk", "more"), [(0.0, 0, {}), (0.75, 0, {}), (0.75, 3, {"lora": {"rank": 2}})]
)
def test_average_follows_updates_and_is_resumed(
    make_learner: MakeLearner, groups: list[Group], tmp_path: Path, decay: float, topk: int,
    more: dict[str, Any],
) -> None:  # fmt: skip
    for rollout in (r for g in groups for r in g.rollouts):
        rollout.feedback = ["x"]

    def prompt(task: Task, text: str) -> Int32:
        return np.arange(3, 20, dtype=np.int32) % VOCAB

    teacher = TeacherConfig(feedback="errors", decay=decay, topk=topk)
    options = taught(teacher, prompt=prompt)
    loss = LossConfig(num_mini_batches=2)
    config = run_config(loss, teacher=teacher)
    learner = make_learner(loss, teacher=options, **more)
    first = [p.detach().clone() for p in learner.policy.trained]
    kept = []
    for step in range(2):
        learner.step(plan_updates(groups, config, step=step))
        kept.append([p.detach().clone() for p in learner.policy.trained])
    assert learner._teacher is not None
    average: list[Any] = learner._teacher.reference.state() if learner._teacher.reference else []
    assert bool(average) == (decay > 0)
    if decay:
        far = [(a - b).abs().max() for a, b in zip(average, kept[-1], strict=True)]
        near = [(a - b).abs().max() for a, b in zip(average, first, strict=True)]
        assert min(far) > 0
        assert min(near) > 0
    learner.save_state(tmp_path / "state.pt")
    resumed = make_learner(loss, teacher=options, **more)
    with torch.no_grad():
        for p, saved in zip(resumed.policy.trained, kept[-1], strict=True):
            p.copy_(saved)
    resumed.load_state(tmp_path / "state.pt")
    both: list[Any] = []
    for each in (learner, resumed):
        each.step(plan_updates(groups, config, step=2))
        both.append([r.teacher_logprobs for g in groups for r in g.rollouts])
        both.append([p.detach().clone() for p in each.policy.trained])
    for ours, theirs in zip(both[0], both[2], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None and b is None) or np.array_equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(both[1], both[3], strict=True))


def test_weight_0_equals_a_run_without_teacher(
    make_learner: MakeLearner, groups: list[Group]
) -> None:
    groups[1].rollouts[0].advantage = 0.0  # left out, where no teacher scores it
    actual = []
    for teacher in (TeacherConfig(), TeacherConfig(model="gone", weight=0.0)):
        config = run_config(LossConfig(), teacher=teacher)
        learner = make_learner()
        metrics = [learner.step(plan_updates(groups, config, step=step)) for step in range(2)]
        for numbers in metrics:
            del numbers["seconds"]
        actual.append((metrics, [p.detach().clone() for p in learner.policy.trained]))
    assert actual[0][0] == actual[1][0]
    assert all(torch.equal(a, b) for a, b in zip(actual[0][1], actual[1][1], strict=True))


@pytest.mark.parametrize("topk", [0, 2])
def test_without_feedback_a_step_learns_from_rewards(
    make_learner: MakeLearner, groups: list[Group], topk: int
) -> None:
    teacher = CRITIC.model_copy(update={"weight": 0.5, "topk": topk})
    learner = make_learner(teacher=taught(teacher, prompt=asked))
    metrics = learner.step(
        plan_updates(groups, run_config(LossConfig(), max_tokens=32, teacher=teacher), step=0)
    )
    assert metrics["teacher_terms"] == metrics.get("teacher_kl", 0) == 0
    for rollout in (r for g in groups for r in g.rollouts):
        actual = [a for a in rollout.token_advantages or () if a is not None]
        assert np.allclose(np.concatenate(actual), 0.5 * rollout.advantage)
        assert rollout.learner_topk_logprobs is None

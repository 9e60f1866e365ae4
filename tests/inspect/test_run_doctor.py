"""What the doctor says of records with one fault each, and of sound ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from agentgrpo import cli
from agentgrpo.inspect.run_doctor import CHECKS, CUT, diagnose, report
from agentgrpo.inspect.run_history import History
from agentgrpo.learn.advantages import assign_advantages
from agentgrpo.records.metrics import RunLog
from agentgrpo.types import Group, Int32, Rollout, Segment, Status, Task, Treatment, Turn
from tests.given import a_config

STEPS, TASKS, SIZE = 6, 6, 6
Change = Callable[[Rollout, int, int], Any]
"""Of a rollout, given its step (-1: held-out) and index."""


def ids(*numbers: int) -> Int32:
    return np.array(numbers, np.int32)


def played(step: int, group: int, index: int, rng: random.Random, moved: float = 0.0) -> Rollout:
    """Asks its world, is told, answers; right the more often the later the step."""
    gold = 100 + 10 * max(step, 0) + group + (500 if step < 0 else 0)
    right = rng.random() < 0.3 + 0.1 * max(step, 0)
    answer = str(gold if right else gold + rng.randint(1, 4))
    said, logprobs = ids(gold, int(answer), 3), np.full(3, -0.5 - moved, np.float32)
    task = Task(
        id=f"{step}/{group}", messages=({"role": "user", "content": f"{gold - 1} + 1?"},),
        spec={"answer": gold},
    )  # fmt: skip
    return Rollout(
        task=task, status=Status.COMPLETED, answer=answer,
        segments=[
            Segment(ids(1, gold)), Segment(said, logprobs), Segment(ids(7, int(answer))),
            Segment(ids(index, 5), np.full(2, -0.5 - moved, np.float32)),
        ],
        rewards={"answer": float(right), "format": 0.1},
        stats={"turns": 2.0, "tool_calls": 1.0, "tool_errors": 0.0, "malformed": 0.0},
    )  # fmt: skip


def nothing(r: Rollout, step: int, index: int) -> None:
    """Changes it by nothing."""


def write(
    folder: Path, change: Change = nothing, *, numbers: Any = lambda step: {},
    moved: float = 0.2, solved: tuple[float | None, ...] = (0.3, 0.9), heldout: int = 40,
    steps: int = STEPS, **settings: Any,
) -> Path:  # fmt: skip
    """A run's folder, each rollout as `change` leaves it."""
    config = a_config(f"steps={steps}", *(f"{k}={v}" for k, v in settings.items()))
    rng, log = random.Random(0), RunLog(folder)
    log.write_run_json(config=config.model_dump(mode="json"))
    (tokenizer := folder / "checkpoints/step_0/tokenizer.json").parent.mkdir(parents=True)
    Tokenizer(WordLevel({f"<{i}>": i for i in range(700)})).save(str(tokenizer))

    def evaluate(step: int, share: float | None, moved: float) -> None:
        groups = []
        for g in range(heldout):
            rollout = played(-1, g, 0, random.Random(g), moved)
            change(rollout, -1, 0)
            groups.append(Group(task=rollout.task, rollouts=[rollout]))
        log.rollouts(step, groups, split="heldout")
        said = {} if share is None else {"solved": share}
        log.write(step, eval={"rollouts": float(heldout)} | said, time={})

    evaluate(0, solved[0], 0.0)
    for step in range(steps):
        groups = []
        for g in range(TASKS):
            rollouts = [played(step, g, i, rng) for i in range(SIZE)]
            for i, rollout in enumerate(rollouts):
                change(rollout, step, i)
            groups.append(Group(task=rollouts[0].task, rollouts=rollouts))
        assign_advantages(groups, config.credited)
        log.rollouts(step, groups)
        learner = {"loss": 0.0, "learning_rate": config.learner.learning_rate, "grad_norm": 1.0}
        learner |= {"entropy_mean": 0.5, "sampler_gap_mean": 1e-6} | numbers(step)
        log.write(step, rollout={}, learner=learner, engine={}, time={})
    for share in solved[1:]:
        evaluate(steps, share, moved)
    return folder


def set_to(below: int = SIZE, **fields: Any) -> Change:
    """Fields of the first ones of each group."""

    def change(r: Rollout, step: int, index: int) -> None:
        for name, value in fields.items() if index < below else ():
            setattr(r, name, value)

    return change


def rewarded(of: Callable[[Rollout, int, int], float], part: str = "answer") -> Change:
    return lambda r, step, index: r.rewards.update({part: of(r, step, index)})


def counted(**numbers: float) -> Change:
    return lambda r, step, index: r.stats.update(numbers)


def right(r: Rollout) -> bool:
    return r.answer == str(r.task.spec["answer"])


def shown(tokens: Callable[[int], Int32]) -> Change:
    """Another answer of the world, by the index of the rollout."""
    return lambda r, step, index: r.segments.__setitem__(2, Segment(tokens(index)))


def asks(said: Callable[[Rollout, int], object], **fields: Any) -> Change:
    """Another question."""

    def change(r: Rollout, step: int, index: int) -> None:
        messages = ({"role": "user", "content": str(said(r, step))},)
        r.task = replace(r.task, messages=messages, **fields)
        r.segments[0] = Segment(ids(*str(said(r, step)).encode()))

    return change


def solves(count: int, change: Change = nothing) -> Change:
    """So many of each group are right in every step, and then the change."""

    def both(r: Rollout, step: int, index: int) -> None:
        gold = r.task.spec["answer"]
        r.answer = str(gold if index < count else gold + index + 1)
        r.rewards["answer"] = float(right(r))
        change(r, step, index)

    return both


def same_reward(r: Rollout, step: int, index: int) -> None:
    r.segments[3] = r.segments[1] = Segment(ids(9, 9), np.full(2, -0.5, np.float32))
    r.segments[2], r.answer = Segment(ids(7)), None
    r.rewards = {"answer": float(index % 2)}


def wrong_gold(r: Rollout, step: int, index: int) -> None:
    """A third of the tasks expects one more than what all answer."""
    gold = r.task.spec["answer"]
    r.answer = str(gold + 1 if gold % 3 == 0 else gold)
    r.rewards["answer"] = float(right(r) and index != 5)
    r.answer = r.answer if index != 5 else None


def cut_at_first(right: int) -> Change:
    """Most of four steps end where tokens are used up; of the last two so many are right."""

    def change(r: Rollout, step: int, index: int) -> None:
        if step >= STEPS - 2:
            solves(right)(r, step, index)
        elif step >= 0 and index > 1:
            r.status, r.answer, r.rewards["answer"] = Status.TRUNCATED_LENGTH, None, 0.0

    return change


def rises(step: int) -> dict[str, float]:
    return {"entropy_mean": 0.4 + 0.1 * step}


FLAT: dict[str, Any] = {"solved": (0.3, 0.3)}
FAULTS: dict[str, tuple[Change, dict[str, Any]]] = {
    "rollouts fail for technical reasons": (set_to(1, status=Status.INFRA_ERROR, error="x"), {}),
    "rollouts are not trained on": (
        set_to(2, status=Status.TIMED_OUT, treatment=Treatment.DROP),
        FLAT,
    ),
    "policy does not change": (nothing, {"moved": 1e-5, **FLAT}),
    "policy does not change: evaluated once": (
        nothing,
        {"solved": (0.3,), "learner.learning_rate": 1e-9},
    ),
    "policy does not change: learner.warmup_steps": (
        nothing,
        {"learner.warmup_steps": 50, "moved": 0.01, **FLAT},
    ),
    "policy does not change: loss.top_entropy_quantile": (
        nothing,
        {
            "loss.top_entropy_quantile": 0.1,
            "moved": 0.01,
            **FLAT,
            "numbers": lambda s: {"grad_norm": 0.004, "num_tokens": 300.0},
        },
    ),
    "reward is not deterministic": (same_reward, FLAT),
    "right answers get no reward": (rewarded(lambda r, s, i: float(not right(r) and i == 0)), FLAT),
    "wrong answers get a reward": (rewarded(lambda r, s, i: float(i < 3)), FLAT),
    "policy changes too fast": (
        rewarded(lambda r, s, i: float(right(r) and s < 2)),
        {"solved": (0.6, 0.1)},
    ),
    "policy changes too fast: held-out tasks alone": (
        solves(2),
        {"solved": (1.0, 0.67), "heldout": 24},
    ),
    "policy changes too fast: before its symptoms": (
        set_to(answer=None),
        {"learner.learning_rate": 3e-3, **FLAT},
    ),
    "temperature too high": (nothing, {"rollout.temperature": 2.0, "solved": (0.9, 0.9)}),
    "environment is not deterministic": (shown(lambda i: ids(7, i)), {}),
    "one question has two expected answers": (asks(lambda r, s: r.task.id[-1]), {}),
    "rollouts of a group are alike": (
        lambda r, s, i: r.segments.__delitem__(slice(1, 9)),
        {"rollout.temperature": 0.1, **FLAT},
    ),
    "reward does not follow the task": (
        rewarded(lambda r, s, i: 0.0 if right(r) else 2.0, "long"),
        FLAT,
    ),
    "too easy": (solves(6), {"solved": (1.0, 1.0)}),
    "too easy: nearly": (
        lambda r, s, i: solves(6 if int(r.task.id[-1]) % 3 else 5)(r, s, i),
        {"solved": (0.97, 0.97)},
    ),
    "required tag or prefix is never written": (
        solves(2, set_to(answer=None)),
        {"agent.options.close_tag": "</run>", **FLAT},
    ),
    "no tool calls": (solves(2, counted(tool_calls=0.0)), FLAT),
    "cut short": (lambda r, s, i: setattr(r, "status", CUT[i % 3]), FLAT),
    "cut short: at first, then it guesses": (cut_at_first(0), FLAT),
    "cut short: by what a program asks for": (
        solves(0, set_to(turns=[Turn.of(ids(1), ids(9), "length")], answer="")),
        FLAT,
    ),
    "malformed actions": (counted(malformed=1.0), FLAT),
    "no answer": (set_to(answer=None), FLAT),
    "tool calls fail": (counted(tool_errors=1.0), FLAT),
    "tool results are cut": (solves(2, counted(cut_answers=1.0)), FLAT),
    "expected answers may be wrong": (wrong_gold, FLAT),
    "expected answers may be wrong: few groups": (
        lambda r, s, i: wrong_gold(r, s, i) if s < 2 else set_to(answer=None)(r, s, i),
        FLAT,
    ),
    "exploits the reward": (
        solves(2, rewarded(lambda r, s, i: 0.1 * s, "long")),
        {"solved": (0.3, 0.2)},
    ),
    "held-out tasks are trained on": (asks(lambda r, s: r.task.id[-1], spec={}), {}),
    "held-out tasks are trained on: an id column": (
        lambda r, s, i: asks(lambda r, s: r.task.id[-1], spec={"answer": 1, "index": r.task.id})(
            r, s, i
        ),
        {},
    ),
    "held-out tasks are trained on: an id column and no answer": (
        lambda r, s, i: asks(lambda r, s: r.task.id[-1], spec={"row_id": r.task.id})(r, s, i),
        {},
    ),
    "held-out tasks are of another kind": (solves(5), {"solved": (0.1, 0.1)}),
    "off-policy": (nothing, {"numbers": lambda s: {"clip_high_fraction": 0.5}}),
    "KL penalty too large": (
        solves(2),
        {"numbers": lambda s: {"ref_kl": 0.02}, "loss.beta": 10.0, **FLAT},
    ),
    "forgets": (solves(2), {"numbers": lambda s: {"entropy_mean": 0.5 * 2.0**s}, **FLAT}),
    "forgets: by an entropy bonus": (
        solves(2),
        {"numbers": rises, "loss.entropy_coef": 1.0, **FLAT},
    ),
    "questions contain the answers": (
        solves(6, asks(lambda r, s: f"{s} {r.task.spec['answer']}")),
        {"solved": (1.0, 1.0)},
    ),
    "too few tasks": (asks(lambda r, s: s < 0, spec={}), {}),
    "too hard": (solves(0, rewarded(lambda r, s, i: 0.1 * (i % 2), "format")), FLAT),
    "all rewards of a group are equal": (
        solves(0, rewarded(lambda r, s, i: 0.1 * (s == 0), "format")),
        FLAT,
    ),
}
"""Finding, with what is special: what is wrong with every rollout, and with the run."""


def errs(r: Rollout, step: int, index: int) -> None:
    """On a third of the tasks four of six agree on what is wrong, else five on what is right."""
    gold = r.task.spec["answer"]
    agreed = index < 5 - (gold % 3 == 0)
    r.answer = str(gold + (gold % 3 == 0)) if agreed else None
    r.rewards["answer"] = float(right(r))


def taught(r: Rollout, step: int, index: int) -> None:
    """No reward tells its group's rollouts apart."""
    solves(SIZE * (int(r.task.id[-1]) % 2))(r, step, index)
    if step >= 0:
        r.token_advantages = [
            np.full(2, 0.4, np.float32) if s.sampled else None for s in r.segments
        ]


def guesses(r: Rollout, step: int, index: int) -> None:
    """Tasks that differ only in a column that the policy is not shown."""
    asks(lambda r, s: "Guess.", spec={"number": r.task.id})(r, step, index)


SOUND: dict[str, tuple[Change, dict[str, Any]]] = {
    "all right": (nothing, {}),
    "errs where it agrees less": (errs, FLAT),
    "agrees on what is wrong, and learns": (wrong_gold, {"solved": (0.1, 0.7), "heldout": 64}),
    "fewer by chance": (solves(2), {"solved": (0.6, 0.4), "heldout": 20}),
    "harder held-out tasks by chance": (solves(4), {"solved": (0.4, 0.4)}),
    "is cut at first, then solves": (cut_at_first(3), {}),
    "more entropy without a bonus": (solves(2), {"numbers": rises, **FLAT}),
    "writes what the agent reads": (solves(2), {"agent.options.close_tag": "<3>", **FLAT}),
    "solves without what the agent reads": (
        solves(4),
        {"agent.options.close_tag": "</run>", "solved": (0.7, 0.7)},
    ),
    "pays more in four steps, held-out less": (
        solves(2, rewarded(lambda r, s, i: 0.1 * s, "long")),
        {"solved": (0.3, 0.2), "steps": 4},
    ),
    "one prompt, hidden numbers to guess": (guesses, {}),
    "needs no call": (solves(2, counted(tool_calls=0.0)), {"solved": (0.7, 0.7)}),
    "nobody says what is solved": (
        lambda r, s, i: r.rewards.update(mine=r.rewards.pop("answer")),
        {"solved": (None, None)},
    ),
    "a teacher's alone": (taught, {"solved": (0.3, 0.9)}),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_run_has_nothing_wrong(name: str, tmp_path: Path) -> None:
    change, how = SOUND[name]
    found = diagnose(History(write(tmp_path, change, **how)))
    assert not found
    lines = report(tmp_path).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("No fault found")


def test_a_symptom_is_left_out_where_a_surer_finding_explains_it(tmp_path: Path) -> None:
    write(tmp_path / "symptoms", solves(0), **FLAT)
    assert [*diagnose(History(tmp_path / "symptoms"))] == [
        "all rewards of a group are equal",
        "too hard",
    ]
    change = solves(0, rewarded(lambda r, s, i: 0.1 * (i % 2), "format"))
    fast: dict[str, Any] = {"learner.learning_rate": 3e-3, **FLAT}
    write(tmp_path / "both", change, **fast)
    assert [*diagnose(History(tmp_path / "both"))] == ["policy changes too fast"]


def test_where_nothing_is_paid_tasks_are_too_hard_before_an_agreed_answer_is_refused(
    tmp_path: Path,
) -> None:
    def agree(r: Rollout, step: int, index: int) -> None:
        r.answer = str(r.task.spec["answer"] + 1 + index // 5)
        r.rewards = {"answer": 0.0, "format": 0.1 * (index % 2)}

    write(tmp_path, agree, **FLAT)
    assert [*diagnose(History(tmp_path))] == ["too hard", "expected answers may be wrong"]


SAYS = {"reward does not follow the task": "by 'long' (", "cut short": "(72 of 72)"}


@pytest.mark.parametrize("name", sorted({*CHECKS, *FAULTS}))
def test_a_fault_is_named_first_or_second(name: str, tmp_path: Path) -> None:
    change, how = FAULTS[name]
    write(tmp_path, change, **how)
    found = [*diagnose(History(tmp_path))]
    name, _, special = name.partition(":")
    assert name in found[:2], found
    said = report(tmp_path).splitlines()
    assert len(said) <= 30
    assert any((name if special else SAYS.get(name, name)) in line for line in said)


def test_a_run_that_was_killed_is_read_as_far_as_it_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text[: len(text) * 2 // 3])
    assert cli.main(["doctor", str(tmp_path)]) == 0
    assert "of 6 steps" in capsys.readouterr().out
    (tmp_path / "run.json").unlink()
    assert cli.main(["doctor", str(tmp_path)]) == 2
    assert "no run.json" in capsys.readouterr().err

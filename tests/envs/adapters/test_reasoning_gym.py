"""reasoning-gym's tasks and verifiers, in sandboxes, against the real package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from agentgrpo.envs.adapters.reasoning_gym import ReasoningGymEnv
from agentgrpo.sandbox import SandboxPool


def test_reasoning_gym_splits_share_no_seed() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=r"config\.seed: set the option `seed` instead"):
        ReasoningGymEnv(cast(Any, None), 1.0, dataset="chain_sum", config={"seed": 3})


@pytest.fixture(scope="module")
def chains(pool: SandboxPool) -> Iterator[ReasoningGymEnv]:
    pytest.importorskip("reasoning_gym")
    env = ReasoningGymEnv(pool, 1.0, dataset="chain_sum", size=4, config={"max_terms": 3})
    yield env
    env.close()


@pytest.mark.nsjail
def test_reasoning_gym_uses_its_verifier(chains: ReasoningGymEnv) -> None:
    import reasoning_gym

    upstream = reasoning_gym.create_dataset("chain_sum", size=4, seed=0, max_terms=3)
    tasks = chains.tasks("train")
    assert [t.messages[0]["content"] for t in tasks] == [e["question"] for e in upstream]
    assert upstream[0]["answer"] not in str(tasks[0].spec)
    right = [chains.reset(t).finish(e["answer"]) for t, e in zip(tasks, upstream, strict=True)]
    assert right == [{"solved": 1.0, "partial": 0.0}] * 4
    for wrong in ("none", "12345", ""):
        expected = {"solved": 0.0, "partial": upstream.score_answer(wrong, upstream[0])}
        assert chains.reset(tasks[0]).finish(wrong) == expected
    assert chains.reset(tasks[0]).finish(None) == {"solved": 0.0, "partial": 0.0}
    assert {t.messages[0]["content"] for t in chains.tasks("heldout")}.isdisjoint(
        t.messages[0]["content"] for t in tasks
    )
    with pytest.raises(ValueError, match="dataset 'chain_sums'"):
        ReasoningGymEnv(chains.pool, 1.0, dataset="chain_sums")


@pytest.mark.nsjail
def test_reasoning_gym_answer_is_never_executed(chains: ReasoningGymEnv, tmp_path: Path) -> None:
    """Its countdown and n_queens evaluate what they are given; others raise, or never return."""
    import reasoning_gym

    mark = tmp_path / "pwned"
    touch = f"__import__('pathlib').Path({str(mark)!r}).touch() or 0"
    first = {
        name: reasoning_gym.create_dataset(name, size=1, seed=0)[0]["metadata"]
        for name in ("countdown", "n_queens")
    }
    used = "+".join(map(str, first["countdown"]["numbers"]))
    forged = f"exec('import numpy; numpy.isclose = lambda *a, **k: True') or {used}"
    numbers, target = first["countdown"]["numbers"], first["countdown"]["target"]
    patch = (
        "setattr(__import__('sys').modules['reasoning_gym.games.countdown'], '_extract_ints', "
        f"lambda text: {numbers}) or {target}"
    )
    letters = "+".join(f"lambdify((), 'builtins.chr')()({ord(letter)})" for letter in patch)
    spelled = f"lambdify((), 'builtins.eval')()({letters})"
    board = [row.split() for row in first["n_queens"]["valid_answers"][0].splitlines()]
    for dataset, answers in {
        "countdown": [touch, forged, "9**9**9**9", "().__class__", "S('open(0)')", spelled],
        "n_queens": [touch, "open(0)", f"list({board})"],
        "prime_factorization": ["none", "2" * (1 << 20)],
    }.items():
        env = ReasoningGymEnv(chains.pool, 1.0, dataset=dataset, size=1)
        # one set of sandboxes for all: what starts takes seconds
        env.graders = chains.graders
        (given,) = env.tasks("train")
        for answer in answers:
            assert env.score(given, answer) < 0.1, answer
        made = reasoning_gym.create_dataset(dataset, size=1, seed=0)
        right = made[0]["answer"] or made[0]["metadata"]["solutions"][0]
        env._timeout_s = 30.0
        assert env.score(given, str(right)) == 1.0, "and the right one is right"
        if dataset == "n_queens":
            assert env.score(given, str(board)) == 0.5, "a board as a literal is read"
    assert not mark.exists()


@pytest.mark.slow
@pytest.mark.nsjail
def test_reasoning_gym_questions_match_its_verifier(
    chains: ReasoningGymEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of some datasets hang on the seed of Python's hashes, which this process draws."""
    monkeypatch.setattr("agentgrpo.envs.adapters.reasoning_gym.PAGE", 3)  # several
    listing = (
        "import json, reasoning_gym as r\nprint(json.dumps([*r.create_dataset({!r}, **{!r})]))"
    )
    for dataset in ("polynomial_multiplication", "ransom_note"):
        env = ReasoningGymEnv(chains.pool, 1.0, dataset=dataset, size=7, seed=5)
        env.graders = chains.graders
        for split, seed in (("train", 5), ("heldout", 1_000_008)):
            options = {"size": 7, "seed": seed}
            entries = json.loads(
                subprocess.run(
                    [sys.executable, "-c", listing.format(dataset, options)],
                    env={**os.environ, "PYTHONHASHSEED": "0"},
                    capture_output=True,
                    check=True,
                ).stdout
            )
            tasks = env.tasks(split)
            asked = [task.messages[0]["content"] for task in tasks]
            assert asked == [entry["question"] for entry in entries]
            assert [task.id for task in tasks] == [f"{dataset}/{split}/{i}" for i in range(7)]
            env._timeout_s = 30.0
            assert [env.score(t, e["answer"]) for t, e in zip(tasks, entries, strict=True)] == [
                1
            ] * 7


SPELLED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "simple_integration": ({}, ["Integral({integrand}, {variable})", "{integrand}"], []),
    "intermediate_integration": (
        {"problem_type_weights": [0, 0, 1, 0, 0, 0, 0, 0]},
        ["Integral({integrand}, x)", "Integral({integrand}, x, evaluate=False) + C"],
        ["atan(1) + {answer}"],
    ),
    "polynomial_multiplication": (
        {}, ["{polynomial_expr}", "Poly({polynomial_expr})"], ["0 + {answer}"],
    ),
    "countdown": (
        {},
        [
            "({sum})*log(log(E)) + {target}.E0", "({sum})*0x0 + 0x{target:x}",
            "{target:_}e0 # {numbers}", "0x{target:x} # {numbers}",
            "({sum})*(log(E) - log(E)) + factorial(ceiling(pi))", "({sum})//1 + 0_0",
            "({expression})**1_0",
        ],
        ["( {answer} )", "{answer}."],
    ),
    "puzzle24": (
        {},
        [
            "({sum})*log(log(E)) + factorial(ceiling(pi))", "({sum})*0x0 + 0x18",
            "0x18 # {numbers}", "6*4*1*1", "9*5/(1 + 3)*2", "9 + 3*5 + 1/2", "9 + 3*5/1**2",
        ],
        ["( {answer} )", "9+5*1*3"],
    ),
    "complex_arithmetic": ({}, ["nan", "NaN+nanj", "1e999"], ["({answer})"]),
    "coin_flip": ({}, ["0", "1e300", "1/2"], ["2/2", "1.00001"]),
    "game_of_life_halting": ({}, ["False", "yes", "0", "False or True"], [" true ", "True."]),
}  # fmt: skip


@pytest.mark.nsjail
@pytest.mark.parametrize("dataset", SPELLED)
def test_reasoning_gym_does_not_reward_repeating_the_question(
    chains: ReasoningGymEnv, dataset: str
) -> None:
    """Nor numbers that were not given, however they are spelled, nor what it takes for any."""
    import reasoning_gym
    import sympy

    config, wrong, right = SPELLED[dataset]
    env = ReasoningGymEnv(chains.pool, 1.0, dataset=dataset, size=1, config=config)
    env.graders = chains.graders
    (given,) = env.tasks("train")
    entry = reasoning_gym.create_dataset(dataset, size=1, seed=0, **config)[0]
    if dataset == "polynomial_multiplication":  # hangs on the seed of this process's hashes
        asked = given.messages[0]["content"].split("\n")[0].partition(": ")[2]
        product = sympy.expand(sympy.parse_expr(asked))
        entry = {"answer": str(product), "metadata": {"polynomial_expr": asked}}
    facts = {**entry["metadata"], "answer": entry["answer"]}
    facts["sum"] = "+".join(map(str, facts.get("numbers", [])))
    for answer in ["{answer}", *right]:
        assert env.score(given, answer.format(**facts)) == 1.0, answer
    for answer in wrong:
        assert env.score(given, answer.format(**facts)) < 0.1, answer

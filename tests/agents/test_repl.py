"""A console in one assistant message: rows S1-1, 2, 3, 4, 5, 10."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from agentgrpo.actions import InfrastructureError, RunCode, is_submission
from agentgrpo.agents.repl import ReplAgent, python_banner
from agentgrpo.envs.console import ConsoleEnv
from agentgrpo.inspect.verify.status import status_faults
from agentgrpo.sandbox import Limits, SandboxPool, Session, StepResult, StepStatus
from agentgrpo.types import SpanReward, Status, Task
from tests.given import a_config
from tests.playing import EOT, given_and_sampled, play, play_all, scripted, shown, task
from tests.rollout.stubs import Turn
from tests.terminal import typed_into_python
from tests.tiny import make_tokenizer

AGENT = ReplAgent(system_prompt="", banner="")
START = f"<|im_start|>user\nQ{EOT}\n<|im_start|>assistant\n>>>"
SUBMIT = " submit_final_answer(1)"
pytestmark = pytest.mark.nsjail

SNIPPETS = [
    ["1 + 1", "_ * 2", "x = 3", "x", "None", "'a'"],
    ["def f(n):", "    return n + 1", "", "f(1)"],
    ["@staticmethod", "def g():", "    return 4", "", "g.__func__()"],
    ["try:", "    1 / 0", "except ZeroDivisionError as e:", "    print('no', e)", ""],
    ["for i in range(3):", "    i", ""],
    ["'''one", "two'''", "(1,", "2)"],
    ["a = 1; b = 2; a + b"],
    ["1 +", "print('still here')"],
    ["if True", "x =", "f(1, 2 3)", "'abc", "def f(:", "for", "x = (1,", "y z)", "a b"],
    ["1 / 0", "undefined"],
    ["def f():", "    raise KeyError('k')", "", "f()"],
    ["# only a thought", "", "import sys", "sys.version_info[0]"],
    ["class A:", "    def __repr__(self): return 'an A'", "", "A()"],
    ["print('é \\u2713')", "'\\t'"],
    ["with open('/nope') as f:", "    pass", "", "  1", "0 or \\", "1 + 1"],
    ["class B(Exception): pass", "", "raise B('x') from ValueError('y')"],
    ["if 1:", "    2", "else:", "    3", "", "print('a', end='')", "1"],
    ["async def f(): return 3", "", "import asyncio", "asyncio.run(f())", "del f", "f"],
]


@pytest.fixture(scope="module")
def patient() -> Iterator[SandboxPool]:
    """On a busy machine an interrupt takes a while."""
    limits = Limits(timeout_s=5.0, grace_s=30.0)
    with SandboxPool(limits=limits, max_live=2, min_idle=1, zygotes=1) as made:
        yield made


@pytest.mark.parametrize("lines", SNIPPETS, ids=lambda lines: lines[0])
def test_S1_1_transcript_equals_that_of_cpython(pool: SandboxPool, lines: list[str]) -> None:
    typed = play(AGENT, ConsoleEnv(pool, 5.0), *(f" {line}\n" for line in lines), f"{EOT}")
    assert shown(typed) == START.removesuffix(">>>") + typed_into_python(lines) + EOT
    assert [text for sampled, text in given_and_sampled(typed) if sampled][:-1] == [
        f" {line}\n" for line in lines
    ]


def test_S1_1_a_line_that_never_ends_is_interrupted_as_by_ctrl_c(patient: SandboxPool) -> None:
    endless, interrupted = "while True: pass", "while True: raise KeyboardInterrupt"
    typed = play(AGENT, ConsoleEnv(patient, 2.0), f" {endless}\n", " \n", " 1 + 1\n", EOT)
    expected = typed_into_python([interrupted, "", "1 + 1"]).replace(interrupted, endless)
    got, want = (  # from 3.13 on with a mark below what raised, which is not the same here
        re.sub(r"\n +\^+$", "", text, flags=re.M) for text in (shown(typed), expected + EOT)
    )
    assert got.removeprefix(START.removesuffix(">>>")) == want


def test_S1_1_the_message_begins_with_pythons_banner() -> None:
    agent = ReplAgent()
    assert agent.prefill(task()) == python_banner() + ">>>"
    assert python_banner().startswith(f"Python {sys.version.split()[0]} (")
    assert 'Type "help", "copyright"' in python_banner()
    assert agent.stop == ("\n",)


def test_S1_1_a_line_has_the_tokens_that_it_has_in_a_worked_example(pool: SandboxPool) -> None:
    """The prompt's space and the word behind it are one token, as in every byte-level BPE."""
    merged = make_tokenizer(merges=[("Ġ", "s")])
    lines = [" 1 + 1\n", f"{SUBMIT}\n"]
    rollout = play(AGENT, ConsoleEnv(pool, 5.0), *lines, tokenizer=merged)
    played = rollout.token_ids.tolist()
    shot = merged.encode(f">>> 1 + 1\n2\n>>>{SUBMIT}\n", add_special_tokens=False)
    assert played[-len(shot) :] == shot
    assert rollout.answer == "1"


@pytest.mark.parametrize("space", ["", " "])
def test_S1_1_a_line_means_the_same_without_the_prompts_space(
    pool: SandboxPool, space: str
) -> None:
    lines = [f"{space}if True:\n", f"{space}    x = 4\n", "\n", f"{space}submit_final_answer(x)\n"]
    typed = play(AGENT, ConsoleEnv(pool, 5.0), *lines)
    assert (typed.answer, typed.stats["turns"]) == ("4", 4)


def test_S1_2_a_block_asks_for_more_and_an_empty_line_ends_it(pool: SandboxPool) -> None:
    typed = play(
        AGENT, ConsoleEnv(pool, 5.0), " def f():\n", "     return 7\n", "\n", " f()\n", EOT
    )
    given = [text for sampled, text in given_and_sampled(typed)[1:] if not sampled]
    assert given == ["...", "...", ">>>", "7\n>>>"]


def test_lost_answer_is_an_infra_error(pool: SandboxPool, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Session.step

    def failing(session: Session, code: str, *rest: Any) -> StepResult:
        if code.endswith(".answer"):
            return StepResult(status=StepStatus.INFRA_ERROR, detail="the zygote is gone")
        return step(session, code, *rest)

    monkeypatch.setattr(Session, "step", failing)
    episode = ConsoleEnv(pool, 5.0).reset(Task(id="t", messages=(), spec={}))
    with pytest.raises(InfrastructureError, match="zygote"):
        episode.step(RunCode("submit_final_answer(1)"))
    episode.close()


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("submit_final_answer(6 * 7)\n", "42"),
        ("submit_final_answer('a b')\n", "a b"),
        ("submit_final_answer(value=[1, 2])\n", "[1, 2]"),
        ("submit_final_answer(None)\n", "None"),
        ("submit_final_answer(2, 'b', -1.5)\n", "2, b, -1.5"),
        ("submit_final_answer(value=2, x=3)\n", "2, 3"),
        ("submit_final_answer(*(1, 2))\n", "1, 2"),
        ("submit_final_answer(__import__('fractions').Fraction(1, 2))\n", "1/2"),
        ("submit_final_answer(print('x') or 'y')\n", "y"),
        ("submit_final_answer('z' * 100_000)\n", None),
        (f"submit_final_answer(3){EOT}", "3"),
    ],
)
def test_S1_3_submitting_ends_the_rollout_with_the_value(
    pool: SandboxPool, line: str, answer: str | None
) -> None:
    typed = play(AGENT, ConsoleEnv(pool, 5.0), line, "never asked for\n")
    assert typed.status is Status.COMPLETED
    if answer is None:
        assert "zzz" in str(typed.answer), "longer than a value may be: as it is shown"
    else:
        assert typed.answer == answer
    assert typed.stats["turns"] == 1


def test_S1_3_only_a_call_that_worked_submits(pool: SandboxPool) -> None:
    lines = ["submit_final_answer(x)\n", "submit_final_answer()\n", "y = submit_final_answer(5)\n"]
    typed = play(AGENT, ConsoleEnv(pool, 5.0), *lines, "submit_final_answer(y)\n")
    assert (typed.answer, typed.stats["turns"]) == ("5", 4)
    mine = " def submit_final_answer(v): return 7\n"
    redefined = play(AGENT, ConsoleEnv(pool, 5.0), mine, "\n", "submit_final_answer(1)\n")
    assert redefined.answer == "7", "as it is shown"
    assert not is_submission("submit_final_answer(1); submit_final_answer(2)")
    assert not is_submission("submit_final_answer()")


NOT_RUN = "Error: not run. 0 {}calls left, 1 asked for. Answer with what you have.\n>>>"


@pytest.mark.parametrize(
    ("limit", "which"), [({"max_tool_calls": 1}, ""), ({"max_calls_of": {"python": 1}}, "python ")]
)
def test_submission_after_the_last_line_is_accepted(
    pool: SandboxPool, limit: Any, which: str
) -> None:
    lines = [" x = 6\n", " x = 7\n", " submit_final_answer(x)\n"]
    typed = play(AGENT, ConsoleEnv(pool, 5.0), *lines, **limit)
    assert (typed.status, typed.answer) == (Status.COMPLETED, "6")
    assert (False, NOT_RUN.format(which)) in given_and_sampled(typed)


def test_failed_submission_gives_no_further_line(pool: SandboxPool) -> None:
    lines = [" x = 6\n", " submit_final_answer(y)\n", " submit_final_answer(x + y)\n", " never\n"]
    typed = play(AGENT, ConsoleEnv(pool, 5.0), *lines, max_tool_calls=1)
    assert (typed.status, typed.stats["turns"]) == (Status.TRUNCATED_CALLS, 3)
    assert typed.answer is None
    config = a_config("agent.kind=repl", "env.kind=console", "rollout.max_tool_calls=1")
    assert list(status_faults(typed, config)) == []


@pytest.mark.parametrize("keep", ["head", "ends", "tail"])
def test_cut_output_ends_with_a_prompt(pool: SandboxPool, keep: str) -> None:
    lines = [" print('y' * 300)\n", f"{SUBMIT}\n"]
    cut: dict[str, Any] = {"max_observation_tokens": 60, "keep_observation": keep}
    typed = play(AGENT, ConsoleEnv(pool, 5.0), *lines, **cut)
    (shown_,) = [text for sampled, text in given_and_sampled(typed)[2:] if not sampled]
    assert "tokens cut" in shown_
    assert shown_.endswith("\n>>>")
    assert shown_.count(">>>") == 1
    assert typed.answer == "1"


def test_S1_4_each_line_has_its_outcome_and_reward_on_its_own_tokens(patient: SandboxPool) -> None:
    env = ConsoleEnv(patient, 2.0, line_rewards={"syntax": -0.3, "error": -0.1, "timeout": -0.5})
    lines = ["x =\n", "1\n", "1/0\n", "while True: pass\n", "\n", "y y\n", f"{SUBMIT}\n"]
    typed = play(AGENT, env, *lines)
    starts = np.cumsum([0, *(len(s.token_ids) for s in typed.segments)])
    span = {
        text: (int(start), int(start) + len(text))
        for start, (sampled, text) in zip(starts, given_and_sampled(typed), strict=False)
        if sampled
    }
    assert typed.span_rewards == [
        SpanReward(*span["x =\n"], "line", -0.3),
        SpanReward(*span["1/0\n"], "line", -0.1),
        SpanReward(*span["\n"], "line", -0.5),
        SpanReward(*span["y y\n"], "line", -0.3),
    ]
    assert typed.reward == pytest.approx(sum(r.value for r in typed.span_rewards))
    assert (typed.stats["lines_syntax"], typed.stats["lines_timeout"]) == (2, 1)


def test_S1_5_what_follows_the_newline_in_a_token_is_kept_and_not_typed(pool: SandboxPool) -> None:
    typed = play(AGENT, ConsoleEnv(pool, 5.0), "print(5)\n\n  junk", f"{SUBMIT}\n")
    assert given_and_sampled(typed)[1:3] == [(True, "print(5)\n\n  junk"), (False, "5\n>>>")]


def test_S1_5_a_newline_within_a_merged_token_ends_the_line_and_the_token_stays(
    pool: SandboxPool,
) -> None:
    """As in Qwen's vocabulary, where `)` and a newline are one token."""
    merged = make_tokenizer(merges=[(")", "Ċ"), ("5", ")Ċ")])
    (token,) = merged.encode("5)\n", add_special_tokens=False)
    lines = ["print(5)\n", f"{SUBMIT}\n"]
    rollout = play(AGENT, ConsoleEnv(pool, 5.0), *lines, tokenizer=merged)
    assert rollout.segments[1].sampled
    assert rollout.segments[1].token_ids[-1] == token
    assert [merged.decode(s.token_ids) for s in rollout.segments[1:3]] == ["print(5)\n", "5\n>>>"]
    assert rollout.answer == "1"


def test_S1_10_lines_share_variables_and_rollouts_do_not(pool: SandboxPool) -> None:
    def policy(number: int, prompt: str) -> Turn:
        typed = prompt.count(">>>") - 1
        return Turn([f"x = {number}\n", "x\n", "submit_final_answer(x)\n"][typed])

    (group,) = play_all(AGENT, ConsoleEnv(pool, 5.0), scripted(policy), [task()], 4)
    assert sorted(r.answer or "" for r in group) == ["0", "1", "2", "3"]


def test_dead_interpreter_is_replaced_with_a_message(pool: SandboxPool) -> None:
    typed = play(AGENT, ConsoleEnv(pool, 5.0), " import os; os._exit(1)\n", " 2\n", f"{SUBMIT}\n")
    assert "(the interpreter was restarted: its variables are gone)\n>>> 2\n2\n>>> submit" in shown(
        typed
    )

"""How good the answer of a rollout is: by its reward, by comparing it, or by asking a model."""

from __future__ import annotations

import re
from collections.abc import Callable

from agentgrpo.actions import InfrastructureError
from agentgrpo.models.endpoints import Endpoint
from agentgrpo.rewards.answers import (
    ARTICLES,
    accepted_answers,
    exact_match,
    expected_mathematics,
    expected_texts,
    f1,
    math_equal,
)
from agentgrpo.types import Rollout, Task

Quality = Callable[[Rollout], float]
"""How good the answer of a rollout is, in [0, 1]."""

JUDGE = """Question: {question}
Accepted answers: {accepted}
Given answer: {answer}
Is the given answer equivalent to an accepted one? Reply with one word: Correct or Incorrect."""

REDUNDANT = """Question: {question}
An assistant with tools did this:
{trajectory}
Is any of its tool calls redundant or ineffective, so that it could be left out? Say yes or no."""


TRIES = 3
"""How often a judge is asked that says neither the one nor the other."""


def says_correct(reply: str) -> bool | None:
    """A judge's verdict: "correct", and neither "incorrect", "not correct" nor "wrong".

    None: it gave none.
    """
    said = reply.lower()
    if re.search(r"incorrect|wrong|not\s+correct", said):
        return False
    return True if "correct" in said else None


def says_yes(reply: str) -> bool | None:
    """Whether the first word that is yes or no is yes; None: there is no such word."""
    found = re.search(r"\b(yes|no)\b", reply.lower())
    return None if found is None else found.group() == "yes"


def judged(judge: Endpoint) -> Quality:
    """Quality by a model: 1.0 where it finds the answer equivalent to an accepted one.

    An equal answer is not put to it. Its first verdict counts: asking until it agrees
    would count its mistakes as the policy's merits. It is asked again only while it gives none.
    """

    def quality(rollout: Rollout) -> float:
        if rollout.answer is None:
            return 0.0
        accepted = accepted_answers(rollout.task)
        if _plain(rollout.answer) in map(_plain, accepted) or math_equal(rollout.answer, accepted):
            return 1.0
        prompt = JUDGE.format(
            question=last_question(rollout.task), accepted=accepted, answer=rollout.answer
        )
        for attempt in range(TRIES):
            (reply,) = judge.complete(
                [{"role": "user", "content": prompt}], temperature=0.6 if attempt else 0.0
            )
            if (verdict := says_correct(reply)) is not None:
                return float(verdict)
        raise InfrastructureError(
            f"task {rollout.task.id}: the judge said neither Correct nor Incorrect, {TRIES} times; "
            f"the last: {reply[:80]!r}"
        )

    return quality


def _plain(text: str) -> list[str]:
    """Without case, space and articles; not words(), to which x/2 and x*2 are the same."""
    said = text.lower().split()
    return [word for word in said if word not in ARTICLES] or said


def conciseness(judge: Endpoint, text_of: Callable[[Rollout], str], *, votes: int = 10) -> Quality:
    """1.0 unless more than half of the judge's votes call a tool call of the rollout redundant.

    It is asked `votes` times at temperature 0.6; a tie is concise, no vote no voice.
    """

    def concise(rollout: Rollout) -> float:
        prompt = REDUNDANT.format(question=last_question(rollout.task), trajectory=text_of(rollout))
        replies = judge.complete([{"role": "user", "content": prompt}], n=votes, temperature=0.6)
        cast = [vote for vote in map(says_yes, replies) if vote is not None]
        if not cast:
            raise InfrastructureError(
                f"task {rollout.task.id}: none of {votes} votes says yes or no; the first: "
                f"{replies[0][:80]!r}"
            )
        return float(2 * sum(cast) <= len(cast))

    return concise


COMPARISONS = {"f1": f1, "exact": exact_match, "math": math_equal}
"""Qualities that compare the answer with the accepted ones."""


def last_question(task: Task) -> str:
    """What was asked: the last message of the user."""
    return next((m["content"] for m in reversed(task.messages) if m["role"] == "user"), "")


def quality_by(name: str, *, weight: float = 1.0, judge: Endpoint | None = None) -> Quality:
    """The quality that a config names."""
    if name == "answer":
        return lambda rollout: min(1.0, max(0.0, _judged_answer(rollout, weight)))
    if name == "judge":
        if judge is None:
            raise ValueError("measures.quality: 'judge' needs measures.judge, the endpoint's name")
        return judged(judge)
    if name not in COMPARISONS:
        raise ValueError(
            f"measures.quality: expected answer, f1, exact, math or judge, got {name!r}"
        )

    def quality(rollout: Rollout) -> float:
        accepted = accepted_answers(rollout.task)
        return 0.0 if rollout.answer is None else COMPARISONS[name](rollout.answer, accepted)

    return quality


def require_answer(name: str, task: Task) -> None:
    """That a quality of this name can be told of a task's rollouts."""
    try:
        if name != "answer":
            (expected_mathematics if name == "math" else expected_texts)(task)
    except ValueError as error:
        raise ValueError(f"measures.quality = {name!r}: {error}") from None


def _judged_answer(rollout: Rollout, weight: float) -> float:
    """What the environment says (`solved`), else the reward: `answer`, or a share as `partial`."""
    if "solved" in rollout.rewards:
        return rollout.rewards["solved"]
    return (rollout.rewards.get("answer", 0.0) + rollout.rewards.get("partial", 0.0)) / weight

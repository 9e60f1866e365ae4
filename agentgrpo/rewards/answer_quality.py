"""Answer quality in [0, 1]: from the reward, by comparison, or from a judge model."""

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
"""Rollout -> quality of its answer, in [0, 1]."""

JUDGE = """Question: {question}
Accepted answers: {accepted}
Given answer: {answer}
Is the given answer equivalent to an accepted one? Reply with one word: Correct or Incorrect."""

REDUNDANT = """Question: {question}
An assistant with tools did this:
{trajectory}
Is any of its tool calls redundant or ineffective, so that it could be left out? Say yes or no."""


TRIES = 3
"""How often a judge is called until its reply contains a verdict."""


def says_correct(reply: str) -> bool | None:
    """Parse a judge's verdict: "incorrect", "not correct" and "wrong" are False.

    None: the reply has no verdict.
    """
    text = reply.lower()
    if re.search(r"incorrect|wrong|not\s+correct", text):
        return False
    return True if "correct" in text else None


def says_yes(reply: str) -> bool | None:
    """Whether the first word among "yes" and "no" is "yes". None: there is neither."""
    match = re.search(r"\b(yes|no)\b", reply.lower())
    return None if match is None else match.group() == "yes"


def judge_quality(judge: Endpoint) -> Quality:
    """Quality by a judge model: 1.0 if it finds the answer equivalent to an accepted one.

    The judge is not called if the answer equals an accepted one. Its first verdict counts: retrying
    until it agrees would reward the policy for the judge's mistakes. It is called again only if the
    reply contains no verdict.
    """

    def quality(rollout: Rollout) -> float:
        if rollout.answer is None:
            return 0.0
        accepted = accepted_answers(rollout.task)
        if _plain_words(rollout.answer) in map(_plain_words, accepted) or math_equal(
            rollout.answer, accepted
        ):
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
            f"task {rollout.task.id}: expected Correct or Incorrect from the judge, got neither in "
            f"{TRIES} replies; the last: {reply[:80]!r}"
        )

    return quality


def _plain_words(text: str) -> list[str]:
    """Lower-case words without articles. Not words(), which would make x/2 and x*2 equal."""
    text_words = text.lower().split()
    return [word for word in text_words if word not in ARTICLES] or text_words


def conciseness(judge: Endpoint, text_of: Callable[[Rollout], str], *, votes: int = 10) -> Quality:
    """1.0 unless more than half of the judge's votes call a tool call of the rollout redundant.

    The judge is sampled `votes` times at temperature 0.6. A tie counts as concise; replies without
    yes or no are ignored.
    """

    def concise(rollout: Rollout) -> float:
        prompt = REDUNDANT.format(question=last_question(rollout.task), trajectory=text_of(rollout))
        replies = judge.complete([{"role": "user", "content": prompt}], n=votes, temperature=0.6)
        verdicts = [vote for vote in map(says_yes, replies) if vote is not None]
        if not verdicts:
            raise InfrastructureError(
                f"task {rollout.task.id}: expected yes or no from the judge, got neither in "
                f"{votes} replies; the first: {replies[0][:80]!r}"
            )
        return float(2 * sum(verdicts) <= len(verdicts))

    return concise


COMPARISONS = {"f1": f1, "exact": exact_match, "math": math_equal}
"""Functions that compare an answer with the accepted answers, by their name in the config."""


def last_question(task: Task) -> str:
    """The last user message of a task."""
    return next((m["content"] for m in reversed(task.messages) if m["role"] == "user"), "")


def make_quality(name: str, *, weight: float = 1.0, judge: Endpoint | None = None) -> Quality:
    """Make the quality function that `measures.quality` names."""
    if name == "answer":
        return lambda rollout: min(1.0, max(0.0, _environment_or_reward(rollout, weight)))
    if judge is not None:
        return judge_quality(judge)
    compare = COMPARISONS[name]

    def quality(rollout: Rollout) -> float:
        accepted = accepted_answers(rollout.task)
        return 0.0 if rollout.answer is None else compare(rollout.answer, accepted)

    return quality


def require_answer(name: str, task: Task) -> None:
    """Check that a task has the answer that a quality needs. Raises ValueError if not."""
    try:
        if name != "answer":
            (expected_mathematics if name == "math" else expected_texts)(task)
    except ValueError as error:
        raise ValueError(f"measures.quality = {name!r}: {error}") from None


def _environment_or_reward(rollout: Rollout, weight: float) -> float:
    """The environment's `solved`, else the reward's `answer` plus `partial` over its weight."""
    if "solved" in rollout.rewards:
        return rollout.rewards["solved"]
    return (rollout.rewards.get("answer", 0.0) + rollout.rewards.get("partial", 0.0)) / weight

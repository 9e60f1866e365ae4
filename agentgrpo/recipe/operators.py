"""The operators of the flywheel: how a trajectory is turned into a better one.

Each takes one trajectory and returns another, made from the same question: kept turns, something
edited, and the generator going on from there with fresh results of its tools. What a model must
say for it is asked in words and read strictly; a reply in another form makes no trajectory.
(ET-Agent's operators. There, hints were added by their single characters, refined text came back in
lower case, and judges were asked until they agreed.)
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentgrpo.config.recipe import FlywheelConfig
from agentgrpo.models.endpoints import Endpoint
from agentgrpo.recipe.trajectories import PlayedTurn, Trajectory, TrajectoryPlayer
from agentgrpo.rewards.answer_quality import last_question
from agentgrpo.rewards.answers import accepted_answers
from agentgrpo.types import Segment, Task


class OperatorSkipped(Exception):
    """The operator made no trajectory; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorContext:
    """What operators work with."""

    player: TrajectoryPlayer
    reflector: Endpoint
    critic: Endpoint
    config: FlywheelConfig

    def ask(self, endpoint: Endpoint, prompt: str) -> str:
        """One reply."""
        (reply,) = endpoint.complete(
            [{"role": "user", "content": prompt}],
            temperature=self.config.critic_temperature,
            max_tokens=self.config.max_reply_tokens,
        )
        return reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What an operator is applied to."""

    task: Task
    trajectory: Trajectory
    index: int
    """Of the trajectory in the question's buffer."""
    rng: random.Random


Operator = Callable[[OperatorContext, Candidate], Trajectory]

REDUNDANT = """Question: {question}
A right solution in numbered steps:
{steps}
Find the first step whose tool call is redundant or ineffective. If there is none, reply
Step: no
Else reply in exactly this form, the corrected step being complete, with its tool call if any:
Step: NUMBER
Analysis: WHY
Corrected step:
TEXT"""

REFINE = """Question: {question}
A right solution in numbered steps:
{steps}
Rewrite only the thoughts, more concise and clear. Leave out tool calls and results. Reply with one
line per step that has a thought, in exactly this form:
Thought NUMBER: TEXT"""

FLAW = """Question: {question}
{accepted}A wrong solution in numbered steps:
{steps}
Which step is the first that is flawed? Reply in exactly this form:
Step: NUMBER
Analysis: WHY"""

ANALYSE = """Question: {question}
A solution in numbered steps, of which the last one is flawed:
{steps}
Analyse the steps: what is right so far, what went wrong in the last one, what to do instead."""

REWRITE = """Question: {question}
A solution in numbered steps, of which the last one is flawed:
{steps}
Analysis: {analysis}
Write a new last step in the same form, with its tool call if any, and nothing else."""


def fresh(context: OperatorContext, chosen: Candidate) -> Trajectory:
    """Another attempt from the start."""
    return context.player.play(chosen.task, operator="fresh")


def redundant(context: OperatorContext, chosen: Candidate) -> Trajectory:
    """The critic corrects the first redundant step; the generator goes on behind it."""
    reply = context.ask(context.critic, _prompt(REDUNDANT, chosen))
    if re.match(r"\s*Step:\s*no\b", reply, re.IGNORECASE):
        raise OperatorSkipped("the critic found no redundant step")
    number = _step_in(reply, chosen)
    _, found, corrected = reply.partition("Corrected step:")
    if not found:
        raise OperatorSkipped("the critic's reply has no 'Corrected step:'")
    new = _written(context, corrected.strip(), "critic", chosen.task)
    return _continued(context, chosen, "redundant", [*chosen.trajectory.turns[:number], new])


def refinement(context: OperatorContext, chosen: Candidate) -> Trajectory:
    """The critic rewrites the thoughts; what was done and its results stay, verbatim."""
    turns = chosen.trajectory.turns
    reply = context.ask(context.critic, _prompt(REFINE, chosen))
    said = {
        int(n): text.strip() for n, text in re.findall(r"^Thought (\d{1,9}):(.*)$", reply, re.M)
    }
    wanted = {i for i, turn in enumerate(turns, 1) if _split(context, turn.text)[0].strip()}
    if not wanted:
        raise OperatorSkipped("there is no thought to refine")
    if said.keys() != wanted:
        raise OperatorSkipped(f"thoughts of steps {sorted(wanted)} wanted, got {sorted(said)}")
    if any(mark in text for text in said.values() for mark in context.config.marks):
        raise OperatorSkipped("a refined thought acts")
    refined = tuple(
        _rethought(context, turn, said[number]) if number in said else turn
        for number, turn in enumerate(turns, 1)
    )
    old = chosen.trajectory.rollout
    return Trajectory(
        turns=refined,
        rollout=replace(
            old,
            segments=[old.segments[0], *(s for turn in refined for s in turn.segments)],
            stats=dict(old.stats),
            rewards=dict(old.rewards),
            span_rewards=[],
        ),
        operator="refinement",
        parent=chosen.index,
    )


def reflection(context: OperatorContext, chosen: Candidate) -> Trajectory:
    """The reflector analyses up to the first flawed step and rewrites that step."""
    number = _first_flaw(context, chosen)
    turns = chosen.trajectory.turns
    seen = _steps(turns[: number + 1])
    question = last_question(chosen.task)
    analysis = context.ask(context.reflector, ANALYSE.format(question=question, steps=seen))
    if not analysis.strip():
        raise OperatorSkipped("the reflector's analysis is empty")
    prompt = REWRITE.format(question=question, steps=seen, analysis=analysis.strip())
    rewritten = context.ask(context.reflector, prompt).strip()
    new = _written(context, rewritten, "reflector", chosen.task)
    return _continued(context, chosen, "reflection", [*turns[:number], new])


def step_hint(context: OperatorContext, chosen: Candidate) -> Trajectory:
    """Everything up to the first flawed step stays; the next turn begins with a hint."""
    number = _first_flaw(context, chosen)
    kept = chosen.trajectory.turns[: number + 1]
    if kept[-1].result is None:
        raise OperatorSkipped("the flawed step is the last one: nothing follows it")
    hint = chosen.rng.choice(list(context.config.step_hints))
    return _continued(context, chosen, "step_hint", kept, begin=hint)


def trajectory_hint(context: OperatorContext, chosen: Candidate) -> Trajectory:
    """The wrong answer is taken back: its turn keeps the thought and goes on with a hint."""
    *kept, last = chosen.trajectory.turns
    if last.result is not None:
        raise OperatorSkipped("there is no answer to take back")
    thought = _split(context, last.text)[0]
    hint = chosen.rng.choice(list(context.config.trajectory_hints))
    begin = f"{thought.rstrip()} {hint}" if thought.strip() else hint
    return _continued(context, chosen, "trajectory_hint", kept, begin=begin)


FOR_RIGHT: Mapping[str, Operator] = {
    "fresh": fresh,
    "redundant": redundant,
    "refinement": refinement,
}
FOR_WRONG: Mapping[str, Operator] = {
    "reflection": reflection,
    "step_hint": step_hint,
    "trajectory_hint": trajectory_hint,
}


def _continued(
    context: OperatorContext,
    chosen: Candidate,
    operator: str,
    kept: Sequence[PlayedTurn],
    begin: str = "",
) -> Trajectory:
    return context.player.play(
        chosen.task,
        operator=operator,
        parent=chosen.index,
        kept=kept,
        begin=begin,
        author="hint" if begin else "",
    )


def _first_flaw(context: OperatorContext, chosen: Candidate) -> int:
    """Index of the step that the critic says is the first flawed one."""
    return _step_in(context.ask(context.critic, _prompt(FLAW, chosen)), chosen)


def _step_in(reply: str, chosen: Candidate) -> int:
    found = re.search(r"^[ \t]*Step:\s*(\d{1,9})\s*$", reply, re.MULTILINE)
    count = len(chosen.trajectory.turns)
    if found is None or not 1 <= int(found[1]) <= count:
        raise OperatorSkipped(f"expected 'Step: NUMBER' from 1 to {count}, got {reply[:80]!r}")
    return int(found[1]) - 1


def _prompt(template: str, chosen: Candidate) -> str:
    fields = {"question": last_question(chosen.task), "steps": _steps(chosen.trajectory.turns)}
    accepted = ""
    with contextlib.suppress(ValueError):  # it has none: the environment alone judges
        accepted = f"Accepted answers: {', '.join(accepted_answers(chosen.task))}\n"
    return template.format(**fields, accepted=accepted)


def _steps(turns: Sequence[PlayedTurn]) -> str:
    return "\n".join(
        f"Step {number}:\n{turn.text}" + (f"\nResult: {turn.result_text}" if turn.result else "")
        for number, turn in enumerate(turns, 1)
    )


def _written(context: OperatorContext, text: str, author: str, task: Task) -> PlayedTurn:
    try:
        return context.player.written(text, author, task)
    except ValueError as error:
        raise OperatorSkipped(str(error)) from None


def _split(context: OperatorContext, text: str) -> tuple[str, str]:
    """(thought, what is done)."""
    starts = [at for at in (text.find(mark) for mark in context.config.marks) if at >= 0]
    at = min(starts, default=len(text))
    return text[:at], text[at:]


def _rethought(context: OperatorContext, turn: PlayedTurn, thought: str) -> PlayedTurn:
    """The turn with another thought; the space around the old one stays."""
    old, action = _split(context, turn.text)
    lead, trail = old[: len(old) - len(old.lstrip())], old[len(old.rstrip()) :]
    text = f"{lead}{thought}{trail}{action}"
    chat = context.player.chat
    ids = chat.text_ids(text, own=True)
    end = int(turn.pieces[-1][0].token_ids[-1])
    if end in chat.stop_token_ids:
        ids = np.append(ids, np.int32(end))
    return replace(turn, text=text, pieces=((Segment(ids), "critic"),))

"""The flywheel's operators, which make a better trajectory from a trajectory (ET-Agent).

Each operator keeps some turns, edits something, and lets the generator continue with fresh tool
results. Replies of the critic and the reflector are parsed strictly: a reply in another form makes
no trajectory. (In the released code, hints were added character by character, refined text came
back in lower case, and judges were called until they agreed.)
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
    """The operator made no trajectory. The message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorContext:
    """The player and the models that operators use."""

    player: TrajectoryPlayer
    reflector: Endpoint
    critic: Endpoint
    config: FlywheelConfig

    def ask(self, endpoint: Endpoint, prompt: str) -> str:
        (reply,) = endpoint.complete(
            [{"role": "user", "content": prompt}],
            temperature=self.config.critic_temperature,
            max_tokens=self.config.max_reply_tokens,
        )
        return reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A trajectory to which an operator is applied."""

    task: Task
    trajectory: Trajectory
    index: int
    """Index of the trajectory in the question's buffer."""
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


def fresh(context: OperatorContext, candidate: Candidate) -> Trajectory:
    """Play another rollout from the start."""
    return context.player.play(candidate.task, operator="fresh")


def redundant(context: OperatorContext, candidate: Candidate) -> Trajectory:
    """The critic corrects the first redundant step; the generator continues after it."""
    reply = context.ask(context.critic, _prompt(REDUNDANT, candidate))
    if re.match(r"\s*Step:\s*no\b", reply, re.IGNORECASE):
        raise OperatorSkipped("the critic found no redundant step")
    number = _step_in(reply, candidate)
    _, separator, corrected = reply.partition("Corrected step:")
    if not separator:
        raise OperatorSkipped("the critic's reply has no 'Corrected step:'")
    new_turn = _make_turn(context, corrected.strip(), "critic", candidate.task)
    return _continue_from(
        context, candidate, "redundant", [*candidate.trajectory.turns[:number], new_turn]
    )


def refinement(context: OperatorContext, candidate: Candidate) -> Trajectory:
    """The critic rewrites the thoughts; actions and results stay unchanged."""
    turns = candidate.trajectory.turns
    reply = context.ask(context.critic, _prompt(REFINE, candidate))
    thoughts = {
        int(n): text.strip() for n, text in re.findall(r"^Thought (\d{1,9}):(.*)$", reply, re.M)
    }
    expected = {
        i for i, turn in enumerate(turns, 1) if _split_action(context, turn.text)[0].strip()
    }
    if not expected:
        raise OperatorSkipped("there is no thought to refine")
    if thoughts.keys() != expected:
        raise OperatorSkipped(
            f"expected thoughts of steps {sorted(expected)}, got {sorted(thoughts)}"
        )
    if any(mark in text for text in thoughts.values() for mark in context.config.marks):
        raise OperatorSkipped("the rewritten thought contains an action tag")
    refined = tuple(
        _with_thought(context, turn, thoughts[number]) if number in thoughts else turn
        for number, turn in enumerate(turns, 1)
    )
    old = candidate.trajectory.rollout
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
        parent=candidate.index,
    )


def reflection(context: OperatorContext, candidate: Candidate) -> Trajectory:
    """The reflector analyses the steps up to the first flawed one, and rewrites that step."""
    number = _first_flaw(context, candidate)
    turns = candidate.trajectory.turns
    steps = _steps(turns[: number + 1])
    question = last_question(candidate.task)
    analysis = context.ask(context.reflector, ANALYSE.format(question=question, steps=steps))
    if not analysis.strip():
        raise OperatorSkipped("the reflector's analysis is empty")
    prompt = REWRITE.format(question=question, steps=steps, analysis=analysis.strip())
    rewritten = context.ask(context.reflector, prompt).strip()
    new_turn = _make_turn(context, rewritten, "reflector", candidate.task)
    return _continue_from(context, candidate, "reflection", [*turns[:number], new_turn])


def step_hint(context: OperatorContext, candidate: Candidate) -> Trajectory:
    """Keep everything up to the first flawed step; the next turn starts with a hint."""
    number = _first_flaw(context, candidate)
    kept_turns = candidate.trajectory.turns[: number + 1]
    if kept_turns[-1].result is None:
        raise OperatorSkipped("the flawed step is the last one, so there is no next turn")
    hint = candidate.rng.choice(list(context.config.step_hints))
    return _continue_from(context, candidate, "step_hint", kept_turns, begin=hint)


def trajectory_hint(context: OperatorContext, candidate: Candidate) -> Trajectory:
    """Remove the wrong answer: its turn keeps the thought and continues with a hint."""
    *kept_turns, last = candidate.trajectory.turns
    if last.result is not None:
        raise OperatorSkipped("there is no answer to remove")
    thought = _split_action(context, last.text)[0]
    hint = candidate.rng.choice(list(context.config.trajectory_hints))
    begin = f"{thought.rstrip()} {hint}" if thought.strip() else hint
    return _continue_from(context, candidate, "trajectory_hint", kept_turns, begin=begin)


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


def _continue_from(
    context: OperatorContext,
    candidate: Candidate,
    operator: str,
    kept_turns: Sequence[PlayedTurn],
    begin: str = "",
) -> Trajectory:
    return context.player.play(
        candidate.task,
        operator=operator,
        parent=candidate.index,
        kept_turns=kept_turns,
        begin=begin,
        author="hint" if begin else "",
    )


def _first_flaw(context: OperatorContext, candidate: Candidate) -> int:
    return _step_in(context.ask(context.critic, _prompt(FLAW, candidate)), candidate)


def _step_in(reply: str, candidate: Candidate) -> int:
    match = re.search(r"^[ \t]*Step:\s*(\d{1,9})\s*$", reply, re.MULTILINE)
    count = len(candidate.trajectory.turns)
    if match is None or not 1 <= int(match[1]) <= count:
        raise OperatorSkipped(f"expected 'Step: NUMBER' from 1 to {count}, got {reply[:80]!r}")
    return int(match[1]) - 1


def _prompt(template: str, candidate: Candidate) -> str:
    fields = {
        "question": last_question(candidate.task),
        "steps": _steps(candidate.trajectory.turns),
    }
    accepted = ""
    with contextlib.suppress(ValueError):  # no accepted answer: the environment scores
        accepted = f"Accepted answers: {', '.join(accepted_answers(candidate.task))}\n"
    return template.format(**fields, accepted=accepted)


def _steps(turns: Sequence[PlayedTurn]) -> str:
    return "\n".join(
        f"Step {number}:\n{turn.text}" + (f"\nResult: {turn.result_text}" if turn.result else "")
        for number, turn in enumerate(turns, 1)
    )


def _make_turn(context: OperatorContext, text: str, author: str, task: Task) -> PlayedTurn:
    try:
        return context.player.make_written_turn(text, author, task)
    except ValueError as error:
        raise OperatorSkipped(str(error)) from None


def _split_action(context: OperatorContext, text: str) -> tuple[str, str]:
    """Split a turn's text at the first action tag: (thought, action)."""
    starts = [at for at in (text.find(mark) for mark in context.config.marks) if at >= 0]
    at = min(starts, default=len(text))
    return text[:at], text[at:]


def _with_thought(context: OperatorContext, turn: PlayedTurn, thought: str) -> PlayedTurn:
    """Replace a turn's thought, keeping the whitespace around it."""
    old, action = _split_action(context, turn.text)
    lead, trail = old[: len(old) - len(old.lstrip())], old[len(old.rstrip()) :]
    text = f"{lead}{thought}{trail}{action}"
    chat = context.player.chat
    ids = chat.text_ids(text, own=True)
    last_token = int(turn.pieces[-1][0].token_ids[-1])
    if last_token in chat.stop_token_ids:
        ids = np.append(ids, np.int32(last_token))
    return replace(turn, text=text, pieces=((Segment(ids), "critic"),))

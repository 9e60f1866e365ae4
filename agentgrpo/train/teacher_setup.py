"""The teacher of a config (learn/teacher.py): which model it is, or what it is told, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.config.read import load_callable
from agentgrpo.models.endpoints import HttpEndpoint, Scores
from agentgrpo.rollout.observe import prompt_of
from agentgrpo.support.user_calls import user_call
from agentgrpo.train.parts import Parts
from agentgrpo.types import Int32, Rollout, Task

SOLUTION = "\nCorrect solution:\n\n{}\n\n"
FEEDBACK = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{}\n\n"
REQUEST = "\n\nCorrectly solve the original question.\n"
"""TRL's, of its SDPOConfig."""
FORMS = {"errors": FEEDBACK + REQUEST, "solutions": SOLUTION + REQUEST}


def teacher_of(config: TrainConfig, parts: Parts) -> dict[str, Any] | None:
    """What a learn.teacher.Teacher is made with besides the policy; None: there is none."""
    c = config.teacher
    if not c.teaches:
        return None
    if c.model:
        return {"config": c, "source": _served(config, parts) if c.endpoint else parts.teacher}
    if parts.program or parts.user_sampler is not None:
        raise ValueError(
            f"teacher.feedback: {c.feedback!r} needs an agent whose prompts are rendered here: "
            "no program, and no rollout.sampler; teacher.model works with both"
        )
    tell = None if c.feedback == "errors" else _tell(c.feedback, parts)
    prompt = partial(_prompt, parts, c.max_feedback_tokens, c.feedback)
    return {"config": c, "prompt": prompt, "tell": tell}


def _served(config: TrainConfig, parts: Parts) -> Callable[[list[int], int], Scores]:
    """What asks the teacher's server, once it has shown that it has the policy's tokenizer."""
    c, temperature = config.teacher, config.rollout.temperature
    server, known = parts.models.get(c.endpoint or ""), parts.chat.tokenizer
    if not isinstance(server, HttpEndpoint):
        raise ValueError(f"teacher.model {c.model!r}: no endpoint of kind 'http' has this name")
    if temperature != 1:
        raise ValueError(
            f"rollout.temperature: {temperature:g}, but a teacher behind an endpoint says its "
            "log-probabilities at temperature 1"
        )
    every = [*range(len(known))]
    if server.decode(every) != known.decode(every):
        raise ValueError(
            f"teacher.model {c.model!r}: its tokenizer must be the policy's, and has other tokens"
        )
    server.score(every[:2], c.topk)  # it may allow fewer
    return server.score


def _prompt(parts: Parts, limit: int, feedback: str, task: Task, text: str) -> Int32:
    more = FORMS.get(feedback, "\n\n{}").format(parts.chat.clip(text, limit))
    return prompt_of(parts.agent, parts.chat, task, partial(user_call, task=task.id), more)[0]


def _tell(feedback: str, parts: Parts) -> Callable[[Rollout, Sequence[Rollout]], str]:
    """What is told of a rollout: the first other of its group that is right, or a function's."""
    view = parts.reward.view
    if feedback == "solutions":
        return lambda own, group: next(
            (view(other).text for other in group if other is not own and other.solved), ""
        )
    function = load_callable(feedback, key="teacher.feedback, if not errors or solutions")

    def tell(own: Rollout, group: Sequence[Rollout]) -> str:
        with user_call(function, task=own.task.id):
            return str(function(view(own)) or "")

    return tell

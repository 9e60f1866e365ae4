"""Sets up the teacher (learn/teacher.py) that a config names: another model, or feedback."""

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
"""These texts are the defaults of TRL's SDPOConfig."""
FORMS = {"errors": FEEDBACK + REQUEST, "solutions": SOLUTION + REQUEST}


def teacher_of(config: TrainConfig, parts: Parts) -> dict[str, Any] | None:
    """Arguments of learn.teacher.Teacher besides the policy. None: the config has no teacher."""
    teacher = config.teacher
    if not teacher.teaches:
        return None
    if teacher.model:
        source = _remote_scores(config, parts) if teacher.endpoint else parts.teacher
        return {"config": teacher, "source": source}
    if parts.program or parts.user_sampler is not None:
        raise ValueError(
            f"teacher.feedback: {teacher.feedback!r} needs an agent whose prompts agentgrpo "
            "renders: no agent.kind 'program' and no rollout.sampler. teacher.model works with both"
        )
    feedback_of = None if teacher.feedback == "errors" else _feedback(teacher.feedback, parts)
    prompt = partial(_prompt, parts, teacher.max_feedback_tokens, teacher.feedback)
    return {"config": teacher, "prompt": prompt, "feedback": feedback_of}


def _remote_scores(config: TrainConfig, parts: Parts) -> Callable[[list[int], int], Scores]:
    """The score() of the teacher's server, after checking that it has the policy's tokenizer."""
    teacher, temperature = config.teacher, config.rollout.temperature
    server, tokenizer = parts.models.get(teacher.endpoint or ""), parts.chat.tokenizer
    if not isinstance(server, HttpEndpoint):
        raise ValueError(
            f"teacher.model: expected the name of an endpoint of kind 'http', got {teacher.model!r}"
        )
    if temperature != 1:
        raise ValueError(
            f"rollout.temperature: expected 1, got {temperature:g}: a teacher behind an endpoint "
            "returns log-probabilities at temperature 1"
        )
    all_ids = [*range(len(tokenizer))]
    if server.decode(all_ids) != tokenizer.decode(all_ids):
        raise ValueError(
            f"teacher.model: {teacher.model!r} must have the policy's tokenizer, but its tokens "
            "differ"
        )
    server.score(all_ids[:2], teacher.topk)  # fails here if the server allows fewer logprobs
    return server.score


def _prompt(parts: Parts, limit: int, feedback: str, task: Task, text: str) -> Int32:
    more = FORMS.get(feedback, "\n\n{}").format(parts.chat.clip(text, limit))
    return prompt_of(parts.agent, parts.chat, task, partial(user_call, task=task.id), more)[0]


def _feedback(feedback: str, parts: Parts) -> Callable[[Rollout, Sequence[Rollout]], str]:
    """What the teacher reads about a rollout: a solved one of its group, or a function's text."""
    view = parts.reward.view
    if feedback == "solutions":
        return lambda rollout, group: next(
            (view(other).text for other in group if other is not rollout and other.solved), ""
        )
    function = load_callable(feedback, key="teacher.feedback, if not errors or solutions")

    def call_function(rollout: Rollout, group: Sequence[Rollout]) -> str:
        with user_call(function, task=rollout.task.id):
            return str(function(view(rollout)) or "")

    return call_function

"""Not one sampled id is changed on its way, however the tokenizer would have spelled the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import pytest

from agentgrpo.actions import Action, Finish, Message, Observation, RunCode
from agentgrpo.agents.tagged_text import TextAgent
from agentgrpo.config import RolloutConfig
from agentgrpo.inspect.verify.tokens import rollout_faults
from agentgrpo.learn.packing import pack_tree
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.types import Task
from tests.models.test_templates import judge_of
from tests.playing import generate
from tests.rollout.stubs import StubEngine, StubEnv, Turn

END = "\0"
"""Stands for the token that ends a turn."""
TURNS = [f" people thinking about things{END}", f" other people again{END}", f" done{END}"]


class Spelling:
    """A tokenizer that spells every character by itself."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        characters = set("".join(TURNS)) - {END}
        self._ids = {END: ChatTemplate(tokenizer).end_of_turn_id}
        for character in characters:
            (self._ids[character],) = tokenizer.encode(character, add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [self._ids[character] for character in text]

    def decode(self, ids: Any) -> str:
        return str(self.tokenizer.decode(ids))


class Chatter(TextAgent):
    """Every turn is a step, until it says that it is done."""

    def parse(self, text: str, task: Task) -> Action:
        return Finish(None) if "done" in text else RunCode(text)

    def observe(self, action: Action, observation: Observation) -> Sequence[Message]:
        return [{"role": "user", "content": observation.text}]


@pytest.mark.parametrize("history", ["append", "render"])
@pytest.mark.parametrize("name", ["smollm2", "qwen2_5", "llama3_1", "gptoss", "mistral_tekken"])
def test_tokens_are_kept_over_three_turns_with_other_spellings(
    name: str, history: Literal["append", "render"]
) -> None:
    judge = judge_of(name)
    tokenizer, spelling = judge.tokenizer, Spelling(judge.tokenizer)
    for text in TURNS:  # no token that was sampled is one that encoding the text gives
        spans = tokenizer.backend_tokenizer.encode(text[:-1], add_special_tokens=False).offsets
        assert all(end - start > 1 for start, end in spans)
    engine = StubEngine(spelling, lambda number, _: Turn(TURNS[number]))
    (group,) = generate(
        ["Q"], cast(Any, engine), Chatter(), env=cast(Any, StubEnv()), tokenizer=tokenizer,
        config=RolloutConfig(
            max_turns=4, max_turn_tokens=100, max_observation_tokens=100, history=history
        ),
    )  # fmt: skip
    (rollout,) = group.rollouts
    assert list(rollout_faults(rollout)) == []
    said = [s.token_ids.tolist() for s in rollout.all_segments if s.sampled]
    if history == "append":  # rendering again is what does change them: then a row is closed
        assert said == [spelling.encode(text, add_special_tokens=False) for text in TURNS]
        assert rollout.closed_rows == []
        ids = rollout.token_ids.tolist()
        for request in engine.requests:
            assert request.prompt.tolist() == ids[: len(request.prompt)]
            sampled = request.completion.token_ids.tolist()
            assert ids[len(request.prompt) :][: len(sampled)] == sampled
    rollout.advantage = 1.0
    targets = np.concatenate(
        [
            batch.target_N[np.argsort(batch.turn_N, kind="stable")]
            for batch in pack_tree([group], max_tokens=1000)
        ]
    )
    assert targets.tolist() == [i for ids in said for i in ids]

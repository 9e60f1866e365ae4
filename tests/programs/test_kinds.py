"""Which commands and settings take a program, and which refuse one by name."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentgrpo.agents.program import ProgramAgent
from agentgrpo.config import RolloutConfig
from agentgrpo.config.read import load_config_of
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.envs.answer import AnswerEnv
from agentgrpo.programs.launch import AsyncFunction
from agentgrpo.programs.play import ProgramSampler
from agentgrpo.recipe import flywheel, recipe
from agentgrpo.rollout.tensor_parallel import Leader, TeamSampler
from tests.playing import CHAT, TOKENIZER, generate, scripted, tasks
from tests.programs.test_play import asking, turn
from tests.rollout.test_tensor_parallel import Board, Member

AGENT = ProgramAgent(pool=None, call_reader=lambda parser: cast(Any, None), call="x:y")


@pytest.mark.parametrize("run", [flywheel.run_command, recipe.run_recipe])
def test_flywheel_and_recipe_reject_a_program(run: Any, tmp_path: Path) -> None:
    """Before a model is looked for."""
    overrides = ["agent.kind=program", "model=nowhere", f"out_dir={tmp_path}"]
    config = load_config_of(RecipeConfig, "recipe", overrides)
    with pytest.raises(ValueError, match=r"agent\.kind: expected another kind than .program"):
        run(config, SimpleNamespace(dry_run=False), None)


def test_generate_rejects_a_program() -> None:
    with pytest.raises(ValueError, match="agent: a program plays its own turns"):
        generate(["Q"], cast(Any, None), AGENT, env=AnswerEnv(), tokenizer=TOKENIZER)


def test_ranks_of_one_engine_play_the_same_programs() -> None:
    """The leader's programs ask, the others' engines do as its own; each rank has its groups."""

    async def use(_: Any, o: Any) -> str:
        await o.ask([{"role": "user", "content": o.task["question"]}])
        return str(o.task["question"])

    program = AsyncFunction(cast(Any, asking(use)))
    board, config = Board(), RolloutConfig(max_retries=0)
    engines = [scripted(lambda number, prompt: turn(f"said {prompt}")) for _ in range(3)]
    found: list[Any] = [None] * 3

    def rank(place: int) -> None:
        engine, team = cast(Any, engines[place]), cast(Any, Member(board, place))
        leader = Leader(engine, team)
        agent: Any = SimpleNamespace(read_calls=None, timeout_s=60.0, act_in_thoughts=False)
        inner = ProgramSampler(
            cast(Any, leader), agent, program, AnswerEnv(), CHAT, config, max_live=9
        )
        sampler = TeamSampler(config, inner, leader, engine, team)
        groups, _ = sampler.play([tasks(3)[place]], 2, seed=0)
        found[place] = [[r.answer for r in group.rollouts] for group in groups]
        sampler.close()
        assert inner._endpoint is None

    threads = [threading.Thread(target=rank, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [[[f"Q{place}"] * 2] for place in range(3)]
    asked = [[r.prompt.tolist() for r in engine.requests] for engine in engines]
    assert asked[0] == asked[1] == asked[2]
    assert len(asked[0]) == 6

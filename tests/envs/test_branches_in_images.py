"""Branches of agents that run commands in images: from a config to what each branch finds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from agentgrpo.config import TrainConfig
from agentgrpo.envs.python import PythonEnv, PythonEpisode
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rollout.sampler import Sampler
from agentgrpo.sandbox import Limits, SandboxPool, Template
from agentgrpo.sandbox.isolation.images import store_dir
from agentgrpo.sandbox.session import forks
from agentgrpo.train.prepare import make_agent, make_env
from agentgrpo.train.resolve import resolve
from agentgrpo.types import Rollout, Task
from tests.playing import EOT, TOKENIZER
from tests.rollout.stubs import StubEngine, Turn
from tests.sandbox.isolation.tiny_image import TOOLS, add_tiny_image, record

pytestmark = pytest.mark.nsjail
LIMITS = Limits(timeout_s=20.0, memory_mib=256, home_mib=16, inodes=4096, processes=64)
RANDOM = ["echo $RANDOM$RANDOM > /root/f", "date +%N > /root/f", "x=$RANDOM$RANDOM"]
SHOW = "cat /root/f; echo x is $x"


class Wrapped:
    """An episode of another's with state of its own: what is not here is the other's."""

    def __init__(self, episode: Any) -> None:
        self._episode = episode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._episode, name)


class ImageEnv(PythonEnv):
    """Episodes in sessions of an image.

    Args:
        pool: unused.
        wrapped: episodes are those of a wrapper.
    """

    def __init__(self, pool: Any, wrapped: bool = False) -> None:
        template = Template(image="tiny")
        made = SandboxPool(template=template, limits=LIMITS, min_idle=0, zygotes=1, max_live=8)
        super().__init__(made, 20.0)
        self.wrapped = wrapped

    def require_language(self, language: str) -> None:
        assert language == "bash"

    def reset(self, task: Task) -> Any:
        episode = PythonEpisode(self, task)
        return Wrapped(episode) if self.wrapped else episode

    def close(self) -> None:
        self.pool.close()


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        add_tiny_image(python=False, tools=[*TOOLS, "date"])
        record("tiny", [])
        yield


def play(*commands: str, size: int = 2, wrapped: bool = False) -> list[Rollout]:
    """A group of rollouts that run the commands, then answer; as many branch off as can."""

    def policy(number: int, prompt: str) -> Turn:
        turn = prompt.count("<|im_start|>assistant") - 1
        text = (
            f"<code>{commands[turn]}</code>" if turn < len(commands) else f"Answer: {number}{EOT}"
        )
        return Turn(text)

    config = TrainConfig.model_validate(
        {
            "out_dir": "unused",
            "model": "m",
            "agent": {"kind": "code", "options": {"language": "bash", "system_prompt": "S"}},
            "env": {"kind": f"{__name__}:ImageEnv", "options": {"wrapped": wrapped}},
            "rollout": {
                "group_size": size,
                "max_turns": 9,
                "max_turn_tokens": 500,
                "max_observation_tokens": 500,
                "branching": {"initial": 1, "probability": 1.0, "entropy_weight": 0.0},
            },
        }
    )
    env: Any = make_env(resolve(config), pool=None)
    layers = set((store_dir() / "layers").iterdir())
    try:
        agent, engine = make_agent(resolve(config), env), StubEngine(TOKENIZER, policy)
        sampler = Sampler(cast(Any, engine), agent, env, ChatTemplate(TOKENIZER), config.rollout)
        tasks = [Task(id="t", messages=({"role": "user", "content": "Q"},), spec={})]
        (group,), stats = sampler.play(tasks, size, seed=0)
        assert stats.infra_failures == 0
        assert env.pool.metrics()["live"] == 0
        assert set((store_dir() / "layers").iterdir()) == layers, "a copy was left"
        assert forks._bytes == 0
    finally:
        env.close()
    return group.rollouts


def shown(rollout: Rollout) -> str:
    """The last observation."""
    return str(rollout.tool_messages[-1][1])


@pytest.mark.parametrize("command", RANDOM)
@pytest.mark.parametrize("wrapped", [False, True])
def test_branch_starts_with_its_parents_random_state(command: str, wrapped: bool) -> None:
    """Repeated commands, where the environment offers no copies, make something else."""
    parent, branch = play(command, SHOW, wrapped=wrapped)
    assert branch.parent == 0
    assert branch.stats["branched_by_snapshot"] == float(not wrapped)
    assert branch.stats["branched_by_replay"] == float(wrapped)
    assert (shown(parent) == shown(branch)) is not wrapped


def test_branch_of_a_branch_starts_with_the_state_before_it() -> None:
    commands = [f"echo $RANDOM$RANDOM > /root/f{i}; y{i}=$RANDOM; cd /tmp" for i in range(4)]
    rollouts = play(*commands, "cat /root/f*; printf '%s\\n' $y0 $y1 $y2 $y3", size=8)
    lines = [re.findall(r"\d+", shown(rollout)) for rollout in rollouts]
    assert all(len(line) == 8 for line in lines), shown(rollouts[0])
    branches = [rollout for rollout in rollouts if rollout.parent is not None]
    assert len(branches) >= 6
    assert any(rollouts[r.parent or 0].parent is not None for r in branches)
    for rollout in branches:
        assert rollout.stats["branched_by_snapshot"] == 1.0
        assert rollout.parent is not None
        assert rollout.forked_at is not None
        ends = np.cumsum([len(segment.token_ids) for segment in rollout.segments])
        shared = sum(
            s.sampled for s, e in zip(rollout.segments, ends, strict=True) if e <= rollout.forked_at
        )
        own, parents = lines[rollouts.index(rollout)], lines[rollout.parent]
        same = [x == y for x, y in zip(own, parents, strict=True)]
        assert same == ([True] * shared + [False] * (4 - shared)) * 2


def test_branch_repeats_commands_that_left_a_process() -> None:
    parent, branch = play("echo $RANDOM$RANDOM > /root/f; sleep 100 &", SHOW)
    assert (branch.parent, branch.stats["branched_by_replay"]) == (0, 1.0)
    assert shown(parent) != shown(branch)


def test_branch_whose_session_dies_restarts_like_its_parent() -> None:
    rollouts = play("echo $RANDOM > /root/marker", "exit 3", "ls /root; echo listed")
    assert rollouts[1].stats["branched_by_snapshot"] == 1.0
    assert all("listed" in shown(r) and "marker" not in shown(r) for r in rollouts)

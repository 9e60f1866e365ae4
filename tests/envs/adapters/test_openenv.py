"""A client environment of OpenEnv's: its tools as a class's methods, and by verifiers' taskset."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agentgrpo.agents.tools import ToolAgent
from agentgrpo.config import RewardConfig
from agentgrpo.envs.adapters.verifiers import VerifiersEnv
from agentgrpo.envs.factory import FactoryEnv
from agentgrpo.rewards.shipped import score
from agentgrpo.train.plugins import make_reward
from agentgrpo.types import Group
from tests.envs.adapters.test_verifiers import play as play_verifiers
from tests.playing import EOT, play, shown
from tests.programs.test_play import read_calls, turn

pytest.importorskip("verifiers.v1", reason="verifiers is in requirements-dev.txt")
openenv = pytest.importorskip("openenv", reason="openenv is in requirements-dev.txt")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server made with OpenEnv's classes, on a thread: it says higher or lower."""
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Guess(Action):  # type: ignore[misc]
        number: int

    class Said(Observation):  # type: ignore[misc]
        text: str = ""

    class Guessing(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.secret = 0

        def reset(self, seed: Any = None, episode_id: Any = None, secret: int = 7, **_: Any) -> Any:
            self.secret = secret
            return Said(text="Guess.")

        def step(self, action: Any, timeout_s: Any = None, **_: Any) -> Any:
            if action.number == self.secret:
                return Said(text="right", done=True, reward=1.0)
            return Said(text="higher" if action.number < self.secret else "lower", reward=-0.25)

        @property
        def state(self) -> Any:
            return State()

    app = create_fastapi_app(Guessing, Guess, Said, max_concurrent_envs=8)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


def test_class_methods_are_tools(url: str) -> None:
    class Number:
        """As on docs/agent-programs.md."""

        def __init__(self) -> None:
            self._client: Any = None
            self._paid = 0.0
            self.done = False

        async def guess(self, number: int) -> str:
            """Guess a number.

            Args:
                number: the guess
            """
            if self._client is None:
                self._client = openenv.GenericEnvClient(base_url=url)
                await self._client.reset(secret=5)
            result = await self._client.step({"number": number})
            self._paid, self.done = self._paid + result.reward, result.done
            return str(result.observation["text"])

        def get_reward(self) -> float:
            return self._paid

        async def close(self) -> None:
            if self._client is not None:
                await self._client.close()

    world = FactoryEnv(Number)
    agent = ToolAgent(env=world, call_reader=lambda name: read_calls)
    asked = '<tool_call>{{"name": "guess", "arguments": {{"number": {}}}}}</tool_call>' + EOT
    task = world.task("t", {"question": "Which number?"})
    played = play(agent, world, asked.format(9), asked.format(5), given=task)
    score(Group(task=task, rollouts=[played]), make_reward(RewardConfig(format=0), judges=True))
    assert played.reward == 0.75
    assert "<|im_start|>tool\nlower<|im_end|>" in shown(played)


def test_verifiers_environment_runs_unchanged(url: str) -> None:
    """No code at all: an observation is what the user says, a reply is an action."""
    resets = [{"secret": 3}, {"secret": 4}]
    env = VerifiersEnv("openenv", {"base_url": url, "resets": resets})
    try:
        told = []

        def policy(number: int, prompt: str) -> Any:
            told.append(prompt)
            return turn(json.dumps({"number": 2 + prompt.count("<|im_start|>assistant\n{")}))

        (played,) = play_verifiers(env, policy).rollouts
        assert played.reward == 0.75
        assert (len(played.rows), len(played.turns)) == (1, 2)
        assert '"text": "higher"' in told[1]
    finally:
        env.close()

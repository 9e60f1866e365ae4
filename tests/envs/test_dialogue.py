"""A user beside any environment: the weather example, with every kind of agent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.actions import ModelRequest, Observation, Reading, Say
from agentgrpo.config import (
    EngineConfig,
    TrainConfig,
)
from agentgrpo.inspect.verify.status import status_faults
from agentgrpo.rewards.rollout_view import RolloutView
from agentgrpo.rewards.trl_functions import conversation
from agentgrpo.sandbox import SandboxPool
from agentgrpo.support.atomic_files import write_lines
from agentgrpo.train.prepare import make_agent, make_env, prepare_run, training_stream
from agentgrpo.train.resolve import resolve
from agentgrpo.types import Status
from tests.playing import CHAT, EOT, given_and_sampled, play, scripted, shown, task
from tests.rollout.stubs import Turn
from tests.train.test_plugins import config

HEARD: list[str] = []


async def weather(city: str) -> str:
    """The weather in a city, now."""
    if city != "Seattle, WA":
        raise LookupError(f"no such place: {city!r}")
    return "rain"


class Tourist:
    """A user of one's own: what the spec says of them, and who they are."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.city = spec["city"]

    def reply(self, said: str, *, satisfied: bool) -> str | None:
        HEARD.append(said)
        return self.city if "where" in said.lower() else None

    def on_reply(self, text: str) -> str | None:
        raise AssertionError("asked nobody")


def tourist(spec: Mapping[str, Any]) -> Tourist:
    return Tourist({"city": f"I am in {spec['city']}."})


class Asking(Tourist):
    """Has the engine say it."""

    def reply(self, said: str, *, satisfied: bool) -> Any:
        return ModelRequest(({"role": "user", "content": f"USER {self.city}: {said}"},))

    def on_reply(self, text: str) -> str | None:
        return None if "bye" in text else text


ASK = "Where are you?"
FILES = {"w.py": "def weather(c):\n    assert c == 'Seattle, WA', c\n    return 'rain'\n"}
TASK = task("What is the weather like?", user=["Seattle"], city="Seattle", files=FILES)
TOOLS = {"tools": [f"{__name__}:weather"]}
CALLED = '<tool_call>{"city": "Seattle, WA"}</tool_call>'
TAGS = {"system_prompt": ""}
KINDS: Mapping[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "inline": (
        {"kind": "inline", "options": {"answer_prefix": "<answer>", "act_in_thoughts": True}},
        {"kind": "tools", "options": TOOLS},
        [
            f"<think>Which city?</think>\n{ASK}{EOT}",
            '<think><fn>weather("Seattle")</fn>',
            '<fn>weather("Seattle, WA")</fn>',
            f"</think> <answer>rain</answer>{EOT}",
        ],
    ),
    "code": (
        {"kind": "code", "options": {"observation_role": "tool"}},
        {"kind": "python"},
        [
            f"{ASK}{EOT}",
            "<code>exec(open('w.py').read()); print(weather('Seattle'))</code>",
            "<code>print(weather('Seattle, WA'))</code>",
            f"Answer: rain{EOT}",
        ],
    ),
    "tags": (
        {"kind": "tags", "options": {"boxed": False}},
        {"kind": "tagged"},
        [f"<think>Hm.</think> {ASK}{EOT}", "<python>'ra' + 'in'</python>", "<answer>rain</answer>"],
    ),
    "repl": (
        {"kind": "repl", "options": {"banner": ""}},
        {"kind": "console"},
        [" x = 'rain'\n", f' ask_user("{ASK}")\n', " x\n", " submit_final_answer(x)\n"],
    ),
    "tools of a class": (
        {"kind": "tools"},
        {"kind": "factory", "options": {"factory": f"{__name__}:Station"}},
        [f"{ASK}{EOT}", f"{CALLED}{EOT}", f"rain{EOT}"],
    ),
}


class Station:
    """As TRL's environment_factory."""

    async def weather(self, city: str) -> str:
        """The weather in a city, now."""
        return await weather(city)


def read_call(text: str, tools: Any) -> Reading:
    content, called, rest = text.partition("<tool_call>")
    calls = (("weather", rest.partition("<")[0]),) if called else ()
    return Reading(content, calls, attempted=bool(called))


def settings(agent: Any, env: Any, data: Any = None, **user: Any) -> TrainConfig:
    """A config of what tests.playing.play() plays."""
    return config(
        agent, {**env, "user": {"mode": "scripted", **user}},
        data={"train": "rows.jsonl", **(data or {})},
        rollout={"max_turns": 99, "max_turn_tokens": 500},
        engine={"max_model_len": 10_000}, learner={"max_tokens": 10_000},
    )  # fmt: skip


def parts(agent: Any, env: Any, pool: Any = None, data: Any = None, **user: Any) -> Any:
    """An agent and an environment with a user, as a run makes them."""
    made = settings(agent, env, data, **user)
    resolve(made)
    world = make_env(resolve(made), pool)
    return make_agent(resolve(made), world, lambda parser: read_call), world


@pytest.mark.nsjail
@pytest.mark.parametrize(
    ("kind", "history"), [(kind, "append") for kind in KINDS] + [("inline", "render")]
)
def test_agent_asks_user_replies_and_agent_calls_a_tool(
    pool: SandboxPool, kind: str, history: str
) -> None:
    """The reply is a chat turn of the user's, in tokens that were given and not sampled."""
    agent, env, turns = KINDS[kind]
    played = play(*parts(agent, env, pool), *turns, given=TASK, history=history)
    assert played.status is Status.COMPLETED, played
    said = 1 + (kind == "tools of a class")  # whose answer has no prefix: the user leaves
    assert (played.answer, played.stats["said"]) == ("rain", said)
    assert played.stats["malformed"] == 0
    prompted = ">>>" if kind == "repl" else ""
    reply = f"<|im_start|>user\nSeattle{EOT}\n<|im_start|>assistant\n{prompted}"
    asked = next(i for i, turn in enumerate(turns) if ASK in turn)
    row = given_and_sampled(played)
    told = row[[i for i, (mine, _) in enumerate(row) if mine][asked] + 1]
    assert told[0] is False
    assert told[1].endswith(reply)
    assert told[1].count("<|im_start|>") == 2, "and nothing else"
    assert [text for mine, text in row if mine] == turns
    messages = conversation(RolloutView(played, CHAT.tokenizer.decode), [])
    assert [m["content"] for m in messages if m["role"] == "user"] == ["Seattle"]
    assert messages[-1]["content"].startswith(prompted)
    assert messages[-1]["role"] == "assistant"
    assert [*status_faults(played, settings(agent, env))] == []
    assert any("rain" in text for mine, text in row[1:] if not mine), "the world answers too"


@pytest.mark.nsjail
def test_messages_of_several_turns_are_rendered(pool: SandboxPool) -> None:
    """Where the template renders the talk again: each message from its beginning."""
    lines = ["x = 1", 'ask_user("a")', "x", 'ask_user("b")', "submit_final_answer(x)"]
    twice, typed = task("Hello.", user=["one", "two"]), [f" {line}\n" for line in lines]
    agent, env = parts(*KINDS["repl"][:2], pool)
    played = play(agent, env, *typed, given=twice, history="render")
    assert (played.answer, played.stats["prompts_clean"], played.closed_rows) == ("1", 2, [])


@pytest.mark.nsjail
def test_prompt_mentions_the_user(pool: SandboxPool) -> None:
    for kind in ("inline", "code", "tags", "repl"):
        agent, env, _ = KINDS[kind]
        with_them, _ = parts(agent, env, pool)
        alone, _ = parts(agent, env, pool, mode="nobody")
        told, plain = (str(a.messages(TASK)[0]["content"]) for a in (with_them, alone))
        assert ("user" in told, "user" in plain) == (True, False), kind


@pytest.mark.parametrize(
    ("mode", "reply"),
    [("tourist", "I am in Seattle."), ("Asking", "in town")],
)
def test_custom_user_gets_the_spec(mode: str, reply: str) -> None:
    """By a class or a function; thoughts are not said to them; they say when it is over."""

    def policy(number: int, prompt: str) -> Turn:
        if "USER Seattle: " in prompt:
            return Turn(f"in town{EOT}" if ASK in prompt else f"bye{EOT}")
        return Turn(f"Thanks.{EOT}" if reply in prompt else f"<think>Hm.</think>{ASK}{EOT}")

    HEARD.clear()
    agent, env = parts(*KINDS["inline"][:2], mode=f"{__name__}:{mode}")
    played = play(agent, env, given=TASK, engine=scripted(policy))
    assert f"<|im_start|>user\n{reply}{EOT}" in shown(played)
    assert (played.status, played.answer, played.stats["said"]) == (
        Status.COMPLETED, None, 2.0,
    )  # fmt: skip
    assert (HEARD == [ASK, "Thanks."]) is (mode != "Asking")
    assert played.stats.get("asked", 0) == 2 * (mode == "Asking")


def test_model_user_gets_the_texts_of_the_column() -> None:
    def policy(number: int, prompt: str) -> Turn:
        if "You are a person" in prompt:
            assert "What you know and want: Seattle" in prompt
            assert "assistant\nWhat is the weather like?" in prompt
            return Turn(f"###STOP###{EOT}" if "user\nThanks" in prompt else f"Tokyo{EOT}")
        return Turn(f"Thanks{EOT}" if "Tokyo" in prompt else f"{ASK}{EOT}")

    engine = scripted(policy)
    agent, env = parts(*KINDS["tools of a class"][:2], mode="model")
    played = play(agent, env, given=TASK, engine=engine)
    assert (played.answer, played.stats["said"], played.stats["asked"]) == ("Thanks", 2, 2)
    theirs = engine.requests[1::2]
    assert [(r.options["temperature"], r.max_tokens) for r in theirs] == [(0.0, 64)] * 2


@pytest.mark.parametrize(("kind", "answer"), [("tools of a class", "and you?"), ("inline", None)])
@pytest.mark.parametrize("limit", [1, 8])
def test_user_ends_the_dialogue_after_its_texts_or_the_budget(
    kind: str, answer: str | None, limit: int
) -> None:
    """What was said last is the answer where a whole reply is one."""
    agent, env, _ = KINDS[kind]
    turns = [f"and you?{EOT}"] * 9
    three = task("Hello.", user=["one", "two", "three"])
    played = play(*parts(agent, env, max_replies=limit), *turns, given=three)
    assert played.stats["said"] == played.stats["turns"] == min(limit, 3) + 1
    assert (played.status, played.answer) == (Status.COMPLETED, answer)
    assert [*status_faults(played, settings(agent, env, max_replies=limit))] == []
    assert "one" in shown(played)


@pytest.mark.parametrize(
    ("line", "means"),
    [
        ('ask_user("a")', "a"),
        (" ask_user('a')  # why", "a"),
        ("ask_user(f'{x}')", None),
        ("ask_user('a', 'b')", None),
        ("ask_user(3)", None),
    ],
)
def test_console_asks_with_one_quoted_text(line: str, means: str | None) -> None:
    agent, _ = parts(*KINDS["repl"][:2])
    read = agent.parse(f"{line}\n", TASK)
    if means is not None:
        assert read == Say(means)
        return
    told = agent.observe(read, Observation(read.message))
    assert told == "TypeError: ask_user takes one text in quotes, alone on its line\n>>>"


class Talks:
    """An environment with a user of its own."""

    answers, has_user = ("tools",), True

    def reset(self, task: Any) -> Any: ...


@pytest.mark.parametrize(
    ("env", "user", "data", "error"),
    [
        ({}, {"mode": "script"}, {}, r"env\.user\.mode: expected nobody, scripted, model"),
        ({}, {"mode": "nosuch:Me"}, {}, r"env\.user\.mode: no module"),
        (
            {},
            {"mode": "scripted"},
            {"train": "word_problems"},
            r"column 'user' for env\.user\.mode 'scripted'",
        ),
        (
            {"kind": f"{__name__}:Talks"},
            {"mode": "scripted"},
            {},
            r"env\.user\.mode: expected 'nobody', since env\.kind '.*:Talks' has a user",
        ),
    ],
)
def test_invalid_user_settings_are_rejected_by_key(
    env: Any, user: Any, data: Any, error: str
) -> None:
    agent = {"kind": "tools" if env else "code"}
    with pytest.raises(ValueError, match=error):
        parts(agent, env, **user, data=data)


def test_rows_without_user_texts_are_rejected_before_the_run(
    tiny_model: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    write_lines(rows, [{"question": f"Q{u}", "answer": "1", "user": u} for u in (3, "a")])
    inline = {"kind": "inline", "options": {"system_prompt": "S"}}
    made = settings(inline, KINDS["tools of a class"][1], {"train": str(rows), "num_heldout": 1})
    engine = EngineConfig(max_model_len=1000)
    made = made.model_copy(update={"model": str(tiny_model), "engine": engine})
    said = r"column 'user': .*rows\.jsonl:1', .* got 3"
    with pytest.raises(ValueError, match=said):
        training_stream(made, prepare_run(made))

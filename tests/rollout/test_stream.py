"""A sampler that watches tokens: where it is stopped, what is put in, and what is trained on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from agentgrpo.config import RolloutConfig
from agentgrpo.examples.custom_sampler.sampler import ThinkingCalls
from agentgrpo.inspect.verify.tokens import rollout_faults
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.rollout.custom import CustomSampler
from agentgrpo.rollout.stream import Stream, Streams
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.types import Completion, Int32, Rollout, Status
from agentgrpo.types import Turn as Account
from tests.models.test_templates import ids_of, judge_of
from tests.playing import EOT, TOKENIZER, given_and_sampled, tasks

CHAT = ChatTemplate(TOKENIZER)


@dataclass
class Decoding:
    """Decodes a token a step, as the engine does; `policy(text so far)` is what it would say."""

    tokenizer: Any
    policy: Callable[[str], str]
    max_model_len: int = 4000
    steps: int = 0
    running: dict[str, list[Any]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add_request(self, request_id: str, prompt_ids: Int32, **options: Any) -> None:
        assert request_id not in self.options
        assert options["max_tokens"] >= 1
        said = self.policy(self.tokenizer.decode(prompt_ids))
        ids = self.tokenizer.encode(said, add_special_tokens=False)
        self.running[request_id] = [prompt_ids.copy(), ids, 0]
        self.options[request_id] = options

    def step(self) -> list[Completion]:
        self.steps += 1
        done = []
        for name, state in list(self.running.items()):
            prompt, ids, count = state
            token, options = ids[count], self.options[name]
            state[2] = count = count + 1
            reason = "stop" if token in options["stop_token_ids"] else ""
            if not reason and count == options["max_tokens"]:
                reason = "length"
            if options["on_token"](token):
                reason = "stop"
            if reason:
                del self.running[name]
                sampled = np.array(ids[:count], np.int32)
                account = Account.of(prompt, sampled, reason)
                logprobs = np.full(count, -0.5, np.float32)
                done.append(Completion(name, sampled, logprobs, reason, None, 0, account))
        return done[::-1]

    @property
    def num_in_flight(self) -> int:
        return len(self.running)

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            del self.running[name]

    def abort_all(self) -> None:
        self.running.clear()


class Mine:
    """A user's sampler: `told` looks on."""

    def __init__(self, told: Any, tags: Sequence[str] = (), chat: Any = CHAT, **config: Any):
        self.config = RolloutConfig(**{"max_turns": 5, "max_turn_tokens": 90, **config})
        self.told, self.streams = told, Streams(chat, self.config, tags)

    def rollout(self, engine: Any, tasks: Any, n: int, params: Any) -> Any:
        return self.streams.play(engine, tasks, n, params, self.told)


def play(user: Any, engine: Decoding, n: int = 1, count: int = 1) -> list[Rollout]:
    """Through the checks of every user's sampler; what is recorded proves itself."""
    sampler = CustomSampler(user, cast(Any, engine), user.config, (2,))
    groups, _ = sampler.play(tasks(count), n, seed=3)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        assert list(rollout_faults(rollout)) == []
    return rollouts


def seattle(so_far: str) -> str:
    """Would write the answer to its own call, if nobody stopped it."""
    if "<fn_results>" in so_far:
        return f"Rain, then.</think><answer> an umbrella </answer> and more{EOT}"
    if "<fn_error>" in so_far:
        return '<fn>weather("Seattle")</fn>'
    return '<think><fn>weather("Atlantis")</fn> <fn_results>\nsun\n</fn_results></think>'


def test_the_example_answers_calls_within_a_thought() -> None:
    user: Any = ThinkingCalls(CHAT, RolloutConfig(max_turns=5, max_turn_tokens=90))
    user.config = RolloutConfig()
    (rollout,) = play(user, Decoding(TOKENIZER, seattle))
    assert given_and_sampled(rollout)[1:] == [
        (True, '<think><fn>weather("Atlantis")</fn>'),
        (False, "\n<fn_error>\nLookupError: no weather station in 'Atlantis'\n</fn_error>\n"),
        (True, '<fn>weather("Seattle")</fn>'),
        (False, "\n<fn_results>\nrain, 11 degrees\n</fn_results>\n"),
        (True, "Rain, then.</think><answer> an umbrella </answer>"),
    ]
    assert 'weather("Seattle")</fn>' in given_and_sampled(rollout)[0][1], "the prompt says how"
    assert (rollout.status, rollout.answer) == (Status.COMPLETED, "an umbrella")
    assert (rollout.stats["turns"], rollout.stats["tool_calls"]) == (3, 2)
    assert rollout.stats["tool_errors"] == 1
    assert [turn.finish_reason for turn in rollout.turns] == ["stop"] * 3


def test_its_arguments_are_literals() -> None:
    user = ThinkingCalls(CHAT, RolloutConfig())
    assert user.call('calculate("6*7")') == ("fn_results", "42")
    for text in ("weather(open('x'))", "weather", "nosuch(1)", "weather()", "import os"):
        assert user.call(text)[0] == "fn_error"


def test_every_token_is_seen_as_it_is_decoded() -> None:
    seen: list[tuple[int, int]] = []
    engine = Decoding(TOKENIZER, lambda _: f"abc{EOT}")
    (rollout,) = play(Mine(lambda stream, token: seen.append((engine.steps, token))), engine)
    assert [step for step, _ in seen] == [1, 2, 3, 4]
    assert [token for _, token in seen] == rollout.segments[1].token_ids.tolist()
    assert (rollout.status, rollout.answer) == (Status.COMPLETED, None)


def test_inserted_text_completes_no_tag() -> None:
    """Nor does what was sampled before it begin one."""
    seen: list[tuple[str, str]] = []

    def told(stream: Stream, token: int) -> None:
        seen.append((stream.text, stream.tag))
        if TOKENIZER.decode([token]) == "<":
            stream.inject("</")

    engine = Decoding(TOKENIZER, lambda so_far: f"/x>{EOT}" if so_far.endswith("</") else "a<b")
    (rollout,) = play(Mine(told, ["</x>"]), engine)
    assert [text for _, text in given_and_sampled(rollout)[1:]] == ["a<", "</", f"/x>{EOT}"]
    said = ["a", "a<", "/", "/x", "/x>", "/x>"]
    assert seen == [(text, "") for text in said]


def test_messages_can_follow_the_turn() -> None:
    def told(stream: Stream, token: int) -> None:
        if stream.tag:
            stream.inject([{"role": "user", "content": "Really?"}])

    said = {False: "Yes!", True: f"No{EOT}"}
    engine = Decoding(TOKENIZER, lambda so_far: said["Really" in so_far])
    (rollout,) = play(Mine(told, ["!"]), engine)
    parts = given_and_sampled(rollout)
    assert (parts[1], parts[3]) == ((True, "Yes!"), (True, f"No{EOT}"))
    messages = [*tasks(1)[0].messages, {"role": "assistant", "content": "Yes!"}]
    rendered = CHAT.prompt_ids([*messages, {"role": "user", "content": "Really?"}])
    assert "".join(text for _, text in parts[:3]) == TOKENIZER.decode(rendered)


def test_text_cannot_follow_a_turn_that_the_policy_closed() -> None:
    def told(stream: Stream, token: int) -> None:
        if token == 2:
            stream.inject("more")

    (rollout,) = play(Mine(told), Decoding(TOKENIZER, lambda _: f"a{EOT}"))
    assert len(rollout.segments) == 2
    assert rollout.status is Status.COMPLETED


@pytest.mark.parametrize(
    ("config", "status", "turns"),
    [
        ({"max_turns": 2}, Status.TRUNCATED_TURNS, 2),
        ({"max_turn_tokens": 1}, Status.TRUNCATED_LENGTH, 1),
        ({"max_response_tokens": 5}, Status.TRUNCATED_LENGTH, 2),
        ({"max_response_tokens": 6}, Status.TRUNCATED_LENGTH, 2),
        ({"max_response_tokens": 2}, Status.TRUNCATED_LENGTH, 1),
    ],
)
def test_limits_are_those_of_the_config(config: Any, status: Status, turns: int) -> None:
    def told(stream: Stream, token: int) -> None:
        if stream.tag:
            stream.inject("+")

    (rollout,) = play(Mine(told, ["b"], **config), Decoding(TOKENIZER, lambda _: "ab"))
    assert (rollout.status, len(rollout.turns)) == (status, turns)
    prompt = len(rollout.segments[0].token_ids)
    limit = config.get("max_response_tokens", 99)
    assert len(rollout.token_ids) - prompt <= limit


def test_a_turn_is_not_decoded_on_after_max_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("agentgrpo.rollout.limits.time.monotonic", lambda: now)

    def told(stream: Stream, token: int) -> None:
        nonlocal now
        now += 1.0

    engine = Decoding(TOKENIZER, lambda _: "a" * 99)
    late = play(Mine(told, max_seconds=6.0), engine, n=2)
    assert [(r.status, len(r.turns)) for r in late] == [(Status.TIMED_OUT, 0)] * 2
    assert (engine.steps, engine.running) == (3, {})


def test_a_prompt_is_one_segment_of_its_group() -> None:
    """What a step sends to a card is counted by identity."""
    rollouts = play(Mine(lambda stream, token: None), Decoding(TOKENIZER, lambda _: EOT), n=2)
    assert rollouts[0].segments[0] is rollouts[1].segments[0]


def test_rollouts_are_apart_and_in_order() -> None:
    def told(stream: Stream, token: int) -> None:
        if stream.tag:
            stream.inject(f"{stream.place}")

    engine = Decoding(TOKENIZER, lambda so_far: f"ok{EOT}" if so_far.endswith(")") else "a!")
    rollouts = play(Mine(told, ["!"]), engine, n=3, count=2)
    assert [given_and_sampled(r)[2][1] for r in rollouts] == [
        str((i, j)) for i in range(2) for j in range(3)
    ]
    seeds = [options["seed"] for options in engine.options.values()]
    assert len(set(seeds)) == len(seeds) == 12


@pytest.mark.parametrize("name", ["qwen3", "mistral_v3"])
def test_tags_are_found_within_merged_tokens_and_across_them(name: str) -> None:
    judge, rng, tags = judge_of(name), random.Random(1), ["</code>", "→é", "```"]
    streams = Streams(judge.chat, RolloutConfig(), tags)
    for _ in range(100):
        text = "".join(rng.choices([*tags, "><", "<", "a\n", "→", "print(1)"], k=8))
        found, tail, said = [], b"", b""
        for token in ids_of(judge, text):
            before, said = said, said + streams._vocabulary[token]
            tag, tail = streams._scan(token, tail)
            new = {
                t
                for t in tags
                for at in range(max(0, len(before) - len(t.encode()) + 1), len(said))
                if said.startswith(t.encode(), at)
            }
            assert (tag in new) if new else not tag
            found.append(tag)
        assert any(found) == any(tag in text for tag in tags)


def test_of_two_tags_in_one_token_the_first_that_ends_counts() -> None:
    streams = Streams(CHAT, RolloutConfig(), ["abc", "b"])
    streams._vocabulary = [b"xabc", b"ab", b"c"]
    assert streams._scan(0, b"") == ("b", b"abc")
    assert streams._scan(2, streams._scan(1, b"")[1])[0] == "abc"


def test_an_id_beyond_the_tokenizer_is_no_end_of_the_run() -> None:
    """Models have more rows than their tokenizer has tokens."""
    streams = Streams(CHAT, RolloutConfig(), ["ab"])
    (a,), (b,) = (TOKENIZER.encode(letter, add_special_tokens=False) for letter in "ab")
    _, tail = streams._scan(a, b"")
    assert streams._scan(b, tail)[0] == "ab"
    assert streams._scan(10**6, tail) == ("", b"")


def test_a_prompt_without_room_is_named() -> None:
    engine = Decoding(TOKENIZER, lambda _: "ab", max_model_len=3)
    with pytest.raises(
        UserCodeError,
        match=r"engine.max_model_len: expected more than the \d+ tokens of the prompt of task 't0'",
    ):
        play(Mine(lambda stream, token: None), engine)


@pytest.mark.parametrize("tags", [[""], ["a", "a"]])
def test_tags_differ_and_are_not_empty(tags: list[str]) -> None:
    with pytest.raises(ValueError, match="tags"):
        Streams(CHAT, RolloutConfig(), tags)

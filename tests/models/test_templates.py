"""ChatTemplate against real tokenizers and the chat templates that models ship with."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from agentgrpo.models.chat import ChatTemplate
from bench.conversations import SPELLED, TOOLS, Judge, Seen
from bench.real_templates import MODELS, NotToBeHad, trl_template

NAMES = [model.name for model in MODELS]


@cache
def _judge(name: str) -> Judge | str:
    """The judge of a model, or why there is none."""
    try:
        return Judge(next(model for model in MODELS if model.name == name))
    except NotToBeHad as error:
        return str(error)


def judge_of(name: str) -> Judge:
    found = _judge(name)
    if isinstance(found, str):
        pytest.skip(found)
    found.tokenizer.chat_template = found.template  # models share tokenizers
    return found


def ids_of(judge: Judge, text: str) -> list[int]:
    """The ids of text as the tokenizer encodes it, control tokens and all."""
    return list(judge.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", NAMES)
def test_S2_3_random_conversations_agree_with_the_templates_own_rendering(name: str) -> None:
    judge, seen = judge_of(name), Seen()
    for index in range(10):
        judge.judge(random.Random(f"test {index}"), seen)
    assert seen.disagreements == 0, seen.first
    assert seen.deltas >= 20


@pytest.mark.parametrize("name", NAMES)
def test_what_a_message_says_is_never_a_control_token(name: str) -> None:
    judge = judge_of(name)
    control = set(judge.chat._encoder.control_ids.values())

    def controls(content: str) -> list[int]:
        said = [{"role": "user", "content": content}]
        ids = [
            *judge.chat.prompt_ids([{"role": "user", "content": content}]).tolist(),
            *judge.chat.observation_ids(said, turn_closed=False).tolist(),
        ]
        return [i for i in ids if i in control]

    assert not set(judge.chat.text_ids("".join(SPELLED)).tolist()) & control
    for spelled in (
        "".join(SPELLED),
        f"a{SPELLED[0]}\n\n",
        "".join(judge.chat._encoder.control_ids),
    ):
        assert controls(spelled) == controls("x")


@pytest.mark.parametrize("name", NAMES)
def test_an_unclosed_turn_is_closed_by_an_unsampled_token(name: str) -> None:
    judge = judge_of(name)
    said = [{"role": "user", "content": "x"}]
    closed = judge.chat.observation_ids(said, turn_closed=True).tolist()
    (closing,) = ids_of(judge, judge.model.closings[0])
    assert judge.chat.observation_ids(said, turn_closed=False).tolist() == [closing, *closed]


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_stops_where_the_template_closes_it_and_nowhere_inside(name: str) -> None:
    judge = judge_of(name)
    tokens = judge.tokenizer.convert_ids_to_tokens(list(judge.chat.stop_token_ids))
    expected = {"gptoss": ["<|return|>", "<|call|>"], "llama3": ["<|eot_id|>"]}
    assert tokens == expected.get(name, [judge.model.closings[0]])


def test_text_inside_a_turn_has_no_space_put_before_it() -> None:
    """SentencePiece puts one before a text's first word; inside a turn nothing is first."""
    judge = judge_of("mistral_v3")
    assert ids_of(judge, "[/INST]hi")[1:] == judge.chat.text_ids("hi").tolist()
    assert judge.chat.text_ids("hi").tolist() != judge.tokenizer.encode(
        "hi", add_special_tokens=False
    )


@pytest.mark.parametrize(
    ("sampled", "given"), [("x</code>", "<output>4"), ("print(1)", "\n2"), ("caf", "é")]
)
def test_a_sampled_end_does_not_merge_with_what_is_given(sampled: str, given: str) -> None:
    judge = judge_of("qwen3")
    apart = ids_of(judge, sampled) + judge.chat.text_ids(given).tolist()
    assert apart != ids_of(judge, sampled + given)  # a re-encoding would change what was sampled
    assert apart[: len(ids_of(judge, sampled))] == ids_of(judge, sampled)
    assert judge.tokenizer.decode(apart) == sampled + given


def test_a_prefill_merges_with_the_prompt_as_one_rendering_would() -> None:
    judge = judge_of("qwen3")
    said = [{"role": "user", "content": "x"}]
    prompt = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    ids = judge.chat.prompt_ids(said, prefill="\n<think>")
    assert ids.tolist() == ids_of(judge, prompt + "\n<think>")
    assert len(ids) == len(judge.chat.prompt_ids(said)) + 1  # two line ends are one token


def test_tools_are_shown_in_the_prompt_alone() -> None:
    judge = judge_of("qwen2_5")
    said = [{"role": "user", "content": "x"}]
    shown = judge.tokenizer.decode(judge.chat.prompt_ids(said, TOOLS))
    assert json.dumps(TOOLS[0]) in shown
    assert shown.startswith("<|im_start|>system\nYou are Qwen")  # the template's own default
    result = [{"role": "tool", "content": "r"}]
    after = judge.tokenizer.decode(judge.chat.observation_ids(result, turn_closed=True))
    assert after == (
        "\n<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_options_reach_the_template() -> None:
    judge = judge_of("qwen3")
    said = [{"role": "user", "content": "x"}]
    for options, end in (({}, "assistant\n"), ({"enable_thinking": False}, "\n</think>\n\n")):
        chat = ChatTemplate(judge.tokenizer, options)
        for ids in (chat.prompt_ids(said), chat.observation_ids(said, turn_closed=True)):
            assert judge.tokenizer.decode(ids).endswith(end)


@pytest.mark.parametrize(
    ("name", "roles", "reason"),
    [
        ("gemma3", ["tool"], "Conversation roles must alternate"),
        ("gemma3", ["user", "user"], "Conversation roles must alternate"),
        ("qwen3_5_think", ["system"], "System message must be at the beginning"),
        ("gptoss", ["system"], "it does not show each once"),  # drops it without a word
        ("deepseekv3", ["system"], "it does not show each once"),  # moves it to the front
        ("mistral_tekken", ["system"], "it does not show each once"),
    ],
)
def test_roles_that_cannot_follow_a_turn_are_refused(
    name: str, roles: list[str], reason: str
) -> None:
    chat = judge_of(name).chat
    says = rf"roles {roles} cannot follow an assistant turn: {reason}.*; use roles that it knows"
    for refused in (
        lambda: chat.require_roles(roles),
        lambda: chat.observation_ids(
            [{"role": role, "content": "x"} for role in roles], turn_closed=True
        ),
    ):
        with pytest.raises(ValueError, match=says.replace("[", r"\[").replace("]", r"\]")):
            refused()


def test_a_prompt_that_the_template_refuses_names_the_roles() -> None:
    said = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    with pytest.raises(ValueError, match=r"\['user', 'user'\] cannot begin a conversation"):
        judge_of("gemma3").chat.prompt_ids(said)


def test_a_template_that_closes_no_turn_is_refused() -> None:
    judge = judge_of("qwen3")
    judge.tokenizer.chat_template = trl_template("glm4moe")
    with pytest.raises(ValueError, match=r"must end an assistant turn with a special token"):
        ChatTemplate(judge.tokenizer)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "mistral_v3", "gemma3"])
def test_a_clipped_text_never_exceeds_its_budget(name: str) -> None:
    chat, rng = judge_of(name).chat, random.Random(0)
    pool = ("word ", "é", "日本", "🙂", "<|im_end|>", "</s>", "  ", "\n\n", "12345", "e\u0301")
    for _ in range(60):
        text = "".join(rng.choices(pool, k=rng.randint(0, 40)))
        budget = rng.randint(1, 60)
        clipped = chat.clip(text, budget)
        assert len(chat.text_ids(clipped)) <= budget
        assert (clipped == text) == (len(chat.text_ids(text)) <= budget)
        head = clipped.partition(" ... [")[0]
        assert text.startswith(head)


def test_tokens_that_nobody_would_encode_survive_three_turns() -> None:
    """Every sampled token is a single byte, which encoding would have merged."""
    judge: Any = judge_of("qwen3")
    letters = judge.tokenizer.convert_tokens_to_ids([*"thequickbrownfox"])
    sampled = [np.array([*letters, judge.chat.end_of_turn_id], np.int32) for _ in range(3)]
    ids = judge.chat.prompt_ids([{"role": "user", "content": "x"}])
    kept = []
    for turn in sampled:
        kept.append((len(ids), turn))
        said = [{"role": "user", "content": "fox"}]
        ids = np.concatenate([ids, turn, judge.chat.observation_ids(said, turn_closed=True)])
    for start, turn in kept:
        assert ids[start : start + len(turn)].tolist() == turn.tolist()
    text = judge.tokenizer.decode(ids)
    assert ids_of(judge, text) != ids.tolist()
    assert text.count("thequickbrownfox") == 3

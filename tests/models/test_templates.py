"""ChatTemplate against real tokenizers and the chat templates that models ship with."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any, cast

import pytest

from agentgrpo.actions import CallTools, Observation, ToolCall
from agentgrpo.agents.tools import ToolAgent
from agentgrpo.models.chat import ChatTemplate
from bench.cached import NotToBeHad
from bench.conversations import SPELLED, Judge, Seen
from bench.real_templates import MODELS

NAMES = [model.name for model in MODELS]
LARGE = ("gemma", "gptoss", "mistral_tekken", "gguf/command-r", "llama3", "deepseekv3",
         "qwen2_5_vl")  # fmt: skip
"""Vocabularies that take seconds to read."""


def marked(name: str) -> Any:
    """The name, slow where its vocabulary is large."""
    return pytest.param(name, marks=pytest.mark.slow) if name.startswith(LARGE) else name


NO_TOKEN, NOT_SHOWN = "must end an assistant turn with a special", "does not show an assistant turn"
REFUSED = {
    # of images: they show contents that are lists of parts alone
    **dict.fromkeys(["idefics3", "idefics3_training", "smolvlm", "smolvlm_training"], NOT_SHOWN),
    **dict.fromkeys(["llava_next", "llava_next_training"], "cannot be shown"),
    "vllm/template_kimi_audio": NOT_SHOWN,
    # they end a turn with text, or with nothing
    **dict.fromkeys([f"vllm/template_{name}" for name in ("basic", "blip2")], NO_TOKEN),
    "vllm/template_deepseek_ocr": NO_TOKEN,
    **dict.fromkeys([f"gguf/{name}" for name in ("falcon2:11b", "granite-code:3b")], NO_TOKEN),
    **dict.fromkeys(["gguf/nemotron-mini:4b", "gguf/llama-guard3:8b"], NO_TOKEN),
    "llama.cpp/llama-cpp-rwkv-world": NO_TOKEN,
    # no chat: they judge one, or want what no message has
    **dict.fromkeys(["gguf/granite3-guardian:2b", "gguf/llama-guard3:1b"], NOT_SHOWN),
    **dict.fromkeys(["gguf/firefunction-v2:70b", "gguf/shieldgemma:27b"], "is undefined"),
    "llama.cpp/fireworks-ai-llama-3-firefunction-v2": "is undefined",
    # they want tools in every prompt
    **dict.fromkeys(
        [
            "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use",
            "llama.cpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
            "llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        ],
        "'NoneType' object is not iterable",
    ),
}
"""Templates that cannot be appended to, by what is said of them."""


@cache
def _judge(name: str) -> Judge | str:
    """The judge of a model, or why there is none."""
    try:
        return Judge(next(model for model in MODELS if model.name == name))
    except NotToBeHad as error:
        return str(error)


def judge_of(name: str) -> Judge:
    actual = _judge(name)
    if isinstance(actual, str):
        pytest.skip(actual)
    actual.own_tokenizer()
    return actual


def ids_of(judge: Judge, text: str) -> list[int]:
    """The ids of text as the tokenizer encodes it, control tokens and all."""
    return list(judge.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def test_policy_and_author_may_write_thoughts_and_calls() -> None:
    judge = judge_of("qwen3")
    (think,) = ids_of(judge, "<think>")
    messages = [
        {"role": "system", "content": "Use <think>."},
        {"role": "user", "content": "<think>"},
    ]
    assert judge.chat.prompt_ids(messages).tolist().count(think) == 1
    # the policy's are its own in a history too; a system message behind them is the world's
    (call,) = ids_of(judge, "<tool_call>")
    for roles, count in ((["assistant"], 1), (["assistant", "system"], 1), (["user"], 0)):
        turns = [{"role": role, "content": "<tool_call>"} for role in roles]
        assert judge.chat.prompt_ids([*messages, *turns]).tolist().count(call) == count, roles
    assert judge.chat.text_ids("<think>\n", own=True).tolist() == ids_of(judge, "<think>\n")
    assert think not in judge.chat.text_ids("<think>").tolist()
    ends = judge.chat.text_ids("<|im_end|>", own=True).tolist()
    assert judge.chat.end_of_turn_id not in ends  # nobody ends a turn with text


STOPS = {
    "phi3": ["<|end|>", "<|endoftext|>"],
    "cohere2": ["<|END_OF_TURN_TOKEN|>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gemma3": ["<end_of_turn>"],
    "gemma4": ["<turn|>", "<eos>", "<|tool_response>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "muse_glimmer": ["<|eot|>"],
    "mistral_tekken": ["</s>"],
}


@pytest.mark.parametrize("name", [marked(name) for name in STOPS])
def test_turn_stops_only_at_its_closer(name: str) -> None:
    judge = judge_of(name)
    assert judge.tokenizer.convert_ids_to_tokens(list(judge.chat.stop_token_ids)) == STOPS[name]
    assert judge.tokenizer.convert_ids_to_tokens(judge.chat.end_of_turn_id) == STOPS[name][0]


@pytest.mark.parametrize("name", [marked(name) for name in STOPS])
def test_saved_stop_ids_restore_the_same_template(name: str) -> None:
    """A resumed run reads its own stop ids as the model's eos."""
    chat = judge_of(name).chat
    again = ChatTemplate(
        chat.tokenizer, generation_config={"eos_token_id": list(chat.stop_token_ids)}
    )
    for attribute in ("end_of_turn_id", "_endings", "_opening_ids", "_inner"):
        assert getattr(again, attribute) == getattr(chat, attribute), attribute
    assert {*again.stop_token_ids} == {*chat.stop_token_ids}


R7B = "llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use"
TOOL = [{"role": "tool", "content": "r", "name": "f"}]
GO_ON = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("name", "message", "last", "appended"),
    [
        ("cohere2", GO_ON, "<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"),
        ("phi3", GO_ON, "<|endoftext|>", "<|user|> x<|end|><|assistant|>"),
        ("glm4moe", TOOL, "<|user|>", "<|observation|>\n<tool_response>\nr"),
        ("glm4moe", TOOL, "<|endoftext|>", "<|observation|>\n<tool_response>\nr"),
        ("glm4moe", GO_ON, "<|observation|>", "<|user|>\nx<|assistant|>"),
        ("gemma4", TOOL, "<|tool_response>", 'response:f{value:<|"|>r<|"|>}<tool_response|>'),
        ("gemma4", TOOL, "<turn|>", "<|tool_response>response:f{value:"),
        ("gemma4", GO_ON, "<|tool_response>", "<turn|>\n<|turn>user\nx<turn|>"),
        ("gptoss", GO_ON, "<|call|>", "<|start|>user<|message|>x<|end|>"),
        ("qwen3", TOOL, "</tool_call>", "<|im_end|>\n<|im_start|>user\n<tool_response>"),
        ("lfm2_v2", TOOL, "<|tool_call_end|>", "<|im_end|>\n<|im_start|>tool\n"),
        (R7B, TOOL, "<|END_ACTION|>", "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN"),
    ],
)  # fmt: skip
def test_appended_tokens_depend_on_the_end_token(
    name: str, message: list[dict[str, str]], last: str | None, appended: str
) -> None:
    judge = judge_of(name)
    last_id = None if last is None else judge.tokenizer.convert_tokens_to_ids(last)
    ids = judge.chat.observation_ids(message, last_id=last_id)
    assert judge.tokenizer.decode(ids).startswith(appended)


def conversation_of_two_calls_a_turn(start: str) -> list[dict[str, Any]]:
    """Two turns with calls, whose ids begin with `start`."""
    messages: list[dict[str, Any]] = [*GO_ON]
    for turn, names in enumerate(("fg", "hk")):
        ids = [f"{start}{turn}{number}" for number in range(2)]
        calls: list[dict[str, Any]] = [
            {"type": "function", "id": i, "function": {"name": name, "arguments": {"x": name}}}
            for i, name in zip(ids, names, strict=True)
        ]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages += [{"role": "tool", "content": f"of {i}", "tool_call_id": i} for i in ids]
    return messages


def test_invalid_call_ids_are_refused_by_mistral() -> None:
    judge = judge_of(next(n for n in NAMES if n.startswith("llama.cpp/Mistral-Small")))
    judge.chat.prompt_ids(conversation_of_two_calls_a_turn("newid00"))
    with pytest.raises(ValueError, match=r"begin a conversation: .*length 9"):
        judge.chat.prompt_ids(conversation_of_two_calls_a_turn("a-clients-own"))


def test_generated_call_ids_fit_the_template() -> None:
    judge = judge_of("mistral_v3")
    agent = ToolAgent(env=None, call_reader=lambda parser: cast(Any, None))
    action = CallTools((ToolCall("f", {}), ToolCall("f", {})))
    message: Any = agent.observe(action, Observation("", outputs=("one", "two")))
    text = judge.tokenizer.decode(judge.chat.observation_ids(message, last_id=None, tools=True))
    assert len(set(re.findall(r'"call_id": "([A-Za-z0-9]{9})"', text))) == 2
    rendered = judge.chat.prompt_ids(
        [*({"role": role, "content": "x"} for role in ("user", "assistant")), *message]
    )
    text = judge.tokenizer.decode(rendered)  # of a history that is rendered anew
    assert len(set(re.findall(r'"call_id": "([A-Za-z0-9]{9})"', text))) == 2


@pytest.mark.parametrize(
    ("name", "message", "token"),
    [
        ("glm4moe", TOOL, "<|observation|>"), ("glm4moe", GO_ON, "<|user|>"),
        ("glm4moe", [], "<|endoftext|>"), ("gemma4", TOOL, "<|tool_response>"),
        ("gptoss", TOOL, "<|call|>"), ("gptoss", GO_ON, "<|return|>"),
        ("qwen3", TOOL, "<|im_end|>"),
    ],
)  # fmt: skip
def test_demonstration_ends_with_the_sampled_end_token(
    name: str, message: list[dict[str, str]], token: str
) -> None:
    judge = judge_of(name)
    assert judge.tokenizer.convert_ids_to_tokens(judge.chat.closing_id(message)) == token


def test_text_in_a_turn_gets_no_leading_space() -> None:
    """SentencePiece puts one before a text's first word; inside a turn nothing is first."""
    judge = judge_of("mistral_v3")
    assert ids_of(judge, "[/INST]hi")[1:] == judge.chat.text_ids("hi").tolist()
    assert judge.chat.text_ids("hi").tolist() != judge.tokenizer.encode(
        "hi", add_special_tokens=False
    )


def test_template_options_are_passed() -> None:
    judge = judge_of("qwen3")
    messages = [{"role": "user", "content": "x"}]
    for options, end in (({}, "assistant\n"), ({"enable_thinking": False}, "\n</think>\n\n")):
        chat = ChatTemplate(judge.tokenizer, options)
        for ids in (
            chat.prompt_ids(messages),
            chat.observation_ids(messages, last_id=chat.end_of_turn_id),
        ):
            assert judge.tokenizer.decode(ids).endswith(end)


@pytest.mark.parametrize(
    ("name", "roles", "reason"),
    [
        ("gemma3", ["tool"], "Conversation roles must alternate"),
        ("qwen3_5_think", ["system"], "System message must be at the beginning"),
        ("gptoss", ["system"], "it does not show each once"),  # drops it without a word
    ],
)
def test_roles_that_cannot_follow_a_turn_are_refused(
    name: str, roles: list[str], reason: str
) -> None:
    chat = judge_of(name).chat
    message = rf"roles {roles} cannot follow an assistant turn: {reason}.*; use roles that it knows"
    for refused in (
        lambda: chat.require_roles(roles),
        lambda: chat.observation_ids(
            [{"role": role, "content": "x"} for role in roles], last_id=chat.end_of_turn_id
        ),
    ):
        with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("]", r"\]")):
            refused()


def test_refused_prompt_names_the_roles() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    with pytest.raises(ValueError, match=r"\['user', 'user'\] cannot begin a conversation"):
        judge_of("gemma3").chat.prompt_ids(messages)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "mistral_v3", "gemma3"])
def test_clipped_text_never_exceeds_its_budget(name: str) -> None:
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


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_S2_3_random_conversations_equal_the_rendering(name: str) -> None:
    """10,000 of each: python -m bench.conversations."""
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            judge_of(name)
        return
    judge, recorded = judge_of(name), Seen()
    for index in range(20):
        judge.judge(random.Random(f"test {index}"), recorded)
    assert recorded.disagreements == 0, recorded.first
    assert recorded.deltas >= 40


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_environment_text_is_never_a_control_token(name: str) -> None:
    judge = judge_of(name)
    control = set(judge.chat._encoder.control_ids.values())

    def controls(content: str) -> list[int]:
        messages = [{"role": "user", "content": content}]
        ids = [
            *judge.chat.prompt_ids(messages).tolist(),
            *judge.chat.observation_ids(messages, last_id=None).tolist(),
        ]
        return [i for i in ids if i in control]

    assert not set(judge.chat.text_ids("".join(SPELLED)).tolist()) & control
    for spelled in ("".join(SPELLED), f"a{SPELLED[0]}\n\n", "".join(judge.control)):
        assert controls(spelled) == controls("x")

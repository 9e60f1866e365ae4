"""The tokens that a turn appends, against the template's rendering of the whole conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgrpo.models.chat import ChatTemplate, Keep
from agentgrpo.models.encoding import TextEncoder
from agentgrpo.models.models import chat_of
from agentgrpo.types import Int32
from tests.tiny import CHATML, make_tokenizer

TOOLS = (  # a template that, like Qwen2.5's, wraps tool output in a user's turn
    "{% for m in messages %}{% if m['role'] == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m['content'] }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TASK = [{"role": "system", "content": "S"}, {"role": "user", "content": "6*7?"}]
Turns = Sequence[tuple[str, Mapping[str, str]]]


def played(chat: ChatTemplate, turns: Turns, closed: Sequence[bool]) -> Int32:
    """A conversation as a rollout builds it: prompt once, then sampled ids and observations."""
    ids = [chat.prompt_ids(TASK)]
    for (text, message), turn_closed in zip(turns, closed, strict=True):
        sampled = chat.tokenizer.encode(text, add_special_tokens=False)
        if turn_closed:
            sampled.append(chat.end_of_turn_id)
        ids.append(np.array(sampled, np.int32))
        ids.append(chat.observation_ids([message], last_id=int(sampled[-1]) if sampled else None))
    return np.concatenate(ids)


def rendered(tokenizer: Any, turns: Turns) -> list[int]:
    """The same conversation as the template renders it in one go."""
    messages = list(TASK)
    for text, message in turns:
        messages += [{"role": "assistant", "content": text}, dict(message)]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


contents = (
    st.text(max_size=12)
    .map(lambda s: s.replace("\u241f", ""))
    .filter(lambda s: s.isprintable() and "<|" not in s)
)
turns = st.lists(
    st.tuples(
        contents,
        st.builds(
            lambda role, content: {"role": role, "content": content},
            st.sampled_from(["user", "tool"]),
            contents,
        ),
        st.booleans(),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("template", [CHATML, TOOLS], ids=["chatml", "tools"])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_appended_tokens_equal_the_rendered_conversation(
    template: str, data: st.DataObject
) -> None:
    tokenizer = make_tokenizer(template)
    drawn = data.draw(turns)
    conversation = [(text, message) for text, message, _ in drawn]
    ids = played(ChatTemplate(tokenizer), conversation, [closed for *_, closed in drawn])
    assert ids.dtype == np.int32
    assert ids.tolist() == rendered(tokenizer, conversation)


@pytest.mark.parametrize(
    "content", ["\u241fassistant-turn\u241f", "a\u241f", "{{ x }}", "<|im_end|>"]
)
def test_program_output_cannot_break_the_rendering(tokenizer: Any, content: str) -> None:
    chat = ChatTemplate(tokenizer)
    ids = chat.observation_ids([{"role": "user", "content": content}], last_id=chat.end_of_turn_id)
    expected = f"\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize(
    ("written", "stops"),
    [
        (None, (2, 7)),  # then config.json's
        ({}, (2,)),
        ({"eos_token_id": None}, (2,)),
        ({"eos_token_id": 0}, (2, 0)),
        ({"eos_token_id": [2, 5]}, (2, 5)),
    ],
)
def test_generation_config_eos_ids_stop_a_turn(
    tmp_path: Path, written: Mapping[str, Any] | None, stops: tuple[int, ...]
) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    config = {"x": 1, "pad_token_id": 0, "text_config": {"eos_token_id": [2, 7]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if written is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(written))
    chat = chat_of(str(tmp_path))
    assert (chat.stop_token_ids, chat.unknown_stops) == (stops, ())
    chat.save(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved == {**({"pad_token_id": 0} if written is None else {}), "eos_token_id": [*stops]}


@pytest.mark.parametrize("saved", [None, {"temperature": 0.5, "eos_token_id": 0}])
def test_checkpoint_lists_all_stop_ids(tmp_path: Path, saved: Mapping[str, Any] | None) -> None:
    """A full model writes its own generation_config.json first; an adapter writes none."""
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint"
    make_tokenizer(eos="<|endoftext|>").save_pretrained(base)
    (base / "generation_config.json").write_text('{"top_p": 0.9, "eos_token_id": 0}')
    chat = chat_of(str(base))
    assert (chat.stop_token_ids, chat.unknown_stops) == ((2, 0), ("<|im_end|>",))
    checkpoint.mkdir()
    if saved is not None:
        (checkpoint / "generation_config.json").write_text(json.dumps(saved))
    for _ in range(2):
        chat.save(checkpoint)
        written = json.loads((checkpoint / "generation_config.json").read_text())
        assert written == {"top_p": 0.9, "eos_token_id": [2, 0]}
        chat = chat_of(str(checkpoint))  # as a run that resumes, or trains it further
        assert (chat.stop_token_ids, chat.unknown_stops) == ((2, 0), ())


def test_broken_generation_config_is_named(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json: not JSON"):
        chat_of(str(tmp_path))


def test_template_that_opens_the_next_turn_still_has_a_closer() -> None:
    begins = CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")
    chat = ChatTemplate(make_tokenizer(begins))
    assert chat.stop_token_ids == (2,)
    ids = chat.observation_ids([{"role": "user", "content": "x"}], last_id=2)
    assert chat.tokenizer.decode(ids) == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_separator_after_every_turn_is_not_a_closer() -> None:
    """Also where the conversation's own end follows it: the two have the separator in common."""
    template = CHATML.replace("<|im_end|>", "<|im_end|><|endoftext|>").replace(
        "{% endif %}", "{% else %}<|im_end|>{% endif %}"
    )
    chat = ChatTemplate(make_tokenizer(template))
    assert chat.stop_token_ids == (2,)
    ids = chat.observation_ids([{"role": "user", "content": "x"}], last_id=2)
    assert chat.tokenizer.decode(ids).startswith("<|endoftext|>\n<|im_start|>user\nx<|im_end|>")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "'tiny' has no chat template; put a chat_template.jinja next"),
        ("", "has no chat template"),
        (
            "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
            r"must end an assistant turn with a special token, but after .* comes '\\nuser: x\\n'",
        ),
        (
            "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}<|im_end|>{% endfor %}",
            "does not show an assistant turn exactly once",
        ),
    ],
)
def test_template_without_turn_end_is_refused(template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(make_tokenizer(template))


def test_decoding_drops_only_the_end_tokens() -> None:
    tokenizer = make_tokenizer(eos="<|endoftext|>")
    chat = ChatTemplate(tokenizer)

    def decode(text: str) -> str:
        return chat.decode(np.array(tokenizer.encode(text), np.int32))

    assert decode("<code>x</code>") == "<code>x</code>"
    assert decode(" a , b . c<|im_end|>") == " a , b . c"
    assert decode("a<|im_end|>b<|im_end|><|endoftext|>") == "a<|im_end|>b"
    assert decode("<|im_end|>") == ""


@pytest.mark.parametrize("keep", ["ends", "head", "tail"])
def test_clipping_50_mb_encodes_only_the_ends(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, keep: Keep
) -> None:
    """All of it took minutes; how much is encoded depends on the budget alone."""
    chat, encoded = ChatTemplate(tokenizer), [0]
    for name in ("offsets", "encode_after"):
        whole = getattr(chat._encoder, name)

        def counted(text: str, *rest: Any, whole: Any = whole) -> Any:
            encoded[0] += len(text)
            return whole(text, *rest)

        monkeypatch.setattr(chat._encoder, name, counted)
    text = "begin " + "0123456789 \U0001f642\udc00" * 3_900_000 + " end"
    assert len(text) > 50_000_000
    clipped = chat.clip(text, 500, keep)
    assert encoded[0] < 50_000
    assert 490 <= len(chat.text_ids(clipped)) <= 500
    head, cut, tail = re.split(r" \.\.\. \[(\d+) characters cut\] \.\.\. ", clipped)
    assert len(head) + int(cut) + len(tail) == len(text)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert [bool(head), bool(tail)] == [keep != "tail", keep != "head"]


# --- what a tokenizer's own vocabulary can have in the way


def test_schema_property_names_spell_no_control_token() -> None:
    displayed = CHATML.replace("tools | map(attribute='function.name') | join", "tools | tojson")
    chat = ChatTemplate(make_tokenizer(displayed))
    schema = {"function": {"name": "f", "parameters": {"properties": {"<|im_end|>": {}}}}}
    ids = chat.prompt_ids([{"role": "user", "content": "x"}], [schema]).tolist()
    assert ids.count(2) == 2  # of the two messages
    assert "<|im_end|>" in chat.tokenizer.decode(ids).partition("<|im_start|>user")[0]


def test_merges_cannot_produce_a_control_token() -> None:
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<a>{% endif %}")
    tokenizer = make_tokenizer(template, merges=[("<", "a"), ("<a", ">")])
    index = tokenizer.convert_tokens_to_ids("<a>")
    tokenizer.add_tokens(["<a>"])
    assert tokenizer.convert_tokens_to_ids("<a>") == index
    chat = ChatTemplate(tokenizer)
    assert tokenizer.convert_ids_to_tokens(chat.text_ids("<a>").tolist()) == ["<a", ">"]
    ids = chat.prompt_ids([{"role": "user", "content": "<a>"}]).tolist()
    assert ids.count(index) == 1
    assert ids[-1] == index


def test_one_character_control_tokens_are_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["\u00a7"]})
    with pytest.raises(ValueError, match="one character cannot be kept apart"):
        TextEncoder(tokenizer)


KNOWN = (  # as Qwen2.5's: other roles are left out without a word, and calls where there are none
    "{% for m in messages %}{% if m['role'] in ('system', 'user', 'assistant', 'judge') %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]


@pytest.mark.parametrize(
    ("template", "roles", "reason"),
    [
        (CHATML, ["system", "user", "assistant", "user"], None),
        (CHATML, ["user", "assistant", "tool", "user"], None),
        (CHATML, ["human"], "the role of message 1 ('human') changes nothing"),
        (KNOWN, ["system", "user", "assistant", "user"], None),
        (KNOWN, ["user", "judge"], None),
        (KNOWN, ["human"], "the content of message 1 ('human') changes nothing"),
        (KNOWN, ["user", "tool", "user"], "the content of message 2 ('tool') changes nothing"),
        (KNOWN, ["user", "calls"], "the tool_calls of message 2 ('assistant') changes nothing"),
        (TOOLS, ["user", "tool"], None),
    ],
)
def test_prompt_must_show_every_message(
    template: str, roles: list[str], reason: str | None
) -> None:
    chat = ChatTemplate(make_tokenizer(template))
    message: list[dict[str, Any]] = [{"role": role, "content": "x"} for role in roles]
    if roles[-1] == "calls":
        message[-1] = {"role": "assistant", "content": "", "tool_calls": CALLS}
    if reason is None:
        chat.require_shown(message)
        return
    with pytest.raises(ValueError, match=re.escape(f"cannot begin a conversation: {reason}; use ")):
        chat.require_shown(message)

"""What a turn adds in tokens, against the template's own rendering of the whole conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentgrpo.models import chat as chat_module
from agentgrpo.models import encoding
from agentgrpo.models.chat import ChatTemplate, Keep
from agentgrpo.models.encoding import TextEncoder
from agentgrpo.models.models import chat_of
from agentgrpo.types import Int32
from tests.tiny import CHATML, THINKING, make_tokenizer

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
def test_appending_gives_what_the_template_renders(template: str, data: st.DataObject) -> None:
    tokenizer = make_tokenizer(template)
    drawn = data.draw(turns)
    conversation = [(text, message) for text, message, _ in drawn]
    ids = played(ChatTemplate(tokenizer), conversation, [closed for *_, closed in drawn])
    assert ids.dtype == np.int32
    assert ids.tolist() == rendered(tokenizer, conversation)


def test_a_turn_that_closed_itself_is_not_closed_again(tokenizer: Any) -> None:
    chat = ChatTemplate(tokenizer)
    message = {"role": "user", "content": "42"}
    still_open = chat.observation_ids([message], last_id=None)
    assert still_open[0] == chat.end_of_turn_id
    closed = chat.observation_ids([message], last_id=chat.end_of_turn_id)
    assert closed.tolist() == still_open[1:].tolist()


def test_what_was_sampled_stays_though_the_template_would_rewrite_it() -> None:
    tokenizer = make_tokenizer(THINKING)
    turn = ("<think>hm</think>x", {"role": "user", "content": "42"})
    ids = played(ChatTemplate(tokenizer), [turn], [True])
    assert tokenizer.encode("<think>hm</think>x", add_special_tokens=False) == [
        *ids[len(ChatTemplate(tokenizer).prompt_ids(TASK)) :][:18]
    ]
    assert len(ids) == len(rendered(tokenizer, [turn])) + len("<think>hm</think>")


@pytest.mark.parametrize(
    "content", ["\u241fassistant-turn\u241f", "a\u241f", "{{ x }}", "<|im_end|>"]
)
def test_no_output_of_code_can_break_the_rendering(tokenizer: Any, content: str) -> None:
    chat = ChatTemplate(tokenizer)
    ids = chat.observation_ids([{"role": "user", "content": content}], last_id=chat.end_of_turn_id)
    expected = f"\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == expected


def test_the_end_of_a_turn_stops_it_and_so_does_the_end_of_the_text() -> None:
    chat = ChatTemplate(make_tokenizer(eos="<|endoftext|>"))
    assert chat.end_of_turn_id == 2
    assert chat.stop_token_ids == (2, 0)
    assert ChatTemplate(make_tokenizer()).stop_token_ids == (2,)


@pytest.mark.parametrize(
    ("written", "stops"),
    [(None, (2,)), ({}, (2,)), ({"eos_token_id": 0}, (2, 0)), ({"eos_token_id": [2, 5]}, (2, 5))],
)
def test_what_ends_a_turn_by_generation_config_stops_it_too(
    tmp_path: Path, written: Mapping[str, Any] | None, stops: tuple[int, ...]
) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    if written is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert chat_of(str(tmp_path)).stop_token_ids == stops


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json: not JSON"):
        chat_of(str(tmp_path))


def test_a_template_that_always_begins_the_next_turn_is_closed_where_the_last_one_ends() -> None:
    begins = CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")
    chat = ChatTemplate(make_tokenizer(begins))
    assert chat.stop_token_ids == (2,)
    ids = chat.observation_ids([{"role": "user", "content": "x"}], last_id=2)
    assert chat.tokenizer.decode(ids) == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_a_separator_behind_every_turn_ends_none() -> None:
    """Also where the conversation's own end follows it: the two have the separator in common."""
    template = CHATML.replace("<|im_end|>", "<|im_end|><|endoftext|>").replace(
        "{% endif %}", "{% else %}<|im_end|>{% endif %}"
    )
    chat = ChatTemplate(make_tokenizer(template))
    assert chat.stop_token_ids == (2,)
    ids = chat.observation_ids([{"role": "user", "content": "x"}], last_id=2)
    assert chat.tokenizer.decode(ids).startswith("<|endoftext|>\n<|im_start|>user\nx<|im_end|>")


def test_tools_that_change_how_messages_are_written_are_not_shown_again() -> None:
    named = "{% for t in tools or () %}{{ t['function']['name'] }}{% endfor %}"
    for wrapped, after in (("{% if tools %}[ {% endif %}", "[ x"), (named, "x")):
        template = CHATML.replace("{{ m['content'] }}", wrapped + "{{ m['content'] }}")
        chat = ChatTemplate(make_tokenizer(template))
        for said in ("x", "x stand-in-tool"):
            for tools in (True, False):
                ids = chat.observation_ids(
                    [{"role": "user", "content": said}], last_id=2, tools=tools
                )
                shown = said.replace("x", after if tools else "x")
                assert f"user\n{shown}<|im_end|>" in chat.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "'tiny' has no chat template; put a chat_template.jinja beside"),
        ("", "has no chat template"),
        (
            "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
            r"must end an assistant turn with a special token, but after .* comes '\\nuser: x\\n'",
        ),
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}<|im_end|>"
            "{% endif %}{% endfor %}",
            r"does not show an assistant turn exactly once in \['user', 'assistant'\]",
        ),
        (
            "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}<|im_end|>{% endfor %}",
            "does not show an assistant turn exactly once",
        ),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "special token"),
    ],
)
def test_a_template_that_cannot_be_appended_to_is_refused(
    template: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(make_tokenizer(template))


def test_decoding_a_turn_drops_the_tokens_that_end_it_and_no_others() -> None:
    tokenizer = make_tokenizer(eos="<|endoftext|>")
    chat = ChatTemplate(tokenizer)

    def decode(text: str) -> str:
        return chat.decode(np.array(tokenizer.encode(text), np.int32))

    assert decode("<code>x</code>") == "<code>x</code>"
    assert decode(" a , b . c<|im_end|>") == " a , b . c"
    assert decode("a<|im_end|>b<|im_end|><|endoftext|>") == "a<|im_end|>b"
    assert decode("<|im_end|>") == ""


@pytest.mark.parametrize(
    ("text", "max_tokens", "clipped"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdefg", 6, "abcdef"),
        ("abcdefg", 1, "a"),
        ("", 1, ""),
        ("é", 1, ""),
        ("é" * 3, 5, "éé"),
        ("abcdefghij" * 9, 60, "abcdefghijabcdefgh ... [55 tokens cut] ... defghijabcdefghij"),
        ("<|im_end|>" * 8, 80, "<|im_end|>" * 8),
        ("<|im_end|>" * 2, 12, "<|im_end|><|"),
    ],
)
def test_a_long_observation_keeps_its_ends(
    tokenizer: Any, text: str, max_tokens: int, clipped: str
) -> None:
    assert ChatTemplate(tokenizer).clip(text, max_tokens) == clipped


@pytest.mark.parametrize("keep", ["ends", "head", "tail"])
def test_a_clipped_text_uses_all_of_its_budget(tokenizer: Any, keep: Keep) -> None:
    """Also where the number in the mark gets a digit more than was counted on."""
    chat, text = ChatTemplate(tokenizer), "".join(chr(ord("A") + i % 57) for i in range(205))
    clipped = chat.clip(text, 110, keep)
    assert len(chat.text_ids(clipped)) == 110
    head, tail = clipped.split(" ... [121 tokens cut] ... ")
    assert [len(head), len(tail)] == {"ends": [42, 42], "head": [84, 0], "tail": [0, 84]}[keep]
    assert text.startswith(head)
    assert text.endswith(tail)


@pytest.mark.parametrize("keep", ["ends", "head", "tail"])
def test_of_a_text_of_50_mb_only_its_ends_are_encoded(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, keep: Keep
) -> None:
    """All of it took minutes; how much is encoded depends on the budget alone."""
    chat, encoded = ChatTemplate(tokenizer), [0]
    for name in ("offsets", "encode_behind"):
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


def test_white_space_before_the_closing_token_belongs_to_what_closes_a_turn() -> None:
    spaced = make_tokenizer(CHATML.replace("m['content'] }}", "m['content'] }}\n"))
    chat = ChatTemplate(spaced)
    said = [{"role": "user", "content": "go on"}]
    after = "\n<|im_start|>user\ngo on\n<|im_end|>\n<|im_start|>assistant\n"
    for last_id, closing in ((chat.end_of_turn_id, ""), (None, "\n<|im_end|>")):
        ids = chat.observation_ids(said, last_id=last_id)
        assert spaced.decode(ids) == closing + after
    conversation = [("a", {"role": "user", "content": "b"})]
    assert played(chat, conversation, [False]).tolist() == rendered(spaced, conversation)


def test_a_template_that_shows_the_last_of_two_messages_alone_is_refused() -> None:
    last = "{% if m['role'] == 'assistant' or loop.last or not loop.previtem is defined %}"
    chat = ChatTemplate(
        make_tokenizer(
            CHATML.replace("{% for m in messages %}", "{% for m in messages %}" + last).replace(
                "<|im_end|>\n{% endfor %}", "<|im_end|>\n{% endif %}{% endfor %}"
            )
        )
    )
    with pytest.raises(ValueError, match=r"\['user', 'user'\] .*does not show each once"):
        chat.require_roles(["user", "user"])


@pytest.mark.parametrize(
    "shown", ["{{ c['arguments'].items() | first | last }}", "{{ '(' + c['arguments'] + ')' }}"]
)
def test_the_arguments_of_calls_are_an_object_or_a_string_as_the_template_has_it(
    shown: str,
) -> None:
    """Results follow calls alone here, so a turn without calls would not do instead."""
    calls = (
        "{% for m in messages %}{% if m['role'] == 'tool' and not loop.previtem['tool_calls'] %}"
        "{{ raise_exception('no call') }}{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        f"{{% for t in m['tool_calls'] or () %}}{{% set c = t['function'] %}}{shown}{{% endfor %}}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = make_tokenizer(calls)
    chat = ChatTemplate(tokenizer)
    ids = chat.observation_ids([{"role": "tool", "content": "42"}], last_id=chat.end_of_turn_id)
    assert tokenizer.decode(ids) == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("turns", "calls"), [(2000, 1), (1, 2000)], ids=["turns", "calls"])
def test_ids_given_again_are_put_back_in_one_pass(
    turns: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are; and what a message says is no id that was put in."""
    form = Mock(wraps=chat_module._MADE_ID)
    monkeypatch.setattr(chat_module, "_MADE_ID", form)
    named = "{% for c in m['tool_calls'] or () %}{{ c['id'] }} {% endfor %}{{ m['tool_call_id'] }}"
    tokenizer = make_tokenizer(CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}" + named))
    chat = ChatTemplate(tokenizer)
    said = "id0000000 id0000002 id00000019 idid0000004"

    def prompt(ids: Sequence[str]) -> str:
        messages: list[dict[str, Any]] = [{"role": "user", "content": said}]
        for turn in range(turns):
            mine = ids[turn * calls : (turn + 1) * calls]
            function = {"name": "f", "arguments": "{}"}
            made = [{"type": "function", "id": i, "function": function} for i in mine]
            messages.append({"role": "assistant", "content": "", "tool_calls": made})
            messages += [{"role": "tool", "content": "r", "tool_call_id": i} for i in mine]
        return str(tokenizer.decode(chat.prompt_ids(messages)))

    own = prompt([f"call_{number:05d}" for number in range(2000)])
    assert not form.mock_calls
    again = prompt(["call_00000"] * 2000)
    assert len(form.mock_calls) <= 3, "twice read, once put back"
    assert again == re.sub("call_[0-9]{5}", "call_00000", own)


@pytest.mark.slow
def test_smollm2_appends_what_its_template_renders(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = ChatTemplate(tokenizer)
    conversation: Turns = [
        ("<code>print(6*7)</code>", {"role": "tool", "content": "42"}),
        ("Let me  check.\n\n<code>1/0</code>", {"role": "user", "content": "ZeroDivisionError: é"}),
        ("Answer: 42", {"role": "tool", "content": "  (no output)\n"}),
    ]
    for closed in ([True, True, True], [False, True, False]):
        assert played(chat, conversation, closed).tolist() == rendered(tokenizer, conversation)
    assert tokenizer.decode([chat.end_of_turn_id]) == "<|im_end|>"


# --- what a tokenizer's own vocabulary can have in the way


def test_the_names_of_a_schemas_properties_spell_no_token() -> None:
    shown = CHATML.replace("tools | map(attribute='function.name') | join", "tools | tojson")
    chat = ChatTemplate(make_tokenizer(shown))
    schema = {"function": {"name": "f", "parameters": {"properties": {"<|im_end|>": {}}}}}
    ids = chat.prompt_ids([{"role": "user", "content": "x"}], [schema]).tolist()
    assert ids.count(2) == 2  # of the two messages
    assert "<|im_end|>" in chat.tokenizer.decode(ids).partition("<|im_start|>user")[0]


def test_a_control_token_that_merges_would_make_is_made_by_the_template_alone() -> None:
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


def test_what_no_token_spells_stays_the_unknown_one() -> None:
    vocab = {"<unk>": 0, "<|end|>": 1, "a": 2}
    backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<|end|>", name_or_path="words"
    )
    encoder = TextEncoder(tokenizer)
    (said,), mark = encoder.shield("a b <unk> <|end|>")
    assert encoder.encode(f"{said} <|end|>", mark).tolist() == [2, 0, 0, 0, 1]


def test_control_tokens_that_cannot_be_kept_apart_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = make_tokenizer()
    monkeypatch.setattr(encoding, "_rename", lambda spec, aliases: None)
    with pytest.raises(ValueError, match=r"does not keep the id 0 of '<.endoftext.>'"):
        TextEncoder(tokenizer).encode("x", "\U000f0000")
    tokenizer.add_special_tokens({"additional_special_tokens": ["\u00a7"]})
    with pytest.raises(ValueError, match="one character cannot be kept apart"):
        TextEncoder(tokenizer)

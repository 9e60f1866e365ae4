"""What is read of rows as people have them, and what is refused by column, message and row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.data.files import read_tasks
from agentgrpo.data.tasks import normalised_question
from agentgrpo.types import Task

VERL = {
    "prompt": [{"role": "user", "content": "2+2?"}],
    "reward_model": {"ground_truth": "4", "style": "rule", "level": 5},
    "extra_info": {"index": 7, "question": "What is 2+2?"},
}
SQUAD = {"q": "Who?", "answers": {"text": ["Ada", "Ada L."], "answer_start": [1, 1]}}
KILT = {"q": "Who?", "output": [{"answer": "Ada"}, {"answer": None}, {"answer": "Ada L."}]}
MMLU = {"question": "Which?", "choices": ["red", "blue"], "answer": 1}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
PRINTED = (  # messages as NumPy prints them, and as a cell of a table that was cut
    "[{'content': '2+2?', 'role': 'user'}\n {'content': '4', 'role': 'assistant'}]",
    "array([{'role': 'user', 'content': '2+2?'}], dtype=object)",
    '[{"role": "user", "content": "2+2?"}, {"role": "assist...]',
)
LOG: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "tool_call_id": "c1"},
    {"role": "user", "content": "And 3+3?"},
]


def read(
    tmp_path: Path, *rows: dict[str, Any], parquet: bool = False, **options: Any
) -> list[Task]:
    path = tmp_path / "rows.jsonl"
    if parquet:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return read_tasks(path, **options).rows


@pytest.mark.parametrize("parquet", [False, True])
@pytest.mark.parametrize(
    ("row", "question", "answer", "asked", "expected"),
    [
        (VERL, "prompt", "reward_model.ground_truth", "2+2?", "4"),
        (VERL, "extra_info.question", "extra_info.index", "What is 2+2?", 7),
        (SQUAD, "q", "answers.text", "Who?", ["Ada", "Ada L."]),
        (SQUAD, "q", "answers.text.0", "Who?", "Ada"),
        (KILT, "q", "output.answer", "Who?", ["Ada", "Ada L."]),
        ({"q": "Who?", "a": '{"b": {"c": true}}'}, "q", "a.b.c", "Who?", True),
        ({"q": "Who?", "a.b": "x", "a": {"b": "y"}}, "q", "a.b", "Who?", "x"),
        (MMLU, "{question}\n0) {choices.0}\n1) {choices.-1}", "answer",
         "Which?\n0) red\n1) blue", 1),
        ({"m": json.dumps([USER]), "a": 4}, "m", "a", "2+2?", 4),
        ({"q": '[{"a": 1}]', "a": '["b", "a"]'}, "q", "a", '[{"a": 1}]', '["b", "a"]'),
        ({"q": "[]", "a": "{}"}, "q", "a", "[]", "{}"),
        ({"m": '[{"content": "2+2?", "role": "user"}]', "a": 4}, "m", "a", "2+2?", 4),
        ({"m": "[{'role': 'user', 'content': '2+2?'}]", "a": 4}, "m", "a", "2+2?", 4),
        ({"my q": "x", "a": "1"}, 'Q: {my q} as {"x": 1}', "{a}", 'Q: x as {"x": 1}', "1"),
    ],
)  # fmt: skip
def test_cell_reads_dotted_paths(
    tmp_path: Path, parquet: bool, row: Any, question: str, answer: str, asked: str, expected: Any
) -> None:
    (task,) = read(tmp_path, row, parquet=parquet, question=question, answer=answer)
    assert (task.messages[0]["content"], task.spec["answer"]) == (asked, expected)


def test_columns_keep_the_columns_of_paths(tmp_path: Path) -> None:
    paths: dict[str, Any] = {"answer": "reward_model.ground_truth", "id": "extra_info.index"}
    (task,) = read(tmp_path, VERL, question="prompt", columns=[], **paths)
    assert (task.id, task.spec["answer"]) == ("7", "4")


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (VERL, {"question": "prompt", "answer": "reward_model"},
         "data.answer = 'reward_model': expected text, a number, true or false, or a list of "
         "these, got {'ground_truth': '4', 'style': 'rule', 'level': 5}. Use one of "
         "['reward_model.ground_truth', 'reward_model.style', 'reward_model.level']"),
        (KILT, {"question": "q", "answer": "output"}, "Use one of ['output.answer']"),
        (KILT, {"question": "q", "answer": "output.none"}, "no column 'output.none'"),
        (SQUAD, {"question": "q", "answer": "answers.none"},
         "no column 'answers.none'; the row has ['answers.answer_start', 'answers.text', 'q']"),
        ({"question": None, "answer": "4"}, {}, "null in column 'question'"),
        ({"question": "2+2?", "answer": None}, {}, "null in column 'answer'"),
        ({"question": " ", "answer": "4"}, {}, "message 1: expected text, got"),
        ({"question": {"a": 1}, "answer": "4"}, {}, "expected text or messages, got {'a': 1}"),
        ({"question": ["2+2?"], "answer": "4"}, {}, "message 1: expected {'role': text"),
        ({"question": "2+2?", "answer": float("nan")}, {}, "null in column 'answer'"),
        (MMLU, {"question": "{question} {choices}"},
         "column 'choices': expected text, got ['red', 'blue']. Use 'choices.0'"),
        (VERL, {"question": "{reward_model}"}, "Use 'reward_model.ground_truth'"),
        *(({"question": text, "answer": "4"}, {}, "got messages that are neither JSON nor a Python")
          for text in PRINTED),
        *(({"question": "2+2?", "answer": 4, "key": key}, {"id": "key"},
           f"data.id = 'key': expected text or a number, got {key!r}")
          for key in ({"a": 1}, ["a"], "")),
    ],
)  # fmt: skip
def test_unreadable_cell_is_named(
    tmp_path: Path, row: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*" + re.escape(message)):
        read(tmp_path, row, **options)


@pytest.mark.parametrize("parquet", [False, True])
@pytest.mark.parametrize(
    ("said", "read_as"),
    [
        ({"role": "User", "content": "x"}, {"role": "user", "content": "x"}),
        ({"role": "human", "content": "x"}, {"role": "user", "content": "x"}),
        ({"from": "human", "value": "x"}, {"role": "user", "content": "x"}),
        ({"from": "gpt", "value": "x"}, {"role": "assistant", "content": "x"}),
        ({"from": "chatgpt", "value": "x"}, {"role": "assistant", "content": "x"}),
        ({"from": "Human ", "value": "x"}, {"role": "user", "content": "x"}),
        ({"role": "prompter", "content": "x"}, {"role": "user", "content": "x"}),
        ({"role": "model", "content": "x"}, {"role": "assistant", "content": "x"}),
        ({"from": "tool_response", "value": "x"}, {"role": "tool", "content": "x"}),
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "function", "content": "x", "name": "f"},
         {"role": "tool", "content": "x", "name": "f"}),
        ({"role": "critic", "content": "x"}, {"role": "critic", "content": "x"}),
        ({"role": "user", "content": "x", "tool_calls": None, "name": None, "weight": 1},
         {"role": "user", "content": "x"}),
        ({"role": "user", "content": [{"type": "text", "text": "x", "image_url": None}]},
         {"role": "user", "content": "x"}),
    ],
)  # fmt: skip
def test_common_message_formats_are_read(
    tmp_path: Path, parquet: bool, said: Any, read_as: Any
) -> None:
    last = {"from": "human", "value": "y"} if "from" in said else USER
    last = said if isinstance(said.get("content"), list) else last  # Parquet mixes no types
    row = {"question": [said, last], "answer": "4"}
    (task,) = read(tmp_path, row, parquet=parquet)
    assert task.messages[0] == read_as


def test_tool_calls_in_the_history_distinguish_questions(tmp_path: Path) -> None:
    other = {**CALL, "function": {"name": "add", "arguments": {"a": 2}}}
    logs = [[LOG[0], {**LOG[1], "tool_calls": [call]}, *LOG[2:]] for call in (CALL, other)]
    first, second = read(tmp_path, *({"question": log, "answer": "6"} for log in logs))
    assert normalised_question(first) != normalised_question(second)


def test_calls_in_the_history_keep_their_arguments(tmp_path: Path) -> None:
    """Parquet fills what an object lacks with null, in the arguments of calls too."""
    other = {**CALL, "id": "c2", "function": {"name": "neg", "arguments": {"b": 2}}}
    log = [LOG[0], {**LOG[1], "tool_calls": [CALL, other]}, *LOG[2:]]
    for parquet in (False, True):
        (task,) = read(tmp_path, {"question": log, "answer": "6"}, parquet=parquet)
        _, called, result, _ = task.messages
        arguments = [call["function"]["arguments"] for call in called["tool_calls"]]
        assert arguments == [{"a": 1}, {"b": 2}]
        assert result == {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "add"}
    text = {**CALL, "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
    (task,) = read(tmp_path, {"question": [LOG[0], {**LOG[1], "tool_calls": [text]}, *LOG[2:]],
                              "answer": "6"})  # fmt: skip
    assert task.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
         "message 2: content: Value error, only text is understood"),
        ({"role": "user", "content": {"text": "x"}}, "message 2: content: "),
        ({"role": "user", "content": None}, "message 2: expected text, got"),
        ({"role": "user"}, "message 2: expected text, got"),
        ({"content": "x"}, "message 2: expected {'role': text"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": ""}},
         "message 2: expected no key 'function_call'"),
        ({"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
         "message 2: tool_calls.0.function: Field required"),
    ],
)  # fmt: skip
def test_message_with_unsupported_content_is_an_error(
    tmp_path: Path, said: Any, message: str
) -> None:
    fine, row = {"question": "2+2?", "answer": "4"}, {"question": [USER, said, USER], "answer": "4"}
    with pytest.raises(
        ValueError, match=rf"rows\.jsonl:2: column 'question', {re.escape(message)}"
    ):
        read(tmp_path, fine, row)


def test_last_assistant_message_is_an_error_or_dropped(tmp_path: Path) -> None:
    row = {"messages": [USER, ASSISTANT, USER, {**ASSISTANT, "content": "It is 4."}]}
    options: dict[str, Any] = {"question": "messages", "answer": "messages.-1.content"}
    remedy = r"data\.drop_last_message = true .* data\.answer = \"messages\.-1\.content\""
    with pytest.raises(ValueError, match=f"the last message is the assistant's.*{remedy}"):
        read(tmp_path, row, **options)
    (task,) = read(tmp_path, row, **options, drop_last=True)
    assert [m["role"] for m in task.messages] == ["user", "assistant", "user"]
    assert task.spec["answer"] == "It is 4."
    (kept,) = read(tmp_path, {"question": [USER], "answer": "4"}, drop_last=True)
    assert kept.messages == (USER,)
    with pytest.raises(ValueError, match="the last message is the assistant's"):
        read(tmp_path, {"question": [ASSISTANT], "answer": "4"}, drop_last=True)

"""Calls within one message: rows S1-6 and S1-7, and what may stand between the tags."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgrpo.actions import MAX_DEPTH, Malformed, ToolCall
from agentgrpo.agents.inline import InlineAgent, read_json, read_python
from agentgrpo.envs.tools import ToolEnv
from tests.given import TASK
from tests.playing import EOT, given_and_sampled, play, shown, task

CALLS: list[Any] = []


def weather(city: str, days: int = 1) -> str:
    """The weather of a city.

    Args:
        city: its name.
        days: how far ahead.
    """
    CALLS.append((city, days))
    if city == "Nowhere":
        raise LookupError("no such city")
    return f"{city}: sunny for {days}"


ENV = ToolEnv([weather])
AGENT = InlineAgent(env=ENV)
AGENT.messages(task())


def test_S1_7_the_result_is_put_into_the_message_and_decoding_goes_on() -> None:
    played = play(AGENT, ENV, '<fn>weather("Seattle, WA")</fn>', f" so Answer: sun{EOT}")
    result = "\n<fn_results>\nSeattle, WA: sunny for 1\n</fn_results>\n"
    assert given_and_sampled(played)[1:] == [
        (True, '<fn>weather("Seattle, WA")</fn>'),
        (False, result),
        (True, f" so Answer: sun{EOT}"),
    ]
    assert played.answer == "sun"
    assert played.stats["tool_calls"] == 1
    prompt = given_and_sampled(played)[0][1]
    assert "weather(city: string, days: integer = 1): The weather of a city." in prompt
    assert '<fn>name("text", key=1)</fn>' in prompt


@pytest.mark.parametrize(
    ("call", "error", "counted"),
    [
        ("storm('x')", "UnknownTool: no tool 'storm'; there are: weather", "unknown_tool"),
        ("weather(3)", "BadArguments: weather: city: Input should be a valid str", "bad_arguments"),
        ("weather('a', hours=2)", "BadArguments: weather: hours: Extra inputs", "bad_arguments"),
        ("weather()", "BadArguments: weather: city: Field required", "bad_arguments"),
        ("weather('Nowhere')", "LookupError: no such city", "tool_exception"),
    ],
)
def test_S1_7_a_failed_call_is_an_error_with_its_class_and_the_policy_goes_on(
    call: str, error: str, counted: str
) -> None:
    played = play(AGENT, ENV, f"<fn>{call}</fn>", f"Answer: x{EOT}")
    assert f"\n<fn_error>\n{error}" in shown(played)
    assert (played.stats[counted], played.stats["tool_errors"], played.answer) == (1, 1, "x")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("weather(open('/etc/passwd').read())", "argument city must be a literal"),
        ("__import__('os').system('x')", "expected one call of a function by its name"),
        ("weather('a', 1, 2)", "weather takes 2 arguments, got 3"),
        ("weather(*'ab')", "argument city must be a literal"),
        ("weather(b'Oslo')", "argument city must be a literal, of JSON's types"),
        ("weather({'Oslo'})", "argument city must be a literal, of JSON's types"),
        ("weather({(1, 2): 3})", "argument city must be a literal, of JSON's types"),
        ("weather(1j)", "argument city must be a literal, of JSON's types"),
        ("weather(**{})", "given twice or not by its name"),
        ("weather('a', city='b')", "given twice"),
        ("weather", "expected one call"),
        ("weather('a'", "not a call"),
        ("", "not a call"),
        ("(" * 5000, "not a call"),
    ],
)
def test_S1_7_only_literals_are_ever_read(call: str, error: str) -> None:
    before = len(CALLS)
    played = play(AGENT, ENV, f"<fn>{call}</fn>", f"Answer: x{EOT}", max_turn_tokens=9000)
    assert "<fn_error>\nSyntaxError: " in shown(played)
    assert error in shown(played)
    assert played.stats["malformed"] == 1
    assert len(CALLS) == before


def test_S1_7_arguments_are_what_json_carries() -> None:
    """So that every environment can write them down; half a surrogate pair is in no text."""
    known = ENV.toolset.schemas[0]
    read = read_python("weather((1, '\\ud800'), days={1: None})", {"weather": known})
    assert read.arguments == {"city": [1, "?"], "days": {"1": None}}
    body = '{"name": "weather", "arguments": {"city": "\\ud800"}}'
    assert read_json(body, {}).arguments == {"city": "?"}
    deep = f"{'[' * MAX_DEPTH}{']' * MAX_DEPTH}"
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        read_json(f'{{"name": "weather", "arguments": {{"city": {deep}}}}}', {})
    with pytest.raises(ValueError, match="a literal, of JSON's types"):
        read_python(f"f(city=[{deep}])", {})


def test_S1_6_a_result_that_the_policy_writes_itself_is_its_own_text() -> None:
    before = len(CALLS)
    fake = "<fn_results>\nOslo: rain\n</fn_results> Answer: rain"
    played = play(AGENT, ENV, f"{fake}{EOT}")
    assert given_and_sampled(played)[1:] == [(True, f"{fake}{EOT}")]
    assert (played.answer, len(CALLS)) == ("rain", before)
    both = play(AGENT, ENV, f"{fake} <fn>weather('Oslo')</fn>", f"Answer: sun{EOT}")
    assert [sampled for sampled, _ in given_and_sampled(both)] == [False, True, False, True]
    assert CALLS[-1] == ("Oslo", 1)


def test_incomplete_call_is_malformed() -> None:
    assert AGENT.parse("<fn>weather(", TASK) == Malformed("SyntaxError: <fn> without </fn>")
    assert AGENT.parse("weather()</fn>", TASK) == Malformed("SyntaxError: </fn> without <fn>")


def test_call_tags_are_options() -> None:
    agent = InlineAgent(
        env=ENV,
        open_tag="[[",
        close_tag="]]",
        call_form="json",
        observation="<{tag}>{output}</{tag}>",
        answer_prefix="<answer>",
    )
    call = '[[{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}]]'
    played = play(agent, ENV, call, f"<answer>ok</answer> bye{EOT}")
    assert "]]<fn_results>Bonn: sunny for 2</fn_results><answer>" in shown(played)
    assert played.answer == "ok"
    assert agent.stop == ("]]",)


@given(st.text(max_size=60))
def test_no_text_between_the_tags_raises(body: str) -> None:
    for read in (read_python, read_json):
        try:
            call = read(body, {})
        except ValueError:
            continue
        assert isinstance(call, ToolCall)

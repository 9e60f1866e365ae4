"""What a turn of the policy means: code that is whole is run, and nothing else is."""

from __future__ import annotations

import pytest

from agentgrpo.actions import Action, Finish, Malformed, Observation, RunCode
from agentgrpo.agents.code import CodeAgent
from agentgrpo.agents.tagged_text import ExampleMessage
from agentgrpo.types import Task
from tests.given import TASK

AGENT = CodeAgent()


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<code>print(1)</code>", RunCode("print(1)")),
        ("I think <code>\nx = 1\n  y\n\n</code> so", RunCode("x = 1\n  y")),
        ("<code>  indented</code>", RunCode("  indented")),
        ("<code></code>", RunCode("")),
        ("Answer: 1 <code>a</code>", RunCode("a")),
        ("<code>print('Answer: 3')</code>", RunCode("print('Answer: 3')")),
        ("<code>a</code><code>b</code>", RunCode("a")),
        ("<code>a<code>b</code>", RunCode("a<code>b")),
        ("<code>a", Malformed("Error: <code> without </code>")),
        ("Answer: 3 <code>a", Malformed("Error: <code> without </code>")),
        ("</code>", Malformed("Error: </code> without <code>")),
        ("rm -rf </code>", Malformed("Error: </code> without <code>")),
        ("a</code>b<code>c", Malformed("Error: <code> without </code>")),
        ("Answer: 5</code>", Malformed("Error: </code> without <code>")),
        ("a</code><code>b</code>", RunCode("b")),
        ("Answer: 42", Finish("42")),
        ("so\nAnswer:  42 pens \n", Finish("42 pens")),
        ("Answer: 1 Answer: 2", Finish("1 Answer: 2")),
        ("Answer:", Finish("")),
        ("answer: 42", Finish(None)),
        ("forty-two", Finish(None)),
        ("", Finish(None)),
    ],
)
def test_parse_of_a_turn(text: str, action: Action) -> None:
    assert AGENT.parse(text, TASK) == action


def test_tags_and_answer_prefix_are_options() -> None:
    agent = CodeAgent(open_tag="```python", close_tag="```", answer_prefix="####")
    assert agent.stop == ("```",)
    assert agent.parse("```python\n1+1\n```", TASK) == RunCode("1+1")
    assert agent.parse("#### 7", TASK) == Finish("7")
    assert agent.parse("```", TASK) == Malformed("Error: ``` without ```python")
    assert agent.parse("<code>1</code>", TASK) == Finish(None)


def test_the_conversation_starts_with_prompt_and_shots_then_the_task() -> None:
    shot: list[ExampleMessage] = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<code>1+1</code>"},
    ]
    agent = CodeAgent(system_prompt="S", shots=[shot])
    task = Task(id="x", messages=({"role": "user", "content": "2+2?"},), spec={"answer": "HIDDEN"})
    messages = agent.messages(task)
    assert messages == [
        {"role": "system", "content": "S"},
        *shot,
        *task.messages,
    ]
    assert "HIDDEN" not in str(messages)


@pytest.mark.parametrize("output", ["42", "", "{output}", "{x} %s \\1"])
def test_observation_is_formatted_literally(output: str) -> None:
    agent = CodeAgent(observation="Output:\n{output}\nGo on.", observation_role="tool")
    told = agent.observe(RunCode(""), Observation(output))
    assert told == [{"role": "tool", "content": f"Output:\n{output}\nGo on."}]

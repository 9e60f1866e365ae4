"""Tool schemas without references: vLLM's parsers, templates and clients of the endpoint."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
import pytest
from tokenizers import AddedToken

from agentgrpo.actions import CallTools, Schema, inlined
from agentgrpo.agents.inline import InlineAgent
from agentgrpo.agents.tools import ToolAgent
from agentgrpo.engine.tool_parsers import tool_call_reader
from agentgrpo.envs.tools import ToolEnv, tool_schema
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.programs.messages import BadRequest
from agentgrpo.programs.requests import read_chat
from tests.given import TASK
from tests.tiny import CHATML, make_tokenizer


class Level(enum.IntEnum):
    low = 1
    high = 2


class Color(enum.Enum):
    red = "red"
    blue = "blue"


class Mixed(enum.Enum):
    one = 1
    two = "two"


class Point(pydantic.BaseModel):
    x: int
    y: int = 0


class Line(pydantic.BaseModel):
    """Two points."""

    begin: Point
    end: Point | None = None


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


class Node(pydantic.BaseModel):
    value: int
    below: list[Node] = []


def tool_of(annotation: Any, **default: Any) -> Any:
    """A function `show(a)`, whose parameter has the annotation and, if given, the default."""

    def show(a: Any) -> str:
        return repr(a)

    show.__annotations__["a"] = annotation
    show.__defaults__ = tuple(default.values())
    return show


def text(a: str) -> str:
    return repr(a)


CASES: list[tuple[Any, Any, str]] = [
    (tool_of(Point), {"x": 1}, "Point(x=1, y=0)"),
    (tool_of(Line), {"begin": {"x": 1}, "end": {"x": 2}},
     "Line(begin=Point(x=1, y=0), end=Point(x=2, y=0))"),
    (tool_of(Point | None, a=None), {"x": 1}, "Point(x=1, y=0)"),
    (tool_of(Point | None, a=None), None, "None"),
    (tool_of(list[Point]), [{"x": 1}, {"x": 2}], "[Point(x=1, y=0), Point(x=2, y=0)]"),
    (tool_of(dict[str, Point]), {"p": {"x": 1}}, "{'p': Point(x=1, y=0)}"),
    (tool_of(Level, a=Level.low), 2, "<Level.high: 2>"),
    (tool_of(list[Color]), ["red", "blue"], "[<Color.red: 'red'>, <Color.blue: 'blue'>]"),
    (tool_of(Mixed), 1, "<Mixed.one: 1>"),
    (tool_of(Mixed), "two", "<Mixed.two: 'two'>"),
    (tool_of(Point | Color), {"x": 1}, "Point(x=1, y=0)"),
    (tool_of(Point | Color), "red", "<Color.red: 'red'>"),
    (tool_of(Literal[1, 2]), 2, "2"),
    (tool_of(Pet), {"kind": "cat", "lives": 9}, "Cat(kind='cat', lives=9)"),
    (tool_of(Pet), {"kind": "dog", "name": "A"}, "Dog(kind='dog', name='A')"),
    (tool_of(Node), {"value": 1, "below": [{"value": 2, "below": [{"value": 3}]}]},
     "Node(value=1, below=[Node(value=2, below=[Node(value=3, below=[])])])"),
    (text, '{"$ref": "#/$defs/X"}', "'{\"$ref\": \"#/$defs/X\"}'"),
]  # fmt: skip


def qwen(name: str, value: str) -> str:
    return (
        f"<tool_call>\n<function={name}>\n<parameter=a>\n{value}\n</parameter>\n</function>\n"
        "</tool_call>"
    )


def glm(name: str, value: str) -> str:
    return f"<tool_call>{name}\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


def seed(name: str, value: str) -> str:
    return (
        f"<seed:tool_call>\n<function={name}>\n<parameter=a>{value}</parameter>\n</function>\n"
        "</seed:tool_call>"
    )


def minimax(name: str, value: str) -> str:
    return (
        f'<minimax:tool_call>\n<invoke name="{name}">\n<parameter name="a">{value}</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    )


PARSERS: Mapping[str, Any] = {
    "qwen3_coder": qwen, "qwen3_xml": qwen, "step3p5": qwen, "glm45": glm, "glm47": glm,
    "seed_oss": seed, "minimax_m2": minimax,
}  # fmt: skip
MARKS = ("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>", "<think>",
         "</think>", "<seed:think>", "</seed:think>", "<minimax:tool_call>",
         "</minimax:tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
         "</arg_value>")  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = make_tokenizer()
    made.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    return made


@pytest.mark.parametrize("parser", PARSERS)
def test_valid_call_of_any_type_is_made(parser: str, tokenizer: Any) -> None:
    read = tool_call_reader(parser, tokenizer)
    for function, value, shown in CASES:
        env = ToolEnv([*{function, text}])
        agent = ToolAgent(env=env, call_reader=lambda _: read)
        written = value if isinstance(value, str) else json.dumps(value)
        action = agent.parse(PARSERS[parser](function.__name__, written), TASK)
        assert isinstance(action, CallTools), (function, action)
        observation: Any = env.reset(TASK).step(action)
        assert observation.outputs == (shown,), (function, action)


def references(value: Any) -> list[str]:
    """Keys of a schema that lead elsewhere, at any depth."""
    if isinstance(value, list):
        return [key for one in value for key in references(one)]
    if not isinstance(value, dict):
        return []
    own = [key for key in value if key in ("$ref", "$defs", "definitions", "mapping")]
    return own + [key for one in value.values() for key in references(one)]


def tool(parameters: Any) -> Schema:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


P = {"type": "object", "properties": {"x": {"type": "integer"}}, "description": "A point."}
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({**of(a={"$ref": "#/$defs/P"}), "$defs": {"P": P}}, of(a=P)),
    ({**of(a={"$ref": "#/definitions/P"}), "definitions": {"P": P}}, of(a=P)),
    (
        {**of(a={"allOf": [{"$ref": "#/definitions/P"}], "default": {"x": 1}}),
         "definitions": {"P": P}},
        of(a={**P, "default": {"x": 1}}),
    ),
    (
        {**of(a={"$ref": "#/$defs/P", "description": "Where."}), "$defs": {"P": P}},
        of(a={**P, "description": "Where."}),
    ),
    ({**of(a={"$ref": "#/$defs/Q"}), "$defs": {"P": P, "Q": {"$ref": "#/$defs/P"}}}, of(a=P)),
    ({**of(a={"$ref": "#/$defs/a~1b%20c"}), "$defs": {"a/b c": P}}, of(a=P)),
    (of(a=P, b={"$ref": "#/properties/a"}), of(a=P, b=P)),
    (of(a={"default": {"$ref": "#/no"}, "enum": [{"$ref": "x"}]}),) * 2,  # values
    (of(**{"$ref": {"type": "string"}, "definitions": P, "default": P}),) * 2,  # names
    (
        {**of(a={"$ref": "#/$defs/N"}),
         "$defs": {"N": {**of(n={"$ref": "#/$defs/N"}), "required": ["n"]}}},
        of(a={**of(n={"type": "object"}), "required": ["n"]}),
    ),
    (of(a={"$ref": "#"}), of(a={"type": "object"})),
    ({**of(a={"$ref": "#/$defs/A"}), "$defs": {"A": {"$ref": "#/$defs/A"}}}, of(a={})),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), FORMS)
def test_references_are_inlined(given: Any, expected: Any) -> None:
    before = json.dumps(given)
    assert inlined(tool(given)) == tool(expected)
    assert inlined(inlined(tool(given))) == tool(expected)
    assert json.dumps(given) == before


BAD = [
    (of(a={"$ref": "#/$defs/P"}), r"tool f: its schema has nothing at \$ref '#/\$defs/P'"),
    (of(a={"$ref": "https://x.org/s.json"}), "at .ref 'https://x.org/s.json'"),
    (of(a={"$ref": "#/type/0"}), "at .ref '#/type/0'"),
    (
        {**of(a={"$ref": "#/$defs/0"}),
         "$defs": {"40": P} | {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 9}
                               for i in range(40)}},
        "tool f: its schema has over 10000 nodes",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "message"), BAD)
def test_invalid_schema_names_its_tool(parameters: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tool_schema("f", "", parameters)
    body = {"model": "policy", "messages": [{"role": "user", "content": "Q"}]}
    with pytest.raises(BadRequest, match=f"tools: .*{message}") as caught:
        read_chat({**body, "tools": [tool(parameters)]})
    assert caught.value.param == "tools"


def test_templates_and_clients_see_no_references() -> None:
    made = [[*ToolEnv([function]).tools(TASK)] for function, _, _ in CASES]
    assert references(made) == []
    raw = tool({**of(a={"$ref": "#/$defs/P"}), "$defs": {"P": P}})

    class Own:
        """An environment whose schemas were written by hand."""

        def tools(self, task: Any) -> list[Schema]:
            return [raw]

    agent = ToolAgent(env=Own(), call_reader=lambda _: tool_call_reader("hermes", make_tokenizer()))
    chat = ChatTemplate(make_tokenizer(CHATML.replace("attribute='function.name'", "'tojson'")))
    shown = chat.decode(chat.prompt_ids([{"role": "user", "content": "Q"}], agent.tools(TASK)))
    assert "$ref" not in shown
    assert '"x"' in shown
    assert "f(a: object)" in InlineAgent(env=Own()).prompt(TASK)
    body = {"model": "policy", "messages": [{"role": "user", "content": "Q"}], "tools": [raw]}
    assert read_chat(body).tools == (tool(of(a=P)),)

"""Tool calling with vLLM's own parsers: rows S2-5, 6, 7; schemas of typed functions."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from typing import Any, Literal

import pydantic
import pytest
from tokenizers import AddedToken

from agentgrpo.actions import (
    MAX_DEPTH,
    CallTools,
    Finish,
    InfrastructureError,
    Malformed,
    Observation,
    ReadCalls,
    Reading,
    Say,
    ToolCall,
)
from agentgrpo.agents.code import CodeAgent
from agentgrpo.agents.inline import InlineAgent
from agentgrpo.agents.tools import ONE_CALL_RULE, ToolAgent
from agentgrpo.config.read import load_config
from agentgrpo.engine.tool_parsers import tool_call_reader
from agentgrpo.envs.tools import Tool, ToolEnv
from agentgrpo.types import Status, Task
from tests.given import TASK
from tests.playing import EOT, TOKENIZER, given_and_sampled, play, shown, task, wrapped
from tests.rollout.stubs import Turn
from tests.tiny import make_tokenizer


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


class Place(pydantic.BaseModel):
    city: str
    country: str = "NO"


def add(a: int, b: int = 1) -> int:
    """Add numbers."""
    return a + b


def boom() -> str:
    """Always fails."""
    raise KeyError("k")


def rich(  # noqa: D417 - some have no description
    place: Place,
    unit: Unit,
    many: list[int],
    kind: Literal["x", "y"] = "x",
    note: str | None = None,
) -> dict[str, Any]:
    """Everything at once.

    Not part of the description.

    Args:
        place: where it is.
        unit: of the numbers,
            one of two.

    Returns:
        All of it: a table.
    """
    return {"place": place, "unit": unit.value, "sum": sum(many), "kind": kind, "note": note}


ENV = ToolEnv([add, boom])


@pytest.fixture(scope="module")
def hermes() -> ReadCalls:
    return tool_call_reader("hermes", TOKENIZER)


def agent(read: ReadCalls, env: Any = ENV, *, has_user: bool = False, **config: Any) -> ToolAgent:
    env = SimpleNamespace(tools=env.tools, has_user=has_user)
    return ToolAgent(env=env, call_reader=lambda parser: read, **config)


def nested(depth: int) -> Any:
    """Lists and objects by turns, within each other."""
    value: Any = 1
    for number in range(depth):
        value = {"a": value} if number % 2 else [value]
    return value


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


UNREAD = Malformed("Error: the tool call could not be read; no call was made")
ADD = CallTools((ToolCall("add", {"a": 1}),))
NO_OBJECT = Malformed("Error: add: the arguments must be a JSON object")
DEEP = Malformed("Error: add: the arguments are not JSON: nested more than 100 deep")
TABLE = [
    (call("add", a=1), ADD),
    (f"thinking {call('add', a=1)}", ADD),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}}', ADD),  # the parser takes an open end
    *(
        (f"<tool_call>{text}</tool_call>", UNREAD)
        for text in (
            *("", "not json", '{"name": "add"}', '{"arguments": {}}', "[]", "3", "{}", "null"),
            *('{"name": 3, "arguments": {}}', '{"name": "add", "arguments": {"a": 1}'),
        )
    ),
    ("<tool_call>", UNREAD),
    ('<tool_call>{"name": "add"', UNREAD),
    ("[TOOL_CALLS] add", UNREAD),  # another family's mark
    ("<function=add>", UNREAD),
    (f"{call('add', a=1)}<tool_call>oops</tool_call>", UNREAD),
    *(
        (f'<tool_call>{{"name": "add", "arguments": {text}}}</tool_call>', NO_OBJECT)
        for text in ("[1]", '"x"', "null")
    ),
    (
        call("add", a=nested(MAX_DEPTH - 1)),
        CallTools((ToolCall("add", {"a": nested(MAX_DEPTH - 1)}),)),
    ),
    (call("add", a=nested(MAX_DEPTH)), DEEP),
    (call("nowhere", x=1), CallTools((ToolCall("nowhere", {"x": 1}),))),
    (call("add"), CallTools((ToolCall("add", {}),))),
    ('{"name": "add", "arguments": {"a": 1}}', Finish('{"name": "add", "arguments": {"a": 1}}')),
    ("</tool_call>", Finish("</tool_call>")),
    ("just an answer ", Finish("just an answer")),
    ("", Finish("")),
]


@pytest.mark.parametrize(("text", "action"), TABLE, ids=[text[:40] for text, _ in TABLE])
def test_S2_6_parse_of_tool_calls(hermes: ReadCalls, text: str, action: Any) -> None:
    assert agent(hermes).parse(text, TASK) == action


def test_S2_6_errors_go_back_to_the_policy_and_are_counted(hermes: ReadCalls) -> None:
    turns = ["<tool_call>{oops</tool_call>", call("nowhere"), call("add", a="x"), call("boom")]
    played = play(agent(hermes), ENV, *(t + EOT for t in turns), f"{call('add', a=2)}{EOT}", "3")
    text = shown(played)
    for said in (
        "tool\nError: the tool call could not be read; no call was made",
        "tool\nUnknownTool: no tool 'nowhere'; there are: add, boom",
        "tool\nBadArguments: add: a: Input should be a valid integer",
        "tool\nKeyError: 'k'",
        f"tool\n3{EOT}",
    ):
        assert said in text
    assert (played.answer, played.status) == ("3", Status.COMPLETED)
    counted = {k: v for k, v in played.stats.items() if v and k != "turns"}
    assert counted == {
        "malformed": 1,
        "tool_calls": 4,
        "tool_errors": 3,
        "unknown_tool": 1,
        "bad_arguments": 1,
        "tool_exception": 1,
    }


def test_S2_6_unencodable_text_is_handled(hermes: ReadCalls) -> None:
    """Half of a surrogate pair, in what the policy gives and in what a tool answers."""

    def half(name: str) -> str:
        """Answers with one."""
        return f"{name.encode()!r} \ud800"

    env = ToolEnv([half])
    made = agent(hermes, env)
    turn = '<tool_call>{"name": "half", "arguments": {"name": "\\ud800"}}</tool_call>'
    played = play(made, env, turn + EOT, f"ok{EOT}")
    assert f"tool\nb'?' \ufffd{EOT}" in shown(played)
    assert (played.answer, played.stats["tool_errors"]) == ("ok", 0)
    clipped = play(made, env, turn + EOT, f"ok{EOT}", max_observation_tokens=4)
    assert (clipped.answer, clipped.stats["turns"], clipped.stats["cut_answers"]) == ("ok", 2, 1)
    assert "cut_answers" not in played.stats


def test_S2_5_a_call_that_the_budget_cut_is_not_made(hermes: ReadCalls) -> None:
    """Nor is half of it said to anybody, nor an end put to it that nobody sampled."""
    said = call("add", a=1)
    for text, has_user in ((said, False), (said[:20], True), ("Let me see", True)):
        treatment: Any = {"truncated_length": "mask"} if has_user else {}
        turn = Turn(text, cut=True)
        played = play(agent(hermes, has_user=has_user), ENV, turn, treatment=treatment)
        assert (played.status, played.stats["tool_calls"]) == (Status.TRUNCATED_LENGTH, 0)
        assert played.answer is None
        assert given_and_sampled(played)[1:] == [(True, text)]
        assert played.trained is not has_user
        assert played.in_baseline


@pytest.mark.parametrize("parallel", [False, True])
def test_S2_7_one_call_per_turn_or_all(hermes: ReadCalls, parallel: bool) -> None:
    turn = f"{call('add', a=1)}{call('add', a=5)}{EOT}"
    played = play(agent(hermes, parallel_calls=parallel), ENV, turn, f"ok{EOT}")
    second = "6" if parallel else "Error: one call per turn; this one was not carried out"
    assert f"<|im_start|>tool\n2{EOT}\n<|im_start|>tool\n{second}{EOT}\n" in shown(played)
    assert played.stats["tool_calls"] == 1 + parallel


def test_an_environment_that_answers_too_few_calls_is_named(hermes: ReadCalls) -> None:
    played = agent(hermes, parallel_calls=True)
    calls = played.parse(f"{call('add', a=1)}{call('add', a=5)}", TASK)
    expected = "an observation's outputs: expected 2, one per call, got 0"
    with pytest.raises(ValueError, match=expected):
        played.observe(calls, Observation("both"))


def test_turn_without_a_call_is_a_message_to_the_user(hermes: ReadCalls) -> None:
    talker = agent(hermes, has_user=True)
    assert talker.parse("<think>Who?</think>Hello?", TASK) == Say("Hello?", "Hello?")
    assert talker.parse(call("add", a=1), TASK) == ADD


def test_thoughts_are_no_part_of_the_answer(hermes: ReadCalls) -> None:
    """Nor is an answer that it thinks of an answer."""
    thought = "<think>Al? I say Answer: Al.</think>\n\n"
    for prefix, said in (("", "Bo"), ("Answer:", "Answer: Bo")):
        asked = agent(hermes, answer_prefix=prefix)
        assert asked.parse(thought + said, TASK) == Finish("Bo")
    assert asked.parse(f"{thought}Bo", TASK) == Finish(None)
    for opened in (thought, "I say Al.\n</think>\n\n", "I say Al.</think>"):
        assert CodeAgent().parse(f"{opened}Answer: Bo", TASK) == Finish("Bo")
        assert CodeAgent().parse(f"{opened}Answer: Bo</think>", TASK) == Finish("Bo</think>")
        program = "```python\ndef f(x):\n    return x.split('</think>')[-1]\n```"
        for before in (opened, ""):
            assert CodeAgent(answer_prefix="").parse(before + program, TASK) == Finish(program)


def test_the_rule_of_one_call_is_in_the_prompt(hermes: ReadCalls) -> None:
    told = agent(hermes, one_call_rule=True, system_prompt="S").messages(task())
    assert told[0] == {"role": "system", "content": f"{ONE_CALL_RULE}\n\nS"}
    assert "one function or none" in ONE_CALL_RULE
    assert "Never say that something was done before" in ONE_CALL_RULE
    with pytest.raises(
        ValueError, match=r"one_call_rule: expected false with parallel_calls, got true"
    ):
        agent(hermes, one_call_rule=True, parallel_calls=True)
    shipped = load_config("tau_bench").agent.options
    assert shipped == {"parser": "hermes", "one_call_rule": True}


FAMILIES = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}'),
    ("pythonic", "[add(a=1)]"),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    ),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}'),  # of tokenizers with that token
    (
        "internlm",
        '<|action_start|><|plugin|>{"name": "add", "parameters": {"a": 1}}<|action_end|>',
    ),
    ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
]
# half of each, and what else could make a parser stumble
BROKEN = [
    "[TOOL_CALLS]",
    "[add(",
    '{"name":',
    "[1]",
    "<tool_call><function=>",
    "[" * 3000,
    "{" * 3000,
]


@pytest.mark.parametrize(("parser", "text"), FAMILIES)
def test_S2_6_every_family_reads_its_own_form(parser: str, text: str) -> None:
    tokenizer = make_tokenizer()
    marks = ["<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>"]
    marks += ["[TOOL_CALLS]", *["[ARGS]"][: "[ARGS]" in text]]
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
    reader = tool_call_reader(parser, tokenizer)
    assert agent(reader).parse(text, TASK) == ADD
    for broken in [*BROKEN, text[: len(text) // 2], text[:-1], text.replace('"add"', "add")]:
        assert isinstance(agent(reader).parse(broken, TASK), Malformed | Finish | CallTools)
    assert agent(reader).parse("plain words", TASK) == Finish("plain words")


def test_an_argument_is_not_read_anew_at_each_of_its_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's parsers do for a stream: a page of HTML took seconds, with the GIL held."""
    from vllm.parser.engine.parser_engine import ParserEngine

    asked: list[str] = []
    prefix = ParserEngine._safe_arg_prefix

    def counted(text: str, *more: Any) -> Any:
        asked.append(text)
        return prefix(text, *more)

    monkeypatch.setattr(ParserEngine, "_safe_arg_prefix", staticmethod(counted))
    read = tool_call_reader("qwen3_coder", TOKENIZER)
    page = "<ul>" + "<li>one</li>" * 50 + "</ul>"
    for end in ("\n</parameter>\n</function>\n</tool_call>", "\n</parameter>"):
        said = f"<tool_call>\n<function=add>\n<parameter=a>\n{page}{end}"
        ((name, arguments),) = read(said, ENV.tools(TASK)).calls
        assert (name, json.loads(arguments)["a"]) == ("add", page)
    assert len(asked) < 10


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", call("add", a=1) * 1001),
        ("qwen3_coder", "<tool_call>\n<function=add>\n" + "<parameter=a>1</parameter>" * 1001),
        ("qwen3_coder", f"<tool_call><function=add><parameter={' ' * 300}a>1</parameter>"),
    ],
)
def test_a_turn_of_thousands_of_marks_is_malformed(parser: str, text: str) -> None:
    """Parsers take time quadratic in them: 40 KB of parameters took 19 s."""
    read = tool_call_reader(parser, TOKENIZER)
    assert agent(read).parse(text, TASK) == UNREAD
    prose = f"a ={' ' * 300}b" + "<parameter>" * 1001
    assert read(prose, ENV.tools(TASK)) == Reading(prose, (), attempted=False)


def test_broken_tool_schema_is_not_the_policys_fault() -> None:
    read = tool_call_reader("hermes", TOKENIZER)
    for wrong in ({"parameters": "{}"}, {"description": ["x"]}):
        with pytest.raises(ValueError, match="tools"):
            read("plain words", [{"type": "function", "function": {"name": "f", **wrong}}])


def test_unknown_parser_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"parser: expected one of .*hermes.*got 'herms'"):
        tool_call_reader("herms", TOKENIZER)
    assert logging.getLogger("vllm").level != logging.CRITICAL


def test_malformed_calls_are_not_logged_by_vllm(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("vllm")
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging

    read = tool_call_reader("hermes", TOKENIZER)
    configure_logging(LoggingConfig())  # as an engine does when it starts
    assert read("<tool_call>{</tool_call>", []).attempted
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")


def test_schema_of_a_function() -> None:
    function = Tool(rich).schema["function"]
    properties = function["parameters"]["properties"]
    assert (function["name"], function["description"]) == ("rich", "Everything at once.")
    assert "title" not in function["parameters"]
    assert function["parameters"]["required"] == ["place", "unit", "many"]
    assert properties["place"]["description"] == "where it is."
    assert properties["unit"]["description"] == "of the numbers, one of two."
    assert properties["many"] == {"items": {"type": "integer"}, "type": "array"}
    assert properties["kind"] == {"default": "x", "enum": ["x", "y"], "type": "string"}
    json.dumps(function)


def test_arguments_arrive_as_the_functions_types() -> None:
    arguments = {"place": {"city": "Oslo"}, "unit": "celsius", "many": [1, 2]}
    values = Tool(rich).arguments(arguments)
    assert values["place"] == Place(city="Oslo")
    assert values["unit"] is Unit.C
    answer = ToolEnv([rich]).toolset.call(ToolCall("rich", arguments))
    assert json.loads(answer.text) == {
        "place": {"city": "Oslo", "country": "NO"},
        "unit": "celsius",
        "sum": 3,
        "kind": "x",
        "note": None,
    }


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(x): ...", "tool f: parameter 'x' has no annotation"),
        ("def f(*x: int): ...", "cannot be passed by name"),
        ("def f(x: 'Nothing'): ...", "tool f: .*Nothing"),
        ("import threading\ndef f(x: threading.Lock): ...", "tool f: "),
        (
            "import functools\nf = functools.partial(print)",
            "expected named functions, got functools.p",
        ),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(source: str, message: str) -> None:
    names: dict[str, Any] = {}
    exec(source, names)
    with pytest.raises(ValueError, match=message):
        Tool(names["f"])


def test_coroutines_of_a_turn_run_at_once_and_answer_in_order(hermes: ReadCalls) -> None:
    arrived: list[int] = []

    async def meet(n: int) -> int:
        """Wait for the other call."""
        arrived.append(n)
        while len(arrived) < 2:
            await asyncio.sleep(0.001)
        return n

    env = ToolEnv([meet, add])
    turn = f"{call('meet', n=1)}{call('meet', n=2)}{call('add', a=3)}{EOT}"
    played = play(agent(hermes, env, parallel_calls=True), env, turn, f"ok{EOT}")
    assert f"tool\n1{EOT}\n<|im_start|>tool\n2{EOT}\n<|im_start|>tool\n4{EOT}" in shown(played)


def test_a_tool_that_a_wrapper_hides_is_a_coroutine_is_awaited(hermes: ReadCalls) -> None:
    async def later(n: int) -> int:
        """One more."""
        await asyncio.sleep(0)
        return n + 1

    env = ToolEnv([wrapped(later)])
    played = play(agent(hermes, env), env, f"{call('later', n=2)}{EOT}", f"ok{EOT}")
    assert f"tool\n3{EOT}" in shown(played)


def test_a_tools_machine_failure_is_no_observation(hermes: ReadCalls) -> None:
    def broken() -> str:
        """Breaks."""
        raise InfrastructureError("disk on fire")

    env = ToolEnv([broken])
    played = play(agent(hermes, env), env, f"{call('broken')}{EOT}", max_retries=0)
    assert (played.status, played.error) == (Status.INFRA_ERROR, "disk on fire")


def test_a_tasks_own_system_message_joins_the_agents(hermes: ReadCalls) -> None:
    own, ask = {"role": "system", "content": "own"}, {"role": "user", "content": "Q"}
    shot: Any = {"role": "user", "content": "like this"}
    given = Task(id="t", messages=(own, ask), spec={})
    assert agent(hermes).messages(given) == [own, ask]
    assert agent(hermes, shots=[[shot]]).messages(given) == [own, shot, ask]
    both = {"role": "system", "content": "S\n\nown"}
    assert agent(hermes, system_prompt="S", shots=[[shot]]).messages(given) == [both, shot, ask]


class ByTask(ToolEnv):
    """Each task has its own `look`: what it takes is in the task."""

    def tools(self, task: Task) -> list[Any]:
        parameters = {"type": "object", "properties": task.spec}
        return [{"type": "function", "function": {"name": "look", "parameters": parameters}}]


def test_a_call_is_read_by_the_schema_of_its_own_task() -> None:
    """Though an agent serves many tasks, whose tools may share names and differ in all else."""
    reader = tool_call_reader("qwen3_coder", TOKENIZER)
    by_task = agent(reader, ByTask([add]))
    inline = InlineAgent(env=ByTask([add]))
    tasks = [replace(TASK, spec={"n": {"type": kind}}) for kind in ("integer", "string")]
    tasks.append(replace(TASK, spec={"m": {"type": "string"}}))
    for one in tasks:
        by_task.messages(one), by_task.tools(one), inline.messages(one)
    said = "<tool_call>\n<function=look>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
    for one, value in zip(tasks, (7, "7"), strict=False):
        assert by_task.parse(said, one) == CallTools((ToolCall("look", {"n": value}),))
    for one, name in zip(tasks, "nnm", strict=True):
        assert inline.parse("<fn>look(7)</fn>", one) == CallTools((ToolCall("look", {name: 7}),))

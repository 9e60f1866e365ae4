"""What of a turn is acted on: the text outside of its thoughts, in every agent."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from agentgrpo.actions import (
    CALLS,
    THOUGHTS,
    Action,
    CallTools,
    Finish,
    Malformed,
    RunCode,
    Say,
    ToolCall,
    open_thought,
    split_thoughts,
)
from agentgrpo.agents.code import CodeAgent
from agentgrpo.agents.inline import InlineAgent
from agentgrpo.agents.repl import ReplAgent
from agentgrpo.agents.tags import TagAgent
from agentgrpo.agents.tools import ToolAgent
from agentgrpo.envs.tools import ToolEnv
from agentgrpo.inspect.verify.tokens import rollout_faults
from tests.given import TASK
from tests.playing import EOT, play, says
from tests.programs.test_play import read_calls
from tests.tiny import CHATML, make_tokenizer


def say(text: str) -> str:
    """Say it."""
    return text


ENV = ToolEnv([say])
CODE, TAGS, REPL = CodeAgent(), TagAgent(boxed=False), ReplAgent(banner="")
INLINE = InlineAgent(env=ENV)
TALKER = CodeAgent(env=SimpleNamespace(has_user=True))


def tools(**options: Any) -> ToolAgent:
    return ToolAgent(env=ENV, call_reader=lambda parser: read_calls, **options)


def call(text: str) -> str:
    return f'<tool_call>{{"name": "say", "arguments": {{"text": "{text}"}}}}</tool_call>'


def called(text: str) -> CallTools:
    return CallTools((ToolCall("say", {"text": text}),))


RUN, TAG, FN = "<code>1</code>", "<python>1</python>", '<fn>say("1")</fn>'
INSIDE = Malformed("Error: nothing inside a thought is carried out; first close it with </think>")
NOTED = "<think>Or <code>2</code> or Answer: 2?</think>"
TABLE: list[tuple[Any, str, Action]] = [
    (CODE, f"{NOTED}Answer: 1", Finish("1")),
    (CODE, f"{NOTED}\n{RUN}", RunCode("1")),
    (CODE, f"<think></think>\n\n{RUN}", RunCode("1")),
    (CODE, f"{NOTED}Now. {NOTED}{NOTED} {RUN}", RunCode("1")),
    (CODE, "<think>a</think> Hm. <think>Answer: 1", Finish(None)),
    (CODE, "<think>Answer: 1", Finish(None)),
    (CODE, "\n <think>\nAnswer: 1", Finish(None)),
    (CODE, f"<think>{RUN}", INSIDE),
    (CODE, "So Answer: 2</think>Answer: 1", Finish("1")),
    (CODE, "<code>x = '<think>'</code>", RunCode("x = '<think>'")),
    (CODE, "<code>\n<think>\n</think>\n</code>", RunCode("<think>\n</think>")),
    (CODE, "<think>s</think><code>s.split('</think>')</code>", RunCode("s.split('</think>')")),
    (CODE, "Answer: `<think>`", Finish("`<think>`")),
    (TALKER, f"{NOTED}Which?", Say("Which?")),
    (TALKER, "<think>Which?", Say("")),
    (TAGS, f"<think>{TAG}", INSIDE),
    (TAGS, "<think>So <answer>2</answer>", INSIDE),
    (TAGS, f"<think>So <answer>2</answer>.</think>{TAG}", RunCode("1")),
    (TAGS, "<python>'<think>'</python>", RunCode("'<think>'")),
    (TAGS, "<answer>2</answer></think><answer>1</answer>", Finish("2")),  # ended at the first
    (INLINE, f"<think>{FN}", INSIDE),
    (INLINE, f"<think>{FN}</think>{FN}", called("1")),
    (INLINE, '<fn>say("<think>1</think>")</fn>', called("<think>1</think>")),
    (REPL, "<think>1\n", INSIDE),
    (REPL, "<think>1</think> 2\n", RunCode("2")),
    (REPL, " '<think>' + '</think>'\n", RunCode("'<think>' + '</think>'")),
    (REPL, " a<think>1</think>\n", RunCode("a<think>1</think>")),
    (tools(), f"<think>{call('2')}</think>1", Finish("1")),
    (tools(), f"<think>{call('2')}</think>{call('1')}", called("1")),
    (tools(), f"<think>{call('2')}", Finish("")),
    (tools(), f"Hm. <think>{call('2')}</think>\n{call('1')}", called("1")),
    (tools(), call("<think>1</think>"), called("<think>1</think>")),
    (tools(), f"<think>a</think>{call('</think>1')}", called("</think>1")),
    (tools(answer_prefix="Answer:"), "<think>Answer: 1", Finish(None)),
    (tools(act_in_thoughts=True), f"<think>{call('1')}</think>2", called("1")),
    (tools(act_in_thoughts=True), "<think>1</think>2", Finish("2")),
    (CodeAgent(act_in_thoughts=True), f"<think>{RUN}", RunCode("1")),
    (CodeAgent(act_in_thoughts=True), "<think>Answer: 1", Finish(None)),
    (ReplAgent(act_in_thoughts=True), "<think>1\n", RunCode("<think>1")),
]


@pytest.mark.parametrize(("agent", "text", "action"), TABLE)
def test_thoughts_are_not_acted_on(agent: Any, text: str, action: Action) -> None:
    assert agent.parse(text, TASK) == action


@pytest.mark.parametrize("opener", THOUGHTS)
def test_thoughts_of_every_model_family(opener: str) -> None:
    thought = f"{opener}Answer: 2{THOUGHTS[opener]}"
    assert CODE.parse(f"{thought}\nAnswer: 1", TASK) == Finish("1")
    assert CODE.parse(f"{opener}Answer: 2", TASK) == Finish(None)
    assert tools().parse(f"\n{opener}{call('2')}{THOUGHTS[opener]}{call('1')}", TASK) == called("1")
    assert open_thought(f"<|im_start|>assistant\n{opener}\n") == opener
    assert open_thought(f"<|im_start|>assistant\n{thought}\n") == ""


def test_the_final_channel_of_gpt_oss_is_what_is_acted_on() -> None:
    turn = "<|channel|>analysis<|message|>No.<|end|><|start|>assistant<|channel|>final<|message|>1"
    assert split_thoughts(turn) == ("1", "No.", "")


def test_thoughts_are_those_of_vllm_s_reasoning_parsers() -> None:
    """Their marks, as far as they are two texts."""
    from vllm.reasoning import ReasoningParserManager

    class Vocabulary(dict[str, int]):
        def get(self, *_: Any) -> int:
            return 1

    known = make_tokenizer()
    known.get_vocab = Vocabulary
    for name in ("deepseek_r1", "ernie45", "minimax_m3", "step3"):
        parser: Any = ReasoningParserManager.get_reasoning_parser(name)(known)
        opened = getattr(parser, "think_start_token", None) or parser.start_token
        closed = getattr(parser, "think_end_token", None) or parser.end_token
        assert THOUGHTS[opened] == closed
        text = f"{opened}Let me{closed}1"
        thoughts, content = parser.extract_reasoning(text, None)
        assert split_thoughts(text)[:2] == (content, thoughts.removeprefix(opened))


STARTS = [
    *("<tool_call>", "<|tool_call|>", "<tool_calls>", "<|tool_calls_section_begin|>", "<function="),
    *("<|START_ACTION|>", "<|action_start|><|plugin|>", "<minimax:tool_call>", "<invoke name="),
    *("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5cDSML\uff5c calls>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "functools[", '{"name": ', " [f(x=", "<|open|>tools<|sep|>"),
]


@pytest.mark.parametrize("start", STARTS)
def test_a_tag_in_an_argument_is_text_in_every_family(start: str) -> None:
    text = f"{start}f <think>1</think>"
    assert split_thoughts(text, CALLS)[0] == text
    assert split_thoughts(f"<think>{start}</think>{text}", CALLS)[0] == text


@pytest.mark.parametrize("text", ["<think>", "a<think>", "'<think>", "</think>", '"</think>"', "a"])
def test_long_turns_are_divided_in_little_time(text: str) -> None:
    started = time.process_time()
    for marks in (CALLS, CODE.marks):
        split_thoughts(text * 20_000, marks)
    assert time.process_time() - started < 30  # quadratic: minutes


# --- played: where the template or an earlier turn of the same message began the thought

OPENED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
CLOSED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")


@pytest.mark.parametrize(
    ("template", "turns", "answer", "counts"),
    [
        (OPENED, [f"2? Answer: 2</think>Answer: 1{EOT}"], "1", (0, 0)),
        (OPENED, [f"Answer: 2{EOT}"], None, (0, 0)),
        (OPENED, [f"<think>Answer: 2</think>Answer: 1{EOT}"], "1", (0, 0)),
        (OPENED, ["<code>print(2)</code>", f"</think>Answer: 1{EOT}"], "1", (0, 1)),
        (OPENED, ["x</think><code>print(2)</code>", f"Answer: 2{EOT}"], None, (1, 0)),
        (CLOSED, ["<code>print(2)</code>", f"Answer: 1{EOT}"], "1", (1, 0)),
        (CHATML, [f"Answer: 1{EOT}"], "1", (0, 0)),
    ],
)
@pytest.mark.parametrize("history", ["append", "render"])
def test_template_may_start_the_thought(
    template: str, turns: list[str], answer: str | None, counts: tuple[float, float], history: str
) -> None:
    class Typed(CodeAgent):
        def act(self, body: str, task: Any) -> Any:
            return called(body)

    engine = says(*turns, tokenizer=make_tokenizer(template))
    rollout = play(Typed(), ENV, engine=engine, history=history)
    assert rollout.answer == answer
    assert (rollout.stats["tool_calls"], rollout.stats["malformed"]) == counts
    assert list(rollout_faults(rollout)) == []


@pytest.mark.parametrize(
    ("agent", "turns", "counts"),
    [
        (INLINE, [f"<think>{FN}", FN, f"</think>{FN}", f"Answer: 1{EOT}"], (1, 2)),
        (INLINE, [f"<think>a</think>{FN}", FN, f"Answer: 1{EOT}"], (2, 0)),
        (
            InlineAgent(env=ENV, act_in_thoughts=True),
            [f"<think>{FN}", FN, f"</think>{FN}", f"Answer: 1{EOT}"],
            (3, 0),
        ),
    ],
)
def test_a_thought_lasts_until_it_is_closed(
    agent: Any, turns: list[str], counts: tuple[float, float]
) -> None:
    rollout = play(agent, ENV, *turns)
    assert rollout.answer == "1"
    assert (rollout.stats["tool_calls"], rollout.stats["malformed"]) == counts
    assert [s.sampled for s in rollout.segments] == [False, True] * len(turns)
    assert list(rollout_faults(rollout)) == []

"""What an agent does and what its environment answers: values that both share."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol
from urllib.parse import unquote

from agentgrpo.support.user_calls import InfrastructureError as InfrastructureError

Message = Mapping[str, Any]
"""A chat message, `{"role": ..., "content": ...}`, and what else the model's template reads."""


Schema = Mapping[str, Any]
"""A tool as templates and engines know it: `{"type": "function", "function": {"name": ...}}`."""


MOST_PARTS = 10_000
"""Of one tool's schema, its references inlined."""
_VALUES, _BY_NAME = ("default", "const", "enum", "examples"), ("properties", "patternProperties")
_REFERRED = ("$defs", "definitions", "mapping")  # of a discriminator, to references


def inlined(tool: Schema) -> Schema:
    """A tool whose schema has no references, which parsers of calls and templates do not follow.

    A model that contains itself is shown once; within itself it is only a value of its type.
    ValueError: a reference leads nowhere, or the schema has more than MOST_PARTS parts.
    """
    function = tool.get("function")
    if not isinstance(function, Mapping) or "$ref" not in str(function):
        return tool
    root, parts = function.get("parameters"), itertools.count(1)

    def target(ref: str) -> Mapping[str, Any]:
        found: Any = root if ref.startswith("#") else None
        for part in filter(None, unquote(ref[1:]).split("/")):
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            raise ValueError(f"tool {function['name']}: nothing in its schema is at $ref {ref!r}")
        return found

    def schema(node: Any, within: tuple[str, ...] = (), by_name: bool = False) -> Any:
        if next(parts) > MOST_PARTS:
            raise ValueError(f"tool {function['name']}: its schema has over {MOST_PARTS} parts")
        if isinstance(node, list):
            return [schema(one, within) for one in node]
        if not isinstance(node, Mapping):
            return node
        if by_name:
            return {name: schema(one, within) for name, one in node.items()}
        rest, ref, all_of = dict(node), node.get("$ref"), node.get("allOf")
        if isinstance(all_of, list) and len(all_of) == 1 and isinstance(all_of[0], Mapping):
            del rest["allOf"]  # as pydantic 1 writes a reference with a description
            return schema({**all_of[0], **rest}, within)
        if isinstance(ref, str):
            del rest["$ref"]
            if ref not in within:
                return schema({**target(ref), **rest}, (*within, ref))
            whole = {**target(ref), **rest}
            return {k: v for k, v in whole.items() if k in ("type", "title", "description")}
        return {
            key: value if key in _VALUES else schema(value, within, key in _BY_NAME)
            for key, value in rest.items()
            if key not in _REFERRED
        }

    return {**tool, "function": {**function, "parameters": schema(root, ("#",))}}


@dataclass(frozen=True, slots=True)
class RunCode:
    """The policy wants this code run."""

    code: str
    language: str = "python"
    submits: bool = field(default=False, repr=False)
    """It hands in the answer: carried out also where no call is left, and then counted as refused,
    so that one that fails does not buy another."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool by its name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallTools:
    """The policy wants these tools called, in this order."""

    calls: tuple[ToolCall, ...]
    refused: tuple[ToolCall, ...] = ()
    """Calls beyond the one that the agent may make in a turn: answered with an error, not made."""


@dataclass(frozen=True, slots=True)
class Say:
    """The policy says this to whom it talks with in the environment (a simulated user)."""

    text: str
    answer: str | None = None
    """What it answers by this, should the user end the talk now."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The policy is done."""

    answer: str | None
    """What it answered; None if it stopped without saying so in the asked form."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """The policy tried to act and got the form wrong; it is told how, and may try again."""

    message: str


@dataclass(frozen=True, slots=True)
class ModelReply:
    """What was said in the second role that an episode asked for (Observation.ask).

    The one action that is not the policy's: an agent never makes it.
    """

    text: str


Action = RunCode | CallTools | Say | Finish | Malformed | ModelReply


THOUGHTS = {
    "<think>": "</think>", "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>", "<|START_THINKING|>": "<|END_THINKING|>",
    "\u25c1think\u25b7": "\u25c1/think\u25b7", "<|channel>thought": "<channel|>",
    "<|channel|>analysis<|message|>": "<|end|>", "<|open|>think<|sep|>": "<|close|>think<|sep|>",
}  # fmt: skip
"""What opens a thought and what closes it, in the families that vLLM's reasoning parsers know."""
CALLS = (
    r"(?i:<[^<>\n]{0,32}(?:tool|func|invoke|action|plugin|calls|python_))|<\|open\|>tools"
    r"|\[TOOL_CALLS|functools|(?:^|(?<=[>\]]))[ \t]*(?!\[THINK)[\[{]"
)
"""Pattern of what begins a call in some family of models."""
_TAGS = "|".join(map(re.escape, [*THOUGHTS, *THOUGHTS.values()]))
_BARE = "|".join(re.escape(tag) for tag in THOUGHTS.values() if "think" in tag.lower())
_FINAL = r"(?:(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>)?"


def split_thoughts(text: str, marks: str = r"\S") -> tuple[str, str, str]:
    r"""The text of a turn that is acted on, its thoughts, and what opened one that is not closed.

    A text that closes a thought without opening it begins in one. Tags in quotes are text, and so
    are all behind the first mark of an action, a pattern: those of code and of arguments.

    >>> split_thoughts("<think>4?</think>\n5 <think>or 6</think>.<think>no", marks="<code>")
    ('5 .', '4?or 6no', '<think>')
    >>> split_thoughts("hm</think><code>'a</think>'; '<think>'", marks="<code>")[0]
    "<code>'a</think>'; '<think>'"
    """
    pairs = (rf"{re.escape(a)}.*?(?:{re.escape(b)}{_FINAL}|\Z)" for a, b in THOUGHTS.items())
    thought = rf"(?<!['\"`])(?:{'|'.join(pairs)})"
    begun = rf"\A(?:(?!{_TAGS}|{marks}).)*(?:{_BARE})(?!['\")\]]|`(?!``))"
    parts = re.compile(rf"({begun}|{thought})|(?:{marks}).*", re.DOTALL | re.MULTILINE)
    found = [part[1] for part in parts.finditer(text) if part[1]]
    kept = parts.sub(lambda part: "" if part[1] else part[0], text)
    opener = next((tag for tag in THOUGHTS if found and found[-1].startswith(tag)), "")
    inside = "" if opener and THOUGHTS[opener] in found[-1] else opener
    thoughts = re.sub(f"(?:{_TAGS}){_FINAL}", "", "".join(found))
    return kept.lstrip("\n") if found else kept, thoughts, inside


def open_thought(prompt: str) -> str:
    """What opened the thought that the end of a prompt begins a turn in, or ""."""
    return next((tag for tag in THOUGHTS if prompt.rstrip().endswith(tag)), "")


SUBMIT = "submit_final_answer"
"""What code calls to hand in its answer, at a console."""


def is_submission(statement: str) -> bool:
    """Whether a complete statement is a call of submit_final_answer with arguments, no more."""
    try:
        tree = ast.parse(statement)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Expr):
        return False
    call = tree.body[0].value
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == SUBMIT
        and len(call.args) + len(call.keywords) > 0
    )


DEEPEST = 100
"""Lists and objects within each other, of what a policy gives. Parsers and writers of JSON, and
what copies or compares values, follow some 200; behind those they raise, or never answer."""


def shallow(value: Any, depth: int = DEEPEST) -> Any:
    """The value of JSON's types; ValueError if it is nested deeper than this.

    >>> shallow({"a": [1]})
    {'a': [1]}
    """
    if isinstance(value, list | tuple | dict):
        if depth == 0:
            raise ValueError(f"nested more than {DEEPEST} deep")
        for inner in value.values() if isinstance(value, dict) else value:
            shallow(inner, depth - 1)
    return value


def as_json(value: Any) -> Any:
    """What a policy gave as an argument, as JSON carries it: tuples are lists, keys are text.

    Half of a surrogate pair, which nothing that encodes text takes, becomes a question mark.
    ValueError: JSON cannot carry it, or it is nested more than DEEPEST deep.

    >>> as_json((1, "a", {2: None}))
    [1, 'a', {'2': None}]
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
        plain = json.loads(text.encode("utf-8", "replace"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    return shallow(plain)


Model = Literal["policy", "reference"] | Callable[["ModelRequest"], str]
"""Who speaks: the engine as it is; without the adapter, so that nothing moves it; or another."""
MODELS: Mapping[str, Model] = MappingProxyType({"policy": "policy"})


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What a model is to say in a second role: a customer, an opponent.

    It is no part of the rollout's tokens and never trained on; the policy is shown the answer.
    """

    messages: tuple[Message, ...]
    """The conversation as the second role sees it."""
    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy."""
    model: Model = "policy"
    """One of those that an environment is given as `models`."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an action did."""

    text: str
    """What the policy is shown."""
    failed: bool = False
    """The action did not work (an exception, a timeout, ...), by status and never by its text."""
    done: bool = False
    """The episode is over: nothing more is shown or sampled."""
    answer: str | None = None
    """With done: what the policy handed in as its answer by this action."""
    outputs: tuple[str, ...] = ()
    """One text per call of a CallTools, in its order; `text` is then not shown."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What this step was worth, by name: credited to the turn that caused it."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Added to the counts of the rollout (Rollout.stats), each a number of the metrics by its name:
    none of those that a run has of itself (envs/validate.py), and without "/"."""
    memory: Any = field(default=None, compare=False)
    """What an episode that repeats this action is handed before it does, by recall(memory): answers
    that came from elsewhere and are not to be asked for again."""
    ask: ModelRequest | None = None
    """The answer waits for this: step() is called again, with what was said as ModelReply, and only
    then gives the observation of the policy's action. Nothing else of this one is read."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a parser found in a turn."""

    content: str
    """The text besides the calls."""
    calls: tuple[tuple[str, str], ...]
    """Name and arguments (JSON text) of each call, in order."""
    attempted: bool
    """The turn holds a mark of a call, whether or not one could be read."""


class ReadCalls(Protocol):
    """A parser of tool calls (tool_parsers.tool_call_reader)."""

    def __call__(self, text: str, tools: Sequence[Schema]) -> Reading:
        """What a whole turn says; never raises for what the policy wrote."""

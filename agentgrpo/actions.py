"""Actions of agents and observations of environments: the values that pass between both."""

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
"""A chat message: `{"role": ..., "content": ...}` and other keys that a chat template reads."""


Schema = Mapping[str, Any]
"""A tool in OpenAI's form: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""


MAX_SCHEMA_NODES = 10_000
"""Of one tool's schema with its references inlined."""
_VALUES, _BY_NAME = ("default", "const", "enum", "examples"), ("properties", "patternProperties")
_REFERRED = ("$defs", "definitions", "mapping")  # mapping: of a discriminator, to references


def inlined(tool: Schema) -> Schema:
    """Replace the $ref of a tool's schema, which tool parsers and chat templates do not follow.

    A recursive model is expanded once; within itself only its type, title and description remain.
    ValueError: a reference has no target, or the schema has over MAX_SCHEMA_NODES nodes.
    """
    function = tool.get("function")
    if not isinstance(function, Mapping) or "$ref" not in str(function):
        return tool
    root, num_nodes = function.get("parameters"), itertools.count(1)

    def target(ref: str) -> Mapping[str, Any]:
        node: Any = root if ref.startswith("#") else None
        for part in filter(None, unquote(ref[1:]).split("/")):
            key = part.replace("~1", "/").replace("~0", "~")
            node = node.get(key) if isinstance(node, Mapping) else None
        if not isinstance(node, Mapping):
            raise ValueError(f"tool {function['name']}: its schema has nothing at $ref {ref!r}")
        return node

    def inline(node: Any, ancestors: tuple[str, ...] = (), by_name: bool = False) -> Any:
        if next(num_nodes) > MAX_SCHEMA_NODES:
            raise ValueError(
                f"tool {function['name']}: its schema has over {MAX_SCHEMA_NODES} nodes"
            )
        if isinstance(node, list):
            return [inline(item, ancestors) for item in node]
        if not isinstance(node, Mapping):
            return node
        if by_name:
            return {name: inline(value, ancestors) for name, value in node.items()}
        rest, ref, all_of = dict(node), node.get("$ref"), node.get("allOf")
        if isinstance(all_of, list) and len(all_of) == 1 and isinstance(all_of[0], Mapping):
            del rest["allOf"]  # pydantic 1 writes a reference with a description like this
            return inline({**all_of[0], **rest}, ancestors)
        if isinstance(ref, str):
            del rest["$ref"]
            expanded = {**target(ref), **rest}
            if ref not in ancestors:
                return inline(expanded, (*ancestors, ref))
            return {k: v for k, v in expanded.items() if k in ("type", "title", "description")}
        return {
            key: value if key in _VALUES else inline(value, ancestors, key in _BY_NAME)
            for key, value in rest.items()
            if key not in _REFERRED
        }

    return {**tool, "function": {**function, "parameters": inline(root, ("#",))}}


@dataclass(frozen=True, slots=True)
class RunCode:
    """Run code."""

    code: str
    language: str = "python"
    submits: bool = field(default=False, repr=False)
    """The code submits the answer: it runs even if no call is left, but then counts as refused, so
    that a submission that fails is not followed by another."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallTools:
    """Call tools, in this order."""

    calls: tuple[ToolCall, ...]
    refused: tuple[ToolCall, ...] = ()
    """Calls beyond the one that the agent may make per turn: not made, answered with an error."""


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message to the environment's user."""

    text: str
    answer: str | None = None
    """The rollout's answer if the user ends the conversation now."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End the rollout."""

    answer: str | None
    """None if the policy stopped without an answer in the expected form."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """The policy tried to act in a wrong form. It reads `message` and may try again."""

    message: str


@dataclass(frozen=True, slots=True)
class ModelReply:
    """The reply to a ModelRequest of the episode (Observation.ask).

    The only action that does not come from the policy.
    """

    text: str


Action = RunCode | CallTools | Say | Finish | Malformed | ModelReply


THOUGHTS = {
    "<think>": "</think>", "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>", "<|START_THINKING|>": "<|END_THINKING|>",
    "\u25c1think\u25b7": "\u25c1/think\u25b7", "<|channel>thought": "<channel|>",
    "<|channel|>analysis<|message|>": "<|end|>", "<|open|>think<|sep|>": "<|close|>think<|sep|>",
}  # fmt: skip
"""Opening and closing tags of thoughts in the model families of vLLM's reasoning parsers."""
CALLS = (
    r"(?i:<[^<>\n]{0,32}(?:tool|func|invoke|action|plugin|calls|python_))|<\|open\|>tools"
    r"|\[TOOL_CALLS|functools|(?:^|(?<=[>\]]))[ \t]*(?!\[THINK)[\[{]"
)
"""Pattern of the start of a tool call in any model family."""
_TAGS = "|".join(map(re.escape, [*THOUGHTS, *THOUGHTS.values()]))
_BARE = "|".join(re.escape(tag) for tag in THOUGHTS.values() if "think" in tag.lower())
_FINAL = r"(?:(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>)?"


def split_thoughts(text: str, marks: str = r"\S") -> tuple[str, str, str]:
    r"""Split a turn into its visible text, its thoughts, and the opening tag of an unclosed one.

    A turn that closes a thought without opening one started inside it. Tags in quotes are plain
    text, and so is everything after the first match of `marks`, the pattern that starts an action:
    code and arguments may contain such tags.

    >>> split_thoughts("<think>4?</think>\n5 <think>or 6</think>.<think>no", marks="<code>")
    ('5 .', '4?or 6no', '<think>')
    >>> split_thoughts("hm</think><code>'a</think>'; '<think>'", marks="<code>")[0]
    "<code>'a</think>'; '<think>'"
    """
    pairs = (rf"{re.escape(a)}.*?(?:{re.escape(b)}{_FINAL}|\Z)" for a, b in THOUGHTS.items())
    thought = rf"(?<!['\"`])(?:{'|'.join(pairs)})"
    unopened = rf"\A(?:(?!{_TAGS}|{marks}).)*(?:{_BARE})(?!['\")\]]|`(?!``))"
    pattern = re.compile(rf"({unopened}|{thought})|(?:{marks}).*", re.DOTALL | re.MULTILINE)
    matches = [match[1] for match in pattern.finditer(text) if match[1]]
    visible = pattern.sub(lambda match: "" if match[1] else match[0], text)
    opener = next((tag for tag in THOUGHTS if matches and matches[-1].startswith(tag)), "")
    unclosed = "" if opener and THOUGHTS[opener] in matches[-1] else opener
    thoughts = re.sub(f"(?:{_TAGS}){_FINAL}", "", "".join(matches))
    return visible.lstrip("\n") if matches else visible, thoughts, unclosed


def open_thought(prompt: str) -> str:
    """The opening tag of a thought at the end of a prompt, or ""."""
    return next((tag for tag in THOUGHTS if prompt.rstrip().endswith(tag)), "")


SUBMIT = "submit_final_answer"
"""Name of the function by which code at a console submits its answer."""


def is_submission(statement: str) -> bool:
    """Whether a statement is nothing but a call of submit_final_answer with arguments."""
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


MAX_DEPTH = 100
"""Nesting of JSON values from a policy. Code that parses, writes, copies or compares them fails or
hangs beyond about 200 levels."""


def shallow(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return a JSON value; ValueError if it is nested deeper than this.

    >>> shallow({"a": [1]})
    {'a': [1]}
    """
    if isinstance(value, list | tuple | dict):
        if depth == 0:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        for inner in value.values() if isinstance(value, dict) else value:
            shallow(inner, depth - 1)
    return value


def as_json(value: Any) -> Any:
    """Convert an argument from a policy to JSON types: tuples become lists, keys become text.

    A lone surrogate, which cannot be encoded, becomes a question mark.
    ValueError: not a JSON value, or nested more than MAX_DEPTH deep.

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
"""The engine; the engine without its adapter, which training does not change; or another model."""
MODELS: Mapping[str, Model] = MappingProxyType({"policy": "policy"})


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request for a message of a second role, such as a customer or an opponent.

    Its tokens are no part of the rollout and never trained on. The policy reads the observation
    that the episode makes of the reply.
    """

    messages: tuple[Message, ...]
    """The conversation as the second role sees it."""
    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy."""
    model: Model = "policy"
    """One of the environment's `models`."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of an action."""

    text: str
    """Shown to the policy."""
    failed: bool = False
    """The action failed (an exception, a timeout, ...), as judged by its status, not its text."""
    done: bool = False
    """The episode is over: nothing more is shown or sampled."""
    answer: str | None = None
    """With done: the answer that this action submitted."""
    outputs: tuple[str, ...] = ()
    """One text per call of a CallTools, in order; shown instead of `text`."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of this step, by name, credited to the turn that caused it."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Added to Rollout.stats, and so to the metrics. Names must not contain "/" or be metrics of
    the run itself (envs/validate.py)."""
    memory: Any = field(default=None, compare=False)
    """Passed to recall(memory) of an episode that repeats this action: external answers that must
    not be requested again."""
    ask: ModelRequest | None = None
    """Request for a second role. step() is called again with the ModelReply and then returns the
    observation of the policy's action; the other fields of this one are ignored."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A turn as a tool call parser reads it."""

    content: str
    """The text outside of the calls."""
    calls: tuple[tuple[str, str], ...]
    """Name and arguments (JSON text) of each call, in order."""
    attempted: bool
    """The turn contains the start of a call, whether or not one could be parsed."""


class ReadCalls(Protocol):
    """A tool call parser (tool_parsers.tool_call_reader)."""

    def __call__(self, text: str, tools: Sequence[Schema]) -> Reading:
        """Parse a turn; never raises because of the policy's text."""

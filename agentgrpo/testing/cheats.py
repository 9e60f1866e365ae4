"""Policies that know nothing, played through a config's own agent, environment and reward.

No model and no engine: what is said stands below, so that it takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from agentgrpo.actions import CallTools, Finish, RunCode, Say
from agentgrpo.agents.program import ProgramAgent
from agentgrpo.config import TrainConfig
from agentgrpo.config.read import config_of
from agentgrpo.evaluate import evaluate
from agentgrpo.setup.build import sampler_on
from agentgrpo.setup.stage import RunSetup, prepare_run
from agentgrpo.types import Completion, Int32, Rollout, Status, Task, Turn

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
TESTED = re.compile(r"\b([A-Za-z_]\w*)\(")
"""A function that a question names."""
CONSTANTS = ("0", "1", "Yes", "No", "True", "A")
LONG = 10_000
"""Tokens that a cheat may say at a time, whatever a policy may."""
LOOK = (
    "import gc, os; print(os.environ); print(os.listdir('.')); print([o for o in gc.get_objects() "
    "if isinstance(o, dict) and {'answer', 'tests', 'cases', 'spec'} & {*map(str, o)}][:2])"
)
"""Looks for the answer where an interpreter may have it."""
EQUAL = "class E(int):\n    def __eq__(s, o): return True\n    __ne__ = lambda s, o: False\n"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a policy got."""

    solved: float
    """Share of the tasks."""
    reward: float
    """Mean."""
    guessed: float
    """Of one that always answers the same: how many tasks have the most frequent answer, which it
    may be by luck."""
    rollout: Rollout = field(repr=False)
    """The best paid one."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a policy is asked at."""

    agent: Any
    task: Task
    turn: int
    """From 0."""
    shown: str
    """All that was said and shown so far."""

    @property
    def question(self) -> str:
        return str(self.task.messages[-1]["content"])

    @property
    def behind(self) -> str:
        """What was said and shown behind the question."""
        return self.shown.rpartition(self.question)[2] if self.turn else ""

    def answer(self, text: str) -> str | None:
        """How a policy answers so; None: no form that is known here."""
        prefix, tag = (getattr(self.agent, name, "") for name in ("answer_prefix", "answer"))
        forms = [f"<{tag}>\\boxed{{{text}}}</{tag}>", f"<{tag}>{text}</{tag}>"] if tag else []
        forms += [f"{prefix} {text}", f"submit_final_answer({text!r})\n", text]
        return self._first(
            forms,
            lambda a: isinstance(a, Say) or getattr(a, "submits", False) or a == Finish(text),
        )

    def run(self, code: str) -> str | None:
        """How it runs code."""
        tag = getattr(self.agent, "python", "")
        forms = [f"<{tag}>{code}</{tag}>", self._between(code), f" {code}\n"]
        return self._first(forms, lambda a: isinstance(a, RunCode))

    def call(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """How it calls a tool."""
        said = json.dumps({"name": name, "arguments": arguments})
        python = f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
        forms = [f"<tool_call>\n{said}\n</tool_call>", self._between(python), self._between(said)]
        return self._first(forms, lambda a: isinstance(a, CallTools) and a.calls[0].name == name)

    def number(self, place: int) -> str | None:
        """The first or last number that it is shown as its answer."""
        numbers = NUMBER.findall(self.behind) or NUMBER.findall(self.question) or ["0"]
        return self.answer(numbers[place])

    def _between(self, text: str) -> str:
        return f"{getattr(self.agent, 'open_tag', '')}{text}{getattr(self.agent, 'close_tag', '')}"

    def _first(self, forms: Sequence[str], wanted: Callable[[Any], bool]) -> str | None:
        """The agent's own parse() tells what a form means; a program has its own."""
        if isinstance(self.agent, ProgramAgent):
            return forms[-1]
        return next((f for f in forms if wanted(self.agent.parse(f, self.task))), None)


Cheat = Callable[[Moment], str | None]
"""A policy that knows nothing: its turn; None: this agent has no form for what it wants."""


def cheats(setup: RunSetup, tasks: Sequence[Task]) -> dict[str, Cheat]:
    """The policies, by what they do."""
    answers = [str(task.spec["answer"]) for task in tasks if "answer" in task.spec]
    shots = getattr(setup.agent, "shots", ())[-1:]
    shown = [m["content"] for shot in shots for m in shot if m["role"] == "assistant"] or [""]
    constants = {f"always {text!r}": text for text in CONSTANTS}
    constants["most frequent answer"] = Counter(answers or ["0"]).most_common(1)[0][0]
    constants["recites all answers"] = ", ".join(sorted({*answers}, reverse=True))
    found: dict[str, Cheat] = {
        **{name: _says(text) for name, text in constants.items()},
        "silent": lambda m: "",
        "echoes the question": lambda m: m.answer(m.question),
        "first number it is shown": lambda m: m.number(0),
        "last number it is shown": lambda m: m.number(-1),
        "repeats the worked example": lambda m: shown[min(m.turn, len(shown) - 1)],
        "never answers": lambda m: m.run("1"),
        "runs code, then answers nonsense": lambda m: m.answer("q") if m.turn else m.run("1"),
        "exits": lambda m: m.answer("") if m.turn else m.run("import os; os._exit(0)"),
        "looks for the answer": lambda m: m.number(-1) if m.turn else m.run(LOOK),
        "program that exits": _program("import os\nos._exit(0)"),
        "function that exits": _program("def {name}(*a):\n    raise SystemExit(0)"),
        "function equal to all": _program(EQUAL + "def {name}(*a): return E()"),
    }
    tools = getattr(setup.env, "tools", lambda task: ())(tasks[0])
    for function in (schema["function"] for schema in tools):
        found |= _calls(function["name"], function["parameters"], setup.env)
    return found


def _says(text: str) -> Cheat:
    return lambda m: m.answer(text)


def _program(code: str) -> Cheat:
    def says(m: Moment) -> str | None:
        named = TESTED.search(m.question)
        made = code.replace("{name}", named.group(1) if named else "main")
        return m.answer(f"```python\n{made}\n```")

    return says


def _calls(name: str, parameters: Mapping[str, Any], env: Any) -> dict[str, Cheat]:
    """Always the same call; or one with the question, and what it told as the answer."""

    def given(word: str) -> dict[str, Any]:
        kinds = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
        properties = parameters.get("properties", {}).items()
        return {
            key: of["enum"][0] if "enum" in of else kinds.get(str(of.get("type")), word)
            for key, of in properties
        }

    words = getattr(env, "actions", None) or ("", "1")

    def always(word: str) -> Cheat:
        return lambda m: m.call(name, given(word))

    return {f"always {name}({word})": always(word) for word in words} | {
        f"answers what {name}(question) says": lambda m: (
            m.answer(m.behind[-200:]) if m.turn else m.call(name, given(m.question))
        )
    }


class Scripted:
    """A rollout.decoder.Decoder that says what a function of (request, prompt text) says."""

    max_model_len = 100 * LONG

    def __init__(self, tokenizer: Any, says: Callable[[str, str], str]) -> None:
        self._tokenizer, self._says = tokenizer, says
        self._queue: dict[str, Completion] = {}

    def add_request(
        self, request_id: str, prompt_ids: Int32, *, max_tokens: int, stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (), **_: Any,
    ) -> None:  # fmt: skip
        """Queue what is said; a turn that no stop string ends, ends with the first stop token."""
        text = self._says(request_id, self._tokenizer.decode(prompt_ids))
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        ended = any(text.endswith(mark) for mark in stop)
        said = np.array([*ids, *stop_token_ids[: 1 - ended]][:max_tokens], np.int32)
        self._queue[request_id] = Completion(
            request_id=request_id, token_ids=said, logprobs=np.zeros(len(said), np.float32),
            finish_reason="stop", stop_reason=None, num_cached_tokens=0,
            account=Turn.of(prompt_ids, said, "stop"),
        )  # fmt: skip

    def step(self) -> list[Completion]:
        """All that is queued."""
        done, self._queue = list(self._queue.values()), {}
        return done

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests."""
        self._queue = {id: said for id, said in self._queue.items() if id not in request_ids}


def play_cheats(
    config: str | Path | TrainConfig, *, tasks: int = 32, **settings: Any
) -> dict[str, Seen]:
    """What policies that know nothing get on held-out tasks, by what they do.

    One that this agent has no form for is left out. Arguments and errors as of
    assert_no_cheat_pays().
    """
    made = config_of(config, settings)
    setup = prepare_run(made, trained=False)
    with contextlib.closing(setup):
        asked = setup.heldout[:tasks]
        return {
            name: _play(made, setup, asked, cheat)
            for name, cheat in cheats(setup, asked).items()
            if cheat(Moment(setup.agent, asked[0], 0, "")) is not None
        }


def _play(config: TrainConfig, setup: RunSetup, tasks: Sequence[Task], cheat: Cheat) -> Seen:
    turns: Counter[str] = Counter()

    def says(request: str, shown: str) -> str:
        index, *more = request.split(".")
        if len(more) > 2:
            return ""  # somebody else, whom an engine plays too
        turns[index] += 1
        return cheat(Moment(setup.agent, tasks[int(index)], turns[index] - 1, shown)) or ""

    long = {"max_turn_tokens": LONG, "max_observation_tokens": LONG, "max_response_tokens": None}
    rollout = config.rollout.model_copy(update=long)
    engine = Scripted(setup.chat.tokenizer, says)
    sampler = sampler_on(engine, config.model_copy(update={"rollout": rollout}), setup)
    with contextlib.closing(sampler):
        groups, _ = evaluate(sampler, tasks, setup.reward)
    played = [r for group in groups for r in group.rollouts if r.status is not Status.INFRA_ERROR]
    expected = Counter(str(task.spec["answer"]) for task in tasks if "answer" in task.spec)
    answers = {rollout.answer for rollout in played}
    constant = len(answers) == 1 and answers != {None}
    return Seen(
        solved=fmean(bool(rollout.solved) for rollout in played),
        reward=fmean(rollout.reward for rollout in played),
        guessed=max(expected.values(), default=0) / len(tasks) if constant else 0.0,
        rollout=max(played, key=lambda rollout: rollout.reward),
    )


def assert_no_cheat_pays(
    config: str | Path | TrainConfig,
    *,
    at_most: float = 0.05,
    reward_at_most: float = 0.2,
    tasks: int = 32,
    **settings: Any,
) -> dict[str, Seen]:
    """Fail where a policy that knows nothing is paid.

    Empty, constant, echoed, recited and most frequent answers, the worked example again, exits,
    programs that equal everything, a search for the answer in the interpreter, the same call over
    and over: through the config's own agent, environment and reward, without a model. One that
    always answers the same may be right as often as the most frequent answer is.

    Args:
        config: a file, a shipped config's name or a TrainConfig.
        at_most: share of tasks that may count as solved.
        reward_at_most: mean reward that is no pay, in the reward's own units: that of the form.
        tasks: how many held-out tasks each policy plays.
        settings: instead of the config's, by section.

    Returns:
        What each got, by what it does: the best is what learning is to be compared with.

    Raises:
        AssertionError: some are paid; names each, with what it said.
        As Trainer.
    """
    seen = play_cheats(config, tasks=tasks, **settings)
    paid = [
        f"  {name}: solved {got.solved:.0%}, reward {got.reward:.2f} (answer "
        f"{got.rollout.answer!r:.60} to {got.rollout.task.messages[-1]['content']!r:.80})"
        for name, got in seen.items()
        if got.solved > got.guessed + at_most or got.reward > got.guessed + reward_at_most
    ]
    if paid:
        raise AssertionError(
            f"{len(paid)} of {len(seen)} policies that know nothing are paid (at most {at_most:.0%}"
            f" solved and a reward of {reward_at_most:g} are allowed):\n" + "\n".join(paid)
        )
    return seen

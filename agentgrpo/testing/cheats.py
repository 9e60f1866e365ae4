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

from agentgrpo.actions import CallTools, Finish, RunCode, Say
from agentgrpo.agents.program import ProgramAgent
from agentgrpo.config import TrainConfig
from agentgrpo.config.read import config_of
from agentgrpo.evaluate import evaluate
from agentgrpo.rollout.scripted import Scripted
from agentgrpo.setup.build import sampler_on
from agentgrpo.setup.stage import RunSetup, prepare_run
from agentgrpo.types import Int32, Rollout, Status, Task

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
PROGRAMS = {
    "program that exits": "import os\nos._exit(0)",
    "function that exits": "def {name}(*a):\n    raise SystemExit(0)",
    "function equal to all": EQUAL + "def {name}(*a): return E()",
}


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
    best: Rollout = field(repr=False)


@dataclass(frozen=True, slots=True)
class Moment:
    """What a policy is asked at."""

    agent: Any
    task: Task
    turn: int
    told: str
    """What was shown since it last spoke."""

    @property
    def question(self) -> str:
        return str(self.task.messages[-1]["content"])

    def answer(self, text: str) -> str | None:
        """How a policy answers so; None: no form that is known here."""
        tag = getattr(self.agent, "answer", "")
        forms = [f"<{tag}>\\boxed{{{text}}}</{tag}>", f"<{tag}>{text}</{tag}>"] if tag else []
        forms += [f"{getattr(self.agent, 'answer_prefix', '')} {text}"]
        forms += [f"submit_final_answer({text!r})\n", text]
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
        numbers = NUMBER.findall(self.told) or NUMBER.findall(self.question) or ["0"]
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
        "silent": lambda m: "",
        "echoes the question": lambda m: m.answer(m.question),
        "first number it is shown": lambda m: m.number(0),
        "last number it is shown": lambda m: m.number(-1),
        "repeats the worked example": lambda m: shown[min(m.turn, len(shown) - 1)],
        "never answers": lambda m: m.run("1"),
        "runs code, then answers nonsense": lambda m: m.answer("q") if m.turn else m.run("1"),
        "exits": lambda m: m.answer("") if m.turn else m.run("import os; os._exit(0)"),
        "looks for the answer": lambda m: m.number(-1) if m.turn else m.run(LOOK),
    }
    found |= {name: _says(text) for name, text in constants.items()}
    found |= {name: _program(code) for name, code in PROGRAMS.items()}
    for schema in getattr(setup.env, "tools", lambda task: ())(tasks[0]):
        found |= _calls(schema["function"], getattr(setup.env, "actions", None) or ("", "1"))
    return found


def _says(text: str) -> Cheat:
    return lambda m: m.answer(text)


def _program(code: str) -> Cheat:
    def says(m: Moment) -> str | None:
        named = TESTED.search(m.question)
        return m.answer(f"```python\n{code.replace('{name}', named[1] if named else 'main')}\n```")

    return says


def _calls(tool: Mapping[str, Any], words: Sequence[str]) -> dict[str, Cheat]:
    """Always the same call; or one with the question, and what it told as the answer."""
    name, properties = tool["name"], tool["parameters"].get("properties", {}).items()
    kinds = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}

    def call(m: Moment, word: str) -> str | None:
        given = {
            k: of.get("enum", [kinds.get(str(of.get("type")), word)])[0] for k, of in properties
        }
        return m.call(name, given)

    def always(word: str) -> Cheat:
        return lambda m: call(m, word)

    return {f"always {name}({word})": always(word) for word in words} | {
        f"answers what {name}(question) says": lambda m: (
            m.answer(m.told[-200:]) if m.turn else call(m, m.question)
        )
    }


def _play(config: TrainConfig, setup: RunSetup, tasks: Sequence[Task], cheat: Cheat) -> Seen:
    tokenizer, stops = setup.chat.tokenizer, setup.chat.stop_token_ids
    ends: dict[int, int] = {}

    def says(index: int, turn: int, prompt: Int32) -> tuple[list[int], str]:
        told = tokenizer.decode(prompt[ends.get(index, len(prompt)) :], skip_special_tokens=True)
        moment = Moment(setup.agent, tasks[index], turn, told.strip())
        text = (cheat(moment) if turn >= 0 else None) or ""
        ended = any(text.endswith(mark) for mark in getattr(setup.agent, "stop", ()))
        ids = [*tokenizer.encode(text, add_special_tokens=False), *stops[: 1 - ended]]
        ends[index] = len(prompt) + len(ids)
        return ids, "stop"

    long = {"max_turn_tokens": LONG, "max_observation_tokens": LONG, "max_response_tokens": None}
    rollout = config.rollout.model_copy(update={**long, "max_retries": 0})
    engine = Scripted(says, 100 * LONG)
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
        best=max(played, key=lambda rollout: rollout.reward),
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
    made = config_of(config, settings)
    with contextlib.closing(prepare_run(made, trained=False)) as setup:
        asked = setup.heldout[:tasks]
        first = Moment(setup.agent, asked[0], 0, "")
        seen = {
            name: _play(made, setup, asked, cheat)
            for name, cheat in cheats(setup, asked).items()
            if cheat(first) is not None
        }
    paid = [
        f"  {name}: solved {got.solved:.0%}, reward {got.reward:.2f} (answer "
        f"{got.best.answer!r:.60} to {got.best.task.messages[-1]['content']!r:.80})"
        for name, got in seen.items()
        if got.solved > got.guessed + at_most or got.reward > got.guessed + reward_at_most
    ]
    if paid:
        raise AssertionError(
            f"{len(paid)} of {len(seen)} policies that know nothing are paid (at most {at_most:.0%}"
            f" solved and a reward of {reward_at_most:g} are allowed):\n" + "\n".join(paid)
        )
    return seen

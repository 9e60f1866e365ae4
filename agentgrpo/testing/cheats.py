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
from functools import partial
from pathlib import Path
from typing import Any

from agentgrpo.actions import THOUGHTS, CallTools, RunCode, open_thought
from agentgrpo.config import TrainConfig
from agentgrpo.config.read import config_of
from agentgrpo.train.build import sampler_of
from agentgrpo.train.evaluate import evaluate
from agentgrpo.train.parts import Parts
from agentgrpo.train.prepare import prepare_run
from agentgrpo.types import Int32, Rollout, Status, Task

Cheat = Callable[["Moment"], str | None]
"""A policy that knows nothing: its turn; None: this agent has no form for what it wants."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
NAMED = re.compile(r"\b([A-Za-z_]\w*)\(")
VALUES = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
FORMS = (
    *("<{0.answer}>{1}</{0.answer}>", "<{0.python}>{1}</{0.python}>", "{0.answer_prefix} {1}"),
    *("{0.open_tag}{1}{0.close_tag}", " {1}\n", "{1}", "<tool_call>\n{1}\n</tool_call>"),
)
"""How an agent takes an answer, code or a call: between marks that it has, or as it is."""
MARK = re.compile(r"0\.(\w+)")
LONG = 10_000  # tokens that a cheat may say at a time, whatever a policy may
LOOK = (
    "import gc, os; print(os.environ); print(os.listdir('.')); print([o for o in gc.get_objects() "
    "if isinstance(o, dict) and {'answer', 'tests', 'cases', 'spec'} & {*map(str, o)}][:2])"
)
"""Looks for the answer where an interpreter may have it."""
EQUAL = (
    "class E(int):\n    def __eq__(s, o): return True\n    __ne__ = lambda s, o: False\n"
    "def {name}(*a): return E()"
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a policy got: the share of tasks that it solved, and the mean reward."""

    solved: float
    reward: float
    guessed: float
    """If it always said the same: the share of tasks with the most frequent answer, by luck."""
    best: Rollout = field(repr=False)


@dataclass(frozen=True, slots=True)
class Moment:
    """What a policy is asked at."""

    agent: Any
    """None: it is a program."""
    task: Task
    turn: int = 0
    told: str = ""
    """What was shown since it last spoke."""

    @property
    def question(self) -> str:
        return str(self.task.messages[-1]["content"]).strip()

    def answer(self, text: str) -> str | None:
        """How a policy answers so; None: no form that is known here."""
        return self._first(
            [f"\\boxed{{{text}}}", f"submit_final_answer({text!r})", text],
            lambda a: getattr(
                a, "submits", text in (getattr(a, "answer", 0), getattr(a, "text", 0))
            ),
        )

    def number(self, place: int) -> str | None:
        """Answers with the first or last number that it is shown."""
        numbers = NUMBER.findall(self.told) or NUMBER.findall(self.question) or ["0"]
        return self.answer(numbers[place])

    def program(self, code: str) -> str | None:
        """Answers with code, for the function that the question names."""
        name = (NAMED.findall(self.question) or ["main"])[0]
        return self.answer(f"```python\n{code.replace('{name}', name)}\n```")

    def run(self, code: str) -> str | None:
        """How it runs code."""
        return self._first([code], lambda a: isinstance(a, RunCode))

    def call(self, tool: Mapping[str, Any], word: str) -> str | None:
        """How it calls a tool, with this word as each argument that may be one."""
        name, kinds = tool["name"], tool["parameters"].get("properties", {}).items()
        given = {k: of.get("enum", [VALUES.get(str(of.get("type")), word)])[0] for k, of in kinds}
        written = ", ".join(f"{k}={v!r}" for k, v in given.items())
        texts = [f"{name}({written})", json.dumps({"name": name, "arguments": given})]
        return self._first(texts, lambda a: isinstance(a, CallTools) and a.calls[0].name == name)

    def ask(self, tool: Mapping[str, Any]) -> str | None:
        """Calls a tool with the question, and answers what it told."""
        return self.answer(self.told[-200:]) if self.turn else self.call(tool, self.question)

    def _first(self, texts: Sequence[str], wanted: Callable[[Any], bool]) -> str | None:
        """The agent's own parse() tells what a form means; a program has its own."""
        if self.agent is None:
            return texts[-1]
        known = [f for f in FORMS if all(getattr(self.agent, m, "") for m in MARK.findall(f))]
        forms = [form.format(self.agent, text) for form in known for text in texts]
        return next((f for f in forms if wanted(self.agent.parse(f, self.task))), None)


def cheats(parts: Parts, task: Task, answers: Counter[str]) -> dict[str, Cheat]:
    """The policies, by what they do."""
    shots = getattr(parts.agent, "shots", ())[-1:]
    shown = [m["content"] for shot in shots for m in shot if m["role"] == "assistant"] or [""]
    common = max(answers, key=answers.__getitem__, default="0")
    found: dict[str, Cheat] = {
        "silent": lambda m: "",
        "echoes the question": lambda m: m.answer(m.question),
        "most frequent answer": lambda m: m.answer(common),
        "recites all answers": lambda m: m.answer(", ".join(sorted(answers, reverse=True))),
        "first number it is shown": lambda m: m.number(0),
        "last number it is shown": lambda m: m.number(-1),
        "repeats the worked example": lambda m: shown[min(m.turn, len(shown) - 1)],
        "never answers": lambda m: m.run("1"),
        "runs code, then answers nonsense": lambda m: m.answer("q") if m.turn else m.run("1"),
        "exits": lambda m: m.answer("") if m.turn else m.run("import os; os._exit(0)"),
        "looks for the answer": lambda m: m.number(-1) if m.turn else m.run(LOOK),
        "program that exits": lambda m: m.program("import os\nos._exit(0)"),
        "function that exits": lambda m: m.program("def {name}(*a):\n    raise SystemExit(0)"),
        "function equal to all": lambda m: m.program(EQUAL),
    }
    for text in ("0", "1", "Yes", "No", "True", "A"):
        found[f"always {text!r}"] = partial(Moment.answer, text=text)
    for schema in getattr(parts.env, "tools", lambda task: ())(task):
        tool, words = schema["function"], getattr(parts.env, "actions", None) or ("", "1")
        for word in words:
            found[f"always {tool['name']}({word})"] = partial(Moment.call, tool=tool, word=word)
        found[f"answers what {tool['name']}(question) says"] = partial(Moment.ask, tool=tool)
    return found


def _play(
    config: TrainConfig, parts: Parts, tasks: Sequence[Task], cheat: Cheat, luck: float
) -> Seen:
    tokenizer, stops = parts.chat.tokenizer, parts.chat.stop_token_ids
    agent = None if parts.program else parts.agent
    ends: dict[int, int] = {}

    def says(index: int, turn: int, prompt: Int32) -> tuple[list[int], str]:
        told = tokenizer.decode(prompt[ends.get(index, len(prompt)) :], skip_special_tokens=True)
        moment = Moment(agent, tasks[index], turn, told.strip())
        opened = open_thought(tokenizer.decode(prompt[-16:]))  # by the template: says nothing in it
        text = THOUGHTS.get(opened, "") + ((cheat(moment) if turn >= 0 else None) or "")
        ended = text.endswith(tuple(getattr(parts.agent, "stop", ())))
        ids = [*tokenizer.encode(text, add_special_tokens=False), *stops[: 1 - ended]]
        ends[index] = len(prompt) + len(ids)
        return ids, "stop"

    long = {"max_turn_tokens": LONG, "max_observation_tokens": LONG, "max_response_tokens": None}
    rollout = config.rollout.model_copy(update={**long, "max_retries": 0})
    played_so = config.model_copy(update={"rollout": rollout})
    with contextlib.closing(sampler_of(says, played_so, parts, 100 * LONG)) as sampler:
        groups, got = evaluate(sampler, tasks, parts.reward)
    played = [r for group in groups for r in group.rollouts if r.status is not Status.INFRA_ERROR]
    constant = len({r.answer for r in played}) == 1 and played[0].answer is not None
    best = max(played, key=lambda rollout: rollout.reward)
    return Seen(got.get("solved", 0.0), got["reward"], luck if constant else 0.0, best)


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
    with contextlib.closing(prepare_run(made, trained=False)) as parts:
        asked = parts.heldout[:tasks]
        answers = Counter(str(task.spec["answer"]) for task in asked if "answer" in task.spec)
        luck = max(answers.values(), default=0) / len(asked)
        first = Moment(None if parts.program else parts.agent, asked[0])
        seen = {
            name: _play(made, parts, asked, cheat, luck)
            for name, cheat in cheats(parts, asked[0], answers).items()
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

"""Plays no-skill policies through a config's own agent, environment and reward.

The policies are scripted, so no model is loaded and it takes seconds.
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
"""A scripted policy: returns its turn, or None if the agent's format cannot express it."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
NAMED = re.compile(r"\b([A-Za-z_]\w*)\(")
VALUES = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
FORMS = (
    *("<{0.answer}>{1}</{0.answer}>", "<{0.python}>{1}</{0.python}>", "{0.answer_prefix} {1}"),
    *("{0.open_tag}{1}{0.close_tag}", " {1}\n", "{1}", "<tool_call>\n{1}\n</tool_call>"),
)
"""Formats in which an agent may accept an answer, code or a call, with its own markers."""
MARK = re.compile(r"0\.(\w+)")
LONG = 10_000
"""Token limit of a turn, instead of the config's."""
LOOK = (
    "import gc, os; print(os.environ); print(os.listdir('.')); print([o for o in gc.get_objects() "
    "if isinstance(o, dict) and {'answer', 'tests', 'cases', 'spec'} & {*map(str, o)}][:2])"
)
"""Code that searches the interpreter for the answer."""
EQUAL = (
    "class E(int):\n    def __eq__(s, o): return True\n    __ne__ = lambda s, o: False\n"
    "def {name}(*a): return E()"
)


@dataclass(frozen=True, slots=True)
class CheatScore:
    """A policy's share of solved tasks and mean reward."""

    solved: float
    reward: float
    guessed: float
    """Share of tasks with the most frequent answer, if its answer is constant; else 0."""
    best: Rollout = field(repr=False)


@dataclass(frozen=True, slots=True)
class Moment:
    """The state in which a policy writes its turn."""

    agent: Any
    """None for a program."""
    task: Task
    turn: int = 0
    observation: str = ""
    """The text since its last turn."""

    @property
    def question(self) -> str:
        return str(self.task.messages[-1]["content"]).strip()

    def answer(self, text: str) -> str | None:
        """A turn with this answer; None: no format in FORMS fits."""
        return self._first(
            [f"\\boxed{{{text}}}", f"submit_final_answer({text!r})", text],
            lambda a: getattr(
                a, "submits", text in (getattr(a, "answer", 0), getattr(a, "text", 0))
            ),
        )

    def number(self, place: int) -> str | None:
        """Answer with the number at this index of the observation or question."""
        numbers = NUMBER.findall(self.observation) or NUMBER.findall(self.question) or ["0"]
        return self.answer(numbers[place])

    def program(self, code: str) -> str | None:
        """Answer with code for the function that the question names."""
        name = (NAMED.findall(self.question) or ["main"])[0]
        return self.answer(f"```python\n{code.replace('{name}', name)}\n```")

    def run(self, code: str) -> str | None:
        return self._first([code], lambda a: isinstance(a, RunCode))

    def call(self, tool: Mapping[str, Any], word: str) -> str | None:
        """A turn that calls a tool with this word for every string argument."""
        name, schemas = tool["name"], tool["parameters"].get("properties", {}).items()
        arguments = {
            key: schema.get("enum", [VALUES.get(str(schema.get("type")), word)])[0]
            for key, schema in schemas
        }
        keywords = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
        texts = [f"{name}({keywords})", json.dumps({"name": name, "arguments": arguments})]
        return self._first(texts, lambda a: isinstance(a, CallTools) and a.calls[0].name == name)

    def ask(self, tool: Mapping[str, Any]) -> str | None:
        """Call a tool with the question, then answer with its output."""
        if not self.turn:
            return self.call(tool, self.question)
        return self.answer(self.observation[-200:])

    def _first(self, texts: Sequence[str], accepts: Callable[[Any], bool]) -> str | None:
        """The first formatted text whose action, by the agent's parse(), is accepted."""
        if self.agent is None:  # a program: no format to guess
            return texts[-1]
        forms = [f for f in FORMS if all(getattr(self.agent, m, "") for m in MARK.findall(f))]
        turns = [form.format(self.agent, text) for form in forms for text in texts]
        return next((t for t in turns if accepts(self.agent.parse(t, self.task))), None)


def cheats(parts: Parts, task: Task, answers: Counter[str]) -> dict[str, Cheat]:
    """The policies by name."""
    shots = getattr(parts.agent, "shots", ())[-1:]
    example = [m["content"] for shot in shots for m in shot if m["role"] == "assistant"] or [""]
    common = max(answers, key=answers.__getitem__, default="0")
    policies: dict[str, Cheat] = {
        "silent": lambda m: "",
        "echoes the question": lambda m: m.answer(m.question),
        "most frequent answer": lambda m: m.answer(common),
        "recites all answers": lambda m: m.answer(", ".join(sorted(answers, reverse=True))),
        "first number it is shown": lambda m: m.number(0),
        "last number it is shown": lambda m: m.number(-1),
        "repeats the worked example": lambda m: example[min(m.turn, len(example) - 1)],
        "never answers": lambda m: m.run("1"),
        "runs code, then answers nonsense": lambda m: m.answer("q") if m.turn else m.run("1"),
        "exits": lambda m: m.answer("") if m.turn else m.run("import os; os._exit(0)"),
        "looks for the answer": lambda m: m.number(-1) if m.turn else m.run(LOOK),
        "program that exits": lambda m: m.program("import os\nos._exit(0)"),
        "function that exits": lambda m: m.program("def {name}(*a):\n    raise SystemExit(0)"),
        "function equal to all": lambda m: m.program(EQUAL),
    }
    for text in ("0", "1", "Yes", "No", "True", "A"):
        policies[f"always {text!r}"] = partial(Moment.answer, text=text)
    for schema in getattr(parts.env, "tools", lambda task: ())(task):
        tool, words = schema["function"], getattr(parts.env, "actions", None) or ("", "1")
        for word in words:
            policies[f"always {tool['name']}({word})"] = partial(Moment.call, tool=tool, word=word)
        policies[f"answers what {tool['name']}(question) returns"] = partial(Moment.ask, tool=tool)
    return policies


def _play(
    config: TrainConfig, parts: Parts, tasks: Sequence[Task], cheat: Cheat, luck: float
) -> CheatScore:
    tokenizer, stops = parts.chat.tokenizer, parts.chat.stop_token_ids
    agent = None if parts.program else parts.agent
    ends: dict[int, int] = {}

    def complete(index: int, turn: int, prompt: Int32) -> tuple[list[int], str]:
        new = tokenizer.decode(prompt[ends.get(index, len(prompt)) :], skip_special_tokens=True)
        moment = Moment(agent, tasks[index], turn, new.strip())
        opened = open_thought(tokenizer.decode(prompt[-16:]))  # by the template: close it at once
        text = THOUGHTS.get(opened, "") + ((cheat(moment) if turn >= 0 else None) or "")
        ended = text.endswith(tuple(getattr(parts.agent, "stop", ())))
        ids = [*tokenizer.encode(text, add_special_tokens=False), *stops[: 1 - ended]]
        ends[index] = len(prompt) + len(ids)
        return ids, "stop"

    long = {"max_turn_tokens": LONG, "max_observation_tokens": LONG, "max_response_tokens": None}
    rollout = config.rollout.model_copy(update={**long, "max_retries": 0})
    config = config.model_copy(update={"rollout": rollout})
    with contextlib.closing(sampler_of(complete, config, parts, 100 * LONG)) as sampler:
        groups, metrics = evaluate(sampler, tasks, parts.reward)
    valid = [r for group in groups for r in group.rollouts if r.status is not Status.INFRA_ERROR]
    constant = len({r.answer for r in valid}) == 1 and valid[0].answer is not None
    best = max(valid, key=lambda rollout: rollout.reward)
    guessed = luck if constant else 0.0
    return CheatScore(metrics.get("solved", 0.0), metrics["reward"], guessed, best)


def assert_no_cheat_pays(
    config: str | Path | TrainConfig,
    *,
    at_most: float = 0.05,
    reward_at_most: float = 0.2,
    tasks: int = 32,
    **settings: Any,
) -> dict[str, CheatScore]:
    """Fail if a no-skill policy earns reward.

    The policies give empty, constant, echoed, recited and most frequent answers, repeat the worked
    example, exit, define objects that equal everything, search the interpreter for the answer, or
    repeat one call. They run through the config's own agent, environment and reward, without a
    model. A constant answer may be right as often as the most frequent answer is.

    Args:
        config: a file, a shipped config's name or a TrainConfig.
        at_most: share of tasks that may count as solved.
        reward_at_most: mean reward that is allowed, such as the reward for the format.
        tasks: number of held-out tasks for each policy.
        settings: overrides of the config, by section.

    Returns:
        Each policy's score by name. The best one is the no-skill baseline of the config.

    Raises:
        AssertionError: names each rewarded policy with its best answer.
        Exception: those of Trainer.
    """
    resolved = config_of(config, settings)
    with contextlib.closing(prepare_run(resolved, trained=False)) as parts:
        heldout = parts.heldout[:tasks]
        answers = Counter(str(task.spec["answer"]) for task in heldout if "answer" in task.spec)
        luck = max(answers.values(), default=0) / len(heldout)
        first = Moment(None if parts.program else parts.agent, heldout[0])
        scores = {
            name: _play(resolved, parts, heldout, cheat, luck)
            for name, cheat in cheats(parts, heldout[0], answers).items()
            if cheat(first) is not None
        }
    rewarded = [
        f"  {name}: solved {score.solved:.0%}, reward {score.reward:.2f} (answer "
        f"{score.best.answer!r:.60} to {score.best.task.messages[-1]['content']!r:.80})"
        for name, score in scores.items()
        if score.solved > score.guessed + at_most or score.reward > score.guessed + reward_at_most
    ]
    if rewarded:
        raise AssertionError(
            f"{len(rewarded)} of {len(scores)} no-skill policies earn reward (allowed: "
            f"{at_most:.0%} solved, a reward of {reward_at_most:g}):\n" + "\n".join(rewarded)
        )
    return scores

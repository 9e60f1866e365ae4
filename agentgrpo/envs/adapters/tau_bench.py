"""The first tau-bench (retail, airline) from a checkout of its repository: tools, data, tasks.

The customer is `scripted` (deterministic: gives their name, then one request after another), a
model (customers.py), or a user-defined `module:Class`. With `ticket` there is no customer and the
instruction is in the prompt. All instructions of the retail training split have the same form,
which the scripted customer converts to the first person; others are sent sentence by sentence.

The reward is the benchmark's, 1.0 or 0.0, without its two hashes of the whole database: the records
that the calls changed are compared with those of the ground truth, computed once per task, and the
required outputs are looked up in the messages. It is 0 unless the customer ended the dialogue or
the agent called `done` or transfer_to_human_agents.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from agentgrpo.actions import MODELS, Model, ToolCall
from agentgrpo.envs.adapters.shared_tables import changed_records, copied_on_write
from agentgrpo.envs.customers import SupportEnv, SupportEpisode, User, UserSimulators
from agentgrpo.types import Task

SPLITS = {"retail": ("train", "test", "dev"), "airline": ("test",)}
TRANSFER = "transfer_to_human_agents"
RETAIL_INSTRUCTION = re.compile(
    r"Your name is (?P<name>.+?) and your (?P<key>zip code|email) is (?P<value>\S+?)\. "
    r"(?:You are .+?\. )?(?P<requests>.*)",
    re.DOTALL,
)
REQUEST = re.compile(r"(?<=[.;] )(?=(?:Return|Cancel|Exchange|For|Modify|Change) )")
SENTENCE = re.compile(r"(?<=[.!?]) +")
CUSTOMER = (
    "You are a customer who talks with a customer service agent. Say one line at a time, and only "
    "what is needed for the current step. Do not make up what the instruction does not say. When "
    "the instruction's goal is reached, say ###STOP### and nothing else.\n\nInstruction: {}"
)


class TauBenchEnv(SupportEnv):
    """Episodes of one domain.

    Args:
        domain: retail or airline.
        mode: "scripted", "ticket", `module:Class` of a User that is called with the task's spec, or
            a model: "model" (the policy), "reference" (without its adapter), `endpoint:NAME`.
        heldout: the split for data.heldout = "env"; retail has test and dev.
        models: the models that may play a customer, by name.

    Raises:
        ValueError: an argument is invalid, or the package is missing.
    """

    def __init__(
        self,
        domain: str = "retail",
        mode: str = "scripted",
        *,
        heldout: str = "test",
        models: Mapping[str, Model] = MODELS,
    ) -> None:
        if domain not in SPLITS:
            raise ValueError(f"domain: expected {', '.join(SPLITS)}, got {domain!r}")
        if heldout not in SPLITS[domain]:
            expected = ", ".join(SPLITS[domain])
            raise ValueError(f"heldout: expected {expected} for {domain}, got {heldout!r}")
        played = ("scripted", "model")
        customers = UserSimulators(mode, "ticket", played, models)
        self.domain, self._heldout = domain, heldout
        with _modules(domain) as module:
            self.base: dict[str, Any] = module("data").load_data()
            tools = module("tools").ALL_TOOLS
            policy = str(module("wiki").WIKI)
            self._upstream = {split: _tasks_in(module, split) for split in SPLITS[domain]}
        super().__init__(customers, [tool.get_info() for tool in tools], policy)
        self.invoke = {tool.get_info()["function"]["name"]: tool.invoke for tool in tools}

    def tasks(self, split: str) -> list[Task]:
        """The tasks of a split. "heldout" is the split of the option `heldout`."""
        name = self._heldout if split == "heldout" else split
        if name not in self._upstream:
            raise ValueError(f"data: tau-bench's {self.domain} has no split {name!r}")
        return [self._task(f"{name}/{i}", task) for i, task in enumerate(self._upstream[name])]

    def _task(self, place: str, task: Any) -> Task:
        first, *_ = pieces_of(task.instruction)
        messages = self.messages(task.instruction, f"Hello. {first}")
        spec = {"place": place, "instruction": task.instruction}
        return Task(id=f"tau_bench/{self.domain}/{place}", messages=messages, spec=spec)

    def reset(self, task: Task) -> TauBenchEpisode:
        split, _, index = str(task.spec.get("place", "")).partition("/")
        if split not in self._upstream:
            raise ValueError(f"task {task.id}: its spec has no 'place' in {self.domain}")
        instruction = task.spec["instruction"]
        system = CUSTOMER.format(instruction)
        user = self.customers.of(task, pieces_of(instruction)[1:], system)
        return TauBenchEpisode(self, self._upstream[split][int(index)], task, user)

    def gold(self, place: str, task: Any) -> Mapping[str, str]:

        def compute() -> Mapping[str, str]:
            tables = copied_on_write(self.base)
            for action in task.actions:
                if action.name != TRANSFER:
                    self.call(tables, ToolCall(action.name, action.kwargs))
            return changed_records(tables, self.base)

        changes: Mapping[str, str] = self.cached(place, compute)
        return changes

    def call(self, tables: dict[str, Any], call: ToolCall) -> tuple[str, bool]:
        if call.name not in self.invoke:
            return f"Unknown action {call.name}", True
        try:
            text = str(self.invoke[call.name](data=tables, **call.arguments))
        except Exception as error:  # the benchmark's rule: an exception of a tool is its result
            return f"Error: {error}", True
        return text, text.startswith("Error")


class TauBenchEpisode(SupportEpisode):
    """One case."""

    ends = (TRANSFER,)

    def __init__(self, env: TauBenchEnv, upstream: Any, task: Task, user: User | None) -> None:
        super().__init__(user)
        self._env, self._upstream, self._place = env, upstream, task.spec["place"]
        self._tables = copied_on_write(env.base)

    def call(self, call: ToolCall) -> tuple[str, bool]:
        return self._env.call(self._tables, call)

    def reward(self, *more: str) -> float:
        changes = changed_records(self._tables, self._env.base)
        if changes != self._env.gold(self._place, self._upstream):
            return 0.0
        return float(self.talk.has_said(self._upstream.outputs, *more))


def pieces_of(instruction: str) -> list[str]:
    """The texts of a scripted customer, in order.

    >>> pieces_of("Your name is Al Bo and your email is a@b.c. You are shy. Cancel order #W1 "
    ...           "because no longer needed. Return #W2 via paypal_3: Lamp; Mat; ")
    ... # doctest: +NORMALIZE_WHITESPACE
    ['Cancel order #W1 because no longer needed.', 'My name is Al Bo and my email is a@b.c.',
     'Return #W2 via paypal_3: Lamp; Mat;']
    >>> pieces_of("You are Mia. You want a refund.")
    ['You are Mia.', 'You want a refund.']
    """
    match = RETAIL_INSTRUCTION.fullmatch(instruction)
    if match is None:
        return [piece for piece in SENTENCE.split(instruction.strip()) if piece]
    first, *rest = [piece.strip() for piece in REQUEST.split(match["requests"].strip())]
    who = f"My name is {match['name']} and my {match['key']} is {match['value']}."
    return [first, who, *rest]


@contextlib.contextmanager
def _modules(domain: str) -> Iterator[Any]:
    """Yield a function that imports modules of the domain without running their packages' code.

    The packages import litellm, which uses the network at import. sys.modules is restored.
    """
    spec = importlib.util.find_spec("tau_bench")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "the package tau_bench is needed: a checkout of tau-bench's repository, installed with "
            "pip install --no-deps or named in PYTHONPATH"
        )
    previous_modules = {name: m for name, m in sys.modules.items() if _is_tau_bench(name)}
    package_folder = spec.submodule_search_locations[0]
    try:
        for name in ("tau_bench", "tau_bench.envs", f"tau_bench.envs.{domain}"):
            stub = ModuleType(name)
            stub.__path__ = ["/".join([package_folder, *name.split(".")[1:]])]
            sys.modules[name] = stub
        yield lambda name: importlib.import_module(f"tau_bench.envs.{domain}.{name}")
    finally:
        for name in [name for name in sys.modules if _is_tau_bench(name)]:
            del sys.modules[name]
        sys.modules.update(previous_modules)


def _is_tau_bench(name: str) -> bool:
    return name == "tau_bench" or name.startswith("tau_bench.")


def _tasks_in(module: Any, split: str) -> list[Any]:
    members = vars(module(f"tasks_{split}"))
    (name,) = [name for name in members if name.startswith("TASKS")]
    return list(members[name])

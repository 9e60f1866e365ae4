"""The first tau-bench, retail and airline, from a checkout of its repository: tools, data, tasks.

The customer is `scripted` (deterministic: tells who they are, then request after request), a model
(customers.py), or one of the user's own, `module:Class`; with `ticket` nobody talks
and the instruction is in the prompt. In the retail training split every instruction has one form,
which the scripted customer says in the first person; others are said sentence by sentence.

The reward is the benchmark's, 1.0 or 0.0, without its two hashes of the whole database: what the
calls changed is compared with what the ground truth changes, computed once per task, and what had
to be said is looked for in the messages. 0 unless the customer ended the talk or the agent called
`done` or transfer_to_human_agents.
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
FORM = re.compile(
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
            a model: "model", the policy; "reference", without its adapter; `endpoint:NAME`.
        heldout: the split that data.heldout = "env" means; retail has test and dev.
        models: who may be asked, by name.

    Raises:
        ValueError: an argument is none of these, or the package is missing.
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
            raise ValueError(f"heldout: {domain} has {', '.join(SPLITS[domain])}, no {heldout!r}")
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
        """The split of that name; "heldout" is what the option says."""
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
        """A world of its own; nothing is loaded or hashed."""
        split, _, index = str(task.spec.get("place", "")).partition("/")
        if split not in self._upstream:
            raise ValueError(f"task {task.id}: its spec names no task of {self.domain}")
        instruction = task.spec["instruction"]
        system = CUSTOMER.format(instruction)
        user = self.customers.of(task, pieces_of(instruction)[1:], system)
        return TauBenchEpisode(self, self._upstream[split][int(index)], task, user)

    def gold(self, place: str, task: Any) -> Mapping[str, str]:
        """What the ground truth's calls change; computed once per task."""

        def compute() -> Mapping[str, str]:
            tables = copied_on_write(self.base)
            for action in task.actions:
                if action.name != TRANSFER:
                    self.call(tables, ToolCall(action.name, action.kwargs))
            return changed_records(tables, self.base)

        found: Mapping[str, str] = self.once(place, compute)
        return found

    def call(self, tables: dict[str, Any], call: ToolCall) -> tuple[str, bool]:
        """What a tool says, and whether it failed."""
        if call.name not in self.invoke:
            return f"Unknown action {call.name}", True
        try:
            said = str(self.invoke[call.name](data=tables, **call.arguments))
        except Exception as error:  # the benchmark's own rule: whatever a tool raises is its answer
            return f"Error: {error}", True
        return said, said.startswith("Error")


class TauBenchEpisode(SupportEpisode):
    """One customer's case."""

    ends = (TRANSFER,)

    def __init__(self, env: TauBenchEnv, upstream: Any, task: Task, user: User | None) -> None:
        super().__init__(user)
        self._env, self._upstream, self._place = env, upstream, task.spec["place"]
        self._tables = copied_on_write(env.base)

    def call(self, call: ToolCall) -> tuple[str, bool]:
        return self._env.call(self._tables, call)

    def reward(self, *more: str) -> float:
        changed = changed_records(self._tables, self._env.base)
        if changed != self._env.gold(self._place, self._upstream):
            return 0.0
        return float(self.talk.has_said(self._upstream.outputs, *more))


def pieces_of(instruction: str) -> list[str]:
    """What a scripted customer says, in order.

    >>> pieces_of("Your name is Al Bo and your email is a@b.c. You are shy. Cancel order #W1 "
    ...           "because no longer needed. Return #W2 via paypal_3: Lamp; Mat; ")
    ... # doctest: +NORMALIZE_WHITESPACE
    ['Cancel order #W1 because no longer needed.', 'My name is Al Bo and my email is a@b.c.',
     'Return #W2 via paypal_3: Lamp; Mat;']
    >>> pieces_of("You are Mia. You want a refund.")
    ['You are Mia.', 'You want a refund.']
    """
    found = FORM.fullmatch(instruction)
    if found is None:
        return [piece for piece in SENTENCE.split(instruction.strip()) if piece]
    first, *rest = [piece.strip() for piece in REQUEST.split(found["requests"].strip())]
    who = f"My name is {found['name']} and my {found['key']} is {found['value']}."
    return [first, who, *rest]


@contextlib.contextmanager
def _modules(domain: str) -> Iterator[Any]:
    """Imports modules of the domain without what the packages around them import: litellm, which
    asks the network when it is imported. Nothing of it stays behind in sys.modules.
    """
    found = importlib.util.find_spec("tau_bench")
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            "the package tau_bench is needed: a checkout of tau-bench's repository, installed with "
            "pip install --no-deps or named in PYTHONPATH"
        )
    before = {name: m for name, m in sys.modules.items() if _is_ours(name)}
    place = found.submodule_search_locations[0]
    try:
        for name in ("tau_bench", "tau_bench.envs", f"tau_bench.envs.{domain}"):
            hollow = ModuleType(name)
            hollow.__path__ = ["/".join([place, *name.split(".")[1:]])]
            sys.modules[name] = hollow
        yield lambda name: importlib.import_module(f"tau_bench.envs.{domain}.{name}")
    finally:
        for name in [name for name in sys.modules if _is_ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_ours(name: str) -> bool:
    return name == "tau_bench" or name.startswith("tau_bench.")


def _tasks_in(module: Any, split: str) -> list[Any]:
    found = vars(module(f"tasks_{split}"))
    (name,) = [name for name in found if name.startswith("TASKS")]
    return list(found[name])

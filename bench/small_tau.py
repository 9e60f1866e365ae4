"""What of tau-bench and tau2-bench SmolLM2-135M can be asked, for bench/configs.py.

The configs are written for a model of 4B parameters and a GPU. One of 135M solves no case in which
something has to be looked up and used, and its template shows no tools. So the prompt names the
tools here and has two worked examples, and of the benchmarks' cases those are played that one or
two calls solve which the customer's words already say. In tau2's retail there are none: there a
call that the domain answers is paid. Policies, tools, customers and worlds are the benchmarks'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentgrpo.agents.base import Schema
from agentgrpo.atomic import write_lines
from agentgrpo.settings import toml
from agentgrpo.types import Rollout, Status, Task

Shot = list[dict[str, str]]
LESS = (
    "eval_every=0", "rollout.group_size=6", "rollout.refill_below=0", "rollout.max_turn_tokens=64",
    "rollout.max_observation_tokens=64", "engine.kv_cache_gib=1", "learner.learning_rate=1e-4",
    "learner.trained_layers=12",
)  # fmt: skip


def tau_bench(folder: Path) -> list[str]:
    """The 81 of 500 training cases that ask for the cancellation of one order."""
    from agentgrpo.envs.tau_bench import TauBenchEnv

    env = TauBenchEnv("retail", "scripted")
    cases = zip(env.tasks("train"), env._upstream["train"], strict=True)
    easy = [task for task, case in cases if _names(case.actions) == ["cancel_pending_order"]]
    shots = [
        _cancelled("#W1029384", "ordered by mistake", "Al Bo and my zip code is 10203"),
        _cancelled("#W5647382", "no longer needed", "Di Fox and my email is fox@mail.com"),
    ]
    return [*_overrides(folder, easy, env.schemas, shots, length=4096), "rollout.max_turns=4"]


def _cancelled(order: str, reason: str, who: str) -> Shot:
    told = _ask("user", f"Hello. Cancel order {order} because {reason}.")
    called = _call("cancel_pending_order", order_id=order, reason=reason)
    answer = _ask("tool", f'{{"order_id": "{order}", "status": "cancelled"}}')
    asked = _ask("assistant", "Your order is cancelled. Who are you?")
    thanks = _ask("assistant", "Thank you. Goodbye.")
    return [told, called, answer, asked, _ask("user", f"My name is {who}."), thanks]


def tau2_telecom(folder: Path) -> list[str]:
    """The 18 of 74 tickets that one or two calls solve."""
    from agentgrpo.envs.tau2 import Tau2Env

    env = Tau2Env("telecom")
    easy = [task for task in env.tasks("train") if len(_actions(env, task)) <= 2]
    shots = [
        _ticket("phone service", _call("transfer_to_human_agents", summary="I cannot fix it.")),
        _ticket("mobile data", _call("toggle_airplane_mode"), _call("toggle_data")),
    ]
    return [*_overrides(folder, easy, env.schemas, shots, length=8192), "rollout.max_turns=4"]


def tau2_retail(folder: Path) -> list[str]:
    """All tickets; the reward is looked_up()."""
    from agentgrpo.envs.tau2 import Tau2Env

    env = Tau2Env("retail", "ticket")
    shots = [
        _ticket("You are Al Bo in zip code 10203.", _call(
            "find_user_id_by_name_zip", first_name="Al", last_name="Bo", zip="10203",
        )),
        _ticket("Your email is fox@mail.com.", _call(
            "find_user_id_by_email", email="fox@mail.com",
        )),
    ]  # fmt: skip
    more = ['env.options={domain="retail",mode="ticket"}', "reward.kind=bench.small_tau:looked_up"]
    cases = env.tasks("train")
    return [
        *_overrides(folder, cases, env.schemas, shots, length=4096),
        "rollout.max_turns=3",
        *more,
    ]


def looked_up(rollout: Rollout) -> dict[str, float]:
    """0.5 for a call that the domain answered without an error, 0.5 for ending with `done`."""
    worked = rollout.stats["tool_calls"] > rollout.stats["tool_errors"]
    return {"worked": 0.5 * worked, "done": 0.5 * (rollout.status is Status.COMPLETED)}


def _ticket(text: str, *calls: dict[str, str]) -> Shot:
    answers = ({"role": "tool", "content": "ok"} for _ in calls)
    played = [message for pair in zip(calls, answers, strict=True) for message in pair]
    return [_ask("user", f"<ticket>\n{text}\n</ticket>"), *played, _call("done")]


def _call(name: str, **arguments: str) -> dict[str, str]:
    call = json.dumps({"name": name, "arguments": arguments})
    return _ask("assistant", f"<tool_call>\n{call}\n</tool_call>")


def _ask(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _overrides(
    folder: Path, tasks: Sequence[Task], schemas: Sequence[Schema], shots: list[Shot], length: int
) -> list[str]:
    """Settings with which these tasks are played, which are written to a file."""
    rows = ({"question": [*task.messages], "id": task.id, **task.spec} for task in tasks)
    write_lines(folder / "cases.jsonl", rows)
    functions = (schema["function"] for schema in schemas)
    tools = (f"{f['name']}({', '.join(f['parameters']['properties'])})" for f in functions)
    return [
        *LESS,
        f"agent.system_prompt={toml('Tools: ' + ', '.join(tools))}",
        f"agent.shots={toml(shots)}",
        "data.train=cases.jsonl", "data.heldout=split", "data.id=id",
        f"engine.max_model_len={length}", f"learner.max_tokens={length}",
    ]  # fmt: skip


def _actions(env: Any, task: Task) -> list[Any]:
    return env._tasks[task.spec["tau2_id"]].evaluation_criteria.actions or []


def _names(actions: Sequence[Any]) -> list[str]:
    return [action.name for action in actions]


MADE: Mapping[str, Callable[[Path], list[str]]] = {
    "tau_bench": tau_bench,
    "tau2_telecom": tau2_telecom,
    "tau2_retail": tau2_retail,
}

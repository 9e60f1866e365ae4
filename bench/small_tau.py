"""What of tau-bench and tau2-bench SmolLM2-135M can be asked, for bench/configs.py.

The configs are written for a model of 4B parameters and a GPU. One of 135M solves no case in which
something has to be looked up and used, and its template shows no tools. So the prompt names the
tools here, and of the benchmarks' cases those are played that one or two calls solve which the
customer's words already say. In tau2's retail there are none: there finding the customer is paid.
tau-bench has two worked examples in its prompt; for tau2, whose tickets are longer, the model is
first fine-tuned on a few conversations (COLD_START). Tools, customers, worlds and judges are the
benchmarks', and the policies but for telecom's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentgrpo.actions import CallTools, Schema, ToolCall
from agentgrpo.run.atomic import write_lines
from agentgrpo.settings import toml
from agentgrpo.types import Rollout, Status, Task

Shot = list[dict[str, str]]
COLD_START = "cold_start.jsonl"
"""Written where the model is to be fine-tuned first: conversations, for `agentgrpo sft`."""
LESS = (
    "eval_every=0", "rollout.group_size=6", "rollout.refill_below=0", "rollout.max_turns=4",
    "rollout.max_turn_tokens=64", "rollout.max_observation_tokens=64", "engine.kv_cache_gib=1",
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
    return _overrides(folder, easy, env.schemas, shots, length=4096, learning_rate=1e-4)


def _cancelled(order: str, reason: str, who: str) -> Shot:
    told = _ask("user", f"Hello. Cancel order {order} because {reason}.")
    called = _call("cancel_pending_order", order_id=order, reason=reason)
    answer = _ask("tool", f'{{"order_id": "{order}", "status": "cancelled"}}')
    asked = _ask("assistant", "Your order is cancelled. Who are you?")
    thanks = _ask("assistant", "Thank you. Goodbye.")
    return [told, called, answer, asked, _ask("user", f"My name is {who}."), thanks]


def tau2_telecom(folder: Path) -> list[str]:
    """The 18 of 74 tickets that one or two calls solve, without the policy of 5,700 tokens."""
    from agentgrpo.envs.tau2 import Tau2Env

    env = Tau2Env("telecom")
    easy = [task for task in env.tasks("train") if len(_actions(env, task)) <= 2]
    easy = [replace(task, messages=task.messages[1:]) for task in easy]
    shown = [(task, [(a.name, a.arguments) for a in _actions(env, task)]) for task in easy]
    _cold_start(folder, env, shown)
    return _overrides(folder, easy, env.schemas, [], length=2048, learning_rate=5e-5)


def tau2_retail(folder: Path) -> list[str]:
    """All tickets; the reward is looked_up(), of which the first 8 show how."""
    from agentgrpo.envs.tau2 import Tau2Env

    env = Tau2Env("retail", "ticket")
    cases = env.tasks("train")
    shown = [(task, list(_lookups(env, str(task.messages[-1]["content"])))) for task in cases[:8]]
    _cold_start(folder, env, shown)
    more = ['env.options={domain="retail",mode="ticket"}', "reward.kind=bench.small_tau:looked_up"]
    made = _overrides(folder, cases, env.schemas, [], length=4096, learning_rate=5e-5)
    return [*made, *more]


def _lookups(env: Any, ticket: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The call that finds the customer a ticket speaks of, by what it says of them."""
    for user in env.base.users.values():
        first, last, code = user.name.first_name, user.name.last_name, user.address.zip
        if user.email in ticket:
            yield "find_user_id_by_email", {"email": user.email}
        elif f"{first} {last}" in ticket and code in ticket:
            names = {"first_name": first, "last_name": last, "zip": code}
            yield "find_user_id_by_name_zip", names


def looked_up(rollout: Rollout) -> dict[str, float]:
    """0.5 for a call that the domain answered without an error, 0.5 more for `done` after it."""
    worked = rollout.stats["tool_calls"] > rollout.stats["tool_errors"]
    done = worked and rollout.status is Status.COMPLETED
    return {"worked": 0.5 * worked, "done": 0.5 * done}


def _cold_start(
    folder: Path, env: Any, shown: Sequence[tuple[Task, Sequence[tuple[str, Mapping[str, Any]]]]]
) -> None:
    """Conversations in which tickets are handled by these calls, for `agentgrpo sft`."""
    conversations = []
    for task, calls in shown:
        episode, messages = env.reset(task), [*task.messages]
        for name, arguments in calls:
            answer = episode.step(CallTools((ToolCall(name, dict(arguments)),))).text
            messages += [_call(name, **arguments), _ask("tool", answer)]
        conversations.append({"messages": [*messages, _call("done")]})
    write_lines(folder / COLD_START, conversations)


def _call(name: str, **arguments: Any) -> dict[str, str]:
    call = json.dumps({"name": name, "arguments": arguments})
    return _ask("assistant", f"<tool_call>\n{call}\n</tool_call>")


def _ask(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _overrides(
    folder: Path,
    tasks: Sequence[Task],
    schemas: Sequence[Schema],
    shots: list[Shot],
    *,
    length: int,
    learning_rate: float,
) -> list[str]:
    """Settings with which these tasks are played, which are written to a file."""
    rows = ({"question": [*task.messages], "id": task.id, **task.spec} for task in tasks)
    write_lines(folder / "cases.jsonl", rows)
    functions = (schema["function"] for schema in schemas)
    tools = (f"{f['name']}({', '.join(f['parameters']['properties'])})" for f in functions)
    return [
        *LESS,
        f"agent.options.system_prompt={toml('Tools: ' + ', '.join(tools))}",
        f"agent.options.shots={toml(shots)}",
        f"learner.learning_rate={learning_rate}",
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

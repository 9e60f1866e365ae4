"""Test `agentgrpo doctor RUN` on real runs with one fault each, and on correct runs.

    python -m bench.diagnoses [NAME ...] [--folder DIR]      play the missing runs
    python -m bench.diagnoses --table [--folder DIR]         print the doctor's findings

Unless noted, the policy is the tests' tiny model, which solves half of its sums. A fault counts as
named if it is the doctor's first or second finding, a correct run if there is no finding.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai

from agentgrpo.actions import Observation, RunCode
from agentgrpo.data import word_problems
from agentgrpo.envs.base import Episode
from agentgrpo.inspect.run_doctor import diagnose
from agentgrpo.inspect.run_history import History
from agentgrpo.support.atomic_files import write_lines
from agentgrpo.support.runtime import prepare_environment

HERE = "bench.diagnoses"


# -- rewards and worlds that are wrong -------------------------------------------------------------


def _right(rollout: Any) -> bool:
    return str(rollout.answer or "").strip() == str(rollout.task.spec["answer"])


def pays_any(rollout: Any) -> dict[str, float]:
    return {"answer": float(rollout.answer is not None)}


def pays_nothing(rollout: Any) -> dict[str, float]:
    return {"answer": 0.0}


def pays_wrong(rollout: Any) -> dict[str, float]:
    return {"answer": float(rollout.answer is not None and not _right(rollout))}


def refuses_right(rollout: Any) -> dict[str, float]:
    """Expects the answer in another form than it is asked for."""
    return {"answer": float(str(rollout.answer) == f"{rollout.task.spec['answer']}.0")}


def by_chance(rollout: Any) -> dict[str, float]:
    return {"answer": float(random.random() < 0.5)}


def pays_short(rollout: Any) -> dict[str, float]:
    """More for an answer at once than for a right one."""
    return {"answer": float(_right(rollout)), "short": -rollout.num_sampled / 8}


def fails_often(rollout: Any) -> dict[str, float]:
    """In training alone: an evaluation that cannot be scored ends the run, and says why."""
    if "train" in rollout.task.id and str(rollout.answer).endswith(tuple("13579")):
        raise RuntimeError("the grader's server is away")
    return {"checked": 0.0}


def by_task(rollout: Any) -> dict[str, float]:
    """The same for all that is played of a task."""
    return {"answer": float(len(str(rollout.task.spec["answer"])) > 1)}


def drifts(rollout: Any) -> dict[str, float]:
    """Pays less the more it has paid."""
    _seen.append(0)
    return {"answer": float(_right(rollout)) * 0.99 ** len(_seen)}


_seen: list[int] = []


async def asks_for_little(task: Any, *, base_url: str, api_key: str, model: str) -> str:
    """A program that has another model's limit in its request."""
    messages = [{"role": "system", "content": "S"}, *task["messages"]]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        said = await client.chat.completions.create(model=model, messages=messages, max_tokens=8)
    return said.choices[0].message.content or ""


class World(Episode):
    """Adds two digits, or does not."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def step(self, action: Any) -> Observation:
        found = re.findall(r"\d+", action.code if isinstance(action, RunCode) else "")
        total = str(sum(map(int, found)))
        if self._fault == "fails":
            return Observation("ConnectionError: no route to host", failed=True)
        return Observation(str(int(total) + random.randrange(5)) if self._fault else total)


class Worlds:
    """An environment of World."""

    answers = "code"

    def __init__(self, fault: str = "") -> None:
        self._fault = fault

    def reset(self, task: Any) -> World:
        return World(self._fault)


# -- the runs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run: what is set, and which findings name its fault; none: it is sound."""

    named: tuple[str, ...]
    settings: Sequence[str] = ()
    base: str = ""
    """A shipped config instead of the tiny one."""
    rows: str = ""
    """What is wrong with the data."""
    model: str = "agent"
    """Which tiny one."""


TINY = {
    "steps": 4,
    "save_every": 100,
    "eval_every": 4,
    "agent.options.system_prompt": '"S"',
    "rollout.tasks_per_step": 6,
    "rollout.group_size": 6,
    "rollout.max_turns": 3,
    "rollout.max_turn_tokens": 24,
    "rollout.deterministic": "true",
    "engine.max_model_len": 192,
    "engine.kv_cache_gib": 0.0625,
    "sandbox.max_live": 32,
    "sandbox.allow_degraded": "true",
    "learner.learning_rate": 3e-4,
}
SMALL = (
    "steps=3", "eval_every=3", "save_every=100", "rollout.tasks_per_step=6",
    "rollout.group_size=6", "data.num_heldout=24",
)  # fmt: skip


def reward(name: str) -> str:
    return f"reward.kind={HERE}:{name}"


CALCULATOR = (
    "agent.kind=tools", "env.kind=tools",
    'env.options.tools=["agentgrpo.envs.calculator:calculate"]',
)  # fmt: skip
CASES: dict[str, Case] = {
    "rate_1e-9": Case(("policy does not change",), ["learner.learning_rate=1e-9"]),
    "rate_1e-1": Case(("policy changes too fast",), ["learner.learning_rate=1e-1"]),
    "warmup": Case(("policy does not change",), ["learner.warmup_steps=1000000"]),
    "pays_any": Case(("wrong answers get a reward",), [reward("pays_any")]),
    "pays_nothing": Case(
        ("all rewards of a group are equal", "right answers get no reward"),
        [reward("pays_nothing")],
    ),
    "pays_wrong": Case(
        ("wrong answers get a reward", "right answers get no reward"), [reward("pays_wrong")]
    ),
    "refuses_right": Case(("right answers get no reward",), [reward("refuses_right")]),
    "by_chance": Case(
        ("reward is not deterministic", "wrong answers get a reward"), [reward("by_chance")]
    ),
    "pays_short": Case(("reward does not follow the task",), [reward("pays_short")]),
    "fails_often": Case(
        ("rollouts fail for technical reasons",), [f"reward.functions=['{HERE}:fails_often']"]
    ),
    "hides_tools": Case(("no tool calls",), [*CALCULATOR, "engine.max_model_len=512"]),
    "cut_turns": Case(("cut short",), ["rollout.max_turns=1"]),
    "cut_tokens": Case(("cut short",), ["rollout.max_turn_tokens=8"]),
    "other_tags": Case(
        (
            "required tag or prefix is never written",
            "malformed actions",
            "no answer",
            "no tool calls",
        ),
        ["agent.options.open_tag=<run>", "agent.options.close_tag=</run>"],
    ),
    "cold": Case(("rollouts of a group are alike",), ["rollout.temperature=0.02"]),
    "hot": Case(("temperature too high",), ["rollout.temperature=2.0"]),
    "solved": Case(("too easy",), model="neat"),
    "impossible": Case(("too hard", "all rewards of a group are equal"), rows="impossible"),
    "wrong_gold": Case(("expected answers may be wrong",), rows="wrong_gold"),
    "wrong_gold_neat": Case(("expected answers may be wrong",), rows="wrong_gold", model="neat"),
    "contradicts": Case(("one question has two expected answers",), rows="contradicts"),
    "leaked": Case(("held-out tasks are trained on",), rows="leaked"),
    "repeated": Case(("too few tasks",), rows="repeated"),
    "few_heldout": Case((), ["data.num_heldout=2", "learner.learning_rate=1e-4"]),
    "timed_out": Case(("rollouts are not trained on",), ["rollout.max_seconds=0.2"]),
    "world_fails": Case(
        ("tool calls fail",), [f"env.kind={HERE}:Worlds", "env.options.fault=fails"]
    ),
    "world_varies": Case(
        ("environment is not deterministic",),
        [f"env.kind={HERE}:Worlds", "env.options.fault=noise"],
    ),
    "off_policy": Case(
        ("off-policy", "policy changes too fast"),
        ["loss.num_iterations=12", "learner.learning_rate=1e-2"],
    ),
    "entropy": Case(("forgets", "policy changes too fast"), ["loss.entropy_coef=1.0"]),
    "beta": Case(("KL penalty too large",), ["loss.beta=1000"]),
    "grad_norm": Case(("policy does not change",), ["learner.max_grad_norm=1e-12"]),
    "shifted": Case(("expected answers may be wrong",), rows="shifted"),
    "shifted_neat": Case(("expected answers may be wrong",), rows="shifted", model="neat"),
    "blind": Case(("tool results are cut",), ["rollout.max_observation_tokens=0"]),
    "slow_tool": Case(
        ("tool calls fail", "rollouts fail for technical reasons"), ["sandbox.timeout_s=0.001"]
    ),
    "by_task": Case(
        ("all rewards of a group are equal", "right answers get no reward"), [reward("by_task")]
    ),
    "drifts": Case(("reward is not deterministic",), [reward("drifts")]),
    "masked": Case(("rollouts are not trained on",), ["rollout.treatment={completed='mask'}"]),
    "no_calls": Case(("cut short", "no tool calls"), ["rollout.max_tool_calls=0"]),
    "other_heldout": Case(("held-out tasks are of another kind",), rows="other_heldout"),
    "program_cut": Case(
        ("cut short",),
        [
            "agent.kind=program",
            "reward.kind=text",
            "rollout.deterministic=false",
            f"agent.options={{call='{HERE}:asks_for_little'}}",
        ],
    ),
    "bash": Case(("tool calls fail",), ["agent.options.language=bash"]),
    "beta_10": Case(("KL penalty too large",), ["loss.beta=10", "learner.learning_rate=1e-3"]),
    "other_prefix": Case(
        ("required tag or prefix is never written", "no answer"),
        ["agent.options.answer_prefix=The answer is"],
    ),
    "small_hides_tools": Case(
        ("no tool calls",),
        [*SMALL, "agent.options.shots=[]", "agent.options.system_prompt=Use calculate."],
        base="tools",
    ),
    "small_wrong_gold": Case(
        ("expected answers may be wrong",),
        [*SMALL, "steps=6", "rollout.group_size=8", "rollout.tasks_per_step=8"],
        base="tools",
        rows="wrong_gold",
    ),
    "small_blind": Case(
        ("tool results are cut",), [*SMALL, "rollout.max_observation_tokens=0"], base="tools"
    ),
    "small_rate_1e-9": Case(
        ("policy does not change",), [*SMALL, "learner.learning_rate=1e-9"], base="quickstart"
    ),
    "small_turns_cut": Case(
        ("cut short",), [*SMALL, "rollout.max_turn_tokens=10"], base="quickstart"
    ),
    "rate_3e-3": Case(("policy changes too fast",), ["learner.learning_rate=3e-3"]),
    "rate_3e-3_long": Case(
        ("policy changes too fast",),
        ["learner.learning_rate=3e-3", "steps=8", "eval_every=8", "seed=3"],
    ),
    "warmup_50": Case(("policy does not change",), ["learner.warmup_steps=50"]),
    "quantile_0.001": Case(("policy does not change",), ["loss.top_entropy_quantile=0.001"]),
    "quantile_0.02": Case(("policy does not change",), ["loss.top_entropy_quantile=0.02"]),
    "leaked_ids": Case(("held-out tasks are trained on",), rows="leaked_ids"),
    "repeated_ids": Case(("too few tasks",), rows="repeated_ids"),
    "contradicts_ids": Case(("one question has two expected answers",), rows="contradicts_ids"),
    "stop_string": Case(
        ("required tag or prefix is never written",), ["agent.options.close_tag=</run>"]
    ),
    "stop_string_neat": Case(
        ("required tag or prefix is never written",),
        ["agent.options.close_tag=</run>"],
        model="neat",
    ),
    "wrong_gold_few": Case(
        ("expected answers may be wrong",),
        ["steps=3", "rollout.tasks_per_step=4", "rollout.group_size=8"],
        rows="wrong_gold",
        model="neat",
    ),
    "solved_once": Case(
        ("too easy",), ["eval_every=100", "data.num_heldout=8", "steps=3"], model="neat"
    ),
    "sound_seed_4": Case((), ["seed=4"]),
    "sound_8": Case((), ["seed=5", "rollout.group_size=8", "rollout.tasks_per_step=4", "steps=6"]),
    "small_rate_3e-3": Case(
        ("policy changes too fast",), [*SMALL, "learner.learning_rate=3e-3"], base="quickstart"
    ),
    "small_quantile": Case(
        ("policy does not change",), [*SMALL, "loss.top_entropy_quantile=0.001"], base="quickstart"
    ),
    "small_warmup": Case(
        ("policy does not change",), [*SMALL, "learner.warmup_steps=50"], base="quickstart"
    ),
    "small_stop_string": Case(
        ("required tag or prefix is never written",),
        [*SMALL, "agent.options.close_tag=</run>"],
        base="quickstart",
    ),
    "small_sound": Case((), [*SMALL, "steps=4", "eval_every=4"], base="quickstart"),
    "small_sound_tools": Case((), [*SMALL, "steps=4", "eval_every=4"], base="tools"),
    "sound_0": Case(()),
    "sound_1": Case((), ["seed=1", "steps=10"]),
    "sound_world": Case((), [f"env.kind={HERE}:Worlds"]),
    "sound_grpo": Case((), ["loss.loss_type=grpo", "loss.beta=0.02", "seed=2", "steps=8"]),
}


def rows_of(case: Case, heldout: bool) -> list[dict[str, Any]]:
    """Sums of two digits, none of them both trained on and held out; or word problems."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    rows = [{"question": f"{a}+{b}", "answer": str(a + b)} for a, b in pairs]
    if case.base:
        tasks = [word_problems.task("train", index) for index in range(24, 224)]
        rows[24:] = [
            {"question": task.messages[0]["content"], "answer": str(task.spec["answer"])}
            for task in tasks
        ]
    mine = rows[:24] if heldout else rows[24:]
    if case.rows.endswith("_ids"):
        kind = replace(case, rows=case.rows.removesuffix("_ids"))
        rows = rows_of(kind, heldout) * (1 if heldout else 2)
        return [{**row, "index": 1000 * heldout + i} for i, row in enumerate(rows)]
    match case.rows:
        case "leaked":
            return rows[:24] if heldout else rows[:48]
        case "repeated" if not heldout:
            return mine[:2] * 10
        case "impossible":
            return [{**row, "answer": str(-7 - int(row["answer"]))} for row in mine]
        case "wrong_gold" if not heldout:
            wrong = [{**row, "answer": str(int(row["answer"]) + 1)} for row in mine[::3]]
            return [*wrong, *mine[1::3], *mine[2::3]]
        case "shifted" if not heldout:
            answers = [row["answer"] for row in mine]
            return [
                {**row, "answer": answer}
                for row, answer in zip(mine, answers[1:] + answers[:1], strict=True)
            ]
        case "other_heldout" if heldout:
            return [{"question": f"{a}*{b}", "answer": str(a * b)} for a, b in pairs[:24]]
        case "contradicts" if not heldout:
            return [
                *mine[:20],
                *({**row, "answer": str(int(row["answer"]) + 2)} for row in mine[:20]),
            ]
    return mine


def models(folder: Path) -> dict[str, Path]:
    """The tests' tiny model, and one that was shown no bad habits: it solves nearly all."""
    from tests import tiny

    made = {"agent": folder / "models/agent", "neat": folder / "models/neat"}
    noisy = tiny._example

    def neat(rng: random.Random) -> str:
        while "</code>" not in (text := noisy(rng)):
            pass
        return text

    for name, path in made.items():
        if not path.exists():
            tiny._example = neat if name == "neat" else noisy
            tiny.make_agent_dir(path)
    tiny._example = noisy
    return made


def play(name: str, folder: Path) -> None:
    """Train; what ends the run is printed, as it is part of some."""
    from agentgrpo.config import TrainConfig
    from agentgrpo.config.read import load_config_of
    from agentgrpo.train.trainer import Trainer

    case, own = CASES[name], folder / name
    settings: dict[str, object] = {"out_dir": own / "run"}
    own.mkdir(parents=True, exist_ok=True)
    for split in ("train", "heldout") if case.rows or not case.base else ():
        write_lines(own / f"{split}.jsonl", rows_of(case, split == "heldout"))
        settings[f"data.{split}"] = own / f"{split}.jsonl"
    if case.base:
        settings["data.heldout"] = "word_problems"
    else:
        settings |= {"data.num_heldout": 24, **TINY, "model": models(folder)[case.model]}
        (own / "empty.toml").write_text("")
    given = [f"{key}={value}" for key, value in settings.items()]
    config = load_config_of(
        TrainConfig, case.base or str(own / "empty.toml"), [*given, *case.settings], "train"
    )
    try:
        with Trainer(config) as trainer:
            trainer.train()
    except Exception:
        traceback.print_exc()


def verdict(name: str, folder: Path) -> tuple[bool, list[str]]:
    """Whether the doctor says of a run what it should, and the names of its findings."""
    found = [*diagnose(History(folder / name / "run"))]
    named = CASES[name].named
    if not named:
        return not found, found
    return any(finding in named for finding in found[:2]), found


def main(arguments: Sequence[str]) -> None:
    """Play, or show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=" ".join(CASES))
    parser.add_argument("--folder", type=Path, default=Path("runs/diagnoses"))
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args(arguments)
    for name in args.names or CASES:
        if not args.table and not (args.folder / name / "run/metrics.jsonl").exists():
            print(f"==== {name}", flush=True)
            play(name, args.folder)
    for name in args.names or CASES:
        if (args.folder / name / "run/run.json").is_file():
            right, found = verdict(name, args.folder)
            print(f"| {name} | {'yes' if right else 'NO'} | {', '.join(found[:4])} |")


if __name__ == "__main__":
    prepare_environment()
    main(sys.argv[1:])

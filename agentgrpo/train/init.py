"""Write a config for your model and your data, every setting in it with what it means.

The data is one JSON object a line with a question and its answer, or Parquet, or a directory that
datasets' save_to_disk wrote, or a dataset of the Hugging Face hub (owner/name; data.subset=NAME and
data.split=NAME say which part). Some of its rows are held out, to see whether the policy learns.
`env` instead of data: the tasks of an environment that has its own (env.kind); --repair: tasks made
from packages (docs/environments.md); --harbor: task folders in Harbor's form
(docs/environments.md). With --examples: copies of the examples, a folder each.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.config.arguments import parser_of
from agentgrpo.config.read import load_config
from agentgrpo.data.files import is_from_hub
from agentgrpo.data.sources import rows_of
from agentgrpo.envs import harbor_tasks, repair_tasks
from agentgrpo.examples import copy_examples
from agentgrpo.models.models import resolve_model
from agentgrpo.rewards.answers import accepted_answers
from agentgrpo.sandbox.doctor import examine
from agentgrpo.support.files import require_output
from agentgrpo.train.config_docs import as_toml, settings
from agentgrpo.train.plugins import REWARDS, Kind, decide_reward, kind_of, needs_answers
from agentgrpo.train.resolve import env_name, judges_by_class, runs_code
from agentgrpo.types import Task

HEAD = """\
# Made by `agentgrpo init`. What is commented out is at its default; docs/config.md has it all.
#   agentgrpo train {name} --dry-run    checks it
#   agentgrpo train {name}              trains
#   agentgrpo view {out_dir}            shows the result

"""

BARE = """\
# This machine makes no namespaces (`agentgrpo sandbox doctor` says why), so no code is run. To run
# it with less isolation, as SECURITY.md says, set allow_degraded = true under [sandbox].

"""


def values_for(
    model: str, data: str, overrides: Sequence[str] = (), *, question: str = "question",
    answer: str = "answer", out_dir: Path = Path("runs/train"),
) -> dict[str, Any]:  # fmt: skip
    """The settings that a model and its data decide."""
    named = {"data.question": question, "data.answer": answer}
    path = "" if data == "env" or is_from_hub(data) else str(Path(data).resolve())
    values = {
        "model": str(Path(model).resolve()) if Path(model).is_dir() else model,
        "steps": 100,
        "data.train": path or data,
        "data.heldout": data if data == "env" else "split",
        "rollout.max_turn_tokens": 256,
        "rollout.max_observation_tokens": 256,
        "engine.max_model_len": 2048,
        "learner.max_tokens": 4096,
        **{key: column for key, column in named.items() if column != key.partition(".")[2]},
        "out_dir": str(out_dir),
    }
    if data != "env":
        config = _chosen(values, overrides)
        may_judge = judges_by_class(config) is not False
        answered = needs_answers(decide_reward(config.reward, judges=may_judge))
        count = len(rows := rows_of(config.data, "train", None, answers=answered).rows)
        if count < 2 and config.data.heldout_source == "split":
            raise ValueError(f"{data}: {count} row; at least 2 are needed, one to be held out")
        values["data.num_heldout"] = min(64, max(1, count // 5))
        kind = _reward_for(rows) if answered and config.reward.kind == "auto" else "numeric"
        values |= {"reward.kind": kind} if kind != "numeric" else {}
    return values


def _reward_for(tasks: Sequence[Task]) -> str:
    """The first kind of reward that can read every expected answer."""
    latex = any("\\" in text for task in tasks for text in accepted_answers(task))
    for kind in ("choice", "numeric", "math" if latex else "text"):
        with contextlib.suppress(ValueError):
            for task in tasks:
                REWARDS[kind].expected(task)  # type: ignore[attr-defined]
            return kind
    return "text"


def _chosen(values: Mapping[str, Any], overrides: Sequence[str]) -> TrainConfig:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as draft:
        draft.write(as_toml(values))
        draft.flush()
        return load_config(draft.name, overrides)


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str], *, name: Path) -> str:
    """The text of a config that will be called `name`."""
    chosen = _chosen(values, overrides)
    shipped = _shipped_kinds(chosen)
    kinds = {section: kind.name for section, kind in shipped.items()}
    wanted = {
        key: value
        for setting in settings(kinds=kinds)
        for key in [f"{setting.section}.{setting.key}".lstrip(".")]
        if (value := value_of(chosen, key, setting.default)) != setting.default or key in values
    }
    head = HEAD.format(name=name, out_dir=chosen.out_dir)
    agent, env = shipped.get("agent"), shipped.get("env")
    # what is not written yet may run code
    may_run = not (agent and env) or runs_code(agent, env)
    if may_run and not chosen.sandbox.allow_degraded and examine()[1] is None:
        head += BARE
    return head + as_toml(wanted, kinds)


def _shipped_kinds(config: TrainConfig) -> dict[str, Kind]:
    """Those that are shipped, their options checked; a user's own may not be written yet."""
    own = ":" in config.agent.kind
    kinds = {"agent": config.agent.kind, "env": config.env.kind if own else env_name(config)}
    return {
        section: kind_of(section, kind, getattr(config, section).options)
        for section, kind in kinds.items()
        if ":" not in kind and kind != "auto"
    }


def value_of(config: TrainConfig, name: str, default: Any = None) -> Any:
    """The value of `section.key`; of `section.options.key` the default where it is not given."""
    section, _, option = name.partition(".options.")
    if option:
        return value_of(config, f"{section}.options").get(option, default)
    return functools.reduce(getattr, name.split("."), config)


def main(arguments: list[str]) -> int:
    """Parse the command line, write the config. Returns the exit status."""
    parser = parser_of("init", __doc__)
    parser.add_argument("model", nargs="?", help="a model directory, hub name or package:NAME")
    parser.add_argument(
        "data", nargs="?", help=".jsonl, .parquet, a saved dataset, a hub's owner/name, or env"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings of yours"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("train.toml"), help="default: train.toml"
    )
    parser.add_argument(
        "--examples", nargs="?", type=Path, const=Path("examples"), metavar="FOLDER",
        help="copy the examples into a folder, one folder each (default: examples)",
    )  # fmt: skip
    made = parser.add_mutually_exclusive_group()
    made.add_argument("--repair", action="append", metavar="PACKAGE", help="or a folder")
    made.add_argument(
        "--harbor", action="append", metavar="FOLDER", help="task folders in Harbor's form"
    )
    parser.add_argument("--tasks", type=int, default=50, help="of each kind from each package")
    parser.add_argument("--show", default="test", choices=repair_tasks.WANTED, help="of them")
    parser.add_argument("--network", action="store_true", help="images are built with the network")
    parser.add_argument("--question", default="question", help="column of the question")
    parser.add_argument("--answer", default="answer", help="column of the expected answer")
    args = parser.parse_intermixed_args(arguments)
    if (args.repair or args.harbor) and args.data:
        args.overrides.insert(0, args.data)
    if args.examples is None and (
        args.model is None or not (args.data or args.repair or args.harbor)
    ):
        parser.error("the following arguments are required: model, data")
    try:
        if args.examples is not None:
            print(*copy_examples(args.examples), sep="\n")  # noqa: T201
            return 0
        require_output(args.output)
        if args.output.exists():
            raise ValueError(f"{args.output} exists; remove it, or choose another with --output")
        if not args.model.startswith("package:"):
            resolve_model(args.model)
        if args.repair:
            args.data, *more = repair_tasks.write(args.repair, args.output, args.tasks, args.show)
            args.overrides[:0] = more
        if args.harbor:
            options = [one for one in args.overrides if one.startswith("env.options.")]
            given = _chosen({"model": args.model, "out_dir": "runs"}, options).env.options
            args.data, *more = harbor_tasks.write(
                args.harbor, args.output, network=args.network, grant=given.get("grant", ())
            )
            args.overrides[:0] = more
        values = values_for(
            args.model, args.data, args.overrides, question=args.question, answer=args.answer,
            out_dir=Path("runs", args.output.stem),
        )  # fmt: skip
        args.output.write_text(with_overrides(values, args.overrides, name=args.output))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print(f"{args.output}: written. Now: agentgrpo train {args.output} --dry-run")  # noqa: T201
    return 0

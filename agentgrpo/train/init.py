"""Write a config for your model and data, with every setting and its description.

The data is JSON lines (one object with a question and an answer per line), Parquet, a directory
written by datasets' save_to_disk, or a dataset on the Hugging Face Hub (owner/name; select a part
by data.subset=NAME and data.split=NAME). Some rows are held out for evaluation. Instead of data:
`env` for an environment with tasks of its own (env.kind); --repair for tasks made from packages;
--harbor for task folders in Harbor's format (docs/environments.md). --examples copies the examples,
one folder each.
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
from agentgrpo.sandbox import SandboxException
from agentgrpo.sandbox.doctor import examine
from agentgrpo.support.files import require_output
from agentgrpo.train.config_docs import as_toml, settings
from agentgrpo.train.plugins import REWARDS, Kind, decide_reward, kind_of, needs_answers
from agentgrpo.train.resolve import env_name, judges_by_class, runs_code
from agentgrpo.types import Task

HEAD = """\
# Made by `agentgrpo init`. Settings that are commented out have their defaults; see docs/config.md.
#   agentgrpo train {name} --dry-run    checks it
#   agentgrpo train {name}              trains
#   agentgrpo view {out_dir}            shows the result

"""

NO_SANDBOX = """\
# This machine cannot create namespaces (find out why: `agentgrpo sandbox doctor`), so it runs no
# code. To run code with less isolation (SECURITY.md), set allow_degraded = true under [sandbox].

"""


def values_for(
    model: str, data: str, overrides: Sequence[str] = (), *, question: str = "question",
    answer: str = "answer", out_dir: Path = Path("runs/train"),
) -> dict[str, Any]:  # fmt: skip
    """The settings that follow from a model and its data."""
    columns = {"data.question": question, "data.answer": answer}
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
        **{key: column for key, column in columns.items() if column != key.partition(".")[2]},
        "out_dir": str(out_dir),
    }
    if data != "env":
        config = _config_from(values, overrides)
        may_judge = judges_by_class(config) is not False
        with_answers = needs_answers(decide_reward(config.reward, judges=may_judge))
        count = len(rows := rows_of(config.data, "train", None, answers=with_answers).rows)
        if count < 2 and config.data.heldout_source == "split":
            raise ValueError(f"{data}: expected at least 2 rows, one of them held out, got {count}")
        values["data.num_heldout"] = min(64, max(1, count // 5))
        kind = _reward_for(rows) if with_answers and config.reward.kind == "auto" else "numeric"
        values |= {"reward.kind": kind} if kind != "numeric" else {}
    return values


def _reward_for(tasks: Sequence[Task]) -> str:
    """The first kind of reward that can parse every expected answer."""
    latex = any("\\" in text for task in tasks for text in accepted_answers(task))
    for kind in ("choice", "numeric", "math" if latex else "text"):
        with contextlib.suppress(ValueError):
            for task in tasks:
                REWARDS[kind].expected(task)  # type: ignore[attr-defined]
            return kind
    return "text"


def _config_from(values: Mapping[str, Any], overrides: Sequence[str]) -> TrainConfig:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as draft:
        draft.write(as_toml(values))
        draft.flush()
        return load_config(draft.name, overrides)


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str], *, name: Path) -> str:
    """The text of a config file called `name`."""
    shipped = _shipped_kinds(_config_from(values, overrides))
    unread = {key for kind in shipped.values() for key in getattr(kind.factory, "unread", ())}
    values = {key: value for key, value in values.items() if key not in unread}
    config = _config_from(values, overrides)
    kinds = {section: kind.name for section, kind in shipped.items()}
    active = {
        key: value
        for setting in settings(kinds=kinds)
        for key in [f"{setting.section}.{setting.key}".lstrip(".")]
        if (value := value_of(config, key, setting.default)) != setting.default or key in values
    }
    head = HEAD.format(name=name, out_dir=config.out_dir)
    agent, env = shipped.get("agent"), shipped.get("env")
    # a user's own class may not be written yet: assume that it runs code
    may_run_code = not (agent and env) or runs_code(agent, env)
    if may_run_code and not config.sandbox.allow_degraded and examine()[1] is None:
        head += NO_SANDBOX
    return head + as_toml(active, kinds)


def _shipped_kinds(config: TrainConfig) -> dict[str, Kind]:
    """The shipped agent and environment of a config, if they are shipped, by section.

    A user's own class is skipped, since it may not be written yet.
    """
    is_own = ":" in config.agent.kind
    kinds = {"agent": config.agent.kind, "env": config.env.kind if is_own else env_name(config)}
    return {
        section: kind_of(section, kind, getattr(config, section).options)
        for section, kind in kinds.items()
        if ":" not in kind and kind != "auto"
    }


def value_of(config: TrainConfig, name: str, default: Any = None) -> Any:
    """The value of `section.key`, or of `section.options.key` with its default."""
    section, _, option = name.partition(".options.")
    if option:
        return value_of(config, f"{section}.options").get(option, default)
    return functools.reduce(getattr, name.split("."), config)


def main(arguments: list[str]) -> int:
    """Entry point of `agentgrpo init`."""
    parser = parser_of("init", __doc__)
    parser.add_argument("model", nargs="?", help="model directory, Hub name or package:NAME")
    parser.add_argument(
        "data", nargs="?", help=".jsonl, .parquet, saved dataset, owner/name on the Hub, or env"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="your settings"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("train.toml"), help="default: train.toml"
    )
    parser.add_argument(
        "--examples", nargs="?", type=Path, const=Path("examples"), metavar="FOLDER",
        help="copy the examples into a folder, one folder each (default: examples)",
    )  # fmt: skip
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--repair", action="append", metavar="PACKAGE", help="make tasks from a package or a folder"
    )
    source.add_argument(
        "--harbor", action="append", metavar="FOLDER", help="task folders in Harbor's format"
    )
    parser.add_argument(
        "--tasks", type=int, default=50, help="with --repair: of each kind from each package"
    )
    parser.add_argument(
        "--show", default="test", choices=repair_tasks.TASK_TEXT, help="with --repair: what to show"
    )
    parser.add_argument(
        "--network", action="store_true", help="with --harbor: build images with network access"
    )
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
            print(*copy_examples(args.examples), sep="\n")
            return 0
        require_output(args.output)
        if args.output.exists():
            raise ValueError(f"{args.output} exists; remove it, or set another --output")
        if args.tasks < 1:
            raise ValueError(f"--tasks: expected 1 or more, got {args.tasks}")
        if not args.model.startswith("package:"):
            resolve_model(args.model)
        if args.repair:
            args.data, *more = repair_tasks.write_rows(
                args.repair, args.output, args.tasks, args.show
            )
            args.overrides[:0] = more
        if args.harbor:
            overrides = [text for text in args.overrides if text.startswith("env.options.")]
            config = _config_from({"model": args.model, "out_dir": "runs"}, overrides)
            args.data, *more = harbor_tasks.write_rows(
                args.harbor,
                args.output,
                network=args.network,
                grant=config.env.options.get("grant", ()),
            )
            args.overrides[:0] = more
        values = values_for(
            args.model, args.data, args.overrides, question=args.question, answer=args.answer,
            out_dir=Path("runs", args.output.stem),
        )  # fmt: skip
        args.output.write_text(with_overrides(values, args.overrides, name=args.output))
    except (ValueError, OSError, SandboxException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: written. Now: agentgrpo train {args.output} --dry-run")
    return 0

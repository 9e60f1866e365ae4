"""Publish a checkpoint of a run on the Hugging Face Hub, with a card that says how it was made.

The repository is private if not told otherwise. What goes there is weights, model and tokenizer
files, and the card: of the settings those of PUBLISHED alone. The token is the one that
`hf auth login` keeps, or HF_TOKEN; HF_ENDPOINT names another hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentgrpo.config import TrainConfig
from agentgrpo.config.arguments import parser_of
from agentgrpo.inspect.verify.chain import Chain
from agentgrpo.models.models import ADAPTER_CONFIG
from agentgrpo.records import checkpoint
from agentgrpo.train.command_line import report_errors
from agentgrpo.train.config_docs import toml

KINDS = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Endings of a checkpoint's files that are published."""
PUBLISHED = ("engine", "agent", "env", "rollout", "data", "reward", "learner", "loss")
"""Sections of the settings that the card shows; of options the agent's prompt and examples alone:
others may hold addresses, keys and values of the environment."""
OPTIONS = ("system_prompt", "shots")


Files = dict[str, Path | bytes]
"""What would be published, by its name there: a file, or what was made."""


def prepared(run: Path, repo: str, which: str = "last") -> tuple[Path, Files]:
    """The checkpoint and what would be sent of it, its card included."""
    if not (run / "run.json").is_file():
        raise ValueError(f"{run}: no run.json, so this is not a run's folder (out_dir)")
    described = json.loads((run / "run.json").read_text())
    metrics = Chain(run / "metrics.jsonl", described["records"]["metrics.jsonl"])
    rows = [row for row, *_ in metrics]
    if metrics.faults:
        raise ValueError(f"{run}: {metrics.faults[0]}: `agentgrpo verify` says what is wrong")
    adapter = described["config"]["learner"]["lora"]["rank"] > 0
    folder = _chosen(run, rows, which)
    checkpoint.require_whole(folder, adapter=adapter, remedy="--checkpoint STEP chooses another")
    files: Files = {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.suffix in KINDS and not path.name.startswith(("agentgrpo", "."))
    }
    base = without_place(described["base"])
    for name in ("config.json", "tokenizer_config.json", ADAPTER_CONFIG):
        if name in files:
            files[name] = _renamed(folder / name, base)
    card = make_card(repo, described, rows, checkpoint.step_of(folder), adapter=adapter)
    return folder, {**files, "README.md": card.encode()}


def _chosen(run: Path, rows: Sequence[Mapping[str, Any]], which: str) -> Path:
    saved = {checkpoint.step_of(path): path for path in run.glob(checkpoint.SAVED)}
    there = f"{run} has checkpoints of steps {', '.join(map(str, sorted(saved))) or '(none)'}"
    if which == "last" and saved:
        return saved[max(saved)]
    if which == "best":
        played = [row for row in rows if row["step"] in saved and "eval/reward" in row]
        if not played:
            raise ValueError(f"--checkpoint best: none of them was evaluated; {there}")
        best = max(played, key=lambda row: (row.get("eval/solved", 0), row["eval/reward"]))
        return saved[best["step"]]
    if not which.isdigit() or int(which) not in saved:
        raise ValueError(f"--checkpoint: expected last, best or a step, got {which!r}; {there}")
    return saved[int(which)]


def without_place(name: str) -> str:
    """A path of this machine as its last part; what is no path as it is."""
    return Path(name).name if re.match(r"[/~.]", name) or Path(name).exists() else name


def _renamed(path: Path, base: str) -> bytes:
    """A JSON file of a checkpoint that names the model it was made from as the card does."""
    table = json.loads(path.read_text())
    names = {"_name_or_path", "name_or_path", "base_model_name_or_path"}
    table |= dict.fromkeys(names & table.keys(), base)
    return json.dumps(table, indent=2, ensure_ascii=False).encode()


def make_card(
    repo: str, run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], step: int, *,
    adapter: bool,
) -> str:  # fmt: skip
    """The text of a checkpoint's README.md; `run` is run.json, `rows` those of metrics.jsonl."""
    from huggingface_hub import ModelCardData

    base, config = without_place(run["base"]), run["config"]
    about = ModelCardData(
        base_model=base if "/" in base else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["agentgrpo", "grpo", "reinforcement-learning"],
    )
    made = "A LoRA adapter to" if adapter else "Made from"
    evaluated = [row for row in rows if "eval/reward" in row and row["step"] <= step]
    results = [
        f"| {row['step']} | {row.get('eval/solved', '')} | {row['eval/reward']} |"
        for row in evaluated
    ]
    versions = [f"{name} {version}" for name, version in sorted(run["versions"].items())]
    lines = [
        f"---\n{about.to_yaml()}\n---",
        f"# {repo.rpartition('/')[2]}",
        f"{made} {base}: step {step} of {config['steps']} of a run of GRPO with agentgrpo.",
        "## Results",
        "\n".join(["| step | held out, solved | reward |", "|---|---|---|", *results]),
        "## Settings",
        "What differs from the defaults, of what says how it was trained.",
        f"````toml\n{_published(config)}\n````",
        "## Versions",
        ", ".join(versions),
    ]
    return "\n\n".join(lines) + "\n"


def _published(config: Mapping[str, Any]) -> str:
    """The settings of PUBLISHED that differ from their defaults, as TOML."""
    default = TrainConfig(model="m", out_dir=Path()).model_dump(mode="json")
    lines = [f"steps = {config['steps']}", f"seed = {config['seed']}"]
    for section in PUBLISHED:
        changed = {k: v for k, v in config[section].items() if v != default[section].get(k)}
        options = changed.pop("options", {})
        if kept := {key: options[key] for key in OPTIONS if key in options}:
            changed["options"] = kept
        shown = {k: without_place(v) if isinstance(v, str) else v for k, v in changed.items()}
        if shown:
            lines += ["", f"[{section}]", *(f"{key} = {toml(v)}" for key, v in shown.items())]
    return "\n".join(lines)


def upload(repo: str, files: Files, message: str, *, public: bool, exist_ok: bool) -> str:
    """Create the repository and send all files as one commit; returns the commit's address.

    OSError: no token, no right, no network, the repository is there already, or the hub refused.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="agentgrpo")
    try:
        made = api.create_repo(repo, private=not public, exist_ok=exist_ok).repo_id
        sent = [CommitOperationAdd(name, file) for name, file in files.items()]
        return str(api.create_commit(made, sent, commit_message=message).commit_url)
    except Exception as error:  # of the library that it talks HTTP with, too
        said = " ".join(str(error).split())
        raise OSError(
            f"{api.endpoint}: {said}; a token that may write: `hf auth login` or HF_TOKEN; "
            "a repository that is there already: --exist-ok"
        ) from error


def main(arguments: list[str]) -> int:
    """Parse the command line, publish. Returns the exit status."""
    parser = parser_of("push", __doc__)
    parser.add_argument("run", type=Path, help="a run's folder (out_dir)")
    parser.add_argument("repo", help="OWNER/NAME on the hub; without OWNER, yours")
    parser.add_argument(
        "--checkpoint", default="last", metavar="WHICH", help="last (default), best, or a step"
    )
    parser.add_argument("--public", action="store_true", help="let everybody see it")
    parser.add_argument(
        "--exist-ok", action="store_true", help="add a commit to a repository that is there"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the card and the files; send nothing"
    )
    args = parser.parse_args(arguments)
    with report_errors() as outcome:
        folder, files = prepared(args.run, args.repo, args.checkpoint)
        card = files["README.md"]
        assert isinstance(card, bytes)
        print(f"{card.decode()}\n{folder} as {args.repo}: {', '.join(files)}", flush=True)  # noqa: T201
        if args.dry_run:
            print("nothing was sent")  # noqa: T201
        else:
            message = f"{folder.name} of a run of agentgrpo"
            address = upload(args.repo, files, message, public=args.public, exist_ok=args.exist_ok)
            print(address)  # noqa: T201
    return outcome.status

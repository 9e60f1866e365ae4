"""Publish a checkpoint of a run on the Hugging Face Hub, with a model card.

The repository is private unless --public is given. Published are the weights, model and tokenizer
files, and a card with the settings that shaped training (no paths, addresses or keys). The token is
that of `hf auth login` or HF_TOKEN; HF_ENDPOINT names another hub.
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
"""Suffixes of the published files."""
PUBLISHED = ("engine", "agent", "env", "rollout", "data", "reward", "learner", "loss")
"""Sections of the settings that the card shows."""
OPTIONS = ("system_prompt", "shots")
"""Keys of `options` that the card shows: others may hold addresses, keys and secrets."""


Files = dict[str, Path | bytes]
"""Files to publish, by their name on the hub: a path, or generated content."""


def collect_files(run: Path, repo: str, which: str = "last") -> tuple[Path, Files]:
    """The chosen checkpoint, and the files to publish with the card."""
    if not (run / "run.json").is_file():
        raise ValueError(f"{run}: no run.json, so this is not a run's folder (out_dir)")
    run_json = json.loads((run / "run.json").read_text())
    metrics = Chain(run / "metrics.jsonl", run_json["records"]["metrics.jsonl"])
    rows = [row for row, *_ in metrics]
    if metrics.faults:
        raise ValueError(f"{run}: {metrics.faults[0]}; `agentgrpo verify` lists all faults")
    adapter = run_json["config"]["learner"]["lora"]["rank"] > 0
    folder = _find_checkpoint(run, rows, which)
    remedy = "choose another one with --checkpoint STEP"
    checkpoint.require_whole(folder, adapter=adapter, remedy=remedy)
    files: Files = {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.suffix in KINDS and not path.name.startswith(("agentgrpo", "."))
    }
    base = strip_folder(run_json["base"])
    for name in ("config.json", "tokenizer_config.json", ADAPTER_CONFIG):
        if name in files:
            files[name] = _with_base(folder / name, base)
    card = make_card(repo, run_json, rows, checkpoint.step_of(folder), adapter=adapter)
    return folder, {**files, "README.md": card.encode()}


def _find_checkpoint(run: Path, rows: Sequence[Mapping[str, Any]], which: str) -> Path:
    saved = {checkpoint.step_of(path): path for path in run.glob(checkpoint.SAVED)}
    available = f"{run} has checkpoints of steps {', '.join(map(str, sorted(saved))) or '(none)'}"
    if which == "last" and saved:
        return saved[max(saved)]
    if which == "best":
        evaluated = [row for row in rows if row["step"] in saved and "eval/reward" in row]
        if not evaluated:
            raise ValueError(f"--checkpoint best: no checkpoint was evaluated; {available}")
        best = max(evaluated, key=lambda row: (row.get("eval/solved", 0), row["eval/reward"]))
        return saved[best["step"]]
    if not which.isdigit() or int(which) not in saved:
        raise ValueError(f"--checkpoint: expected last, best or a step, got {which!r}; {available}")
    return saved[int(which)]


def strip_folder(name: str) -> str:
    """The last part of a local path; any other name unchanged."""
    return Path(name).name if re.match(r"[/~.]", name) or Path(name).exists() else name


def _with_base(path: Path, base: str) -> bytes:
    """A JSON file of the checkpoint with the base model named as in the card, not by local path."""
    table = json.loads(path.read_text())
    names = {"_name_or_path", "name_or_path", "base_model_name_or_path"}
    table |= dict.fromkeys(names & table.keys(), base)
    return json.dumps(table, indent=2, ensure_ascii=False).encode()


def make_card(
    repo: str, run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], step: int, *,
    adapter: bool,
) -> str:  # fmt: skip
    """The README.md of a checkpoint, from run.json (`run`) and metrics.jsonl (`rows`)."""
    from huggingface_hub import ModelCardData

    base, config = strip_folder(run["base"]), run["config"]
    about = ModelCardData(
        base_model=base if "/" in base else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["agentgrpo", "grpo", "reinforcement-learning"],
    )
    origin = "LoRA adapter for" if adapter else "Fine-tuned from"
    evaluated = [row for row in rows if "eval/reward" in row and row["step"] <= step]
    results = [
        f"| {row['step']} | {row.get('eval/solved', '')} | {row['eval/reward']} |"
        for row in evaluated
    ]
    versions = [f"{name} {version}" for name, version in sorted(run["versions"].items())]
    lines = [
        f"---\n{about.to_yaml()}\n---",
        f"# {repo.rpartition('/')[2]}",
        f"{origin} {base}: step {step} of {config['steps']} of a GRPO run with agentgrpo.",
        "## Results",
        "\n".join(["| step | held-out solved | reward |", "|---|---|---|", *results]),
        "## Settings",
        "Training settings that differ from the defaults.",
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
        if public := {key: options[key] for key in OPTIONS if key in options}:
            changed["options"] = public
        values = {k: strip_folder(v) if isinstance(v, str) else v for k, v in changed.items()}
        if values:
            lines += ["", f"[{section}]", *(f"{key} = {toml(v)}" for key, v in values.items())]
    return "\n".join(lines)


def upload(repo: str, files: Files, message: str, *, public: bool, exist_ok: bool) -> str:
    """Create the repository and upload all files in one commit; returns the commit's URL.

    Raises:
        OSError: no token, no permission, no network, the repository exists, or the hub refused.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="agentgrpo")
    try:
        repo_id = api.create_repo(repo, private=not public, exist_ok=exist_ok).repo_id
        operations = [CommitOperationAdd(name, file) for name, file in files.items()]
        return str(api.create_commit(repo_id, operations, commit_message=message).commit_url)
    except Exception as error:  # also errors of the HTTP library, which change between versions
        reason = " ".join(str(error).split())
        raise OSError(
            f"{api.endpoint}: {reason}. For a token with write access: `hf auth login` or "
            "HF_TOKEN; for an existing repository: --exist-ok"
        ) from error


def main(arguments: list[str]) -> int:
    """Publish the checkpoint that the arguments name; returns the exit status."""
    parser = parser_of("push", __doc__)
    parser.add_argument("run", type=Path, help="a run's folder (out_dir)")
    parser.add_argument("repo", help="OWNER/NAME on the hub; OWNER defaults to you")
    parser.add_argument(
        "--checkpoint", default="last", metavar="WHICH", help="last (default), best, or a step"
    )
    parser.add_argument("--public", action="store_true", help="make the repository public")
    parser.add_argument(
        "--exist-ok", action="store_true", help="add a commit to an existing repository"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the card and the file names; upload nothing"
    )
    args = parser.parse_args(arguments)
    with report_errors() as outcome:
        folder, files = collect_files(args.run, args.repo, args.checkpoint)
        card = files["README.md"]
        assert isinstance(card, bytes)
        print(f"{card.decode()}\n{folder} as {args.repo}: {', '.join(files)}", flush=True)
        if args.dry_run:
            print("dry run, nothing was uploaded")
        else:
            message = f"{folder.name} of an agentgrpo run"
            address = upload(args.repo, files, message, public=args.public, exist_ok=args.exist_ok)
            print(address)
    return outcome.status

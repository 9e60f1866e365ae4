"""Publish a checkpoint of a run on the Hugging Face Hub, with a card that says how it was made.

The repository is private if not told otherwise. The optimizer's state, records and rollouts stay
here; so do secrets, values of the environment and paths of this machine. The token is the one that
`hf auth login` keeps, or HF_TOKEN; HF_ENDPOINT names another hub.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgrpo.card import make_card, require_private, without_place
from agentgrpo.command import told
from agentgrpo.config.arguments import parser_of
from agentgrpo.models.models import ADAPTER_CONFIG
from agentgrpo.proof.chain import Chain
from agentgrpo.run import checkpoint
from agentgrpo.run.folder import locked

KINDS = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Endings of a checkpoint's files that are published."""
NAMES = ("_name_or_path", "name_or_path", "base_model_name_or_path")
"""Keys of their JSON that may name a folder of this machine."""


@dataclass(frozen=True, slots=True)
class Upload:
    """What would be published."""

    repo: str
    folder: Path
    """The checkpoint."""
    files: dict[str, Path | bytes]
    """By their names there: a file, or what was made."""

    def __str__(self) -> str:
        sizes = {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }
        lines = [f"  {size:>14,} {name}" for name, size in sorted(sizes.items())]
        return "\n".join([f"{self.folder} as {self.repo}, bytes:", *lines])


def prepared(run: Path, repo: str, which: str = "last") -> Upload:
    """Choose, check and describe a checkpoint; nothing is sent.

    Args:
        run: a run's out_dir.
        repo: where to.
        which: "last", "best" (the most held-out tasks solved, else the highest held-out reward) or
            a step.

    Raises:
        ValueError, OSError: the run's records or the checkpoint are not whole, numbers of it are
            not finite, or there is no such checkpoint.
    """
    described, rows = _records(run)
    adapter = described["config"]["learner"]["lora"]["rank"] > 0
    folder = _chosen(run, rows, which)
    checkpoint.require_whole(folder, adapter=adapter, remedy="--checkpoint STEP chooses another")
    step = checkpoint.step_of(folder)
    done = [row for row in rows if _after(row) <= step]
    if max(map(_after, done), default=0) < step:
        raise ValueError(f"{run}/metrics.jsonl ends before step {step}, of which {folder} is")
    for row in done:
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{run}: step {row['step']}: {name} is {value}: the run is broken")
    files: dict[str, Path | bytes] = {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.suffix in KINDS and not path.name.startswith(("agentgrpo", "."))
    }
    texts = make_card(repo, described, rows, step, adapter=adapter)
    model = described["base"]
    for name in ("config.json", "tokenizer_config.json", ADAPTER_CONFIG):
        if name in files:
            texts[name] = _without_places(folder / name, model)
    for name, text in texts.items():
        require_private(name, text, run)
    return Upload(repo, folder, files | {name: text.encode() for name, text in texts.items()})


def _records(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What run.json says, and the rows of metrics.jsonl; both records are whole and unedited."""
    try:
        described = json.loads((run / "run.json").read_text())
        seals = {name: described["records"][name] for name in ("metrics.jsonl", "rollouts.jsonl")}
        described["config"]["learner"]["lora"]["rank"]
        described.setdefault("base", described["config"]["model"])  # runs before it was recorded
    except FileNotFoundError:
        raise ValueError(f"{run}: no run.json, so this is not a run's folder (out_dir)") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{run}/run.json: not the description of a run: {error!r}") from None
    metrics, rollouts = (Chain(run / name, seal) for name, seal in seals.items())
    rows = [row for row, *_ in metrics]
    for _ in rollouts:
        pass
    if faults := [*metrics.faults, *rollouts.faults]:
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise ValueError(f"{run}: {faults[0]}{more}: `agentgrpo verify` says what is wrong")
    return described, rows


def _after(row: dict[str, Any]) -> int:
    """The optimizer steps taken before a row was written: a training step's own is one."""
    return int(row["step"]) + any(name.startswith("learner/") for name in row)


def _chosen(run: Path, rows: list[dict[str, Any]], which: str) -> Path:
    saved = {checkpoint.step_of(path): path for path in run.glob(checkpoint.SAVED)}
    there = f"{run} has checkpoints of steps {', '.join(map(str, sorted(saved)))}"
    if not saved:
        raise ValueError(f"{run}: no checkpoint was saved")
    if which == "last":
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


def _without_places(path: Path, model: str) -> str:
    """A JSON file of a checkpoint that names the model it was made from as the hub does."""
    try:
        table = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    for key in NAMES:
        if isinstance(table.get(key), str) and without_place(table[key]) != table[key]:
            table[key] = without_place(model)
    return json.dumps(table, indent=2, ensure_ascii=False) + "\n"


def upload(ready: Upload, *, public: bool = False, exist_ok: bool = False) -> str:
    """Create the repository and send all files as one commit.

    Returns:
        The commit's address.

    Raises:
        OSError: no token, no right, no network, the repository is there already, or the hub
            refused; one line that says what to do.
        ImportError: huggingface_hub is missing, which comes with transformers.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="agentgrpo")
    created = False
    try:
        repo = api.create_repo(ready.repo, private=not public, exist_ok=exist_ok).repo_id
        created = True
        done = api.create_commit(
            repo,
            [CommitOperationAdd(name, file) for name, file in ready.files.items()],
            commit_message=f"{ready.folder.name} of a run of agentgrpo",
        )
    except Exception as error:
        said = _explained(error, ready.repo, str(api.endpoint))
        if said is None:
            raise
        left = "; the repository was made and is empty: --exist-ok goes on" if created else ""
        raise OSError(f"{said}{left}") from error
    return str(done.commit_url)


def _explained(error: BaseException | None, repo: str, endpoint: str) -> str | None:
    """What a failure of huggingface_hub means, in one line; None: it is none of these."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    login = "`hf auth login` or HF_TOKEN, with a token that may write"
    if isinstance(error, LocalTokenNotFoundError):
        return f"no token for {endpoint}: {login}"
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        if status in (401, 403):
            return f"{endpoint} does not let this token write {repo} ({status}): {login}"
        if status == 409:
            return f"{repo} is there already: --exist-ok adds a commit to it"
        said = " ".join((error.server_message or "").split())[:300]
        return f"{endpoint} answered {status} to {error.response.request.url.path}: {said}"
    library = type(error).__module__.partition(".")[0]  # another one from version to version
    if library in ("httpx", "httpx2", "requests") or isinstance(error, ConnectionError):
        return f"{endpoint} cannot be reached: {' '.join(str(error).split())[:300]}"
    if error is not None and error.__cause__ is not None:
        return _explained(error.__cause__, repo, endpoint)
    if isinstance(error, ValueError | RuntimeError | OSError):
        return f"{endpoint}: {' '.join(str(error).split())[:300]}"
    return None


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
    with told() as outcome:
        _push(args)
    return outcome.status


def _push(args: argparse.Namespace) -> None:
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    validate_repo_id(args.repo)
    if not args.run.is_dir():
        raise ValueError(f"{args.run}: no such folder")
    with locked(args.run):
        ready = prepared(args.run, args.repo, args.checkpoint)
        if args.dry_run:
            card = ready.files["README.md"]
            assert isinstance(card, bytes)
            print(f"{card.decode()}\n{ready}\nnothing was sent")  # noqa: T201
            return
        print(ready, flush=True)  # noqa: T201
        print(upload(ready, public=args.public, exist_ok=args.exist_ok))  # noqa: T201

"""Which program wrote a file of rollouts, and what it holds.

| written by | file | format from |
|---|---|---|
| TRL | `completions/completions_*.parquet` (log_completions) | TRL 1.16 |
| TRL | .jsonl of what a rollout_func returned (agentgrpo.audit.trl.recorded) | TRL 1.16 |
| verifiers | `results.jsonl`, and .jsonl of states (write_states) | verifiers 0.1.9 |
| verifiers, prime-rl | `traces.jsonl`: episodes or traces of verifiers.v1 | its source, 2026-08 |
| prime-rl | `token_exports/step_*/rank_*.jsonl` (enable_token_export) | its source, 2026-08 |
| Harbor | `trajectory.json` in ATIF | its RFC, ATIF-v1.4 to v1.7 |
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentgrpo.extras import import_optional
from agentgrpo.files import opened, read_json
from agentgrpo.foreign.trajectory import (
    Call,
    Origin,
    Piece,
    Trajectory,
    flat_row,
    float32,
    int32,
    joined,
    said,
    said_row,
)
from agentgrpo.run.atomic import cut, numbered_rows
from agentgrpo.types import Task

Row = Mapping[str, Any]
GLOBS = (
    "completions_*.parquet", "completions/completions_*.parquet", "results.jsonl",
    "**/token_exports/step_*/rank_*.jsonl", "**/traces.jsonl", "**/trajectory.json",
    "states.jsonl", "rollouts.jsonl",
)  # fmt: skip
"""Where files of rollouts lie in a folder, the first kind that is there."""
OURS = {"previous_hash", "records"}
"""Keys that lines of rollouts.jsonl and metrics.jsonl of ours have, and run.json."""
WHOLE = (".parquet", ".json")
"""Ends of names of files that are not of lines."""
TRL_COLUMNS = {"step", "prompt", "completion", "advantage"}


def is_ours(path: Path) -> bool:
    """Whether a path is the folder of a run of agentgrpo, which read() does not read."""
    return any((path / name).is_file() for name in ("run.json", "metrics.jsonl"))


def require_foreign(paths: Sequence[Path]) -> None:
    """That one of these may be another program's: only there --tokenizer is read.

    Raises:
        ValueError: all are runs of agentgrpo.
    """
    if all(map(is_ours, paths)):
        raise ValueError(
            f"--tokenizer: only another program's rollouts read it, and {paths[0]} is a run of "
            "agentgrpo, which has its own"
        )


def read(path: Path) -> tuple[str, list[Trajectory]]:
    """The program that wrote a file, or the files of a folder, and the rollouts in it.

    Raises:
        FileNotFoundError: there is nothing at this place.
        ValueError: no format of ours, or a line that is not of it; names file and line.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    files = [path] if path.is_file() else _files(path)
    full = [file for file in files if file.stat().st_size]  # a rank may have had nothing to write
    found = [_read_file(file) for file in full or files[:1]]
    program = found[0][0]
    return program, [each for _, several in found for each in several]


def left_out(path: Path) -> list[str]:
    """What read() leaves out of a file, or of the files of a folder, in words.

    Raises:
        FileNotFoundError, ValueError: as read().
    """
    files = [path] if path.is_file() else _files(path)
    said = (cut(file) for file in files if file.suffix not in WHOLE)
    return [line for line in said if line]


def _files(folder: Path) -> list[Path]:
    for pattern in GLOBS:
        if files := sorted(folder.glob(pattern)):
            return files
    raise ValueError(
        f"{folder}: no rollouts that are known here: expected run.json (agentgrpo), "
        "completions/completions_*.parquet or rollouts.jsonl (TRL), results.jsonl or states.jsonl "
        "(verifiers), traces.jsonl or token_exports/ (prime-rl) or trajectory.json (Harbor)"
    )


def _read_file(path: Path) -> tuple[str, list[Trajectory]]:
    if path.suffix == ".parquet":
        return "TRL's completions", [*_each(path, _parquet_rows(path), _of_trl)]
    rows: list[tuple[int, Any]]
    if path.suffix == ".json":
        rows = [(1, read_json(path))]
    else:
        rows = list(numbered_rows(path, growing=True))
    if not rows:
        raise ValueError(f"{path}: empty")
    for name, keys, reader in FORMATS:
        if isinstance(rows[0][1], dict) and rows[0][1].keys() >= keys:
            return name, [*_each(path, rows, reader)]
    if isinstance(rows[0][1], dict) and rows[0][1].keys() & OURS:
        raise ValueError(
            f"{path}: a file of a run of agentgrpo: give its folder, {path.parent}, which has "
            "run.json and metrics.jsonl too"
        )
    known = "; ".join(f"{name}: {', '.join(sorted(keys))}" for name, keys, _ in FORMATS)
    raise ValueError(f"{path}: its first record has not the keys of any format ({known})")


def _each(
    path: Path, rows: Sequence[tuple[int, Row]], reader: Callable[[Row, str], Iterator[Trajectory]]
) -> Iterator[Trajectory]:
    for number, row in rows:
        where = f"{path.name}:{number}"
        try:
            yield from reader(row, where)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: not of its format: {error!r}") from error


def _task(prompt: Any, name: object = None) -> Task:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    shown = tuple({"role": m.get("role", ""), "content": said(m)} for m in messages)
    key = json.dumps(shown) if name is None else str(name)
    return Task(id=key[:80], messages=shown, spec={"key": key})


def _conversation(prompt: Any, completion: Any) -> list[Piece]:
    if isinstance(prompt, str) and isinstance(completion, str):
        return [Piece(origin="prompt", text=prompt), Piece(origin="sampled", text=completion)]
    told = [*(_task(prompt).messages if isinstance(prompt, str) else prompt or [])]
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else None
    return said_row([*told, *(answer or completion or [])], len(told))


# TRL


def _parquet_rows(path: Path) -> list[tuple[int, Row]]:
    parquet = import_optional("pyarrow.parquet", str(path))
    with opened(path):
        table = parquet.read_table(path)
    if lacks := TRL_COLUMNS - set(table.column_names):
        raise ValueError(f"{path}: not TRL's completions: no column {', '.join(sorted(lacks))}")
    return list(enumerate(table.to_pylist(), start=1))


def _of_trl(row: Row, where: str) -> Iterator[Trajectory]:
    """A row of a completions table; ids are there if record_ids() put them there."""
    faults: list[tuple[str, str]] = []
    pieces = _conversation(row["prompt"], row["completion"])
    calls = []
    if row.get("completion_ids") is not None:
        text = row["completion"] if isinstance(row["completion"], str) else None
        if text is None and len(row["completion"]) == 1:
            text = row["completion"][0].get("content")
        calls = [Call(completion_ids=int32(row["completion_ids"]), text=text)]
    numbers = {
        name: value for name, value in row.items()
        if isinstance(value, int | float) and name not in TRL_COLUMNS and not math.isnan(value)
    }  # fmt: skip
    yield Trajectory(
        where=where, task=_task(row["prompt"]), rows=[pieces], calls=calls, step=row["step"],
        rewards=numbers, advantage=row["advantage"], faults=faults,
    )  # fmt: skip


def _of_rollout_func(row: Row, where: str) -> Iterator[Trajectory]:
    """What a rollout_func returned for a list of prompts."""
    keys = ["prompt_ids", "completion_ids", "logprobs"]
    keys += [key for key in ("env_mask", "prompt") if row.get(key) is not None]
    sizes = {key: len(row[key]) for key in keys}
    if len(set(sizes.values())) != 1:
        told = ", ".join(f"{key}: {size}" for key, size in sizes.items())
        raise ValueError(f"lists of different numbers of rollouts ({told})")
    masks, lists = row.get("env_mask"), [row[key] for key in keys[:3]]
    for number, (prompt, ids, logprobs) in enumerate(zip(*lists, strict=True)):
        faults: list[tuple[str, str]] = []
        mask = None if masks is None else masks[number]
        pieces = flat_row(prompt, ids, mask, {"logprobs": logprobs}, faults)
        yield Trajectory(
            where=f"{where} [{number}]", rows=[pieces], step=row.get("step", 0), faults=faults,
            task=_task(row["prompt"][number] if "prompt" in keys else [], str(prompt)),
            masked=mask is not None,
        )  # fmt: skip


# verifiers 0.1


def _of_results(row: Row, where: str) -> Iterator[Trajectory]:
    """A line of results.jsonl, with `trajectory` where states were written by write_states()."""
    faults: list[tuple[str, str]] = []
    pairs = []
    for turn, step in enumerate(row.get("trajectory") or []):
        tokens = step.get("tokens")
        if tokens is None:
            continue
        ids, logprobs = tokens["completion_ids"], tokens["completion_logprobs"]
        if len(logprobs) != len(ids):
            fault = f"turn {turn}: {len(logprobs)} logprobs for {len(ids)} tokens"
            faults.append(("ids", fault))
        if any(tokens["prompt_mask"]):
            faults.append(
                ("mask", f"turn {turn}: {sum(tokens['prompt_mask'])} tokens of its prompt")
            )
        if len(tokens["completion_mask"]) != len(ids):
            fault = f"turn {turn}: a mask of {len(tokens['completion_mask'])} for {len(ids)} tokens"
            faults.append(("mask", fault))
        usage = step.get("usage") or {}
        messages = step.get("completion") or []
        text = messages if isinstance(messages, str) else None
        if text is None and len(messages) == 1 and not messages[0].get("tool_calls"):
            text = messages[0].get("content")
        call = Call(
            prompt_ids=int32(tokens["prompt_ids"]), completion_ids=int32(ids), text=text,
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
        )  # fmt: skip
        pairs.append((call, float32(logprobs) if len(logprobs) == len(ids) else None))
    yield Trajectory(
        where=where, calls=[call for call, _ in pairs], masked=bool(pairs), faults=faults,
        rows=list(joined(pairs)) or [_conversation(row["prompt"], row["completion"])],
        task=_task(row["prompt"], row["example_id"]), split=str(row.get("task", "eval")),
        rewards={"reward": row["reward"] or 0.0}, advantage=row.get("advantage"),
    )  # fmt: skip


def write_states(outputs: Row, path: Path | str) -> None:
    """Write verifiers' GenerateOutputs with their tokens, one line for each state.

    results.jsonl has no tokens, and verifiers itself cannot write its `trajectory` column.

    Args:
        outputs: of vf.Environment.generate().
        path: of a .jsonl file for `agentgrpo verify` and `agentgrpo view`.
    """
    lines = []
    for state in outputs["state"]:
        keys = ("example_id", "task", "prompt", "completion", "reward", "advantage")
        line = {key: state.get(key) for key in keys}
        steps = []
        for step in state["trajectory"]:
            usage = getattr(step.get("response"), "usage", None)
            counts = None if usage is None else usage.model_dump(mode="json", exclude_none=True)
            kept = {key: step.get(key) for key in ("prompt", "completion", "tokens", "reward")}
            steps.append({**kept, "usage": counts})
        lines.append(json.dumps({**line, "trajectory": steps}, default=_plain) + "\n")
    Path(path).write_text("".join(lines))


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else str(value)


# verifiers.v1 and prime-rl


def _of_episode(row: Row, where: str) -> Iterator[Trajectory]:
    work = (row.get("run") or {}).get("work") or {}
    for number, trace in enumerate(row["traces"]):
        for trajectory in _of_trace(trace, f"{where} trace {number}"):
            trajectory.split = work.get("type", "train")
            trajectory.step = work.get("step") or 0
            if group := (row.get("group") or {}).get("id"):
                trajectory.task = _task(trajectory.task.messages, group)
            yield trajectory


def _of_trace(row: Row, where: str) -> Iterator[Trajectory]:
    """A message graph: each path from the root to a leaf is a sequence that is trained on."""
    nodes = row["nodes"]
    faults: list[tuple[str, str]] = []
    pieces = [list(_of_node(node, f"node {n}", faults)) for n, node in enumerate(nodes)]
    parents = {node.get("parent") for node in nodes}
    paths = []
    for leaf in (n for n in range(len(nodes)) if n not in parents):
        path = list[int]()
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = nodes[at].get("parent")
        paths.append(path[::-1])
    rows = [[piece for n in path for piece in pieces[n]] for path in paths]
    for row_ in rows:
        first = next((i for i, p in enumerate(row_) if p.origin == "sampled"), len(row_))
        row_[:first] = [Piece(origin="prompt", ids=p.ids, text=p.text) for p in row_[:first]]
    data = (row.get("task") or {}).get("data") or {}
    rewards = {n: r["score"] * r.get("weight", 1.0)
               for n, r in (row.get("rewards") or {}).items() if r}  # fmt: skip
    yield Trajectory(
        where=where, rows=rows, calls=list(_calls_of(row, paths)), faults=faults, rewards=rewards,
        masked=any(p.ids is not None for r in rows for p in r),
        task=_task(data.get("prompt") or [], (row.get("task") or {}).get("key")),
    )  # fmt: skip


def _of_node(node: Row, name: str, faults: list[tuple[str, str]]) -> Iterator[Piece]:
    text = f"[{node['message']['role']}]\n{said(node['message'])}\n"
    ids, mask, logprobs = (node.get(key) or [] for key in ("token_ids", "mask", "logprobs"))
    if not ids:
        yield Piece(origin="sampled" if node.get("sampled") else "given", text=text)
        return
    if len(mask) != len(ids):
        faults.append(("mask", f"{name}: a mask of {len(mask)} for {len(ids)} tokens"))
        return
    if any(mask) and not node.get("sampled"):
        role = node["message"]["role"]
        faults.append(("mask", f"{name}: {sum(mask)} tokens of a {role} message nobody sampled"))
    if len(logprobs) != sum(mask):
        fault = f"{name}: {len(logprobs)} logprobs for {sum(mask)} sampled tokens"
        faults.append(("ids", fault))
    said_by = iter(logprobs if len(logprobs) == sum(mask) else [None] * sum(mask))
    spread = [next(said_by) if own else None for own in mask]
    yield from flat_row([], ids, mask, {"logprobs": spread}, faults)[1:]


def _calls_of(row: Row, paths: Sequence[Sequence[int]]) -> Iterator[Call]:
    """The engine's counts, beside the tokens of the node that the call made."""
    nodes = row["nodes"]
    for call in row.get("calls") or []:
        at, usage = call.get("node"), call.get("usage")
        path = next((p for p in paths if at in p), None)
        if usage is None or path is None or not nodes[at].get("token_ids"):
            continue
        before = [nodes[n]["token_ids"] for n in path[: path.index(at)]]
        own = nodes[at]["mask"]
        scaffold = own.index(True) if True in own else len(own)
        ids = nodes[at]["token_ids"]
        yield Call(
            prompt_ids=int32(i for part in [*before, ids[:scaffold]] for i in part),
            completion_ids=int32(ids[scaffold:]),
            prompt_tokens=usage["prompt_tokens"] + (usage.get("cached_input_tokens") or 0),
            completion_tokens=usage["completion_tokens"],
            derived=True,
        )


def _of_export(row: Row, where: str) -> Iterator[Trajectory]:
    """A sequence as prime-rl's trainer saw it; all lists are of the same tokens."""
    ids, mask = row["token_ids"], row["loss_mask"]
    first = mask.index(True) if True in mask else len(mask)
    faults: list[tuple[str, str]] = []
    names = {
        "logprobs": "inference_logprobs",
        "learner": "trainer_logprobs",
        "entropies": "entropy",
    }
    streams = {name: row.get(key) for name, key in names.items()}
    behind = {name: None if v is None else v[first:] for name, v in streams.items()}
    pieces = flat_row(ids[:first], ids[first:], mask[first:], behind, faults)
    own = [a for a, m in zip(row["advantages"], mask, strict=True) if m]
    yield Trajectory(
        where=where, rows=[pieces], masked=True, faults=faults, step=row["step"],
        task=_task([], f"{row.get('env_name')} {ids[:first]}"), advantage=own[0] if own else None,
    )  # fmt: skip


# Harbor


def _of_atif(row: Row, where: str) -> Iterator[Trajectory]:
    """An ATIF trajectory, and those of the agents below it."""
    if not str(row["schema_version"]).startswith("ATIF-v1."):
        raise ValueError(f"schema_version {row['schema_version']!r}, not ATIF-v1.x")
    faults: list[tuple[str, str]] = []
    pieces: list[Piece] = []
    pairs = []
    calls = []
    for step in row["steps"]:
        metrics = step.get("metrics") or {}
        ids, logprobs = metrics.get("completion_token_ids"), metrics.get("logprobs")
        name = f"step {step['step_id']}"
        if ids is not None and logprobs is not None and len(ids) != len(logprobs):
            faults.append(("ids", f"{name}: {len(logprobs)} logprobs for {len(ids)} tokens"))
            logprobs = None
        numbers = None if ids is None or logprobs is None else float32(logprobs)
        text = said({"content": step["message"], "tool_calls": step.get("tool_calls")})
        # copied from the trajectory before, or made by no model (ATIF-v1.5, v1.7): not sampled here
        copied = step.get("is_copied_context") or step.get("llm_call_count") == 0
        if step["source"] == "agent" and not copied:
            prompt = metrics.get("prompt_token_ids")
            plain = isinstance(step["message"], str) and not step.get("tool_calls")
            once = step.get("llm_call_count") in (None, 1)  # else the counts are sums
            call = Call(
                prompt_ids=None if prompt is None else int32(prompt),
                completion_ids=None if ids is None else int32(ids),
                prompt_tokens=metrics.get("prompt_tokens") if once else None,
                completion_tokens=metrics.get("completion_tokens") if once else None,
                text=step["message"] if plain and not step.get("reasoning_content") else None,
            )
            calls.append(call)
            if prompt is not None and ids is not None:
                pairs.append((call, numbers))
            pieces.append(
                Piece(origin="sampled", ids=call.completion_ids, text=f"{text}\n", logprobs=numbers)
            )
        else:
            first = not any(piece.origin == "sampled" for piece in pieces)
            origin: Origin = "prompt" if first else "given"
            pieces.append(Piece(origin=origin, text=f"[{step['source']}]\n{text}\n"))
        pieces += [
            Piece(origin="given", text=f"[tool]\n{said(result)}\n")
            for result in (step.get("observation") or {}).get("results", [])
            if result.get("content")
        ]
    whole = len(pairs) == len(calls) > 0
    told = [{"role": s["source"], "content": said({"content": s["message"]})}
            for s in row["steps"] if s["source"] != "agent"]  # fmt: skip
    yield Trajectory(
        where=where, rows=list(joined(pairs)) if whole else [pieces], calls=calls, faults=faults,
        task=_task(told[:2], row.get("session_id") or row.get("trajectory_id")), split="eval",
    )  # fmt: skip
    for number, below in enumerate(row.get("subagent_trajectories") or []):
        yield from _of_atif(below, f"{where} subagent {number}")


FORMATS: tuple[tuple[str, set[str], Callable[[Row, str], Iterator[Trajectory]]], ...] = (
    ("ATIF", {"schema_version", "steps", "agent"}, _of_atif),
    ("prime-rl's token export", {"token_ids", "loss_mask", "inference_logprobs"}, _of_export),
    ("episodes of verifiers.v1", {"traces"}, _of_episode),
    ("traces of verifiers.v1", {"nodes"}, _of_trace),
    ("outputs of a rollout_func", {"prompt_ids", "completion_ids", "logprobs"}, _of_rollout_func),
    ("verifiers' results", {"example_id", "prompt", "completion", "reward"}, _of_results),
)
"""Name, the keys that its records have, and who reads one."""

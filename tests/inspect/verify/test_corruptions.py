"""Changes and removes every field of a real record: verify detects it, or NOTES says why not.

Each change is tried twice: as an edit of the files, and with all hashes recomputed, so that only
the consistency of the fields can reveal it.
"""

from __future__ import annotations

import copy
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.inspect.verify import verify
from agentgrpo.records.metrics import RunLog
from agentgrpo.records.rollouts import read_rollout
from agentgrpo.types import Group, Rollout, Status, Treatment
from tests.inspect.verify.recorded import NAMES, Files, chained, record

BROKEN = "a rollout with an infrastructure error is neither trained on nor summed up"
TIMES = "seconds of this machine, different in every run"
NOTES: dict[str, dict[str, str]] = {
    "rollouts answer": {
        r"\(learned\)|\(unlearned\)": "a wrong answer stays wrong",
        r"\(broken\)": BROKEN,
    },
    "rollouts error": {"change error": "free text"},
    "rollouts feedback": {"change feedback": "free text of the environment"},
    "rollouts stats": {r"\(broken\)": BROKEN},
    "rollouts segments": {
        r"logprobs\[\] .*(unlearned|broken)": "the learner never scored the token, so there is "
        "nothing to compare with; nothing is trained on it",
    },
    "rollouts span_rewards": {
        r"change span_rewards\[\]\.name": "chosen by the environment; GDPO reads it",
    },
    "rollouts timings": {"": TIMES},
    "metrics learner": {
        r"/(loss|grad_norm)$": "needs the weights to be computed again",
        r"/packed_tokens$": "how often a shared prefix is repeated is the learner's choice",
        r"/seconds$": TIMES,
    },
    "metrics rollout": {
        "_s$": TIMES,
        r"/(engine_steps|cached_tokens|retries|diverged_forks)$": "recorded only once",
    },
    "metrics time": {"": TIMES},
}
"""Why verify misses a change if all hashes are recomputed, by part of the record."""
PARTS = sorted(
    [f"rollouts {f.name}" for f in fields(Rollout) if f.metadata.get("recorded", True)]
    + [f"rollouts {name}" for name in ("step", "split", "group", "index")]
    + [f"metrics {area}" for area in ("step", "rollout", "learner", "engine", "time", "eval")]
)

PER_FIELD = 2
"""Changes tried per field, sampled from all rollouts."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A run whose rollouts have many statuses."""
    folder = tmp_path_factory.mktemp("run")
    record(folder, seed=SEED)
    return Files.of(folder)


SEED = 3


def faults_in(files: Files, folder: Path, *, forged: bool) -> list[str]:
    files.write(folder, forged=forged)
    try:
        return verify.verify_run(folder).faults
    except (ValueError, FileNotFoundError) as error:
        return [f"error: {error}"]


Change = tuple[str, Callable[[Any], None]]
"""A label, and the function that changes a copy of the row."""


def changes_of(row: Any) -> Iterator[Change]:
    """Each leaf changed, each key removed."""
    for path, value in walk(row):
        parent, key = path[:-1], path[-1]
        if key in ("previous_hash", "rollouts_hash"):
            continue  # the chain itself
        name = "".join("[]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
        if isinstance(key, str):

            def remove(copied: Any, p: Any = parent, k: Any = key) -> None:
                at(copied, p).pop(k)

            yield f"remove {name}", remove
        for other in others(key, value, at(row, parent)):

            def set_to(copied: Any, p: Any = parent, k: Any = key, v: Any = other) -> None:
                at(copied, p)[k] = v

            yield f"change {name}", set_to


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def walk(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every nested value; of lists of numbers the first and the last."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    keys = list(items)
    if isinstance(value, list) and value and isinstance(value[0], int | float):
        keys = [keys[0], keys[-1]]
    for key, item in keys:
        yield (*path, key), item
        if isinstance(item, dict | list):
            yield from walk(item, (*path, key))


def others(key: Any, value: Any, beside: Any) -> Iterator[Any]:
    """Other possible values of a field."""
    if key == "status":
        yield from (str(status) for status in Status if status != value)
    elif key == "treatment":
        yield from (str(treatment) for treatment in Treatment if treatment != value)
    elif key == "split":
        yield "train" if value == "heldout" else "heldout"
    elif key == "finish_reason":
        yield from ({"stop", "length", "abort"} - {value})
    elif key == "logprobs":
        yield [-1.0] * len(beside["token_ids"]) if value is None else None
    elif value is None:
        yield {"parent": 0, "forked_at": 4, "answer": "42", "error": "it broke"}.get(key, [0.25])
    elif key in ("answer", "error"):
        yield from (None, f"{value}7")
    elif isinstance(value, str):
        yield f"{value}7"
    elif isinstance(value, int) and not isinstance(value, bool):
        yield from (value + 1, value + 0.5)
    elif isinstance(value, float):
        yield from (value - 0.25, value + 0.25)
    elif isinstance(value, list):
        yield value[:-1] if value else [{}]


def kind_of(row: dict[str, Any]) -> str:
    if row["status"] == "infra_error":
        return "broken"
    return "unlearned" if row["learner_logprobs"] is None else "learned"


Corruption = tuple[str, Callable[[Files], Files]]
"""A label, and the function that returns changed files."""


@pytest.fixture(scope="module")
def corruptions(files: Files) -> dict[str, list[Corruption]]:
    """By part of the record: PER_FIELD changes per field and kind of rollout."""
    drawn: dict[tuple[str, str], list[Corruption]] = defaultdict(list)
    for name in NAMES:
        for number, row in enumerate(getattr(files, name)):
            kind = f" ({row['split']}) ({kind_of(row)})" if name == "rollouts" else ""
            for what, change in changes_of(row):

                def apply(files: Files, n: str = name, i: int = number, c: Any = change) -> Files:
                    changed, row = files.with_row(n, i)
                    c(row)
                    return changed

                part = re.split(r"[./\[]", what.split()[1])[0]
                label = f"{name} {what}{kind}"
                drawn[f"{name} {part}", label].append((label, apply))
    chosen: dict[str, list[Corruption]] = defaultdict(list)
    for (part, label), places in drawn.items():  # own seeds: a new field does not change others
        rng = random.Random(label)
        noted = any(re.search(note, label) for note in NOTES.get(part, {}))
        amount = 4 * PER_FIELD if noted else PER_FIELD  # notes apply to some rows only
        chosen[part] += rng.sample(places, min(amount, len(places)))
    return chosen


def test_corruptions_cover_every_part(corruptions: dict[str, list[Corruption]]) -> None:
    assert sorted(corruptions) == PARTS
    assert sum(map(len, corruptions.values())) > 800


def passed(files: Files, tried: Iterable[Corruption], folder: Path, *, forged: bool) -> set[str]:
    """The corruptions that verify does not detect."""
    missed = set()
    for what, apply in tried:
        if not faults_in(apply(files), folder, forged=forged):
            missed.add(what)
    return missed


def test_unchanged_run_passes(files: Files, tmp_path: Path) -> None:
    """As recorded, and with hashes recomputed by this test's own code."""
    assert faults_in(files, tmp_path, forged=False) == []
    assert faults_in(files.copy(), tmp_path, forged=True) == []
    whole = {"learned", "unlearned", "broken"}
    assert {kind_of(row) for row in files.rollouts} == whole
    assert len({row["status"] for row in files.rollouts}) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_change_is_detected_with_recomputed_hashes(
    files: Files, corruptions: dict[str, list[Corruption]], tmp_path: Path, part: str
) -> None:
    missed = passed(files, corruptions[part], tmp_path, forged=True)
    notes = NOTES.get(part, {})
    assert {what for what in missed if not any(re.search(note, what) for note in notes)} == set()
    proven = [note for note in notes if not any(re.search(note, what) for what in missed)]
    assert proven == [], "verify detects these, remove the notes"


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_edit_of_any_field_breaks_the_chain(
    files: Files, corruptions: dict[str, list[Corruption]], tmp_path: Path, part: str
) -> None:
    """All changes that only the chain reveals, and some others."""
    noted = [c for c in corruptions[part] if any(re.search(n, c[0]) for n in NOTES.get(part, {}))]
    assert passed(files, [*noted, *corruptions[part][:5]], tmp_path, forged=False) == set()


# --- lines


def last_turn(files: Files) -> None:
    """Delete a turn with all its traces in the same line."""
    row = next(r for r in files.rollouts if len(r["turns"]) > 1 and r["learner_logprobs"])
    while row["segments"].pop()["logprobs"] is None:
        pass
    row["segments"].pop()
    row["turns"].pop()
    row["stats"]["turns"] -= 1
    for name in ("learner_logprobs", "entropies"):
        row[name] = row[name][: len(row["segments"])]


def swapped(key: str) -> Callable[[Files], None]:
    """Swap a field between two rollouts of a group."""

    def swap(files: Files) -> None:
        for a in files.rollouts:
            for b in files.rollouts:
                same = all(a[name] == b[name] for name in ("step", "split", "group"))
                if same and a["split"] == "train" and a[key] != b[key]:
                    a[key], b[key] = b[key], a[key]
                    return

    return swap


def set_first(which: Callable[[Any], bool], **values: Any) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        next(row for row in files.rollouts if which(row)).update(values)

    return change


def renumber(files: Files) -> None:
    for row in (*files.rollouts, *files.metrics):
        row["step"] += 1


def without(name: str, which: Callable[[Any], bool]) -> Callable[[Files], None]:
    """Remove all matching lines."""

    def change(files: Files) -> None:
        setattr(files, name, [row for row in getattr(files, name) if not which(row)])

    return change


def of_group(row: Any) -> bool:
    return bool((row["step"], row["split"], row["group"]) == (1, "train", 1))


LINES: dict[str, Callable[[Files], Any]] = {
    "the first line removed": lambda f: f.rollouts.pop(0) and None,
    "the last line removed": lambda f: f.rollouts.pop() and None,
    "a line removed": lambda f: f.rollouts.pop(9) and None,
    "a line twice": lambda f: f.rollouts.insert(9, copy.deepcopy(f.rollouts[9])),
    "two lines swapped": lambda f: f.rollouts.insert(9, f.rollouts.pop(8)),
    "the order reversed": lambda f: f.rollouts.reverse(),
    "a group removed": without("rollouts", of_group),
    "a step removed": without("rollouts", lambda row: row["step"] == 1),
    "a step removed from both": lambda f: [
        without(name, lambda row: row["step"] == 1)(f) for name in NAMES
    ] and None,
    "the evaluations removed": without("rollouts", lambda row: row["split"] == "heldout"),
    "rollouts emptied": without("rollouts", lambda row: True),
    "metrics emptied": without("metrics", lambda row: True),
    "a line of metrics removed": lambda f: f.metrics.pop(1) and None,
    "a line of metrics twice": lambda f: f.metrics.insert(1, copy.deepcopy(f.metrics[1])),
    "lines of metrics swapped": lambda f: f.metrics.insert(1, f.metrics.pop(2)),
    "steps counted from 1": renumber,
    "a last turn and its account deleted": last_turn,
    "rewards swapped": swapped("rewards"),
    "advantages swapped": swapped("advantage"),
    "trained, but marked as masked": set_first(lambda r: r["learner_logprobs"], treatment="mask"),
    "a reward of 99": set_first(lambda r: r["rewards"], rewards={"answer": 99.0, "format": 0.1}),
    "a falsified mean": lambda f: f.metrics[1].update({"rollout/solved": 0.99}),
}  # fmt: skip


@pytest.mark.parametrize("what", LINES)
@pytest.mark.parametrize("forged", [False, True], ids=["edited", "rehashed"])
def test_missing_or_moved_lines_are_detected(
    files: Files, tmp_path: Path, what: str, forged: bool
) -> None:
    copied = files.copy()
    LINES[what](copied)
    assert faults_in(copied, tmp_path, forged=forged)


def test_wrong_rollouts_hash_is_detected(files: Files, tmp_path: Path) -> None:
    """With all other hashes recomputed."""
    named = [row["rollouts_hash"] for row in files.metrics]
    assert len(set(named)) == len(named) == 5
    for number in range(5):
        changed, row = files.with_row("metrics", number)
        row["rollouts_hash"] = named[number - 1]
        changed.metrics, seal = chained(changed.metrics)
        seals = {**files.described["records"], "metrics.jsonl": seal}
        changed.described = {**files.described, "records": seals}
        (fault,) = faults_in(changed, tmp_path, forged=False)
        assert "rollouts_hash in metrics.jsonl is of another rollout" in fault


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [-1, -200, 1, 0], ids=lambda size: f"[:{size}]")
def test_truncated_file_is_detected(files: Files, tmp_path: Path, name: str, size: int) -> None:
    files.write(tmp_path, forged=False)
    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(path.read_bytes()[:size])
    assert verify.verify_run(tmp_path).faults


def test_rehashed_run_without_last_step_is_a_note(files: Files, tmp_path: Path) -> None:
    copied = files.copy()
    for name in NAMES:
        without(name, lambda row: row["step"] >= 1)(copied)
    assert faults_in(copied, tmp_path, forged=False)
    assert faults_in(copied, tmp_path, forged=True) == []
    (note,) = verify.verify_run(tmp_path).notes
    assert note.startswith("the run has not come to its end: 1 of 2 steps are recorded")


def test_removed_evaluation_passes_only_if_rehashed(files: Files, tmp_path: Path) -> None:
    """A run resumed with another eval_every looks the same; both files must agree."""

    def between(row: Any) -> bool:
        return row["step"] == 1 and ("eval/rollouts" in row or row.get("split") == "heldout")

    both = files.copy()
    for name in NAMES:
        single = files.copy()
        without(name, between)(single)
        assert faults_in(single, tmp_path, forged=True)
        without(name, between)(both)
    assert faults_in(both, tmp_path, forged=False)
    assert faults_in(both, tmp_path, forged=True) == []


def test_killed_run_gives_notes_and_no_faults(files: Files, tmp_path: Path) -> None:
    """Rollouts after the last line of metrics.jsonl, the last one truncated."""
    files.write(tmp_path, forged=False)
    assert len(verify.verify_run(tmp_path).notes) == 0
    log = RunLog(tmp_path)
    rows = [row for row in files.rollouts if of_group(row)]
    rollouts = [read_rollout(dict(row)) for row in rows]
    log.rollouts(2, [Group(task=rollouts[0].task, rollouts=rollouts)])
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 2, "spl')
    report = verify.verify_run(tmp_path)
    assert report.faults == []
    assert len(report.notes) == 2


def test_resumed_run_continues_the_chain(files: Files, tmp_path: Path) -> None:
    """A checkpoint stores the size and the last line's hash of each file."""
    files.write(tmp_path, forged=False)
    original = {name: (tmp_path / f"{name}.jsonl").read_bytes() for name in NAMES}
    log = RunLog(tmp_path)
    offsets = log.offsets()
    log.write(3, eval={"solved": 1.0})
    assert verify.verify_run(tmp_path).faults
    again = RunLog(tmp_path)
    again.truncate_to(offsets)
    assert verify.verify_run(tmp_path).faults == []
    assert {name: (tmp_path / f"{name}.jsonl").read_bytes() for name in NAMES} == original
    *before, last = original["metrics"].splitlines(keepends=True)
    edited = last.replace(b'"eval/rollouts": 3', b'"eval/rollouts": 4')
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*before, edited]))
    with pytest.raises(ValueError, match="was changed after the checkpoint was saved"):
        again.truncate_to(offsets)

"""Every field of a real record is changed and removed in turn: verify finds it, or a note says why.

Twice: by somebody who edits the files, and by somebody who then makes the chain of hashes again, so
that what the fields say of one another is proven by itself.
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

BROKEN = "of a rollout that the machine broke nothing is trained on or summed up"
TIMES = "seconds of this machine; no two runs agree on them"
NOTES: dict[str, dict[str, str]] = {
    "rollouts answer": {
        r"\(learned\)|\(unlearned\)": "of a wrong answer, that it is wrong",
        r"\(broken\)": BROKEN,
    },
    "rollouts error": {"change error": "the machine's own words"},
    "rollouts feedback": {"change feedback": "the world's own words"},
    "rollouts stats": {r"\(broken\)": BROKEN},
    "rollouts segments": {
        r"logprobs\[\] .*(unlearned|broken)": "a token that the learner never scored has one "
        "witness alone; nothing is trained on it",
    },
    "rollouts span_rewards": {
        r"change span_rewards\[\]\.name": "a world's own word for what it gave; GDPO reads it",
    },
    "rollouts timings": {"": TIMES},
    "metrics learner": {
        r"/(loss|grad_norm)$": "needs the weights to be computed again",
        r"/packed_tokens$": "how often a shared prefix was laid out is the learner's choice",
        r"/seconds$": TIMES,
    },
    "metrics rollout": {
        "_s$": TIMES,
        r"/(engine_steps|cached_tokens|retries|diverged_forks)$": "what the engine did besides "
        "what is recorded has no second account",
    },
    "metrics time": {"": TIMES},
}
"""What may be changed by somebody who makes the chain again, by part of the record, and why."""
PARTS = sorted(
    [f"rollouts {f.name}" for f in fields(Rollout) if f.metadata.get("recorded", True)]
    + [f"rollouts {name}" for name in ("step", "split", "group", "index")]
    + [f"metrics {area}" for area in ("step", "rollout", "learner", "engine", "time", "eval")]
)

PER_FIELD = 2
"""Places of each field that are tried, drawn from all rollouts."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Of a run in which rollouts ended in many ways."""
    folder = tmp_path_factory.mktemp("run")
    record(folder, seed=SEED)
    return Files.of(folder)


SEED = 3


def found(files: Files, folder: Path, *, forged: bool) -> list[str]:
    """The faults that verify finds in them."""
    files.write(folder, forged=forged)
    try:
        return verify.verify_run(folder).faults
    except (ValueError, FileNotFoundError) as error:
        return [f"error: {error}"]


Change = tuple[str, Callable[[Any], None]]
"""What is changed, and the function that changes it in a copy of the row."""


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
    """Every value below: of lists of numbers, the first and the last."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    keys = list(items)
    if isinstance(value, list) and value and isinstance(value[0], int | float):
        keys = [keys[0], keys[-1]]
    for key, item in keys:
        yield (*path, key), item
        if isinstance(item, dict | list):
            yield from walk(item, (*path, key))


def others(key: Any, value: Any, beside: Any) -> Iterator[Any]:
    """Other values that a field of this name might have."""
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
"""What is changed, and the function that gives the files with it."""


@pytest.fixture(scope="module")
def corruptions(files: Files) -> dict[str, list[Corruption]]:
    """By part of the record, PER_FIELD of each field and kind of rollout."""
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
    for (part, label), places in drawn.items():  # drawn apart: a new field moves no other's
        rng = random.Random(label)
        noted = any(re.search(note, label) for note in NOTES.get(part, {}))
        amount = 4 * PER_FIELD if noted else PER_FIELD  # what is a note in some rows alone
        chosen[part] += rng.sample(places, min(amount, len(places)))
    return chosen


def test_every_part_of_a_record_is_corrupted(corruptions: dict[str, list[Corruption]]) -> None:
    assert sorted(corruptions) == PARTS
    assert sum(map(len, corruptions.values())) > 800


def passed(files: Files, tried: Iterable[Corruption], folder: Path, *, forged: bool) -> set[str]:
    """The corruptions in which verify sees nothing wrong."""
    missed = set()
    for what, apply in tried:
        if not found(apply(files), folder, forged=forged):
            missed.add(what)
    return missed


def test_nothing_is_wrong_with_it(files: Files, tmp_path: Path) -> None:
    """Neither as it was recorded, nor with the chain made again: the test's chain is verify's."""
    assert found(files, tmp_path, forged=False) == []
    assert found(files.copy(), tmp_path, forged=True) == []
    whole = {"learned", "unlearned", "broken"}
    assert {kind_of(row) for row in files.rollouts} == whole
    assert len({row["status"] for row in files.rollouts}) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_what_fields_say_of_one_another_is_proven_without_the_chain(
    files: Files, corruptions: dict[str, list[Corruption]], tmp_path: Path, part: str
) -> None:
    missed = passed(files, corruptions[part], tmp_path, forged=True)
    notes = NOTES.get(part, {})
    assert {what for what in missed if not any(re.search(note, what) for note in notes)} == set()
    proven = [note for note in notes if not any(re.search(note, what) for what in missed)]
    assert proven == [], "these notes are none"


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_an_edit_of_any_field_breaks_the_chain(
    files: Files, corruptions: dict[str, list[Corruption]], tmp_path: Path, part: str
) -> None:
    """Of those that the fields themselves do not prove, and some that they do."""
    noted = [c for c in corruptions[part] if any(re.search(n, c[0]) for n in NOTES.get(part, {}))]
    assert passed(files, [*noted, *corruptions[part][:5]], tmp_path, forged=False) == set()


# --- lines


def last_turn(files: Files) -> None:
    """Delete a turn together with everything that tells of it in its own line."""
    row = next(r for r in files.rollouts if len(r["turns"]) > 1 and r["learner_logprobs"])
    while row["segments"].pop()["logprobs"] is None:
        pass
    row["segments"].pop()
    row["turns"].pop()
    row["stats"]["turns"] -= 1
    for name in ("learner_logprobs", "entropies"):
        row[name] = row[name][: len(row["segments"])]


def swapped(key: str) -> Callable[[Files], None]:
    """Two rollouts of a group exchange a field in which they differ."""

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
    """All such lines are gone."""

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
    "trained, said to be masked": set_first(lambda r: r["learner_logprobs"], treatment="mask"),
    "a reward of 99": set_first(lambda r: r["rewards"], rewards={"answer": 99.0, "format": 0.1}),
    "a falsified mean": lambda f: f.metrics[1].update({"rollout/solved": 0.99}),
}  # fmt: skip


@pytest.mark.parametrize("what", LINES)
@pytest.mark.parametrize("forged", [False, True], ids=["edited", "chain made again"])
def test_lines_are_all_there_and_in_order(
    files: Files, tmp_path: Path, what: str, forged: bool
) -> None:
    copied = files.copy()
    LINES[what](copied)
    assert found(copied, tmp_path, forged=forged)


def test_each_line_of_metrics_names_its_own_last_rollout(files: Files, tmp_path: Path) -> None:
    """The rest made again: both files follow, line by line, and are the ones of run.json."""
    named = [row["rollouts_hash"] for row in files.metrics]
    assert len(set(named)) == len(named) == 5
    for number in range(5):
        changed, row = files.with_row("metrics", number)
        row["rollouts_hash"] = named[number - 1]
        changed.metrics, seal = chained(changed.metrics)
        seals = {**files.described["records"], "metrics.jsonl": seal}
        changed.described = {**files.described, "records": seals}
        (fault,) = found(changed, tmp_path, forged=False)
        assert "metrics.jsonl names another last rollout" in fault


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("left", [-1, -200, 1, 0], ids=lambda left: f"[:{left}]")
def test_a_file_that_is_cut_short_is_noticed(
    files: Files, tmp_path: Path, name: str, left: int
) -> None:
    files.write(tmp_path, forged=False)
    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(path.read_bytes()[:left])
    assert verify.verify_run(tmp_path).faults


def test_who_makes_the_chain_again_can_cut_the_end_off_and_verify_says_how_far_the_run_got(
    files: Files, tmp_path: Path
) -> None:
    copied = files.copy()
    for name in NAMES:
        without(name, lambda row: row["step"] >= 1)(copied)
    assert found(copied, tmp_path, forged=False)
    assert found(copied, tmp_path, forged=True) == []
    (note,) = verify.verify_run(tmp_path).notes
    assert note.startswith("the run has not come to its end: 1 of 2 steps are recorded")


def test_an_evaluation_between_can_be_taken_out_only_with_the_chain_made_again(
    files: Files, tmp_path: Path
) -> None:
    """As a run resumed with another eval_every would leave it; alone in one file it is missed."""

    def between(row: Any) -> bool:
        return row["step"] == 1 and ("eval/rollouts" in row or row.get("split") == "heldout")

    both = files.copy()
    for name in NAMES:
        one = files.copy()
        without(name, between)(one)
        assert found(one, tmp_path, forged=True)
        without(name, between)(both)
    assert found(both, tmp_path, forged=False)
    assert found(both, tmp_path, forged=True) == []


def test_what_a_killed_run_left_is_no_fault_but_a_note(files: Files, tmp_path: Path) -> None:
    """Rollouts behind the last line of metrics.jsonl, the last of them cut."""
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


def test_the_chain_goes_on_where_a_resumed_run_cut_it(files: Files, tmp_path: Path) -> None:
    """What a checkpoint remembers of the records is their length and their last lines."""
    files.write(tmp_path, forged=False)
    whole = {name: (tmp_path / f"{name}.jsonl").read_bytes() for name in NAMES}
    log = RunLog(tmp_path)
    kept = log.offsets()
    log.write(3, eval={"solved": 1.0})
    assert verify.verify_run(tmp_path).faults
    again = RunLog(tmp_path)
    again.truncate_to(kept)
    assert verify.verify_run(tmp_path).faults == []
    assert {name: (tmp_path / f"{name}.jsonl").read_bytes() for name in NAMES} == whole
    *before, last = whole["metrics"].splitlines(keepends=True)
    edited = last.replace(b'"eval/rollouts": 3', b'"eval/rollouts": 4')
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*before, edited]))
    with pytest.raises(ValueError, match="is not the one that the checkpoint was saved after"):
        again.truncate_to(kept)

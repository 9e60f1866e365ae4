"""What was measured as JSON values and as Markdown tables, alone and beside earlier reports."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentgrpo.recipe.measures import Estimate, TaskRow, differences, estimates, known


def report(rows: Sequence[TaskRow], **about: Any) -> dict[str, Any]:
    """Everything about a run as JSON values; `about` is put in front (model, seed, ...)."""
    kinds: dict[str, list[TaskRow]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    return {
        **about,
        "tasks": len(known(rows)),
        "left_out": len(rows) - len(known(rows)),
        "measures": _plain(estimates(rows)),
        "kinds": {
            kind: {"tasks": len(known(members)), "measures": _plain(estimates(members))}
            for kind, members in kinds.items()
        },
        "per_task": [asdict(row) for row in rows],
    }


def rows_of(written: Mapping[str, Any]) -> list[TaskRow]:
    """The rows of a report."""
    return [TaskRow(**row) for row in written["per_task"]]


def markdown(written: Mapping[str, Any]) -> str:
    """A report as two tables: every measure over all tasks, and the values by kind of task."""
    names = list(written["measures"])
    left_out = f"; {written['left_out']} left out" if written.get("left_out") else ""
    by_kind = []
    for kind, part in written["kinds"].items():
        shown = [_shown({**part["measures"][name], "low": None}) for name in names]
        by_kind.append([kind, str(part["tasks"]), *shown])
    whole = [[name, _shown(seen)] for name, seen in written["measures"].items()]
    return "\n".join(
        [
            table_of(["measure", f"all tasks ({written['tasks']}{left_out})"], whole),
            table_of(["kind of task", "tasks", *names], by_kind),
        ]
    )


def markdown_of_comparison(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Reports side by side, by name, with the paired difference of the last to the first."""
    before, *_, after = reports.values()
    gained = _plain(differences(rows_of(before), rows_of(after)))
    seen = [*(one["measures"] for one in reports.values()), gained]
    head = ["measure", *reports, "difference"]
    rows = [[name, *(_shown(one[name]) for one in seen)] for name in gained]
    return table_of(head, rows)


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, whatever is in its cells."""
    lines = (head, ["---"] * len(head), *rows)
    return "".join(f"| {' | '.join(map(cell, row))} |\n" for row in lines)


def cell(value: Any) -> str:
    """One cell of a Markdown table, whatever is in it."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    written = text.encode(errors="backslashreplace").decode()  # half a surrogate pair is no UTF-8
    return html.escape(written, quote=False)


def _plain(measured: Mapping[str, Estimate]) -> dict[str, dict[str, Any]]:
    return {name: asdict(estimate) for name, estimate in measured.items()}


def _shown(estimate: Mapping[str, Any]) -> str:
    value, low, high = (estimate[key] for key in ("value", "low", "high"))
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return "-" if value is None else f"{value:.3f}{interval}"

"""Reports of measures as JSON values and Markdown tables, with comparisons."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentgrpo.recipe.measures import Estimate, TaskRow, complete_rows, differences, estimates


def report(rows: Sequence[TaskRow], **fields: Any) -> dict[str, Any]:
    """A report as JSON values. `fields` (model, seed, ...) come first."""
    kinds: dict[str, list[TaskRow]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    return {
        **fields,
        "tasks": len(complete_rows(rows)),
        "left_out": len(rows) - len(complete_rows(rows)),
        "measures": _as_dicts(estimates(rows)),
        "kinds": {
            kind: {"tasks": len(complete_rows(members)), "measures": _as_dicts(estimates(members))}
            for kind, members in kinds.items()
        },
        "per_task": [asdict(row) for row in rows],
    }


def rows_of(report_values: Mapping[str, Any]) -> list[TaskRow]:
    """The rows of a report."""
    return [TaskRow(**row) for row in report_values["per_task"]]


def markdown(report_values: Mapping[str, Any]) -> str:
    """Format a report as two tables: measures over all tasks, and values by kind of task."""
    names = list(report_values["measures"])
    left_out = f"; {report_values['left_out']} left out" if report_values.get("left_out") else ""
    by_kind = []
    for kind, kind_values in report_values["kinds"].items():
        cells = [_format_estimate({**kind_values["measures"][name], "low": None}) for name in names]
        by_kind.append([kind, str(kind_values["tasks"]), *cells])
    measure_rows = [
        [name, _format_estimate(estimate)] for name, estimate in report_values["measures"].items()
    ]
    return "\n".join(
        [
            table_of(["measure", f"all tasks ({report_values['tasks']}{left_out})"], measure_rows),
            table_of(["kind of task", "tasks", *names], by_kind),
        ]
    )


def markdown_of_comparison(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Format reports side by side, with the paired difference of the last to the first."""
    before, *_, after = reports.values()
    gains = _as_dicts(differences(rows_of(before), rows_of(after)))
    columns = [*(column["measures"] for column in reports.values()), gains]
    head = ["measure", *reports, "difference"]
    rows = [[name, *(_format_estimate(column[name]) for column in columns)] for name in gains]
    return table_of(head, rows)


def table_of(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table. Cells are escaped."""
    lines = (header, ["---"] * len(header), *rows)
    return "".join(f"| {' | '.join(map(cell, row))} |\n" for row in lines)


def cell(value: Any) -> str:
    """Escape a value for a cell of a Markdown table."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    printable = text.encode(errors="backslashreplace").decode()  # a lone surrogate has no UTF-8
    return html.escape(printable, quote=False)


def _as_dicts(measured: Mapping[str, Estimate]) -> dict[str, dict[str, Any]]:
    return {name: asdict(estimate) for name, estimate in measured.items()}


def _format_estimate(estimate: Mapping[str, Any]) -> str:
    value, low, high = (estimate[key] for key in ("value", "low", "high"))
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return "-" if value is None else f"{value:.3f}{interval}"

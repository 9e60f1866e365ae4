"""Say what keeps a run from learning, most likely first: from its records, also while it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentgrpo.config.arguments import parser_of
from agentgrpo.diagnosis.checks import CHECKS, Finding
from agentgrpo.diagnosis.history import History

MOST = 6
"""Findings that are printed; with their rollouts these are thirty lines."""
NOTE = 0.2
"""What weighs less is no fault."""


def diagnose(folder: Path | str) -> list[Finding]:
    """What the records of a run show, most likely first; empty: nothing."""
    return _found(History(Path(folder)))


def _found(history: History) -> list[Finding]:
    every = ((name, check(history)) for name, check in CHECKS.items())
    found = [replace(finding, name=name) for name, finding in every if finding is not None]
    return sorted(found, key=lambda finding: -finding.weight)


def report(folder: Path | str) -> str:
    """What `agentgrpo doctor RUN` prints; at most thirty lines."""
    h = History(Path(folder))
    found, steps = _found(h), h.config.get("steps", "?")
    solved = [f"{share:.2f}" for share in dict.fromkeys((*h.solved[:1], *h.solved[-1:]))]
    lines = [f"{folder}: {len(h.steps)} of {steps} steps, {len(h.train):,} rollouts"]
    lines[0] += f", held-out solved {' -> '.join(solved)}" if solved else ""
    if not h.train:
        lines.append("No step is recorded: what stopped it, if something did, it has printed.")
    elif not found or found[0].weight < NOTE:
        lines.append("Nothing wrong was found.")
    for number, finding in enumerate(found[:MOST], start=1):
        lines += [f"{number}. {finding.name}: {finding.says}", f"   try: {finding.remedy}"]
        for seen in finding.seen[:2]:
            text, r = " ".join(h.text(seen).split()), seen.rollout
            said = f": {text[:60]!r}" if text else ""
            lines.append(f"   {seen.place}: {r.status}, reward {r.reward:.3g}{said}")
    return "\n".join(line[:200] for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Print the report. Returns the exit status."""
    parser = parser_of("doctor", __doc__)
    parser.add_argument("run", type=Path, help="a run's folder (out_dir)")
    args = parser.parse_args(arguments)
    try:
        print(report(args.run))  # noqa: T201
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0

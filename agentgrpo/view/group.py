"""Which runs are repetitions of each other: those whose settings are equal but for the seed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from agentgrpo.run.folder import MAY_CHANGE

NOT_COMPARED = MAY_CHANGE - {"steps"} | {"seed"}
"""Settings by which repetitions may differ."""


class RunGroup(TypedDict):
    """Runs whose mean and spread are shown."""

    label: str
    """What is set otherwise than in the other groups; the runs' names where that says nothing."""
    runs: list[int]
    """Their places among all runs."""


def group_runs(indices: Sequence[Mapping[str, Any]]) -> list[RunGroup]:
    """Groups of repetitions, in the order of their first runs.

    A run whose settings were not recorded stands alone.

    Args:
        indices: of the runs: `name`, and `config` as {"section.key": value}; a config is complete
            or, of another program's rollouts, without `model`.
    """
    groups: dict[str, list[int]] = {}
    for place, index in enumerate(indices):
        settings = {k: v for k, v in index["config"].items() if k not in NOT_COMPARED}
        key = json.dumps(settings, sort_keys=True) if "model" in settings else f"run {place}"
        groups.setdefault(key, []).append(place)
    firsts = {key: indices[places[0]] for key, places in groups.items()}
    known = [index["config"] for index in firsts.values() if "model" in index["config"]]
    keys = {key for config in known for key in config} - NOT_COMPARED
    differ = sorted(k for k in keys if len({json.dumps(c.get(k)) for c in known}) > 1)
    by_settings = differ and len(groups) < len(indices)
    return [
        RunGroup(
            label=_label(firsts[key]["config"], differ)
            if by_settings and firsts[key]["config"] in known
            else ", ".join(indices[place]["name"] for place in places),
            runs=places,
        )
        for key, places in groups.items()
    ]


def _label(config: Mapping[str, Any], keys: Sequence[str]) -> str:
    """`learning_rate 0.001, group_size 8`: a key's last part, where no other ends alike."""
    ends = Counter(key.rpartition(".")[2] for key in keys)
    said = []
    for key in keys:
        end, value = key.rpartition(".")[2], config.get(key)
        shown = value if isinstance(value, str) else json.dumps(value)
        said.append(f"{end if ends[end] == 1 else key} {shown}")
    return ", ".join(said)


def short_names(paths: Sequence[Path]) -> list[str]:
    """A name for each path: its last parts, as few as tell all of them apart.

    Raises:
        ValueError: two are the same.
    """
    whole = [path.resolve() for path in paths]
    for path, count in Counter(whole).items():
        if count > 1:
            raise ValueError(f"{path} was given {count} times")
    depth = 1
    while len(set(names := ["/".join(path.parts[-depth:]) for path in whole])) < len(whole):
        depth += 1
    return names

"""Runs that repeat each other: which they are, what they are called, and their curves' numbers."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.view import __main__ as view
from agentgrpo.view.group import group_runs, short_names
from tests.view.runs import write_run


def a_run(name: str, **config: Any) -> dict[str, Any]:
    return {"name": name, "config": {"model": "m"} | config}


def groups(*runs: dict[str, Any]) -> dict[str, list[int]]:
    return {group["label"]: group["runs"] for group in group_runs(runs)}


def test_seeds_and_places_make_no_other_run() -> None:
    """In the order of first runs; a label says what differs, by whole key where it must."""
    runs = [
        a_run(f"{lr}{seed}", seed=seed, out_dir=f"runs/{lr}{seed}", **{"learner.learning_rate": lr})
        for seed in range(3)
        for lr in (1e-3, 1e-4)
    ]
    assert groups(*runs) == {"learning_rate 0.001": [0, 2, 4], "learning_rate 0.0001": [1, 3, 5]}
    runs.append(a_run("alone", **{"learner.learning_rate": 1e-3, "steps": 4}))
    assert list(groups(*runs))[2] == "learning_rate 0.001, steps 4"
    kinds = [a_run(str(n), seed=n, **{"agent.kind": a, "env.kind": e})
             for n in (0, 1) for a, e in (("a", "x"), ("b", "y"))]  # fmt: skip
    assert list(groups(*kinds)) == ["agent.kind a, env.kind x", "agent.kind b, env.kind y"]


def test_what_may_differ_differs_and_what_may_not_parts() -> None:
    """Where a run is kept and what changes its rounding is not its settings; its length is."""
    same = [a_run("a", out_dir="a", seed=0, trackers=[]), a_run("b", out_dir="b", seed=1)]
    same += [a_run("c", **{"learner.max_tokens": 5, "engine.kv_cache_gib": 2.0})]
    assert groups(*same) == {"a, b, c": [0, 1, 2]}
    assert groups(a_run("a", steps=1), a_run("b", steps=2)) == {"a": [0], "b": [1]}


def test_runs_without_recorded_settings_stand_alone() -> None:
    other = {"written by": "TRL"}
    found = groups(*({"name": name, "config": other} for name in "ab"), a_run("c"), a_run("d"))
    assert found == {"a": [0], "b": [1], "c, d": [2, 3]}


def test_names_are_as_long_as_tells_them_apart(tmp_path: Path) -> None:
    runs = [tmp_path / "lr" / "0", tmp_path / "lr" / "1", tmp_path / "base" / "0"]
    assert short_names(runs[:2]) == ["0", "1"]
    assert short_names(runs) == ["lr/0", "lr/1", "base/0"]
    with pytest.raises(ValueError, match=r"lr/0 was given 2 times"):
        short_names([runs[0], runs[1], runs[1] / ".." / "0"])


def stored(page: str, name: str) -> Any:
    """What the page holds under a name."""
    found = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page)
    assert found, name
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def test_the_command_takes_any_number_of_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(write_run(tmp_path / f"{heat}_{seed}", temperature=heat, seed=seed, steps=1))
            for heat in (1.0, 0.5) for seed in range(3)]  # fmt: skip
    assert view.main(runs) == 0
    page = (tmp_path / "1.0_0" / "compare.html").read_text()
    assert [stored(page, f"run{n}")["name"] for n in (0, 5)] == ["1.0_0", "0.5_2"]
    assert [group["runs"] for group in stored(page, "groups")] == [[0, 1, 2], [3, 4, 5]]
    assert "<title>6 runs · agentgrpo</title>" in page
    assert view.main([*runs, "--curves", "-o", str(tmp_path / "small.html")]) == 0
    small = (tmp_path / "small.html").read_text()
    index = stored(small, "run3")
    assert (index["rollouts"], index["tasks"], index["chunks"]) == ([], [], [])
    assert index["metrics"] == stored(page, "run3")["metrics"] != []
    assert ": 0 rollouts, " in capsys.readouterr().out
    assert view.main([runs[0], runs[0]]) == 2
    assert capsys.readouterr().err.endswith(f"{runs[0]} was given 2 times\n")


def computed(expression: str) -> Any:
    """The value of an expression of the page's script, in Node.js, without a browser."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node.js; test_browser.py asks the same of a browser")
    assets = resources.files("agentgrpo.view") / "assets"
    script = "".join((assets / name).read_text() for name in ("dom.js", "curves.js"))
    program = f'"use strict";{script};console.log(JSON.stringify({expression}))'
    ran = subprocess.run([node, "-e", program], capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def test_smoothing_means_and_bands() -> None:
    """Held against the definitions, worked out by hand."""
    points = "[[0, 1], [1, 3], [2, 2]].map(([x, y]) => ({ x, y }))"
    other = "[[0, 3], [1, 4]].map(([x, y]) => ({ x, y }))"
    plain, smooth, ranges, deviations = computed(
        f"[smoothed({points}, 0), smoothed({points}, 0.5), "
        f"combined([{points}, {other}], 'range'), combined([{points}, {other}], 'deviation')]"
    )
    assert [point["y"] for point in plain] == [1, 3, 2]
    expected = [1, (0.5 * 1 + 1 * 3) / 1.5, (0.25 * 1 + 0.5 * 3 + 1 * 2) / 1.75]
    assert [point["y"] for point in smooth] == pytest.approx(expected)
    assert ranges == [
        {"x": 0, "y": 2, "runs": 2, "low": 1, "high": 3},
        {"x": 1, "y": 3.5, "runs": 2, "low": 3, "high": 4},
        {"x": 2, "y": 2, "runs": 1, "low": 2, "high": 2},
    ]
    assert deviations[0]["high"] == pytest.approx(2 + 2**0.5)
    assert "low" not in deviations[2], "one run has no deviation"


def test_csv_is_read_back_and_is_never_a_formula() -> None:
    import csv

    lines = (
        "[{ label: 'a, \"b\"\\n', points: [{ x: 1, y: 0.5, low: 0, high: 1, runs: 3 }] },"
        "{ label: '=cmd()', points: [{ x: 0, y: -2 }, { x: 1, y: 1e-7 }] }]"
    )
    rows = list(csv.reader(computed(f"csvOfLines({lines})").splitlines(keepends=True)))
    assert rows == [
        ["step", 'a, "b"\n', 'a, "b"\n low', 'a, "b"\n high', 'a, "b"\n runs', "'=cmd()"],
        ["0", "", "", "", "", "-2"],
        ["1", "0.5", "0", "1", "3", "1e-7"],
    ]
    run = "{ name: '@x', config: { seed: 7 }, metricNames: () => ['m'], series: () => [{ x: 1, y: 2 }] }"  # noqa: E501
    rows = list(csv.reader(computed(f"csvOfRuns([{{ label: 'g', runs: [{run}] }}])").splitlines()))
    assert rows == [
        ["settings", "run", "seed", "metric", "step", "value"],
        ["g", "'@x", "7", "m", "1", "2"],
    ]

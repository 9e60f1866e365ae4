"""Forks of a warm interpreter end as processes of their own do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.warm import run, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = """
import os, sys, time
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
sys.exit(3) if os.environ["RANK"] == "1" else time.sleep(600)
"""


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(SCRIPT)
    ran = run_ranks(2, str(tmp_path / "s.py"))
    assert ran.returncode == 3
    assert "rank 1 of 2" in ran.stdout


def test_a_command_has_its_status_streams_and_environment(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import os, sys\nprint(os.environ['MARK'], sys.argv[1])\nraise ValueError('broken')\n"
    )
    ran = run(str(tmp_path / "s.py"), "given", MARK="own")
    assert (ran.returncode, ran.stdout) == (1, "own given\n")
    assert "ValueError: broken" in ran.stderr


def test_a_module_of_another_package_is_started_as_it_asks(tmp_path: Path) -> None:
    """As vLLM does with a model that it does not know yet: an empty cache of its own."""
    (tmp_path / "s.py").write_text(
        "import subprocess, sys\nasked = [sys.executable, '-m', 'json.tool', '--compact']\n"
        "print(subprocess.run(asked, input='[1, 2]', capture_output=True, text=True).stdout)\n"
    )
    assert run(str(tmp_path / "s.py")).stdout.strip() == "[1,2]"

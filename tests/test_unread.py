"""The table of who reads which setting, against what the commands are seen to read."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from agentgrpo import cli
from agentgrpo.config.readers import READS, reads
from agentgrpo.run.atomic import write_lines
from tests import tiny
from tests.config.test_bounds import KEYS
from tests.reading import noted

CHECKED = {
    "sft": (
        "steps trackers rollout.sampler engine.tensor_parallel_size reward.* "  # set_stage()
        "loss.*"  # its own, in place of the file's
    ),
    "evaluate": "steps trackers loss.* learner.lora.rank learner.trained_layers",
}
"""What is read to be checked, or in a config that the command makes itself; nothing follows."""
IN_CONFIG = {
    "sft": "engine.dtype",
    "evaluate": "evaluation.* out_dir learner.max_tokens endpoints*",
}
"""What methods of the config read, or its checks alone."""


def matches(key: str, patterns: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns.split())


def test_every_pattern_is_of_settings_that_there_are() -> None:
    for patterns in READS.values():
        for pattern in patterns:
            assert any(fnmatchcase(key, pattern.lstrip("!")) for key in KEYS), pattern
    assert {key for key in KEYS if not any(reads(command, key) for command in READS)} == set()


@pytest.mark.slow
@pytest.mark.nsjail
@pytest.mark.parametrize("command", CHECKED)
def test_a_command_reads_what_the_table_says(
    tmp_path: Path, tiny_model: Path, command: str
) -> None:
    write_lines(tmp_path / "rows.jsonl", tiny.sums(20))
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "Answer: 2"}]
    write_lines(tmp_path / "talks.jsonl", [{"messages": talk}])
    (tmp_path / "r.toml").write_text(
        f'model = "{tiny_model}"\nout_dir = "{tmp_path / "run"}"\n[data]\n'
        f'train = "{tmp_path / "rows.jsonl"}"\nnum_heldout = 2\n[engine]\nkv_cache_gib = 0.0625\n'
        f"[rollout]\nmax_turns = 1\nmax_turn_tokens = 8\n"
        f'[sft]\nepochs = 1\ndata = "{tmp_path / "talks.jsonl"}"\n'
    )
    with noted() as read:
        assert cli.main([command, str(tmp_path / "r.toml")]) == 0
    refused = {key for key in read if not reads(command, key)}
    assert {key for key in refused if not matches(key, CHECKED[command])} == set()
    taken = [pattern for pattern in READS[command] if not pattern.startswith("!")]
    unread = {p for p in taken if not any(fnmatchcase(key, p) for key in read)}
    assert {p for p in unread if not matches(p, IN_CONFIG[command])} == set()

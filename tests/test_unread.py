"""The table of who reads which setting, against what the commands are seen to read."""

from __future__ import annotations

import string
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from agentgrpo import cli
from agentgrpo.actions import Action, Message, Observation, RunCode
from agentgrpo.agents.repl import ReplAgent
from agentgrpo.config.readers import READS, reads
from agentgrpo.run.atomic import write_lines
from agentgrpo.types import Task
from tests import tiny
from tests.config.test_bounds import KEYS
from tests.reading import noted

PLAYS = "steps trackers loss.*"
CHECKED = {
    "sft": (
        "steps trackers rollout.sampler engine.tensor_parallel_size reward.* "  # set_stage()
        "loss.*"  # its own, in place of the file's
    ),
    "evaluate": PLAYS,
    "flywheel": f"{PLAYS} rollout.sampler rollout.fork_threshold",
}
"""What is read to be checked, or in a config that the command makes itself; nothing follows."""
IN_CONFIG = (
    "engine.dtype engine.async_scheduling rollout.deterministic data.heldout learner.max_tokens "
    "out_dir learner.decay learner.final_learning_rate learner.warmup_steps evaluation.* "
    "learner.gradient_checkpointing"
)
"""What methods of the config read, or its checks alone."""
OTHERWISE = (
    "data.levels data.heldout_levels data.heldout_split env.user.column env.user.max_replies "
    "engine.enforce_eager learner.lora.* rollout.max_retries sandbox.host_* sft.keep sft.too_long "
    "flywheel.*_hints flywheel.marks"
)
"""What is read with other settings or on another machine than this test's, or after a failure."""


class Typist(ReplAgent):
    """Who runs code, whatever the model says."""

    stop = tuple(string.printable)

    def parse(self, text: str, task: Task) -> Action:
        return RunCode("1")

    def observe(self, action: Action, observation: Observation) -> list[Message]:
        return [{"role": "user", "content": observation.text}]


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
        "[rollout]\nmax_turns = 2\nmax_turn_tokens = 32\n[measures]\ntemperature = 1.0\n"
        "[flywheel]\ntasks = 2\nconcurrency = 2\nrounds = 1\nmax_reply_tokens = 8\n"
        f'[agent]\nkind = "{__name__}:Typist"\n'
        f'[sft]\nepochs = 1\ndata = "{tmp_path / "talks.jsonl"}"\n'
    )
    with noted() as read:
        assert cli.main([command, str(tmp_path / "r.toml")]) == 0
    refused = {key for key in read if not reads(command, key)}
    assert {key for key in refused if not matches(key, CHECKED[command])} == set()
    unread = {key for key in KEYS if reads(command, key)} - read
    assert {key for key in unread if not matches(key, f"{IN_CONFIG} {OTHERWISE}")} == set()

"""What other programs wrote is read as it is, and what no format is, is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from agentgrpo.foreign.read import _of_atif, _of_trace, read
from agentgrpo.foreign.trajectory import Words, flat_row
from agentgrpo.view.collect import read_foreign
from tests import tiny
from tests.test_imports import modules_after

SAMPLES = Path(__file__).parent / "samples"
FILES = {
    "trl/completions_00001.parquet": ("TRL's completions", 4),
    "trl/rollouts.jsonl": ("outputs of a rollout_func", 4),
    "verifiers/results.jsonl": ("verifiers' results", 2),
    "verifiers/states.jsonl": ("verifiers' results", 2),
    "prime_rl/rollouts/step_3/train/effective/traces.jsonl": ("episodes of verifiers.v1", 1),
    "prime_rl/token_exports/step_3/rank_0.jsonl": ("prime-rl's token export", 1),
    "atif/trajectory.json": ("ATIF", 1),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_known_by_what_is_in_it(name: str, tmp_path: Path) -> None:
    program, number = FILES[name]
    other = shutil.copy(SAMPLES / name, tmp_path / f"renamed{Path(name).suffix}")
    for path in (SAMPLES / name, Path(other)):
        found, trajectories = read(path)
        assert (found, len(trajectories)) == (program, number)
        assert all(t.faults == [] for t in trajectories)


@pytest.mark.parametrize(
    ("folder", "program"),
    [("trl", "TRL's completions"), ("verifiers", "verifiers' results"), ("atif", "ATIF"),
     ("prime_rl", "prime-rl's token export"), ("prime_rl/rollouts", "episodes of verifiers.v1")],
)  # fmt: skip
def test_a_folder_is_known_by_its_files(folder: str, program: str) -> None:
    assert read(SAMPLES / folder)[0] == program


def test_every_token_of_a_rollout_func_is_where_it_was() -> None:
    output = json.loads((SAMPLES / "trl/rollouts.jsonl").read_text())
    for number, trajectory in enumerate(read(SAMPLES / "trl/rollouts.jsonl")[1]):
        (row,) = trajectory.rows
        assert [p.origin for p in row] == ["prompt", "sampled", "given", "sampled"]
        ids = np.concatenate([p.ids for p in row if p.ids is not None])
        assert ids.tolist() == output["prompt_ids"][number] + output["completion_ids"][number]
        own = [
            i for p in row if p.origin == "sampled" and p.ids is not None for i in p.ids.tolist()
        ]
        mask = output["env_mask"][number]
        assert own == [i for i, m in zip(output["completion_ids"][number], mask, strict=True) if m]
        said = np.concatenate([p.logprobs for p in row if p.logprobs is not None])
        wanted = [x for x, m in zip(output["logprobs"][number], mask, strict=True) if m]
        np.testing.assert_array_equal(said, np.array(wanted, np.float32))


def test_the_table_of_trl_is_read_with_rewards_ids_and_advantages() -> None:
    rows = parquet.read_table(SAMPLES / "trl/completions_00001.parquet").to_pylist()
    for row, trajectory in zip(rows, read(SAMPLES / "trl")[1], strict=True):
        assert trajectory.rewards["odd"] == row["odd"]
        assert trajectory.advantage == row["advantage"]
        assert trajectory.calls[0].completion_ids is not None
        assert trajectory.calls[0].completion_ids.tolist() == row["completion_ids"]
        assert trajectory.calls[0].text == row["completion"][0]["content"]
        assert [p.ids for p in trajectory.sampled] == [None], "text is not made into tokens"


def test_episode_and_export_hold_the_same_tokens() -> None:
    """The graph of messages, walked from its root to its leaf, against prime-rl's flat lists."""
    (episode,) = read(SAMPLES / "prime_rl/rollouts")[1]
    (export,) = read(SAMPLES / "prime_rl/token_exports/step_3/rank_0.jsonl")[1]
    assert (episode.step, export.step, episode.split) == (3, 3, "train")
    assert episode.rewards == {"odd": 1.0}
    assert episode.task.spec["key"] == "g"
    (a,), (b,) = episode.rows, export.rows
    for pieces in (a, b):
        assert pieces[0].origin == "prompt"
    flat = [np.concatenate([p.ids for p in row if p.ids is not None]).tolist() for row in (a, b)]
    assert flat[0] == flat[1]
    for x, y in zip(episode.sampled, export.sampled, strict=True):
        np.testing.assert_array_equal(x.logprobs, y.logprobs)
        assert y.learner is not None
        assert x.learner is None
    assert [c.prompt_tokens for c in episode.calls] == [
        len(c.prompt_ids) for c in episode.calls if c.prompt_ids is not None
    ]


def test_branches_of_a_trace_are_rows() -> None:
    path = SAMPLES / "prime_rl/rollouts/step_3/train/effective/traces.jsonl"
    trace = json.loads(path.read_text())["traces"][0]
    trace["nodes"].append({**trace["nodes"][3], "parent": 0})
    (found,) = _of_trace(trace, "here")
    assert [[p.origin for p in row] for row in found.rows] == [
        ["prompt", "prompt", "sampled", "given", "given", "sampled"],
        ["prompt", "prompt", "sampled"],
    ]


def test_turns_of_atif_that_continue_each_other_are_one_row() -> None:
    (found,) = read(SAMPLES / "atif")[1]
    assert [[p.origin for p in row] for row in found.rows] == [
        ["prompt", "sampled", "given", "sampled"]
    ]
    steps = json.loads((SAMPLES / "atif/trajectory.json").read_text())
    del steps["steps"][1]["metrics"]["prompt_token_ids"]
    (text,) = _of_atif(steps, "here")
    assert [p.origin for p in text.rows[0]] == ["prompt", "sampled", "given", "sampled"]
    below = {**steps, "subagent_trajectories": [steps]}
    assert [t.where for t in _of_atif(below, "here")] == ["here", "here subagent 0"]


@pytest.mark.parametrize(
    ("says", "origin"),
    [({}, "sampled"), ({"llm_call_count": 1}, "sampled"), ({"is_copied_context": True}, "prompt"),
     ({"llm_call_count": 0}, "prompt")],
)  # fmt: skip
def test_a_turn_of_atif_that_no_model_sampled_here_is_not_called_sampled(
    says: dict[str, Any], origin: str
) -> None:
    whole = json.loads((SAMPLES / "atif/trajectory.json").read_text())
    for step in whole["steps"][1:]:
        del step["metrics"]
    whole["steps"][1] |= says
    (found,) = _of_atif(whole, "here")
    assert found.rows[0][1].origin == origin
    assert len(found.calls) == 1 + (origin == "sampled")


def test_counts_of_a_turn_of_several_calls_are_not_those_of_its_tokens() -> None:
    whole = json.loads((SAMPLES / "atif/trajectory.json").read_text())
    whole["steps"][1]["llm_call_count"] = 2
    (found,) = _of_atif(whole, "here")
    assert [call.completion_tokens for call in found.calls] == [None, 6]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", "{\n", "a.jsonl:1: not JSON"),
        ("a.json", "{", "a.json: not JSON"),
        ("a.jsonl", "", "a.jsonl: empty"),
        ("a.jsonl", "[]\n", "its first record has not the keys of any format"),
        ("a.json", '{"schema_version": "2", "agent": {}, "steps": []}', "not ATIF-v1.x"),
        ("a.jsonl", '{"prompt_ids": [[1]], "completion_ids": [], "logprobs": []}\n',
         r"a.jsonl:1: not of its format: .*prompt_ids: 1, completion_ids: 0, logprobs: 0"),
        ("a.jsonl", '{"prompt_ids": [[1], [1]], "completion_ids": [[2], [2]], "env_mask": [[1]], '
         '"logprobs": [[-0.5], [-0.5]], "prompt": ["a"]}\n', "env_mask: 1, prompt: 1"),
        ("a.jsonl", '{"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[[-0.5]]]}\n',
         r"a.jsonl:1: .*logprobs must be a flat list of numbers, one a token, not of \[-0.5\]"),
        ("a.jsonl", '{"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[{"2": -0.5}]]}\n',
         "logprobs must be a flat list of numbers, one a token, not of {'2': -0.5}"),
        ("a.jsonl", '{"prompt_ids": [[1]], "completion_ids": [[[2]]], "logprobs": [[-0.5]]}\n',
         r"ids must be a flat list of whole numbers, not of \[2\]"),
        ("a.jsonl", '{"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[-0.5]], '
         '"env_mask": [[[1]]]}\n', "a mask must be a flat list"),
        ("a.jsonl", '{"nodes": [{}]}\n', "a.jsonl:1: not of its format: KeyError"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=says):
        read(tmp_path / name)


def test_a_rank_that_wrote_nothing_does_not_hide_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "token_exports" / "step_3"
    folder.mkdir(parents=True)
    (folder / "rank_0.jsonl").touch()
    with pytest.raises(ValueError, match=r"rank_0\.jsonl: empty"):
        read(tmp_path)
    shutil.copy(SAMPLES / "prime_rl/token_exports/step_3/rank_0.jsonl", folder / "rank_1.jsonl")
    assert len(read(tmp_path)[1]) == 1


@pytest.mark.parametrize("name", ["trl/rollouts.jsonl", "verifiers/states.jsonl"])
def test_a_folder_with_what_our_own_lines_wrote_is_read(tmp_path: Path, name: str) -> None:
    shutil.copy(SAMPLES / name, tmp_path)
    assert read(tmp_path)[0] == FILES[name][0]
    assert len(read_foreign(tmp_path, None).index["rollouts"]) == FILES[name][1]


def test_a_folder_without_rollouts_is_told_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected run.json \(agentgrpo\), completions/"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        read(tmp_path / "none")


def test_what_does_not_fit_is_said_and_left_out() -> None:
    faults: list[tuple[str, str]] = []
    row = flat_row([1], [2, 3], [1], {"logprobs": [-1.0], "learner": [0.0, None]}, faults)
    assert faults == [("mask", "a mask of 1 for 2 tokens"), ("ids", "1 logprobs for 2 tokens")]
    assert [p.origin for p in row] == ["prompt", "sampled"]
    assert row[1].logprobs is None
    assert row[1].learner is not None
    assert np.isnan(row[1].learner).tolist() == [False, True]


def test_words_stand_for_tokens_where_there_are_none() -> None:
    words = Words()
    ids = words.ids("a b  a\n")
    assert len(set(ids.tolist())) == len(words) == 4
    shown = {token: word for word, token in words.items()}
    assert "".join(shown[i] for i in ids.tolist()) == "a b  a\n"


@pytest.mark.parametrize("name", FILES)
def test_the_viewer_shows_it(name: str, tmp_path: Path) -> None:
    tiny.make_tokenizer().save_pretrained(tmp_path / "model")
    data = read_foreign(SAMPLES / name, tmp_path / "model")
    program, number = FILES[name]
    assert (data.index["config"], data.index["facts"]) == (
        {"written by": program}, {"rollouts": number}
    )  # fmt: skip
    assert len(data.index["rollouts"]) == number
    assert all(1 in {s[0] for s in r["segments"]} for r in data.index["rollouts"])
    text_alone = name.endswith(("parquet", "results.jsonl"))
    assert ("logprobs" in data.index["recorded"]) != text_alone
    vocabulary = data.index["vocabulary"]
    shown = dict(zip(vocabulary["ids"], vocabulary["shown"], strict=True))
    assert not any(str(word).startswith("⟨") for word in shown.values())
    if text_alone:
        assert any("6*7?" in str(word) for word in shown.values())


def run(word: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentgrpo", word, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_commands_take_a_file(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ran = run("view", SAMPLES / "trl/rollouts.jsonl", "-o", page)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "4 rollouts" in ran.stdout
    ran = run("view", SAMPLES / "trl", SAMPLES / "atif", "-o", page)
    assert "5 rollouts" in ran.stdout


def test_readers_and_audits_need_neither_vllm_nor_our_extension() -> None:
    loaded = modules_after("agentgrpo.foreign.read", "agentgrpo.audit.claims")
    assert not loaded & {"torch", "vllm", "transformers", "pyarrow", "agentgrpo._C"}
    loaded = modules_after("agentgrpo.audit.step", "agentgrpo.audit.trl")
    assert not loaded & {"vllm", "trl", "agentgrpo._C"}


BLOCKED = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "triton") or name == "agentgrpo._C":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from agentgrpo.cli import main
import agentgrpo.audit.trl
sys.exit(main(sys.argv[1:]))
"""


def test_the_commands_judge_a_foreign_file_without_vllm_and_our_extension(tmp_path: Path) -> None:
    for arguments, says in (
        (["verify", SAMPLES / "trl/rollouts.jsonl"], "0 faults in 4 rollouts, 48 sampled tokens"),
        (["view", SAMPLES / "trl/rollouts.jsonl", "-o", tmp_path / "page.html"], "4 rollouts"),
    ):
        command = [sys.executable, "-c", BLOCKED, *map(str, arguments)]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert says in ran.stdout

"""The page stores what the run recorded and marks missing data."""

from __future__ import annotations

import base64
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agentgrpo.inspect.view.__main__ import main
from agentgrpo.inspect.view.collect import STREAMS, RunData, read_run
from agentgrpo.inspect.view.page import finite, make_page
from agentgrpo.records.rollouts import read_rollout
from agentgrpo.types import Rollout, Segment, SpanReward, Status
from tests.given import TASK
from tests.inspect.view.runs import write_program, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "one")


def chunk_of(data: RunData, number: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A chunk's ids and streams, read as the page reads them."""
    num_ids, num_sampled = data.index["chunks"][number]
    raw = data.chunks[number]
    ids = np.frombuffer(raw, "<i4", num_ids)
    streams = {
        name: np.frombuffer(raw, "<f4", num_sampled, 4 * (num_ids + place * num_sampled))
        for place, name in enumerate(STREAMS)
    }
    assert len(raw) == 4 * (num_ids + len(STREAMS) * num_sampled)
    return ids, streams


def test_tokens_and_logprobs_are_stored(run: Path) -> None:
    data = read_run(run)
    lines = (run / "rollouts.jsonl").read_text().splitlines()
    assert len(data.index["rollouts"]) == len(lines)
    for line, stored in zip(lines, data.index["rollouts"], strict=True):
        rollout = read_rollout(json.loads(line))
        ids, streams = chunk_of(data, stored["chunk"])
        assert len(stored["segments"]) == len(rollout.segments)
        for number, (segment, (origin, start, length, at, own)) in enumerate(
            zip(rollout.segments, stored["segments"], strict=True)
        ):
            assert own is None
            np.testing.assert_array_equal(ids[start : start + length], segment.token_ids)
            if segment.logprobs is None:
                assert (origin, at) == (0 if number == 0 else 2, -1)
            else:
                assert origin == 1
                logprobs = streams["logprobs"][at : at + length]
                np.testing.assert_allclose(logprobs, segment.logprobs, rtol=5e-4)
                assert np.isnan(streams["learner_logprobs"][at : at + length]).all()
        assert stored["reward"] == pytest.approx(rollout.reward)
        assert stored["status"] == str(rollout.status)


def test_prompt_of_group_is_stored_once(run: Path) -> None:
    data = read_run(run)
    starts = {
        (r["chunk"], r["group"]): {s["segments"][0][1] for s in data.index["rollouts"]
        if (s["chunk"], s["group"]) == (r["chunk"], r["group"])}
        for r in data.index["rollouts"]
    }  # fmt: skip
    assert all(len(places) == 1 for places in starts.values())
    assert len({next(iter(p)) for (chunk, _), p in starts.items() if chunk == 1}) == 2


def test_tokens_are_text_and_parts_of_characters_are_bytes(run: Path) -> None:
    vocabulary = read_run(run).index["vocabulary"]
    shown = vocabulary["shown"]
    assert "p" in shown
    assert "<|im_start|>" in shown
    assert [0xC3] in shown, "the first byte of é is no text by itself"
    assert " " in shown
    assert "\n" in shown
    assert {shown[vocabulary["ids"].index(i)] for i in vocabulary["special"]} == {
        "<|im_start|>", "<|im_end|>",
    }  # fmt: skip


def test_without_tokenizer_ids_are_shown_and_a_checkpoints_is_used(
    run: Path, tmp_path: Path
) -> None:
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    index = read_run(tmp_path).index
    assert index["tokenizer"] is False
    assert index["config"] == {}
    token = index["vocabulary"]["ids"][0]
    assert index["vocabulary"]["shown"][0] == f"⟨{token}⟩"
    checkpoint = tmp_path / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "tokenizer.json").write_bytes((run / "model" / "tokenizer.json").read_bytes())
    assert read_run(tmp_path).index["tokenizer"] is True


def test_half_written_line_is_skipped(run: Path, tmp_path: Path) -> None:
    whole = (run / "rollouts.jsonl").read_text()
    (tmp_path / "rollouts.jsonl").write_text(whole[:-20])
    (tmp_path / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    assert len(read_run(tmp_path).index["rollouts"]) == whole.count("\n") - 1


def test_half_a_surrogate_pair_is_stored_as_json_escape(run: Path, tmp_path: Path) -> None:
    first, *_ = (run / "rollouts.jsonl").read_text().splitlines()
    row = json.loads(first)
    row["task"]["spec"]["note"] = "half \ud83d"
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    page = make_page([read_run(tmp_path)])
    packed = re.findall(r'<script type="text/plain" id="run0">(.*?)</script>', page)
    index = json.loads(gzip.decompress(base64.b64decode(*packed)))
    assert "half \ud83d" in json.dumps(index, ensure_ascii=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"step": 0}\n', r"rollouts.jsonl:1: not a rollout"), ("{\n", r"rollouts.jsonl:1: not JSON")],
)
def test_invalid_record_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "rollouts.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)


def test_nan_is_stored_as_null(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "learner/loss": NaN}\n')
    data = read_run(tmp_path)
    assert np.isnan(data.index["metrics"][0]["learner/loss"])
    assert json.loads(json.dumps(finite(data.index), allow_nan=False))["metrics"] == [
        {"step": 0, "learner/loss": None}
    ]


def view(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentgrpo.inspect.view", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_page_has_no_external_references(run: Path, tmp_path: Path) -> None:
    ran = view(run, "-o", tmp_path / "page.html")
    assert (ran.returncode, ran.stderr) == (0, "")
    page = (tmp_path / "page.html").read_text()
    assert "22 rollouts" in ran.stdout
    assert "taken" not in page, "sampled text is compressed data, never markup"
    for outside in ("http://", "https://", "src=", "@import", "url("):
        assert outside not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{run}/rollouts.jsonl", "{run}/rollouts.jsonl: no metrics.jsonl, which a run's folder"),
        ("{here}/gone", "{here}/gone: no such file or directory"),
        ("{here}/begun", "{here}/begun: no metrics.jsonl, which a run's folder (out_dir) has"),
        ("{here}/begun -o {here}/a/b.html", "--output {here}/a/b.html: expected a file in an"),
        ("{here}/begun -o {here}", "--output {here}: expected a file in an existing directory"),
        (
            "{here}/begun -o {here}/begun/run.json/a",
            "run.json/a: expected a file in an existing directory",
        ),
    ],
)
def test_wrong_path_is_named_before_reading(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_text("{}")
    assert main(line.format(run=run, here=tmp_path).split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message.format(run=run, here=tmp_path) in err


def test_optional_columns_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, the learner's log-probabilities, entropies, segment advantages and branches."""
    write_run(tmp_path, steps=1)
    logp = np.array([-0.5, -1.0], np.float32)
    prompt, turn = Segment(np.array([1], np.int32)), Segment(np.array([2, 3], np.int32), logp)

    def read(row: object) -> Rollout:
        return Rollout(
            task=TASK,
            segments=[prompt, turn],
            closed_rows=[[prompt, turn]],
            segment_advantages=[0.0, 1.0, 0.0, -2.0],
            learner_logprobs=[None, logp, None, logp - 1],
            entropies=[None, logp + 2, None, None],
            parent=0,
            forked_at=2,
            timings={"decode_s": 1.0},
            span_rewards=[SpanReward(1, 3, "check", 0.5)],
            status=Status.COMPLETED,
        )

    monkeypatch.setattr("agentgrpo.inspect.view.collect.read_rollout", read)
    data = read_run(tmp_path)
    stored = data.index["rollouts"][0]
    assert [s[0] for s in stored["segments"]] == [0, 1, 0, 1]
    assert [s[4] for s in stored["segments"]] == [0.0, 1.0, 0.0, -2.0]
    assert data.index["recorded"] == ["entropies", "learner_logprobs", "logprobs"]
    assert (stored["parent"], stored["forked_at"]) == (0, 2)
    assert stored["spans"] == [[1, 3, "check", 0.5]]
    assert stored["timings"] == {"decode_s": 1.0}
    _, streams = chunk_of(data, 0)
    np.testing.assert_allclose(streams["learner_logprobs"][:4], [-0.5, -1, -1.5, -2], rtol=5e-4)
    np.testing.assert_allclose(streams["entropies"][:4], [1.5, 1, np.nan, np.nan], rtol=5e-4)


def test_rows_of_program_have_turns_and_parent(tmp_path: Path) -> None:
    (rollout,) = read_run(write_program(tmp_path)).index["rollouts"]
    aside, again, main = rollout["rows"]
    assert aside == [2, [1], -1, 0]
    assert again[:3] == [2, [2], 2]
    assert again[3] == sum(length for _, _, length, *_ in rollout["segments"][4:6])
    assert main == [6, [0, 3, 4], -1, 0]
    assert all("rows" not in one for one in read_run(write_run(tmp_path / "x")).index["rollouts"])

"""Of every corruption of another program's record the claim that fails is named.

Of what a record does not hold it is said that nothing can be said.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgrpo import verify
from agentgrpo.audit.claims import CLAIMS, Judgement, Tokens, judge
from agentgrpo.foreign.read import _of_trl, read
from agentgrpo.view.__main__ import main as view
from tests import tiny
from tests.foreign.test_read import FILES, SAMPLES
from tests.test_imports import ROOT

Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model_dir(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokens(folder: Path) -> Tokens:
    return Tokens(folder)


def judged(name: str, tokens: Tokens | None = None) -> Judgement:
    return judge(read(SAMPLES / name)[1], tokens)


UNSAID = {
    "trl/completions_00001.parquet": "ids history mask logprobs learner",
    "trl/rollouts.jsonl": "history text learner advantages",
    "verifiers/results.jsonl": "ids history text mask logprobs learner advantages",
    "verifiers/states.jsonl": "learner",
    "prime_rl/rollouts/step_3/train/effective/traces.jsonl": "history text learner advantages",
    "prime_rl/token_exports/step_3/rank_0.jsonl": "history text advantages",
    "atif/trajectory.json": "learner advantages",
}
"""What each sample does not record, as docs/audit.md says."""


def test_the_page_says_what_is_not_recorded() -> None:
    page = (ROOT / "docs" / "audit.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if ": " in line[:14]]
    said = {row[0].partition(":")[0]: row[1:] for row in rows if len(row) == 1 + len(FILES)}
    assert said.keys() == CLAIMS.keys()
    for place, name in enumerate(FILES):
        assert {c for c, cells in said.items() if cells[place] == "no"} == {*UNSAID[name].split()}


@pytest.mark.parametrize("name", FILES)
def test_what_is_not_recorded_is_said_and_what_is_holds(name: str, tokens: Tokens) -> None:
    found = judged(name, tokens)
    unsaid = {claim for claim, tally in found.tallies.items() if tally.missing}
    assert unsaid == set(UNSAID[name].split())
    wrong = {claim for claim, tally in found.tallies.items() if tally.faults}
    assert wrong == ({"history"} if "states" in name else set())
    held = {claim for claim, tally in found.tallies.items() if tally.held}
    assert held == CLAIMS.keys() - unsaid - wrong
    assert found.status == (1 if wrong else 0 if held else 3)


def test_without_a_tokenizer_less_can_be_said() -> None:
    found = judged("atif")
    assert str(found.tallies["text"]) == "not recorded in 1: no tokenizer was given"
    assert "no tokenizer to see where turns end" in str(found.tallies["mask"])
    assert found.notes == []


def test_verifiers_encodes_its_history_again(tokens: Tokens) -> None:
    """Its own record shows it: what the sampler drew is not what the next turn was asked with."""
    faults = judged("verifiers/states.jsonl", tokens).faults
    assert len(faults) == 2
    assert all("the same text encoded again, in what was sampled" in fault for fault in faults)


TRL, STATES, ATIF = "trl/rollouts.jsonl", "verifiers/states.jsonl", "atif/trajectory.json"
TRACES = "prime_rl/rollouts/step_3/train/effective/traces.jsonl"
EXPORT = "prime_rl/token_exports/step_3/rank_0.jsonl"


@pytest.mark.parametrize(
    ("name", "change", "claim", "says"),
    [
        (TRL, "r['logprobs'][1].pop()", "ids", "logprobs for"),
        (TRL, "r['env_mask'][1].pop()", "mask", "a mask of"),
        (TRL, "del r['env_mask']", "mask", "<|im_end|> are trained on, which ended"),
        (TRL, "r['env_mask'][2] = [1] * len(r['env_mask'][2])", "mask", "tokens behind <|im_end|>"),
        (TRL, "r['logprobs'][0][0] = 0.25", "logprobs", "1 of the sampler's are above 0, up to"),
        (TRL, "r['logprobs'][0][0] = None", "logprobs", "1 of 12 of the sampler's are no numbers"),
        (TRL, "r['logprobs'] = [[0.0] * len(x) for x in r['logprobs']]", "logprobs",
         "all 48 of the sampler's, in all 4 rollouts that have any, are 0: nobody computed"),
        (EXPORT, "r['trainer_logprobs'] = r['inference_logprobs'] = [0.0] * len(r['token_ids'])",
         "learner", "12 of the trainer's, in all 1 rollouts"),
        (TRL, "r['completion_ids'][3][0] = 99999", "ids", "but the tokenizer has 259"),
        (STATES, "t[0]['tokens']['prompt_mask'][0] = 1", "mask", "turn 0: 1 tokens of its prompt"),
        (STATES, "t[0]['tokens']['completion_mask'].pop()", "mask", "a mask of 7 for 8 tokens"),
        (STATES, "t[0]['tokens']['completion_logprobs'].pop()", "ids", "7 logprobs for 8 tokens"),
        (STATES, "t[1]['usage']['completion_tokens'] += 1", "ids", "engine sampled 9 tokens"),
        (STATES, "t[1]['usage']['prompt_tokens'] -= 1", "ids", "engine read a prompt of"),
        (STATES, "t[1]['completion'][0]['content'] = 'Forty-two.'", "text", "'Forty-two.', but"),
        (STATES, "r['advantage'] = 3.0", "advantages", "all rewards are equal, and one is 3"),
        (STATES, "r['reward'], r['advantage'] = 9.0, 3.0", "advantages", "its group sum to 3"),
        (STATES, "r['advantage'] = float('nan')", "advantages", "one of its group is nan"),
        (TRACES, "n[0]['mask'][0] = True", "mask", "1 tokens of a user message nobody sampled"),
        (TRACES, "n[1]['mask'].pop()", "mask", "node 1: a mask of"),
        (TRACES, "n[1]['logprobs'].pop()", "ids", "node 1: 5 logprobs for 6 sampled tokens"),
        (TRACES, "n[1]['token_ids'].pop(), n[1]['mask'].pop(), n[1]['logprobs'].pop()", "ids",
         "call 0: 5 ids, but the engine sampled 6 tokens"),
        (TRACES, "n[2]['token_ids'].pop(), n[2]['mask'].pop()", "ids", "engine read a prompt of"),
        (EXPORT, "r['loss_mask'] = [m or n > 40 for n, m in enumerate(r['loss_mask'])]; "
         "r['trainer_logprobs'] = [x - 5 for x in r['trainer_logprobs']]", "mask",
         "tokens are trained on whose sampler's log-probability is 0"),
        (EXPORT, "r['trainer_logprobs'] = [x / 2 for x in r['trainer_logprobs']]", "learner",
         "nats from the sampler's"),
        (EXPORT, "r['trainer_logprobs'] = [1.0 for x in r['trainer_logprobs']]", "learner",
         "12 of the trainer's are above 0"),
        (ATIF, "s[1]['metrics']['logprobs'].pop()", "ids", "step 2: 5 logprobs for 6 tokens"),
        (ATIF, "s[2]['metrics']['completion_tokens'] = 44", "ids", "but the engine sampled 44"),
        (ATIF, "s[2]['metrics']['prompt_token_ids'][5] ^= 1", "history", "another text"),
        (ATIF, "s[2]['message'] = 'Forty-two.'", "text", "turn 1: 'Forty-two.', but its ids say"),
    ],
)  # fmt: skip
def test_a_corruption_is_found(
    tmp_path: Path, tokens: Tokens, name: str, change: str, claim: str, says: str
) -> None:
    path = tmp_path / Path(name).name
    lines = (SAMPLES / name).read_text()
    rows = [json.loads(lines)] if name == ATIF else [*map(json.loads, lines.splitlines())]
    row = rows[0]
    names = {"r": row, "s": row.get("steps"), "t": row.get("trajectory")}
    exec(change, names | {"n": row["traces"][0]["nodes"] if "traces" in row else None})
    if name == STATES:
        for other in rows:
            other["advantage"] = other["advantage"] or 0.0
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    faults = judge(read(path)[1], tokens).tallies[claim].faults
    assert any(f": {claim}: " in fault for fault in faults), faults
    assert any(says in fault for fault in faults), faults


def test_a_short_rollout_may_be_certain(tmp_path: Path) -> None:
    """Two tokens of probability 1: alone, and beside others."""
    row: dict[str, Any] = {
        "prompt_ids": [[1]] * 2, "completion_ids": [[5, 6], [7] * 20],
        "logprobs": [[0.0, -0.0], [-0.5] * 20],
    }  # fmt: skip
    for count in (1, 2):
        part = {key: value[:count] for key, value in row.items()}
        (tmp_path / "r.jsonl").write_text(json.dumps(part) + "\n")
        found = judge(read(tmp_path / "r.jsonl")[1])
        assert found.faults == []
        assert found.tallies["logprobs"].held == count


def test_advantages_are_those_of_trls_groups() -> None:
    """Of ids and texts that do not fit each other too, where record_ids() was among the rewards."""
    rows = [
        {"step": 1, "prompt": "a", "completion": "b", "f": reward, "advantage": advantage}
        for reward, advantage in ((0.0, -1.0), (1.0, 1.0))
    ]
    found = judge([t for row in rows for t in _of_trl(row, "x")])
    assert found.tallies["advantages"].held == 2
    rows[1]["advantage"] = 2.0
    found = judge([t for row in rows for t in _of_trl(row, "x.parquet:1")])
    assert found.faults == ["x.parquet:1: advantages: those of its group sum to 1"]


@pytest.mark.parametrize(
    ("first", "last", "counts"), [(0, 0, (10, 0, 0)), (0, 1, (6, 3, 0)), (4, 5, (6, 0, 1))]
)
def test_a_table_of_trl_may_begin_within_a_group(
    first: int, last: int, counts: tuple[int, int, int]
) -> None:
    """It is the last generation_batch_size rows, of evaluations too; no later group is cut."""
    said = {"train 1": [-1.0, 0.0, 1.0, 0.0], "train 2": [-1.0, 0.0, 1.0, 0.0], "test": [1.0, -1.0]}
    rows = [
        {"step": 1, "prompt": prompt, "completion": "b", "f": advantage, "advantage": advantage}
        for prompt, advantages in said.items()
        for advantage in advantages
    ]
    del rows[first:last]
    found = judge(
        [t for n, row in enumerate(rows, 1) for t in _of_trl(row, f"completions_1.parquet:{n}")]
    )
    tally = found.tallies["advantages"]
    assert (tally.held, tally.missing.total(), len(tally.faults)) == counts


def test_a_tokenizer_tells_text_that_was_encoded_again(tmp_path: Path) -> None:
    merged = tiny.make_tokenizer(merges=[("a", "b")])
    merged.save_pretrained(tmp_path)
    tokens = Tokens(tmp_path)
    a, b, ab = (merged.convert_tokens_to_ids(word) for word in ("a", "b", "ab"))
    row = {"prompt_ids": [[b]], "completion_ids": [[a, b]], "logprobs": [[-1.0, -1.0]]}
    for ids, says in (([a, b], "so they were not encoded again"), ([ab, b], "cannot be told")):
        (tmp_path / "r.jsonl").write_text(json.dumps({**row, "completion_ids": [ids]}) + "\n")
        assert says in judge(read(tmp_path / "r.jsonl")[1], tokens).notes[0]
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokens(tmp_path / "none")


def test_a_last_line_that_was_cut_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (SAMPLES / TRL).read_text()
    (tmp_path / "rollouts.jsonl").write_text(line)
    says = "rollouts.jsonl: its last line has no end, and was left out"
    assert verify.main([str(tmp_path)]) == 0
    assert says not in capsys.readouterr().out
    (tmp_path / "rollouts.jsonl").write_text(line + line[:-1])
    assert verify.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == says
    assert view(["--output", str(tmp_path / "v.html"), str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == says


def test_the_command_says_each_claim(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert verify.main([str(SAMPLES / TRL), "--tokenizer", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "ids        holds in 4\n" in said
    assert "learner    not recorded in 4: the trainer's log-probabilities\n" in said
    assert "0 faults in 4 rollouts, 48 sampled tokens; written by: outputs of a rollout" in said
    assert verify.main([str(SAMPLES / "verifiers" / "results.jsonl")]) == 3
    assert verify.main([str(SAMPLES / STATES)]) == 1
    assert verify.main([str(SAMPLES / TRL), "--tokenizer", str(SAMPLES)]) == 2
    assert "no tokenizer.json" in capsys.readouterr().err

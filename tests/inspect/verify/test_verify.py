"""`agentgrpo verify` passes recorded runs and rejects every corruption of them."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentgrpo.config.read import load_config
from agentgrpo.inspect.verify import verify
from agentgrpo.inspect.verify.tokens import rollout_faults
from agentgrpo.learn import minibatches
from agentgrpo.learn.batch import PackedBatch
from agentgrpo.learn.minibatches import Update, mini_batches
from agentgrpo.learn.packing import pack_tree
from agentgrpo.rollout.transcript import Drift, Transcript
from agentgrpo.types import Float32, Group, Int32, Rollout, Status, Turn
from tests.given import TASK
from tests.inspect.verify.recorded import Files, record
from tests.playing import EOT, TOKENIZER
from tests.rollout.stubs import StubEngine
from tests.rollout.stubs import Turn as StubTurn
from tests.rollout.test_branch import ALWAYS

Record = dict[str, Any]
RUN_JSON_2026_11 = Path(__file__).with_name("run_json_2026_11.json")
write_run = record
MASKED = {
    f"rollout.treatment.{status}": "mask" for status in ("truncated_turns", "truncated_length")
}


def test_uncounted_masked_rollout_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B of the normaliser is checked too, although masked rollouts have no loss terms."""

    def without_masked(groups: Any, config: Any, *, step: int) -> Any:
        return [
            [Group(task=g.task, rollouts=[r for r in g.rollouts if r.trained]) for g in part]
            for part in mini_batches(groups, config, step=step)
        ]

    grpo: dict[str, Any] = {"loss.loss_type": "grpo", **MASKED}
    write_run(tmp_path, **grpo)
    assert verify.verify_run(tmp_path).faults == []
    monkeypatch.setattr(minibatches, "mini_batches", without_masked)
    faults = verify.verify_run(tmp_path).faults
    assert any("the weight of its terms is not" in fault for fault in faults)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"loss.loss_type": "grpo", "loss.beta": 0.1, **MASKED},
        {"loss.scale_rewards": "batch", "loss.baseline": "leave_one_out"},
        {"loss.span_credit": "return_to_go"},
        {"env.kind": "console"},  # where span_credit = "auto" is "turn"
        {"loss.multi_objective_aggregation": "normalize_then_sum"},
        {"reward.sigma_tool": 0.2, "reward.solved_at": 1.0, "reward.tool_cost": 0.1},
        {"loss.loss_type": "dr_grpo", "loss.num_mini_batches": 2, "learner.max_tokens": 1024},
        {"loss.loss_type": "dapo", "loss.normaliser": "sequence_sum"},
    ],
    ids=["default", "grpo", "batch", "spans", "turns", "gdpo", "sigmas", "mini-batches", "own"],
)
def test_recorded_run_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: dict[str, Any]
) -> None:
    write_run(tmp_path, **overrides)
    report = verify.verify_run(tmp_path)
    assert report.faults == []
    assert report.rollouts == 3 * 3 + 2 * 2 * 4
    assert report.turns > 32
    assert report.steps == 2
    assert report.terms > 100
    assert report.learned == report.terms
    assert verify.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("0 faults in 25 rollouts")


@pytest.mark.parametrize("sampler", ["users_own:Mine", ""])
def test_custom_sampler_without_hashes_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sampler: str
) -> None:
    """Missing hashes of the shipped sampler are a fault; packed batches are checked for both."""
    write_run(tmp_path)
    files = Files.of(tmp_path)
    files.described["config"]["rollout"]["sampler"] = sampler
    for row in files.rollouts:
        row["turns"] = []
    for row in files.metrics:
        step = [r for r in files.rollouts if (r["step"], r["split"]) == (row["step"], "train")]
        total = sum(len(s["token_ids"]) for r in step for s in r["segments"] if s["logprobs"])
        if "rollout/groups" in row:
            row["rollout/total_sampled_tokens"] = float(total)
    files.write(tmp_path, forged=True)
    report = verify.verify_run(tmp_path)
    assert report.unaccounted == (25 if sampler else 0)
    assert (report.faults == []) == bool(sampler)
    assert report.learned == report.terms > 100
    assert verify.main([str(tmp_path)]) == (0 if sampler else 1)
    note = "of 25 rollouts of rollout.sampler it is not recorded what the engine saw"
    assert (note in capsys.readouterr().out) == bool(sampler)
    sampled_of(files.rollouts[-1])["logprobs"][0] = 0.5
    files.write(tmp_path, forged=True)
    assert verify.verify_run(tmp_path).faults, "its tokens are checked anyway"


@pytest.mark.parametrize(
    ("env", "recomputed"),
    [("auto", True), ("gymnasium", False), ("absent_module:World", False)],
    ids=["numeric", "judged by the environment", "class absent"],
)
def test_run_json_of_2026_11_without_reward(tmp_path: Path, env: str, recomputed: bool) -> None:
    """Its config has the keys of that time; the environment's class then decides the reward."""
    write_run(tmp_path)
    files = Files.of(tmp_path)
    files.described = json.loads(RUN_JSON_2026_11.read_text())
    files.described["config"]["env"]["kind"] = env
    files.write(tmp_path, forged=True)
    assert verify.verify_run(tmp_path).faults == []
    next(r for r in files.rollouts if "answer" in r["rewards"])["rewards"]["answer"] += 0.5
    files.write(tmp_path, forged=True)
    faults = verify.verify_run(tmp_path).faults
    assert any("from its answer, got" in fault for fault in faults) is recomputed


def sampled_of(record: Record) -> Record:
    sampled: list[Record] = [s for s in record["segments"] if s["logprobs"]]
    return sampled[-1]


def changed(run: Path, change: str, which: Callable[[Record], Any]) -> tuple[Record, list[str]]:
    """Change the first matching record with a piece of code; returns it and verify's faults.

    The code's names: the record r, its segments s, its turns t, its last sampled segment x.
    """
    files = Files.of(run)
    r = next(line for line in files.rollouts if which(line))
    exec(change, {"r": r, "s": r["segments"], "t": r["turns"], "x": sampled_of(r)})
    files.write(run, forged=True)
    return r, verify.verify_run(run).faults


FORGET = "r['learner_logprobs'] = r['entropies'] = None"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            "x['token_ids'][0] ^= 1",
            r"^step {step} {split} group {group} rollout \d+: turn .* are not those that",
        ),
        (
            "x['logprobs'][0] = 'no'",
            r"^rollouts\.jsonl:\d+: segments\S+logprobs\.0: .* valid number",
        ),
        ("del t[0]['replaced']", r"^rollouts\.jsonl:\d+: turns\.0\.replaced: Field required"),
        (FORGET, r"update 0: number of learner_logprobs is not that of .*: rollouts \[\d+\]"),
        (
            "r['learner_logprobs'][0] = [-1.0] * len(s[0]['token_ids'])",
            "learner_logprobs: expected one number for each sampled token",
        ),
        (
            "r['learner_logprobs'][1][0] -= 0.002",
            r"learner and sampler differ by 0.00\d+ nats, more than 0.001",
        ),
    ],
)
def test_corruption_is_located_and_named(tmp_path: Path, change: str, fault: str) -> None:
    """inspect/verify/test_definitions.py has more kinds of faults."""
    write_run(tmp_path)
    record, faults = changed(tmp_path, change, lambda r: r["learner_logprobs"])
    assert any(re.search(fault.format(**record), message) for message in faults), faults
    assert verify.main([str(tmp_path)]) == 1


def test_learner_columns_are_complete_or_absent(tmp_path: Path) -> None:
    write_run(tmp_path)
    files = Files.of(tmp_path)
    whole = [row for row in files.rollouts if (row["step"], row["split"]) != (2, "heldout")]
    refused = Files(copy.deepcopy(whole), files.metrics[:3], files.described)
    for row in refused.rollouts:
        if (row["step"], row["split"]) == (1, "train"):  # a step that the learner refused
            exec(FORGET, {"r": row})
    refused.write(tmp_path, forged=True)
    assert any("its line" not in f for f in verify.verify_run(tmp_path).faults), "it is sealed"
    log = tmp_path / "rollouts.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    sealed = b"".join(lines[:-8])
    last = hashlib.blake2b(lines[-9], digest_size=16).hexdigest()
    run = json.loads((tmp_path / "run.json").read_text())
    run["records"]["rollouts.jsonl"] = {"bytes": len(sealed), "hash": last}
    (tmp_path / "run.json").write_text(json.dumps(run))
    report = verify.verify_run(tmp_path)
    assert report.faults == []
    assert "so the learner refused the step" in " ".join(report.notes)
    assert 0 < report.learned < report.terms
    trained = next(line for line in files.rollouts if line["learner_logprobs"])
    for line in files.rollouts:
        if line["split"] == "heldout":
            line.update({key: trained[key] for key in ("learner_logprobs", "entropies")})
    files.write(tmp_path, forged=True)
    faults = verify.verify_run(tmp_path).faults
    assert sum("held out, but has learner_logprobs" in f for f in faults) == 9


@pytest.mark.parametrize(
    ("field", "fault"),
    [
        ("target_N", "targets are not the sampled ids"),
        ("old_logp_N", "log-probabilities are not the sampled ones"),
        ("row_N", "history|not predicted at the token before"),
        ("tout_T", "position is not the number|after the batch"),
        ("input_ids_T", "the last term sees another history"),
        ("positions_T", "position is not the number"),
        ("weight_N", "the weight of its terms is not"),
        ("advantage_N", "its terms have other advantages"),
        ("sample_N", "terms for|targets are not|wrong number of loss terms"),
    ],
)
def test_wrong_batch_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, fault: str
) -> None:
    config = write_run(tmp_path)

    def wrong(groups: Any, **options: Any) -> list[Any]:
        first, *others = pack_tree(groups, **options)
        names = [name for name in vars(PackedBatch) if name.endswith(("_T", "_N"))]
        columns = {name: getattr(first, name).copy() for name in names}
        columns[field][len(columns[field]) // 2] += 1
        return [SimpleNamespace(**columns), *others]

    monkeypatch.setattr("agentgrpo.learn.minibatches.pack_tree", wrong)
    report = verify.verify_run(tmp_path)
    assert report.faults
    assert any(re.search(fault, message) for message in report.faults), report.faults
    assert config.loss.num_mini_batches == 1


def test_rollout_missing_from_batches_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    monkeypatch.setattr(
        "agentgrpo.inspect.verify.verify.plan_updates",
        lambda groups, config, step: [Update(batches=[], num_samples=0)],
    )
    faults = verify.verify_run(tmp_path).faults
    assert sum("wrong number of loss terms: rollouts [" in fault for fault in faults) == 2
    assert sum("number of learner_logprobs is not that of" in fault for fault in faults) == 2


def ids(*values: int) -> Int32:
    return np.array(values, np.int32)


def logp(count: int) -> Float32:
    return -np.ones(count, np.float32)


def forked_rollout() -> Rollout:
    """Two turns, the second after a prompt that drops the first's thoughts: a fork."""
    transcript, turns = Transcript(ids(1, 2, 3)), []
    for row, sampled in ((0, ids(6, 7, 8)), (1, ids(60, 61))):
        turns.append(Turn.of(transcript.ids.copy(), sampled, "stop"))
        turns[-1] = Turn(**{f: getattr(turns[-1], f) for f in Turn.__slots__} | {"row": row})
        transcript.sample(sampled, logp(len(sampled)))
        if row == 0:
            assert transcript.rerender(ids(1, 2, 50, 51)) is Drift.FORK
    return Rollout(
        task=TASK, segments=transcript.segments, closed_rows=transcript.closed_rows, turns=turns,
        status=Status.COMPLETED, advantage=1.0,
    )  # fmt: skip


def test_fork_passes_only_if_recorded(tmp_path: Path) -> None:
    rollout = forked_rollout()
    assert list(rollout_faults(rollout)) == []
    config = load_config("quickstart")
    groups = [Group(task=TASK, rollouts=[rollout])]
    assert verify.step_faults(groups, config, 0, 1e-3) == ([], 5)
    rollout.closed_rows[0][0].token_ids[2] = 99  # now the later row comes first in the tree
    assert verify.step_faults(groups, config, 0, 1e-3) == ([], 5)
    narrow = config.learner.model_copy(update={"max_tokens": 7})  # and now in another tree
    assert verify.step_faults(groups, config.model_copy(update={"learner": narrow}), 0, 1e-3) == (
        [],
        5,
    )
    rollout.closed_rows.clear()  # the fork is not recorded
    assert list(rollout_faults(rollout)) == ["turn 1: row 1, but there are 1 rows"]


@pytest.mark.parametrize("credit", ["soft", "hard"])
def test_branches_start_like_their_parents(tmp_path: Path, credit: str) -> None:
    """Shared turns are packed, weighted and scored by the learner as in training."""

    def policy(number: int, prompt: str) -> StubTurn:
        turn = prompt.count("<|im_start|>assistant") - 1
        return StubTurn(
            f"<code>{number}</code>" if turn < 2 else f"Answer: {42 if number % 2 else 7}{EOT}"
        )

    settings: dict[str, Any] = {"loss.branch_credit": credit, "steps": 1, "eval_every": 0}
    for key, value in {**ALWAYS, "initial": 1}.items():
        settings[f"rollout.branching.{key}"] = value
    write_run(tmp_path, engine=StubEngine(TOKENIZER, policy), **settings)
    files = Files.of(tmp_path)
    branches = [row for row in files.rollouts if row["parent"] is not None]
    assert len(branches) > 1
    report = verify.verify_run(tmp_path)
    assert report.faults == []
    sampled = sum(
        len(s["token_ids"])
        for row in files.rollouts
        for s in row["segments"]
        if s["logprobs"] and row["split"] == "train" and row["learner_logprobs"]
    )
    assert report.learned == report.terms > 0
    assert (report.terms == sampled) if credit == "soft" else (report.terms < sampled)
    number = files.rollouts.index(branches[0])
    for key, value in (("parent", 7), ("parent", branches[0]["index"]), ("forked_at", 3)):
        wrong = files.copy()
        wrong.rollouts[number][key] = value
        wrong.write(tmp_path, forged=True)
        faults = verify.verify_run(tmp_path).faults
        assert any("does not begin like its parent" in f for f in faults), faults
    wrong = files.copy()
    wrong.rollouts[number]["segments"][1]["logprobs"][0] -= 1.0
    wrong.write(tmp_path, forged=True)
    faults = verify.verify_run(tmp_path).faults
    assert any("does not begin like its parent" in fault for fault in faults)


ROLLOUTS = "rollouts.jsonl"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("run.json", None, "{run}: no run.json, which a run's folder (out_dir) has"),
        ("metrics.jsonl", None, "metrics.jsonl: no such file"),
        ("run.json", "[]", "run.json: expected a JSON object"),
        ("run.json", '{{"learner": {{}}}}', "run.json: not the run.json of a training run: KeyErr"),
        ("run.json", '{{"config": {{"gone": 1}}}}', "unknown config key gone"),
        (ROLLOUTS, "{first}\n{{\n", "rollouts.jsonl:2: not JSON: Expecting"),
        (ROLLOUTS, '{first}\n{{"status": "gone"}}\n', "rollouts.jsonl:2: no key 'step'"),
        (ROLLOUTS, "{first}\n[]\n", "rollouts.jsonl:2: not a JSON object"),
    ],
)
def test_invalid_run_or_record_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str | None, message: str
) -> None:
    write_run(tmp_path)
    first = (tmp_path / ROLLOUTS).read_text().splitlines()[0]
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(text.format(first=first))
    assert verify.main([str(tmp_path)]) == 2
    out = capsys.readouterr().err
    assert out.startswith("error: ")
    assert message.format(run=tmp_path) in out

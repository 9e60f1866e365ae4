"""Whole runs: `python -m agentgrpo.train` with real vLLM, real nsjail and a tiny model."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgrpo.inspect.verify import verify
from agentgrpo.inspect.view.collect import STREAMS, read_run
from agentgrpo.records.metrics import HASHES
from agentgrpo.records.rollouts import read_rollout
from agentgrpo.support.atomic_files import read_lines, write_lines
from agentgrpo.types import Rollout
from tests import tiny
from tests.given import TASK
from tests.inspect.verify.recorded import Files
from tests.learn.given import oracle_model
from tests.models.test_endpoints import prompt_logprobs
from tests.models.test_endpoints import server as server
from tests.warm import ROOT, Command, environment

STEPS = 4
PATIENCE_S = 600
TIMES = (
    "decode_s", "idle_s", "observe_s", "publish_s", "seconds", "total_s",
    "sandbox_wall_s", "sandbox_cpu_s", "teacher_s",
)  # fmt: skip
"""Metrics that differ in every run."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * PATIENCE_S)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with untied embeddings, unlike in other tests."""
    return tiny.make_agent_dir(tmp_path_factory.mktemp("agent"), tied=False)


def write_config(folder: Path, model: Path | str) -> Path:
    """A config with STEPS short steps on SUMS, with out_dir folder / "run"."""
    for name, count, seed in (("train", 20, 0), ("heldout", 4, 1)):
        write_lines(folder / f"{name}.jsonl", tiny.sums(count, seed=seed))
    path = folder / "config.toml"
    path.write_text(
        f"""
model = "{model}"
out_dir = "{folder / "run"}"
steps = {STEPS}
save_every = 1
eval_every = 3
[agent.options]
system_prompt = "S"
[rollout]
tasks_per_step = 3
group_size = 4
max_turns = 2
max_turn_tokens = 24
refill_below = 2
deterministic = true
[engine]
max_model_len = 192
kv_cache_gib = 0.0625
weights = "shared"
[sandbox]
max_live = 32
[data]
train = "{folder / "train.jsonl"}"
heldout = "{folder / "heldout.jsonl"}"
num_heldout = 4
[learner]
learning_rate = 1e-3
decay = "linear"
[loss]
beta = 0.05
[teacher]
feedback = "errors"
weight = 0.3
decay = 0.5
"""
    )
    return path


KILLED_AT_THE_SECOND_CHECKPOINT = """
import os, signal, sys
from agentgrpo.records import checkpoint
from agentgrpo.train.__main__ import main
write_checksums = checkpoint.write_checksums
def sealed(folder):
    if folder.name.endswith("2"):
        os.kill(os.getpid(), signal.SIGKILL)
    write_checksums(folder)
checkpoint.write_checksums = sealed
sys.exit(main(sys.argv[1:]))
"""
"""A run that is killed while it writes its second checkpoint."""


def start(config: Path, *overrides: str, **env: str) -> Command:
    return Command("-m", "agentgrpo.train", str(config), *overrides, cwd=ROOT, **env)


def finish(process: Command) -> tuple[int | None, str, str]:
    out, err = process.communicate(PATIENCE_S)
    return process.returncode, out, err


def evaluated(config: Path, *overrides: str) -> dict[str, Any]:
    """The output of `agentgrpo evaluate`."""
    status, out, err = finish(Command("-m", "agentgrpo", "evaluate", str(config), *overrides))
    assert status == 0, err
    measured: dict[str, Any] = json.loads(out[out.index("{") :])
    return measured


def repeatable(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A run's records without times, the memory of the process, and the hashes of such lines."""
    metrics = [
        {
            name: value
            for name, value in row.items()
            if name.rpartition("/")[2] not in (*TIMES, *HASHES)
            and not name.startswith(("time/", "engine/rss"))
        }
        for row in read_lines(run / "metrics.jsonl")
    ]
    rollouts = read_lines(run / "rollouts.jsonl")
    for row in rollouts:
        assert row.pop("timings")["generate_s"] > 0
        row["stats"] = {name: n for name, n in row["stats"].items() if name not in TIMES}
        del row["previous_hash"]
    return metrics, rollouts


@pytest.fixture(scope="module")
def whole_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    ran = subprocess.run(
        [sys.executable, "-m", "agentgrpo.train", str(write_config(folder, model))],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    return folder / "run", ran.stdout


@pytest.mark.nsjail
class TestWholeRun:
    def test_records_and_checkpoints_exist(self, whole_run: tuple[Path, str]) -> None:
        run, out = whole_run
        assert sorted(p.name for p in run.iterdir()) == [
            ".lock",
            "checkpoints",
            "metrics.jsonl",
            "rollouts.jsonl",
            "run.json",
        ]
        assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
            f"step_{STEPS - 1:06d}",
            f"step_{STEPS:06d}",
        ]
        record = json.loads((run / "run.json").read_text())
        assert record["config"]["rollout"]["tasks_per_step"] == 3
        assert record["config"]["loss"]["loss_type"] == "dapo", "defaults belong to the record"
        assert record["learner"]["weights"] == "shared"
        assert record["engine"]["model_runner"].endswith("CPUModelRunner")
        assert record["engine"]["attention_backend"] == ["CPU_ATTN"]
        assert "python" in record["sandbox"]
        for step in range(1, STEPS + 1):
            assert f"step {step}/{STEPS}" in out

    def test_every_step_is_recorded_and_sampler_agrees(self, whole_run: tuple[Path, str]) -> None:
        rows = read_lines(whole_run[0] / "metrics.jsonl")
        steps = [row for row in rows if "learner/loss" in row]
        assert [row["step"] for row in steps] == list(range(STEPS))
        assert all(row["engine/max_dlogp"] <= 1e-4 for row in steps)
        assert all(row["learner/sampler_gap_max"] <= 1e-4 for row in steps)
        assert [row["step"] for row in rows if "eval/solved" in row] == [0, 3, STEPS]

    def test_verify_passes_and_detects_forgery(
        self, whole_run: tuple[Path, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert verify.main([str(whole_run[0])]) == 0, capsys.readouterr().out
        assert "0 faults in" in capsys.readouterr().out

    def test_replayed_steps_are_equal_and_forged_records_differ(
        self, whole_run: tuple[Path, str], tmp_path: Path
    ) -> None:
        """Changes a number that no other one contradicts, and recomputes all hashes."""
        run = tmp_path / "run"
        shutil.copytree(whole_run[0], run)
        again = ("-m", "agentgrpo", "verify", str(run), "--again")
        status, out, err = finish(Command(*again))
        assert (status, err) == (0, ""), out
        assert ".again-" not in out
        assert "a lower keep_checkpoints" not in out
        assert re.search(
            rf"steps {STEPS} to {STEPS} again: \d+ rollouts, 1 checkpoints, bit-eq", out
        )
        files = Files.of(run)
        files.rollouts[-1]["segments"][1]["logprobs"][0] -= 0.001
        files.write(run, forged=True)
        assert verify.verify_run(run).faults == []
        status, out, _ = finish(Command(*again))
        assert status == 1
        assert f"step {STEPS} heldout group 3 rollout 0 turn 0 token 0: log-prob" in out

    def test_learner_columns_exist_for_every_trained_token(
        self, whole_run: tuple[Path, str]
    ) -> None:
        report = verify.verify_run(whole_run[0])
        assert report.learned == report.terms > 100
        for rollout in rollouts(whole_run[0], "train"):
            logprobs, entropies = rollout.learner_logprobs, rollout.entropies
            assert logprobs is not None, "the KL is over those without an advantage too"
            assert entropies is not None
            for segment, logp, entropy in zip(
                rollout.all_segments, logprobs, entropies, strict=True
            ):
                assert segment.sampled == (logp is not None) == (entropy is not None)
                if logp is not None and entropy is not None:
                    assert segment.logprobs is not None
                    np.testing.assert_allclose(logp, segment.logprobs, atol=1e-4)
                    assert (entropy > -1e-4).all()
            assert rollout.token_advantages is not None
            assert (rollout.teacher_logprobs is not None) == any(rollout.feedback)
        assert {any(r.feedback) for r in rollouts(whole_run[0], "train")} == {True, False}
        assert read_run(whole_run[0]).index["recorded"] == sorted(STREAMS), "the page can show it"

    def test_times_of_a_step_add_up(self, whole_run: tuple[Path, str]) -> None:
        rows = [r for r in read_lines(whole_run[0] / "metrics.jsonl") if "time/total_s" in r]
        assert len(rows) == STEPS + 3
        for row in rows:
            parts = {name: s for name, s in row.items() if name.startswith("time/")}
            total = parts.pop("time/total_s")
            assert sum(parts.values()) == pytest.approx(total)
        assert {"time/playing_s", "time/learning_s", "time/syncing_s"} <= rows[1].keys()
        assert "time/starting_s" in rows[0]

    def test_code_was_run_in_the_sandbox(self, whole_run: tuple[Path, str]) -> None:
        from agentgrpo.agents.code import CodeAgent

        agent = CodeAgent(system_prompt="S")
        tokenizer, ran = tiny.make_tokenizer(), 0
        for rollout in rollouts(whole_run[0], "train"):
            for sampled, observed in zip(
                rollout.segments[1::2], rollout.segments[2::2], strict=False
            ):
                text = tokenizer.decode(sampled.token_ids).removesuffix("<|im_end|>")
                results = tokenizer.decode(observed.token_ids)
                code = getattr(agent.parse(text, TASK), "code", "")
                if numbers := re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", code):
                    total = int(numbers[1]) + int(numbers[2])
                    assert f"user\n{total}<|im_end|>" in results
                    ran += 1
        assert ran > 10

    def test_checkpoint_is_the_trained_policy(self, whole_run: tuple[Path, str]) -> None:
        """Plain transformers computes the same log-probabilities as the last evaluation."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = whole_run[0] / "checkpoints" / f"step_{STEPS:06d}"
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert not model.config.tie_word_embeddings
        played = list(rollouts(whole_run[0], "heldout", step=STEPS))
        assert len(played) == 4
        for rollout in played:
            ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
            with torch.no_grad():
                logp_TV = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
            logp = logp_TV.gather(1, ids[1:, None])[:, 0].numpy()
            start = 0
            for segment in rollout.segments:
                end = start + len(segment.token_ids)
                if segment.logprobs is not None:
                    np.testing.assert_allclose(
                        logp[start - 1 : end - 1], segment.logprobs, atol=1e-4
                    )
                start = end
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == tiny.CHATML

    def test_evaluate_gives_the_numbers_of_the_run(self, whole_run: tuple[Path, str]) -> None:
        run, _ = whole_run
        checkpoint = run / "checkpoints" / f"step_{STEPS:06d}"
        results = evaluated(run.parent / "config.toml", f"model={checkpoint}")
        last = read_lines(run / "metrics.jsonl")[-1]
        assert last["step"] == STEPS
        for name in ("solved", "reward", "answered", "sampled_tokens", "tool_calls"):
            assert results[name] == pytest.approx(last[f"eval/{name}"])

    def test_killed_run_resumes_to_the_same_numbers(
        self, whole_run: tuple[Path, str], model: Path, tmp_path: Path
    ) -> None:
        config, run = write_config(tmp_path, model), tmp_path / "run"
        checkpoints = run / "checkpoints"
        (tmp_path / "killed.py").write_text(KILLED_AT_THE_SECOND_CHECKPOINT)
        killed = Command(str(tmp_path / "killed.py"), str(config))
        assert finish(killed)[0] == -signal.SIGKILL
        assert [*checkpoints.glob(".partial-*2")]
        assert not (checkpoints / "step_000002").exists()
        status, out, err = finish(start(config))
        assert (status, err) == (0, "")
        assert "resumed from" in out
        metrics, played = repeatable(run)
        metrics_whole, played_whole = repeatable(whole_run[0])
        assert metrics == metrics_whole
        assert played == played_whole
        report = verify.verify_run(run)
        assert (report.faults, report.notes) == ([], []), "its chain goes on"
        assert not list(checkpoints.glob(".*"))


def rollouts(run: Path, split: str, *, step: int | None = None) -> Iterator[Rollout]:
    for row in read_lines(run / "rollouts.jsonl"):
        if row["split"] == split and step in (None, row["step"]):
            yield read_rollout(row)


@pytest.mark.nsjail
def test_adapter_checkpoint_is_evaluated_and_trained_further(model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, model)
    lora = ["learner.lora.rank=4", 'engine.weights="auto"']
    status, _, err = finish(start(config, *lora, "steps=2", "learner.learning_rate=0.1"))
    assert (status, err) == (0, "")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000002"
    read = [setting for setting in lora if setting.startswith("engine.")]
    results = evaluated(config, *read, f"model={checkpoint}")
    rows = [row for row in read_lines(tmp_path / "run" / "metrics.jsonl") if "eval/solved" in row]
    assert [row["step"] for row in rows] == [0, 2]
    names = ("solved", "reward", "answered", "sampled_tokens", "tool_calls")
    first, last = ([row[f"eval/{name}"] for name in names] for row in rows)
    assert [results[name] for name in names] == pytest.approx(last)
    assert first != last, "the adapter made no difference"
    further = [*lora, f"model={checkpoint}", f"out_dir={tmp_path / 'further'}"]
    status, _, err = finish(start(config, *further, "steps=1"))
    assert (status, err) == (0, "")
    rows = read_lines(tmp_path / "further" / "metrics.jsonl")
    begun = next(row for row in rows if "eval/solved" in row)
    assert [begun[f"eval/{name}"] for name in names] == last
    described = json.loads((tmp_path / "further" / "run.json").read_text())
    assert described["base"] == described["model"] == str(model)
    assert sum("learner/loss" in row for row in rows) == 1


TOLD = """
def own(view):
    return None if view.answer is None else f"it is not {view.answer}"
"""


def scores_of(model: Any, ids: Any) -> Any:
    """Log-probabilities of the whole vocabulary at ids[1:]."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([[*ids]])).logits[0, :-1], -1)


def as_vllm_answers(model: Any) -> Any:
    """The response of vLLM's server with this model."""

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if "tokens" in body:
            return 200, {"prompt": tiny.make_tokenizer().decode(body["tokens"])}
        places: list[Any] = [None]
        for own, logp in zip(body["prompt"][1:], scores_of(model, body["prompt"]), strict=True):
            order = logp.argsort(descending=True).tolist()
            kept = {own, *order[: body["prompt_logprobs"]]}
            said = {i: {"logprob": logp[i].item(), "rank": order.index(i) + 1} for i in kept}
            places.append(said)
        return 200, prompt_logprobs(*places)

    return answer


@pytest.mark.nsjail
@pytest.mark.parametrize(
    "settings",
    [
        ["teacher.model={other}", "teacher.topk=5"],
        ["teacher.model=endpoint:other", "endpoints.other.url=http://127.0.0.1:{port}/v1"],
        ["teacher.feedback=solutions", "teacher.decay=0.5"],
        ["teacher.feedback=told:own", "teacher.topk=3"],
    ],
    ids=["model", "server", "solutions", "function"],
)
def test_teacher_columns_pass_verify(
    model: Path, tmp_path: Path, server: Any, settings: list[str]
) -> None:
    (tmp_path / "told.py").write_text(TOLD)
    folder = tiny.make_model_dir(tmp_path / "other", seed=5, tied=False)
    other = oracle_model(folder)
    server.answers = [as_vllm_answers(other)] * 1000
    config = write_config(tmp_path, model)
    text = config.read_text().replace('feedback = "errors"\n', "").replace("decay = 0.5\n", "")
    config.write_text(text + '[endpoints.other]\nkind = "http"\nurl = "http://x"\nmodel = "m"\n')
    given = [setting.format(other=folder, port=server.server_port) for setting in settings]
    ran = start(config, *given, "steps=2", PYTHONPATH=str(tmp_path))
    status, _, err = finish(ran)
    assert status == 0, err
    run, topk = tmp_path / "run", any("topk" in setting for setting in settings)
    report = verify.verify_run(run)
    assert (report.faults, report.unaccounted) == ([], 0)
    said = [r for r in rollouts(run, "train") if r.teacher_logprobs]
    assert len(said) > 3
    assert all((r.learner_topk_logprobs is not None) == topk for r in said)
    for rollout in said if "teacher.model" in settings[0] else ():
        each = [np.full(len(s.token_ids), s.sampled) for s in rollout.segments]
        sampled = np.concatenate(each)[1:]
        wanted = scores_of(other, rollout.token_ids)[sampled, rollout.token_ids[1:][sampled]]
        found = np.concatenate([x for x in rollout.teacher_logprobs or () if x is not None])
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    rows = [row for row in read_lines(run / "metrics.jsonl") if "learner/loss" in row]
    assert all(row["learner/teacher_terms"] > 0 for row in rows)
    files = Files.of(run)
    line = next(line for line in files.rollouts if line["teacher_logprobs"])
    values = next(x for x in line["teacher_topk_logprobs" if topk else "teacher_logprobs"] if x)
    values[:] = [value - 0.3 for value in values]
    files.write(run, forged=True)
    assert any(
        ("learner/teacher_kl: expected" if topk else "token_advantages do not") in fault
        for fault in verify.verify_run(run).faults
    )
    line["teacher_logprobs"] = None
    files.write(run, forged=True)
    assert any(
        "learner/teacher_terms: expected" in fault for fault in verify.verify_run(run).faults
    )


@pytest.mark.nsjail
def test_custom_sampler_plays_the_training_rollouts(model: Path, tmp_path: Path) -> None:
    """The sampler adds the two digits itself after the policy's code."""
    (tmp_path / "mine.py").write_text("""
from agentgrpo.rollout.stream import Streams

class Mine:
    def __init__(self, chat, config):
        self.streams = Streams(chat, config, tags=["</code>"])

    def rollout(self, engine, tasks, n, params):
        return self.streams.play(engine, tasks, n, params, self.on_token, self.messages)

    def messages(self, task):
        return [{"role": "system", "content": "S"}, task.messages[-1]]

    def on_token(self, stream, token):
        if stream.tag:
            total = sum(map(int, stream.rollout.task.messages[-1]["content"].split("+")))
            stream.inject([{"role": "user", "content": f"{total}"}])
            stream.rollout.stats["told"] = 1.0
        elif token in stream.chat.stop_token_ids and "Answer: " in stream.text:
            stream.finish(stream.text.partition("Answer: ")[2])
""")
    config = write_config(tmp_path, model)
    mine = start(
        config, "rollout.sampler=mine:Mine", "steps=2", "teacher.weight=0", PYTHONPATH=str(tmp_path)
    )
    status, _, err = finish(mine)
    assert status == 0, err
    played = list(rollouts(tmp_path / "run", "train"))
    told = [r for r in played if "told" in r.stats]
    assert len(told) > 5, "the policy was stopped at its tag and told the sum"
    assert {(len(r.segments), r.stats["turns"]) for r in told} == {(4, 2.0)}
    assert any(r.reward > 0 for r in told)
    report = verify.verify_run(tmp_path / "run")
    assert (report.faults, report.unaccounted) == ([], 0)
    rows = [row for row in read_lines(tmp_path / "run" / "metrics.jsonl") if "learner/loss" in row]
    assert all(row["learner/sampler_gap_max"] <= 1e-4 for row in rows)

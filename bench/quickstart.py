"""Train the quickstart with several seeds and score a checkpoint with plain transformers.

    python -m bench.quickstart [section.key=value ...] [--seeds 0 1 2] [--no-plain] [--no-rows]
    python -m bench.quickstart --config program --no-plain agent.options.files=FILES

Each seed has its own process and an empty run folder. Rows: held-out greedy solved share before and
after, wall seconds, largest |delta logp| of any step; then the last seed's checkpoint on the same
held-out tasks with transformers' generate(), independent of vLLM. For programs (FILES:
'["agentgrpo/examples/program/program.py"]') also the time to the first request.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentgrpo.support.atomic_files import read_lines
from agentgrpo.support.hardware import has_nvidia_gpu
from agentgrpo.support.runtime import prepare_environment
from agentgrpo.types import Int32, Turn
from bench.harness import append_row


def run_seed(name: str, seed: int, out_dir: Path, overrides: Sequence[str]) -> dict[str, float]:
    """Train once; the numbers of the run."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "agentgrpo.train", name, *overrides]
    subprocess.run([*command, f"seed={seed}", f"out_dir={out_dir}"], check=True)
    wall_s = time.perf_counter() - started
    rows = read_lines(out_dir / "metrics.jsonl")
    solved = [row["eval/solved"] for row in rows if "eval/solved" in row]
    steps = [row for row in rows if "learner/loss" in row]
    gaps = [max(s["engine/max_dlogp"], s.get("learner/sampler_gap_max", 0.0)) for s in steps]
    sampled = sum(s["rollout/decode_s"] + s["rollout/idle_s"] for s in steps)
    played = read_lines(out_dir / "rollouts.jsonl")
    starts = [row["timings"]["start_s"] for row in played if "start_s" in row.get("timings", {})]
    return {
        "heldout_before": solved[0],
        "heldout_after": solved[-1],
        "wall_s": wall_s,
        "max_dlogp": max(gaps),
        "sample_s_per_step": sampled / len(steps),
        "learn_s_per_step": sum(s["learner/seconds"] for s in steps) / len(steps),
        "step_s": statistics.median(s["time/total_s"] for s in steps),
        "reward_first_step": steps[0]["rollout/solved"],
        "reward_last_step": steps[-1]["rollout/solved"],
        **({"start_s": statistics.fmean(starts)} if starts else {}),
    }


IN_SECONDS = ("wall_s", "sample_s_per_step", "learn_s_per_step", "step_s", "start_s")


class TransformersDecoder:
    """rollout.sampler.Decoder on transformers' generate(), one request at a time, greedy only."""

    def __init__(self, folder: Path, max_model_len: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.max_model_len = max_model_len
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._queue: list[tuple[str, Int32, int, Sequence[str], Sequence[int]]] = []

    def abort(self, request_ids: Sequence[str]) -> None:
        self._queue = [request for request in self._queue if request[0] not in request_ids]

    def add_request(
        self, request_id: str, prompt_ids: Int32, *, max_tokens: int, temperature: float,
        seed: int | None, stop: Sequence[str], stop_token_ids: Sequence[int], top_logprobs: int,
        filters: Mapping[str, float],
    ) -> None:  # fmt: skip
        if temperature != 0.0:
            raise ValueError(f"temperature: expected 0, got {temperature}")
        self._queue.append((request_id, prompt_ids, max_tokens, stop, stop_token_ids))

    def step(self):  # type: ignore[no-untyped-def]  # Completion is in a module that imports vllm
        import numpy as np
        import torch

        from agentgrpo.types import Completion

        request_id, prompt, max_tokens, stop, stop_token_ids = self._queue.pop(0)
        with torch.no_grad():
            ids = self._model.generate(
                torch.from_numpy(prompt.astype(np.int64))[None],
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=max_tokens,
                do_sample=False,
                stop_strings=list(stop),
                tokenizer=self._tokenizer,
                eos_token_id=list(stop_token_ids),
                pad_token_id=stop_token_ids[0],
            )
        new = ids[0, len(prompt) :].numpy().astype(np.int32)
        text = self._tokenizer.decode(new)
        stopped = int(new[-1]) in stop_token_ids or any(mark in text for mark in stop)
        return [
            Completion(
                request_id=request_id,
                token_ids=new,
                logprobs=np.zeros(len(new), np.float32),
                finish_reason="stop" if stopped else "length",
                stop_reason=None,
                num_cached_tokens=0,
                account=Turn.of(prompt, new, "stop" if stopped else "length"),
            )
        ]


def plain_transformers_score(name: str, checkpoint: Path, overrides: Sequence[str]) -> float:
    """Held-out solved share of a checkpoint without vLLM."""
    from agentgrpo.config.read import load_config
    from agentgrpo.rollout.sampler import Sampler
    from agentgrpo.train.evaluate import evaluate
    from agentgrpo.train.prepare import prepare_run

    config = load_config(name, overrides)
    decoder = TransformersDecoder(checkpoint, config.engine.max_model_len)
    with contextlib.closing(prepare_run(config, model=str(checkpoint))) as parts:
        sampler = Sampler(decoder, parts.agent, parts.env, parts.chat, config.rollout)
        _, metrics = evaluate(sampler, parts.heldout, parts.reward)
    return metrics["solved"]


def main(arguments: Sequence[str]) -> None:
    """Run the seeds, print and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--config", default="quickstart", help="of the same model and measures")
    parser.add_argument("--no-plain", action="store_true", help="not by transformers as well")
    parser.add_argument("--no-rows", action="store_true", help="print only")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args(arguments)
    prepare_environment()
    with tempfile.TemporaryDirectory() as folder:
        runs = [run_seed(args.config, s, Path(folder) / str(s), args.overrides) for s in args.seeds]
        if kept := os.environ.get(
            "BENCH_OUT"
        ):  # of a machine that is lent: what each step measured
            for seed, name in itertools.product(args.seeds, ("metrics.jsonl", "run.json")):
                Path(kept, f"run-{seed}").mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(folder, str(seed), name), Path(kept, f"run-{seed}", name))
        newest = max((Path(folder) / str(args.seeds[-1]) / "checkpoints").iterdir())
        plain = math.nan
        if not args.no_plain:
            plain = plain_transformers_score(args.config, newest, args.overrides)
    if args.no_rows:
        print(json.dumps({"runs": runs, "plain_transformers": plain}, indent=1))
        return
    shape = {"seeds": len(runs)}
    table = f"gpu_{args.config}" if has_nvidia_gpu() else args.config
    note = " ".join(args.overrides)
    for name in runs[0]:
        unit = "nats" if name == "max_dlogp" else "s" if name in IN_SECONDS else "share"
        values = [run[name] for run in runs]
        append_row(table, name, values, unit=unit, shape=shape, note=f"{note} {values}")
    if args.no_plain:
        return
    append_row(
        table, "heldout_after_plain_transformers", [plain], unit="share", shape={"seeds": 1},
        note=f"the checkpoint of seed {args.seeds[-1]}; in vLLM {runs[-1]['heldout_after']}",
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])

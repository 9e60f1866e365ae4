"""Time a quickstart step against TRL with the same model, tasks, agent, sandbox and rewards.

    python -m bench.beside_trl [section.key=value ...] [--steps 3] [--no-rows]

Both sides play and train on the same tasks in the same order, from the same weights and with the
same trained layers, one after the other in separate processes. TRL's side is GRPOTrainer with vLLM
in its process (vllm_mode="colocate"), a rollout_func with one generate() per turn for all rollouts,
as in its examples, and the mask of sampled tokens. A step's seconds include generation, tools and
learning. The solved shares are printed: in the first step both sides sample from the same policy,
so the shares must be similar.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentgrpo.support.atomic_files import read_lines
from agentgrpo.support.runtime import prepare_environment
from agentgrpo.types import Int32, Rollout, Turn
from bench.harness import append_row

if TYPE_CHECKING:
    from agentgrpo.config import TrainConfig
    from agentgrpo.types import Completion

CONFIG = "quickstart"
ALIKE = 0.15
"""How far the shares solved in the first step may be apart: 96 rollouts a side."""


class WholeBatch:
    """rollout.sampler.Decoder on TRL's LLM: one generate() for all that wait, to its last token."""

    def __init__(self, llm: Any, max_model_len: int) -> None:
        self._llm, self.max_model_len = llm, max_model_len
        self._waiting: list[tuple[str, Int32, Any]] = []

    def add_request(
        self, request_id: str, prompt_ids: Int32, *, max_tokens: int, temperature: float,
        seed: int | None, stop: Sequence[str], stop_token_ids: Sequence[int], top_logprobs: int,
        filters: Mapping[str, float],
    ) -> None:  # fmt: skip
        from vllm import SamplingParams

        # without its seed: on CPU vLLM fails if one is given and a prompt is read in parts
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, stop=list(stop),
            stop_token_ids=list(stop_token_ids), include_stop_str_in_output=True, logprobs=0,
        )  # fmt: skip
        self._waiting.append((request_id, prompt_ids, params))

    def abort(self, request_ids: Sequence[str]) -> None:
        self._waiting = [request for request in self._waiting if request[0] not in request_ids]

    def step(self) -> list[Completion]:
        from agentgrpo.types import Completion

        asked, self._waiting = self._waiting, []
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt.tolist()} for _, prompt, _ in asked],
            [params for *_, params in asked],
            use_tqdm=False,
        )
        done = []
        for (request_id, prompt, _), output in zip(asked, outputs, strict=True):
            best = output.outputs[0]
            ids = np.array(best.token_ids, np.int32)
            logps = [logps[i].logprob for i, logps in zip(best.token_ids, best.logprobs)]  # noqa: B905
            done.append(
                Completion(
                    request_id=request_id,
                    token_ids=ids,
                    logprobs=np.array(logps, np.float32),
                    finish_reason=best.finish_reason,
                    stop_reason=None,
                    num_cached_tokens=output.num_cached_tokens or 0,
                    account=Turn.of(prompt, ids, best.finish_reason),
                )
            )
        return done


def as_trl(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """What a rollout_func returns."""
    out: dict[str, list[Any]] = {
        name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "earned")
    }
    for rollout in rollouts:
        prompt, *rest = rollout.segments
        nothing = [np.zeros(len(s.token_ids)) if s.logprobs is None else s.logprobs for s in rest]
        out["prompt_ids"].append(prompt.token_ids.tolist())
        out["completion_ids"].append(np.concatenate([s.token_ids for s in rest]).tolist())
        out["logprobs"].append(np.concatenate(nothing).tolist())
        out["env_mask"].append([int(s.sampled) for s in rest for _ in range(len(s.token_ids))])
        out["earned"].append(rollout.reward)
    return out


def in_trl(config: TrainConfig, steps: int, threads: int) -> dict[str, list[float]]:
    """Seconds of each step and the share solved in it."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from agentgrpo.engine.start import plain_cpu_weights
    from agentgrpo.learn.policy import freeze_all_but
    from agentgrpo.rollout.sampler import Sampler
    from agentgrpo.train.evaluate import summarize
    from agentgrpo.train.prepare import prepare_run, training_stream

    parts = prepare_run(config)
    count, size = config.rollout.tasks_per_step, config.rollout.group_size
    stream = training_stream(config, parts)
    tasks = [task for _ in range(steps) for task in stream.next(count)]
    seen: dict[str, list[float]] = {"seconds": [], "solved": []}

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        torch.set_num_threads(threads)  # vLLM has taken them
        step = trainer.state.global_step
        decoder = WholeBatch(trainer.vllm_generation.llm, config.engine.max_model_len)
        sampler = Sampler(
            decoder, parts.agent, parts.env, parts.chat, config.rollout,
            max_live=config.sandbox.max_live,
        )  # fmt: skip
        groups, _ = sampler.play(tasks[step * count :][:count], size, seed=config.seed_of(step, 0))
        parts.reward.score(groups, step=step)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        seen["solved"].append(summarize(groups)["solved"])
        return as_trl(rollouts)

    model: Any = AutoModelForCausalLM.from_pretrained(parts.model, dtype=torch.float32)
    freeze_all_but(model, config.learner.trained_layers)
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder, max_steps=steps, use_cpu=not on_gpu, bf16=on_gpu,
            per_device_train_batch_size=size, gradient_accumulation_steps=count,
            num_generations=size, max_completion_length=config.engine.max_model_len,
            temperature=config.rollout.temperature, beta=0.0, gradient_checkpointing=False,
            learning_rate=config.learner.learning_rate, lr_scheduler_type="linear",
            max_grad_norm=config.learner.max_grad_norm, shuffle_dataset=False,
            use_vllm=True, vllm_mode="colocate", vllm_max_model_length=config.engine.max_model_len,
            report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        with plain_cpu_weights():  # else vLLM packs them away on CPU, and TRL cannot sync
            trainer = GRPOTrainer(
                model=model,
                processing_class=parts.chat.tokenizer,
                reward_funcs=lambda earned, **_: earned,
                args=arguments,
                train_dataset=Dataset.from_list(
                    [{"prompt": [{"role": "user", "content": "x"}]}] * 99
                ),
                rollout_func=rollout_func,
                callbacks=[_clock(seen["seconds"])],
            )
        trainer.train()
    parts.close()
    return seen


def _clock(seconds: list[float]) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self._began)

    return Clock()


def here(overrides: Sequence[str], steps: int) -> dict[str, list[float]]:
    """The same of agentgrpo.train."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "agentgrpo.train", CONFIG, *overrides, f"steps={steps}"]
        command += [f"out_dir={folder}/run", "eval_every=0", f"save_every={steps}"]
        subprocess.run(command, check=True)
        rows = read_lines(Path(folder) / "run/metrics.jsonl")
        mine = [row for row in rows if "learner/loss" in row]
    return {
        "seconds": [row["time/total_s"] for row in mine],
        "solved": [row["rollout/solved"] for row in mine],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--no-rows", action="store_true", help="print only")
    parser.add_argument("--trl", action="store_true", help="TRL's side alone, as JSON")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    asked = parser.parse_intermixed_args()
    overrides = ["rollout.refill_below=0", "rollout.max_refills=0", *asked.overrides]
    if asked.trl:
        import torch

        from agentgrpo.config.read import load_config

        threads = torch.get_num_threads()
        print(json.dumps(in_trl(load_config(CONFIG, overrides), asked.steps, threads)))
        return
    ours = here(overrides, asked.steps)
    command = [sys.executable, "-m", "bench.beside_trl", "--trl", f"--steps={asked.steps}"]
    said = subprocess.run([*command, *overrides], check=True, stdout=subprocess.PIPE, text=True)
    theirs = json.loads(said.stdout.splitlines()[-1])
    print(f"ours   {ours}\nTRL    {theirs}")
    if abs(ours["solved"][0] - theirs["solved"][0]) > ALIKE:
        raise SystemExit("the first steps are not alike: the two sides do different work")
    if asked.no_rows:
        return
    from importlib.metadata import version

    for side, seen in (("here", ours), (f"TRL {version('trl')}", theirs)):
        note = " ".join([*asked.overrides, f"solved {[round(x, 3) for x in seen['solved']]}"])
        append_row(
            "beside_trl", side, seen["seconds"], unit="s a step", shape={"steps": asked.steps},
            note=note,
        )  # fmt: skip


if __name__ == "__main__":
    prepare_environment()
    main()

"""Writes tests/foreign/samples/: rollouts as the programs themselves write them.

    python -m tests.foreign.make_samples

trl/completions_00001.parquet, trl/rollouts.jsonl: one step of TRL 1.16's GRPOTrainer with
log_completions, record_ids() among its rewards, and a rollout_func that played a tool.
verifiers/results.jsonl, verifiers/states.jsonl: one evaluation by verifiers 0.1.9, saved by itself
and by write_states(); behind the client is the tiny model, not a server. For these install
verifiers==0.1.9.post3: later versions have no such environments.
prime_rl/ and atif/ are not of their programs, which were not to be had: they follow what is written
of the formats, verifiers.v1's Episode.to_record() (its commit a60a606), prime-rl's token export
(its commit 559b447) and Harbor's RFC 0001 in version ATIF-v1.4, with tokens of the tiny model.
The classes of Harbor 0.25.0 (harbor.models.trajectories, Python 3.12) accept the last.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import tiny
from tests.audit.sampling import sample

SAMPLES = Path(__file__).parent / "samples"
PROMPT = [{"role": "user", "content": "6*7?"}]


def tool_turns(tokenizer: Any, model: Any, prompt_ids: list[int], seed: int) -> dict[str, Any]:
    """Two turns of 6 tokens with what a tool said between them."""
    ids, mask, logprobs = list[int](), list[int](), list[float]()
    for turn in range(2):
        (own,), (said,) = sample(model, [[*prompt_ids, *ids]], 6, seed=2 * seed + turn)
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        ids += [*own, end] if turn == 0 else own
        mask += [1] * 6 + [0] * (turn == 0)
        logprobs += said + [0.0] * (turn == 0)
        if turn == 0:
            told = tokenizer.encode("\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n")
            ids, mask, logprobs = ids + told, mask + [0] * len(told), logprobs + [0.0] * len(told)
    return {"completion_ids": ids, "env_mask": mask, "logprobs": logprobs}


def trl_run(folder: Path, model_dir: Path) -> None:
    from datasets import Dataset

    from agentgrpo.audit.trl import record_ids, recorded

    trl: Any = importlib.import_module("trl")
    model, tokenizer = tiny.make_model(), tiny.make_tokenizer()

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"]
               for p in prompts]  # fmt: skip
        turns = [tool_turns(tokenizer, model, p, seed) for seed, p in enumerate(ids)]
        return {"prompt_ids": ids, **{key: [t[key] for t in turns] for key in turns[0]}}

    def odd(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 2) for ids in completion_ids]

    settings = trl.GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, max_steps=1, log_completions=True,
        per_device_train_batch_size=4, num_generations=4, report_to=[], save_strategy="no",
        logging_steps=1,
    )  # fmt: skip
    trl.GRPOTrainer(
        model=str(model_dir), reward_funcs=[odd, record_ids], args=settings,
        train_dataset=Dataset.from_dict({"prompt": [PROMPT]}),
        rollout_func=recorded(rollout_func, folder / "rollouts.jsonl"),
    ).train()  # fmt: skip


class Client:
    """As much of AsyncOpenAI as verifiers uses, with the tiny model and vLLM's fields behind it."""

    base_url = "none"

    def __init__(self) -> None:
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))
        self._tokenizer, self._model, self._calls = tiny.make_tokenizer(), tiny.make_model(), 0

    async def _create(self, *, messages: list[Any], **_: Any) -> Any:
        from openai.types.chat import ChatCompletion

        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        self._calls += 1
        (ids,), (said,) = sample(self._model, [prompt["input_ids"]], 8, seed=self._calls)
        text = self._tokenizer.decode(ids)
        return ChatCompletion.model_validate({
            "id": "x", "object": "chat.completion", "created": 0, "model": "tiny",
            "choices": [{
                "index": 0, "finish_reason": "length",
                "message": {"role": "assistant", "content": text},
                "logprobs": {"content": [{"token": "", "logprob": x, "top_logprobs": []}
                                         for x in said], "refusal": None},
                "token_ids": ids,
            }],
            "prompt_token_ids": prompt["input_ids"],
            "usage": {"prompt_tokens": len(prompt["input_ids"]), "completion_tokens": len(ids),
                      "total_tokens": len(prompt["input_ids"]) + len(ids)},
        })  # fmt: skip


def verifiers(folder: Path) -> None:
    import verifiers as vf
    from datasets import Dataset
    from verifiers.utils.eval_utils import save_rollout_results

    from agentgrpo.foreign.read import write_states

    class TwoTurns(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": "Sure?"}]

    def odd(completion: Any, **_: Any) -> float:
        return float(len(completion[0]["content"]) % 2)

    rows = Dataset.from_list([{"prompt": PROMPT, "answer": "42", "task": "sums"}])
    env = TwoTurns(eval_dataset=rows, rubric=vf.Rubric(funcs=[odd]), max_turns=2)
    inputs = env.get_eval_dataset().repeat(2).to_list()
    outputs = asyncio.run(env.generate(inputs, client=Client(), model="tiny"))
    outputs["metadata"]["path_to_save"] = folder
    save_rollout_results(outputs)
    write_states(outputs, folder / "states.jsonl")


def prime_rl(folder: Path) -> None:
    """An episode as prime-rl's file monitor writes it, and the same tokens as its trainer does."""
    model, tokenizer = tiny.make_model(), tiny.make_tokenizer()
    prompt = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True)["input_ids"]
    open_ = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    turns = tool_turns(tokenizer, model, prompt, 7)
    ids, mask, logprobs = (turns[key] for key in ("completion_ids", "env_mask", "logprobs"))
    told = slice(6, len(ids) - 6 - len(open_))  # the end of the turn belongs to what is told
    opened = prompt[: len(prompt) - len(open_)]

    def node(parent: int | None, role: str, own: list[int], said: list[float]) -> dict[str, Any]:
        text = tokenizer.decode(own[len(own) - len(said) :] if said else own)
        message = {"role": role, "content": text}
        made = {"parent": parent, "message": message, "sampled": bool(said), "timestamp": 0.0}
        sampled = [False] * (len(own) - len(said)) + [True] * len(said)
        return {**made, "token_ids": own, "mask": sampled, "is_content": [], "logprobs": said}

    nodes = [
        node(None, "user", opened, []),
        node(0, "assistant", open_ + ids[:6], logprobs[:6]),
        node(1, "tool", ids[told], []),
        node(2, "assistant", open_ + ids[-6:], logprobs[-6:]),
    ]
    counts = [(len(prompt), 1), (len(prompt) + len(ids) - 6, 3)]
    calls = [
        {"node": at, "usage": {"prompt_tokens": before - 4, "completion_tokens": 6,
                               "cached_input_tokens": 4}}
        for before, at in counts
    ]  # fmt: skip
    task = {"type": "Sums", "data": {"prompt": PROMPT}, "key": "sum-0"}
    trace = {
        "version": 1,
        "id": "a",
        "task": task,
        "nodes": nodes,
        "calls": calls,
        "rewards": {"odd": {"score": 1.0, "weight": 1.0}},
        "is_completed": True,
        "ok": True,
    }
    work = {"type": "train", "step": 3}
    episode = {
        "id": "e",
        "env": {"id": "sums"},
        "task": task,
        "group": {"id": "g"},
        "run": {"type": "train", "id": "r", "work": work},
        "ok": True,
        "traces": [trace],
    }
    path = folder / "rollouts" / "step_3" / "train" / "effective"
    path.mkdir(parents=True, exist_ok=True)
    (path / "traces.jsonl").write_text(json.dumps(episode) + "\n")
    whole, before = [*prompt, *ids], [0.0] * len(prompt)
    said = [*before, *logprobs]
    export = {
        "schema_version": 1, "step": 3, "rank": 0, "micro_step": 0, "micro_sequence_idx": 0,
        "export_sequence_idx": 0, "env_name": "sums", "token_ids": whole,
        "position_ids": list(range(len(whole))),
        "loss_mask": [False] * len(prompt) + [bool(own) for own in mask],
        "advantages": [0.5] * len(whole), "inference_logprobs": said,
        "trainer_logprobs": [x - 0.01 for x in said], "entropy": [1.0] * len(whole),
    }  # fmt: skip
    path = folder / "token_exports" / "step_3"
    path.mkdir(parents=True, exist_ok=True)
    (path / "rank_0.jsonl").write_text(json.dumps(export) + "\n")


def atif(folder: Path) -> None:
    """Two turns and a tool's answer between them."""
    model, tokenizer = tiny.make_model(), tiny.make_tokenizer()
    prompt = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True)["input_ids"]
    turns = tool_turns(tokenizer, model, prompt, 9)
    ids, logprobs = turns["completion_ids"], turns["logprobs"]
    rest = [*prompt, *ids[:-6]]

    def metrics(read: list[int], own: list[int], said: list[float]) -> dict[str, Any]:
        return {
            "prompt_tokens": len(read), "completion_tokens": len(own), "prompt_token_ids": read,
            "completion_token_ids": own, "logprobs": said,
        }  # fmt: skip

    call = {"tool_call_id": "call_0", "function_name": "calculate", "arguments": {"x": "6*7"}}
    steps = [
        {"step_id": 1, "source": "user", "message": PROMPT[0]["content"]},
        {
            "step_id": 2, "source": "agent", "message": tokenizer.decode(ids[:6]),
            "tool_calls": [call], "metrics": metrics(prompt, ids[:6], logprobs[:6]),
            "observation": {"results": [{"source_call_id": "call_0", "content": "42"}]},
        },
        {
            "step_id": 3, "source": "agent", "message": tokenizer.decode(ids[-6:]),
            "metrics": metrics(rest, ids[-6:], logprobs[-6:]),
        },
    ]  # fmt: skip
    agent = {"name": "tiny", "version": "1"}
    whole = {"schema_version": "ATIF-v1.4", "session_id": "s", "agent": agent, "steps": steps}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trajectory.json").write_text(json.dumps(whole, indent=1) + "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        for name in ("trl", "verifiers"):
            (SAMPLES / name).mkdir(parents=True, exist_ok=True)
        model_dir = tiny.make_model_dir(Path(made) / "model")
        out = Path(made) / "trl"
        out.mkdir()
        trl_run(out, model_dir)
        shutil.copy(out / "completions" / "completions_00001.parquet", SAMPLES / "trl")
        shutil.copy(out / "rollouts.jsonl", SAMPLES / "trl")
        verifiers(Path(made) / "verifiers")
        for name in ("results.jsonl", "states.jsonl"):
            shutil.copy(Path(made) / "verifiers" / name, SAMPLES / "verifiers")
    prime_rl(SAMPLES / "prime_rl")
    atif(SAMPLES / "atif")


if __name__ == "__main__":
    main()

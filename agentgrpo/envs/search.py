"""Search in the user's texts (BM25 or dense vectors), or by a retriever's server.

A corpus is JSON lines with `id`, `title` and `text`. BM25 uses SQLite's FTS5; dense search uses the
vectors of a text encoder (models/text_encoder.py). Both are deterministic. A retriever is an
endpoint (models/endpoints.py). Results of a retriever, web pages and summaries can be cached in a
file. The policy calls search(query) as a tool.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pydantic
from typing_extensions import TypedDict

from agentgrpo.actions import Action, InfrastructureError, Observation, Schema
from agentgrpo.config.section import Positive, Section, UserPath
from agentgrpo.envs.base import Episode
from agentgrpo.envs.tools import Tool, ToolResult, Toolset, calls_of, observation_of
from agentgrpo.support.atomic_files import numbered_rows
from agentgrpo.types import Task

WORD = re.compile(r"\w+")
MAX_WORDS = 32
LOCK_TIMEOUT_S = 60.0
"""How long to wait for a cache file that other processes have locked."""
MAX_QUERY = 2000
"""Maximum characters of a query. A server might reject a longer one, which would count as an
infrastructure error."""
SUMMARY = (
    "Question: {question}\n\nA search for {query!r} found these texts:\n\n{texts}\n\nWrite down "
    "what they say that helps to answer the question, with names and numbers as they say them, in "
    "a few sentences and without an answer of your own. If nothing helps, write: nothing helpful."
)
Corpus = str | Path | Sequence[tuple[str, str, str]]
Text = tuple[str, str]
"""Title and text."""
Find = Callable[[str, int], list[Text]]


@dataclass(frozen=True, slots=True)
class _Context:
    question: str
    requests: list[str] = field(default_factory=list)
    """Requests that the cache could not answer: documents, page, summary."""


_context: ContextVar[_Context] = ContextVar("step")


class Dense(Section):
    """Dense search with a text encoder."""

    encoder: UserPath
    """Folder of a text encoder in transformers' format."""
    pooling: Literal["mean", "cls", "last"] = "mean"
    """How a text's hidden states become its vector: their mean, the first or the last."""
    query_prefix: str = ""
    """Prefix of a query for the encoder."""
    text_prefix: str = ""
    """Prefix of a text of the corpus for the encoder."""
    index: UserPath | None = None
    """Folder in which the corpus's vectors are stored, also for other runs."""


class Summary(Section):
    """A summary of the found texts by a model, shown instead of them."""

    endpoint: str
    """Name of an endpoint of kind http or script."""
    prompt: str = SUMMARY
    """Its prompt, with {question}, {query} and {texts}."""
    max_tokens: Positive = 512
    """Maximum tokens of the summary."""

    @pydantic.field_validator("prompt")
    @classmethod
    def _names_texts(cls, prompt: str) -> str:
        try:
            text = prompt.format(question="", query="", texts="\0")
        except (ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"expected {{question}}, {{query}} and {{texts}}: {error!r}") from None
        if "\0" not in text:
            raise ValueError(f"expected {{texts}} in the prompt, got {prompt!r:.80}")
        return prompt


@pydantic.with_config(pydantic.ConfigDict(extra="forbid"))
class SearchOptions(TypedDict, total=False):
    """Options of a search, as for SearchEnv."""

    corpus: Corpus
    dense: Dense
    retriever: str
    pages: bool
    summary: Summary
    cache: Path
    top_k: Positive
    max_chars: Positive


class SearchEnv:
    """Episodes whose only tool is a search.

    Args:
        corpus: the file of texts, or the texts as (id, title, text).
        dense: searches the corpus with vectors instead of BM25. `encoder`: folder of a text
            encoder; `pooling`: "mean" (E5, GTE), "cls" (BGE) or "last" (Qwen3-Embedding) of its
            states; `query_prefix` ("query: " with E5), `text_prefix` ("passage: "); `index`: folder
            in which the vectors are stored for other runs.
        retriever: name of an endpoint of kind "retriever", used instead of a corpus.
        pages: shows a retriever's document as the text of the web page at its `url`.
        summary: shows a model's summary of the texts for the task's question instead of the texts.
            `endpoint`: the model's name; `prompt`, with {question}, {query} and {texts};
            `max_tokens` of the summary, 512.
        cache: SQLite file for the results of retriever, pages and summary. Runs and processes may
            share it.
        top_k: results of a search.
        max_chars: maximum characters of a result's text, without its title.
        models: the run's models by name.
        retrievers: the run's retrievers by name.
        load_encoder: (folder, pooling) -> text encoder.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a row is invalid (the message has file and line), or an argument is out of
            range, has no effect or names no endpoint.
    """

    answers = ("tools",)

    def __init__(
        self,
        corpus: Corpus | None = None,
        *,
        dense: Dense | None = None,
        retriever: str = "",
        pages: bool = False,
        summary: Summary | None = None,
        cache: Path | None = None,
        top_k: Positive = 3,
        max_chars: Positive = 500,
        models: Mapping[str, Any] = MappingProxyType({}),
        retrievers: Mapping[str, Any] = MappingProxyType({}),
        load_encoder: Callable[[Path, Any], Any] | None = None,
    ) -> None:
        for name, value, requirement, is_met in (
            ("dense", dense, "corpus", corpus is not None),
            ("pages", pages, "retriever", retriever),
            ("cache", cache, "retriever or summary", retriever or summary),
        ):
            if value and not is_met:
                raise ValueError(f"{name}: it has no effect without {requirement}")
        if corpus is not None and retriever:
            raise ValueError(f"corpus: expected none with retriever {retriever!r}")
        if corpus is None and not retriever:
            raise ValueError("corpus: expected texts to search, or a retriever")
        self._top_k, self._max_chars, self._pages, self._summary = top_k, max_chars, pages, summary
        self._retriever = _endpoint_named(retrievers, retriever, "retriever", "retriever")
        if summary is not None:
            self._summarizer = _endpoint_named(
                models, summary.endpoint, "summary.endpoint", "http or script"
            )
        self._find: Find = self._retrieve
        if corpus is not None:
            texts = read_corpus(Path(corpus)) if isinstance(corpus, str | Path) else list(corpus)
            self._find = _ByWords(texts)
            if dense is not None:
                self._find = _ByMeaning(texts, _load_encoder(dense, load_encoder), dense)
        self._cache = None if cache is None else DiskCache(Path(cache).expanduser())
        self.toolset = Toolset([Tool(self._search, "search")])

    def tools(self, task: Task) -> Sequence[Schema]:
        return self.toolset.schemas

    def reset(self, task: Task) -> SearchEpisode:
        return SearchEpisode(self.toolset, str(task.messages[-1]["content"]))

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()

    def _search(self, query: str) -> str:
        """Search the collection; returns the best texts with their titles.

        Args:
            query: a few words.
        """
        if not WORD.search(query):
            raise ValueError("the query has no words")
        if len(query) > MAX_QUERY:
            raise ValueError(f"the query has more than {MAX_QUERY} characters")
        results = self._find(query, self._top_k)
        text = "\n".join(
            f"[{i}] {title}\n{text[: self._max_chars]}"
            for i, (title, text) in enumerate(results, 1)
        )
        return self._summarize(query, text) if results else "(nothing found)"

    def _summarize(self, query: str, texts: str) -> str:
        if self._summary is None:
            return texts
        fields = {"question": _context.get().question, "query": query, "texts": texts}
        messages = [{"role": "user", "content": self._summary.prompt.format(**fields)}]
        sampling = {"temperature": 0.0, "max_tokens": self._summary.max_tokens}
        key = ["summary", self._summarizer.identity, messages, sampling]
        summary: str = self._cached(
            key, lambda: self._summarizer.complete(messages, **sampling)[0].strip()
        )
        return summary

    def _retrieve(self, query: str, count: int) -> list[Text]:
        """Documents of the retriever, with the text of their web pages if `pages` is set."""
        key = ["documents", self._retriever.identity, query, count]
        rows = self._cached(key, lambda: self._retriever.retrieve(query, count))
        urls = {row["url"] for row in rows if self._pages and row["url"]}
        pages: dict[str, str] = {}
        if urls:
            with ThreadPoolExecutor(len(urls)) as threads:
                futures = {
                    url: threads.submit(copy_context().run, self._read_page, url) for url in urls
                }
            pages = {url: future.result() for url, future in futures.items()}
        return [(row["title"], pages.get(row["url"], row["text"])) for row in rows]

    def _read_page(self, url: str) -> str:
        text: str = self._cached(["page", url], lambda: self._retriever.page(url))
        return text

    def _cached(self, key: Sequence[Any], compute: Callable[[], Any]) -> Any:
        step = _context.get()

        def call() -> Any:
            step.requests.append(key[0])
            return compute()

        return call() if self._cache is None else self._cache.get(key, call)


class DiskCache:
    """Results by request, in an SQLite file that runs and processes share.

    The first stored result is returned to all, also to concurrent requests: replaying a rollout
    returns the same results. Failures are not stored.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(
                path, timeout=LOCK_TIMEOUT_S, check_same_thread=False, isolation_level=None
            )
            weakref.finalize(self, self._file.close)
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS answers (asked TEXT PRIMARY KEY, answer TEXT NOT NULL)"
            )
        except (sqlite3.Error, OSError) as error:
            raise ValueError(f"cache: {path}: {error}") from error

    def get(self, request: Any, compute: Callable[[], Any]) -> Any:
        key = json.dumps(request, sort_keys=True)
        stored = self._lookup(key)
        if stored is None:
            new = json.dumps(compute())
            self._execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", key, new)
            stored = self._lookup(key) or new
        return json.loads(stored)

    def _lookup(self, key: str) -> str | None:
        rows = self._execute("SELECT answer FROM answers WHERE asked = ?", key)
        return rows[0][0] if rows else None

    def _execute(self, statement: str, *values: str) -> list[Any]:
        try:
            with self._lock:
                return self._file.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise InfrastructureError(f"cache {self._path}: {error}") from error

    def close(self) -> None:
        self._file.close()


class SearchEpisode(Episode):
    """The searches of one rollout.

    The results are the memory of a step: an episode that repeats it gets the same results without
    new requests.
    """

    def __init__(self, toolset: Toolset, question: str) -> None:
        self._toolset, self._question = toolset, question
        self._results: tuple[ToolResult, ...] | None = None

    def recall(self, memory: Any) -> None:
        """Make the next step return the results of the step that it repeats."""
        self._results = memory

    def step(self, action: Action) -> Observation:
        results, self._results = self._results, None
        context = _Context(self._question)
        if results is None:
            token = _context.set(context)
            try:
                results = tuple(self._toolset.call(call) for call in calls_of(action))
            finally:
                _context.reset(token)
        observation = observation_of(results)
        counts = {**observation.counts, "search_asked": float(len(context.requests))}
        return replace(observation, counts=counts, memory=results)


class _ByWords:
    """BM25 search. Words of a title have weight 2."""

    def __init__(self, texts: Sequence[tuple[str, str, str]]) -> None:
        self._lock = threading.Lock()
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._index.close)
        self._index.execute("CREATE VIRTUAL TABLE texts USING fts5(id UNINDEXED, title, text)")
        self._index.executemany("INSERT INTO texts VALUES (?, ?, ?)", texts)

    def __call__(self, query: str, count: int) -> list[Text]:
        match = " OR ".join(f'"{word}"' for word in WORD.findall(query)[:MAX_WORDS])
        with self._lock:  # one connection for all threads; a search takes a millisecond
            return self._index.execute(
                "SELECT title, text FROM texts WHERE texts MATCH ? "
                "ORDER BY bm25(texts, 0.0, 2.0, 1.0), rowid LIMIT ?",
                (match, count),
            ).fetchall()


class _ByMeaning:
    """Dense search: the texts with the largest dot products with the query."""

    def __init__(self, texts: Sequence[tuple[str, str, str]], encoder: Any, config: Dense) -> None:
        self._texts = [(title, text) for _, title, text in texts]
        self._encoder, self._prefix = encoder, config.query_prefix
        passages = [f"{config.text_prefix}{title}\n{text}".strip() for title, text in self._texts]
        if config.index is None:
            self._vectors = encoder.encode(passages)
            return
        checksum = hashlib.sha256(json.dumps([encoder.checksum, passages]).encode()).hexdigest()
        path = config.index / f"{checksum[:32]}.npy"
        if not path.exists():
            _save_array(path, encoder.encode(passages))
        self._vectors = np.load(path, mmap_mode="r")

    def __call__(self, query: str, count: int) -> list[Text]:
        (vector,) = self._encoder.encode([self._prefix + query])
        best = np.argsort(-(self._vectors @ vector), kind="stable")[:count]
        return [self._texts[row] for row in best]


def _save_array(path: Path, rows: Any) -> None:
    """Write a .npy file atomically: other processes may write the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
        np.save(file, rows)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)


def _load_encoder(dense: Dense, load: Callable[[Path, str], Any] | None) -> Any:
    if load is None:
        raise ValueError("dense: expected load_encoder, got None")
    try:
        return load(dense.encoder, dense.pooling)
    except ValueError as error:
        raise ValueError(f"dense.encoder: {error}") from error


def _endpoint_named(endpoints: Mapping[str, Any], name: str, key: str, kind: str) -> Any:
    endpoint = endpoints.get(name)
    if name and (endpoint is None or isinstance(endpoint, str)):
        raise ValueError(
            f"{key}: expected an endpoint of kind {kind}, got {name!r}; there are: "
            f"{', '.join(k for k, v in endpoints.items() if not isinstance(v, str)) or 'none'}"
        )
    return endpoint if name else None


def read_corpus(path: Path) -> list[tuple[str, str, str]]:
    """Read a file of texts as (id, title, text)."""
    rows = []
    for number, row in numbered_rows(path):
        if not isinstance(row, dict) or not isinstance(row.get("text"), str) or not row["text"]:
            raise ValueError(f"{path}:{number}: expected an object with a 'text', got {row!r:.80}")
        rows.append((str(row.get("id", number)), str(row.get("title", "")), row["text"]))
    if not rows:
        raise ValueError(f"{path}: expected texts, got an empty file")
    return rows

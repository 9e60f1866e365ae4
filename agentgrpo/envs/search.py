"""Search: by words (BM25) or by meaning in the user's own texts, or by a retriever's server.

A corpus is JSON lines with `id`, `title` and `text`. By words it is searched by SQLite's FTS5, by
meaning with the vectors of an encoder (models/text_encoder.py); both are deterministic. A retriever
is an endpoint (models/endpoints.py); what it, web pages and a summarizer answer can be kept in a
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
from agentgrpo.envs.tools import Answer, Tool, Toolset, calls_of, observed
from agentgrpo.support.atomic_files import numbered_rows
from agentgrpo.types import Task

WORD = re.compile(r"\w+")
MAX_WORDS = 32
BUSY_S = 60.0
"""How long a file of kept answers may be locked by other processes."""
MAX_QUERY = 2000
"""Characters of a query; what is longer might be refused by a server, which would be the machine's
fault."""
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
class _Step:
    """What a search knows of the rollout that it is for."""

    question: str
    asked: list[str] = field(default_factory=list)
    """What had to be asked elsewhere: documents, page, summary."""


_step: ContextVar[_Step] = ContextVar("step")


class Dense(Section):
    """A search by meaning."""

    encoder: UserPath
    """Folder of a text encoder, as transformers loads it."""
    pooling: Literal["mean", "cls", "last"] = "mean"
    """Which of a text's hidden states are its vector: their mean, the first, the last."""
    query_prefix: str = ""
    """What the encoder is shown before a query."""
    text_prefix: str = ""
    """What it is shown before a text of the corpus."""
    index: UserPath | None = None
    """Folder where the corpus's vectors are kept, for other runs too."""


class Summary(Section):
    """What stands between the texts that are found and what is shown."""

    endpoint: str
    """Name of an endpoint of kind http or script."""
    prompt: str = SUMMARY
    """What it is asked, with {question}, {query} and {texts}."""
    max_tokens: Positive = 512
    """Of its reply."""

    @pydantic.field_validator("prompt")
    @classmethod
    def _names_texts(cls, prompt: str) -> str:
        try:
            shown = prompt.format(question="", query="", texts="\0")
        except (ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"expected {{question}}, {{query}} and {{texts}}: {error!r}") from None
        if "\0" not in shown:
            raise ValueError("expected {texts} in it")
        return prompt


class SearchOptions(TypedDict, total=False):
    """What a search is given, as of Search."""

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")  # type: ignore[misc]
    corpus: Corpus
    dense: Dense
    retriever: str
    pages: bool
    summary: Summary
    cache: Path
    top_k: int
    max_chars: int


class Search:
    """What finds texts, and how they are shown.

    Args:
        corpus: the file of texts, or the texts themselves as (id, title, text).
        dense: searches the corpus by meaning, not by words. `encoder`: folder of a text encoder;
            `pooling`: "mean" (E5, GTE), "cls" (BGE) or "last" (Qwen3-Embedding) of its states;
            `query_prefix`, `text_prefix`: what it is shown before a query ("query: " with E5) and
            before a text ("passage: "); `index`: folder where the vectors are kept for other runs.
        retriever: name of the endpoint of kind "retriever" that is asked instead of a corpus.
        pages: a retriever's document is shown as the text of the web page at its `url`.
        summary: has a model write what the texts say about the task's question, which is then what
            is shown. `endpoint`: its name; `prompt`, with {question}, {query} and {texts};
            `max_tokens` of its reply, 512.
        cache: SQLite file where what retriever, pages and summary came to is kept; runs and
            processes may share it.
        top_k: results of a search.
        max_chars: of a result's text, its title not counted.
        models: the run's, by name.
        retrievers: the run's, by name.
        load_encoder: from folder and pooling to what encodes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row is bad (says file and line), an argument is out of range, does nothing or
            names no endpoint.
    """

    def __init__(
        self,
        corpus: Corpus | None = None,
        *,
        dense: Dense | None = None,
        retriever: str = "",
        pages: bool = False,
        summary: Summary | None = None,
        cache: Path | None = None,
        top_k: int = 3,
        max_chars: int = 500,
        models: Mapping[str, Any] = MappingProxyType({}),
        retrievers: Mapping[str, Any] = MappingProxyType({}),
        load_encoder: Callable[[Path, str], Any] | None = None,
    ) -> None:
        for name, number in (("top_k", top_k), ("max_chars", max_chars)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}: expected a number of at least 1, got {number!r}")
        for name, value, need, given in (
            ("dense", dense, "corpus", corpus is not None),
            ("pages", pages, "retriever", retriever),
            ("cache", cache, "retriever or summary", retriever or summary),
        ):
            if value and not given:
                raise ValueError(f"{name}: it does nothing without {need}")
        if corpus is not None and retriever:
            raise ValueError(f"corpus: excluded by retriever {retriever!r}")
        self._top_k, self._max_chars, self._pages, self._summary = top_k, max_chars, pages, summary
        self._retriever = _named(retrievers, retriever, "retriever", "retriever")
        if summary is not None:
            self._summarizer = _named(
                models, summary.endpoint, "summary.endpoint", "http or script"
            )
        self._find: Find | None = self._ask if retriever else None
        if corpus is not None:
            texts = read_corpus(Path(corpus)) if isinstance(corpus, str | Path) else list(corpus)
            self._find = _ByWords(texts)
            if dense is not None:
                self._find = _ByMeaning(texts, _encoder(dense, load_encoder), dense)
        self._cache = None if cache is None else DiskCache(Path(cache).expanduser())
        self.toolset = Toolset([Tool(self._tool())])

    def _tool(self) -> Callable[[str], str]:
        def search(query: str) -> str:
            """Search the collection; returns the best texts with their titles.

            Args:
                query: a few words.
            """
            return self._result(query)

        return search

    @property
    def searches(self) -> bool:
        """Whether there is anything to search in."""
        return self._find is not None

    def episode(self, task: Task) -> SearchEpisode:
        """One without a state of its own."""
        return SearchEpisode(self.toolset, str(task.messages[-1]["content"]))

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()

    def _result(self, query: str) -> str:
        if not WORD.search(query):
            raise ValueError("the query has no words")
        if len(query) > MAX_QUERY:
            raise ValueError(f"the query has more than {MAX_QUERY} characters")
        assert self._find is not None
        found = self._find(query, self._top_k)
        shown = "\n".join(
            f"[{i}] {title}\n{text[: self._max_chars]}" for i, (title, text) in enumerate(found, 1)
        )
        return self._summarized(query, shown) if found else "(nothing found)"

    def _summarized(self, query: str, texts: str) -> str:
        if self._summary is None:
            return texts
        said = {"question": _step.get().question, "query": query, "texts": texts}
        messages = [{"role": "user", "content": self._summary.prompt.format(**said)}]
        sampling = {"temperature": 0.0, "max_tokens": self._summary.max_tokens}
        asked = ["summary", self._summarizer.identity, messages, sampling]
        summary: str = self._kept(
            asked, lambda: self._summarizer.complete(messages, **sampling)[0].strip()
        )
        return summary

    def _ask(self, query: str, count: int) -> list[Text]:
        """What the retriever finds."""
        asked = ["documents", self._retriever.identity, query, count]
        rows = self._kept(asked, lambda: self._retriever.retrieve(query, count))
        urls = {row["url"] for row in rows if self._pages and row["url"]}
        pages: dict[str, str] = {}
        if urls:
            with ThreadPoolExecutor(len(urls)) as threads:
                reading = {url: threads.submit(copy_context().run, self._page, url) for url in urls}
            pages = {url: read.result() for url, read in reading.items()}
        return [(row["title"], pages.get(row["url"], row["text"])) for row in rows]

    def _page(self, url: str) -> str:
        text: str = self._kept(["page", url], lambda: self._retriever.page(url))
        return text

    def _kept(self, asked: Sequence[Any], answer: Callable[[], Any]) -> Any:
        step = _step.get()

        def ask() -> Any:
            step.asked.append(asked[0])
            return answer()

        return ask() if self._cache is None else self._cache.get(asked, ask)


class DiskCache:
    """Answers by what was asked, in an SQLite file that runs and processes share.

    The first answer that is kept is everybody's, also of who asked at the same time: whoever plays
    the same rollouts again is told the same. Only answers are kept, never that there was none.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(
                path, timeout=BUSY_S, check_same_thread=False, isolation_level=None
            )
            weakref.finalize(self, self._file.close)
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS answers (asked TEXT PRIMARY KEY, answer TEXT NOT NULL)"
            )
        except (sqlite3.Error, OSError) as error:
            raise ValueError(f"cache: {path}: {error}") from error

    def get(self, asked: Any, answer: Callable[[], Any]) -> Any:
        """The answer that is kept; if there is none, the one that is had now, then kept."""
        key = json.dumps(asked, sort_keys=True)
        told = self._told(key)
        if told is None:
            new = json.dumps(answer())
            self._execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", key, new)
            told = self._told(key) or new
        return json.loads(told)

    def _told(self, key: str) -> str | None:
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


class SearchEnv(Search):
    """Episodes whose only tool is a search.

    Args:
        corpus: the file of texts, or the texts themselves as (id, title, text).
    """

    answers = ("tools",)

    def __init__(self, corpus: Corpus | None = None, **search: Any) -> None:
        super().__init__(corpus, **search)
        if not self.searches:
            raise ValueError("corpus: expected texts to search, or a retriever")

    def tools(self, task: Task) -> Sequence[Schema]:
        return self.toolset.schemas

    def reset(self, task: Task) -> SearchEpisode:
        return self.episode(task)


class SearchEpisode(Episode):
    """The searches of one rollout.

    What was found is remembered with a step: an episode that repeats it asks nobody again, and is
    told the same whatever the web says by then.
    """

    def __init__(self, toolset: Toolset, question: str) -> None:
        self._toolset, self._question = toolset, question
        self._told: tuple[Answer, ...] | None = None

    def recall(self, memory: Any) -> None:
        """The next step repeats one of another episode, which had this memory of it."""
        self._told = memory

    def step(self, action: Action) -> Observation:
        told, self._told = self._told, None
        of = _Step(self._question)
        if told is None:
            token = _step.set(of)
            try:
                told = tuple(self._toolset.call(call) for call in calls_of(action))
            finally:
                _step.reset(token)
        found = observed(told)
        counts = {**found.counts, "search_asked": float(len(of.asked))}
        return replace(found, counts=counts, memory=told)


class _ByWords:
    """BM25 over a corpus; a title's words count twice."""

    def __init__(self, texts: Sequence[tuple[str, str, str]]) -> None:
        self._lock = threading.Lock()
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._index.close)
        self._index.execute("CREATE VIRTUAL TABLE texts USING fts5(id UNINDEXED, title, text)")
        self._index.executemany("INSERT INTO texts VALUES (?, ?, ?)", texts)

    def __call__(self, query: str, count: int) -> list[Text]:
        match = " OR ".join(f'"{word}"' for word in WORD.findall(query)[:MAX_WORDS])
        with self._lock:  # one connection; a search takes a millisecond
            return self._index.execute(
                "SELECT title, text FROM texts WHERE texts MATCH ? "
                "ORDER BY bm25(texts, 0.0, 2.0, 1.0), rowid LIMIT ?",
                (match, count),
            ).fetchall()


class _ByMeaning:
    """The texts whose vectors' products with the query's are largest, in their order."""

    def __init__(self, texts: Sequence[tuple[str, str, str]], encoder: Any, config: Dense) -> None:
        self._texts = [(title, text) for _, title, text in texts]
        self._encoder, self._prefix = encoder, config.query_prefix
        shown = [f"{config.text_prefix}{title}\n{text}".strip() for title, text in self._texts]
        if config.index is None:
            self._vectors = encoder.encode(shown)
            return
        of = hashlib.sha256(json.dumps([encoder.checksum, shown]).encode()).hexdigest()
        path = config.index / f"{of[:32]}.npy"
        if not path.exists():
            _write(path, encoder.encode(shown))
        self._vectors = np.load(path, mmap_mode="r")

    def __call__(self, query: str, count: int) -> list[Text]:
        (vector,) = self._encoder.encode([self._prefix + query])
        best = np.argsort(-(self._vectors @ vector), kind="stable")[:count]
        return [self._texts[row] for row in best]


def _write(path: Path, rows: Any) -> None:
    """A file of numpy's, whole or absent, whoever else writes it too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
        np.save(file, rows)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)


def _encoder(dense: Dense, load: Callable[[Path, str], Any] | None) -> Any:
    if load is None:
        raise ValueError("dense: it needs load_encoder")
    try:
        return load(dense.encoder, dense.pooling)
    except ValueError as error:
        raise ValueError(f"dense.encoder: {error}") from error


def _named(there: Mapping[str, Any], name: str, key: str, kind: str) -> Any:
    """The endpoint that an option names; None if it names none."""
    found = there.get(name)
    if name and (found is None or isinstance(found, str)):
        raise ValueError(
            f"{key}: expected an endpoint of kind {kind}, got {name!r}; there are: "
            f"{', '.join(k for k, v in there.items() if not isinstance(v, str)) or 'none'}"
        )
    return found if name else None


def read_corpus(path: Path) -> list[tuple[str, str, str]]:
    """The texts of a file, as (id, title, text)."""
    rows = []
    for number, row in numbered_rows(path):
        if not isinstance(row, dict) or not isinstance(row.get("text"), str) or not row["text"]:
            raise ValueError(f"{path}:{number}: expected an object with a 'text'")
        rows.append((str(row.get("id", number)), str(row.get("title", "")), row["text"]))
    if not rows:
        raise ValueError(f"{path}: no texts")
    return rows

"""What is asked by name: models for text, over HTTP, in this process, or a script; searches.

An endpoint may be asked by many threads at once; a call blocks its own thread only. What fails,
after the client's own tries, is an InfrastructureError, never text.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urljoin, urlsplit

import numpy as np

from agentgrpo.actions import InfrastructureError, ModelRequest, as_json
from agentgrpo.config import EndpointConfig
from agentgrpo.config.read import load_callable
from agentgrpo.support.files import from_json
from agentgrpo.support.optional_deps import require_installed
from agentgrpo.types import Float32, Int32

if TYPE_CHECKING:
    import httpx2
    import openai


Message = Mapping[str, Any]
T = TypeVar("T")
Scores = tuple[Float32, Float32, Int32]


class Endpoint(ABC):
    """Something that continues a conversation."""

    @abstractmethod
    def complete(
        self, messages: Sequence[Message], *, n: int = 1, temperature: float = 1.0,
        max_tokens: int = 1024,
    ) -> list[str]:  # fmt: skip
        """N replies."""

    def __call__(self, ask: ModelRequest) -> str:
        """What an episode asks for."""
        (said,) = self.complete(
            ask.messages, temperature=ask.temperature, max_tokens=ask.max_tokens
        )
        return said


@dataclass(frozen=True, slots=True)
class ScriptedEndpoint(Endpoint):
    """A function instead of a model: `reply(messages)` is every reply; TypeError: it is no text."""

    reply: Callable[[Sequence[Message]], str]

    @property
    def identity(self) -> dict[str, Any]:
        """The function, by its name."""
        return {"function": f"{self.reply.__module__}:{self.reply.__qualname__}"}

    def complete(
        self, messages: Sequence[Message], *, n: int = 1, **sampling: object
    ) -> list[str]:  # fmt: skip
        replies = [self.reply(messages) for _ in range(n)]
        for reply in replies:
            if not isinstance(reply, str):
                raise TypeError(f"a scripted endpoint must return text, got {reply!r:.80}")
        return replies


@dataclass(frozen=True)
class Server:
    """A server, asked by the openai client.

    The client tries again, after about twice as long each time or after what the server asks for:
    failures of the network, 408, 409, 429 and 5xx. Other refusals are final, and answers of another
    form; redirections too: nobody else is told what is asked. Of the environment only the key and
    the proxies (HTTP_PROXY, NO_PROXY, ...) count.
    """

    config: EndpointConfig

    @property
    def identity(self) -> dict[str, Any]:
        """What its answers depend on besides what is asked."""
        return self.config.model_dump(include={"kind", "url", "model", "extra"})

    def _ask(
        self, url: str, read: Callable[[httpx2.Response], T], body: Any = None, **options: Any
    ) -> T:
        """What the server answers."""
        import httpx2
        import openai

        key, where = self._key(), f"endpoint {self.config.url}"
        options.setdefault("headers", {"Authorization": f"Bearer {key}" if key else openai.omit})
        asked: Any = {"cast_to": httpx2.Response, "options": options}
        try:
            if body is None:
                return read(self._client.get(url, **asked))
            return read(self._client.post(url, body=body, **asked))
        except openai.APIStatusError as error:
            said = f"HTTP {error.status_code}: {error.response.text[:200]}"
            raise Refused(f"{where}: {said}", error.status_code) from error
        except Exception as error:  # whatever it is, it is no fault of the policy's
            raise InfrastructureError(f"{where}: {error.__cause__ or error}") from error

    def _key(self) -> str:
        name = self.config.api_key_env
        key = os.environ.get(name, "").strip() if name else ""
        if name and not key:
            raise InfrastructureError(
                f"endpoint {self.config.url}: the environment has no {name}, or an empty one"
            )
        if not (key.isascii() and key.isprintable()):  # and httpx's own words would show it
            raise InfrastructureError(
                f"endpoint {self.config.url}: expected printable ASCII characters in {name}"
            )
        return key

    @cached_property
    def _client(self) -> openai.OpenAI:
        import openai

        client = openai.OpenAI(
            base_url=self.config.url, api_key="none", timeout=self.config.timeout_s,
            max_retries=self.config.retries,
            http_client=openai.DefaultHttpxClient(follow_redirects=False),
        )  # fmt: skip
        # of OPENAI_ORG_ID, OPENAI_PROJECT_ID, OPENAI_CUSTOM_HEADERS, which are for another server
        client.organization = client.project = None
        client._custom_headers = {}
        return client


class HttpEndpoint(Server, Endpoint):
    """An OpenAI-compatible server (vLLM, llama.cpp, a hosted API): of kind "http"."""

    def complete(
        self, messages: Sequence[Message], *, n: int = 1, **sampling: float
    ) -> list[str]:  # fmt: skip
        body = {
            "model": self.config.model, "messages": messages, "n": n, "temperature": 1.0,
            "max_tokens": 1024, **sampling, **self.config.extra,
        }  # fmt: skip
        replies = self._ask("/chat/completions", _texts, body)
        if len(replies) != n:
            raise InfrastructureError(
                f"endpoint {self.config.url}: {len(replies)} of {n} replies came"
            )
        return replies

    def score(self, ids: Sequence[int], topk: int = 0) -> Scores:
        """What a model behind vLLM's server makes of tokens, at temperature 1, but for the first:
        nats, [T]; those of the likeliest in each place, the likeliest first, and their ids, [T, K].
        """
        body = {
            "model": self.config.model, "prompt": ids, "prompt_logprobs": topk, "max_tokens": 1,
            **self.config.extra,
        }  # fmt: skip
        return self._ask("/completions", partial(_scored, ids, topk), body)

    def decode(self, ids: Sequence[int]) -> str:
        """Their text, as vLLM's server has it."""
        url = urljoin(f"{self.config.url.rstrip('/')}/", "../detokenize")
        return self._ask(url, _prompt, {"model": self.config.model, "tokens": ids})


class Retriever(Server):
    """A server that finds documents, in the form of ET-Agent's, ARPO's and FlashRAG's: "retriever".

    It is posted {"query": ..., "top_n": ...} and answers a JSON list of objects with the text
    `contents` (its first line is the title) or `text`, and perhaps `title` and `url`.
    """

    def retrieve(self, query: str, top_n: int) -> list[dict[str, str]]:
        """The documents that fit best, best first: title, text and url of each."""
        body = {"query": query, "top_n": top_n, **self.config.extra}
        return self._ask(self.config.url, _documents, body)[:top_n]

    def page(self, url: str) -> str:
        """The text of a page that a document names; where the page is none, that, and why.

        Redirections are followed, and no key is sent.
        """
        import openai

        if urlsplit(url).scheme not in ("http", "https"):
            return "(not a web page)"
        headers = {"Authorization": openai.omit, "Accept": "text/html, text/plain;q=0.9"}
        try:
            return self._ask(url, _page, headers=headers, follow_redirects=True)
        except Refused as error:
            if error.status == 429 or error.status >= 500:
                raise
            return f"(the page cannot be had: HTTP {error.status})"


def _page(response: httpx2.Response) -> str:
    kind = response.headers.get("content-type", "text/html").partition(";")[0].strip().lower()
    if kind in ("text/html", "application/xhtml+xml"):
        return text_of(response.text)
    return response.text if kind.startswith("text/") else f"(the page is {kind})"


def _texts(response: httpx2.Response) -> list[str]:
    """The replies in a server's answer."""
    with _of_form("choices with messages of text", response.content) as answer:
        return [_text(choice["message"]["content"]) for choice in answer["choices"]]


def _prompt(response: httpx2.Response) -> str:
    with _of_form("a prompt", response.content) as answer:
        return _text(answer["prompt"])


def _scored(ids: Sequence[int], topk: int, response: httpx2.Response) -> Scores:
    """The answer has, in each place but the first, the likeliest tokens and the prompt's own."""
    with _of_form("a choice with vLLM's prompt_logprobs", response.content) as answer:
        (_, *places) = answer["choices"][0]["prompt_logprobs"]
        own = [at[str(i)]["logprob"] for i, at in zip(ids[1:], places, strict=True)]
        ranked = [sorted((s["rank"], int(i), s["logprob"]) for i, s in at.items()) for at in places]
        most = np.array([at[:topk] for at in ranked], np.float64).reshape(len(own), topk, 3)
        logp_T, (_, ids_TK, logp_TK) = np.array(own, np.float32), np.moveaxis(most, -1, 0)
        return logp_T, logp_TK.astype(np.float32), ids_TK.astype(np.int32)


def _documents(response: httpx2.Response) -> list[dict[str, str]]:
    """Those in a retriever's answer."""
    found = []
    with _of_form("a list of documents with 'contents'", response.content) as answer:
        for row in answer:
            text = _text(row["contents"] if "contents" in row else row["text"])
            title, url = row.get("title"), row.get("url")
            if title is None and "\n" in text:
                title, _, text = text.partition("\n")
            found.append({"title": _text(title or ""), "text": text, "url": _text(url or "")})
    return found


@contextlib.contextmanager
def _of_form(what: str, content: bytes) -> Iterator[Any]:
    """The JSON value that a server answered, read as what it should be."""
    try:
        yield as_json(from_json(content))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"expected {what}, got {content[:200]!r}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"no text: {value!r}")
    return value


class Refused(InfrastructureError):
    """A server answered with another status than success."""

    def __init__(self, said: str, status: int) -> None:
        super().__init__(said)
        self.status = status


def text_of(html: str) -> str:
    r"""What a reader sees of a web page: its text, a line for each block.

    >>> text_of("<title>A</title><script>x()</script><p>One &amp; <b>two</b><p>three")
    'A\nOne & two\nthree'
    """
    reader = _Reader()
    reader.feed(html)
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.parts).splitlines())
    return "\n".join(line for line in lines if line)


class _Reader(HTMLParser):
    hidden = ("script", "style", "noscript", "template", "svg")
    inline = ("a", "abbr", "b", "cite", "code", "em", "i", "mark", "q", "s", "small", "span",
              "strong", "sub", "sup", "u", "var")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._within = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._within += tag in self.hidden
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        self._within = max(0, self._within - (tag in self.hidden))
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._within:
            self.parts.append(data)

    def _break(self, tag: str) -> None:
        if tag not in self.inline:
            self.parts.append("\n")


def make_endpoint(config: EndpointConfig, name: str) -> Endpoint:
    """The endpoint that a config describes, if it needs no engine."""
    if config.kind == "script":
        return ScriptedEndpoint(load_callable(config.function, key=f"endpoints.{name}.function"))
    if config.kind == "http":
        require_installed("openai", f"endpoints.{name}.kind = 'http'")
        return HttpEndpoint(config)
    if config.kind == "retriever":
        raise ValueError(f"endpoints.{name}: a retriever finds documents, and writes no text")
    raise ValueError(f"endpoints.{name}: an engine is needed, and there is none here")


def make_retriever(config: EndpointConfig, name: str) -> Retriever:
    """The retriever that a config describes."""
    if config.kind != "retriever":
        raise ValueError(f"endpoints.{name}: expected kind 'retriever', got {config.kind!r}")
    require_installed("openai", f"endpoints.{name}.kind = 'retriever'")
    return Retriever(config)

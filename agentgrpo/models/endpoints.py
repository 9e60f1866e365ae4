"""Named endpoints: chat models (HTTP, scripted; engine/in_process.py) and retrievers.

An endpoint may be called from many threads at once; a call blocks its own thread only. A failure,
after the client's retries, is an InfrastructureError, never text.
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
"""Log-probabilities [T], those of the k likeliest tokens [T, K], and their ids [T, K]."""


class Endpoint(ABC):
    """A chat model: continues a conversation."""

    @abstractmethod
    def complete(
        self, messages: Sequence[Message], *, n: int = 1, temperature: float = 1.0,
        max_tokens: int = 1024,
    ) -> list[str]:  # fmt: skip
        ...

    def __call__(self, request: ModelRequest) -> str:
        (reply,) = self.complete(
            request.messages, temperature=request.temperature, max_tokens=request.max_tokens
        )
        return reply


@dataclass(frozen=True, slots=True)
class ScriptedEndpoint(Endpoint):
    """`reply(messages)` in place of a model. TypeError: it does not return text."""

    reply: Callable[[Sequence[Message]], str]

    @property
    def identity(self) -> dict[str, Any]:
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
    """A server, called with the openai client.

    The client retries network failures, 408, 409, 429 and 5xx, waiting about twice as long each
    time or as long as the server says. Other error statuses are final, as are malformed answers and
    redirects: no other server receives the request. Of the environment only the key and the proxies
    (HTTP_PROXY, NO_PROXY, ...) are used.
    """

    config: EndpointConfig

    @property
    def identity(self) -> dict[str, Any]:
        """What the answers depend on in addition to the request."""
        return self.config.model_dump(include={"kind", "url", "model", "extra"})

    def _request(
        self, url: str, read: Callable[[httpx2.Response], T], body: Any = None, **options: Any
    ) -> T:
        import httpx2
        import openai

        key, prefix = self._key(), f"endpoint {self.config.url}"
        options.setdefault("headers", {"Authorization": f"Bearer {key}" if key else openai.omit})
        kwargs: Any = {"cast_to": httpx2.Response, "options": options}
        try:
            if body is None:
                return read(self._client.get(url, **kwargs))
            return read(self._client.post(url, body=body, **kwargs))
        except openai.APIStatusError as error:
            message = f"HTTP {error.status_code}: {error.response.text[:200]}"
            raise ErrorStatus(f"{prefix}: {message}", error.status_code) from error
        except Exception as error:  # of any type: never counted as the policy's failure
            raise InfrastructureError(f"{prefix}: {error.__cause__ or error}") from error

    def _key(self) -> str:
        name = self.config.api_key_env
        key = os.environ.get(name, "").strip() if name else ""
        if name and not key:
            raise InfrastructureError(
                f"endpoint {self.config.url}: the environment has no {name}, or it is empty"
            )
        if not (key.isascii() and key.isprintable()):  # httpx's own message would show the key
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
        # drop OPENAI_ORG_ID, OPENAI_PROJECT_ID, OPENAI_CUSTOM_HEADERS: they are for another server
        client.organization = client.project = None
        client._custom_headers = {}
        return client


class HttpEndpoint(Server, Endpoint):
    """An OpenAI-compatible server (vLLM, llama.cpp, a hosted API), kind "http"."""

    def complete(
        self, messages: Sequence[Message], *, n: int = 1, **sampling: float
    ) -> list[str]:  # fmt: skip
        body = {
            "model": self.config.model, "messages": messages, "n": n, "temperature": 1.0,
            "max_tokens": 1024, **sampling, **self.config.extra,
        }  # fmt: skip
        replies = self._request("/chat/completions", _texts, body)
        if len(replies) != n:
            raise InfrastructureError(
                f"endpoint {self.config.url}: expected {n} replies, got {len(replies)}"
            )
        return replies

    def score(self, ids: Sequence[int], topk: int = 0) -> Scores:
        """Log-probabilities of ids[1:] by a model behind vLLM's server, at temperature 1, in nats
        [T].

        Also those of the k likeliest tokens at each position, likeliest first, and their ids, [T,
        K] each.
        """
        body = {
            "model": self.config.model, "prompt": ids, "prompt_logprobs": topk, "max_tokens": 1,
            **self.config.extra,
        }  # fmt: skip
        return self._request("/completions", partial(_scored, ids, topk), body)

    def decode(self, ids: Sequence[int]) -> str:
        url = urljoin(f"{self.config.url.rstrip('/')}/", "../detokenize")
        return self._request(url, _prompt, {"model": self.config.model, "tokens": ids})


class Retriever(Server):
    """A document retriever with the HTTP interface of ET-Agent, ARPO and FlashRAG, kind
    "retriever".

    It receives POST {"query": ..., "top_n": ...} and returns a JSON list of objects with the text
    in `contents` (whose first line is the title) or `text`, and optionally `title` and `url`.
    """

    def retrieve(self, query: str, top_n: int) -> list[dict[str, str]]:
        """The best documents, best first: title, text and url of each."""
        body = {"query": query, "top_n": top_n, **self.config.extra}
        return self._request(self.config.url, _documents, body)[:top_n]

    def page(self, url: str) -> str:
        """The text of a web page; if there is none, a parenthesised note with the reason.

        Redirects are followed, and no key is sent.
        """
        import openai

        if urlsplit(url).scheme not in ("http", "https"):
            return "(not a web page)"
        headers = {"Authorization": openai.omit, "Accept": "text/html, text/plain;q=0.9"}
        try:
            return self._request(url, _page, headers=headers, follow_redirects=True)
        except ErrorStatus as error:
            if error.status == 429 or error.status >= 500:
                raise
            return f"(the page is not available: HTTP {error.status})"


def _page(response: httpx2.Response) -> str:
    kind = response.headers.get("content-type", "text/html").partition(";")[0].strip().lower()
    if kind in ("text/html", "application/xhtml+xml"):
        return text_of(response.text)
    return response.text if kind.startswith("text/") else f"(the page has type {kind})"


def _texts(response: httpx2.Response) -> list[str]:
    with _parsed_as("choices with messages of text", response.content) as answer:
        return [_text(choice["message"]["content"]) for choice in answer["choices"]]


def _prompt(response: httpx2.Response) -> str:
    with _parsed_as("a prompt", response.content) as answer:
        return _text(answer["prompt"])


def _scored(ids: Sequence[int], topk: int, response: httpx2.Response) -> Scores:
    """Parse prompt_logprobs: per position after the first the likeliest tokens and the prompt's."""
    with _parsed_as("a choice with vLLM's prompt_logprobs", response.content) as answer:
        (_, *positions) = answer["choices"][0]["prompt_logprobs"]
        prompt_logps = [
            position[str(i)]["logprob"] for i, position in zip(ids[1:], positions, strict=True)
        ]
        ranked = [
            sorted((s["rank"], int(i), s["logprob"]) for i, s in position.items())
            for position in positions
        ]
        top = np.array([position[:topk] for position in ranked], np.float64).reshape(
            len(prompt_logps), topk, 3
        )
        logp_T, (_, ids_TK, logp_TK) = np.array(prompt_logps, np.float32), np.moveaxis(top, -1, 0)
        return logp_T, logp_TK.astype(np.float32), ids_TK.astype(np.int32)


def _documents(response: httpx2.Response) -> list[dict[str, str]]:
    documents = []
    with _parsed_as("a list of documents with 'contents'", response.content) as answer:
        for row in answer:
            text = _text(row["contents"] if "contents" in row else row["text"])
            title, url = row.get("title"), row.get("url")
            if title is None and "\n" in text:
                title, _, text = text.partition("\n")
            documents.append({"title": _text(title or ""), "text": text, "url": _text(url or "")})
    return documents


@contextlib.contextmanager
def _parsed_as(expected: str, content: bytes) -> Iterator[Any]:
    """Parse JSON; errors within the context become ValueError("expected ..., got ...")."""
    try:
        yield as_json(from_json(content))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"expected {expected}, got {content[:200]!r}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"no text: {value!r}")
    return value


class ErrorStatus(InfrastructureError):
    """A server answered with an error status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def text_of(html: str) -> str:
    r"""The visible text of an HTML page, one line per block.

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
    """The endpoint of a config, unless it needs an engine."""
    if config.kind == "script":
        return ScriptedEndpoint(load_callable(config.function, key=f"endpoints.{name}.function"))
    if config.kind == "http":
        require_installed("openai", f"endpoints.{name}.kind = 'http'")
        return HttpEndpoint(config)
    if config.kind == "retriever":
        raise ValueError(f"endpoints.{name}: a retriever returns documents and cannot write text")
    raise ValueError(f"endpoints.{name}: this kind needs an engine, and this command has none")


def make_retriever(config: EndpointConfig, name: str) -> Retriever:
    """The retriever of a config."""
    if config.kind != "retriever":
        raise ValueError(f"endpoints.{name}: expected kind 'retriever', got {config.kind!r}")
    require_installed("openai", f"endpoints.{name}.kind = 'retriever'")
    return Retriever(config)

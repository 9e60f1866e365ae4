"""Endpoints against a local server, and an engine shared by threads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from agentgrpo.actions import InfrastructureError
from agentgrpo.config import EndpointConfig
from agentgrpo.engine.in_process import EngineEndpoint, EngineLoop
from agentgrpo.models import endpoints
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.models.endpoints import HttpEndpoint, ScriptedEndpoint, make_endpoint
from tests.rollout.stubs import StubEngine, Turn

Answer = Callable[[dict[str, Any]], tuple[int, Any]]
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server() -> Iterator[Any]:
    """An OpenAI-like server; `server.answers` are used up one by one, `server.seen` grows."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            result.seen.append((self.path, self.headers.get("Authorization"), body))
            result.headers.append(dict(self.headers))
            status, answer = result.answers.pop(0)(body)
            self.send_response(status)
            if status in (301, 302, 307, 308):
                self.send_header("Location", f"http://localhost:{result.server_port}/elsewhere")
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        def log_message(self, *args: Any) -> None: ...

    result: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    result.answers, result.seen, result.headers = [], [], []
    thread = threading.Thread(target=result.serve_forever, args=(0.01,))
    thread.start()
    yield result
    result.shutdown()
    thread.join()
    result.server_close()


def echo(body: dict[str, Any]) -> tuple[int, Any]:
    text = body["messages"][-1]["content"]
    return 200, {"choices": [{"message": {"content": f"{text} {i}"}} for i in range(body["n"])]}


def endpoint(where: Any, **options: Any) -> HttpEndpoint:
    port = where if isinstance(where, int) else where.server_port
    url = f"http://127.0.0.1:{port}/v1"
    return HttpEndpoint(EndpointConfig(kind="http", url=url, model="m", **options))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's waits between two tries are its own."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)


def test_http_request_has_the_openai_form(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    server.answers = [echo]
    client = endpoint(server, api_key_env="SOME_KEY", extra={"top_p": 0.5})
    assert client.complete(USER, n=2, temperature=0.7, max_tokens=9) == ["hi 0", "hi 1"]
    assert server.seen == [
        (
            "/v1/chat/completions",
            "Bearer secret",
            {
                "model": "m",
                "messages": USER,
                "n": 2,
                "temperature": 0.7,
                "max_tokens": 9,
                "top_p": 0.5,
            },
        )
    ]
    server.answers = [echo]
    with pytest.raises(InfrastructureError, match="expected 1 replies, got 2"):
        endpoint(server, extra={"n": 2}).complete(USER)
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(InfrastructureError, match="has no SOME_KEY"):
        client.complete(USER)


def test_openai_environment_variables_are_not_sent(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "API_KEY ADMIN_KEY ORG_ID PROJECT_ID WEBHOOK_SECRET"
    for name in names.split():
        monkeypatch.setenv(f"OPENAI_{name}", "sk-hidden")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/hidden")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Mine: hidden\nAuthorization: hidden")
    server.answers = [echo]
    assert endpoint(server).complete(USER) == ["hi 0"]
    assert "hidden" not in str(server.headers + server.seen)
    assert not [name for name in server.headers[0] if name.lower().startswith("openai")]


@pytest.mark.parametrize("status", [301, 302, 307, 308, 400])
def test_redirects_and_client_errors_are_final(server: Any, status: int) -> None:
    server.answers = [lambda body: (status, b"over there"), echo]
    with pytest.raises(InfrastructureError, match=f"HTTP {status}: over there"):
        endpoint(server).complete(USER)
    assert [key for _, key, _ in server.seen] == [None], "asked once, and without a key"


@pytest.mark.parametrize("key", ["sk-hid\nden", "sk-hiddén", "sk-\x01hidden"])
def test_invalid_key_is_not_printed(server: Any, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("SOME_KEY", key)
    with pytest.raises(
        InfrastructureError, match=r"expected printable ASCII .* in SOME_KEY"
    ) as recorded:
        endpoint(server, api_key_env="SOME_KEY").complete(USER)
    assert "hid" not in str(recorded.value)
    monkeypatch.setenv("SOME_KEY", "sk-1\n")  # as `cat` has it
    server.answers = [echo]
    endpoint(server, api_key_env="SOME_KEY").complete(USER)
    assert server.seen[-1][1] == "Bearer sk-1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9"),
        ("HTTP_PROXY", "no-scheme:x"),
        ("SSL_CERT_FILE", "/no"),
        ("NONE", "the connection is refused"),
    ],
)
def test_unreachable_server_is_an_infrastructure_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for known in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(InfrastructureError, match=r"endpoint http://127\.0\.0\.1:9/v1: "):
        endpoint(9, retries=0).complete(USER)


@pytest.mark.parametrize("status", [429, 408, 500, 503])
def test_temporary_errors_are_retried(server: Any, status: int) -> None:
    server.answers = [lambda body: (status, b"busy")] * 2 + [echo]
    assert endpoint(server, retries=2).complete(USER) == ["hi 0"]
    server.answers = [lambda body: (status, b"busy")] * 2
    with pytest.raises(InfrastructureError, match=f"HTTP {status}: busy"):
        endpoint(server, retries=1).complete(USER)


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>",
        b"",
        b"[" * 99_999,
        {"choices": [{}]},
        {"error": "overloaded"},
        {"choices": [{"message": {"content": None}}]},
    ],
)
def test_malformed_answers_are_never_text(server: Any, answer: Any) -> None:
    server.answers = [lambda body: (200, answer)]
    with pytest.raises(InfrastructureError, match="expected choices with messages of text, got b"):
        endpoint(server).complete(USER)


OWN, FIRST, SECOND = (
    {"11": {"logprob": -11.5, "rank": 2922, "decoded_token": " capital"}},
    {"29": {"logprob": -0.75, "rank": 1, "decoded_token": "-"}},
    {"28": {"logprob": -2.5, "rank": 2, "decoded_token": ","}},
)


def prompt_logprobs(*places: dict[str, Any] | None) -> dict[str, Any]:
    """As vLLM 0.32's server answered one of 4 tokens, but for the numbers."""
    choice = {"index": 0, "text": " lies", "prompt_logprobs": [*places], "prompt_token_ids": None}
    return {"object": "text_completion", "choices": [choice]}


def test_vllm_server_scores_tokens(server: Any) -> None:
    answers = prompt_logprobs(None, OWN | FIRST | SECOND, FIRST | SECOND), {"prompt": "a b"}
    server.answers = [lambda body, answer=answer: (200, answer) for answer in answers]
    scores = endpoint(server).score([7, 11, 28], 2)
    assert [x.tolist() for x in scores] == [[-11.5, -2.5], [[-0.75, -2.5]] * 2, [[29, 28]] * 2]
    assert endpoint(server).decode([7, 11]) == "a b"
    (path, _, body), (other, _, request) = server.seen
    assert (path, other) == ("/v1/completions", "/detokenize")
    assert body == {"model": "m", "prompt": [7, 11, 28], "prompt_logprobs": 2, "max_tokens": 1}
    assert request == {"model": "m", "tokens": [7, 11]}


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"text": "a server without them"}]},
        prompt_logprobs(None, OWN | FIRST | SECOND),
        prompt_logprobs(None, OWN, FIRST | SECOND),
        prompt_logprobs(None, FIRST | SECOND, FIRST | SECOND),
    ],
)
def test_malformed_scores_are_refused(server: Any, answer: Any) -> None:
    server.answers = [lambda body: (200, answer)]
    with pytest.raises(InfrastructureError, match="expected a choice with vLLM's prompt_logprobs"):
        endpoint(server).score([7, 11, 28], 2)


def test_slow_server_is_retried(server: Any) -> None:
    late = threading.Event()

    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        late.wait(10)
        return echo(body)

    server.answers = [slow, echo, echo, echo]
    assert endpoint(server, timeout_s=1.0).complete(USER) == ["hi 0"]
    server.answers = [slow]
    with pytest.raises(InfrastructureError, match="timed out"):
        endpoint(server, timeout_s=0.2, retries=0).complete(USER)
    late.set()


def test_any_failure_of_a_request_is_an_infrastructure_error(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else a tool raises is shown to the policy."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(endpoints, "_texts", fails)
    server.answers = [echo]
    with pytest.raises(InfrastructureError, match="out of order"):
        endpoint(server, retries=0).complete(USER)


def test_scripted_endpoint_replies_with_text() -> None:
    script = ScriptedEndpoint(lambda messages: f"{len(messages)} of them")
    assert script.complete(USER, n=2) == ["1 of them"] * 2
    with pytest.raises(TypeError, match="must return text, got 3"):
        ScriptedEndpoint(lambda messages: 3).complete(USER)  # type: ignore[arg-type,return-value]


def test_configs_make_endpoints() -> None:
    script = make_endpoint(EndpointConfig(kind="script", function="os.path:basename"), "s")
    assert isinstance(script, ScriptedEndpoint)
    http = make_endpoint(EndpointConfig(kind="http", url="http://x/v1", model="m"), "h")
    assert isinstance(http, HttpEndpoint)
    with pytest.raises(ValueError, match=r"endpoints\.s\.function: no module 'nowhere'"):
        make_endpoint(EndpointConfig(kind="script", function="nowhere:f"), "s")
    with pytest.raises(ValueError, match=r"endpoints\.e: this kind needs an engine"):
        make_endpoint(EndpointConfig(), "e")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "http", "model": "m"}, "of kind 'http' requires url"),
        ({"kind": "http", "url": "u"}, "of kind 'http' requires model"),
        ({"kind": "script"}, "of kind 'script' requires function"),
        ({"kind": "engine", "url": "u"}, "url: an endpoint of kind 'engine' does not use it"),
        (
            {"kind": "script", "function": "a:b", "model": "m"},
            "model: an endpoint of",
        ),
    ],
)
def test_invalid_configs_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EndpointConfig(**wrong)


def test_threads_share_an_engine(tokenizer: Any) -> None:
    """All of them are in flight together, and each gets its own reply."""
    chat = ChatTemplate(tokenizer)
    together: list[int] = []

    def on_step(step: int) -> None:
        while step == 0 and len(engine.running) + loop._queue.qsize() < 16:
            time.sleep(0.001)
        together.append(len(engine.running))

    engine = StubEngine(
        tokenizer,
        lambda number, prompt: Turn(f"echo {prompt.split('user')[1][:3].strip()}", steps=3),
        on_step=on_step,
    )
    loop = EngineLoop(engine)  # type: ignore[arg-type]
    client = EngineEndpoint(loop, chat)

    def ask(name: str) -> list[str]:
        return client.complete([{"role": "user", "content": name}], n=2, max_tokens=50)

    with ThreadPoolExecutor(9) as pool:
        futures = [pool.submit(ask, f"q{i}") for i in range(8)]
        pool.submit(wait, futures).add_done_callback(lambda _: loop.stop())
        loop.serve()
        assert [future.result() for future in futures] == [[f"echo q{i}"] * 2 for i in range(8)]
    assert max(together) == 16


def test_engine_error_reaches_all_waiting_threads(tokenizer: Any) -> None:
    def explode(step: int) -> None:
        meanwhile.append(loop.submit(prompt, max_tokens=5))
        raise RuntimeError("no memory")

    engine = StubEngine(tokenizer, lambda number, prompt: Turn("x", steps=9), on_step=explode)
    loop = EngineLoop(engine)  # type: ignore[arg-type]
    prompt, meanwhile = np.array([1, 2], np.int32), list[Any]()
    early = loop.submit(prompt, max_tokens=5)
    with pytest.raises(RuntimeError, match="no memory"):
        loop.serve()
    (asked_meanwhile,) = meanwhile
    assert asked_meanwhile.done()
    late = loop.submit(prompt, max_tokens=5)
    for future in (early, asked_meanwhile, late):
        with pytest.raises(RuntimeError, match="no memory"):
            future.result(timeout=5)
    assert not engine.running


def test_prompt_without_room_for_a_reply_is_refused(tokenizer: Any) -> None:
    engine = StubEngine(tokenizer, lambda number, prompt: Turn("x"), max_model_len=20)
    client = EngineEndpoint(EngineLoop(engine), ChatTemplate(tokenizer))  # type: ignore[arg-type]
    with pytest.raises(InfrastructureError, match=r"leaves no room .*max_model_len 20"):
        client.complete(USER)


def test_max_tokens_is_limited_by_the_context(tokenizer: Any) -> None:
    chat = ChatTemplate(tokenizer)
    length = len(chat.prompt_ids(USER)) + 7
    engine = StubEngine(tokenizer, lambda number, prompt: Turn("x"), max_model_len=length)
    loop = EngineLoop(engine)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as side:
        for most in (100, 3):
            requested = side.submit(EngineEndpoint(loop, chat).complete, USER, max_tokens=most)
            requested.add_done_callback(lambda _: loop.stop())
            loop.serve()
            requested.result()
    assert [request.max_tokens for request in engine.requests] == [7, 3]

"""Clients that mean no good, or break: they are told so, and nobody else notices.

Each plays beside a rollout that asks as it should, and asks once itself in the end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from agentgrpo.programs import endpoint
from agentgrpo.programs.conversations import Conversations
from agentgrpo.programs.messages import BadRequest
from agentgrpo.types import Status
from tests.playing import scripted
from tests.programs.test_play import asking, played, turn

CHAT_PATH = "/v1/chat/completions"
GOOD = {"model": "policy", "messages": [{"role": "user", "content": "Q"}]}
CLOSED = (0, 400, 413)
"""The connection ends, with or without having said why."""


class Raw:
    """One connection, without a client's good manners."""

    def __init__(self, port: int, key: str) -> None:
        self.port, self.key = port, key

    def head(self, length: int | str | None, path: str = CHAT_PATH, **more: str) -> bytes:
        """Of a request."""
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {self.key}"]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    def whole(self, body: bytes, **more: str) -> bytes:
        """A request."""
        return self.head(len(body), **more) + body

    async def send(
        self, *pieces: bytes, every_s: float = 0.0, read: bool = True, cut: bool = False
    ) -> int:
        """Send them; the status that is answered, 0 if the connection ends without one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(every_s)
            if cut:
                await reader.read(1)
                return 0
            if not read:
                await asyncio.sleep(0.3)
                return 0
            line = await asyncio.wait_for(reader.readline(), 20)
            return int(line.split()[1]) if line else 0
        except ConnectionError:
            return 0
        finally:
            writer.close()


Attack = Callable[[Raw], Coroutine[Any, Any, int]]
STREAM = json.dumps({**GOOD, "stream": True}).encode()
PART, MIB = b"10000\r\n" + b" " * 0x10000 + b"\r\n", 1 << 20
ATTACKS: dict[str, tuple[Attack, int | tuple[int, ...]]] = {
    "half a JSON": (lambda raw: raw.send(raw.whole(b'{"model": ')), 400),
    "nested deeply": (lambda raw: raw.send(raw.whole(b"[" * 99_999)), 400),
    "half of a surrogate pair": (
        lambda raw: raw.send(raw.whole(json.dumps({**GOOD, "\ud800": 1}).encode())), 400,
    ),
    "no UTF-8": (lambda raw: raw.send(raw.whole(b'{"model": "\xff\xfe"}')), 400),
    "50 MB": (lambda raw: raw.send(raw.head(50 * MIB), *[b" " * MIB] * 50), CLOSED),
    "50 MB in chunks": (
        lambda raw: raw.send(raw.head(None, Transfer_Encoding="chunked"), *[PART] * 800), CLOSED,
    ),
    "less than it says": (lambda raw: raw.send(raw.head(100), b"{", cut=False), 408),
    "a body without end": (
        lambda raw: raw.send(raw.head(10_000), *[b" "] * 99, every_s=0.02), (0, 408),
    ),
    "a head of 9 MB": (lambda raw: raw.send(b"GET /", *[b"x" * MIB] * 9), CLOSED),
    "a stream that nobody reads": (lambda raw: raw.send(raw.whole(STREAM), read=False), 0),
    "a stream that is cut": (lambda raw: raw.send(raw.whole(STREAM), cut=True), 0),
}  # fmt: skip


WITHOUT_END = ("less than it says", "a body without end")


@pytest.mark.parametrize("name", ATTACKS)
def test_bad_request_gets_an_error_and_others_are_unaffected(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    attack, expected = ATTACKS[name]
    if name in WITHOUT_END:  # any other has the time that a busy machine takes
        monkeypatch.setattr(endpoint, "BODY_S", 0.5)
    said: list[int] = []

    async def program(client: Any, o: Any) -> str:
        if not said:
            said.append(-1)
            port = urlsplit(str(client.base_url)).port
            said[0] = await attack(Raw(port or 0, client.api_key))
        return str((await o.ask(GOOD["messages"])).choices[0].message.content)

    with caplog.at_level(logging.WARNING):
        groups, _ = played(asking(program), lambda *_: turn("fine"), n=2)
    rollouts = groups[0].rollouts
    assert [(r.answer, r.status) for r in rollouts] == [("fine", Status.COMPLETED)] * 2
    assert said[0] in (expected if isinstance(expected, tuple) else (expected,))
    assert [len(r.turns) for r in rollouts][1:] == [1]
    assert not caplog.records
    assert "Traceback" not in "".join(capfd.readouterr())


def test_large_request_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown to the model on another thread; here that waits for the other rollout."""
    answered, whole = threading.Event(), Conversations.prompt
    waited: list[bool] = []

    def prompt(self: Any, messages: Any, tools: Any) -> Any:
        if messages[0].content.startswith("large"):
            waited.append(answered.wait(10))
        return whole(self, messages, tools)

    monkeypatch.setattr(Conversations, "prompt", prompt)
    turns = iter(range(9))

    async def program(_: Any, o: Any) -> None:
        large = next(turns) == 0
        await o.ask([{"role": "user", "content": "large" * 9999 if large else "Q"}])
        if not large:
            answered.set()

    engine = scripted(lambda *_: turn("x"), max_model_len=99_999)
    played(asking(program), engine, n=2)
    assert waited == [True]


def test_connections_are_limited_and_end_with_the_rollout() -> None:
    """As of a session of the sandbox, which has a listener of its own."""
    made, most = endpoint.Endpoint(), endpoint.CONNECTIONS
    session: Any = SimpleNamespace(max_model_len=99)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listening = made.listen(listener.dup(), session).result()
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(most + 9)]
        ask = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
        refused = [client for client in clients if not _answers(client, ask)]
        assert len(refused) == 9
        made.stop_listening(listening)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), made._loop).result()  # until it has
        assert not any(_answers(client, ask) for client in clients)
        for client in clients:
            client.close()
    made.close()


def test_body_counts_until_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only until it is there: large ones are read one at a time."""
    monkeypatch.setattr(endpoint, "RECEIVED_MIB", 1)
    session: Any = SimpleNamespace(receiving=0)

    def request() -> Any:
        async def stream() -> Any:
            for _ in range(3):
                yield bytes(200 << 10)

        return SimpleNamespace(headers={}, stream=stream)

    async def two_at_once() -> None:
        async with endpoint.body_of(request(), session) as raw:
            assert session.receiving == len(raw) == 600 << 10
            with pytest.raises(BadRequest, match="may send 1 MiB at once"):
                async with endpoint.body_of(request(), session):
                    pass
            assert session.receiving == len(raw)
        async with endpoint.body_of(request(), session):
            pass
        assert session.receiving == 0

    asyncio.run(two_at_once())


def _answers(client: Any, ask: bytes) -> bool:
    client.settimeout(20)
    try:
        client.sendall(ask)
        said = b""
        while not said.endswith(b"}"):
            more = client.recv(9999)
            if not more:
                return False
            said += more
    except ConnectionError:
        return False
    return True

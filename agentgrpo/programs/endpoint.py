"""The endpoint that programs ask: OpenAI's and Anthropic's protocols over HTTP, on a loopback port.

It is no second engine and no proxy: a request becomes a turn of the loop that plays all rollouts,
on the same weights. Its thread reads, renders, encodes and writes; the engine's thread samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import os
import re
import resource
import secrets
import socket
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from agentgrpo.actions import InfrastructureError
from agentgrpo.programs.anthropic import MESSAGES
from agentgrpo.programs.messages import BadRequest
from agentgrpo.programs.requests import CHAT, MODEL, Api
from agentgrpo.programs.responses import RESPONSES
from agentgrpo.programs.session import Pending, Session
from agentgrpo.support.user_calls import event_loop, print_stderr

BODY_MIB, BODY_S = 8, 60.0
"""What a request's body may have, and how long it may take to come."""
READ_MIB = 64
"""Of a request that is answered before its end: what is still read, so that the answer is."""
RECEIVED_MIB = 32
"""Of bodies that a rollout sends at once."""
HEAD_KIB = 64
"""Of a request's line and headers."""
KEEP_ALIVE_S = 5.0
"""Between the comments of a stream that waits for its turn."""
CONNECTIONS = 128
"""Of a session of the sandbox, which needs few."""
DESCRIPTORS = 1 << 16
STATUS = {
    "rollout_over": 403, "rate_limit": 429, "too_large": 413, "invalid_api_key": 401,
    "timeout": 408, "not_offered": 404,
}  # fmt: skip
APIS = {
    "/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES,
}  # fmt: skip
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Listening:
    """A socket that is answered on."""

    server: asyncio.Server
    state: Any

    def close(self) -> None:
        """On the endpoint's thread: the socket, and every connection that came by it."""
        self.server.close()
        for connection in [*self.state.connections]:
            connection.transport.abort()


def raise_descriptors() -> None:
    """Let this process have as many connections as it may, up to DESCRIPTORS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def ask_directly() -> None:
    """Have no client in this process ask the endpoint by a proxy of the environment's."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host for host in known.split(",") if host]
    if "*" not in hosts:
        hosts = list(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)


def connection_class(app: Any) -> Any:
    """HTTP by uvicorn for clients that are not trusted: what they send has a size, and `most` of
    them may be connected to a listener.
    """
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    config = uvicorn.Config(
        app, http="httptools", ws="none", access_log=False, log_config=None, lifespan="off",
        server_header=False,
    )  # fmt: skip
    config.load()
    quiet = logging.getLogger(f"{__name__}.clients")
    quiet.setLevel(logging.ERROR)  # not each client that sends no HTTP; what the app raises

    class Connection(HttpToolsProtocol):
        def __init__(self, *, most: float, **more: Any) -> None:
            super().__init__(config=config, **more)
            self.logger, self._most = quiet, most
            self._got, self._limit = 0, HEAD_KIB << 10

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > self._most:
                transport.abort()

        def data_received(self, data: bytes) -> None:
            self._got += len(data)
            super().data_received(data)
            if self._got > self._limit:
                self.transport.abort()

        def on_message_begin(self) -> None:
            self._got, self._limit = 0, HEAD_KIB << 10
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._limit = READ_MIB << 20
            super().on_headers_complete()

    return Connection


class Endpoint:
    """A server on 127.0.0.1, and the sessions that it knows by their keys."""

    def __init__(self) -> None:
        raise_descriptors()
        ask_directly()
        self._loop = event_loop("endpoint")
        self._sessions: dict[str, Session] = {}
        self._connection: Any = None
        self.port: int = self.run(self._start())

    def run(self, work: Awaitable[Result]) -> Result:
        async def wait() -> Result:
            return await work

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self, make: Callable[[str], Session]) -> Session:
        """A session under a new key, which nobody can guess."""

        async def work() -> Session:
            key = f"sk-{secrets.token_urlsafe(24)}"
            session = self._sessions[key] = make(key)
            return session

        return self.run(work())

    def end(self, session: Session) -> None:
        async def work() -> None:
            self._sessions.pop(session.key, None)
            session.close()

        self.run(work())

    def listen(self, listener: socket.socket, session: Session) -> Future[Listening]:
        """Answer on a socket that listens elsewhere, as that session whatever key is sent."""
        return asyncio.run_coroutine_threadsafe(self._serve(listener, session), self._loop)

    def hang_up(self, listening: Listening) -> None:
        """Close a socket of listen(), and all connections that came by it."""
        self._loop.call_soon_threadsafe(listening.close)

    def close(self) -> None:
        async def work() -> None:
            self._listening.close()

        self.run(work())

    async def _start(self) -> int:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listening = await self._serve(listener, None)
        return int(listener.getsockname()[1])

    async def _serve(self, listener: socket.socket, session: Session | None) -> Listening:
        from uvicorn.server import ServerState

        if self._connection is None:
            self._connection = connection_class(self._app())
        state = ServerState()
        make = functools.partial(
            self._connection, server_state=state, app_state={"session": session},
            most=math.inf if session is None else CONNECTIONS,
        )  # fmt: skip
        return Listening(await self._loop.create_server(make, sock=listener), state)

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        def post(path: str, api: Api, answer: Any) -> Any:
            return Route(path, self._answering(answer, api), methods=["POST"])

        nothing = functools.partial(self._answering, _nothing_there)
        return Starlette(
            routes=[
                *(post(p, api, functools.partial(self._turn, api)) for p, api in APIS.items()),
                Route("/v1/models", self._answering(self._models), methods=["GET"]),
                Route("/v1/messages{path:path}", nothing(MESSAGES), methods=METHODS),
                Route("/{path:path}", nothing(CHAT), methods=METHODS),
            ]
        )

    def _answering(self, answer: Callable[[Any, Session], Awaitable[Any]], api: Api = CHAT) -> Any:
        """What a route calls: finds the session, and says errors as its protocol does."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response

        told = False

        async def respond(request: Any) -> Any:
            nonlocal told
            session = None
            try:
                session = self._session_of(request)
                return await answer(request, session)
            except ClientDisconnect:
                return Response(status_code=499)
            except BadRequest as error:
                if session is not None:
                    session.last_refusal = str(error)
                body, code = refusal(api, session, error)
                return answered(body, code, {"retry-after": "1"} if code == 429 else None)
            except InfrastructureError as error:
                return answered(*refusal(api, session, error), {"x-should-retry": "false"})
            except Exception as error:  # a fault of ours, of this request alone
                said = f"the endpoint failed at {request.url.path}: {type(error).__name__}: {error}"
                if not told:
                    told = True
                    print_stderr("".join([*traceback.format_exception(error), said]))
                fault = refusal(api, session, InfrastructureError(said))
                return answered(*fault, {"x-should-retry": "false"})

        return respond

    def _session_of(self, request: Any) -> Session:
        given: Session | None = request.scope["state"].get("session")
        if given is not None:
            return given
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        session = self._sessions.get(key)
        if session is None:
            raise BadRequest("the API key is of no rollout that is played", "invalid_api_key")
        return session

    async def _models(self, request: Any, session: Session) -> Any:
        """The one model, as OpenAI's and Anthropic's clients read it."""
        one = {
            "id": MODEL, "object": "model", "created": 0, "owned_by": "agentgrpo", "type": "model",
            "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z",
            "max_model_len": session.max_model_len,
        }  # fmt: skip
        ends = {"first_id": MODEL, "last_id": MODEL, "has_more": False}
        return answered({"object": "list", "data": [one], **ends})

    async def _turn(self, api: Api, request: Any, session: Session) -> Any:
        from starlette.responses import Response, StreamingResponse

        pending = await begun(request, session, api)
        if pending.asked.stream:
            response = StreamingResponse(
                _events(api, session, pending), media_type="text/event-stream",
                headers={"cache-control": "no-cache"},
            )  # fmt: skip

            async def stream(*connection: Any) -> None:
                try:
                    await response(*connection)
                finally:
                    session.leave(pending)

            return stream
        try:
            if not await _is_whole(pending.turn, request):
                return Response(status_code=499)  # nobody is there to read it
            return answered(api.to_json(session.deliver(pending)))
        finally:
            session.leave(pending)


async def _nothing_there(request: Any, session: Session) -> Any:
    raise BadRequest(
        f"{request.method} {request.url.path} is not offered: there are POST {', '.join(APIS)} and "
        "GET /v1/models", "not_offered",
    )  # fmt: skip


def refusal(api: Api, session: Session | None, error: Exception) -> tuple[dict[str, Any], int]:
    """An error as its protocol writes it, with # for numbers: a program may print it, and a reward
    take a number in it for the answer.
    """
    status = STATUS.get(error.code or "", 400) if isinstance(error, BadRequest) else 500
    if session is not None:
        session.refusals.add(re.sub(r"\d+", "#", str(error)))
    said = json.dumps(api.error(error, status), ensure_ascii=False)
    return json.loads(re.sub(r"\d+", "#", said)), status


def answered(said: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
    """A response of JSON; in ASCII, as half of a surrogate pair has no other bytes."""
    from starlette.responses import Response

    return Response(json.dumps(said), status, headers, "application/json")


async def begun(request: Any, session: Session, api: Api) -> Pending:
    """A turn that is sampled for a request."""
    async with body_of(request, session) as raw:
        session.require_size(len(raw))
        asked = await session.run_off_loop(len(raw), lambda: api.read(json_object(raw)))
        return await session.begin(asked, len(raw))


@contextlib.asynccontextmanager
async def body_of(request: Any, session: Session) -> AsyncIterator[bytes]:
    """The body of a request, which counts among what the rollout sends at once until it is read."""
    too_large = BadRequest(f"a request may have {BODY_MIB} MiB", "too_large")
    told = request.headers.get("content-length", "0")
    if not told.isdigit() or int(told) > BODY_MIB << 20:
        raise too_large
    raw = bytearray()
    try:
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in request.stream():
                    raw += piece
                    session.receiving += len(piece)
                    if len(raw) > BODY_MIB << 20:
                        raise too_large
                    if session.receiving > RECEIVED_MIB << 20:
                        most = f"a rollout may send {RECEIVED_MIB} MiB at once"
                        raise BadRequest(most, "rate_limit")
        except TimeoutError:
            late = f"the body did not come within {BODY_S:g} s"
            raise BadRequest(late, "timeout") from None
        yield bytes(raw)
    finally:
        session.receiving -= len(raw)


def json_object(raw: bytes) -> Mapping[str, Any]:
    """The JSON object that a body is."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body: expected an object, got {body!r:.80}")
    return body


async def _is_whole(turn: asyncio.Future[Any], request: Any) -> bool:
    """Wait for a turn; false if its client goes away before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    left = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({turn, left}, return_when=asyncio.FIRST_COMPLETED)
        return not left.done()
    finally:
        left.cancel()


async def _events(api: Api, session: Session, pending: Pending) -> AsyncIterator[str]:
    """A stream: comments while the turn is sampled, then all of it."""
    while not pending.turn.done():
        await asyncio.wait({pending.turn}, timeout=KEEP_ALIVE_S)
        yield ": waiting\n\n"
    try:
        reply = session.deliver(pending)
    except (BadRequest, InfrastructureError) as error:
        yield framed({**refusal(api, session, error)[0], "type": "error"})
        return
    for data in api.to_stream(reply, pending.asked.usage_in_stream):
        await asyncio.sleep(0)  # others have their turn, and a client that left is noticed
        yield framed(data)


def framed(data: Mapping[str, Any] | str) -> str:
    """A server-sent event, named where its data has a type."""
    if isinstance(data, str):
        return f"data: {data}\n\n"
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"

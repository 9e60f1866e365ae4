"""The endpoint for programs: OpenAI's and Anthropic's protocols over HTTP on a loopback port.

There is no second engine and no proxy: a request becomes a turn of the loop that plays all
rollouts, with the same weights. The endpoint's thread parses, renders, encodes and responds; the
engine's thread samples.
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
import socket
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from agentgrpo.actions import InfrastructureError
from agentgrpo.programs.anthropic import MESSAGES
from agentgrpo.programs.messages import BadRequest
from agentgrpo.programs.requests import CHAT, MODEL, Api
from agentgrpo.programs.responses import RESPONSES
from agentgrpo.programs.session import Pending, Session
from agentgrpo.support.user_calls import event_loop, print_stderr

BODY_MIB, BODY_S = 8, 60.0
"""Maximum size of a request's body, and how long it may take to arrive."""
READ_MIB = 64
"""How much of a request is read after an early response, so that the client reads the response."""
RECEIVED_MIB = 32
"""Maximum size of all bodies that a rollout sends at the same time."""
HEAD_KIB = 64
"""Maximum size of a request's line and headers."""
KEEP_ALIVE_S = 5.0
"""Interval of the comments in a stream that waits for its turn."""
CONNECTIONS = 128
"""Maximum connections of a sandbox session, which needs few."""
DESCRIPTORS = 1 << 16
STATUS = {
    "rollout_over": 403, "rate_limit": 429, "too_large": 413, "invalid_api_key": 401,
    "timeout": 408, "not_offered": 404,
}  # fmt: skip
APIS = {
    "/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES,
}  # fmt: skip
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@dataclass(frozen=True, slots=True)
class Listening:
    """A listening socket."""

    server: asyncio.Server
    state: Any

    def close(self) -> None:
        """Close the socket and its connections. Call it on the endpoint's thread."""
        self.server.close()
        for connection in [*self.state.connections]:
            connection.transport.abort()


def raise_descriptor_limit() -> None:
    """Raise the limit of open files to the hard limit, up to DESCRIPTORS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, target), hard))


def bypass_proxy_for_loopback() -> None:
    """Make clients in this process connect to the endpoint without the environment's proxy."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host for host in known.split(",") if host]
    if "*" not in hosts:
        hosts = list(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)


def connection_class(app: Any) -> Any:
    """Uvicorn's HTTP protocol for untrusted clients: it limits request sizes and connections."""
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    config = uvicorn.Config(
        app, http="httptools", ws="none", access_log=False, log_config=None, lifespan="off",
        server_header=False,
    )  # fmt: skip
    config.load()
    logger = logging.getLogger(f"{__name__}.clients")
    logger.setLevel(logging.ERROR)  # hides warnings about clients that send invalid HTTP

    class Connection(HttpToolsProtocol):
        def __init__(self, *, max_connections: float, **kwargs: Any) -> None:
            super().__init__(config=config, **kwargs)
            self.logger, self._most = logger, max_connections
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
    """A server on 127.0.0.1, with one session per API key."""

    def __init__(self) -> None:
        raise_descriptor_limit()
        bypass_proxy_for_loopback()
        self._loop = event_loop("endpoint")
        self._sessions: dict[str, Session] = {}
        self._connection = connection_class(self._app())
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = listener.getsockname()[1]
        self._listening = self.listen(listener, None).result()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self, session: Session) -> None:
        self._sessions[session.key] = session

    def end(self, session: Session) -> None:
        """Close a session on the endpoint's thread, after which it does not change any more."""

        async def close() -> None:
            session.close()

        self._sessions.pop(session.key, None)
        asyncio.run_coroutine_threadsafe(close(), self._loop).result()

    def listen(self, listener: socket.socket, session: Session | None) -> Future[Listening]:
        """Serve a session on a socket in its sandbox. The key in requests is ignored there."""
        return asyncio.run_coroutine_threadsafe(self._serve(listener, session), self._loop)

    def stop_listening(self, listening: Listening) -> None:
        self._loop.call_soon_threadsafe(listening.close)

    def close(self) -> None:
        self.stop_listening(self._listening)

    async def _serve(self, listener: socket.socket, session: Session | None) -> Listening:
        from uvicorn.server import ServerState

        state = ServerState()
        make_connection = functools.partial(
            self._connection, server_state=state, app_state={"session": session},
            max_connections=math.inf if session is None else CONNECTIONS,
        )  # fmt: skip
        return Listening(await self._loop.create_server(make_connection, sock=listener), state)

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        def post(path: str, api: Api, answer: Any) -> Any:
            return Route(path, self._make_handler(answer, api), methods=["POST"])

        nothing = functools.partial(self._make_handler, _not_found)
        return Starlette(
            routes=[
                *(post(p, api, functools.partial(self._turn, api)) for p, api in APIS.items()),
                Route("/v1/models", self._make_handler(self._models), methods=["GET"]),
                Route("/v1/messages{path:path}", nothing(MESSAGES), methods=METHODS),
                Route("/{path:path}", nothing(CHAT), methods=METHODS),
            ]
        )

    def _make_handler(
        self, answer: Callable[[Any, Session], Awaitable[Any]], api: Api = CHAT
    ) -> Any:
        """Wrap a route's function: find the session, and format errors for the protocol."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response

        is_reported = False

        async def respond(request: Any) -> Any:
            nonlocal is_reported
            session = None
            try:
                session = self._session_of(request)
                return await answer(request, session)
            except ClientDisconnect:
                return Response(status_code=499)
            except BadRequest as error:
                if session is not None:
                    session.last_refusal = str(error)
                body, code = error_response(api, session, error)
                return json_response(body, code, {"retry-after": "1"} if code == 429 else None)
            except InfrastructureError as error:
                return json_response(
                    *error_response(api, session, error), {"x-should-retry": "false"}
                )
            except Exception as error:  # a bug of the endpoint: only this request fails
                message = (
                    f"the endpoint failed at {request.url.path}: {type(error).__name__}: {error}"
                )
                if not is_reported:
                    is_reported = True
                    print_stderr("".join([*traceback.format_exception(error), message]))
                response_parts = error_response(api, session, InfrastructureError(message))
                return json_response(*response_parts, {"x-should-retry": "false"})

        return respond

    def _session_of(self, request: Any) -> Session:
        session_of_listener: Session | None = request.scope["state"].get("session")
        if session_of_listener is not None:
            return session_of_listener
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        session = self._sessions.get(key)
        if session is None:
            raise BadRequest("the API key is of no rollout that is played", "invalid_api_key")
        return session

    async def _models(self, request: Any, session: Session) -> Any:
        model = {
            "id": MODEL, "object": "model", "created": 0, "owned_by": "agentgrpo", "type": "model",
            "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z",
            "max_model_len": session.max_model_len,
        }  # fmt: skip
        ends = {"first_id": MODEL, "last_id": MODEL, "has_more": False}
        return json_response({"object": "list", "data": [model], **ends})

    async def _turn(self, api: Api, request: Any, session: Session) -> Any:
        from starlette.responses import Response, StreamingResponse

        pending = await begin_turn(request, session, api)
        if pending.request.stream:
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
            if not await _wait_for_turn(pending.turn, request):
                return Response(status_code=499)  # the client has disconnected
            return json_response(api.to_json(session.deliver(pending)))
        finally:
            session.leave(pending)


async def _not_found(request: Any, session: Session) -> Any:
    raise BadRequest(
        f"{request.method} {request.url.path} is not offered: there are POST {', '.join(APIS)} and "
        "GET /v1/models", "not_offered",
    )  # fmt: skip


def error_response(
    api: Api, session: Session | None, error: Exception
) -> tuple[dict[str, Any], int]:
    """Format an error for its protocol, with # in place of numbers.

    A program may print the error, and a reward must not read a number in it as the answer.
    """
    status = STATUS.get(error.code or "", 400) if isinstance(error, BadRequest) else 500
    if session is not None:
        session.refusals.add(re.sub(r"\d+", "#", str(error)))
    text = json.dumps(api.error(error, status), ensure_ascii=False)
    return json.loads(re.sub(r"\d+", "#", text)), status


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
    """A JSON response in ASCII, since a lone surrogate has no UTF-8 encoding."""
    from starlette.responses import Response

    return Response(json.dumps(body), status, headers, "application/json")


async def begin_turn(request: Any, session: Session, api: Api) -> Pending:
    """Parse a request and start sampling its turn."""
    async with body_of(request, session) as raw:
        session.require_size(len(raw))
        turn_request = await session.run_off_loop(len(raw), lambda: api.read(json_object(raw)))
        return await session.begin(turn_request, len(raw))


@contextlib.asynccontextmanager
async def body_of(request: Any, session: Session) -> AsyncIterator[bytes]:
    """Receive a request's body. Its size counts against RECEIVED_MIB until the context ends."""
    too_large = BadRequest(f"a request may have {BODY_MIB} MiB", "too_large")
    declared_size = request.headers.get("content-length", "0")
    if not declared_size.isdigit() or int(declared_size) > BODY_MIB << 20:
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
                        message = f"a rollout may send {RECEIVED_MIB} MiB at once"
                        raise BadRequest(message, "rate_limit")
        except TimeoutError:
            message = f"the body did not come within {BODY_S:g} s"
            raise BadRequest(message, "timeout") from None
        yield bytes(raw)
    finally:
        session.receiving -= len(raw)


def json_object(raw: bytes) -> Mapping[str, Any]:
    """Parse a body as a JSON object."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body: expected an object, got {body!r:.80}")
    return body


async def _wait_for_turn(turn: asyncio.Future[Any], request: Any) -> bool:
    """Wait for a turn. Returns False if its client disconnects first."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    disconnected = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({turn, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        return not disconnected.done()
    finally:
        disconnected.cancel()


async def _events(api: Api, session: Session, pending: Pending) -> AsyncIterator[str]:
    """Stream a turn: comments while it is sampled, then the whole turn."""
    while not pending.turn.done():
        await asyncio.wait({pending.turn}, timeout=KEEP_ALIVE_S)
        yield ": waiting\n\n"
    try:
        reply = session.deliver(pending)
    except (BadRequest, InfrastructureError) as error:
        yield server_sent_event({**error_response(api, session, error)[0], "type": "error"})
        return
    for data in api.to_stream(reply, pending.request.usage_in_stream):
        await asyncio.sleep(0)  # lets other requests run, and a disconnected client be noticed
        yield server_sent_event(data)


def server_sent_event(data: Mapping[str, Any] | str) -> str:
    """Format a server-sent event. Its name is the type of its data, if it has one."""
    if isinstance(data, str):
        return f"data: {data}\n\n"
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n"

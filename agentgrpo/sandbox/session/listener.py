"""Gives the host a listening socket inside a session's network namespace.

A session's network namespace has only a loopback device. Before untrusted code runs, the
interpreter opens a listener there and passes its descriptor to the host through a unix socket. A
socket stays in its namespace, so a host process that accepts on it serves the session. Other
sessions cannot connect to it, and closing the socket ends the connection to the host.
"""

import contextlib
import socket

from agentgrpo.sandbox.isolation.errors import NotSupportedException, SandboxInfraError
from agentgrpo.sandbox.isolation.template import Template
from agentgrpo.sandbox.session.interpreters import start_context
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.step_result import StepStatus

PORT = 8000
BACKLOG = 256
SOCKET_FILE = ".endpoint"
SEND_LISTENER = """
def _send_listener(path, port, backlog):
    import socket, sys
    with socket.socket(socket.AF_UNIX) as host, socket.socket() as listener:
        host.connect(path)
        listener.bind(("127.0.0.1", port))
        listener.listen(backlog)
        right = listener.fileno().to_bytes(4, sys.byteorder)
        host.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, right)])  # Python 3.6
_send_listener({path!r}, {port}, {backlog})
del _send_listener
"""


def listener_in(session: Session, port: int = PORT) -> socket.socket:
    """Return a non-blocking socket that listens on 127.0.0.1:port of a session in which no
    untrusted code has run yet. The caller closes it.

    Raises:
        SandboxInfraError: the session did not send a listener.
        NotSupportedException: the session has no network namespace, or its image no python3.
    """
    if not session.places.own_root:
        raise NotSupportedException("a session without namespaces has no network of its own")
    with contextlib.ExitStack() as opened:
        files = opened.enter_context(contextlib.closing(session.files()))
        host = opened.enter_context(socket.socket(socket.AF_UNIX))
        python = session
        if session.places.image is not None:  # its own interpreter is bash
            python = start_context(session, "python", Template())
            opened.callback(python.close)
        path = files._bind(host, SOCKET_FILE)
        host.settimeout(session.limits.timeout_s)
        host.listen(1)
        result = python.step(SEND_LISTENER.format(path=path, port=port, backlog=BACKLOG))
        files.remove(SOCKET_FILE)
        if result.status is not StepStatus.OK:
            reason = result.error or result.detail
            raise SandboxInfraError(f"the session did not send a listener: {reason}")
        with host.accept()[0] as connection:
            connection.settimeout(session.limits.timeout_s)
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if len(descriptors) != 1:
            raise SandboxInfraError("the session did not send a listener: no descriptor")
    listener = socket.socket(fileno=descriptors[0])
    listener.setblocking(False)
    return listener

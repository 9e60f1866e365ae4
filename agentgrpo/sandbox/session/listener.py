"""A server of the host's that a session reaches at an address of its own.

A session has its own network namespace, with nothing but a loopback. Its interpreter, before any
untrusted code runs, makes a listener there and hands it out through a socket file; a socket keeps
its namespace, so whoever accepts on it answers from outside. Nothing else crosses, no other session
can connect to it, and closing it ends it.
"""

import contextlib
import socket

from agentgrpo.sandbox.isolation.errors import NotSupportedException, SandboxInfraError
from agentgrpo.sandbox.session.result import StepStatus
from agentgrpo.sandbox.session.session import Session

PORT = 8000
BACKLOG = 256
MEETING = ".endpoint"
HAND_OUT = """
def _hand_out(path, port, backlog):
    import os, socket
    with socket.socket(socket.AF_UNIX) as host, socket.socket() as listener:
        host.connect(path)
        listener.bind(("127.0.0.1", port))
        listener.listen(backlog)
        socket.send_fds(host, [b"x"], [listener.fileno()])
_hand_out({path!r}, {port}, {backlog})
del _hand_out
"""


def listener_in(session: Session, port: int = PORT) -> socket.socket:
    """A socket that listens on the 127.0.0.1:port of a session in which no code of others has run;
    the caller closes it. SandboxInfraError if the session does not hand one out,
    NotSupportedException if it has no network of its own.
    """
    if not session.places.own_root:
        raise NotSupportedException("without namespaces a session has no network of its own")
    with contextlib.closing(session.files()) as files, socket.socket(socket.AF_UNIX) as host:
        path = files._bind(host, MEETING)
        host.settimeout(session.limits.timeout_s)
        host.listen(1)
        done = session.step(HAND_OUT.format(path=path, port=port, backlog=BACKLOG))
        files.remove(MEETING)
        if done.status is not StepStatus.OK:
            raise SandboxInfraError(f"a session gave no listener: {done.error or done.detail}")
        with host.accept()[0] as given:
            given.settimeout(session.limits.timeout_s)
            _, (descriptor,), _, _ = socket.recv_fds(given, 1, 1)
    made = socket.socket(fileno=descriptor)
    made.setblocking(False)
    return made

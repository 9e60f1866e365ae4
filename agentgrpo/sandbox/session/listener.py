"""A server of the host's that a session reaches at an address of its own.

A session has its own network namespace, with nothing but a loopback. Its interpreter, before any
untrusted code runs, makes a listener there and hands it out through a socket file; a socket keeps
its namespace, so whoever accepts on it answers from outside. Nothing else crosses, no other session
can connect to it, and closing it ends it.
"""

import contextlib
import socket

from agentgrpo.sandbox.isolation.errors import NotSupportedException, SandboxInfraError
from agentgrpo.sandbox.isolation.template import Template
from agentgrpo.sandbox.session.interpreters import start_context
from agentgrpo.sandbox.session.result import StepStatus
from agentgrpo.sandbox.session.session import Session

PORT = 8000
BACKLOG = 256
MEETING = ".endpoint"
HAND_OUT = """
def _hand_out(path, port, backlog):
    import socket, sys
    with socket.socket(socket.AF_UNIX) as host, socket.socket() as listener:
        host.connect(path)
        listener.bind(("127.0.0.1", port))
        listener.listen(backlog)
        right = listener.fileno().to_bytes(4, sys.byteorder)
        host.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, right)])  # Python 3.6
_hand_out({path!r}, {port}, {backlog})
del _hand_out
"""


def listener_in(session: Session, port: int = PORT) -> socket.socket:
    """A socket that listens on the 127.0.0.1:port of a session in which no code of others has run;
    the caller closes it. SandboxInfraError if the session does not hand one out,
    NotSupportedException if it has no network of its own, or its image no python3.
    """
    if not session.places.own_root:
        raise NotSupportedException("without namespaces a session has no network of its own")
    with contextlib.ExitStack() as held:
        files = held.enter_context(contextlib.closing(session.files()))
        host = held.enter_context(socket.socket(socket.AF_UNIX))
        python = session
        if session.places.image is not None:
            python = start_context(session, "python", Template())
            held.callback(python.close)
        path = files._bind(host, MEETING)
        host.settimeout(session.limits.timeout_s)
        host.listen(1)
        done = python.step(HAND_OUT.format(path=path, port=port, backlog=BACKLOG))
        files.remove(MEETING)
        if done.status is not StepStatus.OK:
            raise SandboxInfraError(f"a session gave no listener: {done.error or done.detail}")
        with host.accept()[0] as given:
            given.settimeout(session.limits.timeout_s)
            _, descriptors, _, _ = socket.recv_fds(given, 1, 1)
        if len(descriptors) != 1:
            raise SandboxInfraError("a session gave no listener: it sent none")
    made = socket.socket(fileno=descriptors[0])
    made.setblocking(False)
    return made
